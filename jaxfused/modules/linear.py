"""The linear layer of all modules; its kernel is a float array or a replacement (quantised, LoRA)."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax.linen.dtypes import canonicalize_dtype

from jaxfused.dispatch import Implementation
from jaxfused.modules.fallback import followed
from jaxfused.modules.promotion import floating
from jaxfused.ops.linear import linear as linear_operator
from jaxfused.ops.linear.linear_xla import add_residual
from jaxfused.ops.quantize.quantize import quantize, quantize_rows
from jaxfused.ops.quantized import quantized_matmul
from jaxfused.runtime.activation import activate
from jaxfused.runtime.promotion import accumulator_dtype, along_last_axis
from jaxfused.runtime.quantized_array import QuantizedArray
from jaxfused.runtime.serialization import serializable


@serializable
@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class QuantizedKernel:
    """The replacement for the kernel [D, F] of a linear layer once the kernel is quantised.

    Attributes:
      array: of shape [..., D, F], as `jaxfused.quantize` makes it; of a convolution all weights of a
        window are D.
      input_dtype: to which the layer's inputs are quantised: "int8", "float8_e4m3fn" or
        "float8_e5m2"; None leaves them as they are.
      input_divisor: [..., features], by which the inputs are divided first; `array` is of a kernel whose
        rows were multiplied by it, so that the product stays the same. None divides by nothing.
      input_scale: [...], of the quantised inputs, fixed beforehand: what is larger than it holds is
        clipped. None gives each row, or each image of a convolution, the scale that fits its largest
        magnitude.

      permutation: int32 [D], in which order the kernel's rows take the inputs, as GPTQ's checkpoints may
        have it; None for the inputs' own. Layers of convolutions have none.

    Example:
      >>> import jax.numpy as jnp, jaxfused
      >>> jaxfused.QuantizedKernel(jaxfused.quantize(jnp.ones((4, 2))), "int8").array.shape
      (4, 2)
    """

    array: QuantizedArray
    input_dtype: str | None = field(default=None, metadata=dict(static=True))
    input_divisor: jax.Array | None = None
    input_scale: jax.Array | None = None
    permutation: jax.Array | None = None

    def inputs(
        self, x: jax.Array, implementation: Implementation | None
    ) -> jax.Array | QuantizedArray:
        """Returns x as the product reads it: in the kernel's order, divided and quantised."""
        if self.permutation is not None:
            x = jnp.take(x, self.permutation, axis=-1)
        if self.input_divisor is not None:
            x = x / along_last_axis(self.input_divisor, x).astype(x.dtype)
        if self.input_dtype is None:
            return x
        if self.input_scale is None:
            return quantize_rows(x, self.input_dtype, implementation=implementation)
        # Kernels read one scale for each row: the common scale is broadcast.
        scale = jnp.broadcast_to(self.input_scale, (*x.shape[:-1], 1))
        return quantize(x, self.input_dtype, axis=-1, scale=scale)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class ObservedKernel:
    """The replacement for a kernel while a calibration looks at what its layer reads.

    Attributes:
      array: the kernel [..., D, F], of floats; of a convolution all weights of a window are D.
      layer: [...], integers that say which of the model's layers this is.
      observe: is called with (layer, x, inside), where x [..., D] is what the product reads; None where
        channels are convolved in groups. Of a convolution `inside`, which broadcasts to x, says which of
        its numbers are inputs and not padding; None where all are.
    """

    array: jax.Array
    layer: jax.Array
    observe: Callable[[jax.Array, jax.Array | None, jax.Array | None], None] = field(
        metadata=dict(static=True)
    )


@serializable
@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class LoRAKernel:
    """The replacement for a kernel to which a product of low rank is added: base + a @ b.

    The sum is never computed: the layer's product with `a @ b` is taken as (x a) b.

    Attributes:
      base: the kernel [D, F], of floats or quantised.
      a: [D, R].
      b: [R, F].
      dtype: of the products with a and b; None for x's.
    """

    base: "Kernel"
    a: jax.Array
    b: jax.Array
    dtype: Any = field(default=None, metadata=dict(static=True))

    def product(self, x: jax.Array) -> jax.Array:
        """Returns (x a) b, [..., F]."""
        dtype = x.dtype if self.dtype is None else self.dtype
        return (x.astype(dtype) @ self.a.astype(dtype)) @ self.b.astype(dtype)


@dataclass(frozen=True)
class CalledKernel:
    """The replacement for a kernel whose layer must be called, because its calls are intercepted.

    It is no pytree, and lives within one call of a model.

    Attributes:
      call: (x [..., D], precision) -> the layer's result [..., F], with its bias.
      dtype: dtype of the layer's parameters.
    """

    call: Callable[[jax.Array, jax.lax.PrecisionLike], jax.Array]
    dtype: Any


KernelStandIn = QuantizedKernel | ObservedKernel | LoRAKernel | CalledKernel
Kernel = jax.Array | KernelStandIn


def shape_of(kernel: Kernel) -> tuple[int, ...]:
    """Returns the shape of a kernel, or of the float kernel whose replacement it is."""
    if isinstance(kernel, LoRAKernel):
        return shape_of(kernel.base)
    assert not isinstance(kernel, CalledKernel)
    return kernel.shape if isinstance(kernel, jax.Array) else kernel.array.shape


def promoted(x: jax.Array, *parameters: Kernel | None, dtype: Any) -> jax.Array:
    """Returns x in `dtype`, or in the dtype to which x and the float parameters promote, as in Flax."""
    bases = [p.base if isinstance(p, LoRAKernel) else p for p in parameters]
    arrays = [p.array if isinstance(p, ObservedKernel) else p for p in bases]
    floats = [a for a in arrays if isinstance(a, jax.Array)]
    called = [jnp.zeros((), a.dtype) for a in arrays if isinstance(a, CalledKernel)]
    return x.astype(canonicalize_dtype(x, *floats, *called, dtype=dtype))


def linear(
    x: jax.Array,
    kernel: Kernel,
    bias: jax.Array | None,
    *,
    activation: str | None = None,
    residual: jax.Array | None = None,
    precision: jax.lax.PrecisionLike = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Runs `jaxfused.linear`, or for a quantised kernel `jaxfused.quantized_matmul`, in x's dtype."""
    if isinstance(kernel, CalledKernel):
        y = kernel.call(x, precision).astype(x.dtype)
        return followed(y, activation, residual, adds_first=False)
    if isinstance(kernel, LoRAKernel):
        # The activation follows the sum of two products, so that neither product's epilogue can
        # apply it.
        options: dict[str, Any] = dict(precision=precision, implementation=implementation)
        z = linear(x, kernel.base, bias, residual=kernel.product(x).astype(x.dtype), **options)
        y = activate(activation, z.astype(accumulator_dtype(x.dtype)))
        return add_residual(y, residual, x.dtype if residual is None else residual.dtype)
    if isinstance(kernel, ObservedKernel):
        kernel.observe(kernel.layer, x, None)
        kernel = kernel.array
    bias = floating(bias, x.dtype)
    if not isinstance(kernel, QuantizedKernel):
        return linear_operator.linear(
            x,
            floating(kernel, x.dtype),
            bias,
            activation=activation,
            residual=residual,
            precision=precision,
            implementation=implementation,
        )
    if precision is not None:
        raise ValueError(
            f"linear: precision={precision!r} was passed with a quantised kernel, whose product has"
            " one precision; leave it out, or keep this kernel as floats."
        )
    return quantized_matmul.quantized_matmul(
        kernel.inputs(x, implementation),
        kernel.array,
        bias,
        activation=activation,
        residual=residual,
        out_dtype=x.dtype if residual is None else residual.dtype,
        implementation=implementation,
    )
