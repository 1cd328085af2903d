"""Finds dot_product_attention: two products with a softmax between them.

It starts at the softmax, goes forward to the product with the values and back to the product of
queries and keys. The roles of the logits' axes follow from the two products, so that any order of axes,
grouping of heads and transposition is recognised.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfused.fusion import mask
from jaxfused.fusion.algebra import (
    View,
    at_dtype,
    between,
    core,
    is_reshape,
    is_transparent,
    passed_on,
    stages,
    view,
)
from jaxfused.fusion.constants import evaluate, rounded, scalar
from jaxfused.fusion.graph import Node, Value
from jaxfused.fusion.site import Book, Site
from jaxfused.ops.attention.attention import dot_product_attention
from jaxfused.runtime.promotion import accumulator_dtype

Axes = tuple[tuple[str, ...], ...]
"""Atoms of each axis of an array: see `mask.Layout`."""


ABSORBING = -1e30
"""Number to which a logit or a bias can be added without changing it, even in float64."""


class _NoAttention(Exception):
    """A softmax between two products cannot be the operator's, for this reason."""


def find(book: Book) -> None:
    """Adds all attentions of the graph."""
    for node in book.graph.nodes:
        softmax = _softmax(node)
        if softmax is None:
            continue
        value_product = _product_after(node.out)
        if value_product is None:
            continue
        try:
            site = _site(book, node, softmax, value_product)
        except _NoAttention as reason:
            book.miss("dot_product_attention", node, str(reason))
            continue
        if site is not None:
            book.add(site)


# --- softmax --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Softmax:
    logits: Value
    axis: int


def _softmax(node: Node) -> _Softmax | None:
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
    return _Softmax(logits, axis)


def stands_at_rows(seen: View, shape: tuple[int, ...], axis: int) -> bool:
    """Returns whether a view is one number for each row, broadcast along the given axis of an array."""
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
            # `jax.nn.logsumexp` replaces an infinite maximum by 0.
            value = node.ins[2]
        elif node.name == "max" and scalar(node.ins[0]) == -np.inf:
            value = node.ins[1]
        elif node.name == "max" and scalar(node.ins[1]) == -np.inf:
            value = node.ins[0]
        else:
            return False


def _before_transpositions(value: Value) -> tuple[Value, tuple[int, ...]]:
    """Returns the array before transpositions, and its axis for each axis of the value."""
    places = tuple(range(value.ndim))
    while value.made_by == "transpose" and value.node is not None:
        permutation = value.node.params["permutation"]
        places = tuple(int(permutation[place]) for place in places)
        value = core(value.node.ins[0])
    return value, places


def _moves(node: Node) -> bool:
    """Returns whether the operation only transposes or reshapes.

    `jnp.matmul` drops axes of length 1 before its product, and adds them after it.
    """
    return node.name == "transpose" or is_reshape(node)


_DROPPING = frozenset({"mul", "div", "select_n"})


def _product_after(value: Value) -> Node | None:
    """Returns the product of probabilities and values, or None."""
    pending = [(value, 0)]
    while pending:
        value, steps = pending.pop()
        for node in value.uses:
            if node.name == "dot_general" and _by_ones(node) is None:
                return node
            if _by_ones(node) is not None and steps < 8:
                pending.append((node.out, steps + 1))
            is_step = node.name in _DROPPING or _moves(node) or passed_on(node) is not None
            if steps < 8 and is_step:
                pending.append((node.out, steps + 1))
    return None


def _by_ones(node: Node) -> tuple[int, tuple[int, ...]] | None:
    """Returns the index and the result's axes of the operand that a product multiplies by ones, or None.

    The product sums over no axis. A mask of heads that masks none is such a product.
    """
    if node.name != "dot_general":
        return None
    (contracted, _), batch = node.params["dimension_numbers"]
    if contracted:
        return None
    for side in (0, 1):
        ones, value = node.ins[1 - side], node.ins[side]
        if ones.is_constant and len(batch[1 - side]) == ones.ndim:
            array = evaluate(ones)
            if array is not None and (array == 1).all():
                shared = tuple(map(int, batch[side]))
                return side, (*shared, *(i for i in range(value.ndim) if i not in shared))
    return None


# --- from the logits back to queries and keys -----------------------------------------------------


@dataclass(frozen=True)
class _Masking:
    """A step that masks logits."""

    parts: tuple[mask.Part, ...]
    number: float
    """Value of masked logits."""
    is_added: bool
    """True if the number is added to the logits, which then still get a gradient."""


@dataclass
class _Logits:
    """The steps between the product of queries and keys and the softmax."""

    product: Node
    axes: Axes
    """Atoms of the softmax's argument."""
    scale: float = 1.0
    soft_cap: float | None = None
    shift: float = 0.0
    """Number added to all logits. A softmax ignores it, but a cap or a mask does not."""
    masks: list[_Masking] = field(default_factory=list)
    biases: list[tuple[View, Axes, bool]] = field(default_factory=list)
    """Biases, the atoms of the logits that they are added to, and whether they are subtracted."""
    is_biased_last: bool = False
    """True if a bias is added after a mask."""
    added: list[Value] = field(default_factory=list)
    """Masks and biases as the program applies them. Other attentions may share their computation."""


def _regroup(axes: Axes, sizes: dict[str, int], shape: Sequence[int]) -> Axes:
    """Returns the atoms of an array's axes after a reshape."""
    atoms = [name for group in axes for name in group if sizes[name] != 1]
    ones = [name for group in axes for name in group if sizes[name] == 1]
    result: list[tuple[str, ...]] = []
    for size in shape:
        group: list[str] = []
        count = 1
        while count < size and atoms:
            count *= sizes[atoms[0]]
            group.append(atoms.pop(0))
        if count != size:
            raise _NoAttention("a reshape cuts an axis of the logits in parts")
        if size == 1 and ones:
            group.append(ones.pop(0))
        result.append(tuple(group))
    if atoms:
        raise _NoAttention("a reshape cuts an axis of the logits in parts")
    # Atoms of length 1 go to the first axis: the last one, of the softmax, must be keys alone.
    return tuple(result) if not ones else ((*ones, *result[0]), *result[1:])


def _atoms_of_product(node: Node) -> tuple[Axes, Axes, Axes, dict[str, int]]:
    """Returns the atoms of a product's left operand, right operand and result, and their sizes."""
    (left, right), (left_batch, right_batch) = node.params["dimension_numbers"]
    sizes: dict[str, int] = {}
    names: list[Axes] = []
    for side, contracted, batch in (("q", left, left_batch), ("k", right, right_batch)):
        operand = node.ins[0 if side == "q" else 1]
        axes: list[tuple[str, ...]] = []
        for axis, size in enumerate(operand.shape):
            if axis in map(int, contracted):
                name = f"h{list(map(int, contracted)).index(axis)}"
            elif axis in map(int, batch):
                name = f"b{list(map(int, batch)).index(axis)}"
            else:
                name = f"{side}{axis}"
            sizes[name] = size
            axes.append((name,))
        names.append(tuple(axes))
    left_axes, right_axes = names
    result: list[tuple[str, ...]] = [(f"b{i}",) for i in range(len(left_batch))]
    result += [a for a in left_axes if a[0].startswith("q")]
    result += [a for a in right_axes if a[0].startswith("k")]
    return left_axes, right_axes, tuple(result), sizes


def _walk(value: Value, limit: int = 24) -> tuple[Node, list[Node]] | None:
    """Returns the product before the logits and the operations between the two in order, or None."""
    path: list[Node] = []
    while value.node is not None and len(path) < limit:
        node = value.node
        if node.name == "dot_general":
            return node, path[::-1]
        path.append(node)
        operand = passed_on(node)
        if operand is not None:
            value = operand
        elif node.name == "tanh" or _moves(node):
            value = node.ins[0]
        elif node.name in ("mul", "div", "add", "sub"):
            following = [v for v in node.ins if not v.is_constant and v.shape == node.out.shape]
            if node.name in ("div", "sub"):
                following = [v for v in following if v is node.ins[0]]
            following = [v for v in following if len(following) == 1 or _leads_to_product(v)]
            if len(following) != 1:
                return None
            value = following[0]
        elif node.name == "select_n" and len(node.ins) == 3:
            following = [v for v in node.ins[1:] if scalar(v) is None]
            if len(following) != 1:
                return None
            value = following[0]
        else:
            return None
    return None


def _leads_to_product(value: Value) -> bool:
    """Returns whether only steps that are allowed between a product and its logits lead to the value."""
    for _ in range(16):
        node = value.node
        if node is None:
            return False
        if node.name == "dot_general":
            return True
        operand = passed_on(node)
        if operand is None:
            if node.name not in ("tanh", "mul", "div", "add") and not _moves(node):
                return False
            operand = next((v for v in node.ins if not v.is_constant), None)
        if operand is None:
            return False
        value = operand
    return False


def _read_logits(node: Node, path: Sequence[Node], axes: Axes, sizes: dict[str, int]) -> _Logits:
    """Reads the operations between the product of queries and keys and the softmax."""
    found = _Logits(node, axes)
    value = node.out
    inside_tanh: float | None = None
    for step in path:
        if step.name == "transpose":
            found.axes = tuple(found.axes[int(i)] for i in step.params["permutation"])
        elif is_reshape(step):
            found.axes = _regroup(found.axes, sizes, step.out.shape)
        elif step.name == "tanh":
            if found.masks or found.biases or found.shift or inside_tanh is not None:
                raise _NoAttention("the logits are capped after a mask, a bias or another cap")
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


def _scale(found: _Logits, step: Node, value: Value, capped: bool) -> None:
    other = step.ins[1] if step.ins[0] is value else step.ins[0]
    number = scalar(other)
    if number is None or not 0 < number < np.inf:
        raise _NoAttention("the logits are scaled by an array, or not by a number above 0")
    if found.masks or found.biases or (capped and found.soft_cap is not None):
        raise _NoAttention("the logits are scaled after a mask, a bias or a cap")
    factor = number if step.name == "mul" else 1 / number
    found.scale, found.shift = found.scale * factor, found.shift * factor


def _bias(found: _Logits, step: Node, value: Value) -> None:
    if step.name == "sub" and step.ins[0] is not value:
        raise _NoAttention("the logits are subtracted")
    other = step.ins[1] if step.ins[0] is value else step.ins[0]
    number = scalar(other)
    if number is not None:
        if not np.isfinite(number):
            raise _NoAttention(f"{number} is added to the logits")
        # A number that is added to all logits of a row changes no probability.
        number = -number if step.name == "sub" else number
        found.shift += number
        found.masks = [
            replace(masking, number=rounded(masking.number + number, step.out.dtype))
            for masking in found.masks
        ]
        return
    found.added.append(other)
    axes = tuple(i if size != 1 else None for i, size in enumerate(other.shape))
    masking = _as_mask(other, axes, found.axes, -1 if step.name == "sub" else 1)
    if masking is not None:
        found.masks.append(masking)
    else:
        found.is_biased_last = found.is_biased_last or bool(found.masks)
        found.biases.append((view(other, axes), found.axes, step.name == "sub"))


def _as_mask(
    value: Value, axes: tuple[int | None, ...], logits: Axes, sign: int
) -> _Masking | None:
    """Returns the mask if a bias is only zeros and large negative numbers, or None."""
    seen = view(value, axes)
    found = mask.of_booleans(seen)
    if found is not None:
        of_false, of_true = sign * found.of_false, sign * found.of_true
        number = min(of_false, of_true)
        if max(of_false, of_true) != 0.0 or number > mask.BIG:
            return None
        parts = mask.parts_of(*found.booleans, logits, negated=of_true != 0.0)
        return _Masking(tuple(parts), number, is_added=True)
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
    return _Masking((mask.Part(seen, logits, allowed.reshape(shape), False),), lowest, True)


def _mask(found: _Logits, step: Node, value: Value) -> None:
    which, of_false, of_true = step.ins
    negated = of_false is value
    number = scalar(of_true if negated else of_false)
    if number is None or which.shape != step.out.shape:
        raise _NoAttention("masked logits get an array")
    limit = mask.BIG_IN_FLOAT16 if step.out.dtype == np.float16 else mask.BIG
    if number - found.shift > limit:
        raise _NoAttention(f"masked logits get {number:g}, which others may come near")
    found.added.append(which)
    axes = tuple(i if size != 1 else None for i, size in enumerate(which.shape))
    parts = mask.parts_of(which, axes, found.axes, negated)
    found.masks.append(_Masking(tuple(parts), number, is_added=False))


# --- the site -------------------------------------------------------------------------------------


def _site(book: Book, node: Node, softmax: _Softmax, after: Node) -> Site | None:
    walked = _walk(softmax.logits)
    if walked is None:
        return None
    logits_product, path = walked
    q_axes, k_axes, axes, sizes = _atoms_of_product(logits_product)
    logits = _read_logits(logits_product, path, axes, sizes)
    probabilities = _probabilities(node, after)
    if probabilities is None:
        raise _NoAttention("probabilities are changed before they meet the values, as by dropout")
    side, steps = probabilities
    p_axes = logits.axes
    for step in steps:
        if step.name == "transpose":
            p_axes = tuple(p_axes[int(i)] for i in step.params["permutation"])
        elif is_reshape(step):
            p_axes = _regroup(p_axes, sizes, step.out.shape)
        else:
            ones = _by_ones(step)
            if ones is not None:
                p_axes = tuple(p_axes[axis] for axis in ones[1])
    key_atoms = logits.axes[softmax.axis]
    if len(key_atoms) != 1:
        raise _NoAttention("the softmax is taken over several axes in one")
    # Queries are the operand of the product that is not the keys.
    query_side = 0
    if key_atoms[0].startswith("q"):
        query_side = 1
    elif not key_atoms[0].startswith("k"):
        raise _NoAttention("the softmax is taken over an axis that queries and keys share")
    v_axes, result_axes, value_atom = _values(after, side, p_axes, key_atoms[0], sizes)
    query, key = logits_product.ins[query_side], logits_product.ins[1 - query_side]
    q_axes, k_axes = (q_axes, k_axes) if query_side == 0 else (k_axes, q_axes)
    layout = _layout(query, q_axes, k_axes, key_atoms[0], sizes, logits)
    scale = logits.scale
    query, factor = _unscaled(query)
    key, key_factor = _unscaled(key)
    in_tanh = factor * key_factor
    for product in (logits_product, after):
        _check_precision(product)
    return _make(
        book, node, layout, logits, scale * in_tanh, (query, q_axes), (key, k_axes),
        (after.ins[1 - side], v_axes), after, result_axes, value_atom,
    )  # fmt: skip


def _probabilities(softmax: Node, after: Node) -> tuple[int, list[Node]] | None:
    """Returns the index of the operand that is the probabilities, and the views of them, or None."""
    for side, operand in enumerate(after.ins):
        steps: list[Node] = []
        value = operand
        while value.node is not None and value.node is not softmax and len(steps) < 12:
            step = value.node
            inner = step.ins[0] if _moves(step) else passed_on(step)
            ones = _by_ones(step)
            if ones is not None:
                inner = step.ins[ones[0]]
            if inner is None:
                break
            steps.append(step)
            value = inner
        if value.node is softmax:
            return side, steps[::-1]
    return None


def _values(
    after: Node, side: int, p_axes: Axes, key: str, sizes: dict[str, int]
) -> tuple[Axes, Axes, str]:
    """Returns the atoms of the values and of the result, and the atom of the values' features."""
    contracted, batch = after.params["dimension_numbers"]
    p_contracted, v_contracted = (list(map(int, contracted[s])) for s in (side, 1 - side))
    p_batch, v_batch = (list(map(int, batch[s])) for s in (side, 1 - side))
    if [p_axes[axis] for axis in p_contracted] != [(key,)]:
        raise _NoAttention("the product with the values does not sum over the keys alone")
    v_axes: list[tuple[str, ...]] = []
    free: list[tuple[str, ...]] = []
    for axis, size in enumerate(after.ins[1 - side].shape):
        if axis in v_contracted:
            v_axes.append((key,))
        elif axis in v_batch:
            v_axes.append(p_axes[p_batch[v_batch.index(axis)]])
        else:
            name = f"v{axis}"
            sizes[name] = size
            v_axes.append((name,))
            free.append((name,))
    if len(free) != 1:
        raise _NoAttention("values have more than one axis of features")
    of_p = [names for i, names in enumerate(p_axes) if i not in p_contracted and i not in p_batch]
    both = [of_p, free] if side == 0 else [free, of_p]
    result = [p_axes[axis] for axis in p_batch] + both[0] + both[1]
    return tuple(v_axes), tuple(result), free[0][0]


def _layout(
    query: Value,
    q_axes: Axes,
    k_axes: Axes,
    key: str,
    sizes: dict[str, int],
    logits: _Logits,
) -> mask.Layout:
    """Returns which atoms are batch, heads, queries and keys."""
    features = [a for (a,) in q_axes if a.startswith("h")]
    if len(features) != 1:
        raise _NoAttention("queries and keys have more than one axis of features")
    if sum(1 for (a,) in k_axes if not a.startswith(("b", "h"))) != 1:
        raise _NoAttention("keys have more than one axis beside heads and batch")
    order = [a for group in _written_order(query, q_axes) for a in group]
    free = [a for a in order if not a.startswith(("b", "h"))]
    if not free or len(free) > 2:
        raise _NoAttention(f"queries have {len(free)} axes beside heads and batch")
    queries = free[0]
    if len(free) == 2:
        queries = _which_is_queries(order, free, sizes, sizes[key], logits)
    group = [a for a in free if a != queries]
    shared = [a for a in order if a.startswith("b")]
    before = [a for a in shared if order.index(a) < order.index(queries)]
    heads = [a for a in shared if a not in before]
    if not heads and len(before) > 1:
        heads = [before.pop()]
    return mask.Layout(sizes, tuple(before), (*heads, *group), queries, key)


def _which_is_queries(
    order: list[str], free: list[str], sizes: dict[str, int], keys: int, logits: _Logits
) -> str:
    """Returns which of two axes counts queries; the other counts heads that share keys.

    The result is the same either way, but a causal mask has to vary with the queries.
    """
    for part in (part for masking in logits.masks for part in masking.parts):
        axes = [axis for axis in part.seen.axes if axis is not None]
        varying = {a for axis in axes for a in part.logits[axis]}
        if part.constant is not None:
            varying = {
                a
                for axis, size in enumerate(part.constant.shape)
                if size != 1
                for a in part.logits[axis]
            }
        masked = [a for a in free if a in varying]
        if len(masked) == 1:
            return masked[0]
    equal = [a for a in free if sizes[a] == keys]
    if len(equal) == 1:
        return equal[0]
    shared = [a for a in order if a.startswith("b")]
    follows = [a for a in free if shared and order.index(a) == order.index(shared[-1]) + 1]
    return next((a for a in free if a not in follows), free[0])


def _written_order(query: Value, axes: Axes) -> Axes:
    """Returns the axes in their order in memory, before transpositions."""
    while query.node is not None:
        node = query.node
        if node.name == "transpose":
            written: list[tuple[str, ...]] = [()] * len(axes)
            for i, axis in enumerate(node.params["permutation"]):
                written[int(axis)] = axes[i]
            axes = tuple(written)
        elif is_reshape(node):
            moved = _without_ones(axes, node.out.shape, node.ins[0].shape)
            if moved is None:
                break
            axes = moved
        elif not (is_transparent(node) or (node.name in ("mul", "div") and _by_number(node))):
            break
        query = node.ins[0] if scalar(node.ins[0]) is None else node.ins[1]
    return axes


def _without_ones(axes: Axes, shape: Sequence[int], before: Sequence[int]) -> Axes | None:
    """Returns the atoms of axes before a reshape that only adds or drops axes of length 1, or None."""
    if [size for size in before if size != 1] != [size for size in shape if size != 1]:
        return None
    ones = tuple(a for group, size in zip(axes, shape, strict=True) if size == 1 for a in group)
    full = iter([group for group, size in zip(axes, shape, strict=True) if size != 1])
    moved = [() if size == 1 else next(full) for size in before]
    place = list(before).index(1) if 1 in before else 0
    moved[place] = (*ones, *moved[place])
    return tuple(moved)


def _by_number(node: Node) -> bool:
    return scalar(node.ins[1]) is not None or (
        node.name == "mul" and scalar(node.ins[0]) is not None
    )


def _unscaled(value: Value) -> tuple[Value, float]:
    """Returns the value before it is multiplied by numbers, and their product."""
    factor = 1.0
    while True:
        inner = core(value)
        node = inner.node
        if node is None or node.name not in ("mul", "div") or not _by_number(node):
            return value, factor
        number = scalar(node.ins[1])
        if number == 0.0:
            return value, factor
        if number is not None:
            factor *= number if node.name == "mul" else 1 / number
            value = node.ins[0]
        else:
            factor *= scalar(node.ins[0]) or 0.0
            value = node.ins[1]


_LOWEST = (None, jax.lax.Precision.DEFAULT)


def _check_precision(node: Node) -> None:
    precision = node.params["precision"]
    pair = precision if isinstance(precision, tuple) else (precision, precision)
    if all(p in _LOWEST for p in pair):
        return
    preset = jax.lax.DotAlgorithmPreset
    wide = {
        jnp.dtype(jnp.bfloat16): preset.BF16_BF16_F32,
        jnp.dtype(jnp.float16): preset.F16_F16_F32,
    }
    if precision is not wide.get(node.ins[0].dtype):
        raise _NoAttention(
            f"its products have precision={precision}, and the operator's the default"
        )


def _make(
    book: Book,
    node: Node,
    layout: mask.Layout,
    logits: _Logits,
    scale: float,
    query: tuple[Value, Axes],
    key: tuple[Value, Axes],
    value: tuple[Value, Axes],
    after: Node,
    result_axes: Axes,
    feature: str,
) -> Site:
    sizes = layout.sizes
    of_keys = sizes
    shared = _unrepeated(key, value, layout)
    if shared is not None:
        key_value, value_value, of_keys = shared
        key, value = (key_value, key[1]), (value_value, value[1])
    root, arrays = _root(after, (query[0], key[0], value[0]))
    parts = [part for masking in logits.masks for part in masking.parts]
    constant = mask.known(layout, parts)
    dynamic = [part for part in parts if part.constant is None]
    always = constant.always_has_key and not dynamic
    if not always:
        _check_queries_without_keys(logits)
    numbers = [masking.number for masking in logits.masks]
    if logits.biases and any(number > ABSORBING for number in numbers):
        raise _NoAttention("a mask's number is not far below what a bias may be")
    if any(np.isfinite(numbers)) and any(_may_mask(*bias) for bias in logits.biases):
        raise _NoAttention("a bias may be as far below the other logits as a mask's number is")
    has_gradient = any(masking.is_added for masking in logits.masks)
    inputs: list[Value] = list(arrays)
    for part in dynamic:
        inputs.append(part.seen.base)
    for seen, _, _ in logits.biases:
        inputs.append(seen.base)
    heads = layout.heads
    key_heads = tuple(h for h in heads if h.startswith("b"))
    orders = (
        (query[1], sizes, layout.batch, (layout.query,), heads),
        (key[1], of_keys, layout.batch, (layout.key,), key_heads),
        (value[1], of_keys, layout.batch, (layout.key,), key_heads),
    )
    shape = root.shape
    queries, keys = sizes[layout.query], sizes[layout.key]

    def call(*operands: jax.Array) -> Sequence[jax.Array]:
        q, k, v = (
            _arranged(array.astype(root.dtype), *order)
            for array, order in zip(operands, orders, strict=False)
        )
        rest = iter(operands[3:])
        explicit = None
        for part in dynamic:
            array = layout.spread(next(rest), part.seen.axes, part.logits)
            array = array if array.dtype == jnp.bool_ else array != 0
            array = ~array if part.negated else array
            explicit = array if explicit is None else explicit & array
        bias = None
        for seen, axes, is_subtracted in logits.biases:
            array = layout.spread(next(rest), seen.axes, axes)
            array = -array if is_subtracted else array
            bias = array if bias is None else bias + array
        given = explicit
        if constant.explicit is not None:
            known = jnp.asarray(constant.explicit)
            given = known if given is None else given & known
        output = dot_product_attention(
            q,
            k,
            v,
            bias,
            given,
            scale=scale,
            is_causal=constant.is_causal,
            local_window_size=constant.window,
            logits_soft_cap=logits.soft_cap,
        )
        assert isinstance(output, jax.Array)
        if not always:
            allowed = jnp.ones((1, 1, 1, 1), bool) if explicit is None else explicit
            has_key = mask.has_key(allowed, constant, queries, keys)
            of_equal = _of_absorbed_logits(q, k, v, scale) if has_gradient else _mean(v, q.shape[2])
            has_key = has_key.swapaxes(1, 2)[..., None]
            output = jnp.where(has_key, output, of_equal.astype(output.dtype))
        return (_ordered(output, layout, result_axes, feature).reshape(shape),)

    words = [f"scale {scale:.4g}"]
    if logits.soft_cap is not None:
        words.append(f"cap {logits.soft_cap:g}")
    words += constant.words()
    words += ["mask"] * bool(dynamic) + ["bias"] * len(logits.biases)
    leaves = {leaf for array in inputs for leaf in stages(array)} | set(logits.added)
    covered = between(root, leaves)
    return Site(
        "dot_product_attention",
        node,
        inputs,
        [root],
        call,
        covered,
        f"dot_product_attention({', '.join(words)}) of {arrays[0].aval.str_short()}"
        f" and {arrays[1].aval.str_short()}",
    )


def _may_mask(seen: View, axes: Axes, is_subtracted: bool) -> bool:
    """Whether a bias may be an unrecognised mask, such as an argument of floating-point numbers."""
    least, most = mask.bounds(seen.base)
    return (-most if is_subtracted else least) <= mask.BIG / 10


def _check_queries_without_keys(logits: _Logits) -> None:
    """Raises `_NoAttention` unless the masks alone determine the result of a query without keys."""
    numbers = {masking.number for masking in logits.masks}
    if -np.inf in numbers:
        raise _NoAttention("masked logits are -inf, and a query may have no key: its result is NaN")
    if len(numbers) > 1:
        raise _NoAttention("masks give different numbers, and a query may have no key")
    if logits.is_biased_last:
        raise _NoAttention("a bias is added to masked logits, and a query may have no key")
    if not any(masking.is_added for masking in logits.masks):
        return
    if len(logits.masks) > 1 or logits.biases or logits.soft_cap is not None:
        raise _NoAttention("a mask is added to logits with a bias, and a query may have no key")
    if max(numbers) > ABSORBING:
        raise _NoAttention(
            f"{max(numbers):g} is added to masked logits, of which it leaves something, and a query may"
            " have no key"
        )


def _unrepeated(
    key: tuple[Value, Axes], value: tuple[Value, Axes], layout: mask.Layout
) -> tuple[Value, Value, dict[str, int]] | None:
    """Returns keys and values before their heads were repeated, and the atoms' sizes then, or None."""
    if len(layout.heads) != 1:
        return None
    (head,) = layout.heads
    inner = []
    for operand, axes in (key, value):
        if (head,) not in axes:
            return None
        before = _before_repeat(operand, axes.index((head,)))
        if before is None:
            return None
        inner.append((before, before.shape[axes.index((head,))]))
    if inner[0][1] != inner[1][1]:
        return None
    return inner[0][0], inner[1][0], layout.sizes | {head: inner[0][1]}


def _before_repeat(value: Value, axis: int) -> Value | None:
    """Returns the array whose entries along an axis are repeated as by `jnp.repeat`, or None."""
    merged = core(value).node
    if merged is None or merged.name != "reshape":
        return None
    repeated = merged.ins[0].node
    if repeated is None or repeated.name not in ("broadcast_in_dim", "tile"):
        return None
    if len(repeated.ins) != 1:
        return None
    shape, whole = repeated.out.shape, merged.out.shape
    before = repeated.ins[0]
    if len(shape) != len(whole) + 1 or shape[:axis] != whole[:axis]:
        return None
    if shape[axis + 2 :] != whole[axis + 1 :]:
        return None
    if repeated.name == "tile":
        if any(r != 1 for i, r in enumerate(repeated.params["reps"]) if i != axis + 1):
            return None
        placed = list(range(before.ndim))
    else:
        placed = [int(target) for target in repeated.params["broadcast_dimensions"]]
    if before.ndim == len(shape) and before.shape[axis + 1] == 1 and before.node is not None:
        added = before.node
        if added.name not in ("reshape", "broadcast_in_dim"):
            return None
        before, placed = added.ins[0], [i for i in range(len(shape)) if i != axis + 1]
    expected = [i for i in range(len(shape)) if i != axis + 1]
    wanted = (*shape[: axis + 1], *shape[axis + 2 :])
    return before if placed == expected and before.shape == wanted else None


def _root(after: Node, operands: Sequence[Value]) -> tuple[Value, tuple[Value, ...]]:
    """Returns the output after its last convert to a dtype that the operands have, and the operands.

    Operands of a narrower dtype are returned as they are, and widened in the call.
    """
    candidates = [after.out]
    while candidates[-1].used_once and is_transparent(candidates[-1].uses[0]):
        candidates.append(candidates[-1].uses[0].out)
    for root in reversed(candidates):
        found = [
            v if v.dtype.itemsize < root.dtype.itemsize else at_dtype(v, root.dtype)
            for v in operands
        ]
        if all(v is not None for v in found):
            return root, tuple(v for v in found if v is not None)
    dtypes = ", ".join(str(core(v).dtype) for v in operands)
    raise _NoAttention(
        f"queries, keys and values are {dtypes}, and the result is {after.out.dtype}"
    )


def _arranged(
    array: jax.Array,
    axes: Axes,
    sizes: dict[str, int],
    batch: tuple[str, ...],
    rows: tuple[str, ...],
    heads: tuple[str, ...],
) -> jax.Array:
    """Returns an operand as [B, length, heads, features]."""
    atoms = [name for group in axes for name in group]
    array = array.reshape([sizes[name] for name in atoms])
    features = [a for a in atoms if a not in (*batch, *rows, *heads)]
    array = array.transpose([atoms.index(a) for a in (*batch, *rows, *heads, *features)])

    def size(names: Sequence[str]) -> int:
        return int(np.prod([sizes[name] for name in names], dtype=int))

    return array.reshape(size(batch), size(rows), size(heads), size(features))


def _ordered(output: jax.Array, layout: mask.Layout, axes: Axes, feature: str) -> jax.Array:
    """Returns the output [B, T, N, V] with the axes of the program's result."""
    atoms = [*layout.batch, layout.query, *layout.heads, feature]
    output = output.reshape([layout.sizes[name] for name in atoms])
    wanted = [name for group in axes for name in group]
    return output.transpose([atoms.index(name) for name in wanted])


def _mean(value: jax.Array, heads: int) -> jax.Array:
    """Returns the mean of the values [B, S, K, V] over the keys, as [B, 1, N, V].

    It is the result of a query whose logits are all equal.
    """
    dtype = accumulator_dtype(value.dtype)
    mean = jnp.mean(value, axis=1, keepdims=True, dtype=dtype)
    return jnp.repeat(mean, heads // value.shape[2], axis=2)


@functools.partial(jax.custom_jvp, nondiff_argnums=(3,))
def _of_absorbed_logits(
    query: jax.Array, key: jax.Array, value: jax.Array, scale: float
) -> jax.Array:
    """Returns the mean of the values as [B, T, N, V], with the derivative of a softmax of zero logits.

    A logit plus a large number is that number, but its derivative to the logit is 1.
    """
    return jnp.broadcast_to(_mean(value, query.shape[2]), (*query.shape[:-1], value.shape[-1]))


@_of_absorbed_logits.defjvp
def _of_absorbed_logits_jvp(scale: float, primals: Any, tangents: Any) -> tuple[Any, Any]:
    """Returns the derivative of rows without keys, where p = 1 / S changes by p (dl - mean dl)."""
    (query, key, value), (dq, dk, dv) = primals, tangents
    result = _of_absorbed_logits(query, key, value, scale)
    dtype = accumulator_dtype(value.dtype)
    wide = value.astype(dtype)
    centred = wide - wide.mean(axis=1, keepdims=True)
    heads = (value.shape[2], query.shape[2] // value.shape[2])

    def by_logits(query: jax.Array, key: jax.Array) -> jax.Array:
        """Returns the sum over keys of the logits' changes times the values, for grouped queries."""
        of_keys = jnp.einsum("bskh,bskv->bkhv", key.astype(dtype), centred) * (
            scale / value.shape[1]
        )
        grouped = query.astype(dtype).reshape(*query.shape[:2], *heads, query.shape[-1])
        return jnp.einsum("btkgh,bkhv->btkgv", grouped, of_keys).reshape(result.shape)

    return result, _mean(dv, query.shape[2]) + by_logits(dq, key) + by_logits(query, dk)
