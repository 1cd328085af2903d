"""Batch: images with masks, boxes and labels, as a chain takes and returns them."""

from typing import NamedTuple

import jax


class Batch(NamedTuple):
    """Images and the masks, boxes and labels that change with them; all but the images may be None."""

    images: jax.Array
    """Images [B, H, W, C], uint8 or floating with values of 0 to 1; videos are [B, T, H, W, C]."""
    masks: jax.Array | None = None
    """Masks [B, H, W] or [B, H, W, K] of any dtype, resampled by nearest pixels. Masks of videos have an
    axis T after B."""
    boxes: jax.Array | None = None
    """Boxes [B, N, 4], x1 y1 x2 y2 in pixels from the image's corner: a whole image is 0 0 W H."""
    valid: jax.Array | None = None
    """Bools [B, N], true for boxes to use. In a result, a box without area inside the image is false."""
    labels: jax.Array | None = None
    """Labels: whole numbers [B], or weights [B, K], which `MixUp` and `CutMix` mix."""
    sizes: jax.Array | None = None
    """Height and width [B, 2] of each image, which is the top left part of its H x W pixels; None if
    each image fills them."""
    visible: jax.Array | None = None
    """Fraction of each moved box's area that is inside the image, [B, N]; only in results."""
