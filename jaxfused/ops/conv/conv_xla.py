"""conv in plain JAX: one call of XLA's convolution, then the sum and the activation."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxfused.runtime import sharding
from jaxfused.runtime.activation import activate
from jaxfused.runtime.promotion import accumulator_dtype, along_last_axis


def conv(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    strides: tuple[int, ...],
    padding: str | Sequence[tuple[int, int]],
    input_dilation: tuple[int, ...],
    kernel_dilation: tuple[int, ...],
    feature_group_count: int,
    activation: str | None,
    precision: jax.lax.PrecisionLike,
) -> jax.Array:
    """Convolves [B, *spatial, I] with [*kernel, I/groups, O].

    The convolution's result has x's dtype, although its sums are float32 on every platform: a float32
    result of bfloat16 operands makes XLA's GPU compiler convert the operands to float32 instead of
    calling cuDNN on them as they are.
    """
    if sharding.is_explicit(x, w):
        x, residual, w, bias = sharding.split_by_batch((x, residual), (w, bias))
    spatial = "HWD"[: x.ndim - 2]
    x, padding = padded(x, padding, w.shape[:-2], kernel_dilation)
    y = jax.lax.conv_general_dilated(
        x,
        w.astype(x.dtype),
        window_strides=strides,
        padding=padding,
        lhs_dilation=input_dilation,
        rhs_dilation=kernel_dilation,
        dimension_numbers=(f"N{spatial}C", f"{spatial}IO", f"N{spatial}C"),
        feature_group_count=feature_group_count,
        precision=precision,
    )
    return finish(y, bias, residual, activation=activation)


def finish(
    y: jax.Array, bias: jax.Array | None, residual: jax.Array | None, *, activation: str | None
) -> jax.Array:
    """Returns activation(y + bias + residual) in y's dtype, for y and residual [B, *spatial, O]."""
    if adds_in_convolution(y.dtype, residual, activation):
        return activate(activation, _sum(y, bias, residual))
    return activate(activation, _wide_sum(y, bias, residual)).astype(y.dtype)


def adds_in_convolution(dtype: Any, residual: jax.Array | None, activation: str | None) -> bool:
    """Returns whether cuDNN, called by XLA, computes the epilogue before it rounds the result.

    cuDNN adds a bias and a residual of the result's dtype and evaluates relu, without a pass over the
    result. A bias is rounded to that dtype, as Flax rounds it.
    """
    return activation in (None, "relu") and (residual is None or residual.dtype == dtype)


@jax.custom_jvp
def _sum(y: jax.Array, bias: jax.Array | None, residual: jax.Array | None) -> jax.Array:
    """Returns y + bias + residual in y's dtype; the gradient of the bias is still summed in float32."""
    y = y if bias is None else y + along_last_axis(bias, y)
    return y if residual is None else y + residual


@_sum.defjvp
def _sum_jvp(primals, tangents):
    y = _sum(*primals)
    return y, _in_float32(*tangents).astype(y.dtype)


@jax.custom_jvp
def _wide_sum(y: jax.Array, bias: jax.Array | None, residual: jax.Array | None) -> jax.Array:
    """Returns y + bias + residual in float32; the bias's gradient sums dy rounded to y's dtype.

    XLA writes dy rounded to y's dtype for dgrad and wgrad anyway. To sum unrounded values, it would
    also write them in float32.
    """
    return _in_float32(y, bias, residual)


@_wide_sum.defjvp
def _wide_sum_jvp(primals, tangents):
    y, bias, residual = tangents
    narrow = y
    if bias is not None:
        # JAX transposes these lines into a float32 sum of the gradient rounded to y's dtype. Without the
        # barrier XLA would skip the rounding.
        wide = bias.astype(accumulator_dtype(y.dtype))
        along = jnp.broadcast_to(wide, y.shape).astype(y.dtype)
        narrow = y + jax.lax.optimization_barrier(along)
    return _wide_sum(*primals), _in_float32(narrow, None, residual)


def _in_float32(y: jax.Array, bias: jax.Array | None, residual: jax.Array | None) -> jax.Array:
    """Returns the sum of y, bias and residual in float32."""
    y = y.astype(accumulator_dtype(y.dtype))
    if bias is not None:
        y = y + along_last_axis(bias, y)
    return y if residual is None else y + residual.astype(y.dtype)


NUMPY_MODES = {"edge": "edge", "reflect": "reflect", "circular": "wrap"}
"""Mode of `jnp.pad` for each padding mode of a convolution."""


class Around(NamedTuple):
    """Padding whose values are taken from x: edge, reflect or circular."""

    mode: str
    pairs: tuple[tuple[int, int], ...]
    """Widths (low, high) of the padding on each spatial axis."""

    def pad(self, x: jax.Array) -> jax.Array:
        """Returns a copy of x [B, *spatial, I] with its padding."""
        return jnp.pad(x, [(0, 0), *self.pairs, (0, 0)], mode=NUMPY_MODES[self.mode])


def padded(
    x: jax.Array,
    padding: str | Sequence[tuple[int, int]] | Around,
    kernel: tuple[int, ...],
    kernel_dilation: tuple[int, ...],
) -> tuple[jax.Array, str | Sequence[tuple[int, int]]]:
    """Returns x, padded by its own values if `padding` asks so, and the zero padding left to XLA."""
    if padding in ("CIRCULAR", "REFLECT"):
        reach = [(k - 1) * d for k, d in zip(kernel, kernel_dilation, strict=True)]
        padding = Around(str(padding).lower(), tuple((r // 2, r - r // 2) for r in reach))
    return (padding.pad(x), "VALID") if isinstance(padding, Around) else (x, padding)
