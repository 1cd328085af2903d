"""Sizes, strides and padding of the windows of max_pool and avg_pool, with or without `ceil_mode`."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from jaxfused.runtime.checks import for_each_axis

Pairs = tuple[tuple[int, int], ...]


class Windows(NamedTuple):
    """Windows over the spatial axes of an image, with one entry for each axis."""

    size: tuple[int, ...]
    strides: tuple[int, ...]
    padding: Pairs
    """Padding (low, high) of each axis, enough for all windows to fit."""
    asked: Pairs
    """Padding (low, high) that the caller passed; `padding` differs if `ceil_mode` sets the last
    window."""


def windows(
    op: str,
    x: jax.Array,
    window: int | Sequence[int],
    strides: int | Sequence[int] | None,
    padding: str | int | Sequence[int | tuple[int, int]],
    ceil_mode: bool,
) -> Windows:
    """Checks and returns the windows that a caller passes for x [B, *spatial, C]."""
    shape = x.shape[1:-1]
    sizes = for_each_axis(op, "window", window, len(shape))
    steps = for_each_axis(op, "strides", 1 if strides is None else strides, len(shape))
    asked = _pairs(op, padding, shape, sizes, steps)
    pairs = asked
    if ceil_mode:
        pairs = tuple(map(_with_last_window, shape, sizes, steps, asked))
    for n, size, (low, high) in zip(shape, sizes, pairs, strict=True):
        if n + low + high < size:
            raise ValueError(
                f"{op}: the window is {sizes}, but x of shape {x.shape} with padding {asked} is"
                " smaller; pass a smaller window or more padding."
            )
    return Windows(sizes, steps, pairs, asked)


def _with_last_window(n: int, size: int, step: int, pair: tuple[int, int]) -> tuple[int, int]:
    """Returns the padding for `ceil_mode`: a last window begins before x's end, and may end beyond."""
    low, high = pair
    last = -((size - n - low - high) // step)
    if last * step >= n + low:
        last -= 1
    return low, max(0, last * step + size - n - low)


def _pairs(op: str, padding: Any, shape, window, strides) -> Pairs:
    spatial = len(shape)
    if isinstance(padding, str):
        if padding.upper() not in ("SAME", "VALID"):
            raise ValueError(
                f"{op}: padding={padding!r} is not known; pass 'SAME', 'VALID' or numbers."
            )
        pairs = jax.lax.padtype_to_pads(shape, window, strides, padding.upper())
        return tuple((low, high) for low, high in pairs)
    sides = (padding,) * spatial if isinstance(padding, int) else tuple(padding)
    found = [(side, side) if isinstance(side, int) else tuple(side) for side in sides]
    if len(found) != spatial or any(len(pair) != 2 or min(pair) < 0 for pair in found):
        raise ValueError(
            f"{op}: padding is {padding!r}, but x has {spatial} spatial axes;"
            f" pass a name, one int, or {spatial} ints or (low, high) pairs, none of them negative."
        )
    return tuple((pair[0], pair[1]) for pair in found)
