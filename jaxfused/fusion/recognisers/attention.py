"""Finds dot_product_attention: two products with a softmax between them.

It starts at the softmax, goes forward to the product with the values and back to the product of
queries and keys. The two products tell which of the logits' axes are batch, heads, queries and keys, so
that any order of axes, grouping of heads and transposition is recognised.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxfused.fusion import mask
from jaxfused.fusion.algebra import (
    between,
    core,
    is_reshape,
    is_transparent,
    passed_on,
)
from jaxfused.fusion.constants import evaluate, scalar, times_number
from jaxfused.fusion.graph import Node, Value
from jaxfused.fusion.recognisers.attention_logits import (
    Axes,
    CutAxis,
    Logits,
    NoAttention,
    moves,
    read_logits,
    regroup,
    walk,
)
from jaxfused.fusion.recognisers.attention_site import make_site
from jaxfused.fusion.recognisers.softmax import Softmax, softmax_of, with_zeros, without_sink
from jaxfused.fusion.site import Book, Site


def find(book: Book) -> None:
    """Finds all attentions of the graph and records their replacements."""
    of_softmax: set[Node] = set()
    for node in book.graph.nodes:
        softmax = softmax_of(node)
        if softmax is None:
            continue
        node, softmax = with_zeros(node, softmax)
        of_softmax |= between(node.out, {softmax.logits})
        value_product = _product_after(node.out)
        if value_product is None:
            continue
        try:
            book.add(_site(book, node, softmax, value_product))
        except NoAttention as reason:
            book.miss("dot_product_attention", node, str(reason))
    for node in book.graph.nodes:
        if node.name == "exp" and node not in of_softmax and _is_nearly_attention(node):
            why = "what meets the values is not exponentials divided by their sum alone"
            book.miss("dot_product_attention", node, why)


def _is_nearly_attention(node: Node) -> bool:
    """Returns whether exponentials of a product are summed over an axis and lead to another product."""
    readers = [*node.out.uses]
    readers += [
        after
        for reader in readers
        if reader.name in _CHANGING or passed_on(reader) is not None
        for after in reader.out.uses
    ]
    is_summed = any(r.name == "reduce_sum" and len(r.params["axes"]) == 1 for r in readers)
    return is_summed and _product_after(node.out) is not None and walk(node.ins[0]) is not None


_CHANGING = frozenset({"mul", "div", "add", "sub", "integer_pow", "select_n", "slice"})
"""Operations that may change probabilities before they meet the values, as dropout does."""


def _product_after(value: Value) -> Node | None:
    """Returns the product with the values that reads the probabilities `value`, or None."""
    pending = [(value, 0)]
    while pending:
        value, steps = pending.pop()
        for node in value.uses:
            if node.name == "dot_general" and _by_ones(node) is None:
                return node
            if _by_ones(node) is not None and steps < 8:
                pending.append((node.out, steps + 1))
            is_step = node.name in _CHANGING or moves(node) or passed_on(node) is not None
            if steps < 8 and is_step:
                pending.append((node.out, steps + 1))
    return None


def _by_ones(node: Node) -> tuple[int, tuple[int, ...]] | None:
    """Returns (operand index, its axes in the result's order) if the other operand is ones, or None.

    The product must sum over no axis. A mask of heads that masks no head is such a product.
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


def _atoms_of_product(node: Node) -> tuple[Axes, Axes, Axes, dict[str, int]]:
    """Names the axes of a product's left operand, right operand and result; also returns their sizes."""
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


# --- the site -------------------------------------------------------------------------------------


def _site(book: Book, node: Node, softmax: Softmax, after: Node) -> Site:
    softmax, sink = without_sink(softmax)
    walked = walk(softmax.logits)
    if walked is None:
        raise NoAttention(
            "its logits are no product that is only scaled, capped, biased and masked"
        )
    logits_product, path = walked
    q_axes, k_axes, axes, sizes = _atoms_of_product(logits_product)
    while True:
        try:
            logits = read_logits(logits_product, path, axes, sizes)
        except CutAxis as cut:
            if not cut.atom.startswith("b"):
                raise
            q_axes, k_axes, axes = (_in_two(a, cut, sizes) for a in (q_axes, k_axes, axes))
        else:
            break
    probabilities = _probabilities(node, after)
    if probabilities is None:
        raise NoAttention("probabilities are changed before they meet the values, as by dropout")
    side, steps = probabilities
    if sum(step.name == "slice" for step in steps) != (sink is not None):
        raise NoAttention("probabilities of some keys alone meet the values")
    p_axes = logits.axes
    for step in steps:
        if step.name == "slice":
            if not _drops_last(step, p_axes.index(logits.axes[softmax.axis])):
                raise NoAttention("probabilities of some keys alone meet the values")
        elif step.name == "transpose":
            p_axes = tuple(p_axes[int(i)] for i in step.params["permutation"])
        elif is_reshape(step):
            p_axes = regroup(p_axes, sizes, step.out.shape)
        else:
            ones = _by_ones(step)
            if ones is not None:
                p_axes = tuple(p_axes[axis] for axis in ones[1])
    key_atoms = logits.axes[softmax.axis]
    if len(key_atoms) != 1:
        raise NoAttention("the softmax is taken over several axes in one")
    # The keys are the operand of the first product that has the axis over which the softmax sums.
    query_side = 0
    if key_atoms[0].startswith("q"):
        query_side = 1
    elif not key_atoms[0].startswith("k"):
        raise NoAttention("the softmax is taken over an axis that queries and keys share")
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
    return make_site(
        book, node, layout, logits, scale * in_tanh, (query, q_axes), (key, k_axes),
        (after.ins[1 - side], v_axes), after, result_axes, value_atom, sink, softmax.of_none,
    )  # fmt: skip


def _in_two(axes: Axes, cut: CutAxis, sizes: dict[str, int]) -> Axes:
    """Returns the axes' names after a reshape cuts one axis into an outer and an inner one."""
    outer, inner = f"{cut.atom}.0", f"{cut.atom}.1"
    sizes |= {outer: cut.outer, inner: sizes[cut.atom] // cut.outer}
    return tuple(
        tuple(a for atom in group for a in ((outer, inner) if atom == cut.atom else (atom,)))
        for group in axes
    )


def _probabilities(softmax: Node, after: Node) -> tuple[int, list[Node]] | None:
    """Returns the operand index of the probabilities, and the reshapes after the softmax, or None."""
    for side, operand in enumerate(after.ins):
        steps: list[Node] = []
        value = operand
        while value.node is not None and value.node is not softmax and len(steps) < 12:
            step = value.node
            inner = step.ins[0] if moves(step) or step.name == "slice" else passed_on(step)
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


def _drops_last(step: Node, axis: int) -> bool:
    """Returns whether a slice removes the last entry along an axis, and no other entry."""
    shape = step.ins[0].shape
    kept = tuple(size - (i == axis) for i, size in enumerate(shape))
    return not any(step.params["start_indices"]) and step.out.shape == kept


def _values(
    after: Node, side: int, p_axes: Axes, key: str, sizes: dict[str, int]
) -> tuple[Axes, Axes, str]:
    """Returns the axis names of the values, of the result, and of the feature axis of the values."""
    contracted, batch = after.params["dimension_numbers"]
    p_contracted, v_contracted = (list(map(int, contracted[s])) for s in (side, 1 - side))
    p_batch, v_batch = (list(map(int, batch[s])) for s in (side, 1 - side))
    if [p_axes[axis] for axis in p_contracted] != [(key,)]:
        raise NoAttention("the product with the values does not sum over the keys alone")
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
        raise NoAttention("values have more than one axis of features")
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
    logits: Logits,
) -> mask.Layout:
    """Returns which of the named axes are batch, heads, queries and keys."""
    features = [a for group in q_axes for a in group if a.startswith("h")]
    if len(features) != 1:
        raise NoAttention("queries and keys have more than one axis of features")
    own = [a for group in k_axes for a in group if not a.startswith(("b", "h"))]
    if len(own) != 1:
        raise NoAttention("keys have more than one axis beside heads and batch")
    order = [a for group in _written_order(query, q_axes) for a in group]
    free = [a for a in order if not a.startswith(("b", "h"))]
    if not free or len(free) > 2:
        raise NoAttention(f"queries have {len(free)} axes beside heads and batch")
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
    order: list[str], free: list[str], sizes: dict[str, int], keys: int, logits: Logits
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
    """Returns the names of a query's axes as the program had them before it transposed the array."""
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
        elif not is_transparent(node) and times_number(node) is None:
            break
        query = node.ins[0] if scalar(node.ins[0]) is None else node.ins[1]
    return axes


def _without_ones(axes: Axes, shape: Sequence[int], before: Sequence[int]) -> Axes | None:
    """Returns the axis names before a reshape that only adds or drops axes of length 1, or None."""
    if [size for size in before if size != 1] != [size for size in shape if size != 1]:
        return None
    ones = tuple(a for group, size in zip(axes, shape, strict=True) if size == 1 for a in group)
    full = iter([group for group, size in zip(axes, shape, strict=True) if size != 1])
    moved = [() if size == 1 else next(full) for size in before]
    place = list(before).index(1) if 1 in before else 0
    moved[place] = (*ones, *moved[place])
    return tuple(moved)


def _unscaled(value: Value) -> tuple[Value, float]:
    """Returns the value before it is multiplied by numbers, and the product of these numbers."""
    factor = 1.0
    while True:
        node = core(value).node
        scaled = None if node is None else times_number(node)
        if scaled is None:
            return value, factor
        value, factor = scaled[0], factor * scaled[1]


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
        raise NoAttention(
            f"its products have precision={precision}, and the operator's the default"
        )
