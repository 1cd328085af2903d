"""Finds slices of a product's features, such as the queries, keys and values of one matrix.

Such a product is sliced along its features, often after a transposition or a reshape into heads. The
operations on its features are applied to the columns of the matrix instead.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from jaxfused.fusion.algebra import between, is_transparent, trailing
from jaxfused.fusion.graph import Node, Value, cuts
from jaxfused.fusion.recognisers.product import Biased, Projection, earliest_matrix
from jaxfused.fusion.site import Book
from jaxfused.runtime.shapes import reshaped

Move = Callable[[jax.Array], jax.Array]
"""Function that slices, reshapes or transposes the feature axes of an array: all but its first axis."""


@dataclass(frozen=True, eq=False)
class Part(Projection):
    """A slice of the features of a product, as a product with some columns of the matrix."""

    whole: Projection
    columns: np.ndarray
    """Indices of the slice's columns in the matrix, in the shape of the slice's feature axes."""
    rows_at: tuple[int, ...]
    """Axes of `result` that are rows; the others are features."""
    moves: tuple[Move, ...]

    @property
    def features(self) -> tuple[int, ...]:
        return self.columns.shape

    @property
    def has_rows_in_front(self) -> bool:
        return self.rows_at == tuple(range(len(self.rows_at)))

    def matrix(self, w: jax.Array) -> jax.Array:
        return self._cut(self.whole.matrix(w))

    def bias(self, bias: jax.Array) -> jax.Array:
        if bias.size != math.prod(self.whole.features):
            return bias.reshape(-1)
        return self._cut(bias.reshape(1, -1)).reshape(-1)

    def _cut(self, array: jax.Array) -> jax.Array:
        for move in self.moves:
            array = move(array)
        return reshaped(array, array.shape[0], -1)

    def shaped(self, y: jax.Array) -> jax.Array:
        y = reshaped(y, *self.rows, *self.features)
        features = [axis for axis in range(y.ndim) if axis not in self.rows_at]
        return y.transpose(np.argsort([*self.rows_at, *features]))


def whole_of(products: Sequence[Projection]) -> Projection | None:
    """Returns the product that `products` slice in order and without gaps, or None."""
    cut = [p for p in products if isinstance(p, Part)]
    if len(cut) < len(products) or len({p.whole.node for p in cut}) > 1:
        return None
    whole = cut[0].whole
    columns = np.concatenate([p.columns.ravel() for p in cut])
    return whole if np.array_equal(columns, np.arange(math.prod(whole.features))) else None


@dataclass(frozen=True)
class _State:
    """A value between a product and a slice of its features."""

    value: Value
    rows_at: tuple[int, ...]
    columns: np.ndarray
    moves: tuple[Move, ...] = ()
    bias: Value | None = None
    covered: frozenset[Node] = frozenset()

    def moved(self, node: Node, rows_at: tuple[int, ...], move: Callable, out: int = 0) -> "_State":
        """Returns the state after an operation that applies `move` to the feature axes."""
        return replace(
            self,
            value=node.outs[out],
            rows_at=rows_at,
            columns=move(self.columns[None])[0],
            moves=(*self.moves, move),
            covered=self.covered | {node},
        )


def parts(book: Book) -> Iterator[tuple[Part, Biased]]:
    """Yields the feature slices, with their biases, of all products that nothing replaces yet."""
    for node in book.graph.nodes:
        if node.name == "dot_general" and node not in book.owner and node.out.is_floating:
            yield from _parts_of(book, node)


def _parts_of(book: Book, node: Node) -> list[tuple[Part, Biased]]:
    (left, right), (left_batch, _) = node.params["dimension_numbers"]
    if left_batch or node.ins[0].dtype != node.ins[1].dtype:
        return []
    for side, (of_x, of_w) in enumerate(((left, right), (right, left))):
        x, w = node.ins[side], node.ins[1 - side]
        order = sorted(zip(map(int, of_x), map(int, of_w), strict=True))
        rows = x.ndim - len(order)
        if rows < 1 or [axis for axis, _ in order] != list(range(rows, x.ndim)):
            continue
        contracted = tuple(axis for _, axis in order)
        earliest = earliest_matrix(w, contracted)
        covered = frozenset({node, *between(w, {earliest})})
        whole = Projection(node, x, earliest, contracted, node.out, covered)
        first = 0 if side == 0 else node.out.ndim - rows
        columns = np.arange(math.prod(whole.features)).reshape(whole.features)
        rows_at = tuple(range(first, first + rows))
        state = _State(node.out, rows_at, columns, (_with_axes(whole.features),))
        found = _cut(book, state, x.dtype)
        if found:
            return [_part(whole, state) for state in found]
    return []


def _with_axes(shape: tuple[int, ...]) -> Move:
    return lambda array: array.reshape(array.shape[0], *shape)


def _part(whole: Projection, state: _State) -> tuple[Part, Biased]:
    part = Part(
        whole.node,
        whole.x,
        whole.w,
        whole.contracted,
        state.value,
        whole.covered | state.covered,
        whole,
        state.columns,
        state.rows_at,
        state.moves,
    )
    return part, Biased(state.value, state.bias, frozenset())


_LONGEST = 12


def _cut(book: Book, state: _State, dtype: Any) -> list[_State]:
    """Returns the slices into which a product's features are cut; an empty list if they are not."""
    for _ in range(_LONGEST):
        readers = list(dict.fromkeys(state.value.uses))
        if state.value.is_output or not readers or not book.is_free(readers):
            return []
        found = [_pieces(state, node) for node in readers]
        if all(found):
            return [_to_the_end(book, piece, dtype) for pieces in found for piece in pieces]
        following = _following(state, readers[0]) if len(readers) == 1 else None
        if following is None:
            return []
        state = following
    return []


def _to_the_end(book: Book, state: _State, dtype: Any) -> _State:
    """Returns the slice after its bias, squeezes and casts, in `dtype` if one of these has it."""
    best = state
    while state.value.used_once and book.is_free(state.value.uses):
        node = state.value.uses[0]
        if node.name not in ("squeeze", "add") and not is_transparent(node):
            break
        following = _following(state, node)
        if following is None:
            break
        state = following
        # A result in `dtype` is preferred; without one, the last result counts.
        if state.value.dtype == dtype or best.value.dtype != dtype:
            best = state
    return best


def _following(state: _State, node: Node) -> _State | None:
    """Returns the state after an operation whose result has all features of its operand, or None."""
    if is_transparent(node):
        return replace(state, value=node.out, covered=state.covered | {node})
    if node.name == "add":
        return _biased(state, node)
    if node.name == "transpose":
        permutation = [int(axis) for axis in node.params["permutation"]]
        rows_at = tuple(permutation.index(axis) for axis in state.rows_at)
        if list(rows_at) != sorted(rows_at):
            return None
        before = _features_at(state)
        order = [before.index(axis) + 1 for axis in permutation if axis not in state.rows_at]
        return state.moved(node, rows_at, lambda a: a.transpose(0, *order))
    if node.name not in ("reshape", "squeeze"):
        return None
    if node.name == "squeeze":
        gone = [int(axis) for axis in node.params["dimensions"]]
        if set(gone) & set(state.rows_at):
            return None
        rows_at = tuple(axis - sum(other < axis for other in gone) for axis in state.rows_at)
    else:
        rows_at = state.rows_at
        rows = len(rows_at)
        in_front = rows_at == tuple(range(rows))
        if not in_front or node.out.shape[:rows] != state.value.shape[:rows]:
            return None
    shape = [size for axis, size in enumerate(node.out.shape) if axis not in rows_at]
    return state.moved(node, rows_at, lambda a: a.reshape(a.shape[0], *shape))


def _biased(state: _State, node: Node) -> _State | None:
    other = node.ins[1] if node.ins[0] is state.value else node.ins[0]
    in_front = state.rows_at == tuple(range(len(state.rows_at)))
    if state.bias is not None or not in_front or node.out.shape != state.value.shape:
        return None
    bias = trailing(other, state.columns.shape)
    if bias is None or not np.array_equal(state.columns.ravel(), np.arange(state.columns.size)):
        return None
    covered = state.covered | {node} | between(other, {bias})
    return replace(state, value=node.out, bias=bias, covered=covered)


def _features_at(state: _State) -> list[int]:
    return [axis for axis in range(state.value.ndim) if axis not in state.rows_at]


def _pieces(state: _State, node: Node) -> list[_State]:
    """Returns the states that an operation slices along a feature axis; empty if it slices none."""
    features = _features_at(state)
    shape = state.value.shape

    def piece(axis: int, cut: slice, out: int) -> _State:
        at = (slice(None),) * (features.index(axis) + 1)
        return state.moved(node, state.rows_at, lambda a: a[(*at, cut)], out)

    if node.name == "slice":
        taken = cuts(node.out)
        axes = [axis for axis, cut in enumerate(taken) if cut != slice(0, shape[axis], 1)]
        if len(axes) == 1 and axes[0] in features:
            return [piece(axes[0], taken[axes[0]], 0)]
    if node.name == "split" and node.params["axis"] in features:
        ends = np.cumsum(node.params["sizes"])
        sizes: Sequence[int] = node.params["sizes"]
        return [
            piece(node.params["axis"], slice(int(end - size), int(end)), i)
            for i, (end, size) in enumerate(zip(ends, sizes, strict=True))
        ]
    if node.name == "unstack" and node.params["axis"] in features:
        return [_unstacked(state, node, i) for i in range(len(node.outs))]
    return []


def _unstacked(state: _State, node: Node, index: int) -> _State:
    axis = node.params["axis"]
    before = (slice(None),) * (_features_at(state).index(axis) + 1)
    rows_at = tuple(a - (axis < a) for a in state.rows_at)
    return state.moved(node, rows_at, lambda a: a[(*before, index)], index)
