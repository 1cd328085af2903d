"""Recognises rotations of queries and keys by their position, in halves or interleaved pairs.

A result is read as sums of features of x times table entries (`features`): cos x_a - sin x_b and
sin x_a + cos x_b for each pair, then the features that are not rotated. A rotation of all features
in halves is left to XLA, unless `projection` fuses it with the product before it.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxfused.fusion.algebra import View, at_dtype, between, core, is_transparent, same, stages
from jaxfused.fusion.columns import Columns
from jaxfused.fusion.features import NO_TABLE, PARTS, STEPS, Reader, Sums, Terms
from jaxfused.fusion.graph import Node, Value
from jaxfused.fusion.site import Book, Site
from jaxfused.ops.rope.rope import rope


@dataclass(frozen=True, eq=False)
class Table:
    """Cosines or sines; `seen` maps each of their axes to an axis of the rotated array."""

    seen: View
    part: str
    """One of PARTS: the "real" or "imag" part of a complex table; "" for a real table."""
    columns: np.ndarray
    """Indices of the table's columns, one for each pair of features."""
    sign: int

    def array(self, table: jax.Array, rank: int) -> jax.Array:
        """Returns the table with `rank` axes, the pairs last; broadcast axes have length 1."""
        shape = [1] * (rank - 1)
        for axis, size in zip(self.seen.axes, table.shape, strict=True):
            if axis is not None and axis < rank - 1:
                shape[axis] = size
        if self.part:
            table = jnp.real(table) if self.part == "real" else jnp.imag(table)
        table = _columns_of(table.reshape(*shape, -1), self.columns)
        return table if self.sign > 0 else -table

    def is_the_same(self, other: "Table") -> bool:
        """Returns whether another table provably holds the same numbers."""
        return (
            (self.seen.axes, self.part, self.sign) == (other.seen.axes, other.part, other.sign)
            and np.array_equal(self.columns, other.columns)
            and same(self.seen.base, other.seen.base)
        )


def _columns_of(table: jax.Array, columns: np.ndarray) -> jax.Array:
    step = int(columns[1] - columns[0]) if len(columns) > 1 else 1
    if step < 1 or (np.diff(columns) != step).any():
        return table[..., columns]
    return table[..., int(columns[0]) : int(columns[-1]) + 1 : step]


@dataclass(frozen=True, eq=False)
class Rotation:
    """A value that is a rotation of another."""

    x: Value
    result: Value
    cos: Table
    sin: Table
    interleaved: bool
    tables: frozenset[Value]
    """All arrays of cosines or sines by which the program multiplies."""
    covered: frozenset[Node]

    @property
    def is_whole(self) -> bool:
        """True if all features are rotated."""
        return 2 * len(self.cos.columns) == self.x.shape[-1]


def rotation(value: Value, columns: Columns) -> Rotation | None:
    """Returns the value as a rotation of another, or None."""
    whole = core(value)
    if not whole.is_floating or whole.ndim < 2 or not _may_rotate(whole):
        return None
    nodes = _steps_to(whole)
    for forked in _forks(nodes, whole):
        reader = Reader(forked, whole.ndim - 1)
        sums = reader.read(nodes, whole)
        found = None if sums is None else _pairs(reader, sums, columns)
        x = _whole(forked, whole)
        if found is None or x is None:
            continue
        at = at_dtype(x, value.dtype)
        if at is None or core(x).dtype.itemsize < at.dtype.itemsize:
            return None
        cos, sin, interleaved = found
        tables = frozenset(table.seen.base for table in reader.tables)
        covered = frozenset(between(value, {*stages(at), *tables}))
        return Rotation(at, value, cos, sin, interleaved, tables, covered)
    return None


def _may_rotate(value: Value) -> bool:
    """Returns whether a rotation may end with the operation that computes the value."""
    node = value.node
    if node is None:
        return False
    if node.name not in _ENDS:
        return False
    if node.name in ("add", "sub"):
        return all(core(v).made_by == "mul" for v in node.ins)
    if node.name == "concatenate":
        return node.params["dimension"] == value.ndim - 1
    return node.ins[0].ndim > value.ndim and core(node.ins[0]).made_by in _PAIRED


_ENDS = ("add", "concatenate", "reshape", "sub")
_PAIRED = ("add", "concatenate", "stack", "sub")
"""Operations that compute the features of pairs, which a reshape may then interleave."""
_MOST_STEPS = 64
_MOST_FORKS = 4


def _steps_to(value: Value) -> list[Node]:
    """Returns the operations before a value that may be part of a rotation, in program order."""
    found: dict[Node, None] = {}
    pending = [value]
    while pending and len(found) < _MOST_STEPS:
        node = pending.pop(0).node
        if node is not None and node.name in STEPS and node not in found:
            found[node] = None
            pending += node.ins
    return sorted(found, key=lambda node: node.order)


def _forks(nodes: list[Node], result: Value) -> Iterator[Value]:
    """Yields, last first, the values of all features that several operations read: the candidates."""
    readers = Counter(value for node in nodes for value in set(node.ins))
    split = {node.ins[0] for node in nodes if node.name == "split"}
    rows = result.ndim - 1
    forks = [
        value
        for value, count in readers.items()
        if (count > 1 or value in split)
        and value.is_floating
        and value.shape[:rows] == result.shape[:rows]
        and math.prod(value.shape[rows:]) == result.shape[-1]
    ]
    forks.sort(key=lambda value: -1 if value.node is None else value.node.order)
    yield from forks[: -_MOST_FORKS - 1 : -1]


def _whole(forked: Value, result: Value) -> Value | None:
    """Returns the rotated array, before a reshape cuts its features into pairs, or None."""
    value = forked
    while value.shape != result.shape:
        cut = core(value).node
        if cut is None or cut.name != "reshape":
            return None
        value = cut.ins[0]
    return value


def _pairs(reader: Reader, sums: Sums, columns: Columns) -> tuple[Table, Table, bool] | None:
    """Returns the tables of a rotation and whether its pairs are interleaved, or None."""
    terms = [np.stack(arrays) for arrays in zip(*sums, strict=True)]
    counts = (terms[0] != 0).sum(axis=0)
    rotated, features = int((counts == 2).sum()), np.arange(len(counts))
    if rotated < 2 or rotated % 2 or (counts != np.where(features < rotated, 2, 1)).any():
        return None
    order = np.argsort(terms[0] == 0, axis=0, kind="stable")
    one, two = (Terms(*(t[order[i], features] for t in terms)) for i in (0, 1))
    straight = (one.factor == 1) & (one.source == features) & (one.table == NO_TABLE)
    turned = (one.table != NO_TABLE) & (two.table != NO_TABLE)
    if not np.where(features < rotated, turned, straight).all():
        return None
    is_own = one.source == features
    own, other = (
        Terms(*(np.where(is_own == flag, a, b)[:rotated] for a, b in zip(one, two, strict=True)))
        for flag in (True, False)
    )
    features, half = features[:rotated], rotated // 2
    interleaved = bool((other.source != (features + half) % rotated).any())
    if (own.source != features).any() or (own.factor != 1).any():
        return None
    if not np.isin(other.factor, (-1, 1)).all():
        return None
    if interleaved and (other.source != features ^ 1).any():
        return None
    first = features[::2] if interleaved else features[:half]
    second = other.source[first]
    cosines, sines = _numbers(reader, own, columns), _numbers(reader, other, columns)
    if (cosines[first] != cosines[second]).any() or (sines[first] != -sines[second]).any():
        return None
    cos, sin = (_table(reader, t, at) for t, at in ((own, first), (other, second)))
    return None if cos is None or sin is None else (cos, sin, interleaved)


def _numbers(reader: Reader, terms: Terms, columns: Columns) -> np.ndarray:
    """Returns a label for each feature: equal (or opposite) labels mean equal (or opposite) entries."""
    numbers = np.zeros(terms.table.shape, int)
    for index in np.unique(terms.table):
        seen, part = reader.tables[index]
        of_columns = len(PARTS) * columns.of(seen, reader.leading).reshape(-1)
        of_columns += np.sign(of_columns) * PARTS.index(part)
        numbers = np.where(terms.table == index, of_columns.take(terms.entry, mode="clip"), numbers)
    return numbers * terms.factor.real.astype(int)


def _table(reader: Reader, terms: Terms, at: np.ndarray) -> Table | None:
    """Returns the table that multiplies all features `at`; None if their tables or signs differ."""
    index, sign = np.unique(terms.table[at]), np.unique(terms.factor[at])
    if len(index) != 1 or len(sign) != 1:
        return None
    seen, part = reader.tables[int(index[0])]
    return Table(seen, part, terms.entry[at], int(sign[0].real))


# --- rotations outside of projections -------------------------------------------------------------


def find(book: Book) -> None:
    """Finds rotations of interleaved pairs, or of some features, that no qkv_projection includes."""
    columns = Columns()
    for node in reversed(book.graph.nodes):
        if node.name not in _ENDS or node in book.owner or not _may_rotate(node.out):
            continue
        results = [node.out]
        while results[-1].used_once and is_transparent(results[-1].uses[0]):
            results.append(results[-1].uses[0].out)
        found = next(
            (r for r in (rotation(v, columns) for v in reversed(results)) if r is not None), None
        )
        if found is None or not book.is_free(found.covered):
            continue
        if found.interleaved or not found.is_whole:
            site = _site(node, found)
            if site is not None:
                book.add(site)


def differs_along(found: Rotation, axis: int) -> bool:
    """Returns whether the tables vary along an axis of the rotated array."""
    return any(axis in table.seen.axes for table in (found.cos, found.sin))


def tables_of_rows(
    found: Rotation, cos: jax.Array, sin: jax.Array, rows: tuple[int, ...], heads: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the tables as [length, pairs], or [*rows, pairs] if they vary by more than the position.

    All heads share them; the heads are the axis `heads` of the rotated array.
    """
    rank = len(rows) + 2

    def of_rows(table: Table, array: jax.Array) -> jax.Array:
        array = table.array(array, rank).squeeze(heads)
        if all(size == 1 for size in array.shape[:-2]):
            array = array.reshape(array.shape[-2:])
            return jnp.broadcast_to(array, (rows[-1], array.shape[-1]))
        return jnp.broadcast_to(array, (*rows, array.shape[-1]))

    cos, sin = of_rows(found.cos, cos), of_rows(found.sin, sin)
    if cos.ndim != sin.ndim:
        cos, sin = (jnp.broadcast_to(t, (*rows, t.shape[-1])) for t in (cos, sin))
    return cos, sin


def _site(node: Node, found: Rotation) -> Site | None:
    """Returns the `rope` call for x [..., length, heads, features] or [..., heads, length, features]."""
    rank = found.x.ndim
    heads = next((i for i in (rank - 2, rank - 3) if i >= 1 and not differs_along(found, i)), None)
    if rank < 3 or heads is None:
        return None
    length = found.x.shape[2 * rank - 5 - heads]
    rows = (*found.x.shape[: rank - 3], length)
    words = ["interleaved"] * found.interleaved
    if not found.is_whole:
        words.append(f"{2 * len(found.cos.columns)} features")

    def call(x: jax.Array, cos: jax.Array, sin: jax.Array):
        cos, sin = tables_of_rows(found, cos, sin, rows, heads)
        turned = x if heads == rank - 2 else x.swapaxes(-2, -3)
        y = rope(turned, cos=cos, sin=sin, interleaved=found.interleaved)
        assert isinstance(y, jax.Array)
        return (y if heads == rank - 2 else y.swapaxes(-2, -3),)

    return Site(
        "rope",
        node,
        [found.x, found.cos.seen.base, found.sin.seen.base],
        [found.result],
        call,
        set(found.covered),
        f"rope({', '.join(words)}) of {found.x.aval.str_short()}",
    )
