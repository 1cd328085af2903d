"""The composition of several geometric parts into one map of positions, for images, masks and boxes."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxfused.augment.geometry import ElasticTransform, inverted, middle
from jaxfused.augment.transform import Drawn, Geometric, public_name
from jaxfused.ops.augment import resample_xla
from jaxfused.ops.augment.resample_xla import Map, Reading, product

_EVERYWHERE = (-1e9, -1e9, 1e9, 1e9)
"""A window that contains every pixel of an image: smallest x and y, largest x and y."""


class Frame(NamedTuple):
    """The geometric parts of a pass, and the height and width of the arrays that the pass reads."""

    parts: tuple[Geometric, ...]
    shape: tuple[int, int]

    @property
    def result(self) -> tuple[int, int]:
        """The height and width of the resulting arrays."""
        shape = self.shape
        for part in self.parts:
            shape = part.result_shape(shape)
        return shape

    def reading(self, channels: int) -> Reading:
        """Returns the options for resampling images of this many channels in the pass."""
        seen = [part for part in self.parts if not part.any_interpolation]
        shrinks, shape = 1.0, self.shape
        for part in self.parts:
            shrinks *= part.shrinks_by(shape)
            shape = part.result_shape(shape)
        filling = [part for part in self.parts if not isinstance(part.fill, float) or part.fill]
        fill: Any = filling[0].fill if filling else 0.0
        fill = (fill,) if isinstance(fill, float) else tuple(fill)
        if len(fill) not in (1, channels):
            raise ValueError(
                f"{public_name(filling[0])}: fill has {len(fill)} numbers, but images have"
                f" {channels} channels; pass one, or {channels}."
            )
        return Reading(
            size=shape,
            interpolation=seen[0].interpolation if seen else "bilinear",
            is_upright=self.is_upright,
            drops=self.is_upright,
            fill=fill,
            widest=shrinks if self.antialiases else 1.0,
        )

    @property
    def is_upright(self) -> bool:
        """True if the map takes rows to rows and columns to columns."""
        return all(part.upright for part in self.parts)

    @property
    def antialiases(self) -> bool:
        """True if interpolation averages over more pixels where the composed map shrinks the image."""
        return any(part.antialias for part in self.parts)


def composed(frame: Frame, drawn: Sequence[Drawn], size: jax.Array) -> Map:
    """Returns the composed map of one image of `size` [height, width]."""
    source, shape = size, frame.shape
    matrix = eye = jnp.eye(3, dtype=jnp.float32)
    window = jnp.array(_EVERYWHERE, jnp.float32)
    shift = before = None
    upright = True
    for part, (on, values) in zip(frame.parts, drawn, strict=True):
        if isinstance(part, ElasticTransform):
            shift = jnp.where(on, part.field(values, shape), 0)
            before, matrix = matrix, eye
        else:
            if part.crops and upright:
                window = _within(window, matrix, values)
            matrix = product(matrix, jnp.where(on, part.inverse(values, size), eye))
        upright = upright and part.upright
        shape, size = part.result_shape(shape), part.result_size(size)
    radius = jnp.ones((2,), jnp.float32)
    if frame.antialiases:
        total = matrix if before is None else product(before, matrix)
        radius = jnp.maximum(_stretch(total, size), 1)
    return Map(matrix, window, radius, source, size, shift, before)


def _within(window: jax.Array, matrix: jax.Array, box: jax.Array) -> jax.Array:
    """Returns the part of a window [left, top, right, bottom] of the image that is inside a box.

    The upright map `matrix` [3, 3] moves the box [left, top, width, height] into the image.
    """
    low, high = box[:2] - 0.5, box[:2] + box[2:] - 0.5
    scale = jnp.stack([matrix[0, 0], matrix[1, 1]])
    ends = jnp.stack([low * scale + matrix[:2, 2], high * scale + matrix[:2, 2]])
    return jnp.concatenate(
        [jnp.maximum(window[:2], ends.min(0)), jnp.minimum(window[2:], ends.max(0))]
    )


def _stretch(matrix: jax.Array, size: jax.Array) -> jax.Array:
    """Returns how many pixels of the image one pixel of the result spans along x and y, [2].

    `matrix` [3, 3] maps the result to the image; its derivative is taken at the result's middle.
    """
    x, y = middle(size)
    place = _applied(matrix, x, y)
    slope = (matrix[:2, :2] - place[:2, None] / place[2] * matrix[2:, :2]) / place[2]
    return jnp.sqrt((slope**2).sum(1))


def _applied(matrix: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns the homogeneous coordinates of a matrix times the points (x, y, 1)."""
    return matrix[:, 0] * x + matrix[:, 1] * y + matrix[:, 2]


def moved_mask(mask: jax.Array, reading: Reading, map: Map, fill: float) -> jax.Array:
    """Returns a mask [H, W, K] moved by the map; pixels from outside of the mask become `fill`."""
    return resample_xla.nearest(mask, reading, map, jnp.full((mask.shape[-1],), fill, mask.dtype))


def moved_boxes(boxes: jax.Array, map: Map) -> jax.Array:
    """Returns the boxes [N, 4] that enclose the mapped corners of each box."""
    corners = boxes[:, jnp.array([[0, 1], [2, 1], [2, 3], [0, 3]])] - 0.5
    x, y = corners[..., 0], corners[..., 1]
    if map.before is not None:
        x, y = resample_xla.moved(inverted(map.before), x, y)
    if map.shift is not None:
        # Four fixed-point iterations invert the displacement.
        start = x, y
        for _ in range(4):
            dx, dy = resample_xla.shift_at(map.shift, x, y)
            x, y = start[0] - dx, start[1] - dy
    x, y = resample_xla.moved(inverted(map.matrix), x, y)
    return jnp.stack([x.min(1), y.min(1), x.max(1), y.max(1)], -1) + 0.5
