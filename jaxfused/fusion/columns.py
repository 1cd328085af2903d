"""Finds columns of tables of cosines and sines that are provably equal.

Each column gets an integer label, made from the operations that compute it. Columns with equal labels
are equal, and columns with opposite labels (n and -n) are negatives of each other.
"""

from typing import Any

import numpy as np

from jaxfused.fusion.algebra import View, view
from jaxfused.fusion.constants import elementwise, evaluate
from jaxfused.fusion.graph import Node, Value, cuts

Axes = tuple[int | None, ...]
"""Axis of the multiplied array for each axis of a table; None for an axis of length 1."""

_FUNCTIONS = frozenset({"complex", "cos", "imag", "real", "sin"})
"""Elementwise functions that `constants` does not evaluate."""
_DEEPEST = 40


class Columns:
    """Labels of the columns of all tables in a program; equal labels mean equal columns."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._known: dict[Any, np.ndarray] = {}

    def of(self, seen: View, leading: int, depth: int = 0) -> np.ndarray:
        """Returns the labels of a table's columns, in the shape of its axes from axis `leading` on."""
        key = (seen, leading)
        if key not in self._known:
            base, axes = view(*seen)
            numbers = self._made(base, axes, leading, depth)
            present = [axis for axis in axes if _is_column(axis, leading)]
            wanted = [
                (axis, size)
                for axis, size in zip(seen.axes, seen.base.shape, strict=True)
                if _is_column(axis, leading)
            ]
            ones = [size if axis in present else 1 for axis, size in wanted]
            shape = [size for _, size in wanted]
            self._known[key] = np.broadcast_to(numbers.reshape(ones), shape)
        return self._known[key]

    def _number(self, *made_of: Any) -> int:
        return self._numbers.setdefault(made_of, len(self._numbers) + 1)

    def _made(self, value: Value, axes: Axes, leading: int, depth: int) -> np.ndarray:
        value = value.twin or value
        columns = [i for i, axis in enumerate(axes) if _is_column(axis, leading)]
        shape = [value.shape[i] for i in columns]
        found = self._of_constant(value, axes, columns)
        if found is None and value.node is not None and columns and depth < _DEEPEST:
            found = self._of_node(value, axes, columns, leading, depth + 1)
        if found is not None:
            return np.broadcast_to(found, shape)
        rows = tuple(axis for axis in axes if not _is_column(axis, leading))
        numbers = [self._number(value, rows, place) for place in np.ndindex(*shape)]
        return np.reshape(numbers, shape)

    def _of_constant(self, value: Value, axes: Axes, columns: list[int]) -> np.ndarray | None:
        array = evaluate(value)
        if array is None:
            return None
        moved = np.moveaxis(array, columns, range(len(columns)))
        shape = moved.shape[: len(columns)]
        rows = tuple(axis for i, axis in enumerate(axes) if i not in columns)
        made_of = [self._number(rows, moved[place].tobytes()) for place in np.ndindex(*shape)]
        return np.reshape(made_of, shape)

    def _of_node(
        self, value: Value, axes: Axes, columns: list[int], leading: int, depth: int
    ) -> np.ndarray | None:
        node = value.node
        assert node is not None

        def of(operand: Value, axes: Axes) -> np.ndarray:
            return self.of(View(operand, axes), leading, depth)

        if node.name == "neg":
            return -of(node.ins[0], axes)
        if node.name == "concatenate" and node.params["dimension"] in columns:
            along = columns.index(node.params["dimension"])
            return np.concatenate([of(v, axes) for v in node.ins], axis=along)
        if node.name == "stack" and node.params["axis"] in columns:
            at = node.params["axis"]
            inner = (*axes[:at], *axes[at + 1 :])
            return np.stack([of(v, inner) for v in node.ins], axis=columns.index(at))
        if node.name in ("slice", "split"):
            return self._of_cut(value, axes, columns, leading, depth)
        if node.name == "reshape":
            rows = value.ndim - len(columns)
            operand = node.ins[0]
            if columns[0] != rows or operand.shape[:rows] != value.shape[:rows]:
                return None
            inner = (*axes[:rows], *range(leading, leading + operand.ndim - rows))
            return of(operand, inner).reshape([value.shape[i] for i in columns])
        if _picks_rows(node, columns):
            inner = (*[0] * (node.ins[0].ndim - 1), leading)
            return self._one_by_one((node,), [of(node.ins[0], inner)])
        if len(node.outs) == 1 and (node.name in _FUNCTIONS or elementwise(node) is not None):
            of_operands = [
                of(v, tuple(None if s == 1 else a for s, a in zip(v.shape, axes, strict=False)))
                for v in node.ins
            ]
            aligned = [
                n.reshape([v.shape[i] if v.ndim else 1 for i in columns])
                for n, v in zip(of_operands, node.ins, strict=True)
            ]
            return self._one_by_one((node.name, repr(node.params)), aligned)
        return None

    def _of_cut(
        self, value: Value, axes: Axes, columns: list[int], leading: int, depth: int
    ) -> np.ndarray:
        """Returns the labels of the columns that a slice takes from a table.

        The sliced axis may have length 1 in the table.
        """
        assert value.node is not None
        whole, taken = value.node.ins[0], cuts(value)
        inner = tuple(
            leading + value.ndim + i if axis is None and size != 1 else axis
            for i, (axis, size) in enumerate(zip(axes, whole.shape, strict=True))
        )
        inner_columns = [i for i, axis in enumerate(inner) if _is_column(axis, leading)]
        numbers = self.of(View(whole, inner), leading, depth)
        numbers = numbers[tuple(taken[i] for i in inner_columns)]
        numbers = numbers.reshape([value.shape[i] for i in columns])
        of_rows = [
            (i, cut.start, cut.stop, cut.step)
            for i, cut in enumerate(taken)
            if i not in inner_columns and cut != slice(0, whole.shape[i], 1)
        ]
        return self._one_by_one(tuple(of_rows), [numbers]) if of_rows else numbers

    def _one_by_one(self, made_of: tuple[Any, ...], operands: list[np.ndarray]) -> np.ndarray:
        """Returns the labels of an elementwise operation's columns, given those of its operands."""
        operands = list(np.broadcast_arrays(*operands))
        numbers = [self._number(*made_of, *each) for each in zip(*map(np.ravel, operands))]  # noqa: B905
        return np.reshape(numbers, operands[0].shape)


def _is_column(axis: int | None, leading: int) -> bool:
    return axis is not None and axis >= leading


def _picks_rows(node: Node, columns: list[int]) -> bool:
    """Returns whether the operation selects whole rows of a table, such as those of some positions."""
    last = node.ins[0].ndim - 1 if node.ins else -1
    if columns != [node.out.ndim - 1] or last < 0:
        return False
    whole = node.ins[0].shape[last] == node.out.shape[-1]
    if node.name == "dynamic_slice":
        return whole
    if node.name != "gather":
        return False
    numbers = node.params["dimension_numbers"]
    return (
        whole
        and node.params["slice_sizes"][last] == node.ins[0].shape[last]
        and last not in numbers.collapsed_slice_dims
        and node.out.ndim - 1 in numbers.offset_dims
    )
