"""Finds a softmax, whose last operation is a division by the sum of exponentials."""

from dataclasses import dataclass

import numpy as np

from jaxfused.fusion.algebra import (
    View,
    core,
    view,
)
from jaxfused.fusion.constants import scalar
from jaxfused.fusion.graph import Node, Value


@dataclass(frozen=True)
class Softmax:
    """The argument of a softmax, and the axis that it sums over."""

    logits: Value
    axis: int


def softmax_of(node: Node) -> Softmax | None:
    """Returns the softmax whose last operation is this division, or None."""
    if node.name != "div" or not node.out.is_floating:
        return None
    exponentials = core(node.ins[0])
    denominator = view(node.ins[1])
    total = denominator.base.node
    if exponentials.made_by != "exp" or total is None or total.name != "reduce_sum":
        return None
    if core(total.ins[0]) is not exponentials or len(total.params["axes"]) != 1:
        return None
    axis = int(total.params["axes"][0])
    if not stands_at_rows(denominator, exponentials.shape, axis):
        return None
    assert exponentials.node is not None
    shifted = core(exponentials.node.ins[0])
    if shifted.node is None or shifted.node.name != "sub":
        return None
    logits, maximum = shifted.node.ins
    if not is_maximum(maximum, core(logits), axis):
        return None
    return Softmax(logits, axis)


def without_sink(softmax: Softmax) -> tuple[Softmax, Value | None]:
    """Returns the softmax without its sink (a last logit without a key, as in gpt-oss), and the sink.

    The maximum that the program may have subtracted before is dropped: it changes no probability.
    """
    logits = core(softmax.logits)
    if logits.made_by == "sub" and logits.node is not None:
        inner, maximum = logits.node.ins
        if is_maximum(maximum, core(inner), softmax.axis):
            logits = core(inner)
    node = logits.node
    if node is None or node.name != "concatenate" or len(node.ins) != 2:
        return softmax, None
    first, sink = node.ins
    if int(node.params["dimension"]) != softmax.axis or sink.shape[softmax.axis] != 1:
        return softmax, None
    return Softmax(first, softmax.axis), sink


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
            return reduced is source and not others and places[over] == along and is_of_rows
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
