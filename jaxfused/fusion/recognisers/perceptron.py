"""Finds mlp and gated_mlp: two products with an activation, or with a gated unit, between them.

A gated unit that no product reads, as in AlphaFold's triangle products, is a gated_unit.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxfused.fusion.activation import Activated, activation_of, why_no_activation
from jaxfused.fusion.algebra import core
from jaxfused.fusion.graph import Node, Value
from jaxfused.fusion.recognisers.product import (
    Biased,
    Projection,
    biased,
    last_of,
    product_with,
    projections,
    residual_of,
)
from jaxfused.fusion.recognisers.stacked import Part, parts, whole_of
from jaxfused.fusion.site import Book, Site
from jaxfused.ops.linear.gated_mlp import gated_mlp
from jaxfused.ops.linear.gated_unit import gated_unit
from jaxfused.ops.linear.mlp import mlp
from jaxfused.runtime.shapes import reshaped


@dataclass(frozen=True)
class _Products:
    """The products of the graph that nothing replaces yet."""

    book: Book
    by_result: dict[Value, Projection]
    by_input: dict[Value, Projection]
    parts: dict[Projection, Biased]
    """Slices of a product's features whose bias was added before they were cut."""

    def biased(self, p: Projection) -> Biased:
        return self.parts.get(p) or biased(self.book, p)


def find(book: Book) -> None:
    """Finds all MLPs of the graph and records their replacements."""
    found = projections(book)
    by_input: dict[Value, Projection] = {}
    for p in found:
        by_input.setdefault(_input(p), p)
    cut = [(p, affine) for p, affine in parts(book) if p.has_rows_in_front]
    firsts = [*found, *(p for p, _ in cut)]
    given: dict[Projection, Biased] = {p: a for p, a in cut if a.bias is not None}
    products = _Products(book, {p.result: p for p in firsts}, by_input, given)
    for p in firsts:
        if book.is_free(p.covered):
            _find_at(products, p)


def _input(p: Projection) -> Value:
    """Returns the product's input before casts and reshapes."""
    value = core(p.x)
    while value.node is not None and value.node.name == "reshape":
        value = core(value.node.ins[0])
    return value


def _find_at(products: _Products, first: Projection) -> None:
    book, by_input = products.book, products.by_input
    affine = products.biased(first)
    activated = activation_of(affine.value)
    halves = _halves(affine.value)
    if halves is not None:
        _gated_of_one(book, first, affine, halves, by_input)
        return
    if activated is None:
        why = why_no_activation(affine.value) if isinstance(first, Part) else ""
        if why:
            book.miss("gated_mlp", first.node, why)
        return
    last = by_input.get(core(activated.result))
    if last is not None and _fits(first, activated.result, last):
        _add_mlp(book, first, affine, activated, last)
        return
    gated = product_with(activated.result)
    if gated is None:
        return
    node, other = gated
    up = _projection_of(core(other), products)
    last = by_input.get(core(last_of(node.out)))
    if up is None or core(up[0].x) is not core(first.x):
        return
    if up[0].x.dtype != first.x.dtype or up[0].precision != first.precision:
        return
    if up[0].features != first.features:
        return
    covered = activated.covered | {node}
    branches = [(first, affine), up]
    whole = whole_of([first, up[0]])
    if whole is not None and affine.bias is up[1].bias:
        # Gate and up are slices of one matrix with the gate's columns first, as the operator takes it.
        covered |= first.covered | affine.covered | up[0].covered | up[1].covered
        branches = [(whole, Biased(whole.result, affine.bias, frozenset()))]
    if last is not None and _fits(first, last_of(node.out), last):
        covered |= _stages_between(node.out, last)
        _add_gated(book, branches, activated.name, set(covered), last)
    else:
        _add_unit(book, branches, activated.name, set(covered), node.out)


def _stages_between(value: Value, last: Projection) -> set[Node]:
    """Returns the casts and reshapes from a value to the product that reads it."""
    found: set[Node] = set()
    end = last.x
    while end is not value and end.node is not None:
        found.add(end.node)
        end = end.node.ins[0]
    return found


def _projection_of(value: Value, products: _Products) -> tuple[Projection, Biased] | None:
    """Returns the product and the bias whose result a value is, or None."""
    candidates = [value]
    if value.made_by == "add" and value.node is not None:
        candidates += [core(operand) for operand in value.node.ins]
    for candidate in candidates:
        p = products.by_result.get(candidate)
        if p is not None:
            affine = products.biased(p)
            if core(affine.value) is value or affine.value is value:
                return p, affine
    return None


def _fits(first: Projection, hidden: Value, last: Projection) -> bool:
    """Returns whether two products agree on the hidden layer's dtype, precision, features and rows."""
    features = math.prod(first.features)
    return (
        last.x.dtype == first.x.dtype
        and math.prod(last.x.shape[last.x.ndim - len(last.contracted) :]) == features
        and last.precision == first.precision
        and math.prod(last.rows) == math.prod(first.rows)
    )


@dataclass(frozen=True)
class _Ending:
    """The value after the last product, with the bias and the residual that were added to it."""

    value: Value
    bias: Value | None
    residual: Value | None
    covered: frozenset[Node]


def _ending(book: Book, last: Projection) -> _Ending:
    affine = biased(book, last)
    added = residual_of(book, affine.value)
    if added is None:
        return _Ending(affine.value, affine.bias, None, last.covered | affine.covered)
    covered = last.covered | affine.covered | {added.node}
    return _Ending(added.value, affine.bias, added.residual, covered)


def _add_mlp(
    book: Book, first: Projection, affine: Biased, activated: Activated, last: Projection
) -> None:
    end = _ending(book, last)
    given = {"b1": affine.bias, "b2": end.bias, "residual": end.residual}
    present = {name: value for name, value in given.items() if value is not None}
    shape, dtype = end.value.shape, end.value.dtype

    def call(x: jax.Array, w1: jax.Array, w2: jax.Array, *arrays: jax.Array) -> Sequence[jax.Array]:
        rest = dict(zip(present, arrays, strict=True))
        residual = rest.get("residual")
        y = mlp(
            first.inputs(x),
            first.matrix(w1),
            first.bias(rest["b1"]) if "b1" in rest else None,
            last.matrix(w2),
            last.bias(rest["b2"]) if "b2" in rest else None,
            activation=activated.name,
            residual=None if residual is None else reshaped(residual, *first.rows, -1),
            save="hidden",
            precision=first.precision,
            out_dtype=dtype,
        )
        return (reshaped(y, *shape),)

    covered = first.covered | affine.covered | activated.covered | end.covered
    covered |= _stages_between(activated.result, last)
    book.add(
        Site(
            "mlp",
            first.node,
            [first.x, first.w, last.w, *present.values()],
            [end.value],
            call,
            set(covered),
            f"mlp({', '.join([*present, activated.name])}) of {first.x.aval.str_short()}"
            f" and {list(first.w.shape)}",
        )
    )


def _add_unit(
    book: Book,
    branches: Sequence[tuple[Projection, Biased]],
    activation: str,
    covered: set[Node],
    value: Value,
) -> None:
    """Adds a gated unit of `value`, which no product reads that would make it a gated MLP."""
    gate = branches[0][0]
    if value.dtype != gate.x.dtype or _is_copied(branches):
        return
    for p, affine in branches:
        covered |= p.covered | affine.covered
    names = ("b_gate", "b_up")[: len(branches)]
    given = {n: affine.bias for n, (_, affine) in zip(names, branches, strict=True)}
    present = {name: bias for name, bias in given.items() if bias is not None}
    owners = {n: p for n, (p, _) in zip(names, branches, strict=True)}

    def call(x: jax.Array, *arrays: jax.Array) -> Sequence[jax.Array]:
        weights = [p.matrix(w) for (p, _), w in zip(branches, arrays, strict=False)]
        rest = zip(present, arrays[len(branches) :], strict=True)
        biases: dict[str, Any] = {name: owners[name].bias(b) for name, b in rest}
        h = gated_unit(
            gate.inputs(x),
            weights[0],
            weights[1] if len(weights) > 1 else None,
            activation=activation,
            precision=gate.precision,
            **biases,
        )
        return (reshaped(h, *value.shape),)

    book.add(
        Site(
            "gated_unit",
            gate.node,
            [gate.x, *(p.w for p, _ in branches), *present.values()],
            [value],
            call,
            covered,
            f"gated_unit({', '.join([*present, activation])}) of {gate.x.aval.str_short()}"
            f" and {list(gate.w.shape)}",
        )
    )


def _is_copied(branches: Sequence[tuple[Projection, Biased]]) -> bool:
    """Returns whether ordering gate and up would copy a matrix for as long as fusing saves, or longer.

    A copy of interleaved columns always does (94 us on an H200 at 2048 to 2 x 5632, 2,048 rows or more);
    one of swapped halves does for fewer rows than x has features.
    """
    gate = branches[0][0]
    if any(isinstance(p, Part) for p, _ in branches):
        return True
    is_small = math.prod(gate.rows) < math.prod(gate.x.shape[len(gate.rows) :])
    return isinstance(gate, _Swapped) and is_small


def _add_gated(
    book: Book,
    branches: Sequence[tuple[Projection, Biased]],
    activation: str | None,
    covered: set[Node],
    last: Projection,
) -> None:
    """Adds a gated MLP, whose gate and other factor come from two products or from one's halves."""
    end = _ending(book, last)
    gate = branches[0][0]
    if _is_copied(branches):
        reason = "its matrix would be copied to order gate and up, for as long as fusing saves"
        book.miss("gated_mlp", gate.node, reason)
        return
    names = ("gate", "up")[: len(branches)]
    given: dict[str, Value | None] = {
        f"b_{n}": affine.bias for n, (_, affine) in zip(names, branches, strict=True)
    }
    given |= {"b_down": end.bias, "residual": end.residual}
    present = {name: value for name, value in given.items() if value is not None}
    owners = {f"b_{n}": p for n, (p, _) in zip(names, branches, strict=True)} | {"b_down": last}
    shape, dtype = end.value.shape, end.value.dtype

    def call(x: jax.Array, *arrays: jax.Array) -> Sequence[jax.Array]:
        weights = [p.matrix(w) for (p, _), w in zip(branches, arrays, strict=False)]
        down = last.matrix(arrays[len(branches)])
        rest: dict[str, Any] = dict(zip(present, arrays[len(branches) + 1 :], strict=True))
        residual = rest.pop("residual", None)
        biases: dict[str, Any] = {name: owners[name].bias(b) for name, b in rest.items()}
        y = gated_mlp(
            gate.inputs(x),
            weights[0],
            weights[1] if len(weights) > 1 else None,
            down,
            activation=activation,
            residual=None if residual is None else reshaped(residual, *gate.rows, -1),
            save="hidden",
            precision=gate.precision,
            out_dtype=dtype,
            **biases,
        )
        return (reshaped(y, *shape),)

    for p, affine in branches:
        covered |= p.covered | affine.covered
    covered |= end.covered
    book.add(
        Site(
            "gated_mlp",
            gate.node,
            [gate.x, *(p.w for p, _ in branches), last.w, *present.values()],
            [end.value],
            call,
            covered,
            f"gated_mlp({', '.join([*present, activation or 'bilinear'])}) of"
            f" {gate.x.aval.str_short()} and {list(gate.w.shape)}",
        )
    )


# --- one product with the gate and the other factor concatenated -----------------------------------


@dataclass(frozen=True)
class _Halves:
    first: Value
    second: Value
    covered: frozenset[Node]


def _halves(value: Value) -> _Halves | None:
    """Returns the two halves of a value's last axis, if nothing else of it is read, or None."""
    readers = set(value.uses)
    width = value.shape[-1] if value.shape else 0
    if value.is_output or width % 2 or not readers:
        return None
    halves: list[Value | None] = [None, None]
    for node in readers:
        if node.name == "split":
            sizes = [int(size) for size in node.params["sizes"]]
            if node.params["axis"] != value.ndim - 1 or sizes != [width // 2] * 2:
                return None
            halves = list(node.outs)
        elif node.name == "slice" and _is_half(node, value):
            halves[int(node.params["start_indices"][-1] > 0)] = node.out
        else:
            return None
    first, second = halves
    if first is None or second is None:
        return None
    return _Halves(first, second, frozenset(readers))


def _is_half(node: Node, value: Value) -> bool:
    starts, stops = node.params["start_indices"], node.params["limit_indices"]
    half = value.shape[-1] // 2
    return (
        node.params["strides"] is None
        and all(s == 0 for s in starts[:-1])
        and tuple(stops[:-1]) == value.shape[:-1]
        and (starts[-1], stops[-1]) in ((0, half), (half, 2 * half))
    )


def _gated_of_one(
    book: Book,
    first: Projection,
    affine: Biased,
    halves: _Halves,
    by_input: dict[Value, Projection],
) -> None:
    for gate, up in ((halves.first, halves.second), (halves.second, halves.first)):
        activated = activation_of(gate)
        if activated is None:
            continue
        found = product_with(activated.result)
        if found is None or core(found[1]) is not up:
            continue
        node = found[0]
        last = by_input.get(core(last_of(node.out)))
        covered = set(activated.covered | {node} | halves.covered)
        branches = [(_swapped(first) if gate is halves.second else first, affine)]
        if (
            last is not None
            and last.x.dtype == first.x.dtype
            and last.precision == first.precision
            and math.prod(first.features) == 2 * math.prod(last.x.shape[-len(last.contracted) :])
        ):
            covered |= _stages_between(node.out, last)
            _add_gated(book, branches, activated.name, covered, last)
        else:
            _add_unit(book, branches, activated.name, covered, node.out)
        return


class _Swapped(Projection):
    """A product whose columns are the other factor, then the gate; the operator takes the gate first."""

    def matrix(self, w: jax.Array) -> jax.Array:
        return jnp.roll(super().matrix(w), math.prod(self.features) // 2, axis=1)

    def bias(self, bias: jax.Array) -> jax.Array:
        return jnp.roll(super().bias(bias), math.prod(self.features) // 2)


def _swapped(p: Projection) -> Projection:
    return _Swapped(p.node, p.x, p.w, p.contracted, p.result, p.covered)
