"""Recognises an activation by its values, however it is written.

Elementwise operations that read one array alone are a function of a number. It is evaluated in float64
at a few points and compared with the activations of the operators. Constants of the program may be
rounded to its dtype, as 0.044715 is in bfloat16: the values may be off by that much, and no more.
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import primitives

from jaxfused.fusion import graph
from jaxfused.fusion.algebra import between, passed_on, rounding
from jaxfused.fusion.constants import elementwise, scalar
from jaxfused.fusion.graph import Node, Value
from jaxfused.runtime.activation import FUNCTIONS

POINTS = np.concatenate([np.linspace(-6.0, 6.0, 41), [-1e-3, 1e-3, 11.0, -11.0]])
"""Arguments at which an unknown function is compared with each activation."""
_LONGEST = 24


class Activated(NamedTuple):
    """Name and result of an activation of a value, and the operations that it covers."""

    name: str
    result: Value
    covered: frozenset[Node]


def activation_of(z: Value) -> Activated | None:
    """Returns the longest activation that contains all readers of `z`, or None."""
    best = None
    for result, covered in _functions_of(z):
        # A cast after an activation belongs to it, but casts alone are no activation.
        if any(passed_on(node) is None for node in covered):
            name = _name(z, result, covered)
            if name is not None:
                best = Activated(name, result, frozenset(covered))
    return best


def why_no_activation(z: Value) -> str:
    """Returns why the operations after `z` are no known activation; "" if they resemble none."""
    for result, covered in _functions_of(z):
        names = {node.name for node in covered}
        if "max" in names and _values(z, result, covered) is not None:
            return (
                "jnp.maximum(x, 0) has the derivative 0.5 at 0, and the operator's relu has 0;"
                " write jax.nn.relu"
            )
        if names & {"tanh", "erf", "erfc", "logistic", "custom_jvp_call"}:
            return "the activation is none of " + ", ".join(_MADE_OF)
    return ""


def _functions_of(z: Value) -> Iterator[tuple[Value, set[Node]]]:
    """Yields each value through which all uses of `z` pass, and the operations between the two."""
    inside: set[Node] = set()
    made = {z}
    live = {z}
    while len(inside) < _LONGEST:
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
    """Whether the operation is elementwise, with operands that are in `made` or single numbers."""
    if len(node.outs) != 1 or node.name == "stop_gradient":
        return False
    if not node.out.is_floating and node.name not in ("gt", "ge", "lt", "le"):
        return False
    if elementwise(node) is None and not is_relu(node):
        return False
    return all(value in made or scalar(value) is not None for value in node.ins) and all(
        value.shape == node.out.shape for value in node.ins if value in made
    )


def is_relu(node: Node) -> bool:
    """Returns whether the operation is `jax.nn.relu`, in its values and its derivative."""
    if node.eqn.primitive is not primitives.custom_jvp_call_p or len(node.ins) != 1:
        return False
    inner = graph.build(node.params["call_jaxpr"])
    names = [n.name for n in inner.nodes]
    if names != ["max"] or len(inner.inputs) != 1 or inner.outputs != inner.nodes[0].outs:
        return False
    operands = inner.nodes[0].ins
    if not any(v is inner.inputs[0] for v in operands) or not any(scalar(v) == 0 for v in operands):
        return False
    return _has_slope_of_relu(node)


def _has_slope_of_relu(node: Node) -> bool:
    """Whether the derivative, which may be a custom_jvp of the user, is that of `jax.nn.relu`."""
    x = node.ins[0].struct
    derivative = jax.make_jaxpr(
        lambda x, dx: jax.jvp(lambda x: graph.bind(node.eqn, [x])[0], (x,), (dx,))[1]
    )(x, x)
    program = graph.build(derivative)
    (x_in, dx_in), (slope,) = program.inputs, program.outputs
    points = np.array([-1.0, 0.0, 1.0])
    nodes = between(slope, {x_in, dx_in})
    values = _evaluated({x_in: points, dx_in: np.ones(3)}, slope, nodes)
    return values is not None and np.broadcast_to(values, 3).tolist() == [0.0, 0.0, 1.0]


def _values(z: Value, result: Value, covered: set[Node]) -> np.ndarray | None:
    """Returns the function from `z` to `result` at POINTS, or None if it cannot be evaluated."""
    return _evaluated({z: POINTS}, result, covered)


def _evaluated(
    arrays: dict[Value, np.ndarray], result: Value, nodes: set[Node]
) -> np.ndarray | None:
    for node in sorted(nodes, key=lambda node: node.order):
        number = scalar(node.out) if len(node.outs) == 1 else None
        if number is not None:
            arrays[node.out] = np.asarray(number)
            continue
        function: Callable[..., Any] | None = elementwise(node)
        if node.eqn.primitive is primitives.custom_jvp_call_p and is_relu(node):
            function = functools.partial(np.maximum, 0.0)
        if function is None:
            return None
        ins = [arrays[v] if v in arrays else scalar(v) for v in node.ins]
        if any(array is None for array in ins):
            return None
        with np.errstate(all="ignore"):
            arrays[node.out] = function(*ins)
    return arrays.get(result)


def _name(z: Value, result: Value, covered: set[Node]) -> str | None:
    if any(
        node.name in ("max", "min", "select_n", "abs", "sign") and passed_on(node) is None
        for node in covered
    ):
        # The derivative at a kink is a convention, and only that of `jax.nn.relu` is known to agree.
        return None
    values = _values(z, result, covered)
    if values is None:
        return None
    made_of = {node.name for node in covered}
    slack: np.ndarray | None = None
    for name, parts in _MADE_OF.items():
        if not made_of & parts:
            continue
        off = np.abs(values - _activation_values(name))
        if off.max() < _FAR:
            slack = _slack(z, result, covered, values) if slack is None else slack
            if (off <= slack).all():
                return name
    return None


_FAR = 0.1
_ARITHMETIC = 1e-13
"""Largest difference between two forms of one activation at POINTS, in float64."""


def _slack(z: Value, result: Value, covered: set[Node], values: np.ndarray) -> np.ndarray:
    """Returns how far rounded constants may have moved a function at each point.

    Constants of few bits, such as 0.5, 1 and 3, are taken to be exact.
    """
    slack = np.full(POINTS.shape, _ARITHMETIC)
    for constant in {v for node in covered for v in node.ins if scalar(v) is not None}:
        number = scalar(constant)
        assert number is not None
        is_exact = (math.frexp(number)[0] * 8).is_integer()
        if not is_exact:
            # A computed constant has been rounded more than once, hence 1.25 roundings.
            moved = number * (1 + 1.25 * rounding(number, constant))
            shifted = _evaluated({z: POINTS, constant: np.asarray(moved)}, result, covered)
            assert shifted is not None
            slack += np.abs(shifted - values)
    return slack


_MADE_OF: dict[str, set[str]] = {
    "gelu_tanh": {"tanh"},
    "gelu_erf": {"erf", "erfc"},
    "quick_gelu": {"logistic", "exp"},
    "silu": {"logistic", "exp"},
    "sigmoid": {"logistic", "exp"},
    "tanh": {"tanh"},
    "relu": {"custom_jvp_call"},
    "relu2": {"custom_jvp_call"},
}
"""Operations that name each activation: it contains at least one of them.

By values alone, the two gelus could not be told apart if constants are rounded to 16 bits.
"""


@functools.cache
def _activation_values(name: str) -> np.ndarray:
    """Returns an activation at POINTS, with its constants in float64."""
    with jax.core.ensure_compile_time_eval(), jax.enable_x64(True):
        jaxpr = jax.make_jaxpr(FUNCTIONS[name])(jax.ShapeDtypeStruct((1,), "float64"))
        program = graph.build(jaxpr)
        (z,), (result,) = program.inputs, program.outputs
        values = _values(z, result, set(program.nodes))
    assert values is not None, name
    return values
