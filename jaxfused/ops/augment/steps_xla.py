"""The pointwise steps of a pass over an image, in plain JAX.

A step is an operation with its values. Each image of a batch may have other operations, so a step is
data: a row [operation, values...] of an array. `Steps` lists the operations that each step of a pass
may have.

Values of a picture are 0 to 1 within a pass; "levels" are the 256 of uint8.
"""

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Op(IntEnum):
    """Operations of pointwise steps, with the numbers that rows and the CUDA kernels use."""

    IDENTITY = 0
    BRIGHTNESS = 1
    CONTRAST = 2
    SATURATION = 3
    HUE = 4
    GAMMA = 5
    POSTERIZE = 6
    SOLARIZE = 7
    INVERT = 8
    AUTOCONTRAST = 9
    EQUALIZE = 10
    ERASE = 11
    NORMALIZE = 12


STATISTICAL = frozenset({Op.CONTRAST, Op.AUTOCONTRAST, Op.EQUALIZE})
"""Operations that depend on all pixels of an image."""

COLOURED = frozenset({Op.SATURATION, Op.HUE, Op.CONTRAST})
"""Operations that mix channels, and so need 1, 3 or 4 of them."""

Steps = tuple[tuple[Op, ...], ...]
"""The operations that each step of a pass may have."""

GRAY = (0.299, 0.587, 0.114)
"""Weights of red, green and blue, which sum to 1, so that gray pixels are unchanged."""


class Statistics(NamedTuple):
    """Statistics of a whole image that some steps need."""

    pivot: jax.Array
    """Mean of the gray values, a scalar."""
    low: jax.Array
    """Smallest value of each channel, [C]."""
    high: jax.Array
    """Largest value of each channel, [C]."""
    table: jax.Array
    """Level that equalization gives to each level of each channel, [C, 256]."""


def width(channels: int) -> int:
    """Returns the number of values of a step for images with this many channels."""
    return 2 * max(channels, 4)


def run(x: jax.Array, rows: jax.Array, steps: Steps, statistics: Statistics | None) -> jax.Array:
    """Returns an image [H, W, C] after its steps; `rows` is [steps, 1 + width]."""
    for row, ops in zip(rows, steps, strict=True):
        x = _step(x, row, ops, statistics)
    return x


def until_statistics(x: jax.Array, rows: jax.Array, steps: Steps) -> jax.Array:
    """Returns the image before its step that needs statistics; they are taken from this image."""
    taken = x
    last = max(i for i, ops in enumerate(steps) if STATISTICAL & set(ops))
    for row, ops in zip(rows[: last + 1], steps[: last + 1], strict=True):
        statistical = sorted(STATISTICAL & set(ops))
        if statistical:
            here = jnp.isin(row[0], jnp.array(statistical, row.dtype))
            taken = jnp.where(here, x, taken)
        x = _step(x, row, tuple(op for op in ops if op not in STATISTICAL), None)
    return taken


def statistics_of(x: jax.Array, inside: jax.Array | None, needed: frozenset[Op]) -> Statistics:
    """Returns the statistics of an image [H, W, C] over pixels `inside` [H, W], all if None."""
    channels = x.shape[-1]
    counted = jnp.ones(x.shape[:2], bool) if inside is None else inside
    zero, nothing = jnp.zeros((), x.dtype), jnp.zeros((channels,), x.dtype)
    pivot, low, high = zero, nothing, nothing
    table = jnp.zeros((channels, 256), x.dtype)
    if Op.CONTRAST in needed:
        shades = jnp.where(counted, gray(x)[..., 0], zero)
        pivot = shades.sum() / jnp.maximum(counted.sum(), 1).astype(x.dtype)
    if Op.AUTOCONTRAST in needed:
        low = jnp.where(counted[..., None], x, jnp.inf).min((0, 1))
        high = jnp.where(counted[..., None], x, -jnp.inf).max((0, 1))
    if Op.EQUALIZE in needed:
        channel = jnp.arange(channels, dtype=jnp.int32)
        places = levels(x).astype(jnp.int32) + 256 * channel
        ones = jnp.broadcast_to(counted[..., None], x.shape).astype(jnp.int32)
        counts = jnp.zeros((256 * channels,), jnp.int32).at[places].add(ones)
        table = jax.vmap(equalized)(counts.reshape(channels, 256)).astype(x.dtype) / 255
    return Statistics(pivot, low, high, table)


def equalized(counts: jax.Array) -> jax.Array:
    """Returns Pillow's equalization table for the counts [256] of a channel's levels."""
    last = counts[255 - jnp.argmax(counts[::-1] > 0)]
    step = (counts.sum() - last) // 255
    before = jnp.cumsum(counts) - counts
    table = jnp.clip((step // 2 + before) // jnp.maximum(step, 1), 0, 255)
    return jnp.where(step > 0, table, jnp.arange(256, dtype=table.dtype))


def levels(x: jax.Array) -> jax.Array:
    """Returns the nearest uint8 levels, 0 to 255, as floats; halves are rounded to even."""
    return jnp.round(jnp.clip(x, 0, 1) * 255)


def gray(x: jax.Array) -> jax.Array:
    """Returns the gray values [..., 1] of 1, 3 or 4 channels; the fourth is opacity."""
    if x.shape[-1] == 1:
        return x
    red, green, blue = GRAY
    return red * x[..., 0:1] + green * x[..., 1:2] + blue * x[..., 2:3]


def _step(
    x: jax.Array, row: jax.Array, ops: Sequence[Op], statistics: Statistics | None
) -> jax.Array:
    y = x
    for op in ops:
        if op is not Op.IDENTITY:
            y = jnp.where(row[0] == op, _FUNCTIONS[op](x, row[1:], statistics), y)
    return y


def _on_colours(
    f: Callable[[jax.Array, jax.Array, Statistics | None], jax.Array],
) -> Callable[[jax.Array, jax.Array, Statistics | None], jax.Array]:
    """Returns a function of colours that leaves the last of four channels, opacity, unchanged."""

    def with_opacity(x, values, statistics):
        if x.shape[-1] != 4:
            return f(x, values, statistics)
        return jnp.concatenate([f(x[..., :3], values, statistics), x[..., 3:]], -1)

    return with_opacity


def _mixed(x, other, share):
    return jnp.clip(share * x + (1 - share) * other, 0, 1)


@_on_colours
def _brightness(x, values, statistics):
    return jnp.clip(values[0] * x, 0, 1)


@_on_colours
def _contrast(x, values, statistics):
    return _mixed(x, statistics.pivot, values[0])


@_on_colours
def _saturation(x, values, statistics):
    return x if x.shape[-1] == 1 else _mixed(x, gray(x), values[0])


@_on_colours
def _hue(x, values, statistics):
    """Rotates hues by `values[0]` turns, as in HSV; the saturation cancels and is not computed."""
    if x.shape[-1] == 1:
        return x
    red, green, blue = x[..., 0], x[..., 1], x[..., 2]
    largest, chroma = x.max(-1), x.max(-1) - x.min(-1)
    divisor = jnp.where(chroma > 0, chroma, 1)
    # Channels are compared by order alone: XLA may compute a channel twice with different rounding, so
    # a test for equality could fail.
    sixths = jnp.where(
        (red >= green) & (red >= blue),
        (green - blue) / divisor,
        jnp.where(green >= blue, 2 + (blue - red) / divisor, 4 + (red - green) / divisor),
    )
    turned = sixths + 6 * values[0]

    def channel(n):
        k = (n + turned) % 6
        return largest - chroma * jnp.clip(jnp.minimum(k, 4 - k), 0, 1)

    return jnp.stack([channel(5), channel(3), channel(1)], -1)


@_on_colours
def _gamma(x, values, statistics):
    # Bicubic interpolation leads below 0, where a power is NaN. At 0 its derivative may be infinite,
    # which an image without this step would get as a gradient of NaN.
    below = x <= 0
    power = jnp.where(below, 0, jnp.where(below, 1, x) ** values[0])
    return jnp.clip(values[1] * power, 0, 1)


@_on_colours
def _posterize(x, values, statistics):
    step = jnp.exp2(8 - values[0])
    return jnp.floor(levels(x) / step) * step / 255


@_on_colours
def _solarize(x, values, statistics):
    return jnp.where(levels(x) >= values[0], 1 - x, x)


@_on_colours
def _invert(x, values, statistics):
    return 1 - x


@_on_colours
def _autocontrast(x, values, statistics):
    low, high = (bound[: x.shape[-1]] for bound in (statistics.low, statistics.high))
    spread = jnp.where(high > low, high - low, 1)
    return jnp.where(high > low, jnp.clip((x - low) / spread, 0, 1), x)


@_on_colours
def _equalize(x, values, statistics):
    channel = jnp.arange(x.shape[-1], dtype=jnp.int32)
    return statistics.table[channel, levels(x).astype(jnp.int32)]


def _erase(x, values, statistics):
    """Fills a box with a colour; `values` are top, left, bottom, right and the colour's channels."""
    row = jnp.arange(x.shape[0], dtype=x.dtype)[:, None]
    column = jnp.arange(x.shape[1], dtype=x.dtype)[None]
    within = (row >= values[0]) & (row < values[2]) & (column >= values[1]) & (column < values[3])
    return jnp.where(within[..., None], values[4 : 4 + x.shape[-1]], x)


def _normalize(x, values, statistics):
    scale, offset = jnp.split(values, 2)
    return x * scale[: x.shape[-1]] + offset[: x.shape[-1]]


_FUNCTIONS = {
    Op.BRIGHTNESS: _brightness,
    Op.CONTRAST: _contrast,
    Op.SATURATION: _saturation,
    Op.HUE: _hue,
    Op.GAMMA: _gamma,
    Op.POSTERIZE: _posterize,
    Op.SOLARIZE: _solarize,
    Op.INVERT: _invert,
    Op.AUTOCONTRAST: _autocontrast,
    Op.EQUALIZE: _equalize,
    Op.ERASE: _erase,
    Op.NORMALIZE: _normalize,
}
