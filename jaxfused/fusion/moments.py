"""Mean and variance over any axes of an array, and the values that are normalised with them.

`statistics` finds the array and its reduced axes from a square root. `normalised` and `scaled` read a
value as the normalised array times factors plus summands. Axes are parts of a `Frame`, so that norms
over groups, channels and batches are read by one code.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jaxfused.fusion.algebra import (
    Product,
    View,
    core,
    exponent,
    is_one,
    passed_on,
    product,
    total,
    view,
)
from jaxfused.fusion.constants import scalar
from jaxfused.fusion.frame import Frame, Layout, frame
from jaxfused.fusion.graph import Node, Value


@dataclass(frozen=True)
class Moments:
    """An array, and the parts of its axes over which its mean and variance are taken (`reduced`)."""

    frame: Frame
    reduced: frozenset[int]

    def is_mean(self, seen: View) -> bool:
        """Returns whether a view is the mean of the array."""
        argument = self._averaged(seen)
        return argument is not None and self.frame.is_source(argument)

    def epsilon(self, seen: View) -> float | None:
        """Returns epsilon if a view is the variance plus epsilon, or None."""
        look = self.frame.look
        parts = total(*seen, look=look)
        constant = parts.constant
        if len(parts.terms) == 1 and parts.terms[0].factor == 1.0:
            # Programs clamp the variance at 0, since rounding may make it negative: `max(variance,
            # 0)`.
            lifted = parts.terms[0].view
            node = lifted.base.node
            if node is not None and node.name == "max":
                for i, j in ((0, 1), (1, 0)):
                    if scalar(node.ins[j]) == 0.0:
                        parts = total(node.ins[i], lifted.axes, look=look)
                        if parts.constant < 0.0:
                            return None
                        constant += parts.constant
                        break
        if len(parts.terms) == 1:
            ((factor, term, slack),) = parts.terms
            square = self._averaged(term, factor, slack)
            deviation = None if square is None else self._root_of_square(square)
            return constant if deviation is not None and self.is_deviation(deviation) else None
        if len(parts.terms) != 2:
            return None
        first, second = sorted(parts.terms, key=lambda t: -t.factor)
        square = self._averaged(first.view, first.factor, first.slack)
        array = None if square is None else self._root_of_square(square)
        if array is None or not self.frame.is_source(array):
            return None
        powers = product(*second.view, stop=lambda v: v if self.is_mean(v) else None, look=look)
        if len(powers.powers) != 1 or powers.constant * second.factor != -1.0:
            return None
        ((seen_mean, power),) = powers.powers.items()
        return constant if power == 2.0 and self.is_mean(seen_mean) else None

    def is_deviation(self, seen: View) -> bool:
        """Returns whether a view is the array minus its mean."""
        node = seen.base.node
        if node is None or node.name != "sub":
            return False
        array, mean = (self._operand(seen, i) for i in (0, 1))
        return self.frame.is_source(array) and self.is_mean(mean)

    def _averaged(self, seen: View, factor: float = 1.0, slack: float = 0.0) -> View | None:
        """Returns the array whose mean over the reduced parts is `factor` times a view, or None."""
        parts = product(*seen, look=self.frame.look)
        if len(parts.powers) != 1:
            return None
        ((summed, power),) = parts.powers.items()
        node = summed.base.node
        if node is None or node.name != "reduce_sum" or power != 1.0:
            return None
        count = self.frame.length(self.reduced)
        if not is_one(parts.constant * factor * count, parts.slack + slack):
            return None
        over = {int(axis) for axis in node.params["axes"]}
        argument = node.ins[0]
        for layout in self.frame.layouts(argument.shape):
            kept = tuple(parts for axis, parts in enumerate(layout) if axis not in over)
            reduced = {part for axis in over for part in layout[axis]}
            if kept == summed.axes and reduced == self.reduced:
                return self.frame.look(argument, layout)
        return None

    def _root_of_square(self, seen: View) -> View | None:
        """Returns the value whose square a view is, or None."""
        node = seen.base.node
        if node is None:
            return None
        if exponent(node) == 2.0:
            return self._operand(seen, 0)
        if node.name == "mul":
            first, second = (self._operand(seen, i) for i in (0, 1))
            return first if first == second else None
        return None

    def _operand(self, seen: View, index: int) -> View:
        node = seen.base.node
        assert node is not None
        operand = node.ins[index]
        axes = tuple(
            () if size == 1 else parts
            for size, parts in zip(operand.shape, seen.axes, strict=False)
        )
        return self.frame.look(operand, axes)


# --- the root -------------------------------------------------------------------------------------


def statistics(root: Node) -> Moments | None:
    """Returns the array and the reduced axes of the variance under a square root, or None."""
    sums = list(_sums_before(root))
    for node in sums:
        square = core(node.ins[0]).node
        if square is None:
            continue
        is_square = exponent(square) == 2.0 or (
            square.name == "mul" and core(square.ins[0]) is core(square.ins[1])
        )
        if not is_square or square.out.shape != node.ins[0].shape or 0 in square.out.shape:
            continue
        found = _of_deviations(node, square.ins[0]) or _of_two_means(node, square.ins[0], sums)
        if found is not None:
            return found
    return None


def _of_deviations(summed: Node, squared: Value) -> Moments | None:
    """Returns the array and axes of a variance that is a mean of squared deviations, or None."""
    node = core(squared).node
    if node is None or node.name != "sub" or node.ins[0].shape != squared.shape:
        return None
    moments = _moments(summed, node.ins[0])
    layout = moments.frame.stages[0].layout
    return moments if moments.is_deviation(View(node.out, layout)) else None


def _of_two_means(summed: Node, squared: Value, sums: Sequence[Node]) -> Moments | None:
    """Returns the array and axes of a variance E[x^2] - E[x]^2, or None."""
    moments = _moments(summed, squared)
    source = moments.frame.source.value
    stages = {stage.value for stage in moments.frame.stages}
    is_summed = any(core(n.ins[0]) in stages or core(n.ins[0]) is source for n in sums)
    return moments if is_summed else None


def _moments(summed: Node, array: Value) -> Moments:
    found = frame(array)
    layout = found.stages[0].layout
    return Moments(
        found, frozenset(part for axis in summed.params["axes"] for part in layout[int(axis)])
    )


_BEFORE_A_ROOT = frozenset(
    {"add", "sub", "mul", "div", "max", "neg", "square", "integer_pow", "pow"}
) | {"reshape", "broadcast_in_dim", "squeeze", "transpose"}
_LARGEST_BEFORE = 48


def _sums_before(root: Node) -> Iterator[Node]:
    """Yields the sums from which a square root is computed, but no sum inside another one."""
    pending = [root.ins[0]]
    seen: set[Node] = set()
    while pending and len(seen) < _LARGEST_BEFORE:
        node = pending.pop(0).node
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name == "reduce_sum":
            yield node
            continue
        operand = passed_on(node)
        if operand is not None:
            pending.append(operand)
        elif node.name in _BEFORE_A_ROOT:
            pending += node.ins


# --- values computed from the moments -------------------------------------------------------------

ARRAY, MEAN, DEVIATION, _EARLIER = Value(None), Value(None), Value(None), Value(None)
"""Placeholders in products: the array, its mean, their difference, a value matched before."""


@dataclass(frozen=True)
class Affine:
    """The normalised array, or a value matched before, times `factors` plus `summands`."""

    factors: tuple[View, ...]
    summands: tuple[View, ...]
    epsilon: float | None
    """Epsilon of the norm; None if the value is computed from one matched before."""


def normalised(moments: Moments, value: Value, layout: Layout) -> Affine | None:
    """Returns the value as the normalised array times factors plus summands, or None."""
    look = moments.frame.look

    def stop(seen: View) -> View | None:
        if moments.frame.is_source(seen):
            return View(ARRAY, ())
        if moments.is_deviation(seen):
            return View(DEVIATION, ())
        return View(MEAN, ()) if moments.is_mean(seen) else None

    parts = total(value, layout, look=look)
    if parts.constant != 0.0:
        return None
    products: list[Product] = []
    summands: list[View] = []
    for term in parts.terms:
        powers = product(*term.view, stop=stop, look=look)
        powers.constant *= term.factor
        if is_of_array(powers):
            products.append(powers)
        elif term.factor == 1.0:
            summands.append(term.view)
        else:
            return None
    times = deviation_of(products)
    if times is None or times.constant != 1.0:
        return None
    epsilon: float | None = None
    factors = []
    for seen, power in times.powers.items():
        if power == -0.5 and epsilon is None:
            epsilon = moments.epsilon(seen)
            if epsilon is None:
                return None
        elif power == 1.0:
            factors.append(seen)
        else:
            return None
    return None if epsilon is None else Affine(tuple(factors), tuple(summands), epsilon)


def is_of_array(powers: Product) -> bool:
    """Returns whether a product contains the array, its mean or their difference."""
    return any(seen.base in (ARRAY, MEAN, DEVIATION) for seen in powers.powers)


def deviation_of(products: list[Product]) -> Product | None:
    """Returns the factor f of f * (x - mean), also written as `f * x - f * mean`, or None."""

    def taken_out(powers: Product, base: Value) -> Product | None:
        rest = dict(powers.powers)
        power = rest.pop(View(base, ()), 0.0)
        factor = Product(powers.constant, rest)
        return None if power != 1.0 or is_of_array(factor) else factor

    if len(products) == 1:
        return taken_out(products[0], DEVIATION)
    if len(products) != 2:
        return None
    for first, second in (products, products[::-1]):
        array, mean = taken_out(first, ARRAY), taken_out(second, MEAN)
        if array is not None and mean is not None and array.powers == mean.powers:
            return array if array.constant == -mean.constant else None
    return None


def scaled(
    moments: Moments, earlier: Value, at: Layout, value: Value, layout: Layout
) -> Affine | None:
    """Returns the value as `earlier`, whose layout is `at`, times factors plus summands, or None."""
    start = moments.frame.look(earlier, at)

    def look(value: Value, axes: tuple[Any, ...] | None = None) -> View:
        seen = moments.frame.look(value, axes)
        return View(_EARLIER, ()) if seen == start else seen

    parts = total(value, layout, look=look)
    factors: list[View] | None = None
    summands: list[View] = []
    if parts.constant != 0.0:
        return None
    for term in parts.terms:
        powers = product(*term.view, look=look)
        power_of_earlier = powers.powers.pop(View(_EARLIER, ()), 0.0)
        if power_of_earlier == 0.0:
            if term.factor != 1.0:
                return None
            summands.append(term.view)
        elif factors is None and power_of_earlier == powers.constant * term.factor == 1.0:
            if any(power != 1.0 for power in powers.powers.values()):
                return None
            factors = list(powers.powers)
        else:
            return None
    return None if factors is None else Affine(tuple(factors), tuple(summands), None)


_STEPS = frozenset({"mul", "div", "add", "sub", "neg", "integer_pow"}) | {
    "reshape",
    "broadcast_in_dim",
    "squeeze",
    "transpose",
}
_LONGEST = 32


def made_of(value: Value) -> list[Value]:
    """Returns the values made from one by products, views and sums with smaller arrays, in order."""
    found: set[Node] = set()
    made = {value}
    pending = [value]
    while pending and len(found) < _LONGEST:
        for node in pending.pop(0).uses:
            is_step = node.name in _STEPS or passed_on(node) is not None
            if is_step and node not in found and not _adds_array(node, made):
                found.add(node)
                made.add(node.out)
                pending.append(node.out)
    return [node.out for node in sorted(found, key=lambda node: node.order)]


def _adds_array(node: Node, made: set[Value]) -> bool:
    """Returns whether the operation adds an array of the result's size, as a residual sum does."""
    return node.name in ("add", "sub") and any(
        operand not in made and math.prod(view(operand).base.shape) >= math.prod(node.out.shape)
        for operand in node.ins
    )
