"""Runs a program with operators in place of the operations that they replace.

Operations that no operator replaces run with the program's parameters, and give the same bits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend import core
from jax.extend.core import primitives

from jaxfused.fusion.graph import Call, Graph, Node, Value, bind, scan_carries, scan_constants
from jaxfused.fusion.site import Site, first_line, is_refusal

Step = Site | Node | Call


@dataclass
class Plan:
    """The steps of a graph in their order: its operations, or operators that replace some of them."""

    graph: Graph
    steps: list[Step]
    bodies: dict[Node, tuple["Plan", ...]]
    """Plans of the bodies of each loop, branch or checkpoint in which an operator replaces something."""

    @property
    def changes(self) -> bool:
        """True if an operator replaces something here or in a body."""
        return bool(self.bodies) or any(isinstance(step, Site) for step in self.steps)


class Cyclic(Exception):
    """Raised if an input of a replacing operator depends on the operator's own results."""

    def __init__(self, site: Site):
        super().__init__(site.label)
        self.site = site


class Refused(Exception):
    """Raised with the message of a replacing operator that refuses its operands."""

    def __init__(self, site: Site, words: str):
        super().__init__(words)
        self.site = site


def plan(graph: Graph, sites: Sequence[Site], bodies: dict[Node, tuple[Plan, ...]]) -> Plan:
    """Returns the order in which to evaluate a graph some of whose operations `sites` replace.

    Raises:
      Cyclic: an operator's input depends on its own result.
    """
    made_by_site = {value: site for site in sites for value in site.outputs}
    covered = {node for site in sites for node in site.covered}
    open_calls = _open_calls(graph, sites, covered, bodies)

    def producer(value: Value) -> Step | None:
        if value in made_by_site:
            return made_by_site[value]
        if value.node is None:
            return None
        step: Step = value.node
        call = value.node.call
        while call is not None:
            if call not in open_calls:
                step = call
            call = call.parent
        return step

    def needs(step: Step) -> list[Step]:
        ins = step.inputs if isinstance(step, Site) else step.ins
        return [p for p in map(producer, ins) if p is not None]

    order = list(_in_order(graph.items, open_calls))
    live: set[int] = set()
    pending = [p for p in map(producer, graph.outputs) if p is not None]
    pending += [step for step in order if step.eqn.effects and step not in covered]
    while pending:
        step = pending.pop()
        if id(step) not in live:
            live.add(id(step))
            pending += needs(step)

    steps: list[Step] = []
    done: set[int] = set()

    def emit(step: Step, waiting: tuple[Step, ...]) -> None:
        if id(step) in done:
            return
        if any(step is other for other in waiting):
            raise Cyclic(next(s for s in reversed((*waiting, step)) if isinstance(s, Site)))
        for needed in needs(step):
            emit(needed, (*waiting, step))
        done.add(id(step))
        steps.append(step)

    for item in order:
        if id(item) in live:
            emit(item, ())
    for value in graph.outputs:
        made_by = producer(value)
        if made_by is not None:
            emit(made_by, ())
    return Plan(graph, steps, bodies)


def _in_order(items: Sequence[Node | Call], open_calls: set[Call]):
    for item in items:
        if isinstance(item, Call) and item in open_calls:
            yield from _in_order(item.items, open_calls)
        else:
            yield item


def _open_calls(graph, sites, covered, bodies) -> set[Call]:
    """Returns the `jax.jit` calls in which `sites` replace or read values: they run op by op."""
    found: set[Call] = set()

    def open_from(call: Call | None) -> None:
        while call is not None:
            found.add(call)
            call = call.parent

    for node in (*covered, *bodies):
        open_from(node.call)
    for site in sites:
        for value in site.inputs:
            call = None if value.node is None else value.node.call
            while call is not None:
                if not any(value is out for out in call.outs):
                    open_from(call)
                    break
                call = call.parent
    return found


def run(plan: Plan, arguments: Sequence[Any]) -> list[Any]:
    """Evaluates a plan.

    Args:
      plan: the plan of a graph.
      arguments: arrays of the graph's inputs.
    """
    graph = plan.graph
    arrays: dict[Value, Any] = dict(zip(graph.inputs, arguments, strict=True))

    def read(value: Value) -> Any:
        if value in arrays:
            return arrays[value]
        assert value.constant is not None, "a value is read before it is computed"
        return value.constant

    for step in plan.steps:
        if isinstance(step, Site):
            outs: Sequence[Any] = _call(step, list(map(read, step.inputs)))
            targets: Sequence[Value] = step.outputs
            for value, array in zip(targets, outs, strict=True):
                assert value.shape == array.shape and value.dtype == array.dtype, (
                    f"{step.label}: {array.shape} {array.dtype} in place of {value.aval}"
                )
        else:
            ins = list(map(read, step.ins))
            if isinstance(step, Node) and step in plan.bodies:
                with step.eqn.ctx.manager:
                    outs = _run_bodies(step, plan.bodies[step], ins)
            else:
                outs = bind(step.eqn, ins)
            targets = step.outs
        arrays |= zip(targets, outs, strict=True)
    return [read(value) for value in graph.outputs]


def _call(site: Site, operands: Sequence[Any]) -> Sequence[Any]:
    try:
        return site.run(*operands)
    except Exception as error:
        if not is_refusal(error):
            raise
        raise Refused(site, first_line(error)) from error


def _run_bodies(node: Node, bodies: Sequence[Plan], ins: Sequence[Any]) -> Sequence[Any]:
    """Returns the results of a loop, branch or `jax.checkpoint` whose bodies run as `bodies` plans."""
    eqn = node.eqn

    def body(plan: Plan) -> Callable[..., list[Any]]:
        return lambda *arguments: run(plan, arguments)

    if eqn.primitive is primitives.remat_p:
        # The body has no closed-over arrays: JAX has made them arguments of the checkpoint.
        return jax.checkpoint(
            body(bodies[0]), prevent_cse=eqn.params["prevent_cse"], policy=eqn.params["policy"]
        )(*ins)
    if eqn.primitive is primitives.scan_p:
        return _scan(eqn, body(bodies[0]), ins)
    if eqn.primitive is primitives.cond_p:
        branches = [body(plan) for plan in bodies]
        platforms = eqn.params.get("branches_platforms")
        if platforms is None:
            return jax.lax.switch(ins[0], branches, *ins[1:])
        return _of_platforms(platforms, branches, ins[1:])
    assert eqn.primitive is primitives.while_p
    return _while(eqn, body(bodies[0]), ins)


def _of_platforms(
    platforms: Sequence[tuple[str, ...] | None],
    branches: Sequence[Callable[..., list[Any]]],
    operands: Sequence[Any],
) -> Sequence[Any]:
    """Returns the results of `lax.platform_dependent`; None among `platforms` is the default branch."""
    named = {
        name: branch
        for names, branch in zip(platforms, branches, strict=True)
        for name in names or ("default",)
    }
    return jax.lax.platform_dependent(*operands, **named)


def _scan(eqn: Any, body: Callable[..., list[Any]], ins: Sequence[Any]) -> Sequence[Any]:
    constants, carries = scan_constants(eqn), scan_carries(eqn)
    shared = ins[:constants]

    def step(carry, x):
        outs = body(*shared, *carry, *x)
        return tuple(outs[:carries]), tuple(outs[carries:])

    carry, ys = jax.lax.scan(
        step,
        tuple(ins[constants : constants + carries]),
        tuple(ins[constants + carries :]),
        length=eqn.params["length"],
        reverse=eqn.params["reverse"],
        unroll=eqn.params["unroll"],
    )
    return [*carry, *ys]


def _while(eqn: Any, body: Callable[..., list[Any]], ins: Sequence[Any]) -> Sequence[Any]:
    of_condition, of_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    condition = core.jaxpr_as_fun(eqn.params["cond_jaxpr"])
    shared = ins[of_condition : of_condition + of_body]
    return jax.lax.while_loop(
        lambda carry: condition(*ins[:of_condition], *carry)[0],
        lambda carry: tuple(body(*shared, *carry)),
        tuple(ins[of_condition + of_body :]),
    )
