"""Recognises rotations of queries and keys by their position, in halves and in neighbours.

They are read from their result back: halves as a concatenation of two sums, or as x * cos + rotated(x)
* sin; neighbours as two interleaved sums. A rotation of halves alone is XLA's to run; `projection`
takes it in with the product before it.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxfused.fuse.algebra import (
    View,
    at_dtype,
    between,
    core,
    is_transparent,
    product,
    stages,
    total,
    view,
)
from jaxfused.fuse.constants import elementwise, evaluate, scalar
from jaxfused.fuse.graph import Node, Value
from jaxfused.fuse.site import Book, Site
from jaxfused.ops.rope import rope


@dataclass(frozen=True, eq=False)
class Table:
    """Cosines or sines and where their axes are among those of what is rotated."""

    seen: View
    is_doubled: bool
    """Whether they are written twice, once for each half."""

    def array(self, table: jax.Array, rank: int) -> jax.Array:
        """The table with `rank` axes, of length 1 where it repeats, and the pairs last."""
        shape = [1] * rank
        for axis, size in zip(self.seen.axes, table.shape, strict=True):
            if axis is not None:
                shape[axis] = size
        table = table.reshape(shape)
        return table[..., : table.shape[-1] // 2] if self.is_doubled else table


@dataclass(frozen=True, eq=False)
class Rotation:
    """A value that is another one rotated."""

    x: Value
    result: Value
    cos: Table
    sin: Table
    interleaved: bool
    covered: frozenset[Node]


def rotation(value: Value) -> Rotation | None:
    """The rotation that a value is, or None."""
    whole = core(value)
    node = whole.node
    if node is None:
        return None
    if node.name == "concatenate" and len(node.ins) == 2:
        found = _of_concatenation(whole, node)
    elif node.name in ("add", "sub"):
        found = _of_sum(whole)
    elif node.name == "reshape":
        found = _of_neighbours(whole, node)
    else:
        return None
    if found is None:
        return None
    x, cos, sin, interleaved = found
    at = at_dtype(x, value.dtype)
    if at is None or x.shape != value.shape or core(x).dtype.itemsize < at.dtype.itemsize:
        return None
    leaves = {*stages(at), cos.seen.base, sin.seen.base}
    return Rotation(at, value, cos, sin, interleaved, frozenset(between(value, leaves)))


_Found = tuple[Value, Table, Table, bool]


def _of_concatenation(value: Value, node: Node) -> _Found | None:
    """concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin])."""
    if node.params["dimension"] != value.ndim - 1 or node.ins[0].shape != node.ins[1].shape:
        return None
    return _of_pair(node.ins[0], node.ins[1], value.ndim, _half, interleaved=False)


def _of_neighbours(value: Value, node: Node) -> _Found | None:
    """The same with x1 and x2 from even and odd places, and the sums stacked in the last axis."""
    stacked = core(node.ins[0])
    both = stacked.node
    if both is None or both.name not in ("concatenate", "stack") or len(both.ins) != 2:
        return None
    axis = both.params["axis" if both.name == "stack" else "dimension"]
    if axis != stacked.ndim - 1 or stacked.shape[-1] != 2:
        return None
    if stacked.shape[:-2] != value.shape[:-1]:
        return None
    pair = [v if both.name == "stack" else _without_last(v) for v in both.ins]
    if pair[0] is None or pair[1] is None:
        return None
    return _of_pair(pair[0], pair[1], value.ndim, _neighbour, interleaved=True)


def _without_last(value: Value) -> Value | None:
    """The value before a last axis of length 1 was added."""
    value = core(value)
    node = value.node
    if node is None or node.name not in ("broadcast_in_dim", "reshape"):
        return None
    inner = node.ins[0]
    return inner if inner.shape == value.shape[:-1] and value.shape[-1] == 1 else None


def _of_pair(first: Value, second: Value, rank: int, part, *, interleaved: bool) -> _Found | None:
    found: dict[tuple[int, int], tuple[float, Value, View]] = {}
    for row, value in enumerate((first, second)):
        parts = total(value)
        if parts.constant != 0.0 or len(parts.terms) != 2:
            return None
        for factor, seen in parts.terms:
            read = _times_table(seen, part)
            if read is None:
                return None
            index, x, table = read
            found[row, index] = (factor, x, table)
    if len(found) != 4 or len({core(x) for _, x, _ in found.values()}) != 1:
        return None
    signs = [found[key][0] for key in ((0, 0), (0, 1), (1, 1), (1, 0))]
    tables = [found[key][2] for key in ((0, 0), (1, 1), (0, 1), (1, 0))]
    if signs != [1.0, -1.0, 1.0, 1.0] or tables[0] != tables[1] or tables[2] != tables[3]:
        return None
    x = found[0, 0][1]
    return x, Table(tables[0], False), Table(tables[2], False), interleaved


def _times_table(seen: View, part) -> tuple[int, Value, View] | None:
    """A part of x times a table: which part, x, and the table."""
    node = seen.base.node
    if node is None or node.name != "mul":
        return None
    for x, table in (node.ins, node.ins[::-1]):
        read = part(core(x))
        if read is not None and x.shape == node.out.shape:
            axes = tuple(i if size != 1 else None for i, size in enumerate(table.shape))
            return (*read, _table(table, axes))
    return None


def _table(value: Value, axes: tuple[int | None, ...]) -> View:
    return view(value, axes)


def _half(value: Value) -> tuple[int, Value] | None:
    """Which half of the last axis of which array a value is."""
    node = value.node
    if node is None or not node.ins:
        return None
    whole = node.ins[0]
    if not whole.shape or whole.shape[-1] != 2 * value.shape[-1]:
        return None
    if node.name == "split" and node.params["axis"] == whole.ndim - 1:
        return value.index, whole
    if node.name == "slice" and node.params["strides"] is None:
        starts = node.params["start_indices"]
        if whole.shape[:-1] == value.shape[:-1]:
            return int(starts[-1] > 0), whole
    return None


def _neighbour(value: Value) -> tuple[int, Value] | None:
    """Whether a value has the even or the odd places of the last axis of which array."""
    node = value.node
    if node is None or not node.ins:
        return None
    whole = node.ins[0]
    if node.name == "slice" and whole.shape and whole.shape[-1] == 2 * value.shape[-1]:
        strides = node.params["strides"]
        if strides is not None and tuple(strides) == (*[1] * (whole.ndim - 1), 2):
            return int(node.params["start_indices"][-1]), whole
    if node.name in ("squeeze", "reshape") and whole.shape == (*value.shape, 1):
        cut = core(whole).node
        if cut is None or cut.name not in ("slice", "split"):
            return None
        pairs = core(cut.ins[0])
        if pairs.node is None or pairs.node.name != "reshape" or pairs.shape[-1] != 2:
            return None
        x = pairs.node.ins[0]
        if x.shape != (*value.shape[:-1], 2 * value.shape[-1]):
            return None
        if cut.name == "split":
            return core(whole).index, x
        return int(cut.params["start_indices"][-1]), x
    return None


def _of_sum(value: Value) -> _Found | None:
    """X * cos + concatenate([-x2, x1]) * sin, with tables for both halves."""
    parts = total(value)
    if parts.constant != 0.0 or len(parts.terms) != 2:
        return None
    for plain, turned in (parts.terms, parts.terms[::-1]):
        read = _times_table(turned.view, _turned)
        if read is None or plain.factor != 1.0 or turned.factor != 1.0:
            continue
        _, x, sin = read
        of_x = _times_table(plain.view, functools.partial(_whole, core(x)))
        if of_x is None:
            continue
        tables = (of_x[2], sin)
        if all(_halves_are_equal(t.base) for t in tables):
            return x, Table(tables[0], True), Table(tables[1], True), False
    return None


def _whole(x: Value, value: Value) -> tuple[int, Value] | None:
    """A value that is x itself."""
    return (0, value) if value is x else None


def _turned(value: Value) -> tuple[int, Value] | None:
    """concatenate([-x2, x1])."""
    node = value.node
    if node is None or node.name != "concatenate" or len(node.ins) != 2:
        return None
    if node.params["dimension"] != value.ndim - 1:
        return None
    negative, first = node.ins
    parts = product(negative, stop=lambda seen: seen if _half(seen.base) is not None else None)
    if parts.constant != -1.0 or len(parts.powers) != 1:
        return None
    ((seen, power),) = parts.powers.items()
    upper, lower = _half(seen.base), _half(core(first))
    if power != 1.0 or upper is None or lower is None or core(upper[1]) is not core(lower[1]):
        return None
    return (0, lower[1]) if (lower[0], upper[0]) == (0, 1) else None


def _halves_are_equal(value: Value) -> bool:
    """Whether the two halves of the last axis are provably the same numbers."""
    columns = _columns(value)
    if columns is not None:
        half = columns.shape[-1] // 2
        return 2 * half == columns.shape[-1] and np.array_equal(
            columns[..., :half], columns[..., half:]
        )
    value = core(value)
    node = value.node
    if node is None:
        return False
    if node.name == "concatenate" and node.params["dimension"] == value.ndim - 1:
        return len(node.ins) == 2 and core(node.ins[0]) is core(node.ins[1])
    if node.name in ("broadcast_in_dim", "reshape") and _keeps_last_axis(node):
        return _halves_are_equal(node.ins[0])
    if node.name in ("cos", "sin") or is_transparent(node):
        return _halves_are_equal(node.ins[0])
    if elementwise(node) is not None:
        return all(
            scalar(v) is not None or v.shape[-1:] == (1,) or _halves_are_equal(v) for v in node.ins
        )
    return False


def _keeps_last_axis(node: Node) -> bool:
    if node.ins[0].shape[-1:] != node.out.shape[-1:]:
        return False
    if node.name == "reshape":
        return True
    return int(node.params["broadcast_dimensions"][-1]) == node.out.ndim - 1


def _columns(value: Value) -> np.ndarray | None:
    """Constant rows of which each row of the value is one, or None."""
    value = core(value)
    node = value.node
    if value.is_constant and value.ndim:
        array = evaluate(value)
        if array is not None:
            return np.broadcast_to(array, (*array.shape[:-1], value.shape[-1]))
    if node is None or not node.ins:
        return None
    if node.name == "gather":
        numbers = node.params["dimension_numbers"]
        operand = node.ins[0]
        last = operand.ndim - 1
        whole = node.params["slice_sizes"][last] == operand.shape[last]
        if (
            whole
            and last not in numbers.collapsed_slice_dims
            and value.ndim - 1 in numbers.offset_dims
        ):
            return _columns(operand)
        return None
    if (
        node.name in ("broadcast_in_dim", "reshape", "squeeze")
        and node.ins[0].shape[-1:] == (value.shape[-1:])
    ):
        return _columns(node.ins[0])
    if node.name == "split" and node.params["axis"] == node.ins[0].ndim - 1:
        columns = _columns(node.ins[0])
        first = int(sum(node.params["sizes"][: value.index]))
        return None if columns is None else columns[..., first : first + value.shape[-1]]
    if node.name == "slice" and node.params["strides"] is None:
        columns = _columns(node.ins[0])
        first = node.params["start_indices"][-1]
        return None if columns is None else columns[..., first : first + value.shape[-1]]
    return None


# --- a site of its own ----------------------------------------------------------------------------


def find(book: Book) -> None:
    """Adds the rotations of neighbours that no product has taken in."""
    for node in book.graph.nodes:
        if node.name != "reshape" or node in book.owner:
            continue
        results = [node.out]
        while results[-1].used_once and is_transparent(results[-1].uses[0]):
            results.append(results[-1].uses[0].out)
        found = next((r for r in map(rotation, reversed(results)) if r is not None), None)
        if found is None or not found.interleaved or not book.is_free(found.covered):
            continue
        site = _site(node, found)
        if site is not None:
            book.add(site)


def rows_of_tables(found: Rotation, rank: int) -> bool:
    """Whether the tables differ by position and not by head: x is [..., length, heads, features]."""
    heads = rank - 2
    return all(heads not in table.seen.axes for table in (found.cos, found.sin))


def tables_of_rows(
    found: Rotation, cos: jax.Array, sin: jax.Array, rows: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
    """The tables as [T, R/2], or with all axes of the rows where they differ beyond the position."""
    rank = len(rows) + 2

    def of_rows(table: Table, array: jax.Array) -> jax.Array:
        array = table.array(array, rank)
        array = array.reshape(*array.shape[:-2], array.shape[-1])
        if all(size == 1 for size in array.shape[:-2]):
            array = array.reshape(array.shape[-2:])
            return jnp.broadcast_to(array, (rows[-1], array.shape[-1]))
        return jnp.broadcast_to(array, (*rows, array.shape[-1]))

    cos, sin = of_rows(found.cos, cos), of_rows(found.sin, sin)
    if cos.ndim != sin.ndim:
        cos, sin = (jnp.broadcast_to(t, (*rows, t.shape[-1])) for t in (cos, sin))
    return cos, sin


def _site(node: Node, found: Rotation) -> Site | None:
    rank = found.x.ndim
    if rank < 3 or not rows_of_tables(found, rank):
        return None
    rows = found.x.shape[:-2]

    def call(x: jax.Array, cos: jax.Array, sin: jax.Array):
        cos, sin = tables_of_rows(found, cos, sin, rows)
        return (rope(x, cos=cos, sin=sin, interleaved=found.interleaved),)

    return Site(
        "rope",
        node,
        [found.x, found.cos.seen.base, found.sin.seen.base],
        [found.result],
        call,
        set(found.covered),
        f"rope(interleaved) of {found.x.aval.str_short()}",
    )
