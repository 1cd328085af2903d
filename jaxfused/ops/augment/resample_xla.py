"""Resampling of an image at mapped positions, in plain JAX.

Positions count from 0 at the middle of the first pixel, x to the right and y down. A map gives the
position in the image for each position of the result. Every value is a weighted mean of pixels; a
pixel's weight is the interpolation kernel at its distance along x times that along y. An antialiased
kernel is wider by the factor by which the map shrinks the image.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

Interpolation = Literal["nearest", "bilinear", "bicubic"]

SUPPORT = {"bilinear": 1, "bicubic": 2}
"""Radius of each interpolation kernel, in pixels."""

TAPS_UNROLLED = 4
"""Largest number of taps, over both axes, that are unrolled; more run in a loop."""


@dataclass(frozen=True)
class Reading:
    """Options of the resampling of a pass."""

    size: tuple[int, int]
    """Height and width of the result."""
    interpolation: Interpolation
    is_upright: bool
    """True if x depends on the result's columns alone and y on its rows alone."""
    drops: bool
    """True if pixels outside the window have weight 0, as beyond a crop; False if they have the value
    `fill`."""
    fill: tuple[float, ...]
    """Value outside of the image: one for all channels, or one for each."""
    widest: float
    """Upper limit of `Map.radius`, a constant at compile time."""

    @property
    def taps(self) -> int:
        """Largest number of pixels along an axis that a value depends on."""
        return math.floor(2 * SUPPORT[self.interpolation] * self.widest) + 1


class Map(NamedTuple):
    """The map of one image: where each position of the result is in the image."""

    matrix: jax.Array
    """Matrix [3, 3] of homogeneous coordinates (x, y, 1)."""
    window: jax.Array
    """Window [4] of pixels that the result may depend on: smallest x and y, largest x and y."""
    radius: jax.Array
    """Radius [2] of the interpolation kernel along x and y, in multiples of `SUPPORT`; at least 1."""
    source: jax.Array
    """Height and width [2] of the image, which may be smaller than its array."""
    result: jax.Array
    """Height and width [2] of the result, which may be smaller than its array."""
    shift: jax.Array | None
    """Displacements [H, W, 2], added to (x, y) between `matrix` and `before`; None for none."""
    before: jax.Array | None
    """Second matrix [3, 3], from displaced positions to those of the image; None for none."""

    def packed(self) -> jax.Array:
        """Returns all but the shift and `before` as one row of 19 numbers."""
        parts = (self.matrix.reshape(9), self.window, self.radius, self.source, self.result)
        return jnp.concatenate(parts)


def unpacked(row: jax.Array, shift: jax.Array | None, before: jax.Array | None) -> Map:
    """Returns the map from a row of `Map.packed`."""
    return Map(row[:9].reshape(3, 3), row[9:13], row[13:15], row[15:17], row[17:19], shift, before)


def product(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns the product of two 3 x 3 matrices in full precision.

    By default a GPU multiplies float32 in tf32.
    """
    return (a[:, :, None] * b[None]).sum(1)


def moved(matrix: jax.Array, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns positions multiplied by a matrix of homogeneous coordinates."""
    below = matrix[2, 0] * x + matrix[2, 1] * y + matrix[2, 2]
    # Positions at or beyond the horizon of a perspective map lie outside the image.
    visible = below > 1e-6
    divisor = jnp.where(visible, below, 1)
    return tuple(
        jnp.where(visible, (row[0] * x + row[1] * y + row[2]) / divisor, -1e6) for row in matrix[:2]
    )  # type: ignore[return-value]


def positions(reading: Reading, map: Map) -> tuple[jax.Array, jax.Array]:
    """Returns the position (x, y) in the image of each pixel of the result, both [h, w]."""
    height, width = reading.size
    dtype = map.matrix.dtype
    y, x = jnp.meshgrid(
        jnp.arange(height, dtype=dtype), jnp.arange(width, dtype=dtype), indexing="ij"
    )
    x, y = moved(map.matrix, x, y)
    if map.shift is None:
        return x, y
    dx, dy = shift_at(map.shift, x, y)
    x, y = x + dx, y + dy
    return (x, y) if map.before is None else moved(map.before, x, y)


def shift_at(shift: jax.Array, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns displacements [H, W, 2] interpolated bilinearly at (x, y); the edges are repeated."""
    height, width, _ = shift.shape
    x, y = jnp.clip(x, 0, width - 1), jnp.clip(y, 0, height - 1)
    left, top = jnp.floor(x), jnp.floor(y)
    total = jnp.zeros((), shift.dtype)
    for row in (top, top + 1):
        for column in (left, left + 1):
            weight = (1 - jnp.abs(x - column)) * (1 - jnp.abs(y - row))
            total += weight[..., None] * _pixels(shift, column, row)
    return total[..., 0], total[..., 1]


Pixels = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""Function f(image [H, W, C], columns, rows) that returns the pixels at these positions."""


def resample(x: jax.Array, reading: Reading, map: Map, pixels: Pixels | None = None) -> jax.Array:
    """Returns an image [H, W, C] sampled at the map's positions, [h, w, C]."""
    fill = jnp.broadcast_to(jnp.array(reading.fill, x.dtype), (x.shape[-1],))
    if reading.interpolation == "nearest":
        return nearest(x, reading, map, fill, pixels)
    map = map._replace(radius=jnp.clip(map.radius, 1, reading.widest))
    if reading.is_upright:
        return _upright(x, reading, map, fill)
    return _anywhere(x, reading, map, fill, pixels or _pixels)


def nearest(
    x: jax.Array, reading: Reading, map: Map, fill: jax.Array, pixels: Pixels | None = None
) -> jax.Array:
    """Returns the nearest pixel of each position, also of label masks.

    Ties go to the right and lower pixel.
    """
    across, down = (jnp.floor(place + 0.5) for place in positions(reading, map))
    seen = _is_seen(across, 0, map) & _is_seen(down, 1, map)
    if not reading.drops:
        seen &= _is_in_window(across, 0, map) & _is_in_window(down, 1, map)
    return jnp.where(seen[..., None], (pixels or _pixels)(x, across, down), fill)


def _is_seen(place: jax.Array, axis: int, map: Map) -> jax.Array:
    """Returns whether a pixel lies in the image along x (axis 0) or y (axis 1)."""
    return (place >= 0) & (place < map.source[1 - axis])


def _is_in_window(place: jax.Array, axis: int, map: Map) -> jax.Array:
    return (place >= map.window[axis]) & (place <= map.window[2 + axis])


def _weights(distance: jax.Array, interpolation: Interpolation) -> jax.Array:
    """Returns the interpolation kernel's values at these distances from its middle."""
    d = jnp.abs(distance)
    if interpolation == "bilinear":
        return jnp.maximum(1 - d, 0)
    a = -0.5
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return jnp.where(d < 1, near, jnp.where(d < 2, far, 0))


def _tap_weights(
    place: jax.Array, pixel: jax.Array, axis: int, reading: Reading, map: Map
) -> tuple[jax.Array, jax.Array]:
    """Returns the weights of pixels for positions on an axis, all, and those inside the image.

    The first are 0 outside the map's window if `reading.drops`. In the second, pixels whose value
    is `fill` have weight 0.
    """
    weight = _weights((pixel - place) / map.radius[axis], reading.interpolation)
    in_window = _is_in_window(pixel, axis, map)
    if reading.drops:
        weight = jnp.where(in_window, weight, 0)
        return weight, jnp.where(_is_seen(pixel, axis, map), weight, 0)
    return weight, jnp.where(_is_seen(pixel, axis, map) & in_window, weight, 0)


def _upright(x: jax.Array, reading: Reading, map: Map, fill: jax.Array) -> jax.Array:
    """Resamples along x and then along y, as two products with matrices of weights."""
    weights, shares = [], []
    for axis, (size, count) in enumerate(zip(x.shape[1::-1], reading.size[::-1], strict=True)):
        steps = jnp.arange(count, dtype=x.dtype)
        place = map.matrix[axis, axis] * steps + map.matrix[axis, 2]
        # Pixels beyond the array have the value `fill`, whose weight is 1 minus the sum of the others.
        reach = math.ceil(SUPPORT[reading.interpolation] * reading.widest) if reading.drops else 0
        pixel = jnp.arange(-reach, size + reach, dtype=x.dtype)
        weight, seen = _tap_weights(place[:, None], pixel[None], axis, reading, map)
        total = weight.sum(1, keepdims=True)
        if not reading.drops:
            total = _total(place, axis, reading, map)[:, None]
        total = jnp.where(total == 0, 1, total)
        inner = seen[:, reach : reach + size] / total
        weights.append(inner)
        shares.append(inner.sum(1))
    across, down = weights
    highest = jax.lax.Precision.HIGHEST
    y = jnp.einsum("vw,hwc->hvc", across, x, precision=highest)
    y = jnp.einsum("uh,hvc->uvc", down, y, precision=highest)
    covered = shares[1][:, None] * shares[0][None]
    return y + (1 - covered)[..., None] * fill


def _total(place: jax.Array, axis: int, reading: Reading, map: Map) -> jax.Array:
    """Returns the sum of the interpolation kernel's weights over all pixels, also outside the image."""
    first = jnp.ceil(place - SUPPORT[reading.interpolation] * map.radius[axis])
    pixels = first[:, None] + jnp.arange(reading.taps, dtype=place.dtype)
    distances = (pixels - place[:, None]) / map.radius[axis]
    return _weights(distances, reading.interpolation).sum(1)


def _anywhere(
    x: jax.Array, reading: Reading, map: Map, fill: jax.Array, pixels: Pixels
) -> jax.Array:
    """Resamples by a gather of each pixel that a value depends on, for any map."""
    across, down = positions(reading, map)
    support = SUPPORT[reading.interpolation]
    # Far from the image all pixels are `fill`, so positions are clipped to a range that int32 can index.
    limit = support * reading.widest + 2
    across = jnp.clip(across, -limit, map.source[1] - 1 + limit)
    down = jnp.clip(down, -limit, map.source[0] - 1 + limit)
    left = jnp.ceil(across - support * map.radius[0])
    top = jnp.ceil(down - support * map.radius[1])

    def tap(sums, offsets):
        total, covered, value = sums
        column, row = left + offsets[0], top + offsets[1]
        weight_x, seen_x = _tap_weights(across, column, 0, reading, map)
        weight_y, seen_y = _tap_weights(down, row, 1, reading, map)
        seen = seen_x * seen_y
        return (
            total + weight_x * weight_y,
            covered + seen,
            value + seen[..., None] * pixels(x, column, row),
        )

    zero = jnp.zeros_like(across)
    sums = zero, zero, jnp.zeros((*across.shape, x.shape[-1]), x.dtype)
    taps = reading.taps if reading.widest > 1 or support > 1 else 2
    grid = [(i, j) for j in range(taps) for i in range(taps)]
    if len(grid) <= TAPS_UNROLLED:
        for offsets in grid:
            sums = tap(sums, offsets)
    else:
        sums, _ = jax.lax.scan(
            lambda sums, offsets: (tap(sums, offsets), None), sums, jnp.array(grid, x.dtype)
        )
    total, covered, value = sums
    total = jnp.where(total == 0, 1, total)
    return value / total[..., None] + (1 - covered / total)[..., None] * fill


def _pixels(x: jax.Array, column: jax.Array, row: jax.Array) -> jax.Array:
    """Returns pixels [..., C] of an image [H, W, C]; those outside are the nearest inside."""
    height, width = x.shape[:2]
    column = jnp.clip(column, 0, width - 1).astype(jnp.int32)
    row = jnp.clip(row, 0, height - 1).astype(jnp.int32)
    return x[row, column]


@jax.custom_vjp
def repeatable_pixels(x: jax.Array, column: jax.Array, row: jax.Array) -> jax.Array:
    """Returns pixels as `_pixels` does, with a gradient to x that repeats bit for bit on a GPU too.

    A GPU's scatter adds floats in any order, so the gradient adds integers: each float is rounded to
    multiples of a unit, and its remainder to multiples of a finer unit, with 14 bits each for images of
    224 x 224.
    """
    return _pixels(x, column, row)


def _pixels_fwd(x, column, row):
    return _pixels(x, column, row), (jax.eval_shape(lambda: x), column, row)


def _pixels_bwd(saved, dy):
    x, column, row = saved
    places = tuple(
        jnp.clip(place, 0, size - 1).astype(jnp.int32)
        for place, size in zip((row, column), x.shape[:2], strict=True)
    )
    bits = max(30 - (math.prod(dy.shape[:-1]) - 1).bit_length(), 1)
    most = jnp.abs(dy).max()
    share = jnp.ldexp(jnp.ones((), dy.dtype), jnp.frexp(most)[1] - bits)
    high = jnp.round(dy / share)
    low = jnp.round((dy / share - high) * 2**bits)

    def total(parts: jax.Array) -> jax.Array:
        zeros = jnp.zeros(x.shape, jnp.int32)
        return zeros.at[places].add(parts.astype(jnp.int32)).astype(dy.dtype)

    dx = (total(high) + total(low) * 2.0**-bits) * share
    dx = jnp.where(most > 0, jnp.where(jnp.isfinite(most), dx, jnp.nan), 0)
    # Pixels are piecewise constant in the positions, so the positions' gradients are 0.
    return dx.astype(x.dtype), jnp.zeros_like(column), jnp.zeros_like(row)


repeatable_pixels.defvjp(_pixels_fwd, _pixels_bwd)
