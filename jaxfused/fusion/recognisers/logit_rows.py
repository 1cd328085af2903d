"""Reads what a program computes from each row of a product's logits, up to its losses.

Two kinds of values are followed forward from the logits z [..., V], whose rows' maximum is m. `Array` is
f (z - m + offset), such as log-probabilities, whose offset is minus the logarithm of the sum of
exp(z - m). `Row` is one number a row, a sum of multiples of the row's statistics: m itself, that
logarithm, the label's logit minus m, and the mean of z - m. Smoothed losses and the log-sum-exps of a
z-loss are such sums.
"""

import heapq
import math
from dataclasses import dataclass, field, replace

import jax
import numpy as np

from jaxfused.fusion.algebra import between, core, is_reshape, passed_on, view
from jaxfused.fusion.constants import evaluate, scalar, times_number
from jaxfused.fusion.graph import Node, Value
from jaxfused.fusion.recognisers.softmax import stands_at_rows

MAXIMUM, LOG_SUM, PICKED, MEAN = range(4)
ALWAYS, OF_LABELS = range(2)
"""Rows of `Row.factors`: terms of every row, and terms of rows whose label is one of the classes."""


@dataclass(frozen=True)
class Row:
    """One number for each row: the sum of `factors` [2, 4] times the row's statistics."""

    factors: np.ndarray
    steps: tuple[Node, ...]
    """Slices and reshapes of the logits' rows, in order."""
    is_live: bool = False
    """True if a maximum in it has a gradient in the program, which cancels only in whole sums."""

    def plus(self, other: "Row", factor: float = 1.0) -> "Row | None":
        if self.steps != other.steps:
            return None
        is_live = self.is_live or other.is_live
        return Row(self.factors + factor * other.factors, self.steps, is_live)

    def times(self, factor: float) -> "Row":
        return replace(self, factors=self.factors * factor)

    def is_free_of_maximum(self, together: bool) -> bool:
        """Returns whether a gradient of the maximum cancels, also in rows without a label's terms."""
        left = self.factors @ np.array([1.0, -1.0, -1.0, -1.0])
        return bool(np.all(np.abs(left.sum() if together else left) < 1e-9))


@dataclass(frozen=True)
class Total:
    """The sum of rows' numbers, of `shape`, over some axes of the rows."""

    row: Row
    shape: tuple[int, ...]
    axes: tuple[int, ...]


@dataclass(frozen=True)
class Array:
    """Logits minus their maximum, plus a row's `offset`, times `factor`."""

    offset: Row
    factor: float = 1.0


@dataclass(frozen=True)
class _Weighted:
    """An array times weights: `on` for the label's class, `off` for the others."""

    array: Array
    on: float
    off: float


@dataclass(frozen=True)
class _Sum:
    """Exponentials of an array, or their sum over the row."""

    array: Array
    is_summed: bool = False


@dataclass(frozen=True)
class _Capped:
    """Logits over a cap, or the tanh of it: the start of a soft cap."""

    cap: float
    is_bounded: bool = False


@dataclass(frozen=True)
class _Flag:
    """Flag of rows whose number is finite, by which `jax.nn.logsumexp` replaces an infinite maximum."""

    row: Row


State = Row | Total | Array | _Weighted | _Sum | _Capped | _Flag


@dataclass
class Reading:
    """States of the values that follow from logits."""

    start: Value
    states: dict[Value, State] = field(default_factory=dict)
    consumed: set[Node] = field(default_factory=set)
    """Operations that are read here."""
    labels: Value | None = None
    outside: str = ""
    """Terms of a label outside the classes: those of "nan" or "zero", or of the nearest class
    ("clip")."""
    soft_cap: float | None = None
    has_logarithm: bool = False

    @property
    def results(self) -> dict[Value, Row | Total]:
        """Returns the rows' numbers, or sums of them, that other operations read."""
        return {
            value: state
            for value, state in self.states.items()
            if isinstance(state, Row | Total)
            and (value.is_output or any(node not in self.consumed for node in value.uses))
        }

    def takes(self, labels: Value, outside: str) -> bool:
        """Returns whether these are the labels of the other terms too."""
        if self.labels is None:
            self.labels, self.outside = labels, outside
        return self.labels is labels and self.outside == outside


def read(start: Value) -> Reading:
    """Follows the logits `start` [..., V] forward."""
    factors = np.zeros((2, 4))
    factors[ALWAYS, MAXIMUM] = 1.0
    reading = Reading(start)
    reading.states[start] = Array(Row(factors, ()))
    queue = [(node.order, node) for node in set(start.uses)]
    seen = set(start.uses)
    heapq.heapify(queue)
    while queue:
        _, node = heapq.heappop(queue)
        state = _after(reading, node) if len(node.outs) == 1 else None
        if state is None:
            continue
        reading.consumed.add(node)
        reading.states[node.out] = state
        for reader in node.out.uses:
            if reader not in seen:
                seen.add(reader)
                heapq.heappush(queue, (reader.order, reader))
    return reading


def operations_after(node: Node, limit: int = 48) -> set[Node]:
    """Returns operations that follow from one, itself among them, up to products and convolutions."""
    found: set[Node] = set()
    pending = [node]
    while pending and len(found) < limit:
        node = pending.pop(0)
        if node not in found and node.name not in ("dot_general", "conv_general_dilated"):
            found.add(node)
            pending += [reader for value in node.outs for reader in value.uses]
    return found


def _after(reading: Reading, node: Node) -> State | None:
    """Returns what an operation computes from values that are read already, or None."""
    operand = passed_on(node)
    if operand is not None and operand in reading.states:
        return reading.states[operand]
    known = [reading.states.get(value) for value in node.ins]
    first = known[0]
    if len(node.ins) == 1:
        return _of_one(reading, node, first)
    if isinstance(first, Array) and node.name in ("gather", "dot_general"):
        by = _gathered if node.name == "gather" else _multiplied
        return by(reading, node, first)
    if node.name == "dot_general" and isinstance(known[1], Array):
        return _multiplied(reading, node, known[1])
    if isinstance(first, Row) and node.name == "gather":
        return first if _picks_all(node) else None
    if node.name == "select_n" and len(known) == 3:
        return _selected(reading, node, known)
    if node.name in ("add", "sub", "mul", "div", "max") and len(known) == 2:
        return _of_two(reading, node, known)
    return None


def _of_one(reading: Reading, node: Node, state: State | None) -> State | None:
    """Returns the result of an operation of one operand."""
    name = node.name
    if name == "neg" and isinstance(state, Row):
        return state.times(-1.0)
    if name == "neg" and isinstance(state, Array):
        return replace(state, factor=-state.factor)
    if name in ("slice", *_RESHAPES):
        return _moved(node, state)
    if isinstance(state, Row):
        if name == "is_finite":
            return _Flag(state)
        is_maximum = not np.delete(state.factors, MAXIMUM, axis=1).any()
        return replace(state, is_live=False) if name == "stop_gradient" and is_maximum else None
    if isinstance(state, _Capped):
        return _Capped(state.cap, True) if name == "tanh" and not state.is_bounded else None
    if isinstance(state, _Sum):
        if state.is_summed and name == "log":
            reading.has_logarithm = True
            factors = state.array.offset.factors.copy()
            factors[ALWAYS, LOG_SUM] += 1.0
            return replace(state.array.offset, factors=factors)
        if state.is_summed:
            return state if name == "abs" else None
        return replace(state, is_summed=True) if _reduces(node, "reduce_sum") else None
    if isinstance(state, Array) and state.factor == 1.0:
        if name == "exp":
            return _Sum(state)
        if _reduces(node, "reduce_max"):
            return replace(state.offset, is_live=True)
    if name == "reduce_sum" and isinstance(state, Array | _Weighted):
        return _total(node, state if isinstance(state, _Weighted) else _Weighted(state, 1.0, 1.0))
    return None


def _total(node: Node, weighted: _Weighted) -> Row | Total | None:
    """Returns a sum over the classes and, as in `-(labels * logs).sum()`, over axes of the rows."""
    shape = node.ins[0].shape
    *axes, last = sorted(map(int, node.params["axes"]))
    row = _summed(weighted, shape[-1])
    if last != len(shape) - 1 or row is None or not axes:
        return row if last == len(shape) - 1 else None
    return Total(row, shape[:-1], tuple(axes))


_RESHAPES = ("reshape", "squeeze", "broadcast_in_dim")


def _moved(node: Node, state: State | None) -> State | None:
    """Returns the result of a slice or a reshape that keeps the classes whole."""
    before, after = node.ins[0].shape, node.out.shape
    if isinstance(state, Row) or (isinstance(state, _Sum) and state.is_summed):
        return state if math.prod(before) == math.prod(after) else None
    if not isinstance(state, Array) or before[-1:] != after[-1:]:
        return None
    if node.name != "slice" and not is_reshape(node):
        return None
    offset = replace(state.offset, steps=(*state.offset.steps, node))
    return replace(state, offset=offset)


def _of_two(reading: Reading, node: Node, known: list[State | None]) -> State | None:
    """Returns the result of a sum, difference, product or quotient."""
    first, second = known
    name, (left, right) = node.name, node.ins
    if name in ("mul", "div"):
        return _scaled(reading, node, known)
    if name == "max":
        lowest = [scalar(value) == -np.inf for value in node.ins]
        return first if lowest[1] else second if lowest[0] else None
    sign = 1.0 if name == "add" else -1.0
    if isinstance(first, Row) and isinstance(second, Row):
        return first.plus(second, sign) if left.shape == right.shape else None
    if isinstance(first, Array):
        seen = view(right)
        row = reading.states.get(seen.base)
        if not isinstance(row, Row) or not stands_at_rows(seen, left.shape, left.ndim - 1):
            return None
        offset = first.offset.plus(row, sign / first.factor)
        if offset is None:
            return None
        reading.consumed |= between(right, {seen.base})
        return Array(offset, first.factor)
    return None


def _scaled(reading: Reading, node: Node, known: list[State | None]) -> State | None:
    """Returns the result of a product with a number or with the labels' weights."""
    scaled = times_number(node)
    if scaled is not None:
        state = known[node.ins.index(scaled[0])]
        return None if state is None else _times(reading, state, scaled[1])
    for state, other in zip(known, node.ins[::-1], strict=True):
        if isinstance(state, Array) and node.name == "mul":
            return _weighted(reading, state, other)
    return None


def _times(reading: Reading, state: State, factor: float) -> State | None:
    if isinstance(state, Row):
        return state.times(factor)
    if isinstance(state, _Capped):
        if not state.is_bounded or not math.isclose(state.cap, factor, rel_tol=1e-6):
            return None
        reading.soft_cap = factor
        start = reading.states[reading.start]
        return start if isinstance(start, Array) else None
    if isinstance(state, Array):
        if 0 < factor < 1 and _is_read_once(reading):
            return _Capped(1 / factor)
        return replace(state, factor=state.factor * factor)
    return None


def _is_read_once(reading: Reading) -> bool:
    """Returns whether nothing was computed from the logits so far, and one operation reads them."""
    is_start = all(state is reading.states[reading.start] for state in reading.states.values())
    return is_start and all(value.used_once for value in reading.states)


def _weighted(reading: Reading, array: Array, weights: Value) -> _Weighted | None:
    found = _weights(weights)
    if found is None or not reading.takes(found[0], "zero"):
        return None
    return _Weighted(array, *found[1:])


def _weights(value: Value) -> tuple[Value, float, float] | None:
    """Returns (labels, weight of the label's class, weight of the others), or None."""
    value = core(value)
    node = value.node
    if node is None:
        return None
    if node.name == "convert_element_type":
        labels = _labels_that_equal(node.ins[0])
        return None if labels is None else (labels, 1.0, 0.0)
    if node.name == "select_n" and len(node.ins) == 3:
        labels = _labels_that_equal(node.ins[0])
        off, on = (scalar(v) for v in node.ins[1:])
        return None if labels is None or off is None or on is None else (labels, on, off)
    scaled = times_number(node)
    if scaled is not None:
        found = _weights(scaled[0])
        return None if found is None else (found[0], found[1] * scaled[1], found[2] * scaled[1])
    if node.name not in ("add", "sub"):
        return None
    for weights, other in (node.ins, node.ins[::-1]):
        number = scalar(other)
        if number is None or (node.name == "sub" and other is not node.ins[1]):
            continue
        found = _weights(weights)
        if found is not None:
            labels, on, off = found
            number = number if node.name == "add" else -number
            return labels, on + number, off + number
    return None


def _labels_that_equal(value: Value) -> Value | None:
    """Returns the labels [...] of a comparison [..., V] with the numbers of the classes, or None."""
    seen = view(value)
    node = seen.base.node
    if node is None or node.name != "eq" or seen.base.shape != value.shape:
        return None
    for labels, classes in (node.ins, node.ins[::-1]):
        numbers = evaluate(classes)
        if numbers is None or numbers.size != value.shape[-1] != 1:
            continue
        seen = view(labels)
        is_classes = (numbers.reshape(-1) == range(value.shape[-1])).all()
        if is_classes and stands_at_rows(seen, value.shape, value.ndim - 1):
            return seen.base
    return None


def _selected(reading: Reading, node: Node, known: list[State | None]) -> State | None:
    """Returns the label's logits by a comparison, or a maximum that is finite."""
    which, of_false, _ = node.ins
    state = known[2]
    if isinstance(known[0], _Flag) and isinstance(state, Row):
        return state if scalar(of_false) == 0.0 else None
    if not isinstance(state, Array) or scalar(of_false) != 0.0:
        return None
    labels = _labels_that_equal(which)
    if labels is None or not reading.takes(labels, "zero"):
        return None
    return _Weighted(state, 1.0, 0.0)


def _multiplied(reading: Reading, node: Node, array: Array) -> Row | None:
    """Returns the sum over the classes of an array times the labels' weights, by one product."""
    (left, right), (left_batch, right_batch) = node.params["dimension_numbers"]
    last = node.ins[0].ndim - 1
    if [*left] != [last] or [*right] != [last] or node.ins[0].shape != node.ins[1].shape:
        return None
    if [*left_batch] != [*range(last)] or [*right_batch] != [*range(last)]:
        return None
    weights = next((v for v in node.ins if v not in reading.states), None)
    found = None if weights is None else _weighted(reading, array, weights)
    return None if found is None else _summed(found, node.ins[0].shape[-1])


_OUTSIDE = {
    jax.lax.GatherScatterMode.FILL_OR_DROP: "nan",
    jax.lax.GatherScatterMode.CLIP: "clip",
    jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS: "clip",
}


def _gathered(reading: Reading, node: Node, array: Array) -> Row | None:
    """Returns the label's entry of each row, or None."""
    operand = node.ins[0]
    labels, outside = _picking_labels(node), _OUTSIDE.get(node.params["mode"])
    rows = math.prod(operand.shape[:-1])
    if labels is None or outside is None or math.prod(node.out.shape) != rows:
        return None
    if math.prod(labels.shape) != rows or not reading.takes(labels, outside):
        return None
    return _summed(_Weighted(array, 1.0, 0.0), operand.shape[-1])


def _picking_labels(node: Node) -> Value | None:
    """Returns the labels of a gather of one entry of each row, such as x[rows, labels]."""
    operand, indices = node.ins
    numbers = node.params["dimension_numbers"]
    last = operand.ndim - 1
    before = tuple(range(last))
    if any(size != 1 for size in node.params["slice_sizes"]):
        return None
    if tuple(numbers.start_index_map) == (last,):
        in_order = tuple(numbers.operand_batching_dims) == before
        return indices if in_order and (*numbers.start_indices_batching_dims,) == before else None
    parts = indices.node
    if tuple(numbers.start_index_map) != (*before, last) or parts is None:
        return None
    if parts.name != "concatenate" or len(parts.ins) != operand.ndim or numbers.offset_dims:
        return None
    if indices.shape[:-1] != operand.shape[:-1]:
        return None
    for axis, part in enumerate(parts.ins[:-1]):
        array = evaluate(part)
        shape = [size if i == axis else 1 for i, size in enumerate((*operand.shape[:-1], 1))]
        if array is None or [*array.shape] != shape or (array.ravel() != range(array.size)).any():
            return None
    return parts.ins[-1]


def _picks_all(node: Node) -> bool:
    """Returns whether a gather selects the only element of a last axis of length 1."""
    operand, indices = node.ins
    numbers = node.params["dimension_numbers"]
    if operand.shape != (*node.out.shape, 1):
        return False
    index = evaluate(indices) if tuple(numbers.start_index_map) == (operand.ndim - 1,) else None
    return index is not None and not index.any()


def _summed(weighted: _Weighted, classes: int) -> Row | None:
    """Returns the sum over the classes of an array times its weights."""
    array = weighted.array
    offset = array.offset
    if offset.factors[OF_LABELS].any():
        return None
    of_label, of_all = weighted.on - weighted.off, weighted.off * classes
    factors = np.zeros((2, 4))
    factors[OF_LABELS] = of_label * offset.factors[ALWAYS]
    factors[OF_LABELS, PICKED] += of_label
    factors[ALWAYS] = of_all * offset.factors[ALWAYS]
    factors[ALWAYS, MEAN] += of_all
    return replace(offset, factors=array.factor * factors)


def _reduces(node: Node, name: str) -> bool:
    """Returns whether the operation reduces the classes, and nothing else."""
    last = node.ins[0].ndim - 1
    return node.name == name and tuple(map(int, node.params["axes"])) == (last,)
