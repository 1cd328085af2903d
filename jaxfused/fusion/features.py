"""Reads each feature of a value as a sum of features of x, times numbers from tables of cosines.

Programs write rotations by halves or interleaved pairs, sliced or reshaped, reversed and negated, or as
complex numbers. All these forms give the same sums here: each operation of the program is applied to
arrays of feature indices instead of the features.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from jaxfused.fusion.algebra import View, is_transparent, passed_on, view
from jaxfused.fusion.constants import evaluate
from jaxfused.fusion.graph import Node, Value, cuts

NO_TABLE = -1
PARTS = ("", "real", "imag")


class Factors(NamedTuple):
    """A table: an array of the program by which features are multiplied."""

    seen: View
    part: str
    """One of PARTS: the "real" or "imag" part of a complex table; "" for a real table."""


class Terms(NamedTuple):
    """One summand of each feature: factor * table[entry] * x[source]."""

    factor: np.ndarray
    """Complex factors; 0 for a feature without such a summand."""
    source: np.ndarray
    """Indices of features of x."""
    table: np.ndarray
    """Indices of tables, or NO_TABLE."""
    entry: np.ndarray
    """Indices of columns of the tables."""

    def moved(self, move: Callable[[np.ndarray], np.ndarray]) -> "Terms":
        return Terms(*map(move, self))

    def times(self, factor: complex | np.ndarray) -> "Terms":
        return self._replace(factor=self.factor * factor)


Sums = list[Terms]
"""All summands of a value's features. Arrays of `Terms` have the shape of its feature axes."""

STEPS = frozenset(
    {
        "add",
        "add_any",
        "broadcast_in_dim",
        "complex",
        "concatenate",
        "convert_element_type",
        "copy",
        "copy_p",
        "div",
        "imag",
        "mul",
        "name",
        "neg",
        "real",
        "reshape",
        "rev",
        "select_n",
        "sharding_constraint",
        "slice",
        "split",
        "squeeze",
        "stack",
        "sub",
    }
)
"""Names of the operations that `Reader` follows."""


@dataclass
class Reader:
    """Reads values as sums of features of x. The first `leading` axes of both are rows, not features."""

    x: Value
    leading: int
    tables: list[Factors] = field(default_factory=list)

    def read(self, nodes: Sequence[Node], result: Value) -> Sums | None:
        """Returns each feature of `result` as a sum of features of x; None if one is no such sum."""
        shape = self.x.shape[self.leading :]
        source = np.arange(math.prod(shape)).reshape(shape)
        none = np.full(shape, NO_TABLE)
        known = {self.x: [Terms(np.ones(shape, complex), source, none, np.zeros_like(source))]}
        for node in nodes:
            if any(value in known for value in node.ins):
                sums = self._made(node, [known.get(value) for value in node.ins])
                if sums is None or any(not self._fits(value) for value in node.outs):
                    return None
                known |= zip(node.outs, sums, strict=True)
        return known.get(result)

    def _fits(self, value: Value) -> bool:
        return value.shape[: self.leading] == self.x.shape[: self.leading]

    def _made(self, node: Node, ins: list[Sums | None]) -> list[Sums] | None:
        """Returns the sums of an operation's results, given those of its operands."""
        shape = node.out.shape[self.leading :]
        to_complex = node.name == "convert_element_type" and node.out.dtype.kind == "c"
        if is_transparent(node) or to_complex:
            return None if ins[0] is None else [ins[0]]
        handed = passed_on(node)
        if handed is not None:
            sums = ins[node.ins.index(handed)]
            return None if sums is None else [sums]
        if node.name in _MOVES:
            return None if ins[0] is None else _MOVES[node.name](self, node, ins[0])
        if node.name in ("concatenate", "stack"):
            return self._joined(node, ins)
        if node.name in ("mul", "div"):
            product = self._product(node, ins)
            return None if product is None else [product]
        if node.name == "select_n":
            return self._selected(node, ins)
        if any(sums is None for sums in ins):
            return None
        first, *rest = (
            [t.moved(lambda a: np.broadcast_to(a, shape)) for t in s or ()] for s in ins
        )
        second = rest[0] if rest else []
        match node.name:
            case "neg":
                return [[t.times(-1) for t in first]]
            case "add" | "add_any":
                return [first + second]
            case "sub":
                return [first + [t.times(-1) for t in second]]
            case "complex":
                return [first + [t.times(1j) for t in second]]
            case "real":
                return [[t._replace(factor=t.factor.real + 0j) for t in first]]
            case "imag":
                return [[t._replace(factor=t.factor.imag + 0j) for t in first]]
        return None

    def _joined(self, node: Node, ins: list[Sums | None]) -> list[Sums] | None:
        axis = node.params["axis" if node.name == "stack" else "dimension"] - self.leading
        if axis < 0 or any(sums is None for sums in ins):
            return None
        parts = [sums or [] for sums in ins]
        join = np.stack if node.name == "stack" else np.concatenate
        length = max(map(len, parts))
        filled = [[*p, *[p[0].times(0)] * (length - len(p))] for p in parts]
        return [
            [
                Terms(*(join(arrays, axis=axis) for arrays in zip(*k, strict=True)))
                for k in zip(*filled, strict=True)
            ]
        ]

    def _product(self, node: Node, ins: list[Sums | None]) -> Sums | None:
        """Returns the sums times a number, a constant array or a table; None for other products."""
        sums, other = (ins[0], node.ins[1]) if ins[1] is None else (ins[1], node.ins[0])
        if sums is None or (ins[0] is not None and ins[1] is not None):
            return None
        shape = node.out.shape[self.leading :]
        terms = [t.moved(lambda a: np.broadcast_to(a, shape)) for t in sums]
        number = self._constant(other, len(node.out.shape))
        if number is not None:
            number = number if node.name == "mul" else 1 / number
            return [t.times(number) for t in terms]
        if node.name == "div" or other.ndim != node.out.ndim:
            return None
        if any((t.table[t.factor != 0] != NO_TABLE).any() for t in terms):
            return None
        seen = view(other)
        entry = np.zeros(shape, int)
        for axis, size in zip(seen.axes, seen.base.shape, strict=True):
            if axis is not None and axis >= self.leading:
                entry = entry * size + np.indices(shape)[axis - self.leading]
        product: Sums = []
        for part, factor in (("real", 1), ("imag", 1j)) if other.dtype.kind == "c" else (("", 1),):
            table = Factors(seen, part)
            if table not in self.tables:
                self.tables.append(table)
            index = np.full(shape, self.tables.index(table))
            product += [t._replace(table=index, entry=entry).times(factor) for t in terms]
        return product

    def _constant(self, value: Value, rank: int) -> np.ndarray | None:
        """Returns the numbers of a constant that is broadcast along all leading axes, or None."""
        array = evaluate(value, scalars_only=value.ndim != rank)
        if array is None or math.prod(array.shape[: self.leading]) != 1:
            return None
        if value.ndim != rank:
            return array.reshape(()) if array.size == 1 else None
        numbers = array.reshape(array.shape[self.leading :])
        return numbers if np.isin(numbers, (-1, 0, 1, 1j, -1j)).all() or array.size == 1 else None

    def _selected(self, node: Node, ins: list[Sums | None]) -> list[Sums] | None:
        which = evaluate(node.ins[0])
        cases = ins[1:]
        if which is None or math.prod(which.shape[: self.leading]) != 1 or None in cases:
            return None
        which = which.reshape(which.shape[self.leading :])
        return [[t.times(which == i) for i, sums in enumerate(cases) for t in sums or ()]]


# --- operations that only move features -----------------------------------------------------------


def _reshape(reader: Reader, node: Node, sums: Sums) -> list[Sums] | None:
    shape = node.out.shape[reader.leading :]
    size = sums[0].source.size
    return (
        [[t.moved(lambda a: a.reshape(shape)) for t in sums]] if math.prod(shape) == size else None
    )


def _broadcast(reader: Reader, node: Node, sums: Sums) -> list[Sums] | None:
    targets = [int(target) for target in node.params["broadcast_dimensions"]]
    if len(node.ins) != 1 or targets[: reader.leading] != list(range(reader.leading)):
        return None
    shape = node.out.shape[reader.leading :]
    ones = [1] * len(shape)
    for target, size in zip(
        targets[reader.leading :], node.ins[0].shape[reader.leading :], strict=True
    ):
        ones[target - reader.leading] = size
    return [[t.moved(lambda a: np.broadcast_to(a.reshape(ones), shape)) for t in sums]]


def _cut(reader: Reader, node: Node, sums: Sums) -> list[Sums] | None:
    if node.name == "split" and node.params["axis"] < reader.leading:
        return None

    def of(out: Value) -> Sums:
        part = tuple(cuts(out)[reader.leading :])
        return [t.moved(lambda a: a[part]) for t in sums]

    return [of(out) for out in node.outs]


def _reverse(reader: Reader, node: Node, sums: Sums) -> list[Sums] | None:
    axes = tuple(int(axis) - reader.leading for axis in node.params["dimensions"])
    return None if min(axes) < 0 else [[t.moved(lambda a: np.flip(a, axes)) for t in sums]]


_MOVES: dict[str, Callable[[Reader, Node, Sums], list[Sums] | None]] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "rev": _reverse,
    "slice": _cut,
    "split": _cut,
    "squeeze": _reshape,
}
