"""One linear layer for all modules, whose kernel is either an array of floats or quantised."""

from dataclasses import dataclass, field
from typing import Any

import jax
from flax.linen.dtypes import canonicalize_dtype

from jaxfused import ops
from jaxfused.dispatch import Implementation
from jaxfused.modules.promotion import floating
from jaxfused.quantization.quantize import quantize_rows
from jaxfused.quantization.quantized_array import QuantizedArray


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedKernel:
    """The replacement for the kernel [D, F] of a linear layer once the kernel is quantised.

    Attributes:
      array: of shape [..., D, F], as `jaxfused.quantize` makes it.
      input_dtype: to which the layer's inputs are quantised, row by row: "int8", "float8_e4m3fn" or
        "float8_e5m2"; None leaves them as they are.

    Example:
      >>> import jax.numpy as jnp, jaxfused
      >>> jaxfused.QuantizedKernel(jaxfused.quantize(jnp.ones((4, 2))), "int8").array.shape
      (4, 2)
    """

    array: QuantizedArray
    input_dtype: str | None = field(default=None, metadata=dict(static=True))


Kernel = jax.Array | QuantizedKernel


def promoted(x: jax.Array, *parameters: Kernel | None, dtype: Any) -> jax.Array:
    """Returns x in `dtype`, or in the dtype to which x and the float parameters promote, as in Flax."""
    floats = [p for p in parameters if isinstance(p, jax.Array)]
    return x.astype(canonicalize_dtype(x, *floats, dtype=dtype))


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
    """Runs `jaxfused.linear`, or `jaxfused.quantized_matmul` with a result of the same dtype."""
    bias = floating(bias, x.dtype)
    if not isinstance(kernel, QuantizedKernel):
        return ops.linear.linear(
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
    inputs: jax.Array | QuantizedArray = x
    if kernel.input_dtype is not None:
        inputs = quantize_rows(x, kernel.input_dtype, implementation=implementation)
    return ops.quantized_matmul.quantized_matmul(
        inputs,
        kernel.array,
        bias,
        activation=activation,
        residual=residual,
        out_dtype=x.dtype if residual is None else residual.dtype,
        implementation=implementation,
    )
