"""Reads values as products of powers, sums and means of others, through casts, reshapes and broadcasts.

Programs write one formula in a dozen ways: x * rsqrt(v), x / sqrt(v), (scale * rsqrt(v)) * x, with
casts and broadcasts anywhere between. Each becomes one product of powers or one sum of terms here, and
recognisers compare these forms.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxfused.fusion.constants import scalar
from jaxfused.fusion.graph import Node, Value

TRANSPARENT = frozenset({"copy", "copy_p", "name", "sharding_constraint"})
"""Operations that return their operand's values."""

_DTYPES = tuple(jnp.dtype(name) for name in ("float64", "float32", "bfloat16", "float16"))
"""Dtypes between which a conversion only rounds; one to 8 bits quantises and is an operation."""


def is_transparent(node: Node) -> bool:
    """Returns whether the operation's result is its operand, but for rounding and sharding."""
    if node.name == "convert_element_type":
        return node.ins[0].dtype in _DTYPES and node.out.dtype in _DTYPES
    return node.name in TRANSPARENT


def passed_on(node: Node) -> Value | None:
    """Returns the operand that the operation returns unchanged but for rounding, or None.

    A select whose condition is constant returns one operand, as in `jnp.var`'s check of its degrees of
    freedom or in dropout at rate 0.
    """
    if is_transparent(node):
        return node.ins[0]
    if node.name == "select_n":
        which = scalar(node.ins[0])
        if which is not None:
            return node.ins[1 + int(which)]
    neutral = _NEUTRAL.get(node.name)
    if neutral is not None:
        for i in (0, 1) if node.name in ("add", "mul") else (0,):
            value, other = node.ins[i], node.ins[1 - i]
            same = value.shape == node.out.shape and value.dtype == node.out.dtype
            if same and value.is_floating and scalar(other) == neutral:
                return value
    return None


_NEUTRAL = {"add": 0.0, "sub": 0.0, "mul": 1.0, "div": 1.0}
"""Second operand with which each operation returns its first one (Flax's RMSNorm subtracts 0)."""


def core(value: Value) -> Value:
    """Returns the value before casts, checkpoint names and sharding constraints (see `passed_on`)."""
    while value.node is not None:
        operand = passed_on(value.node)
        if operand is None:
            break
        value = operand
    return value


class View(NamedTuple):
    """A value before casts and broadcasts (`base`), and the axes that it has in the viewed value."""

    base: Value
    axes: tuple[Any, ...]
    """For each axis of `base`, the axis of the viewed value; None for an axis of length 1. In a `frame`,
    an entry is a tuple of the frame's parts instead."""


Look = Callable[[Value, tuple[Any, ...] | None], View]
"""Type of `view` and of a frame's `look`: finds the value behind casts, broadcasts and other views."""


def view(value: Value, axes: tuple[int | None, ...] | None = None) -> View:
    """Returns the value before casts, broadcasts and reshapes that only add axes of length 1."""
    if axes is None:
        axes = tuple(i if size != 1 else None for i, size in enumerate(value.shape))
    while value.node is not None:
        node = value.node
        operand = passed_on(node)
        if operand is not None:
            value = operand
            continue
        moved = _moved_axes(node, axes)
        if moved is None:
            break
        value, axes = node.ins[0], moved
    return View(value, axes)


def _moved_axes(node: Node, axes: tuple[int | None, ...]) -> tuple[int | None, ...] | None:
    """Returns the axes of a view's operand, given `axes` of its result; None if it is no view."""
    if node.name not in ("broadcast_in_dim", "reshape", "squeeze", "tile") or len(node.ins) != 1:
        return None
    shape = node.ins[0].shape
    if node.name == "tile":
        if any(size != 1 != reps for size, reps in zip(shape, node.params["reps"], strict=True)):
            return None
        return tuple(None if size == 1 else axis for size, axis in zip(shape, axes, strict=True))
    if node.name == "broadcast_in_dim":
        targets = [int(target) for target in node.params["broadcast_dimensions"]]
        return tuple(
            None if size == 1 else axes[target] for size, target in zip(shape, targets, strict=True)
        )
    sizes = [size for size in shape if size != 1]
    if sizes != [size for size in node.out.shape if size != 1]:
        return None
    remaining = iter(axis for axis, size in zip(axes, node.out.shape, strict=True) if size != 1)
    return tuple(None if size == 1 else next(remaining) for size in shape)


class Term(NamedTuple):
    """One summand of a `Sum`: a constant factor times a value."""

    factor: float
    view: View
    slack: float = 0.0
    """Largest relative rounding error of `factor`, as `rounding` returns it."""


@dataclass
class Sum:
    """A value written as a constant plus terms."""

    constant: float = 0.0
    terms: list[Term] = field(default_factory=list)


def total(value: Value, axes: tuple[Any, ...] | None = None, *, look: Look = view) -> Sum:
    """Returns the value as a sum: nested additions, negations and constant factors are expanded."""
    result = Sum()
    _add(result, 1.0, 0.0, look(value, axes), look)
    return result


def _add(result: Sum, factor: float, slack: float, seen: View, look: Look) -> None:
    value, axes = seen
    constant = scalar(value)
    if constant is not None:
        result.constant += factor * constant
        return
    node = value.node
    if node is not None and node.name in ("add", "sub", "add_any") and _same_shape(node):
        second = -factor if node.name == "sub" else factor
        _add(result, factor, slack, look(node.ins[0], _operand_axes(node, 0, axes)), look)
        _add(result, second, slack, look(node.ins[1], _operand_axes(node, 1, axes)), look)
        return
    if node is not None and node.name == "neg":
        _add(result, -factor, slack, look(node.ins[0], axes), look)
        return
    if node is not None and node.name in ("mul", "div"):
        for i, j in ((0, 1), (1, 0)) if node.name == "mul" else ((0, 1),):
            constant = scalar(node.ins[j])
            if constant is not None and constant != 0:
                scaled = factor * constant if node.name == "mul" else factor / constant
                off = slack + rounding(constant, node.ins[j])
                _add(result, scaled, off, look(node.ins[i], _operand_axes(node, i, axes)), look)
                return
    result.terms.append(Term(factor, View(value, axes), slack))


def rounding(number: float, value: Value) -> float:
    """Returns the largest relative error that rounding to the value's dtypes causes in a constant.

    It is half a unit in the last place of the narrowest dtype among the value's casts.
    """
    if not value.is_floating or number == 0.0 or not math.isfinite(number):
        return 0.0
    exponent = math.floor(math.log2(abs(number)))
    bits = min(jnp.finfo(stage.dtype).nmant for stage in stages(value))
    return 2.0 ** (exponent - bits - 1) / abs(number)


_ARITHMETIC = 1e-14
"""Relative error allowed for constant factors that are multiplied here, in float64."""


def is_one(number: float, slack: float) -> bool:
    """Returns whether a number is 1 within its rounding error."""
    return abs(number - 1.0) <= slack + _ARITHMETIC


def _same_shape(node: Node) -> bool:
    return all(v.ndim in (0, node.out.ndim) for v in node.ins)


def _operand_axes(node: Node, index: int, axes: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns an operand's axes, given `axes` of an elementwise result: None for those of length 1."""
    operand = node.ins[index]
    if operand.ndim == 0:
        return ()
    return tuple(
        None if size == 1 else axis for size, axis in zip(operand.shape, axes, strict=True)
    )


@dataclass
class Product:
    """A value written as a constant times powers of other values."""

    constant: float = 1.0
    powers: dict[View, float] = field(default_factory=dict)
    slack: float = 0.0
    """Largest relative rounding error of `constant`, as `rounding` returns it."""

    def multiply(self, view: View, power: float) -> None:
        self.powers[view] = self.powers.get(view, 0.0) + power
        if self.powers[view] == 0.0:
            del self.powers[view]


Stop = Callable[[View], View | None]
"""Function that returns the factor to record in place of a value, or None to expand the value."""


def product(
    value: Value,
    axes: tuple[Any, ...] | None = None,
    *,
    stop: Stop = lambda view: None,
    look: Look = view,
) -> Product:
    """Returns the value as a product of powers."""
    result = Product()
    _multiply(result, 1.0, look(value, axes), stop, look)
    return result


_POWERS = {"sqrt": 0.5, "rsqrt": -0.5, "square": 2.0}


def _multiply(result: Product, power: float, seen: View, stop: Stop, look: Look) -> None:
    stopped = stop(seen)
    if stopped is not None:
        result.multiply(stopped, power)
        return
    value, axes = seen
    constant = scalar(value)
    if constant is not None and (constant > 0 or power.is_integer()) and constant != 0:
        result.constant *= constant**power
        result.slack += abs(power) * rounding(constant, value)
        return
    node = value.node
    inner = None if node is None else exponent(node)
    if node is not None and inner is not None:
        # sqrt(x**2) is |x|, not x: powers are only multiplied if both exponents are integers.
        if power.is_integer() and inner.is_integer():
            _multiply(
                result, power * inner, look(node.ins[0], _operand_axes(node, 0, axes)), stop, look
            )
        else:
            result.multiply(look(node.ins[0], _operand_axes(node, 0, axes)), power * inner)
        return
    if node is not None and node.name in ("mul", "div") and power.is_integer():
        second = -power if node.name == "div" else power
        _multiply(result, power, look(node.ins[0], _operand_axes(node, 0, axes)), stop, look)
        _multiply(result, second, look(node.ins[1], _operand_axes(node, 1, axes)), stop, look)
        return
    if node is not None and node.name == "neg" and power.is_integer():
        result.constant *= (-1.0) ** power
        _multiply(result, power, look(node.ins[0], axes), stop, look)
        return
    result.multiply(seen, power)


def exponent(node: Node) -> float | None:
    """Returns the power to which an operation raises its argument, or None."""
    if node.name == "integer_pow":
        return float(node.params["y"])
    if node.name == "pow":
        return scalar(node.ins[1])
    return _POWERS.get(node.name)


def is_root(node: Node) -> bool:
    """Returns whether the operation takes a square root, or the reciprocal of one."""
    power = exponent(node) if node.name in ("rsqrt", "sqrt", "pow") else None
    return power in (0.5, -0.5) and node.out.is_floating


class Mean(NamedTuple):
    """A mean over some axes of `argument`."""

    argument: Value
    axes: tuple[int, ...]
    placed: tuple[int, ...]
    """For each axis of `argument` over which no mean is taken, the same axis in the viewed value."""

    @property
    def is_in_place(self) -> bool:
        """True if the remaining axes have the same numbers as in `argument`, as with keepdims=True."""
        sizes = enumerate(self.argument.shape)
        return self.placed == tuple(i for i, size in sizes if i not in self.axes and size != 1)


def mean(seen: View, factor: float = 1.0, slack: float = 0.0) -> Mean | None:
    """Returns the mean that equals `factor` times the viewed value, or None."""
    found = _summed(seen)
    if found is None or found[0].base.made_by != "reduce_sum":
        return None
    summed, parts = found
    assert summed.base.node is not None
    axes = tuple(int(axis) for axis in summed.base.node.params["axes"])
    return _mean_over(summed, axes, parts.constant * factor, parts.slack + slack)


def mean_of_squares(seen: View, factor: float = 1.0, slack: float = 0.0) -> Mean | None:
    """Returns the mean whose argument's squares it is taken of, or None.

    The squares are summed, or the array is multiplied by itself as by `jnp.einsum` or `jnp.vecdot`.
    """
    averaged = mean(seen, factor, slack)
    if averaged is not None:
        root = squared(averaged.argument)
        return None if root is None else averaged._replace(argument=root)
    found = _summed(seen)
    if found is None or found[0].base.made_by != "dot_general":
        return None
    summed, parts = found
    node = summed.base.node
    assert node is not None
    (left, right), (left_batch, right_batch) = node.params["dimension_numbers"]
    rows = [axis for axis in range(node.ins[0].ndim) if axis not in left]
    in_order = tuple(left) == tuple(right) and [*left_batch] == [*right_batch] == rows
    if core(node.ins[0]) is not core(node.ins[1]) or not in_order:
        return None
    axes = tuple(int(axis) for axis in left)
    return _mean_over(summed, axes, parts.constant * factor, parts.slack + slack)


def _summed(seen: View) -> tuple[View, Product] | None:
    """Returns a view's only factor that is no number, and the view as a product; or None."""
    parts = product(*seen)
    if [*parts.powers.values()] != [1.0]:
        return None
    (summed,) = parts.powers
    return summed, parts


def _mean_over(summed: View, axes: tuple[int, ...], factor: float, slack: float) -> Mean | None:
    assert summed.base.node is not None
    argument = summed.base.node.ins[0]
    if not is_one(factor * math.prod(argument.shape[axis] for axis in axes), slack):
        return None
    return Mean(argument, axes, tuple(axis for axis in summed.axes if axis is not None))


def squared(value: Value) -> Value | None:
    """Returns the value whose square `value` is, or None."""
    node = core(value).node
    if node is None:
        return None
    if exponent(node) == 2.0:
        return node.ins[0]
    if node.name == "mul" and core(node.ins[0]) is core(node.ins[1]):
        return node.ins[0]
    return None


def vector(seen: View, rank: int) -> Value | None:
    """Returns the array [D] that a view of `rank` axes broadcasts along all but the last, or None."""
    axes = [axis for axis in seen.axes if axis is not None]
    return seen.base if axes == [rank - 1] and seen.base.is_floating else None


def per_image(seen: View, rank: int) -> Value | None:
    """Returns the array [B, D] that a view [B, ..., D] of `rank` axes broadcasts, or None."""
    axes = [axis for axis in seen.axes if axis is not None]
    is_of_images = rank >= 3 and axes == [0, rank - 1]
    return seen.base if is_of_images and seen.base.is_floating else None


def trailing(value: Value, shape: tuple[int, ...]) -> Value | None:
    """Returns the array of `shape` that the value broadcasts along its leading axes, or None."""
    seen = view(value)
    first = value.ndim - len(shape)
    expected = [first + i for i, size in enumerate(shape) if size != 1]
    axes = [axis for axis in seen.axes if axis is not None]
    return seen.base if axes == expected and expected and seen.base.is_floating else None


def stages(value: Value) -> list[Value]:
    """Returns the value, then its operand before each cast, checkpoint name or sharding constraint."""
    found = [value]
    while value.node is not None:
        operand = passed_on(value.node)
        if operand is None:
            break
        value = operand
        found.append(value)
    return found


def is_reshape(node: Node) -> bool:
    """Returns whether the operation only reshapes its operand."""
    if node.name == "broadcast_in_dim":
        return len(node.ins) == 1 and math.prod(node.ins[0].shape) == math.prod(node.out.shape)
    return node.name in ("reshape", "squeeze")


def at_dtype(value: Value, dtype: object) -> Value | None:
    """Returns the earliest of the value's `stages` (before its casts) that has this dtype, or None."""
    return next((v for v in reversed(stages(value)) if v.dtype == dtype), None)


def between(root: Value, leaves: set[Value]) -> set[Node]:
    """Returns the operations that compute `root` from `leaves` and constants."""
    found: set[Node] = set()
    pending = [root]
    while pending:
        value = pending.pop()
        if value in leaves or value.node is None or value.node in found:
            continue
        found.add(value.node)
        pending += value.node.ins
    return found


_LARGEST_COMPARED = 64


def same(first: Value, second: Value) -> bool:
    """Returns whether two values are provably equal: the same operations of the same inputs.

    Models often compute the same rotation angles once for queries and once for keys.
    """
    pending = [(first, second)]
    for _ in range(_LARGEST_COMPARED):
        if not pending:
            return True
        a, b = pending.pop()
        if a is b:
            continue
        number = scalar(a) if (a.shape, a.dtype) == (b.shape, b.dtype) else None
        if number is not None and number == scalar(b):
            continue
        if a.node is None or b.node is None or a.index != b.index or a.node.eqn.effects:
            return False
        if a.node.name != b.node.name or len(a.node.ins) != len(b.node.ins):
            return False
        if repr(a.node.params) != repr(b.node.params):
            return False
        pending += zip(a.node.ins, b.node.ins, strict=True)
    return False
