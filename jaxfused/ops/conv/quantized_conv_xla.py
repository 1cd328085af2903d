"""quantized_conv in plain JAX: XLA's convolution of the stored numbers as integers or as floats."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxfused.ops.conv import conv_xla as reference_conv
from jaxfused.ops.quantized import quantized_matmul_xla
from jaxfused.runtime.activation import activate
from jaxfused.runtime.promotion import along_last_axis
from jaxfused.runtime.quantized_array import QuantizedArray


def conv(
    x: QuantizedArray,
    w: QuantizedArray,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    kernel_size: tuple[int, ...],
    activation: str | None,
    out_dtype: Any,
    with_integers: bool,
    floats: Any = jnp.float32,
    **geometry: Any,
) -> jax.Array:
    """Returns act(conv(x, w) + bias + residual) of x [B, *spatial, I] and w [taps * I / groups, O].

    Args:
      with_integers: True to convolve int8 as integers, with exact sums; else as `floats`.
      floats: a dtype that holds the stored numbers of 8 bits exactly.
    """
    y = product(
        x, w, kernel_size=kernel_size, with_integers=with_integers, floats=floats, **geometry
    )
    if bias is not None:
        y = y + along_last_axis(bias, y)
    if residual is not None:
        y = y + residual.astype(y.dtype)
    return activate(activation, y).astype(out_dtype)


def product(
    x: QuantizedArray,
    w: QuantizedArray,
    *,
    kernel_size: tuple[int, ...],
    with_integers: bool,
    floats: Any = jnp.float32,
    strides: tuple[int, ...],
    padding: str | Sequence[tuple[int, int]],
    input_dilation: tuple[int, ...],
    kernel_dilation: tuple[int, ...],
    feature_group_count: int,
) -> jax.Array:
    """Returns the float32 convolution, scaled after the sum if each output channel has one scale."""
    by_scales = w.groups == 1 and w.is_scaled and x.is_scaled and math.prod(x.scale.shape[1:]) == 1
    if by_scales:
        values, weights = x.unpacked(), w.unpacked()
    else:
        values, weights = x.dequantize(), w.dequantize()
    are_integers = jnp.issubdtype(values.dtype, jnp.integer) and jnp.issubdtype(
        weights.dtype, jnp.integer
    )
    weights = weights.reshape(*kernel_size, -1, weights.shape[-1])
    if not (are_integers and with_integers):
        # The barrier hides that the operands were 8 bits wide: XLA's GPU compiler would call cuDNN's
        # 8-bit kernels. Some do not exist for float8, and grouped integer ones return wrong sums:
        # https://github.com/openxla/xla/issues/49123.
        values, weights = jax.lax.optimization_barrier(
            (values.astype(floats), weights.astype(floats))
        )
    spatial = "HWD"[: x.ndim - 2]
    values, padding = reference_conv.padded(values, padding, kernel_size, kernel_dilation)
    y = jax.lax.conv_general_dilated(
        values,
        weights,
        window_strides=strides,
        padding=padding,
        lhs_dilation=input_dilation,
        rhs_dilation=kernel_dilation,
        dimension_numbers=(f"N{spatial}C", f"{spatial}IO", f"N{spatial}C"),
        feature_group_count=feature_group_count,
        preferred_element_type=jnp.int32 if are_integers and with_integers else jnp.float32,
    ).astype(jnp.float32)
    return quantized_matmul_xla.scaled(y, x, w) if by_scales else y
