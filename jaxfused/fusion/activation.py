"""Recognises an activation by its values, in whatever form the program computes it.

Elementwise operations on one array alone are a function of one number. `activation_of` evaluates it in
float64 at a few points and compares the values with those of `jaxfused.ACTIVATIONS`. The program may
have rounded its constants to its own dtype (0.044715 in bfloat16): the values may differ by as much as
that rounding changes them, and no more.

Functions with corners (relu) and those with a `jax.custom_jvp` are compared at more points, and by their
derivatives too, because the derivative at a corner is a convention.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import jax
import numpy as np
from jax.extend.core import primitives

from jaxfused.fusion import graph
from jaxfused.fusion.algebra import between, passed_on, rounding
from jaxfused.fusion.constants import elementwise, scalar
from jaxfused.fusion.graph import Graph, Node, Value
from jaxfused.runtime.activation import function_of

POINTS = np.concatenate([np.linspace(-6.0, 6.0, 41), [-1e-3, 1e-3, 11.0, -11.0]])
"""Arguments at which an unknown function is compared with each activation."""
_CORNERS = np.array([0.0, 1.0, -1.0, 3.0, -3.0, 6.0])
"""Arguments at which the derivatives of activations jump."""
_AFAR = np.concatenate(
    [np.linspace(-30.0, 30.0, 241), np.outer([-1.0, 1.0], 10.0 ** np.arange(2, 31, 2)).reshape(-1)]
)
"""Further arguments for functions with corners, which may be clipped anywhere."""
_SPECIAL = np.array([np.inf, -np.inf, np.nan])
"""Arguments that a program may replace, as by `jnp.nan_to_num`; no activation replaces them."""
_LONGEST = 24


class Activated(NamedTuple):
    """An activation in the program: its name, its result and the operations that compute it."""

    name: str
    result: Value
    covered: frozenset[Node]


def activation_of(z: Value) -> Activated | None:
    """Returns the activation that the operations reading `z` compute, or None.

    Of several candidates it is the one with the most operations; nothing else may read `z`.
    """
    best = None
    for result, covered in _functions_of(z):
        # A cast after an activation is replaced with it, but casts alone are no activation.
        if any(passed_on(node) is None for node in covered):
            name = _name(z, result, covered)
            if name is not None and _has_derivative(name, z, result, covered):
                best = Activated(name, result, frozenset(covered))
    return best


def why_no_activation(z: Value) -> str:
    """Returns why the operations that read `z` are no known activation; "" if they resemble none."""
    reason = ""
    for result, covered in _functions_of(z):
        if all(passed_on(node) is not None for node in covered):
            continue
        name = _name(z, result, covered)
        if name is not None and z.aval.manual_axis_type.varying:
            reason = f"its {name} is in a jax.shard_map with check_vma=True; pass check_vma=False"
        elif name is not None:
            reason = (
                f"it has the values of {name}, but another derivative at a corner;"
                f" write jax.nn.{name.removesuffix('2')}"
            )
        elif not reason and _made_of(covered) & _TELLING:
            reason = "the activation is none of " + ", ".join(_MADE_OF)
    return reason


def _functions_of(z: Value) -> Iterator[tuple[Value, set[Node]]]:
    """Yields each value that all uses of `z` pass through, with the operations from `z` to it."""
    inside: set[Node] = set()
    made = {z}
    live = {z}
    while z.is_floating and len(inside) < _LONGEST:
        ready = [
            node
            for value in live
            for node in value.uses
            if node not in inside and _is_function(node, made)
        ]
        if not ready:
            return
        node = min(ready, key=lambda node: node.order)
        inside.add(node)
        made.add(node.out)
        live = {
            value
            for value in made
            if value.is_output or not value.uses or any(r not in inside for r in value.uses)
        }
        if len(live) == 1 and z not in live and node.out in live:
            yield node.out, set(inside)


def _is_function(node: Node, made: set[Value]) -> bool:
    """True if the operation is elementwise, on values in `made` (computed from `z`) or on numbers."""
    if len(node.outs) != 1 or node.name == "stop_gradient":
        return False
    if not node.out.is_floating and node.out.dtype != np.bool_:
        return False
    if elementwise(node) is None and _body(node) is None:
        return False
    return all(value in made or scalar(value) is not None for value in node.ins) and all(
        value.shape == node.out.shape for value in node.ins if value in made
    )


def _body(node: Node) -> Graph | None:
    """Returns the graph inside a `jax.custom_jvp` of one result, or None for other operations."""
    if node.eqn.primitive is not primitives.custom_jvp_call_p or len(node.outs) != 1:
        return None
    if _body not in node.out.facts:
        node.out.facts[_body] = graph.build(node.params["call_jaxpr"])
    return node.out.facts[_body]


def _made_of(nodes: Iterable[Node]) -> set[str]:
    """Returns the names of the operations, and of those inside each `jax.custom_jvp` of `nodes`."""
    names = set()
    for node in nodes:
        names.add(node.name)
        inner = _body(node)
        if inner is not None:
            names |= _made_of(inner.nodes)
    return names


def _evaluated(
    arrays: dict[Value, np.ndarray], result: Value, nodes: Iterable[Node]
) -> np.ndarray | None:
    """Returns `result`, computed by `nodes` from the values in `arrays`; None if a value is unknown."""
    arrays = dict(arrays)

    def known(value: Value) -> np.ndarray | None:
        return arrays[value] if value in arrays else _number(value)

    for node in sorted(nodes, key=lambda node: node.order):
        if len(node.outs) != 1 or known(node.out) is not None:
            continue
        ins = [array for array in map(known, node.ins) if array is not None]
        if len(ins) != len(node.ins):
            return None
        inner, function = _body(node), elementwise(node)
        if inner is not None:
            given = dict(zip(inner.inputs, ins, strict=True))
            made = _evaluated(given, inner.outputs[0], inner.nodes)
        elif function is not None:
            with np.errstate(all="ignore"):
                made = function(*ins)
        elif node.name in _SAME or (node.name == "broadcast_in_dim" and node.ins[0].ndim == 0):
            made = ins[0]
        else:
            return None
        if made is None:
            return None
        arrays[node.out] = made
    return known(result)


_SAME = ("reshard", "pvary", "pcast")
"""Operations that return their operand's values and change only its type's sharding, or the `shard_map`
axes along which it varies; JAX inserts them into derivatives."""


def _number(value: Value) -> np.ndarray | None:
    number = scalar(value)
    return None if number is None else np.asarray(number)


def _name(z: Value, result: Value, covered: set[Node]) -> str | None:
    """Returns the name of the activation whose values the operations `covered` compute, or None."""
    made_of = _made_of(covered)
    points = _points(covered, made_of)
    values = _evaluated({z: points}, result, covered)
    if values is None or values.shape != points.shape:
        return None
    slack: np.ndarray | None = None
    for name, parts in (
        *_MADE_OF.items(),
        *((leaky, _CORNERED) for leaky in _leaky_relus(covered)),
    ):
        if not made_of & parts:
            continue
        expected = _expected(name, points)
        off = _difference(values, expected)
        if (off <= _FAR * np.fmax(np.abs(expected), 1.0)).all():
            if slack is None:
                slack = _slack(z, result, covered, points, values)
            if (off <= slack).all():
                return name
    return None


def _leaky_relus(covered: set[Node]) -> Iterator[str]:
    """Yields "leaky_relu(c)" for each constant c of the operations between 0 and 1."""
    for number in {scalar(value) for node in covered for value in node.ins}:
        if number is not None and 0.0 < number < 1.0:
            yield f"leaky_relu({number!r})"


def _points(covered: set[Node], made_of: set[str]) -> np.ndarray:
    """Returns the numbers z at which a function is evaluated: more of them near its corners."""
    if not made_of & _KINKS:
        return POINTS
    numbers = [scalar(value) for node in covered for value in node.ins]
    near = [n for n in numbers if n is not None and math.isfinite(n)]
    around = np.outer(near, (-2.0, -1.0, -0.5, 0.5, 1.0, 2.0)).reshape(-1)
    return np.concatenate([POINTS, _CORNERS, _AFAR, around, _SPECIAL])


_FAR = 0.1
_ARITHMETIC = 1e-13
"""Largest difference between two forms of one activation in float64; relative for values above 1."""


def _slack(
    z: Value, result: Value, covered: set[Node], points: np.ndarray, values: np.ndarray
) -> np.ndarray:
    """Returns, for each point, the change of the function that rounding its constants may have caused.

    Constants of at most 3 significant bits, such as 0.5, 1 and 3, are exact in every dtype.
    """
    slack = _ARITHMETIC * np.maximum(np.abs(values), 1.0)
    for constant, number in _rounded_constants(covered).items():
        # A constant computed from others was rounded more than once: 1.25 roundings are allowed.
        moved = number * (1 + 1.25 * rounding(number, constant))
        shifted = _evaluated({z: points, constant: np.asarray(moved)}, result, covered)
        assert shifted is not None
        slack += _difference(shifted, values)
    return np.nan_to_num(slack)


def _difference(values: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Returns |values - expected| of each element: 0 for equal infinities and for two NaNs."""
    same = (values == expected) | (np.isnan(values) & np.isnan(expected))
    with np.errstate(invalid="ignore"):
        return np.where(same, 0.0, np.abs(values - expected))


def _rounded_constants(covered: set[Node]) -> dict[Value, float]:
    """Returns the constants that have more than 3 significant bits, each with its number."""
    constants = {}
    for value in (value for node in covered for value in node.ins):
        number = scalar(value)
        if number is not None and not (math.frexp(number)[0] * 8).is_integer():
            constants[value] = number
    return constants


def _full(constant: Value) -> jax.Array:
    """Returns an array filled with a constant's number, in the constant's shape, dtype and sharding."""
    number, struct = scalar(constant), constant.struct
    assert number is not None
    return jax.lax.full(struct.shape, number, struct.dtype, sharding=struct.sharding)


def _has_derivative(name: str, z: Value, result: Value, covered: set[Node]) -> bool:
    """Returns whether a function with activation `name`'s values has its derivative everywhere too."""
    made_of = _made_of(covered)
    if not made_of & _KINKS:
        return True
    if z.aval.manual_axis_type.varying:
        return False  # Constants of a shard_map that tracks what varies have other types.
    nodes = sorted(covered, key=lambda node: node.order)

    def function(x: jax.Array) -> jax.Array:
        known: dict[Value, jax.Array] = {z: x}
        for node in nodes:
            ins = [known[v] if v in known else _full(v) for v in node.ins]
            (known[node.out],) = graph.bind(node.eqn, ins)
        return known[result]

    points = _points(covered, made_of)
    points = points[np.isfinite(points)]
    derivative = _derivative(function, z.struct, points)
    expected = _expected_derivative(name, points)
    off = 4 * sum(rounding(n, value) for value, n in _rounded_constants(covered).items())
    return derivative is not None and bool(
        (np.abs(derivative - expected) <= 1e-9 + off * np.abs(expected)).all()
    )


_KINKS = frozenset(
    {"max", "min", "clamp", "select_n", "abs", "sign", "rem", "custom_jvp_call"}
    | {"eq", "ne", "gt", "ge", "lt", "le", "and", "or", "not"}
)
"""Operations that have corners or jumps, or a derivative of their own."""
_EXPONENTIAL = {"logistic", "exp", "tanh"}
_CORNERED = {"custom_jvp_call", "select_n", "max", "clamp", "gt"}

_MADE_OF: dict[str, set[str]] = {
    "gelu_tanh": {"tanh"},
    "gelu_erf": {"erf", "erfc"},
    "quick_gelu": _EXPONENTIAL,
    "silu": _EXPONENTIAL,
    "mish": _EXPONENTIAL,
    "sigmoid": _EXPONENTIAL,
    "tanh": _EXPONENTIAL,
    "relu": _CORNERED,
    "relu2": _CORNERED,
    "relu6": _CORNERED,
    "leaky_relu": _CORNERED,
    "hard_sigmoid": _CORNERED,
    "hard_swish": _CORNERED,
    "softplus": {"log1p", "log"},
    "elu": {"expm1", "exp"},
    "selu": {"expm1", "exp"},
    "hard_tanh": _CORNERED,
}
"""Operations for each activation, of which a form of the activation contains at least one.

The values of the two gelus differ by less than rounding their constants to 16 bits changes them.
"""
_TELLING = frozenset({"tanh", "erf", "erfc", "logistic", "expm1", "log1p", "abs"} | _CORNERED)
"""Operations that only occur in activations, including activations that no operator takes."""


def _derivative(
    function: Callable[[jax.Array], jax.Array], x: jax.ShapeDtypeStruct, points: np.ndarray
) -> np.ndarray | None:
    """Returns the derivative at the points of an elementwise function of arrays like x, or None."""
    program = graph.build(jax.make_jaxpr(lambda x, dx: jax.jvp(function, (x,), (dx,))[1])(x, x))
    (x_in, dx_in), (slope,) = program.inputs, program.outputs
    arrays = {x_in: points, dx_in: np.ones_like(points)}
    values = _evaluated(arrays, slope, between(slope, {x_in, dx_in}))
    return None if values is None else np.broadcast_to(values, points.shape)


_NO_MESH = jax.sharding.AbstractMesh((), ())
_ONE = jax.ShapeDtypeStruct((1,), "float64")


@functools.cache
def _known(name: str) -> Graph:
    """Returns the graph of an activation, traced in float64."""
    with jax.core.ensure_compile_time_eval(), jax.enable_x64(True):
        return graph.build(jax.make_jaxpr(function_of(name))(_ONE))


def _expected(name: str, points: np.ndarray) -> np.ndarray:
    """Returns an activation's values at the points."""
    program = _known(name)
    values = _evaluated({program.inputs[0]: points}, program.outputs[0], program.nodes)
    assert values is not None, name
    return values


def _expected_derivative(name: str, points: np.ndarray) -> np.ndarray:
    """Returns the derivative of an activation at the points."""
    with jax.sharding.use_abstract_mesh(_NO_MESH), jax.enable_x64(True):
        values = _derivative(function_of(name), _ONE, points)
    assert values is not None, name
    return values
