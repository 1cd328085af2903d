"""Asks every recogniser what it finds in a graph and in the bodies inside it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from jaxfused import dispatch
from jaxfused.fusion import kernels, shortcuts
from jaxfused.fusion.evaluate import Cyclic, Plan, plan
from jaxfused.fusion.graph import Graph, Node
from jaxfused.fusion.recognisers import (
    attention,
    batch_norm,
    conv,
    cross_entropy,
    group_norm,
    max_pool,
    norm,
    patches,
    perceptron,
    product,
    projection,
    rotation,
    short_conv,
    upsample,
)
from jaxfused.fusion.report import Found, Report
from jaxfused.fusion.site import Book, Miss, Site
from jaxfused.fusion.source import line_of
from jaxfused.runtime import shapes

RECOGNISERS: Sequence[Callable[[Book], None]] = (
    attention.find,
    group_norm.find,
    batch_norm.find,
    norm.find,
    projection.find,
    perceptron.find,
    cross_entropy.find,
    product.find,
    patches.find,
    conv.find,
    short_conv.find,
    max_pool.find,
    upsample.find,
    rotation.find,
)
"""Recognisers in the order of their calls: a later one may replace the sites of an earlier one."""

_CLOSED = {"jit": "a jax.jit with shardings of its own", "shard_map": "a jax.shard_map"}
"""Operations in whose body nothing is replaced. A jax.jit without shardings is not among them."""


@dataclass(frozen=True)
class Recognised:
    """The plan by which a graph runs with its replacements, and the report on them."""

    plan: Plan
    report: Report


def recognise(
    graph: Graph, name: str, without: Sequence[str], refused: Mapping[str, str]
) -> Recognised:
    """Finds what operators replace in a graph and in the bodies of its loops and branches.

    Args:
      graph: the graph of the whole program.
      name: the name of the function.
      without: operators, labels or lines to leave out.
      refused: error messages of operators that refused a site, by the site's label.
    """
    why = _why_left_alone(graph)
    if why:
        return Recognised(plan(graph, (), {}), Report(name, left_alone=why))
    found: list[Found] = []
    misses: list[Miss] = []
    planned = _recognise(graph, without, refused, {}, found, misses)
    return Recognised(planned, Report(name, tuple(found), tuple(misses)))


def _recognise(
    graph: Graph,
    without: Sequence[str],
    refused: Mapping[str, str],
    counts: dict[str, int],
    found: list[Found],
    misses: list[Miss],
) -> Plan:
    book = Book(graph, without, refused=refused, counts=counts)
    for recogniser in RECOGNISERS:
        recogniser(book)
    kernels.drop_what_xla_runs(book)
    bodies: dict[Node, tuple[Plan, ...]] = {}
    for node in graph.nodes:
        if node.name in _CLOSED:
            book.miss(
                "operator", node, f"{_CLOSED[node.name]} is left as it is; put fuse inside it"
            )
        if node.bodies:
            plans = tuple(
                _recognise(body, without, refused, counts, found, misses)
                if runs_here
                else plan(body, (), {})
                for body, runs_here in zip(node.bodies, _run_here(node), strict=True)
            )
            if any(p.changes for p in plans):
                bodies[node] = plans
    while True:
        try:
            planned = plan(graph, book.sites, bodies)
            break
        except Cyclic as cycle:
            site = cycle.site
            book.take_out([site])
            book.miss(site.operator, site.anchor, "its inputs depend on its own results")
    ordered = shortcuts.joined(step for step in planned.steps if isinstance(step, Site))
    planned = plan(graph, ordered, bodies)
    found += [
        Found(s.label, s.operator, line_of(s.anchor), s.detail, len(s.covered)) for s in book.sites
    ]
    misses += book.misses
    return planned


def _run_here(node: Node) -> list[bool]:
    """Returns, for each body of an operation, whether operators may replace something in it.

    Branches of `lax.platform_dependent` for other platforms than this process's are left unchanged.
    """
    of_branches = node.params.get("branches_platforms")
    if of_branches is None:
        return [True] * len(node.bodies)
    platform = dispatch.current_device().platform
    names = ("cuda", "rocm") if platform == "gpu" else (platform,)
    here = [platforms is not None and bool({*platforms} & {*names}) for platforms in of_branches]
    return here if any(here) else [platforms is None for platforms in of_branches]


def _why_left_alone(graph: Graph) -> str:
    """Returns why no operation of the program may be replaced, or ""."""
    if any(
        shapes.is_symbolic(value.aval) for value in graph.inputs if hasattr(value.aval, "shape")
    ):
        return "sizes of its arguments are symbolic, and XLA runs what is exported for them"
    for inner in graph.everywhere():
        for node in inner.nodes:
            transforms = str(node.eqn.source_info.name_stack)
            if "transpose(" in transforms or "jvp(" in transforms:
                return (
                    f"it is differentiated already, as {node.name} at {line_of(node)} shows;"
                    " pass the forward to fuse, and differentiate the result"
                )
    return ""
