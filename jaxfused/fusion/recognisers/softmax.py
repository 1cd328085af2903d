"""Finds a softmax: exponentials over their sum, or of logits minus the sum's logarithm."""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from jaxfused.fusion.algebra import (
    View,
    core,
    product,
    same,
    total,
    view,
)
from jaxfused.fusion.constants import scalar
from jaxfused.fusion.graph import Node, Value

OfNone = Literal["mean", "nan", "zero", "other"]
"""Probabilities of a row of equal logits far below 0: the same for each entry ("mean"); NaN, as no
maximum was subtracted and the sum is 0 ("nan"); 0, because such rows are told apart ("zero"); or
something else, such as 1 for each entry, because the sum's logarithm is absorbed ("other")."""


@dataclass(frozen=True)
class Softmax:
    """The argument of a softmax, and the axis that it sums over."""

    logits: Value
    axis: int
    of_none: OfNone = "mean"


def softmax_of(node: Node) -> Softmax | None:
    """Returns the softmax whose last operation is this division or exponential, or None."""
    if node.name == "exp" and node.out.is_floating:
        return _by_logarithm(node)
    if node.name not in ("div", "mul") or not node.out.is_floating:
        return None
    sides = (0,) if node.name == "div" else (0, 1)
    side = next((i for i in sides if core(node.ins[i]).made_by == "exp"), None)
    if side is None:
        return None
    exponentials = core(node.ins[side])
    denominator = view(node.ins[1 - side])
    if node.name == "mul":
        inverse = product(*denominator)
        if inverse.constant != 1.0 or [*inverse.powers.values()] != [-1.0]:
            return None
        (denominator,) = inverse.powers
    summed = _summed(denominator)
    if summed is None:
        return None
    array, axis = summed
    kept = _kept(array, exponentials)
    if kept is None and not same(array, exponentials):
        return None
    if not stands_at_rows(denominator, exponentials.shape, axis):
        return None
    assert exponentials.node is not None
    argument = exponentials.node.ins[0]
    logits = before_maximum(argument, axis)
    if kept is not None:
        is_masked = logits is not None and _is_masked(logits, kept)
        return Softmax(logits, axis, "nan") if logits is not None and is_masked else None
    return Softmax(argument, axis, "nan") if logits is None else Softmax(logits, axis)


def _kept(array: Value, exponentials: Value) -> Value | None:
    """Returns the mask where an array is the exponentials, if it is 0 elsewhere, or None."""
    node = array.node
    if node is None or node.name != "select_n" or scalar(node.ins[1]) != 0.0:
        return None
    return node.ins[0] if same(core(node.ins[2]), exponentials) else None


def _is_masked(logits: Value, mask: Value) -> bool:
    """Returns whether logits are -inf where a mask is false."""
    node = core(logits).node
    return (
        node is not None
        and node.name == "select_n"
        and scalar(node.ins[1]) == -np.inf
        and same(node.ins[0], mask)
    )


def with_zeros(node: Node, softmax: Softmax) -> tuple[Node, Softmax]:
    """Returns the select after a softmax that makes masked probabilities 0, as `where` does.

    Returns its arguments if there is none.
    """
    after = node.out.uses[0] if node.out.used_once else None
    if after is None or after.name != "select_n" or after.ins[2] is not node.out:
        return node, softmax
    if scalar(after.ins[1]) != 0.0 or not _is_masked(softmax.logits, after.ins[0]):
        return node, softmax
    return after, replace(softmax, of_none="zero")


def _by_logarithm(node: Node) -> Softmax | None:
    """Returns the softmax exp(logits - logarithm of the sum), or None."""
    difference = core(node.ins[0]).node
    if difference is None or difference.name != "sub":
        return None
    argument, subtracted = difference.ins
    for term in total(subtracted).terms:
        found = None if term.view.base.node is None else log_of_sum(term.view.base.node)
        if found is None:
            continue
        summed, axis = found
        if term.factor != 1.0 or not stands_at_rows(term.view, argument.shape, axis):
            return None
        logits = before_maximum(summed, axis)
        if same(core(summed), core(argument)) and len(total(subtracted).terms) == 1:
            return Softmax(argument, axis, "other") if logits is None else Softmax(logits, axis)
        if logits is None or not same(core(logits), core(argument)):
            return None
        return Softmax(logits, axis, "other") if _adds_maximum(subtracted, logits, axis) else None
    return None


def _adds_maximum(value: Value, logits: Value, axis: int) -> bool:
    """Returns whether a value is a logarithm plus the maximum of the logits of each row."""
    parts = total(value)
    others = [term for term in parts.terms if term.view.base.made_by != "log"]
    return (
        parts.constant == 0.0
        and len(parts.terms) == 2
        and [term.factor for term in others] == [1.0]
        and stands_at_rows(others[0].view, logits.shape, axis)
        and is_maximum(others[0].view.base, core(logits), axis)
    )


def log_of_sum(node: Node) -> tuple[Value, int] | None:
    """Returns the argument of exponentials of whose sum the operation is the logarithm, and the axis."""
    if node.name != "log":
        return None
    seen = view(node.ins[0])
    if seen.base.made_by == "abs" and seen.base.node is not None:
        seen = view(seen.base.node.ins[0], seen.axes)
    summed = _summed(seen)
    if summed is None:
        return None
    exponentials, axis = summed
    if exponentials.node is None or exponentials.made_by != "exp":
        return None
    if not stands_at_rows(seen, exponentials.shape, axis):
        return None
    return exponentials.node.ins[0], axis


def _summed(seen: View) -> tuple[Value, int] | None:
    """Returns the array whose sum over one axis a view is, before casts, and the axis; or None."""
    node = seen.base.node
    if node is None or node.name != "reduce_sum" or len(node.params["axes"]) != 1:
        return None
    return core(node.ins[0]), int(node.params["axes"][0])


def before_maximum(value: Value, axis: int) -> Value | None:
    """Returns the logits if the value is logits minus their maximum along an axis, or None."""
    node = core(value).node
    if node is None or node.name != "sub":
        return None
    logits, maximum = node.ins
    return logits if is_maximum(maximum, core(logits), axis) else None


def without_sink(softmax: Softmax) -> tuple[Softmax, Value | None]:
    """Returns the softmax without its sink (a last logit without a key, as in gpt-oss), and the sink.

    The maximum that the program may have subtracted before is dropped: it changes no probability.
    """
    shifted = before_maximum(softmax.logits, softmax.axis)
    softmax = softmax if shifted is None else replace(softmax, logits=shifted)
    logits = core(softmax.logits)
    node = logits.node
    if node is None or node.name != "concatenate" or len(node.ins) != 2:
        return softmax, None
    first, sink = node.ins
    if int(node.params["dimension"]) != softmax.axis or sink.shape[softmax.axis] != 1:
        return softmax, None
    return replace(softmax, logits=first), sink


def stands_at_rows(seen: View, shape: tuple[int, ...], axis: int) -> bool:
    """Returns whether a view has one number for each row of an array, broadcast along `axis`."""
    rows = [i for i, size in enumerate(shape) if i != axis and size != 1]
    return [place for place in seen.axes if place is not None] == rows


def is_maximum(value: Value, logits: Value, axis: int) -> bool:
    """Returns whether a value is the maximum of the logits along an axis, also through transpositions.

    Its axes are those of the logits, with or without the reduced one.
    """
    if not 0 <= axis < logits.ndim or logits.ndim - value.ndim not in (0, 1):
        return False
    source, places = _before_transpositions(logits)
    along = places[axis]
    if value.ndim < logits.ndim:
        places = (*places[:axis], *places[axis + 1 :])
    axes: tuple[int | None, ...] = tuple(
        place if size != 1 else None for place, size in zip(places, value.shape, strict=True)
    )
    while True:
        value, axes = view(value, axes)
        node = value.node
        if node is None:
            return False
        if node.name == "transpose":
            turned = dict(zip(map(int, node.params["permutation"]), axes, strict=True))
            value, axes = node.ins[0], tuple(turned[i] for i in range(len(axes)))
        elif node.name == "reduce_max":
            reduced, places = _before_transpositions(core(node.ins[0]))
            (over, *others) = map(int, node.params["axes"])
            kept = [
                place
                for i, (place, size) in enumerate(zip(places, node.ins[0].shape, strict=True))
                if i != over and size != 1
            ]
            is_of_rows = [place for place in axes if place is not None] == kept
            return same(reduced, source) and not others and places[over] == along and is_of_rows
        elif node.name == "stop_gradient":
            value = node.ins[0]
        elif node.name == "select_n" and node.ins[0].made_by == "is_finite":
            # `jax.nn.logsumexp` replaces an infinite maximum by 0: the select's last operand is the
            # maximum.
            value = node.ins[2]
        elif node.name == "max" and scalar(node.ins[0]) == -np.inf:
            value = node.ins[1]
        elif node.name == "max" and scalar(node.ins[1]) == -np.inf:
            value = node.ins[0]
        else:
            return False


def _before_transpositions(value: Value) -> tuple[Value, tuple[int, ...]]:
    """Returns the array before transpositions; for each axis of the value, that array's axis."""
    places = tuple(range(value.ndim))
    while value.made_by == "transpose" and value.node is not None:
        permutation = value.node.params["permutation"]
        places = tuple(int(permutation[place]) for place in places)
        value = core(value.node.ins[0])
    return value, places
