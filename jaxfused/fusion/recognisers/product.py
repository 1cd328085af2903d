"""Finds linear: a product of rows and a matrix with its bias, activation and residual; and gate.

A product alone, or with a bias, is left to XLA. Only one with an activation or a residual is replaced.
Its activation may be the gate that another array is multiplied by, such as an attention's output.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxfused.fusion.activation import Activated, activation_of, why_no_activation
from jaxfused.fusion.algebra import between, core, is_reshape, is_transparent, trailing
from jaxfused.fusion.graph import Node, Value
from jaxfused.fusion.site import Book, Site
from jaxfused.ops.linear.gated_unit import gate
from jaxfused.ops.linear.linear import linear
from jaxfused.runtime.shapes import reshaped


@dataclass(frozen=True, eq=False)
class Projection:
    """A product x [..., D] times a matrix [D, F]. D and F may each be several axes of an array."""

    node: Node
    x: Value
    w: Value
    """The matrix before casts, unless it has to be transposed."""
    contracted: tuple[int, ...]
    """Axes of w that are summed over, in the order of the last axes of x that they are summed with."""
    result: Value
    """The result [..., *features], after the program's transposition to this order, if any."""
    covered: frozenset[Node]

    @property
    def features(self) -> tuple[int, ...]:
        """Sizes of the axes of w that make up F."""
        return tuple(size for axis, size in enumerate(self.w.shape) if axis not in self.contracted)

    @property
    def rows(self) -> tuple[int, ...]:
        """Sizes of the axes of x before its features."""
        return self.x.shape[: self.x.ndim - len(self.contracted)]

    @property
    def precision(self) -> Any:
        return self.node.params["precision"]

    def matrix(self, w: jax.Array) -> jax.Array:
        """Returns w as [D, F]."""
        free = [axis for axis in range(w.ndim) if axis not in self.contracted]
        if (*self.contracted, *free) != tuple(range(w.ndim)):
            w = w.transpose(*self.contracted, *free)
        return reshaped(w, -1, math.prod(self.features))

    def inputs(self, x: jax.Array) -> jax.Array:
        """Returns x as [..., D]."""
        return x if len(self.contracted) == 1 else reshaped(x, *self.rows, -1)

    def bias(self, bias: jax.Array) -> jax.Array:
        """Returns a bias as [F]."""
        return bias.reshape(-1)


def projections(book: Book) -> list[Projection]:
    """Returns, in order, all products with a matrix that nothing replaces yet."""
    parsed = (projection(n) for n in book.graph.nodes if n.name == "dot_general")
    return [p for p in parsed if p is not None and book.is_free(p.covered)]


def projection(node: Node) -> Projection | None:
    """Returns the operation as a product with a matrix, or None."""
    (left, right), (left_batch, right_batch) = node.params["dimension_numbers"]
    if left_batch or right_batch or not node.out.is_floating:
        return None
    # The matrix may be the left operand: the result is then [F, *rows], which the program
    # transposes.
    w, x = node.ins
    rows = x.ndim - len(right)
    if rows == 0:
        return _oriented(node, x, w, right, left, node.out, ())
    turned = node.out.uses[0] if node.out.used_once else None
    if turned is not None and turned.name == "transpose":
        features = node.out.ndim - rows
        if tuple(turned.params["permutation"]) == (
            *range(features, node.out.ndim),
            *range(features),
        ):
            found = _oriented(node, x, w, right, left, turned.out, (turned,))
            if found is not None:
                return found
    return _oriented(node, node.ins[0], node.ins[1], left, right, node.out, ())


def _oriented(
    node: Node,
    x: Value,
    w: Value,
    of_x: Sequence[int],
    of_w: Sequence[int],
    result: Value,
    after: Sequence[Node],
) -> Projection | None:
    if x.dtype != w.dtype or not x.is_floating:
        return None
    # The contracted axes of x must be its last ones; those of w follow their order.
    pairs = sorted(zip(of_x, of_w, strict=True))
    if [int(a) for a, _ in pairs] != list(range(x.ndim - len(pairs), x.ndim)):
        return None
    contracted = tuple(int(b) for _, b in pairs)
    if result.ndim != x.ndim - len(pairs) + w.ndim - len(pairs):
        return None
    earliest = earliest_matrix(w, contracted)
    return Projection(
        node,
        x,
        earliest,
        contracted,
        result,
        frozenset({node, *after, *between(w, {earliest})}),
    )


def earliest_matrix(w: Value, contracted: tuple[int, ...]) -> Value:
    """Returns the matrix before casts, unless it has to be transposed.

    The operator writes the matrix's gradient in the dtype of the matrix. A gradient that is transposed
    afterwards is cheaper in the narrow dtype, as in the program.
    """
    in_order = contracted == tuple(range(len(contracted))) and core(w).made_by != "transpose"
    return core(w) if in_order else w


@dataclass(frozen=True)
class Biased:
    """A product's result after its bias."""

    value: Value
    bias: Value | None
    covered: frozenset[Node]


def biased(book: Book, p: Projection) -> Biased:
    """Returns a product's result after its bias, if these operations are not replaced yet.

    Casts after the bias are included if they lead to the dtype of x. The bias may be added after a
    reshape of the features.
    """
    current = best = Biased(p.result, None, frozenset())
    while current.value.used_once:
        node = current.value.uses[0]
        if node in book.owner:
            break
        bias, covered = current.bias, current.covered | {node}
        if node.name == "add" and bias is None and node.out.shape == current.value.shape:
            other = node.ins[1] if node.ins[0] is current.value else node.ins[0]
            bias = trailing(other, current.value.shape[len(p.rows) :])
            if bias is None:
                break
            covered |= between(other, {bias})
        elif is_reshape(node):
            if bias is not None or node.out.shape[: len(p.rows)] != p.rows:
                break
        elif not is_transparent(node):
            break
        current = Biased(node.out, bias, covered)
        if bias is None and node.out.shape != p.result.shape:
            continue
        # A result in x's dtype is preferred; without one, the last result counts.
        if node.out.dtype == p.x.dtype or best.value.dtype != p.x.dtype:
            best = current
    return best


@dataclass(frozen=True)
class Residual:
    """A sum of a product and the residual stream."""

    value: Value
    residual: Value
    node: Node


def residual_of(book: Book, value: Value) -> Residual | None:
    """Returns the sum that adds the residual stream to a value, or None."""
    if not value.used_once:
        return None
    node = value.uses[0]
    if node.name != "add" or node in book.owner:
        return None
    other = node.ins[1] if node.ins[0] is value else node.ins[0]
    same = other.shape == value.shape and other.is_floating and other is not value
    return Residual(node.out, other, node) if same and not other.is_constant else None


def product_with(value: Value) -> tuple[Node, Value] | None:
    """Returns the multiplication that alone reads a value, and its other factor, or None."""
    value = last_of(value)
    if not value.used_once or value.uses[0].name != "mul":
        return None
    node = value.uses[0]
    other = node.ins[1] if node.ins[0] is value else node.ins[0]
    return (node, other) if other.shape == value.shape and other is not value else None


def last_of(value: Value) -> Value:
    """Returns the value after casts and checkpoint names, as long as each alone reads the one before."""
    while value.used_once and is_transparent(value.uses[0]):
        value = value.uses[0].out
    return value


def find(book: Book) -> None:
    """Finds products with an activation or a residual that no larger operator replaces."""
    for p in projections(book):
        _find_at(book, p)


def _find_at(book: Book, p: Projection) -> None:
    affine = biased(book, p)
    value, moved = _after_reshapes(affine.value)
    covered = p.covered | affine.covered | moved
    if not book.is_free(moved):
        return
    activated = activation_of(value)
    name = None
    if activated is not None and book.is_free(activated.covered):
        name, value = activated.name, activated.result
        covered |= activated.covered
        if _add_gate(book, p, affine, activated, covered):
            return
    elif activated is None:
        why = why_no_activation(value)
        if why:
            book.miss("linear", p.node, why)
    added = residual_of(book, value)
    if added is not None:
        value, covered = added.value, covered | {added.node}
    if name is None and added is None:
        return
    if value.dtype != p.x.dtype and not (name is None and value.dtype.itemsize == 4):
        book.miss("linear", p.node, f"its result stays in {value.dtype}, and x is {p.x.dtype}")
        return
    residual = None if added is None else added.residual
    given = {"bias": affine.bias, "residual": residual}
    present = {key: v for key, v in given.items() if v is not None}
    shape, dtype = value.shape, value.dtype

    def call(x: jax.Array, w: jax.Array, *arrays: jax.Array) -> Sequence[jax.Array]:
        operands: dict[str, Any] = dict(zip(present, arrays, strict=True))
        if "bias" in operands:
            operands["bias"] = p.bias(operands["bias"])
        if "residual" in operands:
            operands["residual"] = reshaped(operands["residual"], *p.rows, -1)
        y = linear(
            p.inputs(x),
            p.matrix(w),
            activation=name,
            precision=p.precision,
            out_dtype=dtype,
            **operands,
        )
        return (reshaped(y, *shape),)

    words = ", ".join([*present, *([name] if name else [])])
    book.add(
        Site(
            "linear",
            p.node,
            [p.x, p.w, *present.values()],
            [value],
            call,
            set(covered),
            f"linear({words}) of {p.x.aval.str_short()} and {list(p.w.shape)}",
        )
    )


def _after_reshapes(value: Value) -> tuple[Value, frozenset[Node]]:
    """Returns a value after the reshapes that alone read it, as to heads or images, and these."""
    moved: set[Node] = set()
    while value.used_once and is_reshape(value.uses[0]):
        moved.add(value.uses[0])
        value = value.uses[0].out
    return value, frozenset(moved)


def _add_gate(
    book: Book, p: Projection, affine: Biased, activated: Activated, covered: frozenset[Node]
) -> bool:
    """Adds a product whose activation is the gate of another array; returns whether it is one."""
    found = product_with(activated.result)
    if found is None or not book.is_free([found[0]]):
        return False
    node, other = found
    if other.is_constant or not node.out.dtype == other.dtype == p.x.dtype:
        return False
    biases = [] if affine.bias is None else [affine.bias]
    shape = node.out.shape

    def call(x: jax.Array, w: jax.Array, y: jax.Array, *biases: jax.Array) -> Sequence[jax.Array]:
        h = gate(
            p.inputs(x),
            p.matrix(w),
            p.bias(biases[0]) if biases else None,
            reshaped(y, *p.rows, -1),
            activation=activated.name,
            precision=p.precision,
        )
        return (reshaped(h, *shape),)

    words = ", ".join([*(["bias"] if biases else []), activated.name])
    return book.add(
        Site(
            "gate",
            p.node,
            [p.x, p.w, other, *biases],
            [node.out],
            call,
            {node, *covered} | _casts(activated.result, node),
            f"gate({words}) of {p.x.aval.str_short()} and {list(p.w.shape)}",
        )
    )


def _casts(value: Value, reader: Node) -> set[Node]:
    """Returns the casts and checkpoint names from a value to the operation that reads the last one."""
    found: set[Node] = set()
    while value.uses[0] is not reader:
        found.add(value.uses[0])
        value = value.uses[0].out
    return found
