"""One pass over images in plain JAX: the reference of the CUDA kernel."""

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxfused.ops.augment import filters_xla, resample_xla, steps_xla
from jaxfused.ops.augment.resample_xla import Pixels, Reading
from jaxfused.ops.augment.steps_xla import STATISTICAL, Op, Steps
from jaxfused.runtime.promotion import accumulator_dtype


@dataclass(frozen=True)
class Blur:
    """A blur of uint8 images after a pass, and steps after it; both read values rounded to uint8."""

    reach: tuple[int, int]
    """Number of pixels on each side that a value depends on, along columns and along rows."""
    sharpens: bool
    """True if images are blended with a 3 x 3 blur, by a factor that is passed in place of weights."""
    is_ragged: bool
    """True if an image may be smaller than its array."""
    steps: Steps
    """Pointwise steps after the blur."""


@dataclass(frozen=True)
class Pass:
    """Specification of a pass, which reads each image once, and once more if steps need statistics."""

    reading: Reading | None
    """Options of the resampling, or None if each pixel stays in its place."""
    steps: Steps
    dtype: Any
    """Dtype of the result; in uint8 values are rounded to the nearest level, halves to even ones."""
    blur: Blur | None = None

    @property
    def needed(self) -> frozenset[Op]:
        """The operations among the steps that need statistics of the image."""
        return STATISTICAL & {op for ops in self.steps for op in ops}


def working_dtype(dtype: Any) -> Any:
    """Returns the dtype of the arithmetic on images of this dtype."""
    return accumulator_dtype(dtype) if jnp.issubdtype(dtype, jnp.floating) else jnp.float32


def wide(x: jax.Array) -> jax.Array:
    """Returns images in the dtype of the arithmetic; uint8 levels become 0 to 1."""
    y = x.astype(working_dtype(x.dtype))
    return y / 255 if x.dtype == jnp.uint8 else y


def narrow(x: jax.Array, dtype: Any) -> jax.Array:
    """Converts images from the dtype of the arithmetic to `dtype`."""
    if dtype == jnp.uint8:
        return steps_xla.levels(x).astype(jnp.uint8)
    return x.astype(dtype)


def run(
    images: jax.Array,
    maps: jax.Array,
    rows: jax.Array,
    shift: jax.Array | None = None,
    before: jax.Array | None = None,
    blurs: jax.Array | None = None,
    *,
    spec: Pass,
    pixels: Pixels | None = None,
) -> jax.Array:
    """Returns the images [B, h, w, C] of a pass.

    Args:
      images: [B, H, W, C], uint8 or floating.
      maps: [B, 19], of `resample_xla.Map.packed`.
      rows: [B, steps, 1 + width], each the operation of a step and its values; those after the blur
        come last.
      shift: [B, h, w, 2] or None.
      before: [B, 3, 3] or None.
      blurs: [B, weights] of the blur: those along columns, and then those along rows; or [B, 1], the
        factor by which it sharpens.
      spec: options of the pass, the same for all images.
      pixels: function by which a resampling reads pixels; None for a gather.
    """
    blur = spec.blur
    if blur is not None:
        count = len(spec.steps)
        first = replace(spec, dtype=jnp.uint8, blur=None)
        between = images
        if spec.reading is not None or {op for ops in spec.steps for op in ops} - {Op.IDENTITY}:
            between = run(images, maps, rows[:, :count], shift, before, spec=first)
        one = functools.partial(_blurred, blur=blur, dtype=jnp.uint8 if blur.steps else spec.dtype)
        blurred = jax.vmap(one)(between, maps[:, -2:], blurs)
        if not blur.steps:
            return blurred
        last = Pass(None, blur.steps, spec.dtype)
        return run(blurred, maps, rows[:, count:], spec=last)
    one = functools.partial(_one, spec=spec, pixels=pixels)
    absent = [None if array is None else 0 for array in (shift, before)]
    return jax.vmap(one, in_axes=(0, 0, 0, *absent))(images, maps, rows, shift, before)


def _blurred(image, size, weights, *, blur: Blur, dtype: Any):
    x, size = wide(image), size if blur.is_ragged else None
    if blur.sharpens:
        return narrow(filters_xla.sharpened(x, weights[0], size), dtype)
    down, across = jnp.split(weights, [2 * blur.reach[0] + 1])
    return narrow(filters_xla.separable(x, down, across, size), dtype)


def _one(image, row, rows, shift, before, *, spec: Pass, pixels: Pixels | None):
    x = wide(image)
    map = resample_xla.unpacked(row.astype(x.dtype), shift, before)
    if spec.reading is not None:
        reading = spec.reading
        if image.dtype == jnp.uint8:
            reading = _in_levels(reading)
        x = resample_xla.resample(x, reading, map, pixels)
    rows = rows.astype(x.dtype)
    statistics = None
    if spec.needed:
        height, width = (jnp.arange(n, dtype=x.dtype) for n in x.shape[:2])
        inside = (height[:, None] < map.result[0]) & (width[None] < map.result[1])
        before_step = steps_xla.until_statistics(x, rows, spec.steps)
        statistics = steps_xla.statistics_of(before_step, inside, spec.needed)
    return narrow(steps_xla.run(x, rows, spec.steps, statistics), spec.dtype)


def _in_levels(reading: Reading) -> Reading:
    """Returns the reading with its fill in 0 to 1, converted from the levels of uint8 images."""
    return replace(reading, fill=tuple(value / 255 for value in reading.fill))
