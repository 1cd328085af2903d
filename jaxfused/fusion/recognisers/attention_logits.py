"""Reads the logits of an attention from its first product to the softmax: scale, cap, bias, masks."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from jaxfused.fusion import mask
from jaxfused.fusion.algebra import (
    View,
    is_reshape,
    passed_on,
    view,
)
from jaxfused.fusion.constants import evaluate, rounded, scalar, times_number
from jaxfused.fusion.graph import Node, Value

Axes = tuple[tuple[str, ...], ...]
"""Names, for each axis of an array, of what it counts: batch, heads, queries, keys or several."""


class NoAttention(Exception):
    """Raised with the reason why a softmax between two products is no dot_product_attention."""


class CutAxis(NoAttention):
    """Raised where a reshape splits a named axis of the logits, as for masks of image windows."""

    def __init__(self, atom: str, outer: int) -> None:
        super().__init__("a reshape cuts an axis of the logits in parts")
        self.atom, self.outer = atom, outer


def moves(node: Node) -> bool:
    """Returns whether the operation only transposes or reshapes.

    `jnp.matmul` removes axes of length 1 before its product, and adds them again after it.
    """
    return node.name == "transpose" or is_reshape(node)


@dataclass(frozen=True)
class Masking:
    """An operation of the program that masks logits."""

    parts: tuple[mask.Part, ...]
    number: float
    """The number that masked logits become, or that is added to them."""
    is_added: bool
    """True if the number is added to the logits. Masked logits then still get a gradient; logits that a
    select replaces get none."""
    as_bias: tuple[View, "Axes", float] | None = None
    """The array that is added to the logits, as an entry of `Logits.biases`; None for a select."""


@dataclass
class Logits:
    """The steps between the product of queries and keys and the softmax."""

    product: Node
    axes: Axes
    """Names of the axes of the softmax's argument."""
    scale: float = 1.0
    soft_cap: float | None = None
    factors: list[tuple[View, Axes, float]] = field(default_factory=list)
    """Arrays by which the logits are multiplied (1) or divided (-1), such as learned temperatures."""
    shift: float = 0.0
    """Number added to all logits: it changes no probability, but a later cap or mask depends on it."""
    masks: list[Masking] = field(default_factory=list)
    biases: list[tuple[View, Axes, float]] = field(default_factory=list)
    """Each bias, the axis names of the logits that it is added to, and its factor (-1 if subtracted)."""
    is_biased_last: bool = False
    """True if a bias is added after a mask."""
    added: list[Value] = field(default_factory=list)
    """Factors, masks and biases as the program applies them; other attentions may read them too."""


def regroup(axes: Axes, sizes: dict[str, int], shape: Sequence[int]) -> Axes:
    """Returns the names of an array's axes after a reshape to `shape`."""
    atoms = [name for group in axes for name in group if sizes[name] != 1]
    ones = [name for group in axes for name in group if sizes[name] == 1]
    result: list[tuple[str, ...]] = []
    for size in shape:
        group: list[str] = []
        count = 1
        while count < size and atoms:
            before = count
            count *= sizes[atoms[0]]
            group.append(atoms.pop(0))
        if count > size and size % before == 0 and count % size == 0:
            raise CutAxis(group[-1], size // before)
        if count != size:
            raise NoAttention("a reshape cuts an axis of the logits in parts")
        if size == 1 and ones:
            group.append(ones.pop(0))
        result.append(tuple(group))
    if atoms:
        raise NoAttention("a reshape cuts an axis of the logits in parts")
    # Atoms of length 1 go to the first axis: the last axis, over which the softmax sums, must be
    # keys alone.
    return tuple(result) if not ones else ((*ones, *result[0]), *result[1:])


def walk(value: Value, limit: int = 24) -> tuple[Node, list[Node]] | None:
    """Returns the product from which logits are computed, and the operations after it, or None."""
    path: list[Node] = []
    while value.node is not None and len(path) < limit:
        node = value.node
        if node.name == "dot_general":
            return node, path[::-1]
        path.append(node)
        operand = passed_on(node)
        if operand is not None:
            value = operand
        elif node.name == "tanh" or moves(node):
            value = node.ins[0]
        elif node.name in ("mul", "div", "add", "sub"):
            following = [v for v in node.ins if not v.is_constant and v.shape == node.out.shape]
            if node.name in ("div", "sub"):
                following = [v for v in following if v is node.ins[0]]
            if len(following) > 1:
                following = [v for v in following if _product_before(v) is not None]
            if not following:
                return None
            value = max(following, key=_shared_axes) if len(following) > 1 else following[0]
        elif node.name == "select_n" and len(node.ins) == 3:
            following = [v for v in node.ins[1:] if scalar(v) is None]
            if len(following) != 1:
                return None
            value = following[0]
        else:
            return None
    return None


def _shared_axes(value: Value) -> int:
    """Returns how many axes the operands share of the product that logits are computed from.

    Queries and keys share batch and heads; queries and vectors of relative positions share less.
    """
    node = _product_before(value)
    return 0 if node is None else len(node.params["dimension_numbers"][1][0])


def _product_before(value: Value) -> Node | None:
    """Returns the product from which operations that logits may have compute the value, or None."""
    for _ in range(16):
        node = value.node
        if node is None:
            return None
        if node.name == "dot_general":
            return node
        operand = passed_on(node)
        if operand is None:
            if node.name not in ("tanh", "mul", "div", "add") and not moves(node):
                return None
            operand = next((v for v in node.ins if not v.is_constant), None)
        if operand is None:
            return None
        value = operand
    return None


def read_logits(node: Node, path: Sequence[Node], axes: Axes, sizes: dict[str, int]) -> Logits:
    """Reads the operations between the product of queries and keys and the softmax."""
    found = Logits(node, axes)
    value = node.out
    inside_tanh: float | None = None
    for step in path:
        if step.name == "transpose":
            found.axes = tuple(found.axes[int(i)] for i in step.params["permutation"])
        elif is_reshape(step):
            found.axes = regroup(found.axes, sizes, step.out.shape)
        elif step.name == "tanh":
            if found.masks or found.biases or found.shift or inside_tanh is not None:
                raise NoAttention("the logits are capped after a mask, a bias or another cap")
            inside_tanh, found.scale = found.scale, 1.0
        elif step.name in ("mul", "div") and passed_on(step) is None:
            _scale(found, step, value, inside_tanh is not None)
            if inside_tanh is not None and found.soft_cap is None:
                found.soft_cap, found.scale = found.scale, found.scale * inside_tanh
        elif step.name in ("add", "sub"):
            _bias(found, step, value)
        elif step.name == "select_n" and passed_on(step) is None:
            _mask(found, step, value)
        value = step.out
    if inside_tanh is not None and found.soft_cap is None:
        found.soft_cap, found.scale = 1.0, inside_tanh
    return found


def _scale(found: Logits, step: Node, value: Value, capped: bool) -> None:
    scaled = times_number(step)
    if scaled is None:
        _scale_by_array(found, step, value, capped)
        return
    factor = scaled[1]
    if factor < 0:
        raise NoAttention(f"the logits are scaled by {factor:g}, which is not above 0")
    if capped and (found.masks or found.biases or found.soft_cap is not None):
        raise NoAttention("the logits are scaled after a cap")
    found.biases = [_times(bias, factor) for bias in found.biases]
    found.masks = [
        replace(
            masking,
            number=rounded(masking.number * factor, step.out.dtype),
            as_bias=None if masking.as_bias is None else _times(masking.as_bias, factor),
        )
        for masking in found.masks
    ]
    if any(masking.number - found.shift * factor > _BIG_SCALED for masking in found.masks):
        raise NoAttention("masked logits are scaled to numbers that others may come near")
    found.scale, found.shift = found.scale * factor, found.shift * factor


_BIG_SCALED = mask.BIG / 256
"""Largest logit that counts as masked where the scale, such as 1 / sqrt(H), comes after the mask."""


def _scale_by_array(found: Logits, step: Node, value: Value, capped: bool) -> None:
    other = step.ins[1] if step.ins[0] is value else step.ins[0]
    if scalar(other) is not None:
        raise NoAttention(f"the logits are scaled by {scalar(other):g}")
    if capped or found.masks or found.biases or found.shift:
        raise NoAttention("the logits are scaled by an array after a mask, a bias or a cap")
    found.added.append(other)
    axes = tuple(i if size != 1 else None for i, size in enumerate(other.shape))
    found.factors.append((view(other, axes), found.axes, 1.0 if step.name == "mul" else -1.0))


def _times(bias: tuple[View, Axes, float], factor: float) -> tuple[View, Axes, float]:
    seen, axes, before = bias
    return seen, axes, before * factor


def _bias(found: Logits, step: Node, value: Value) -> None:
    if step.name == "sub" and step.ins[0] is not value:
        raise NoAttention("the logits are subtracted")
    other = step.ins[1] if step.ins[0] is value else step.ins[0]
    number = scalar(other)
    if number is not None:
        if not np.isfinite(number):
            raise NoAttention(f"{number} is added to the logits")
        # The same number added to all logits of a row changes no probability.
        number = -number if step.name == "sub" else number
        found.shift += number
        found.masks = [
            replace(masking, number=rounded(masking.number + number, step.out.dtype))
            for masking in found.masks
        ]
        return
    found.added.append(other)
    axes = tuple(i if size != 1 else None for i, size in enumerate(other.shape))
    sign = -1 if step.name == "sub" else 1
    masking = _as_mask(other, axes, found.axes, sign)
    bias = (view(other, axes), found.axes, float(sign))
    if masking is not None:
        found.masks.append(replace(masking, as_bias=bias))
    else:
        found.is_biased_last = found.is_biased_last or bool(found.masks)
        found.biases.append(bias)


def _as_mask(value: Value, axes: tuple[int | None, ...], logits: Axes, sign: int) -> Masking | None:
    """Returns a bias as a mask if it holds only zeros and large negative numbers, or None."""
    seen = view(value, axes)
    found = mask.of_booleans(seen)
    if found is not None:
        of_false, of_true = sign * found.of_false, sign * found.of_true
        number = min(of_false, of_true)
        if max(of_false, of_true) != 0.0 or number > mask.BIG:
            return None
        parts = mask.parts_of(*found.booleans, logits, negated=of_true != 0.0)
        return Masking(tuple(parts), number, is_added=True)
    array = evaluate(seen.base)
    if array is None:
        return None
    array = sign * array
    allowed = array == 0
    lowest = float(array.max(where=~allowed, initial=-np.inf))
    if not (allowed | (array <= mask.BIG)).all() or allowed.all():
        return None
    shape = [1] * len(logits)
    for axis, size in zip(seen.axes, array.shape, strict=True):
        if axis is not None:
            shape[axis] = size
    return Masking((mask.Part(seen, logits, allowed.reshape(shape), False),), lowest, True)


def _mask(found: Logits, step: Node, value: Value) -> None:
    which, of_false, of_true = step.ins
    negated = of_false is value
    number = scalar(of_true if negated else of_false)
    if number is None or which.shape != step.out.shape:
        raise NoAttention("masked logits get an array")
    limit = mask.BIG_IN_FLOAT16 if step.out.dtype == np.float16 else mask.BIG
    if number - found.shift > limit:
        raise NoAttention(f"masked logits get {number:g}, which others may come near")
    found.added.append(which)
    axes = tuple(i if size != 1 else None for i, size in enumerate(which.shape))
    parts = mask.parts_of(which, axes, found.axes, negated)
    found.masks.append(Masking(tuple(parts), number, is_added=False))
