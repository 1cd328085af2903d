"""Evaluates numbers and arrays of a program that do not depend on its arguments.

Masks are such arrays: `jnp.tril`, comparisons of two `iota`s, Flax's `make_causal_mask`. They are
evaluated in NumPy. Axes along which an array is broadcast keep length 1, so that a causal mask of a
whole batch takes the memory and time of one example's.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxfused.fusion.graph import Node, Value, cuts, known_array

LARGEST = 1 << 26
"""Largest number of elements of an array that is evaluated: a mask of 8192 queries and keys."""

_ERF = np.vectorize(math.erf, otypes=[float])
_ERFC = np.vectorize(math.erfc, otypes=[float])


def _logistic(x):
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-x))


def _quotient(x, y):
    """Divides, rounding quotients of integers towards zero as XLA does."""
    if np.result_type(x, y).kind == "f":
        return x / y
    return (np.sign(x) * np.sign(y) * (np.abs(x) // np.abs(y))).astype(np.result_type(x, y))


ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "abs": np.abs,
    "add": np.add,
    "add_any": np.add,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "copy": lambda x: x,
    "copy_p": lambda x: x,
    "div": _quotient,
    "eq": np.equal,
    "erf": _ERF,
    "erfc": _ERFC,
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "ge": np.greater_equal,
    "gt": np.greater,
    "le": np.less_equal,
    "log": np.log,
    "log1p": np.log1p,
    "logistic": _logistic,
    "lt": np.less,
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "name": lambda x: x,
    "ne": np.not_equal,
    "neg": np.negative,
    "not": np.logical_not,
    "one_minus_square": lambda x: (1 - x) * (1 + x),
    "rem": np.fmod,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "select_n": lambda which, *cases: np.where(which, cases[1], cases[0]),
    "sharding_constraint": lambda x: x,
    "sign": np.sign,
    "sqrt": np.sqrt,
    "square": np.square,
    "stop_gradient": lambda x: x,
    "sub": np.subtract,
    "tanh": np.tanh,
}
"""Function that each operation applies to elements, in float64."""


def elementwise(node: Node) -> Callable[..., Any] | None:
    """Returns the function of NumPy arrays that an operation applies to each element, or None."""
    if node.name == "integer_pow":
        exponent = node.params["y"]
        return lambda x: np.asarray(x, np.float64) ** exponent
    if node.name == "pow":
        return np.power
    if node.name in ("and", "or"):
        if node.out.dtype != np.bool_:
            return None
        return np.logical_and if node.name == "and" else np.logical_or
    if node.name == "not" and node.out.dtype != np.bool_:
        return None
    if node.name == "convert_element_type":
        kind = np.dtype(bool) if node.out.dtype == np.bool_ else None
        if node.out.is_floating:
            return lambda x: np.asarray(x, np.float64)
        if kind is None and not np.issubdtype(node.out.dtype, np.integer):
            return None
        return lambda x: np.asarray(x).astype(kind or node.out.dtype)
    if node.name == "select_n" and len(node.ins) != 3:
        return None
    return ELEMENTWISE.get(node.name)


def scalar(value: Value) -> float | None:
    """Returns the number to which all elements of a constant value are equal, or None."""
    array = evaluate(value, scalars_only=True)
    if array is None or array.size != 1 or array.dtype.kind == "c":
        return None
    return float(array.reshape(()))


def times_number(node: Node) -> tuple[Value, float] | None:
    """Returns (operand, number) of an operation that multiplies the operand by a number, or None.

    A division by a number multiplies by its reciprocal. The number is finite, and not 0.
    """
    for i in {"mul": (0, 1), "div": (0,)}.get(node.name, ()):
        number = scalar(node.ins[1 - i])
        if number is not None and 0 < abs(number) < np.inf:
            return node.ins[i], number if node.name == "mul" else 1 / number
    return None


def evaluate(value: Value, *, scalars_only: bool = False) -> np.ndarray | None:
    """Returns the value as a NumPy array, with broadcast axes of length 1; None if it is not constant.

    Floating-point arrays are float64, rounded to each dtype through which the program casts them.
    """
    if not value.is_constant:
        return None
    value = value.twin or value
    if scalars_only not in value.facts:
        value.facts[scalars_only] = _evaluate(value, scalars_only)
    return value.facts[scalars_only]


def _evaluate(value: Value, scalars_only: bool) -> np.ndarray | None:
    if value.node is None:
        if value.constant is None and value.origin is not None:
            return evaluate(value.origin, scalars_only=scalars_only)
        if scalars_only and math.prod(value.shape) != 1:
            return None
        array = known_array(value)
        if array is None or array.size > LARGEST:
            return None
        return _rounded(value, array)
    node = value.node
    if value.dtype is None or node.bodies or len(node.outs) != 1:
        return None
    ins = []
    for operand in node.ins:
        array = evaluate(operand, scalars_only=scalars_only)
        if array is None:
            return None
        ins.append(array)
    if node.name in _SHAPES:
        if scalars_only and node.name == "iota":
            return None
        return _SHAPES[node.name](node, *ins)
    function = elementwise(node)
    if function is None:
        return None
    shape = np.broadcast_shapes(*(a.shape for a in ins))
    if math.prod(shape) > LARGEST:
        return None
    with np.errstate(all="ignore"):
        return _rounded(value, np.asarray(function(*ins)))


def rounded(number: float, dtype: Any) -> float:
    """Returns a number rounded to a floating dtype."""
    with np.errstate(over="ignore"):
        return float(np.asarray(number, np.float64).astype(dtype))


def _rounded(value: Value, array: np.ndarray) -> np.ndarray:
    """Returns the array rounded to the value's dtype, as float64 if it is floating-point."""
    if not value.is_floating:
        return array
    if value.dtype != array.dtype and value.dtype != np.float64:
        with np.errstate(over="ignore"):
            array = array.astype(value.dtype)
    return np.asarray(array, np.float64)


def _iota(node: Node) -> np.ndarray:
    axis, shape = node.params["dimension"], node.out.shape
    ramp = np.arange(shape[axis], dtype=None if node.out.is_floating else node.out.dtype)
    return ramp.reshape([-1 if i == axis else 1 for i in range(len(shape))])


def _broadcast_in_dim(node: Node, x: np.ndarray, *_: np.ndarray) -> np.ndarray:
    shape = [1] * node.out.ndim
    for axis, target in enumerate(node.params["broadcast_dimensions"]):
        shape[int(target)] = x.shape[axis]
    return x.reshape(shape)


def _reshape(node: Node, x: np.ndarray, *_: np.ndarray) -> np.ndarray | None:
    if x.size == 1:
        return x.reshape([1] * node.out.ndim)
    if math.prod(node.ins[0].shape) > LARGEST:
        return None
    return np.broadcast_to(x, node.ins[0].shape).reshape(node.out.shape)


def _slice(node: Node, x: np.ndarray) -> np.ndarray:
    taken = zip(x.shape, cuts(node.out), strict=True)
    return x[tuple(slice(None) if size == 1 else cut for size, cut in taken)]


def _concatenate(node: Node, *parts: np.ndarray) -> np.ndarray | None:
    if math.prod(node.out.shape) > LARGEST:
        return None
    full = [np.broadcast_to(p, v.shape) for p, v in zip(parts, node.ins, strict=True)]
    return np.concatenate(full, axis=node.params["dimension"])


def _squeeze(node: Node, x: np.ndarray) -> np.ndarray:
    return x.reshape([size for i, size in enumerate(x.shape) if i not in node.params["dimensions"]])


def _reduce_sum(node: Node, x: np.ndarray) -> np.ndarray:
    axes = tuple(int(axis) for axis in node.params["axes"])
    repeats = math.prod(node.ins[0].shape[axis] for axis in axes if x.shape[axis] == 1)
    return x.sum(axes) * repeats


def _tile(node: Node, x: np.ndarray) -> np.ndarray:
    # Axes of length 1 are not repeated, since each may stand for a broadcast axis of any length.
    return np.tile(
        x, [1 if size == 1 else r for size, r in zip(x.shape, node.params["reps"], strict=True)]
    )


_SHAPES: dict[str, Callable[..., np.ndarray | None]] = {
    "broadcast_in_dim": _broadcast_in_dim,
    "concatenate": _concatenate,
    "iota": _iota,
    "reduce_sum": _reduce_sum,
    "reshape": _reshape,
    "slice": _slice,
    "squeeze": _squeeze,
    "tile": _tile,
    "transpose": lambda node, x: x.transpose(node.params["permutation"]),
}
