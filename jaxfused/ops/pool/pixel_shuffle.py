"""pixel_shuffle and pixel_unshuffle: channels to pixels and back."""

from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp

from jaxfused import dispatch
from jaxfused.runtime import resharding, sharding
from jaxfused.runtime.checks import (
    check_floating,
    check_images,
    check_word,
    for_each_axis,
    python_numbers,
)
from jaxfused.runtime.gate import reference_only
from jaxfused.runtime.shapes import merge_axes, split_axis

ChannelOrder = Literal["channel_first", "pixel_first"]


@python_numbers
def pixel_shuffle(
    x: jax.Array,
    factor: int | Sequence[int] = 2,
    *,
    order: ChannelOrder = "channel_first",
    implementation: dispatch.Implementation | None = None,
) -> jax.Array:
    r"""Images enlarged by whole factors: channels become pixels.

    .. math:: y_{b, f i + p, c} = x_{b, i, c P + p}, \qquad P = \prod f

    in one axis; over several, p counts the pixels of a block in the order of rows.

    Args:
      x: [B, *spatial, C P] with one spatial axis or more, of any floating-point dtype.
      factor: f, one int for all spatial axes or one for each.
      order: "channel_first" as above, which is torch's `pixel_shuffle` and the order CRD of ONNX; or
        "pixel_first", where channel p C + c becomes pixel p, which is TensorFlow's `depth_to_space` and
        the order DCR.
      implementation: None or "xla", which copies it in one pass.

    Returns:
      y, [B, *spatial * factor, C] of x's dtype.

    Raises:
      ValueError: shapes, dtypes or options do not fit, or the named implementation cannot run.

    Example:
      >>> import jax.numpy as jnp, jaxfused
      >>> x = jnp.arange(4.0).reshape(1, 1, 1, 4)
      >>> jaxfused.pixel_shuffle(x)[0, :, :, 0]
      Array([[0., 1.],
             [2., 3.]], dtype=float32)

    Source: Shi et al., "Real-Time Single Image and Video Super-Resolution Using an Efficient Sub-Pixel
    Convolutional Neural Network", 2016, https://arxiv.org/abs/1609.05158
    """
    op = "pixel_shuffle"
    x, factors, pixels = _checked(op, x, factor, order, implementation)
    spatial, channels = x.shape[1:-1], x.shape[-1] // pixels
    if x.shape[-1] % pixels:
        raise ValueError(
            f"{op}: x has {x.shape[-1]} channels and factor is {factor!r}, but blocks of {pixels} pixels"
            f" are made of multiples of {pixels} channels; pass such an x, or another factor."
        )
    n = len(factors)
    # Channels become pixels, so devices must not split them.
    letters = sharding.leading_axes(x.ndim)
    (x,) = sharding.align((x,), operand_axes=(letters,), whole=letters[-1])  # type: ignore[assignment]
    if order == "channel_first":
        x = x.reshape(x.shape[0], *spatial, channels, *factors)
        blocks, last = range(n + 2, 2 * n + 2), n + 1
    else:
        x = x.reshape(x.shape[0], *spatial, *factors, channels)
        blocks, last = range(n + 1, 2 * n + 1), 2 * n + 1
    pairs = [axis for pair in zip(range(1, n + 1), blocks, strict=True) for axis in pair]
    x = x.transpose(0, *pairs, last)
    for axis in range(1, n + 1):
        x = merge_axes(x, axis)
    return x


@python_numbers
def pixel_unshuffle(
    x: jax.Array,
    factor: int | Sequence[int] = 2,
    *,
    order: ChannelOrder = "channel_first",
    implementation: dispatch.Implementation | None = None,
) -> jax.Array:
    r"""Images shrunk by whole factors: pixels become channels, the inverse of `pixel_shuffle`.

    .. math:: y_{b, i, c P + p} = x_{b, f i + p, c}, \qquad P = \prod f

    Args:
      x: [B, *spatial, C] with one spatial axis or more, of any floating-point dtype.
      factor: f, one int for all spatial axes or one for each; it divides their sizes.
      order: of the channels, as for `pixel_shuffle`.
      implementation: None or "xla".

    Returns:
      y, [B, *spatial / factor, C P] of x's dtype.

    Raises:
      ValueError: shapes, dtypes or options do not fit, or the named implementation cannot run.

    Example:
      >>> import jax.numpy as jnp, jaxfused
      >>> x = jnp.arange(4.0).reshape(1, 2, 2, 1)
      >>> jaxfused.pixel_unshuffle(x).ravel()
      Array([0., 1., 2., 3.], dtype=float32)

    Source: `torch.nn.functional.pixel_unshuffle`.
    """
    op = "pixel_unshuffle"
    x, factors, _ = _checked(op, x, factor, order, implementation)
    spatial = x.shape[1:-1]
    if any(size % f for size, f in zip(spatial, factors, strict=True)):
        raise ValueError(
            f"{op}: x has shape {x.shape} and factor is {factor!r}, but blocks of pixels divide the"
            " spatial axes; pad or cut x, or pass another factor."
        )
    n = len(factors)
    y = resharding.whole_images(x)
    for axis in reversed(range(n)):
        y = split_axis(y, 1 + axis, spatial[axis] // factors[axis], factors[axis])
    places, blocks = range(1, 2 * n, 2), range(2, 2 * n + 1, 2)
    last = 2 * n + 1
    order_of_axes = (last, *blocks) if order == "channel_first" else (*blocks, last)
    y = y.transpose(0, *places, *order_of_axes)
    return merge_axes(y, n + 1, n + 1)


def _checked(
    op: str,
    x: jax.Array,
    factor: int | Sequence[int],
    order: str,
    implementation: dispatch.Implementation | None,
) -> tuple[jax.Array, tuple[int, ...], int]:
    """Returns x, each axis's factor, and the number of pixels of a block."""
    x = jnp.asarray(x)
    check_floating(op, dict(x=x))
    check_images(op, x)
    check_word(op, "order", order, ChannelOrder)
    factors = for_each_axis(op, "factor", factor, x.ndim - 2)
    reference_only(op, implementation, x)
    pixels = 1
    for f in factors:
        pixels *= f
    return x, factors, pixels
