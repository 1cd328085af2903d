"""A program as a graph: values, the operations that compute them, and the operations that read them.

The graph is made from the jaxpr of a function. It holds the operations inside a `jax.jit` like all
others, each with a reference to its call. A call in which nothing is replaced is evaluated unchanged.
Bodies of `scan`, `cond`, `while` and `jax.checkpoint` are graphs of their own, each attached to its
operation of the outer graph.

A view (a convert, a reshape, a broadcast) that the program applies to one value several times is one
operation here, so that recognisers see one input.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core
from jax.extend.core import primitives

Jaxpr = Any
"""A jaxpr of JAX, open or closed: newer versions of JAX have one class for both."""


class Value:
    """An array of the program."""

    __slots__ = (
        "aval",
        "constant",
        "dtype",
        "facts",
        "index",
        "is_constant",
        "is_output",
        "node",
        "origin",
        "shape",
        "twin",
        "uses",
    )

    def __init__(self, aval: Any, node: "Node | None" = None, index: int = 0):
        self.aval = aval
        self.shape: tuple[int, ...] = tuple(getattr(aval, "shape", ()))
        self.dtype: Any = getattr(aval, "dtype", None)
        self.node = node
        """Operation that computes the value; None for inputs and constants."""
        self.index = index
        """Position among the results of its operation."""
        self.uses: list[Node] = []
        """Operations that read the value, one entry for each operand position."""
        self.is_output = False
        self.constant: Any = None
        """The array of a literal or of a closed-over array; None for other values."""
        self.origin: Value | None = None
        """The outer graph's value that this input of a body has in every step, or None."""
        self.is_constant = False
        """True if the value does not depend on the program's arguments: `constants` can evaluate it."""
        self.facts: dict[Any, Any] = {}
        """Cache of results about a constant, such as its array by `constants.evaluate`."""
        self.twin: Value | None = None
        """An earlier constant made by the same operations, such as the mask of an earlier layer."""

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def is_floating(self) -> bool:
        return self.dtype is not None and jax.numpy.issubdtype(self.dtype, jax.numpy.floating)

    @property
    def struct(self) -> jax.ShapeDtypeStruct:
        """Shape, dtype and explicit sharding of the value, for tracing a function."""
        sharding = getattr(self.aval, "sharding", None)
        if sharding is None or not sharding.mesh.explicit_axes:
            return jax.ShapeDtypeStruct(self.shape, self.dtype)
        return jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=sharding)

    @property
    def made_by(self) -> str:
        """Name of the operation that computes the value, or "" for an input or constant."""
        return "" if self.node is None else self.node.name

    @property
    def used_once(self) -> bool:
        return not self.is_output and len(self.uses) == 1


class Call:
    """A call of `jax.jit` or another plain call, whose operations the graph holds like its own."""

    __slots__ = ("eqn", "ins", "items", "outs", "parent")

    def __init__(self, eqn: Any, ins: Sequence[Value], parent: "Call | None"):
        self.eqn = eqn
        self.ins = list(ins)
        self.outs: list[Value] = []
        self.items: list[Node | Call] = []
        self.parent = parent


class Node:
    """An operation of the program: an equation of its jaxpr."""

    __slots__ = ("bodies", "call", "eqn", "ins", "name", "order", "outs")

    def __init__(self, eqn: Any, ins: Sequence[Value], call: Call | None, order: int):
        self.eqn = eqn
        self.name: str = eqn.primitive.name
        self.ins = list(ins)
        self.outs = [Value(v.aval, self, i) for i, v in enumerate(eqn.outvars)]
        self.call = call
        """Innermost `Call` that contains the operation, or None."""
        self.order = order
        self.bodies: tuple[Graph, ...] = ()
        """Graphs of the bodies of a loop, a branch or a `jax.checkpoint`."""

    @property
    def params(self) -> dict[str, Any]:
        return self.eqn.params

    @property
    def out(self) -> Value:
        return self.outs[0]


class Graph:
    """The operations of a jaxpr, in program order."""

    def __init__(self) -> None:
        self.inputs: list[Value] = []
        self.outputs: list[Value] = []
        self.nodes: list[Node] = []
        self.items: list[Node | Call] = []
        """Top-level operations and calls, in order. Calls hold their own items."""
        self.captured: list[Value] = []
        """Arrays that the function closed over."""

    def everywhere(self) -> "Iterator[Graph]":
        """Yields this graph and the graphs of all bodies inside it."""
        yield self
        for node in self.nodes:
            for body in node.bodies:
                yield from body.everywhere()


def opened(jaxpr: Jaxpr) -> tuple[Jaxpr, Sequence[Any]]:
    """Returns the jaxpr without its constants, and the constant arrays."""
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())


_VIEWS = frozenset({"convert_element_type", "reshape", "broadcast_in_dim", "squeeze", "transpose"})
"""Operations of which two with equal operands and parameters are merged; each is at most a copy."""


class _Builder:
    """Makes a graph of a jaxpr."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.seen: dict[Any, Node] = {}

    def build(self, jaxpr: Jaxpr, origins: Sequence[Value | None] | None = None) -> Graph:
        jaxpr, constants = opened(jaxpr)
        graph = self.graph
        graph.inputs = [Value(v.aval) for v in jaxpr.invars]
        for value, origin in zip(graph.inputs, origins or (), strict=False):
            value.origin = origin
            value.is_constant = origin is not None and origin.is_constant
        graph.captured = self._captured(jaxpr, constants)
        names = dict(zip(jaxpr.invars, graph.inputs, strict=True))
        names |= zip(jaxpr.constvars, graph.captured, strict=True)
        self._read(jaxpr, names, None, graph.items)
        graph.outputs = [self._atom(v, names) for v in jaxpr.outvars]
        for value in graph.outputs:
            value.is_output = True
        self._pair_constants()
        for node in reversed(graph.nodes):
            # Dead operations (no effect, and no result that is used) do not count as readers.
            if node.eqn.effects or any(value.is_output or value.uses for value in node.outs):
                for value in node.ins:
                    value.uses.append(node)
        return graph

    def _pair_constants(self) -> None:
        """Links each constant to an earlier equal one (its `twin`), so that both are evaluated once."""
        first: dict[Any, Value] = {}
        for node in self.graph.nodes:
            if len(node.outs) == 1 and node.out.is_constant:
                made_of = tuple(_identity(value) for value in node.ins)
                key = (node.name, repr(node.params), *made_of)
                twin = first.setdefault(key, node.out)
                node.out.twin = None if twin is node.out else twin

    def _captured(self, jaxpr: Jaxpr, constants: Sequence[Any]) -> list[Value]:
        values = []
        for variable, array in zip(jaxpr.constvars, constants, strict=True):
            value = Value(variable.aval)
            value.constant = array
            value.is_constant = not isinstance(array, jax.core.Tracer)
            values.append(value)
        return values

    def _atom(self, atom: Any, names: dict[Any, Value]) -> Value:
        if isinstance(atom, core.Literal):
            value = Value(atom.aval)
            value.constant = atom.val
            value.is_constant = True
            return value
        return names[atom]

    def _read(self, jaxpr: Jaxpr, names: dict[Any, Value], call: Call | None, items: list) -> None:
        for eqn in jaxpr.eqns:
            ins = [self._atom(atom, names) for atom in eqn.invars]
            body = _transparent_body(eqn)
            if body is not None:
                outs, item = self._enter(eqn, body, ins, call)
            else:
                node = self._node(eqn, ins, call)
                outs, item = node.outs, node
            items.append(item)
            names |= zip(eqn.outvars, outs, strict=True)

    def _enter(self, eqn: Any, body: Jaxpr, ins: list[Value], parent: Call | None):
        """Adds the operations of a `jax.jit` call to the graph; returns its results and the call."""
        call = Call(eqn, ins, parent)
        inner, constants = opened(body)
        captured = self._captured(inner, constants)
        names = dict(zip(inner.invars, ins, strict=True))
        names |= zip(inner.constvars, captured, strict=True)
        self.graph.captured += captured
        self._read(inner, names, call, call.items)
        call.outs = [self._atom(v, names) for v in inner.outvars]
        return call.outs, call

    def _node(self, eqn: Any, ins: list[Value], call: Call | None) -> Node:
        key = None
        if eqn.primitive.name in _VIEWS:
            key = (call, eqn.primitive.name, repr(eqn.params), *(id(value) for value in ins))
            if key in self.seen:
                return self.seen[key]
        node = Node(eqn, ins, call, len(self.graph.nodes))
        if key is not None:
            self.seen[key] = node
        node.bodies = tuple(_Builder().build(body, origins) for body, origins in _bodies(eqn, ins))
        if not node.bodies and not eqn.effects:
            for value in node.outs:
                value.is_constant = all(operand.is_constant for operand in ins)
        self.graph.nodes.append(node)
        return node


def _identity(value: Value) -> Any:
    """Returns a key that is the same for equal constants: the twin, the number or the array's id."""
    if value.node is None and value.constant is not None:
        array = value.constant
        is_number = not isinstance(array, jax.Array) and np.ndim(array) == 0
        return (str(value.aval), np.asarray(array).item()) if is_number else id(array)
    return value.twin or value


def cuts(value: Value) -> list[slice]:
    """Returns the slice of each operand axis that a result of the operations slice or split holds."""
    node = value.node
    assert node is not None
    if node.name == "split":
        axis, sizes = node.params["axis"], node.params["sizes"]
        first = int(sum(sizes[: value.index]))
        whole = [slice(0, size, 1) for size in node.ins[0].shape]
        whole[axis] = slice(first, first + value.shape[axis], 1)
        return whole
    starts, stops = node.params["start_indices"], node.params["limit_indices"]
    strides = node.params["strides"] or [1] * len(starts)
    return [slice(*map(int, cut)) for cut in zip(starts, stops, strides, strict=True)]


def build(jaxpr: Jaxpr) -> Graph:
    """Returns the graph of a jaxpr."""
    return _Builder().build(jaxpr)


def _transparent_body(eqn: Any) -> Jaxpr | None:
    """Returns the jaxpr of a call that sets no shardings and has no other effect, or None."""
    if eqn.primitive is primitives.jit_p:
        shardings = (*eqn.params["in_shardings"], *eqn.params["out_shardings"])
        # The shardings that the user gave the call would be lost if its operations ran without it.
        if all(repr(sharding) == "UnspecifiedValue" for sharding in shardings):
            return eqn.params["jaxpr"]
        return None
    if eqn.primitive in (primitives.closed_call_p, primitives.call_p):
        return eqn.params["call_jaxpr"]
    return None


def _bodies(eqn: Any, ins: list[Value]) -> Iterator[tuple[Jaxpr, list[Value | None]]]:
    """Yields each body in which operators may run, with the outer value (`origin`) of each input."""
    if eqn.primitive is primitives.remat_p:
        yield eqn.params["jaxpr"], list(ins)
    elif eqn.primitive is primitives.scan_p:
        constants = scan_constants(eqn)
        rest: list[Value | None] = [None] * (len(ins) - constants)
        yield eqn.params["jaxpr"], [*ins[:constants], *rest]
    elif eqn.primitive is primitives.cond_p:
        for branch in eqn.params["branches"]:
            yield branch, list(ins[1:])
    elif eqn.primitive is primitives.while_p:
        yield eqn.params["body_jaxpr"], [None] * len(opened(eqn.params["body_jaxpr"])[0].invars)


def scan_constants(eqn: Any) -> int:
    """Returns how many inputs of a scan are the same in every step."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"]
    return len(eqn.params["ft_in"].unpack()[0])


def scan_carries(eqn: Any) -> int:
    """Returns how many inputs of a scan are carried from step to step."""
    if "num_carry" in eqn.params:
        return eqn.params["num_carry"]
    return len(eqn.params["ft_in"].unpack()[1])


def known_array(value: Value) -> np.ndarray | None:
    """Returns a literal or closed-over array as NumPy; None if this process cannot read it."""
    array = value.constant
    if isinstance(array, jax.Array):
        if not array.is_fully_addressable or jax.dtypes.issubdtype(
            array.dtype, jax.dtypes.extended
        ):
            return None
        # The read happens at once, and is not traced as an operation of the program.
        with jax.core.ensure_compile_time_eval():
            return np.asarray(array)
    return np.asarray(array)


def bind(eqn: Any, ins: Sequence[Any]) -> list[Any]:
    """Returns the results of an operation of the program, evaluated by JAX."""
    variables = {}
    for atom, array in zip(eqn.invars, ins, strict=True):
        if not isinstance(atom, core.Literal):
            variables[atom] = array
    jaxpr = core.Jaxpr(
        (), tuple(variables), tuple(eqn.outvars), [eqn], eqn.effects, debug_info=_DEBUG_INFO
    )
    return jax.core.eval_jaxpr(jaxpr, (), *variables.values())


_DEBUG_INFO = opened(jax.make_jaxpr(lambda: ())())[0].debug_info
