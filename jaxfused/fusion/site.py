"""Results of the recognisers: replacements (`Site`) and near misses, collected in a `Book`."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxfused.fusion.algebra import passed_on
from jaxfused.fusion.graph import Graph, Node, Value
from jaxfused.fusion.source import line_of


@dataclass(eq=False)
class Site:
    """A call of an operator in place of operations of the program."""

    operator: str
    """The public name of the operator."""
    anchor: Node
    """One of the replaced operations, whose source line is reported."""
    inputs: Sequence[Value]
    outputs: Sequence[Value]
    call: Callable[..., Sequence[jax.Array]]
    """Computes the outputs from the inputs."""
    covered: set[Node]
    """Operations of the program that the operator replaces."""
    detail: str
    """Description of the call for reports."""
    label: str = ""
    parts: tuple["Site", ...] = ()
    """Smaller replacements found earlier, which this one replaces."""
    facts: Any = None
    """Details for later recognisers; the type depends on the operator."""

    def run(self, *operands: jax.Array) -> Sequence[jax.Array]:
        """Calls the operator under the mesh that is active at its anchor (`jax.sharding.auto_axes`)."""
        with self.anchor.eqn.ctx.manager:
            return self.call(*operands)


@dataclass(frozen=True)
class Miss:
    """Operations that resemble an operator's and are not replaced, with the reason."""

    operator: str
    line: str
    reason: str


@dataclass
class Book:
    """The replacements (sites) found so far in one graph, and the near misses."""

    graph: Graph
    without: Collection[str] = ()
    sites: list[Site] = field(default_factory=list)
    misses: list[Miss] = field(default_factory=list)
    owner: dict[Node, Site] = field(default_factory=dict)
    """For each replaced operation, the `Site` that replaces it."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Error messages of operators that refused their operands when the program ran, by label."""
    counts: dict[str, int] = field(default_factory=dict)
    """Number of replacements by each operator, also dropped ones, in all graphs of the program."""

    def is_free(self, nodes: Iterable[Node]) -> bool:
        """Returns whether none of the operations is replaced yet."""
        return not any(node in self.owner for node in nodes)

    def add(self, site: Site) -> bool:
        """Adds a replacement, unless an inner value is read elsewhere or `without` names it."""
        if any(0 in value.shape for value in (*site.inputs, *site.outputs)):
            return False
        site.covered -= _free(site)
        if any(node in self.owner and self.owner[node] not in site.parts for node in site.covered):
            return False
        leak = leaking(site)
        if leak is not None:
            reader = "the program's results"
            if leak.uses:
                node = next((n for n in leak.uses if n not in site.covered), leak.uses[0])
                reader = f"{node.name} at line {line_of(node)}"
            self.miss(site.operator, site.anchor, f"an intermediate result is used by {reader} too")
            return False
        label = f"{site.operator}#{self.counts.get(site.operator, 0)}"
        line = line_of(site.anchor)
        if label in self.refused:
            self.counts[site.operator] = self.counts.get(site.operator, 0) + 1
            self.miss(site.operator, site.anchor, f"it refused: {self.refused[label]}")
            return False
        if {site.operator, label, line, line.rpartition("/")[2]} & set(self.without):
            self.counts[site.operator] = self.counts.get(site.operator, 0) + 1
            self.miss(site.operator, site.anchor, f"{label} was left out by `without`")
            return False
        self.counts[site.operator] = self.counts.get(site.operator, 0) + 1
        site.label = label
        for part in site.parts:
            self._remove(part)
        self.sites.append(site)
        self.owner |= dict.fromkeys(site.covered, site)
        return True

    def take_out(self, sites: Iterable[Site]) -> list[Site]:
        """Removes replacements; adds again, and returns, the earlier ones that they had replaced."""
        back: list[Site] = []
        for site in sites:
            self._remove(site)
            back += site.parts
        for part in back:
            self.sites.append(part)
            self.owner |= dict.fromkeys(part.covered, part)
        return back

    def _remove(self, site: Site) -> None:
        self.sites.remove(site)
        for node in site.covered:
            if self.owner.get(node) is site:
                del self.owner[node]

    def miss(self, operator: str, node: Node, reason: str) -> None:
        """Records why the operations around `node` are not replaced."""
        self.misses.append(Miss(operator, line_of(node), reason))


def leaking(site: Site) -> Value | None:
    """Returns a value that only replaced operations compute but another operation reads, or None."""
    for node in sorted(site.covered, key=lambda node: node.order):
        for value in node.outs:
            if value in site.outputs:
                continue
            if value.is_output or any(reader not in site.covered for reader in value.uses):
                return value
    return None


def _free(site: Site) -> set[Node]:
    """Returns the constants and views: they cost nothing, so operations outside may read them too."""
    free: set[Node] = set()
    for node in sorted(site.covered, key=lambda node: node.order):
        if any(value in site.outputs for value in node.outs):
            continue
        is_view = node.name in _VIEWS or passed_on(node) is not None
        of_inputs = all(
            value.node is None
            or value.node in free
            or value.node not in site.covered
            or value in site.inputs
            for value in node.ins
        )
        if all(value.is_constant for value in node.outs) or (is_view and of_inputs):
            free.add(node)
    return free


_VIEWS = frozenset(
    {"convert_element_type", "reshape", "broadcast_in_dim", "squeeze", "transpose", "copy", "slice"}
)


def is_refusal(error: Exception) -> bool:
    """Returns whether the error is an operator's refusal of its operands: the program then stays."""
    # JAX 0.11 has no public name for the errors of Explicit mesh axes.
    return isinstance(error, TypeError | ValueError) or type(error).__name__ == "ShardingTypeError"


def first_line(error: Exception) -> str:
    """Returns the first line of an error's message."""
    return str(error).split("\n", 1)[0]
