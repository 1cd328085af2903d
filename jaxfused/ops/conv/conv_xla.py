"""conv in plain JAX: one call of XLA's convolution, then the sum and the activation."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxfused.runtime import resharding, sharding
from jaxfused.runtime.activation import activate
from jaxfused.runtime.product_xla import product
from jaxfused.runtime.promotion import accumulator_dtype, along_last_axis
from jaxfused.runtime.shapes import merge_axes, split_axis


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
    partitioned: bool = False,
) -> jax.Array:
    """Convolves [B, *spatial, I] with [*kernel, I/groups, O].

    The convolution's result has x's dtype, although its sums are float32 on every platform: a float32
    result of bfloat16 operands makes XLA's GPU compiler convert the operands to float32 instead of
    calling cuDNN on them as they are. `partitioned` is whether XLA may split the call over devices.
    """
    if sharding.is_explicit(x, w):
        x, residual, w, bias = resharding.split_by_batch((x, residual), (w, bias))
    spatial = "HWD"[: x.ndim - 2]
    x, padding = padded(x, padding, w.shape[:-2], kernel_dilation)
    options: dict[str, Any] = dict(
        window_strides=strides,
        padding=padding,
        lhs_dilation=input_dilation,
        rhs_dilation=kernel_dilation,
        dimension_numbers=(f"N{spatial}C", f"{spatial}IO", f"N{spatial}C"),
        feature_group_count=feature_group_count,
        precision=precision,
    )
    w = w.astype(x.dtype)
    if not partitioned:
        y = jax.lax.conv_general_dilated(x, w, **options)
    elif feature_group_count > 1:
        y = _by_groups(x, w, options)
    else:
        x = resharding.whole_images_on_several_axes(x)
        y = resharding.whole_images_on_several_axes(jax.lax.conv_general_dilated(x, w, **options))
    return finish(y, bias, residual, activation=activation)


def _by_groups(x: jax.Array, w: jax.Array, options: dict[str, Any]) -> jax.Array:
    """Returns a convolution of groups whose gradient to w is right on a mesh of several axes.

    XLA's partitioner multiplies JAX's own gradient by the number of devices along the mesh axes that do
    not split the images (jax 0.11.2 and 0.12.0.1).
    """

    @jax.custom_jvp
    def convolve(x, w):
        return jax.lax.conv_general_dilated(x, w, **options)

    @convolve.defjvp
    def jvp(primals, tangents):
        dy = convolve(tangents[0], primals[1])
        return convolve(*primals), dy + jax.checkpoint(by_taps)(primals[0], tangents[1])

    def by_taps(x, w):
        """Returns the sum over the taps of products that JAX transposes to products."""
        groups, strides = options["feature_group_count"], options["window_strides"]
        inner, between = options["lhs_dilation"], options["rhs_dilation"]
        padding = options["padding"]
        if isinstance(padding, str):
            sizes = [(n - 1) * d + 1 for n, d in zip(x.shape[1:-1], inner, strict=True)]
            reach = [(k - 1) * d + 1 for k, d in zip(w.shape[:-2], between, strict=True)]
            padding = jax.lax.padtype_to_pads(sizes, reach, strides, padding)
        pairs = [(*pair, d - 1) for pair, d in zip(padding, inner, strict=True)]
        x = jax.lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *pairs, (0, 0, 0)])
        x, w = (split_axis(a, a.ndim - 1, groups, a.shape[-1] // groups) for a in (x, w))
        kernel, rows = w.shape[:-3], "bxyz"[: x.ndim - 2]
        ends = [n - (k - 1) * d for n, k, d in zip(x.shape[1:-2], kernel, between, strict=True)]
        total: Any = 0
        for tap in itertools.product(*map(range, kernel)):
            starts = [k * d for k, d in zip(tap, between, strict=True)]
            within = (slice(a, a + n, s) for a, n, s in zip(starts, ends, strides, strict=True))
            pixels, weights = x[:, *within], w[tap].swapaxes(0, 1)
            total += product(
                f"{rows}gi,gio->{rows}go", pixels, weights, precision=options["precision"]
            )
        return merge_axes(total, total.ndim - 2).astype(x.dtype)

    return convolve(x, w)


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
        return jnp.pad(
            resharding.whole_images(x), [(0, 0), *self.pairs, (0, 0)], mode=NUMPY_MODES[self.mode]
        )


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
