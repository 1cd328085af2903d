"""Builds the call of dot_product_attention that replaces an attention of the program."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfused.fusion import mask
from jaxfused.fusion.algebra import View, at_dtype, between, core, is_transparent, stages, view
from jaxfused.fusion.graph import Node, Value
from jaxfused.fusion.recognisers.attention_logits import Axes, Logits, NoAttention
from jaxfused.fusion.recognisers.softmax import OfNone
from jaxfused.fusion.site import Book, Site
from jaxfused.ops.attention.attention import dot_product_attention
from jaxfused.runtime.promotion import accumulator_dtype
from jaxfused.runtime.shapes import reshaped

ABSORBING = -1e30
"""Number that a logit or bias added to it leaves unchanged by rounding, even in float64."""


def make_site(
    book: Book,
    node: Node,
    layout: mask.Layout,
    logits: Logits,
    scale: float,
    query: tuple[Value, Axes],
    key: tuple[Value, Axes],
    value: tuple[Value, Axes],
    after: Node,
    result_axes: Axes,
    feature: str,
    sink: Value | None,
    of_none: OfNone,
) -> Site:
    """Returns the call of dot_product_attention, its operands, and the operations that it replaces.

    Args:
      query: left operand of the product before the softmax, with the names of its axes (see
        `mask.Layout`); `key` and `value` likewise.
      after: the product of probabilities and values.
      result_axes: names of the axes of that product's result.
      feature: name of the feature axis of the values.
      sink: a logit of each row that belongs to no key, or None.
      of_none: what the program's softmax gives a query whose logits are all masked (`Softmax.of_none`).
    """
    of_keys = sizes = layout.sizes
    shared = _unrepeated(key, value, layout)
    if shared is not None:
        key, value, of_keys = shared
    root, arrays = _root(after, (query[0], key[0], value[0]))
    parts = [part for masking in logits.masks for part in masking.parts]
    _check_factors(layout, logits, root)
    constant = mask.known(layout, parts)
    dynamic = [part for part in parts if part.constant is None]
    sinks = None if sink is None else _sinks(sink, layout, logits)
    # A query without keys gives all its probability to the sink: its result is 0, as in the
    # operator.
    always = sinks is not None or (constant.always_has_key and not dynamic)
    if _is_mask_a_bias(logits, always):
        logits.biases += [
            masking.as_bias for masking in logits.masks if masking.as_bias is not None
        ]
        logits.masks, parts, dynamic, always = [], [], [], True
        constant = mask.known(layout, parts)
    always, is_nan = _without_keys(logits, always, of_none)
    _check_biases(logits)
    has_gradient = any(masking.is_added for masking in logits.masks)
    inputs: list[Value] = [*arrays, *(seen.base for seen, _, _ in logits.factors)]
    inputs += [part.seen.base for part in dynamic]
    inputs += [seen.base for seen, _, _ in logits.biases]
    inputs += [] if sinks is None else [sinks.base]
    heads = layout.heads
    key_heads = tuple(h for h in heads if h.startswith("b"))
    orders = (
        (query[1], sizes, layout.batch, (layout.query,), heads),
        (key[1], of_keys, layout.batch, (layout.key,), key_heads),
        (value[1], of_keys, layout.batch, (layout.key,), key_heads),
    )
    rows = sizes[layout.query], sizes[layout.key]

    def call(*operands: jax.Array) -> Sequence[jax.Array]:
        q, k, v = (
            _arranged(array.astype(root.dtype), *order)
            for array, order in zip(operands, orders, strict=False)
        )
        rest = iter(operands[3:])
        q = _times_factors(q, layout, logits.factors, rest)
        explicit = _explicit_mask(layout, dynamic, rest)
        bias = _sum_of_biases(layout, logits.biases, rest)
        given = explicit
        if constant.explicit is not None:
            given = _both(given, jnp.asarray(constant.explicit))
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
            sinks=None if sinks is None else jnp.broadcast_to(next(rest).reshape(-1), q.shape[2:3]),
        )
        assert isinstance(output, jax.Array)
        if not always:
            allowed = jnp.ones((1, 1, 1, 1), bool) if explicit is None else explicit
            has_key = mask.has_key(allowed, constant, *rows).swapaxes(1, 2)[..., None]
            if is_nan:
                return (shaped(_nan_without_keys(output, has_key, has_gradient, q, k, v)),)
            of_equal = _of_absorbed_logits(q, k, v, scale) if has_gradient else _mean(v, q.shape[2])
            output = jnp.where(has_key, output, of_equal.astype(output.dtype))
        return (shaped(output),)

    def shaped(output: jax.Array) -> jax.Array:
        return reshaped(_ordered(output, layout, result_axes, feature), *root.shape)

    cap = [] if logits.soft_cap is None else [f"cap {logits.soft_cap:g}"]
    words = [f"scale {scale:.4g}", *cap, *constant.words()]
    words += (
        ["array of scales"] * len(logits.factors)
        + ["mask"] * bool(dynamic)
        + ["bias"] * len(logits.biases)
        + ["sinks"] * bool(sinks)
    )
    leaves = {leaf for array in inputs for leaf in stages(array)} | set(logits.added)
    leaves |= set() if sink is None else {sink}
    return Site(
        "dot_product_attention",
        node,
        inputs,
        [root],
        call,
        between(root, leaves),
        f"dot_product_attention({', '.join(words)}) of {arrays[0].aval.str_short()}"
        f" and {arrays[1].aval.str_short()}",
    )


def _check_factors(layout: mask.Layout, logits: Logits, root: Value) -> None:
    """Raises `NoAttention` where queries cannot be multiplied by the logits' factors."""
    for seen, axes, _ in logits.factors:
        if any(layout.key in axes[axis] for axis in seen.axes if axis is not None):
            raise NoAttention("the logits are scaled by an array that differs from key to key")
        # Queries would be rounded after the product with the factor, and logits are not.
        if logits.product.out.dtype.itemsize > root.dtype.itemsize or root.dtype == np.float16:
            raise NoAttention(
                f"{logits.product.out.dtype} logits are scaled by an array, which the operator would"
                f" multiply by the {root.dtype} queries"
            )


def _times_factors(
    query: jax.Array,
    layout: mask.Layout,
    factors: Sequence[tuple[View, Axes, float]],
    arrays: Iterator[jax.Array],
) -> jax.Array:
    """Returns the queries [B, T, N, H] times the logits' factors, whose arrays `arrays` yields."""
    product = query
    for seen, axes, power in factors:
        product = product.astype(accumulator_dtype(query.dtype))
        factor = layout.spread(next(arrays), seen.axes, axes).swapaxes(1, 2).astype(product.dtype)
        product = product * factor if power > 0 else product / factor
    return product.astype(query.dtype)


def _sinks(sink: Value, layout: mask.Layout, logits: Logits) -> View:
    """Returns the array of sinks (one logit for each head) before its broadcast to the logits' rows."""
    seen = view(sink, tuple(i if size != 1 else None for i, size in enumerate(sink.shape)))
    atoms = [name for axis in seen.axes if axis is not None for name in logits.axes[axis]]
    if atoms not in ([], [*layout.heads]):
        raise NoAttention("a logit that stands for no key differs by more than the head")
    if logits.shift:
        raise NoAttention("a number is added to the logits of keys alone")
    return seen


def _explicit_mask(
    layout: mask.Layout, parts: Sequence[mask.Part], arrays: Iterator[jax.Array]
) -> jax.Array | None:
    """Returns the logical and of the mask's `parts`, whose arrays `arrays` yields, or None."""
    explicit = None
    for part in parts:
        array = layout.spread(next(arrays), part.seen.axes, part.logits)
        array = array if array.dtype == jnp.bool_ else array != 0
        explicit = _both(explicit, ~array if part.negated else array)
    return explicit


def _both(mask: jax.Array | None, other: jax.Array) -> jax.Array:
    return other if mask is None else mask & other


def _sum_of_biases(
    layout: mask.Layout, biases: Sequence[tuple[View, Axes, float]], arrays: Iterator[jax.Array]
) -> jax.Array | None:
    """Returns the sum of the biases, whose arrays `arrays` yields; None if there are none."""
    bias = None
    for seen, axes, factor in biases:
        array = layout.spread(next(arrays), seen.axes, axes)
        if abs(factor) != 1.0:
            array = array.astype(accumulator_dtype(array.dtype))
        array = array if factor == 1.0 else factor * array
        bias = array if bias is None else bias + array
    return bias


def _is_mask_a_bias(logits: Logits, always: bool) -> bool:
    """Returns whether the only mask is passed to the operator as one more bias.

    It is where each query has an unmasked key (`always`) and a bias may outweigh the mask's number, such
    as -1e9. Where a query may have none it is if the number absorbs every bias and logit: the softmax of
    such a query is uniform, and a bias gets its gradient.
    """
    if not logits.biases or len(logits.masks) != 1:
        return False
    (masking,) = logits.masks
    if masking.as_bias is None:
        return False
    if always:
        return ABSORBING < masking.number < 0
    # The sum of two such numbers may be -inf.
    return -np.inf < masking.number <= ABSORBING and not any(_may_mask(*b) for b in logits.biases)


def _check_biases(logits: Logits) -> None:
    """Raises `NoAttention` where a bias may be confused with a mask."""
    numbers = [masking.number for masking in logits.masks]
    highest = max(numbers, default=-np.inf)
    if logits.biases and highest > ABSORBING and not _are_far_above(highest, logits.biases):
        raise NoAttention("a mask's number is not far below what a bias may be")
    if any(np.isfinite(numbers)) and any(_may_mask(*bias) for bias in logits.biases):
        raise NoAttention("a bias may be as far below the other logits as a mask's number is")


def _are_far_above(number: float, biases: Sequence[tuple[View, Axes, float]]) -> bool:
    """Returns whether the mask's number is below -1e4 times the largest magnitude of any bias."""
    most = max(
        abs(bound * factor) for seen, _, factor in biases for bound in mask.bounds(seen.base)
    )
    return number < -1e4 * most


def _may_mask(seen: View, axes: Axes, factor: float) -> bool:
    """True if a bias may be a mask in an unknown form, such as (1 - m) * -1e9 of a float argument m.

    A later scale of the logits, of which `factor` holds a part, makes no mask of it an ordinary bias.
    """
    sign = 1.0 if factor > 0 else -1.0
    least = min(bound * sign for bound in mask.bounds(seen.base))
    return least * max(1.0, abs(factor)) <= mask.BIG / 10


def _without_keys(logits: Logits, always: bool, of_none: OfNone) -> tuple[bool, bool]:
    """Returns whether no query's result has to be replaced for want of keys, and whether it is NaN then.

    Args:
      logits: the logits, with their masks.
      always: whether every query has a key or a sink.
      of_none: as in `make_site`.
    """
    # Without its maximum, a softmax of masked logits is 0 / 0 whatever the mask's number is.
    numbers = {-np.inf if of_none == "nan" else masking.number for masking in logits.masks}
    if of_none == "zero" and len(logits.masks) > 1:
        raise NoAttention("probabilities are 0 by one mask, and there is another")
    # Such a query gives 0, as in the operator.
    always = always or of_none == "zero"
    if not always:
        _check_queries_without_keys(logits, numbers)
    may_mask = any(_may_mask(*bias) for bias in logits.biases)
    if of_none == "other" and ((not always and numbers != {-np.inf}) or may_mask):
        raise NoAttention(
            "a query may have no key, of which exp(logits - logsumexp(logits)) is no softmax"
        )
    return always, -np.inf in numbers


def _check_queries_without_keys(logits: Logits, numbers: set[float]) -> None:
    """Raises `NoAttention` unless the masks alone determine the result of a query without keys.

    Args:
      numbers: what masked logits become, or what is added to them.
    """
    added = {masking.is_added for masking in logits.masks}
    if -np.inf in numbers and (len(added) > 1 or (logits.biases and True in added)):
        raise NoAttention("-inf is added to some logits, and a query may have no key: it is NaN")
    if numbers == {-np.inf} and not logits.is_biased_last:
        return
    if len(numbers) > 1:
        raise NoAttention("masks give different numbers, and a query may have no key")
    if logits.is_biased_last:
        raise NoAttention("a bias is added to masked logits, and a query may have no key")
    if not any(masking.is_added for masking in logits.masks):
        return
    if len(logits.masks) > 1 or logits.biases or logits.soft_cap is not None:
        raise NoAttention("a mask is added to logits with a bias, and a query may have no key")
    if max(numbers) > ABSORBING:
        raise NoAttention(
            f"{max(numbers):g} is added to masked logits, of which it leaves something, and a query may"
            " have no key"
        )


def _unrepeated(
    key: tuple[Value, Axes], value: tuple[Value, Axes], layout: mask.Layout
) -> tuple[tuple[Value, Axes], tuple[Value, Axes], dict[str, int]] | None:
    """Returns keys and values before their heads were repeated, with their axes and sizes, or None."""
    if len(layout.heads) != 1:
        return None
    (head,) = layout.heads
    inner: list[tuple[Value, Axes]] = []
    key_heads: set[int] = set()
    for operand, axes in (_untransposed(*key), _untransposed(*value)):
        if (head,) not in axes:
            return None
        before = _before_repeat(operand, axes.index((head,)))
        if before is None:
            return None
        inner.append((before, axes))
        key_heads.add(before.shape[axes.index((head,))])
    if len(key_heads) != 1:
        return None
    return inner[0], inner[1], layout.sizes | {head: key_heads.pop()}


def _untransposed(value: Value, axes: Axes) -> tuple[Value, Axes]:
    """Returns an operand before its transpositions, with its axes' names there."""
    node = core(value).node
    while node is not None and node.name == "transpose":
        order = [int(axis) for axis in node.params["permutation"]]
        axes = tuple(axes[order.index(axis)] for axis in range(len(axes)))
        value = node.ins[0]
        node = core(value).node
    return value, axes


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
    """Returns the output after the last cast to a dtype that each operand had, and these operands.

    An operand that the program widened is returned in its narrow dtype, and widened in the call.
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
    raise NoAttention(f"queries, keys and values are {dtypes}, and the result is {after.out.dtype}")


def _arranged(
    array: jax.Array,
    axes: Axes,
    sizes: dict[str, int],
    batch: tuple[str, ...],
    rows: tuple[str, ...],
    heads: tuple[str, ...],
) -> jax.Array:
    """Returns a query, key or value array as [B, length, heads, features]."""
    atoms = [name for group in axes for name in group]
    array = reshaped(array, *(sizes[name] for name in atoms))
    features = [a for a in atoms if a not in (*batch, *rows, *heads)]
    array = array.transpose([atoms.index(a) for a in (*batch, *rows, *heads, *features)])

    def size(names: Sequence[str]) -> int:
        return int(np.prod([sizes[name] for name in names], dtype=int))

    return reshaped(array, size(batch), size(rows), size(heads), size(features))


def _ordered(output: jax.Array, layout: mask.Layout, axes: Axes, feature: str) -> jax.Array:
    """Returns the operator's output [B, T, N, V] with the axes of the program's result."""
    atoms = [*layout.batch, layout.query, *layout.heads, feature]
    output = reshaped(output, *(layout.sizes[name] for name in atoms))
    wanted = [name for group in axes for name in group]
    return output.transpose([atoms.index(name) for name in wanted])


def _mean(value: jax.Array, heads: int) -> jax.Array:
    """Returns the mean of the values [B, S, K, V] over the keys, as [B, 1, N, V].

    A query whose logits are all equal has this result.
    """
    dtype = accumulator_dtype(value.dtype)
    mean = jnp.mean(value, axis=1, keepdims=True, dtype=dtype)
    return jnp.repeat(mean, heads // value.shape[2], axis=2)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _nan_without_keys(
    output: jax.Array, has_key: jax.Array, has_gradient: bool, *operands: jax.Array
) -> jax.Array:
    """Returns the output [B, T, N, V] with NaN where all logits of a query were -inf.

    Args:
      has_gradient: whether -inf was added to the logits, instead of replacing them.
      *operands: queries, keys and values.
    """
    return jnp.where(has_key, output, jnp.nan)


@_nan_without_keys.defjvp
def _nan_without_keys_jvp(has_gradient: bool, primals: Any, tangents: Any) -> Any:
    """Makes the values' gradient NaN too; with `has_gradient`, that of queries and keys as well."""
    output, has_key, *_ = primals
    doutput, _, dq, dk, dv = tangents
    heads, dtype = output.shape[2], output.dtype
    of_keys = dv.sum((1, 3), dtype=dtype)
    if has_gradient:
        of_keys = of_keys + dk.sum((1, 3), dtype=dtype)
    moved = jnp.repeat(of_keys, heads // dk.shape[2], axis=1)[:, None, :, None]
    if has_gradient:
        moved = moved + dq.sum(3, dtype=dtype, keepdims=True)
    nothing = jnp.where(has_key, 0, jnp.nan).astype(dtype) * moved
    y = _nan_without_keys(output, has_key, has_gradient, *primals[2:])
    return y, jnp.where(has_key, doutput, 0) + nothing


@functools.partial(jax.custom_jvp, nondiff_argnums=(3,))
def _of_absorbed_logits(
    query: jax.Array, key: jax.Array, value: jax.Array, scale: float
) -> jax.Array:
    """Returns the mean of the values as [B, T, N, V], with the derivative of a softmax of zero logits.

    A logit plus a number such as -1e30 rounds to that number, but its derivative to the logit is 1.
    """
    return jnp.broadcast_to(_mean(value, query.shape[2]), (*query.shape[:-1], value.shape[-1]))


@_of_absorbed_logits.defjvp
def _of_absorbed_logits_jvp(scale: float, primals: Any, tangents: Any) -> tuple[Any, Any]:
    """Returns the mean and its tangent: a key's probability p = 1 / S changes by p (dl - mean dl)."""
    (query, key, value), (dq, dk, dv) = primals, tangents
    result = _of_absorbed_logits(query, key, value, scale)
    dtype = accumulator_dtype(value.dtype)
    wide = value.astype(dtype)
    centred = wide - wide.mean(axis=1, keepdims=True)
    heads = (value.shape[2], query.shape[2] // value.shape[2])

    def by_logits(query: jax.Array, key: jax.Array) -> jax.Array:
        """Returns the sum over keys of the logits' tangents times the values, for grouped queries."""
        of_keys = jnp.einsum("bskh,bskv->bkhv", key.astype(dtype), centred) * (
            scale / value.shape[1]
        )
        grouped = query.astype(dtype).reshape(*query.shape[:2], *heads, query.shape[-1])
        return jnp.einsum("btkgh,bkhv->btkgv", grouped, of_keys).reshape(result.shape)

    return result, _mean(dv, query.shape[2]) + by_logits(dq, key) + by_logits(query, dk)
