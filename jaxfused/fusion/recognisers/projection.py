"""Finds qkv_projection: the products that compute queries, keys and values from one array.

It starts at an attention and goes back from its three operands, through rotations, norms of heads and
reshapes, to the products that compute them. If all three read one array, they become one call, which
includes norm and rotation.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from jaxfused.fusion.algebra import between, is_reshape, is_transparent
from jaxfused.fusion.columns import Columns
from jaxfused.fusion.constants import scalar
from jaxfused.fusion.graph import Node, Value, bind
from jaxfused.fusion.recognisers.norm import Norm
from jaxfused.fusion.recognisers.product import Biased, Projection, biased, projections
from jaxfused.fusion.recognisers.rotation import Rotation, differs_along, rotation, tables_of_rows
from jaxfused.fusion.recognisers.stacked import Part, parts, whole_of
from jaxfused.fusion.site import Book, Site
from jaxfused.fusion.source import line_of
from jaxfused.ops.linear.qkv_projection import qkv_projection
from jaxfused.runtime.shapes import reshaped


@dataclass
class _Branch:
    """The operations from a product to an operand of an attention."""

    product: Projection
    affine: Biased
    result: Value
    """The value after norm and rotation."""
    views: list[Node] = field(default_factory=list)
    """Reshapes and transpositions from the product to `result`, in order."""
    norm: Site | None = None
    rotation: Rotation | None = None

    @property
    def head_size(self) -> int:
        return self.result.shape[-1]


_Products = dict[Value, tuple[Projection, Biased]]
"""For each result of a product with its bias, both of them."""


def find(book: Book) -> None:
    """Finds the products that compute the operands of each attention, and records their replacements."""
    attentions = [s for s in book.sites if s.operator == "dot_product_attention"]
    by_result: _Products = {}
    if attentions:
        for p in projections(book):
            affine = biased(book, p)
            by_result[affine.value] = (p, affine)
        for part, affine in parts(book):
            by_result[affine.value] = (part, affine)
    columns = Columns()
    by_output = {s.outputs[0]: s for s in book.sites if s.operator == "rms_norm"}
    for site in attentions:
        branches = [_branch(book, v, by_result, by_output, columns) for v in site.inputs[:3]]
        whole = [b for b in branches if isinstance(b, _Branch)]
        if len(whole) == 3:
            _add(book, whole)
        else:
            _miss(book, branches, by_result)


def _branch(
    book: Book,
    operand: Value,
    by_result: _Products,
    norms: dict[Value, Site],
    columns: Columns,
) -> _Branch | Value:
    """Returns the operations from a product to an operand, or a value that the call cannot include."""
    value = operand
    views: list[Node] = []
    turned: Rotation | None = None
    norm: Site | None = None
    result: Value | None = None
    for _ in range(12):
        if value in by_result:
            p, affine = by_result[value]
            if not book.is_free(p.covered | affine.covered):
                return value
            end = value if result is None else result
            return _Branch(p, affine, end, views[::-1] if result is not None else [], norm, turned)
        if value in norms and norm is None:
            norm = norms[value]
            facts = norm.facts
            if not isinstance(facts, Norm) or facts.activation is not None:
                return value
            if len(norm.inputs) != 2 or len(norm.outputs) != 1:
                return value
            result = value if result is None else result
            value = norm.inputs[0]
            continue
        found = rotation(value, columns) if turned is None and norm is None else None
        if found is not None and book.is_free(found.covered):
            turned = found
            result = value
            value = found.x
            continue
        node = value.node
        if node is None or node in book.owner:
            return value
        if result is None and node.name in ("mul", "div") and scalar(node.ins[1]) is not None:
            # A scale after norm and rotation stays in the program, after the call of
            # qkv_projection.
            value = node.ins[0]
            continue
        if node.name != "transpose" and not (is_reshape(node) or is_transparent(node)):
            return value
        if result is not None:
            views.append(node)
        value = node.ins[0]
    return value


def _miss(book: Book, ends: Sequence[_Branch | Value], products: _Products) -> None:
    """Records the operation that keeps apart three products of one array, if there are three."""
    inputs = [{e.product.x} if isinstance(e, _Branch) else _products_of(e, products) for e in ends]
    first = next((e for e in ends if isinstance(e, Value) and e not in products), None)
    if first is None or first.node is None or any(len(x) != 1 or x != inputs[0] for x in inputs):
        return
    name, line = first.node.name, line_of(first.node)
    reason = f"{name} at line {line} comes between a product and its attention"
    book.miss("qkv_projection", first.node, reason)


def _products_of(value: Value, products: _Products) -> set[Value]:
    """Returns the arrays whose products the nearest operations before a value read."""
    found: set[Value] = set()
    pending, seen = [value], {value}
    while pending and len(seen) < 64:
        value = pending.pop()
        if value in products:
            found.add(products[value][0].x)
        elif value.node is not None and value.node.name != "dot_general":
            pending += [v for v in value.node.ins if v not in seen]
            seen |= {*value.node.ins}
    return found


def _add(book: Book, branches: Sequence[_Branch]) -> None:
    q, k, v = branches
    anchor = q.product.node
    if len({b.product.x for b in branches}) != 1:
        return
    if len({b.product for b in branches}) != 3:
        book.miss("qkv_projection", anchor, "two of queries, keys and values are one product")
        return
    x = q.product.x
    if len(q.product.contracted) != 1 or x.ndim < 2:
        return
    reason = _why_not(q, k, v)
    if reason:
        book.miss("qkv_projection", anchor, reason)
        return
    head_size = q.head_size if q.norm or q.rotation else _head_size(q, k)
    rows = q.product.rows
    heads, key_heads = (_columns(b) // head_size for b in (q, k))
    if heads % key_heads:
        return
    facts = q.norm.facts if q.norm is not None else None
    tables = q.rotation
    heads_axis = 0 if tables is None else _heads_axis(q, tables) or 0
    whole = whole_of([b.product for b in branches])
    is_one = whole is not None and len({b.affine.bias for b in branches}) == 1
    products = [whole] if whole is not None and is_one else [b.product for b in branches]
    biases = [b.affine.bias for b in (branches[:1] if is_one else branches)]
    inputs: list[Value] = [x, *(p.w for p in products)]
    inputs += [bias for bias in biases if bias is not None]
    inputs += [b.norm.inputs[1] for b in (q, k) if b.norm is not None]
    if tables is not None:
        inputs += [tables.cos.seen.base, tables.sin.seen.base]
    outputs = [b.result for b in branches]

    def call(x: jax.Array, *arrays: jax.Array) -> Sequence[jax.Array]:
        rest = iter(arrays)
        weights = [p.matrix(next(rest)) for p in products]
        bias = None
        if any(bias is not None for bias in biases):
            in_parts = [
                jnp.zeros(w.shape[1], x.dtype) if bias is None else p.bias(next(rest))
                for p, w, bias in zip(products, weights, biases, strict=True)
            ]
            bias = in_parts[0] if is_one else jnp.concatenate(in_parts)
        scales = [next(rest).reshape(-1) if b.norm is not None else None for b in (q, k)]
        cos, sin = None, None
        if tables is not None:
            cos, sin = tables_of_rows(tables, next(rest), next(rest), rows, heads_axis)
        projected = qkv_projection(
            x,
            weights[0] if is_one else jnp.concatenate(weights, axis=1),
            bias,
            heads=heads,
            key_heads=key_heads,
            q_scale=scales[0],
            k_scale=scales[1],
            epsilon=1e-6 if facts is None else facts.epsilon,
            scale_offset=0.0 if facts is None else facts.scale_offset,
            cos=cos,
            sin=sin,
            interleaved=tables is not None and tables.interleaved,
            precision=q.product.precision,
        )
        return [_shaped(b, y) for b, y in zip(branches, projected, strict=True)]

    words = (
        ["one matrix"] * is_one
        + ["bias"] * any(bias is not None for bias in biases)
        + ["norm"] * (q.norm is not None)
    )
    words += ["rope"] * (tables is not None)
    book.add(
        Site(
            "qkv_projection",
            anchor,
            inputs,
            outputs,
            call,
            _covered(branches),
            f"qkv_projection({', '.join([f'heads {heads} and {key_heads}', *words])})"
            f" of {x.aval.str_short()}",
            parts=tuple(b.norm for b in (q, k) if b.norm is not None),
        )
    )


def _covered(branches: Sequence[_Branch]) -> set[Node]:
    """Returns the operations that the call replaces."""
    covered: set[Node] = set()
    for b in branches:
        covered |= b.product.covered | b.affine.covered | set(b.views)
        leaves = {b.affine.value}
        if b.rotation is not None:
            leaves |= b.rotation.tables
        if b.norm is not None:
            leaves.add(b.norm.inputs[1])
        covered |= between(b.result, leaves)
    return covered


def _columns(branch: _Branch) -> int:
    count = 1
    for size in branch.product.features:
        count *= size
    return count


def _head_size(q: _Branch, k: _Branch) -> int:
    """Returns the head size H. Without norm and rotation any common divisor of the widths is right."""
    if len(q.product.features) > 1:
        return q.product.features[-1]
    return min(_columns(q), _columns(k))


def _why_not(q: _Branch, k: _Branch, v: _Branch) -> str:
    """Returns why three products of one array are no qkv_projection, or ""."""
    if _columns(k) != _columns(v):
        return f"keys have {_columns(k)} features and values {_columns(v)}"
    for b in (q, k, v):
        if b.result.dtype != b.product.x.dtype or b.affine.value.dtype != b.product.x.dtype:
            return f"its result stays in {b.result.dtype}, and x is {b.product.x.dtype}"
        if b.product.precision != q.product.precision:
            return "its products differ in precision"
    if v.norm is not None or v.rotation is not None:
        return "values are normalised or rotated"
    if (q.norm is None) != (k.norm is None) or (q.rotation is None) != (k.rotation is None):
        return "queries and keys differ in norm or rotation"
    if q.norm is not None and k.norm is not None and q.norm.facts != k.norm.facts:
        return "the norms of queries and keys differ in epsilon"
    if q.rotation is not None and k.rotation is not None:
        of_q, of_k = q.rotation, k.rotation
        if of_q.interleaved != of_k.interleaved or not all(
            one.is_the_same(other) for one, other in ((of_q.cos, of_k.cos), (of_q.sin, of_k.sin))
        ):
            return "queries and keys are rotated by different angles"
        for b, found in ((q, q.rotation), (k, k.rotation)):
            axis = _heads_axis(b, found)
            if axis is None or axis != _heads_axis(q, of_q) or differs_along(found, axis):
                return "what is rotated has not one axis of heads, before the features or the positions"
    if (q.norm or q.rotation) and q.head_size != k.head_size:
        return "queries and keys differ in their head size"
    return ""


def _heads_axis(branch: _Branch, found: Rotation) -> int | None:
    """Returns the axis of the heads in the rotated array: the last but one or two; None if neither."""
    rows, shape, rank = branch.product.rows, found.x.shape, found.x.ndim
    turned = [node for node in branch.views if node.name == "transpose"]
    in_front = not isinstance(branch.product, Part) or branch.product.has_rows_in_front
    if not turned and in_front:
        return rank - 2 if shape[:-2] == rows else None
    swapped = (*range(rank - 3), rank - 2, rank - 3, rank - 1)
    permutations = [tuple(map(int, node.params["permutation"])) for node in turned]
    is_swapped = permutations == ([swapped] if in_front else [])
    if not is_swapped or rank != len(rows) + 2 or (*shape[:-3], shape[-2]) != rows:
        return None
    return rank - 3


def _shaped(branch: _Branch, y: jax.Array) -> jax.Array:
    """Returns the operator's result [..., T, N, H] in the shape that the program reads."""
    product, shape = branch.product, branch.affine.value.shape
    y = product.shaped(y) if isinstance(product, Part) else reshaped(y, *shape)
    for node in branch.views:
        (y,) = bind(node.eqn, [y, *()])
    return y
