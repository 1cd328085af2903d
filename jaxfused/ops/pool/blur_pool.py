"""blur_pool: validation, and its weighted sums in plain JAX."""

import math
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp

from jaxfused import dispatch
from jaxfused.runtime import resharding
from jaxfused.runtime.checks import (
    check_count,
    check_floating,
    check_images,
    check_word,
    for_each_axis,
    python_numbers,
)
from jaxfused.runtime.gate import reference_only
from jaxfused.runtime.promotion import accumulator_dtype

PadMode = Literal["reflect", "edge", "zeros"]
_NUMPY = {"reflect": "reflect", "edge": "edge", "zeros": "constant"}


@python_numbers
def blur_pool(
    x: jax.Array,
    strides: int | Sequence[int] = 2,
    *,
    filter_size: int = 3,
    padding_mode: PadMode = "reflect",
    implementation: dispatch.Implementation | None = None,
) -> jax.Array:
    r"""Images blurred by binomial weights, of which every stride-th pixel is kept.

    .. math:: y_{b, i, c} = 2^{1 - k} \sum_{j=0}^{k-1} \binom{k - 1}{j} \, x_{b, s i + j - p, c},
              \qquad p = \lfloor (s + k - 2) / 2 \rfloor

    along each spatial axis, with x continued by p pixels beyond both of its ends.

    Args:
      x: [B, *spatial, C] with one spatial axis or more, of any floating-point dtype.
      strides: s, one int for all spatial axes or one for each.
      filter_size: k; 3 has the weights 1/4, 1/2, 1/4.
      padding_mode: beyond its ends x is mirrored ("reflect"), goes on with its outermost values ("edge")
        or is zero ("zeros").
      implementation: None or "xla", which computes it in one pass an axis.

    Returns:
      y, [B, *spatial', C] of x's dtype; sums are float32 (float64 for float64 inputs).

    Raises:
      ValueError: shapes, dtypes or options do not fit, or the named implementation cannot run.

    Example:
      >>> import jax.numpy as jnp, jaxfused
      >>> x = jnp.array([0.0, 4.0, 0.0, 8.0]).reshape(1, 4, 1)
      >>> jaxfused.blur_pool(x)[0, :, 0]
      Array([2., 3.], dtype=float32)

    Source: Zhang, "Making Convolutional Networks Shift-Invariant Again", 2019,
    https://arxiv.org/abs/1904.11486; numbers are those of timm's `BlurPool2d`.
    """
    op = "blur_pool"
    x = jnp.asarray(x)
    check_floating(op, dict(x=x))
    check_images(op, x)
    check_count(op, "filter_size", filter_size)
    check_word(op, "padding_mode", padding_mode, PadMode)
    steps = for_each_axis(op, "strides", strides, x.ndim - 2)
    for n, step in zip(x.shape[1:-1], steps, strict=True):
        pad = (step + filter_size - 2) // 2
        if n + 2 * pad < filter_size or (padding_mode == "reflect" and pad >= n):
            raise ValueError(
                f"{op}: x has shape {x.shape}, but an axis of {n} pixels is too short for a filter of"
                f" {filter_size}, strides of {step} and padding_mode {padding_mode!r}; pass a smaller"
                " filter_size, or padding_mode='edge'."
            )
    reference_only(op, implementation, x)
    x = resharding.whole_images(x)
    y = x.astype(accumulator_dtype(x.dtype))
    for axis, step in enumerate(steps, 1):
        y = _blurred(y, axis, step, filter_size, padding_mode)
    return y.astype(x.dtype)


def _blurred(x: jax.Array, axis: int, step: int, size: int, mode: str) -> jax.Array:
    pad = (step + size - 2) // 2
    widths = [(pad, pad) if a == axis else (0, 0) for a in range(x.ndim)]
    padded = jnp.pad(x, widths, mode=_NUMPY[mode])
    count = (padded.shape[axis] - size) // step + 1
    total = jnp.zeros((), x.dtype)
    for j in range(size):
        weight = math.comb(size - 1, j) / 2 ** (size - 1)
        stop = j + (count - 1) * step + 1
        total = total + weight * jax.lax.slice_in_dim(padded, j, stop, step, axis)
    return total
