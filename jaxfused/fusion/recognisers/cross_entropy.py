"""Finds linear_softmax_cross_entropy: the loss of a product whose logits would fill the memory.

It starts at a log-sum-exp and looks for the label's logit or log-probability: gathered, or as a sum with
a one-hot array. The logits' rows may be some of the product's (`logits[:, :-1]`), in another shape.
Fewer than FEWEST_LOGITS logits are left to XLA: saving them is faster than computing them again.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxfused.fusion.algebra import View, between, core, is_reshape, view
from jaxfused.fusion.constants import evaluate
from jaxfused.fusion.graph import Node, Value, cuts
from jaxfused.fusion.recognisers.product import Biased, Projection, biased, projections
from jaxfused.fusion.recognisers.softmax import (
    before_maximum,
    is_maximum,
    log_of_sum,
    stands_at_rows,
)
from jaxfused.fusion.site import Book, Site
from jaxfused.ops.loss.linear_cross_entropy import linear_softmax_cross_entropy
from jaxfused.runtime.shapes import reshaped

FEWEST_LOGITS = 2**24
"""Fewest logits of a loss that is replaced. Its backward computes the logits again, in chunks of as
many."""


@dataclass(frozen=True)
class _Loss:
    """The loss of each token, or its negative."""

    value: Value
    sign: float
    labels: Value
    outside: str
    """Result for a label outside the classes: "nan" or "zero"."""


def find(book: Book) -> None:
    """Finds losses whose logits are the result of a product, and records their replacements."""
    by_result = None
    for node in book.graph.nodes:
        if node.name != "log":
            continue
        logits = _logits_of(node)
        if logits is None:
            continue
        if by_result is None:
            found = [(p, biased(book, p)) for p in projections(book)]
            by_result = {affine.value: (p, affine) for p, affine in found}
        loss = _loss(node, logits)
        product, steps = _product_of(logits, by_result)
        if product is None:
            continue
        p, affine = product
        if len(p.contracted) != p.w.ndim - 1 or not book.is_free(p.covered | affine.covered):
            continue
        is_few = math.prod(logits.shape) < FEWEST_LOGITS
        if loss is not None and not is_few:
            _add(book, node, loss, p, affine, steps)
        elif loss is not None:
            book.miss("linear_softmax_cross_entropy", node, "its logits are few enough to be kept")
        elif not is_few:
            reason = "its loss is not only the log-probability of one label for each row"
            book.miss("linear_softmax_cross_entropy", node, reason)


def _product_of(
    logits: Value, products: dict[Value, tuple[Projection, Biased]]
) -> tuple[tuple[Projection, Biased] | None, list[Node]]:
    """Returns the product that computes logits, and the slices and reshapes of its rows, in order."""
    steps: list[Node] = []
    value = logits
    while True:
        found = products.get(core(value)) or products.get(value)
        node = core(value).node
        if found is not None or node is None or not (node.name == "slice" or is_reshape(node)):
            return found, steps[::-1]
        if node.ins[0].shape[-1:] != logits.shape[-1:]:
            return None, []
        steps.append(node)
        value = node.ins[0]


def _stepped(x: jax.Array, steps: Sequence[Node]) -> jax.Array:
    """Returns x [..., D] after slices and reshapes of logits' rows."""
    for node in steps:
        if node.name == "slice":
            x = x[tuple(cuts(node.out)[:-1])]
        else:
            x = reshaped(x, *node.out.shape[:-1], x.shape[-1])
    return x


def _logits_of(node: Node) -> Value | None:
    """Returns the logits if the operation is the logarithm of their softmax's denominator, or None."""
    found = log_of_sum(node)
    if found is None:
        return None
    exponents, axis = found
    return before_maximum(exponents, axis) if axis == exponents.ndim - 1 else None


def _loss(node: Node, logits: Value) -> _Loss | None:
    """Returns the cross entropy that the program computes from the logits' log-sum-exp, or None."""
    value = node.out
    # Softmax subtracts the maximum from the logits. The program adds it to the logarithm again
    # (`is_whole`), or works on logits minus the maximum (`is_log_softmax`).
    is_whole = is_log_softmax = False
    for _ in range(6):
        readers = set(value.uses)
        if len(readers) != 1:
            return None
        (reader,) = readers
        other = reader.ins[-1] if reader.ins[0] is value else reader.ins[0]
        if reader.name in ("broadcast_in_dim", "reshape", "squeeze"):
            value = reader.out
            continue
        if is_log_softmax:
            if reader.name == "gather":
                labels = _labels(reader, value)
                return None if labels is None else _Loss(reader.out, -1.0, labels, "nan")
            return _loss_by_one_hot(reader, other)
        if not stands_at_rows(view(value), logits.shape, logits.ndim - 1):
            return None
        if is_whole:
            if reader.name != "sub" or reader.ins[0] is not value:
                return None
            labels = _gathered(other, logits)
            return None if labels is None else _Loss(reader.out, 1.0, labels, "nan")
        if reader.name == "add" and value.ndim == logits.ndim - 1:
            is_whole = is_maximum(other, core(logits), logits.ndim - 1)
        elif reader.name == "sub" and reader.ins[1] is value:
            is_log_softmax = _is_shifted(other, logits)
        if not (is_whole or is_log_softmax):
            return None
        value = reader.out
    return None


def _loss_by_one_hot(node: Node, other: Value) -> _Loss | None:
    """Returns the negative loss, a sum of log-probabilities times a one-hot array, or None."""
    labels = _one_hot(other) if node.name == "mul" else None
    after = node.out.uses[0] if node.out.used_once else None
    if labels is None or after is None or after.name != "reduce_sum":
        return None
    if tuple(map(int, after.params["axes"])) != (node.out.ndim - 1,):
        return None
    return _Loss(after.out, -1.0, labels, "zero")


def _is_shifted(value: Value, logits: Value) -> bool:
    node = core(value).node
    return (
        node is not None
        and node.name == "sub"
        and core(node.ins[0]) is core(logits)
        and is_maximum(node.ins[1], core(logits), logits.ndim - 1)
    )


def _gathered(value: Value, logits: Value) -> Value | None:
    """Returns the labels [...] if a value is the logits gathered at them, or None."""
    for _ in range(6):
        value = core(value)
        node = value.node
        if node is None:
            return None
        if node.name in ("reshape", "squeeze") and node.ins[0].shape == (*value.shape, 1):
            value = node.ins[0]
            continue
        if node.name != "gather":
            return None
        operand, indices = node.ins[0], node.ins[1]
        numbers = node.params["dimension_numbers"]
        last = operand.ndim - 1
        if operand.shape == (*value.shape, 1) and tuple(numbers.start_index_map) == (last,):
            # The gather selects the only element of an axis of length 1: its index must be 0.
            index = evaluate(indices)
            if index is None or index.any():
                return None
            value = operand
            continue
        return _labels(node, logits)
    return None


def _labels(node: Node, rows: Value) -> Value | None:
    """Returns the labels [...] if a gather picks one entry of each of the `rows` [..., F], or None."""
    operand, indices = node.ins
    numbers = node.params["dimension_numbers"]
    last = operand.ndim - 1
    before = tuple(range(last))
    picks_one = (
        core(operand) is core(rows)
        and tuple(numbers.collapsed_slice_dims) == tuple(numbers.start_index_map) == (last,)
        and tuple(numbers.operand_batching_dims) == before
        and tuple(numbers.start_indices_batching_dims) == before
        and node.params["mode"] == jax.lax.GatherScatterMode.FILL_OR_DROP
    )
    return indices if picks_one else None


def _one_hot(value: Value) -> Value | None:
    """Returns the labels [...] if a value is their one-hot array, or None."""
    value = core(value)
    node = value.node
    if node is None or node.name != "convert_element_type" or node.ins[0].made_by != "eq":
        return None
    equal = node.ins[0].node
    assert equal is not None
    for labels, classes in (equal.ins, equal.ins[::-1]):
        numbers = evaluate(classes)
        if (
            numbers is None
            or numbers.shape[-1:] != value.shape[-1:]
            or numbers.size != numbers.shape[-1]
        ):
            continue
        seen: View = view(labels, tuple(i if s != 1 else None for i, s in enumerate(labels.shape)))
        in_rows = [axis for axis in seen.axes if axis is not None]
        full = [i for i, size in enumerate(value.shape[:-1]) if size != 1]
        if (numbers.reshape(-1) == range(value.shape[-1])).all() and in_rows == full:
            return seen.base
    return None


def _add(
    book: Book, node: Node, loss: _Loss, p: Projection, affine: Biased, steps: Sequence[Node]
) -> None:
    classes = math.prod(p.features)
    inputs = [p.x, p.w, loss.labels]
    if affine.bias is not None:
        inputs.append(affine.bias)
    shape, dtype = loss.value.shape, loss.value.dtype

    def call(
        x: jax.Array, w: jax.Array, labels: jax.Array, *bias: jax.Array
    ) -> Sequence[jax.Array]:
        x = _stepped(p.inputs(x), steps)
        labels = reshaped(labels, *x.shape[:-1])
        inside = (labels >= 0) & (labels < classes)
        known = jnp.where(inside, labels, 0) if loss.outside == "zero" else labels
        losses = linear_softmax_cross_entropy(
            x,
            p.matrix(w),
            known,
            p.bias(bias[0]) if bias else None,
            reduction="none",
        )
        if loss.outside == "zero":
            losses = jnp.where(inside, losses, 0.0)
        return (reshaped((loss.sign * losses).astype(dtype), *shape),)

    leaves = (
        {p.result, loss.labels} if affine.bias is None else {p.result, loss.labels, affine.bias}
    )
    book.add(
        Site(
            "linear_softmax_cross_entropy",
            node,
            inputs,
            [loss.value],
            call,
            between(loss.value, leaves) | p.covered,
            f"linear_softmax_cross_entropy of {p.x.aval.str_short()} and {classes} classes",
        )
    )
