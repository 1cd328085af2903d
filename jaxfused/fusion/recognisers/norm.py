"""Finds layer_norm and rms_norm, with the residual sum and the bias before them, the activation after.

It starts at a root or a reciprocal root of `mean square + epsilon`, or of `variance + epsilon`, and
follows the operations that use it: u * rstd * scale + bias in any order of products and quotients.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax

from jaxfused.fusion import moments
from jaxfused.fusion.activation import activation_of
from jaxfused.fusion.algebra import (
    Mean,
    Product,
    Sum,
    Term,
    View,
    at_dtype,
    between,
    core,
    is_root,
    mean,
    mean_of_squares,
    passed_on,
    per_image,
    product,
    squared,
    stages,
    total,
    vector,
    view,
)
from jaxfused.fusion.constants import scalar
from jaxfused.fusion.graph import Node, Value, bind
from jaxfused.fusion.site import Book, Site
from jaxfused.ops.norm.layer_norm import layer_norm, rms_norm
from jaxfused.runtime.promotion import accumulator_dtype


@dataclass(frozen=True)
class Statistics:
    """The array and epsilon of a norm's mean and variance, found from the square root in it."""

    operator: str
    x: Value
    """The normalised array, before dtype conversions."""
    converted: Value
    """The normalised array as the mean reads it, after dtype conversions."""
    epsilon: float
    argument: View
    """Argument of the root: the variance or mean square plus epsilon."""


def find(book: Book) -> None:
    """Finds all norms of the graph and records their replacements."""
    for node in book.graph.nodes:
        if is_root(node) and node.out.uses and node not in book.owner:
            _find_at(book, node)


def _find_at(book: Book, root: Node) -> None:
    found = statistics(root)
    if found is None:
        if _is_length(root):
            reason = (
                "its root is of a sum of squares, and the operator's of their mean plus epsilon"
            )
            book.miss("rms_norm", root, reason)
        return
    if isinstance(found, tuple):
        _miss_axes(book, root, *found)
        return
    best = _last_match(_made_of(root.out), found)
    if not isinstance(best, _Match):
        reason = best or "nothing is multiplied by it and by the normalised array"
        # In x * inv + (bias - mean * inv), two products use the root, and the sum joins them again.
        for value in moments.made_of(root.out):
            first = _match(value, found)
            if isinstance(first, _Match):
                longer = _last_match(_made_of(value), found)
                best = longer if isinstance(longer, _Match) else first
                break
        else:
            book.miss(found.operator, root, reason)
            return
    _add(book, root, found, best)


def _last_match(values: Iterable[Value], found: Statistics) -> "_Match | str":
    """Returns the last of the values that is a norm's result, or why no value is."""
    best: _Match | None = None
    reason = ""
    for value in values:
        matched = _match(value, found)
        if isinstance(matched, _Match):
            best = matched
        elif matched:
            reason = matched
    return best or reason


# --- the root -------------------------------------------------------------------------------------


def statistics(root: Node) -> Statistics | tuple[str, Mean] | None:
    """Returns a square root's statistics; (operator, mean) if over other axes than the last; or None."""
    argument = view(root.ins[0])
    parts = total(root.ins[0])
    if len(parts.terms) == 1:
        # Programs clamp the variance at 0, since rounding may make it negative: `max(variance, 0)`.
        term = parts.terms[0]
        node = term.view.base.node
        if node is not None and node.name == "max" and term.factor == 1.0:
            for i, j in ((0, 1), (1, 0)):
                if scalar(node.ins[j]) == 0.0:
                    epsilon = parts.constant
                    parts = total(node.ins[i])
                    if parts.constant < 0.0:
                        return None
                    parts.constant += epsilon
                    break
    found = _variance(parts)
    if found is None:
        return None
    operator, moment = found
    if not moment.argument.is_floating:
        return None
    if moment.axes != (moment.argument.ndim - 1,):
        return found
    return Statistics(operator, core(moment.argument), moment.argument, parts.constant, argument)


def _variance(parts: Sum) -> tuple[str, Mean] | None:
    """Returns "layer_norm" or "rms_norm" for a variance or mean square, with its mean, or None."""
    if len(parts.terms) == 1:
        return _of_squares(parts.terms[0])
    return _of_two_means(parts) if len(parts.terms) == 2 else None


def _of_squares(term: Term) -> tuple[str, Mean] | None:
    moment = mean_of_squares(term.view, term.factor, term.slack)
    if moment is None:
        return None
    deviation = _deviation(moment.argument)
    if deviation is not None and deviation.axes == moment.axes:
        return "layer_norm", deviation
    return "rms_norm", moment


def _deviation(value: Value) -> Mean | None:
    """Returns the mean if the value is an array minus its mean, or None."""
    node = core(value).node
    if node is None or node.name != "sub":
        return None
    moment = mean(view(node.ins[1]))
    if moment is None or not moment.is_in_place:
        return None
    return moment if core(moment.argument) is core(node.ins[0]) else None


def _of_two_means(parts: Sum) -> tuple[str, Mean] | None:
    """Returns ("layer_norm", mean) if the sum is a variance E[x^2] - E[x]^2, or None."""
    first, second = sorted(parts.terms, key=lambda term: -term.factor)
    of_squares = _of_squares(first)
    square = product(*second.view, stop=lambda seen: seen if mean(seen) is not None else None)
    if of_squares is None or of_squares[0] != "rms_norm" or len(square.powers) != 1:
        return None
    ((seen, power),) = square.powers.items()
    moment = mean(seen)
    if power != 2.0 or moment is None or square.constant * second.factor != -1.0:
        return None
    if core(moment.argument) is not core(of_squares[1].argument):
        return None
    together = (moment.axes, moment.placed) == (of_squares[1].axes, of_squares[1].placed)
    return ("layer_norm", moment) if together else None


def _is_length(root: Node) -> bool:
    """Returns whether a root is the length of an array's rows, which is divided by something."""
    terms = total(root.ins[0]).terms
    if len(terms) == 1 and terms[0].view.base.made_by == "max":
        assert terms[0].view.base.node is not None
        terms = total(terms[0].view.base.node.ins[0]).terms
    node = terms[0].view.base.node if len(terms) == 1 else None
    if node is None or node.name not in ("reduce_sum", "dot_general"):
        return False
    of = node.ins[0] if node.name == "dot_general" else squared(node.ins[0])
    if of is None or core(node.ins[0]) is not core(node.ins[-1]):
        return False
    array = core(of)
    rank = array.ndim
    axes = node.params.get("axes", (rank - 1,))
    is_rows = rank > 1 and tuple(axes) == (rank - 1,) and node.out.ndim == rank - 1
    return is_rows and (
        _deviation(of) is not None
        or any(n.name in ("mul", "div") and n.out is not node.ins[0] for n in array.uses)
    )


def _miss_axes(book: Book, root: Node, operator: str, moment: Mean) -> None:
    rank = moment.argument.ndim
    if operator == "layer_norm" and (rank - 1 in moment.axes) != (0 in moment.axes):
        # Means over channel groups or the batch are left to group_norm and batch_norm.
        return
    reason = (
        f"the mean is taken over axes {moment.axes} of {rank}, and the operator takes the last one"
    )
    book.miss(operator, root, reason)


# --- the normalised result ------------------------------------------------------------------------


@dataclass(frozen=True)
class _Match:
    """A value that is the result of a norm."""

    value: Value
    x: Value
    scale: Value | None
    scale_offset: float
    bias: Value | None
    image_factor: Value | None = None
    """Factor of each image, [B, D], applied after scale and bias."""
    image_shift: Value | None = None


_STEPS = frozenset({"mul", "div", "add", "sub", "integer_pow", "reshape", "broadcast_in_dim"})
_LONGEST = 16


def _made_of(value: Value) -> Iterator[Value]:
    """Yields the values computed from `value`, nearest first, as long as each has only one reader."""
    for _ in range(_LONGEST):
        readers = set(value.uses)
        if len(readers) != 1 or value.is_output:
            return
        (node,) = readers
        if node.name not in _STEPS and passed_on(node) is None:
            return
        value = node.out
        yield value


def _match(value: Value, found: Statistics) -> _Match | str:
    """Returns the norm whose result a value is, or why it is none; "" if it resembles none."""
    x = found.x
    if value.shape != x.shape:
        return ""
    products: list[Product] = []
    bias: list[Value] = []
    shifts: list[Value] = []
    parts = total(value)
    if parts.constant != 0.0:
        return ""
    for term in parts.terms:
        powers = product(*term.view, stop=lambda seen: _as_normalised(seen, found))
        powers.constant *= term.factor
        if moments.is_of_array(powers):
            products.append(powers)
            continue
        summand = vector(term.view, value.ndim)
        shift = per_image(term.view, value.ndim)
        if (summand is None and shift is None) or term.factor != 1.0:
            return ""
        if summand is not None:
            bias.append(summand)
        elif shift is not None:
            shifts.append(shift)
    normalised = moments.deviation_of(products)
    if normalised is None:
        return "the normalised array is in two terms of a sum" if len(products) > 1 else ""
    if len(bias) > 1 or len(shifts) > 1:
        return ""
    scale = []
    factors: list[Value] = []
    for seen, power in normalised.powers.items():
        if seen.base is found.argument.base and power == -0.5:
            if not _over_rows(seen, value):
                return ""
        else:
            factor = vector(seen, value.ndim)
            of_images = per_image(seen, value.ndim)
            if (factor is None and of_images is None) or power != 1.0:
                return "it is scaled by an array that differs from row to row"
            if factor is not None:
                scale.append(factor)
            elif of_images is not None:
                factors.append(of_images)
    if len(factors) > 1 or (factors and bias):
        return "it is scaled by more than one array"
    if not any(seen.base is found.argument.base for seen in normalised.powers):
        return ""
    if normalised.constant != 1.0 or len(scale) > 1:
        return "it is scaled by more than one array"
    dtyped = at_dtype(found.converted, value.dtype)
    if dtyped is None or dtyped.dtype.itemsize > x.dtype.itemsize:
        return f"its result stays in {value.dtype}, and what is normalised is {x.dtype}"
    offset = 0.0
    if scale and found.operator == "rms_norm" and scale[0].made_by in ("add", "sub"):
        shifted = total(scale[0])
        if len(shifted.terms) == 1 and shifted.terms[0].factor == 1.0:
            weights = vector(shifted.terms[0].view, scale[0].ndim)
            if weights is not None:
                scale, offset = [weights], shifted.constant
    return _Match(
        value,
        dtyped,
        scale[0] if scale else None,
        offset,
        bias[0] if bias else None,
        factors[0] if factors else None,
        shifts[0] if shifts else None,
    )


def _as_normalised(seen: View, found: Statistics) -> View | None:
    # `product` may pass `seen` before a view, such as one that removes an axis of length 1.
    is_array = core(seen.base) is found.x or seen == view(found.x)
    if found.operator == "rms_norm":
        return View(moments.DEVIATION, ()) if is_array else None
    if is_array:
        return View(moments.ARRAY, ())
    for of_what, moment in ((moments.DEVIATION, _deviation(seen.base)), (moments.MEAN, mean(seen))):
        of_x = moment is not None and core(moment.argument) is found.x and moment.is_in_place
        if moment is not None and of_x and moment.axes == (found.x.ndim - 1,):
            return View(of_what, ())
    return None


def _over_rows(seen: View, value: Value) -> bool:
    """Returns whether a view is one number for each row, broadcast along the last axis."""
    rows = [axis for axis, size in enumerate(value.shape[:-1]) if size != 1]
    if [axis for axis in seen.axes if axis is not None] == rows:
        return True
    # Haiku's RMSNorm broadcasts the mean before it adds epsilon.
    terms = total(*seen).terms
    return len(terms) == 1 and [a for a in terms[0].view.axes if a is not None] == rows


# --- the site -------------------------------------------------------------------------------------


def _add(book: Book, root: Node, found: Statistics, match: _Match) -> None:
    chain = stages(found.converted)
    earlier = chain[chain.index(match.x) :]
    operands = {
        "scale": match.scale,
        "bias": match.bias,
        "image_factor": match.image_factor,
        "image_shift": match.image_shift,
    }
    leaves = {*earlier, *(v for v in operands.values() if v is not None)}
    covered = between(match.value, leaves)
    y, activation = match.value, None
    after = activation_of(y)
    if after is not None and after.result.dtype == y.dtype and book.is_free(after.covered):
        y, activation, covered = after.result, after.name, covered | after.covered
    norm = Norm(found.operator, found.epsilon, match.scale_offset, activation)
    before = _sum_before(book, match.x)
    if before is not None:
        site = _site(root, norm, before.x, y, operands, covered, before)
        if book.add(site):
            return
    book.add(_site(root, norm, match.x, y, operands, covered, None))


def _cut_after(y: Value, h: Value | None, covered: set[Node]) -> Node | None:
    """Returns the slice that is the only reader of a norm's result, or None.

    A model that classifies by one token normalises all tokens and slices that one.
    """
    if not y.used_once or (h is not None and (h.is_output or not set(h.uses) <= covered)):
        return None
    node = y.uses[0]
    if node.name != "slice" or node.params["strides"] is not None:
        return None
    return node if node.out.shape[-1] == y.shape[-1] and node.out.shape != y.shape else None


@dataclass(frozen=True)
class _Before:
    """A residual sum before a norm."""

    x: Value
    residual: Value
    pre_bias: Value | None
    total: Value
    covered: frozenset[Node]
    gate: Value | None = None


def _sum_before(book: Book, h: Value) -> _Before | None:
    node = h.node
    if node is None or node.name != "add" or node in book.owner:
        return None
    if any(v.shape != h.shape or v.dtype != h.dtype or v.is_constant for v in node.ins):
        return None
    for v, residual in zip(node.ins, node.ins[::-1], strict=True):
        gated = _gated(book, v)
        if gated is not None:
            gate, x, pre_bias, covered = gated
            return _Before(x, residual, pre_bias, h, frozenset({node, *covered}), gate)
    branches = [
        (_branch(book, v), v, other) for v, other in zip(node.ins, node.ins[::-1], strict=True)
    ]
    for branch, _, residual in reversed(branches):
        if branch is not None:
            x, pre_bias, covered = branch
            return _Before(x, residual, pre_bias, h, frozenset({node, *covered}))
    return _Before(node.ins[1], node.ins[0], None, h, frozenset({node}))


def _branch(book: Book, value: Value) -> tuple[Value, Value | None, set[Node]] | None:
    """Returns the product that a residual sum adds, its bias and the bias's operations, or None."""
    if _is_product(value):
        return value, None, set()
    node = value.node
    if node is None or node.name != "add" or not value.used_once or node in book.owner:
        return None
    for x, other in (node.ins, node.ins[::-1]):
        bias = vector(view(other), value.ndim)
        if (
            bias is not None
            and x.shape == value.shape
            and x.dtype == value.dtype
            and _is_product(x)
        ):
            return x, bias, between(value, {x, bias})
    return None


def _gated(book: Book, value: Value) -> tuple[Value, Value, Value | None, set[Node]] | None:
    """Returns a gate [B, D], the branch that it multiplies, the branch's bias, and their operations."""
    node = value.node
    if node is None:
        return None
    if node.name != "mul" or not value.used_once or node in book.owner:
        return None
    for x, other in (node.ins, node.ins[::-1]):
        gate = per_image(view(other), value.ndim)
        if gate is None or x.shape != value.shape or x.dtype != value.dtype:
            continue
        branch = _branch(book, x)
        x, pre_bias, _ = (x, None, set()) if branch is None else branch
        leaves = {x, gate} | ({pre_bias} if pre_bias is not None else set())
        return gate, x, pre_bias, between(value, leaves)
    return None


def _is_product(value: Value) -> bool:
    while value.made_by in ("transpose", "reshape") and value.node is not None:
        value = value.node.ins[0]
    return value.made_by == "dot_general"


@dataclass(frozen=True)
class Norm:
    """The call of `layer_norm` or `rms_norm` with its options."""

    operator: str
    epsilon: float
    scale_offset: float
    activation: str | None = None
    """The activation after the norm."""

    def __call__(self, x: jax.Array, **operands: Any) -> Any:
        for name in ("scale", "bias", "pre_bias"):
            if name in operands:
                operands[name] = operands[name].reshape(-1)
        for name in ("image_factor", "image_shift", "gate"):
            if name in operands:
                operands[name] = operands[name].reshape(x.shape[0], x.shape[-1])
        if "image_factor" in operands:
            # The operator adds 1 to `image_scale`, but the program's factor contains the 1 already.
            factor = operands.pop("image_factor").astype(accumulator_dtype(x.dtype))
            operands["image_scale"] = factor - 1.0
        if self.operator == "layer_norm":
            return layer_norm(x, epsilon=self.epsilon, activation=self.activation, **operands)
        offset = self.scale_offset if "scale" in operands else 0.0
        return rms_norm(
            x,
            epsilon=self.epsilon,
            scale_offset=offset,
            activation=self.activation,
            **operands,
        )


def _site(
    root: Node,
    norm: Norm,
    x: Value,
    y: Value,
    operands: dict[str, Value | None],
    covered: set[Node],
    before: _Before | None,
) -> Site:
    outputs = [y]
    if before is not None:
        operands = operands | {
            "residual": before.residual,
            "pre_bias": before.pre_bias,
            "gate": before.gate,
        }
        covered = covered | before.covered
        outputs.append(before.total)
    cut = _cut_after(y, None if before is None else before.total, covered)
    if cut is not None:
        covered = covered | {cut}
        outputs = [cut.out]
    given = {name: value for name, value in operands.items() if value is not None}

    def call(x: jax.Array, *arrays: jax.Array) -> Any:
        rest = dict(zip(given, arrays, strict=True))
        if cut is not None:
            (x,) = bind(cut.eqn, [x])
            if before is not None:
                (rest["residual"],) = bind(cut.eqn, [rest["residual"]])
        results = norm(x, **rest)
        results = results if before is not None else (results,)
        return results[: len(outputs)]

    words = ", ".join([*given, *([norm.activation] if norm.activation else [])])
    offset = f", scale_offset={norm.scale_offset:g}" if norm.scale_offset else ""
    return Site(
        norm.operator,
        root,
        [x, *given.values()],
        outputs,
        call,
        covered,
        f"{norm.operator}({words}) of {x.aval.str_short()}{offset}"
        + ("" if cut is None else f", of which {list(cut.out.shape)} are used"),
        facts=norm,
    )
