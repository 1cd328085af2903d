"""Neighbourhoods of pixels and voxels: windows in images, videos and volumes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxfused.ops.attention.masks.mask_class import (
    AttentionMask,
    Bounds,
    Index,
    Spans,
    is_count,
)


@dataclass(frozen=True, init=False)
class NeighborhoodMask(AttentionMask):
    r"""Each token of a grid attends to the window of tokens around it, as in NATTEN.

    Tokens are the grid's points in row-major order, and T = S is their number. Along every axis of n
    points, point x attends to a window of w points that starts at

    .. math:: \min(\max(x - \lfloor w / 2 \rfloor, 0), n - w)

    so that tokens at a border have as many neighbours as others. With a dilation d an axis falls into d
    interleaved axes, each with windows of its own. A causal axis has the window end at x instead.

    Args:
      grid: (height, width), (depth, height, width), or any number of axes.
      window: size of the window along each axis, or one number for all; at most n / dilation.
      dilation: distance of two neighbours along each axis, or one number for all.
      is_causal: whether a token attends to no later place along an axis, or a flag for each.

    Example:
      >>> from jaxfused import masks
      >>> masks.NeighborhoodMask((4, 4), 3)[5].reshape(4, 4).astype(int)
      array([[1, 1, 1, 0],
             [1, 1, 1, 0],
             [1, 1, 1, 0],
             [0, 0, 0, 0]])

    Source: Hassani et al., "Neighborhood Attention Transformer", 2023, https://arxiv.org/abs/2204.07143,
    and "Dilated Neighborhood Attention Transformer", 2022, https://arxiv.org/abs/2209.15001
    """

    grid: tuple[int, ...]
    window: tuple[int, ...]
    dilation: tuple[int, ...]
    is_causal: tuple[bool, ...]

    def __init__(
        self,
        grid: Sequence[int],
        window: int | Sequence[int],
        dilation: int | Sequence[int] = 1,
        is_causal: bool | Sequence[bool] = False,
    ) -> None:
        if not isinstance(grid, Sequence) or not grid or not all(is_count(n, 1) for n in grid):
            raise ValueError(
                f"NeighborhoodMask: grid is {grid!r}, but it has a number of places for each axis; pass"
                " (height, width) or (depth, height, width)."
            )
        set_field = object.__setattr__
        set_field(self, "grid", tuple(map(int, grid)))
        set_field(self, "shape", (math.prod(self.grid),) * 2)
        for name, value in {"window": window, "dilation": dilation}.items():
            set_field(self, name, self._of_axes(name, value, lambda n: is_count(n, 1), int))
        flags = self._of_axes("is_causal", is_causal, _is_flag, bool)
        set_field(self, "is_causal", flags)
        for n, w, d in zip(self.grid, self.window, self.dilation, strict=True):
            if w * d > n:
                raise ValueError(
                    f"NeighborhoodMask: an axis has {n} places, but a window of {w} with dilation {d}"
                    f" spans {w * d}; pass a window of at most {n // d} there."
                )

    def __post_init__(self) -> None:
        raise AssertionError("__init__ replaces it")

    def _of_axes(self, name: str, value: Any, fits: Any, kind: Any) -> tuple[Any, ...]:
        is_list = isinstance(value, Sequence | np.ndarray) and np.ndim(value) == 1
        values = tuple(value) if is_list else (value,) * len(self.grid)
        if len(values) != len(self.grid) or not all(fits(v) for v in values):
            one = "one whole number from 1 up" if kind is int else "True or False"
            raise ValueError(
                f"NeighborhoodMask: {name} is {value!r}, but it is for each of the {len(self.grid)}"
                f" axes; pass {one}, or one for each axis."
            )
        return tuple(map(kind, values))

    def allowed(self, query: Index, key: Index) -> Any:
        result, stride = None, self.shape[0]
        for axis, n in enumerate(self.grid):
            stride //= n
            near = self._near(axis, query // stride % n, key // stride % n)
            result = near if result is None else result & near
        return result

    def _near(self, axis: int, query: Index, key: Index) -> Any:
        """Returns whether keys lie in the windows of queries, by their positions along one axis."""
        n, w, d = self.grid[axis], self.window[axis], self.dilation[axis]
        place, of_key = query // d, key // d
        if self.is_causal[axis]:
            near = (of_key <= place) & (of_key > place - w)
        else:
            # The interleaved parts of an axis may differ by one in length.
            length = (n - query % d + d - 1) // d
            first = (place - w // 2).clip(0)
            first = first - (first + w - length).clip(0)
            near = (of_key >= first) & (of_key < first + w)
        return near & (query % d == key % d)

    def bounds(self, spans: Spans) -> Bounds:
        """Returns bounds by the positions of spans along each axis, which windows of others are near."""
        some: Any = True
        outer = self.shape[0]
        for n, w, d in zip(self.grid, self.window, self.dilation, strict=True):
            stride = outer // n

            def positions(first: Any, last: Any, stride: int = stride, outer: int = outer) -> Any:
                # Flat indices visit the axis' positions 0 to n - 1 again and again. A span that goes
                # beyond one such round may have any of them.
                is_one = first // outer == last // outer
                low, high = (x // stride % (outer // stride) for x in (first, last))
                return np.where(is_one, low, 0), np.where(is_one, high, outer // stride - 1)

            first_query, last_query = positions(spans.first_query, spans.last_query)
            first_key, last_key = positions(spans.first_key, spans.last_key)
            # At a border of the grid the whole window, w * d positions, may lie on one side of a query.
            some &= (last_key >= first_query - w * d) & (first_key <= last_query + w * d)
            outer = stride
        return Bounds(some, False)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool | np.bool_ | int) and value in (False, True)
