"""Dense for Flax Linen: Flax's own parameters, this package's operator."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen
from flax.core import meta
from flax.linen.dtypes import promote_dtype
from flax.linen.linear import default_kernel_init
from flax.typing import Dtype, Initializer, PrecisionLike

from jaxfused.dispatch import Implementation
from jaxfused.linen.flax_code import flax_call, why_watched
from jaxfused.linen.fp8 import precision_of
from jaxfused.modules.fallback import (
    call_flax,
    is_stock_product,
    why_complex,
    why_given,
    why_intercepted,
)
from jaxfused.modules.linear import CalledKernel, Kernel, KernelStandIn, linear, promoted, shape_of
from jaxfused.ops.fp8.fp8 import is_fp8
from jaxfused.runtime.checks import python_number_fields


@python_number_fields
class Dense(linen.Dense):
    r"""`flax.linen.Dense` with an activation and the sum with a residual stream in the same kernel.

    .. math:: y = \text{activation}(x \cdot \text{kernel} + \text{bias}) + \text{residual}

    Attributes, parameters and their names are Flax's, so a checkpoint of one loads into the other
    and gives the same output. Differences:

    - The product is accumulated and the bias added in float32, and so is the parameters' gradient;
      each is rounded once, where Flax rounds the product, then the sum.
    - A `dot_general`, `dot_general_cls` or `promote_dtype` other than Flax's and complex numbers run
      Flax's code. Together with `residual` or a named kernel such a call raises an error.
    - The kernel may be a `jaxfused.QuantizedKernel`, as `jaxfused.quantize_params` puts it there.

    Attributes:
      activation: None or a name of `jaxfused.ACTIVATIONS`.
      implementation: None for the fastest that can run, or "pallas", "cuda", "xla".

    The other attributes are those of `flax.linen.Dense`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxfused.linen
      >>> layer = jaxfused.linen.Dense(3, activation="relu")
      >>> variables = layer.init(jax.random.key(0), jnp.ones((4, 2)))
      >>> layer.apply(variables, jnp.ones((4, 2)), residual=jnp.ones((4, 3))).shape
      (4, 3)

    Source: `jaxfused.linear`.
    """

    activation: str | None = None
    implementation: Implementation | None = None

    @linen.compact
    def __call__(self, inputs: jax.Array, *, residual: jax.Array | None = None) -> jax.Array:
        """Multiplies inputs [..., D] by the kernel.

        Args:
          inputs: [..., D].
          residual: [..., F], is added last.

        Returns:
          [..., F], of the residual's dtype where there is one.

        Raises:
          ValueError: `residual`, or a named kernel, in a call that only Flax's code can serve.
        """
        inputs = jnp.asarray(inputs)
        reason = (
            why_intercepted()
            or why_given(
                dot_general=not is_stock_product(self.dot_general),
                dot_general_cls=self.dot_general_cls is not None,
                promote_dtype=self.promote_dtype is not promote_dtype,
            )
            or why_complex(inputs.dtype, self.dtype, self.param_dtype)
        )
        if reason is not None:
            return call_flax(
                "jaxfused.linen.Dense",
                reason,
                lambda: flax_call(Dense)(self, inputs),
                residual=residual,
                activation=self.activation,
                implementation=self.implementation,
            )
        kernel, bias = _parameters(self, inputs.shape[-1])
        return linear(
            promoted(inputs, kernel, bias, dtype=self.dtype),
            kernel,
            bias,
            activation=self.activation,
            residual=residual,
            precision=precision_of(self, "linear"),
            implementation=self.implementation,
        )


def affine(
    features: int,
    *,
    name: str,
    precision: PrecisionLike = None,
    use_bias: bool = True,
    param_dtype: Dtype = jnp.float32,
    kernel_init: Initializer = default_kernel_init,
    bias_init: Initializer = linen.initializers.zeros,
) -> Callable[[int], tuple[Kernel, jax.Array | None]]:
    """Returns a function from the number of input features to (kernel, bias) of the `Dense` `name`.

    If calls of single layers are watched (see `why_watched`), a `Dense` is called when its result is
    needed: see `CalledKernel`.
    """
    options: dict[str, Any] = dict(
        use_bias=use_bias,
        param_dtype=param_dtype,
        kernel_init=kernel_init,
        bias_init=bias_init,
        name=name,
    )
    if why_watched(precision) is None:
        return Affine(features, **options).parameters

    def call(x: jax.Array, precision: Any) -> jax.Array:
        precision = None if is_fp8(precision) else precision
        return Dense(features, dtype=x.dtype, precision=precision, **options)(x)

    return lambda in_features: (CalledKernel(call, param_dtype), None)


@python_number_fields
class Affine(linen.Module):
    """The parameters of a `flax.linen.Dense`, for an operator that reads several layers' parameters.

    Attributes:
      features: F.
      use_bias: whether there is a bias [F].
      param_dtype: of the parameters.
      kernel_init: initialises the kernel [D, F].
      bias_init: initialises the bias.

    Example:
      >>> import jax
      >>> import jaxfused.linen.linear
      >>> layer = jaxfused.linen.linear.Affine(3)
      >>> (kernel, bias), _ = layer.init_with_output(jax.random.key(0), 2, method="parameters")
      >>> kernel.shape, bias.shape
      ((2, 3), (3,))
    """

    features: int
    use_bias: bool = True
    param_dtype: Dtype = jnp.float32
    kernel_init: Initializer = default_kernel_init
    bias_init: Initializer = linen.initializers.zeros

    # The method is not `__call__`, whose results (the parameters) `capture_intermediates` would
    # store.
    @linen.compact
    def parameters(self, in_features: int) -> tuple[Kernel, jax.Array | None]:
        """Returns (kernel [in_features, F], bias [F] or None)."""
        return _parameters(self, in_features)


def stand_in(layer: Any) -> KernelStandIn | None:
    """Returns the replacement of a float kernel in a layer's parameters, or None."""
    kernel = layer.get_variable("params", "kernel")
    return meta.unbox(kernel) if isinstance(kernel, KernelStandIn) else None


def _parameters(layer: Any, in_features: int) -> tuple[Kernel, jax.Array | None]:
    """Returns the kernel and bias of a `Dense` or `Affine`; the kernel may be quantised."""
    shape = (in_features, layer.features)
    kernel = stand_in(layer)
    if kernel is None:
        kernel = layer.param("kernel", layer.kernel_init, shape, layer.param_dtype)
    elif shape_of(kernel) != shape:
        raise ValueError(
            f"{layer.name}: the {type(kernel).__name__} has shape {shape_of(kernel)}, but the layer is"
            f" of {in_features} inputs and {layer.features} outputs; pass one of shape {shape}."
        )
    bias = None
    if layer.use_bias:
        bias = layer.param("bias", layer.bias_init, shape[1:], layer.param_dtype)
    return kernel, bias


def __getattr__(name: str) -> Any:
    """Returns an object of Flax's module `nn.linear`, whose name this module has too."""
    return getattr(linen.linear, name)
