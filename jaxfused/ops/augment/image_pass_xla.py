"""One pass over images in plain JAX: what its kernel computes too."""

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxfused.ops.augment import resample_xla, steps_xla
from jaxfused.ops.augment.resample_xla import Reading
from jaxfused.ops.augment.steps_xla import STATISTICAL, Op, Steps
from jaxfused.runtime.promotion import accumulator_dtype


@dataclass(frozen=True)
class Pass:
    """What a pass does with each image: it reads the image once, and once more for statistics."""

    reading: Reading | None
    """Options by which it reads the images, or None where each pixel stays in its place."""
    steps: Steps
    dtype: Any
    """Dtype of the result; in uint8 values are rounded, halves to even ones."""

    @property
    def needed(self) -> frozenset[Op]:
        """The statistical operations among the steps."""
        return STATISTICAL & {op for ops in self.steps for op in ops}


def working_dtype(dtype: Any) -> Any:
    """Returns the dtype of arithmetic on images of a dtype."""
    return accumulator_dtype(dtype) if jnp.issubdtype(dtype, jnp.floating) else jnp.float32


def wide(x: jax.Array) -> jax.Array:
    """Returns images in the dtype of arithmetic, with uint8 as 0 to 1."""
    y = x.astype(working_dtype(x.dtype))
    return y / 255 if x.dtype == jnp.uint8 else y


def narrow(x: jax.Array, dtype: Any) -> jax.Array:
    """Converts images from the dtype of the arithmetic to another one."""
    if dtype == jnp.uint8:
        return steps_xla.levels(x).astype(jnp.uint8)
    return x.astype(dtype)


def run(
    images: jax.Array,
    maps: jax.Array,
    rows: jax.Array,
    shift: jax.Array | None = None,
    before: jax.Array | None = None,
    *,
    spec: Pass,
) -> jax.Array:
    """Returns the images [B, h, w, C] of a pass.

    Args:
      images: [B, H, W, C], uint8 or floating.
      maps: [B, PACKED], of `resample_xla.Map.packed`.
      rows: [B, steps, 1 + width], each the operation of a step and its values.
      shift: [B, h, w, 2] or None.
      before: [B, 3, 3] or None.
      spec: what all images share.
    """
    one = functools.partial(_one, spec=spec)
    absent = [None if array is None else 0 for array in (shift, before)]
    return jax.vmap(one, in_axes=(0, 0, 0, *absent))(images, maps, rows, shift, before)


def _one(image, row, rows, shift, before, *, spec: Pass):
    x = wide(image)
    map = resample_xla.unpacked(row.astype(x.dtype), shift, before)
    if spec.reading is not None:
        reading = spec.reading
        if image.dtype == jnp.uint8:
            reading = _in_levels(reading)
        x = resample_xla.resample(x, reading, map)
    rows = rows.astype(x.dtype)
    statistics = None
    if spec.needed:
        height, width = (jnp.arange(n, dtype=x.dtype) for n in x.shape[:2])
        inside = (height[:, None] < map.result[0]) & (width[None] < map.result[1])
        before_step = steps_xla.until_statistics(x, rows, spec.steps)
        statistics = steps_xla.statistics_of(before_step, inside, spec.needed)
    return narrow(steps_xla.run(x, rows, spec.steps, statistics), spec.dtype)


def _in_levels(reading: Reading) -> Reading:
    """Returns the reading with a fill of 0 to 1, where it is in levels as the images are."""
    return replace(reading, fill=tuple(value / 255 for value in reading.fill))
