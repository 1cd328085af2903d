"""Splits an array's axes into parts, of which the axes of all arrays in a formula consist.

A norm over groups views an array [B, H, W, C] as [B, H, W, G, S]. Its statistics are [B, G], then
[B, 1, 1, C]; another library computes them from [B, C, H, W]. The axes of all these arrays consist of
the parts B, H, W, G and S, so that transpositions, and reshapes that cut or merge axes, are views of one
array.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from jaxfused.fusion.algebra import View, is_reshape, passed_on
from jaxfused.fusion.graph import Node, Value
from jaxfused.runtime.shapes import reshaped

Layout = tuple[tuple[int, ...], ...]
"""Parts of each axis of an array, outermost first; () for an axis of length 1."""


class _Cut(NamedTuple):
    """A part that a reshape cuts into an outer and an inner part."""

    part: int
    outer: int
    """Length of the outer part."""


class Stage(NamedTuple):
    """A value with the same elements as the frame's array, and the parts of each of its axes."""

    value: Value
    layout: Layout


@dataclass(frozen=True)
class Frame:
    """An array, with its axes cut into parts."""

    sizes: tuple[int, ...]
    """Length of each part; elsewhere a part is named by its index in `sizes`."""
    stages: tuple[Stage, ...]
    """Array whose mean is taken, followed by its versions before each cast, reshape or
    transposition."""

    @property
    def source(self) -> Stage:
        """The array before all casts, reshapes and transpositions, and the parts of its axes."""
        return self.stages[-1]

    def length(self, parts: Iterable[int]) -> int:
        """Returns the product of the parts' lengths."""
        return math.prod(self.sizes[part] for part in parts)

    def layouts(self, shape: tuple[int, ...]) -> list[Layout]:
        """Returns the layouts that an array of this shape with the frame's elements may have."""
        orders = [[part for parts in stage.layout for part in parts] for stage in self.stages]
        found = [self.of_parts(order, shape) for order in orders]
        return list(dict.fromkeys(layout for layout in found if layout is not None))

    def of_parts(self, parts: Sequence[int], shape: tuple[int, ...]) -> Layout | None:
        """Returns the layout of an array of this shape whose parts come in this order, or None."""
        cut = _regrouped(parts, shape, self.sizes)
        return None if isinstance(cut, _Cut) else cut

    def look(self, value: Value, axes: tuple[Any, ...] | None = None) -> View:
        """Returns the value before casts, broadcasts, reshapes and transpositions."""
        assert axes is not None, "in a frame each axis has its parts"
        layout: Layout = tuple(parts or () for parts in axes)
        node = value.node
        while node is not None and value is not self.source.value:
            operand = passed_on(node)
            if operand is None:
                before = _layout_before(node, layout, self.sizes)
                if before is None or isinstance(before, _Cut):
                    break
                operand, layout = node.ins[0], before
            value, node = operand, operand.node
        return View(value, layout)

    def is_source(self, seen: View) -> bool:
        """Returns whether a view is the source array itself, with no axis transposed or broadcast."""
        return seen.base is self.source.value and seen.axes == self.source.layout

    def arranged(self, array: jax.Array, start: Layout, end: Layout) -> jax.Array:
        """Transposes and reshapes an array from one layout to another."""
        if start == end:
            return array
        order = [part for parts in start for part in parts]
        wanted = [part for parts in end for part in parts]
        if order != wanted:
            array = reshaped(array, *(self.sizes[part] for part in order))
            array = array.transpose([order.index(part) for part in wanted])
        return reshaped(array, *(self.length(parts) for parts in end))


def frame(value: Value) -> Frame:
    """Cuts an array's axes into parts, as finely as the reshapes before the array need."""
    sizes = [size for size in value.shape if size != 1]
    while True:
        stages = _stages(value, sizes)
        if not isinstance(stages, _Cut):
            return Frame(tuple(sizes), tuple(stages))
        part, outer = stages
        sizes[part : part + 1] = [outer, sizes[part] // outer]


def _stages(value: Value, sizes: Sequence[int]) -> list[Stage] | _Cut:
    layout = _regrouped(range(len(sizes)), value.shape, sizes)
    assert layout is not None and not isinstance(layout, _Cut)
    stages = [Stage(value, layout)]
    while value.node is not None:
        operand = passed_on(value.node)
        before: Layout | _Cut | None = layout
        if operand is None:
            if math.prod(value.node.ins[0].shape if value.node.ins else ()) != math.prod(
                value.shape
            ):
                break
            before = _layout_before(value.node, layout, sizes)
            operand = value.node.ins[0]
        if isinstance(before, _Cut):
            return before
        if before is None:
            break
        value, layout = operand, before
        stages.append(Stage(value, layout))
    return stages


def _layout_before(node: Node, layout: Layout, sizes: Sequence[int]) -> Layout | _Cut | None:
    """Returns the layout of a view's operand, given that of its result; None if it is no view."""
    if len(node.ins) != 1:
        return None
    shape = node.ins[0].shape
    if node.name == "transpose":
        axes = dict(zip(node.params["permutation"], layout, strict=True))
        return tuple(axes[axis] for axis in range(len(shape)))
    if node.name == "broadcast_in_dim":
        targets = [int(target) for target in node.params["broadcast_dimensions"]]
        return tuple(
            () if size == 1 else layout[target] for size, target in zip(shape, targets, strict=True)
        )
    if is_reshape(node):
        return _regrouped([part for parts in layout for part in parts], shape, sizes)
    return None


def _regrouped(
    parts: Sequence[int], shape: tuple[int, ...], sizes: Sequence[int]
) -> Layout | _Cut | None:
    """Groups parts, in order, into axes of these lengths; returns a `_Cut` if a part is too long."""
    remaining = list(parts)
    layout = []
    for size in shape:
        axis: list[int] = []
        length = 1
        while length < size:
            if not remaining or size % length:
                return None
            part = remaining[0]
            missing = size // length
            if sizes[part] > missing:
                return _Cut(part, missing) if sizes[part] % missing == 0 else None
            axis.append(remaining.pop(0))
            length *= sizes[part]
        if length != size:
            return None
        layout.append(tuple(axis))
    return None if remaining else tuple(layout)
