"""explain: which implementation runs each operator of a program, and why another one does not."""

import contextlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import ClosedJaxpr, Jaxpr

from jaxfused import dispatch
from jaxfused.fusion import report as fusion
from jaxfused.runtime import lowering
from jaxfused.runtime.table import Table, load


@dataclass(frozen=True)
class Explanation:
    """The result of `explain`, whose `str` is the report."""

    device: dispatch.Device
    calls: tuple[tuple[dispatch.Choice, int], ...]
    """The implementation chosen for each kernel, and how often the program contains it."""
    fallbacks: tuple[tuple[dispatch.Fallback, int], ...] = ()
    """Module calls that run Flax's own code, with the reason, and how often each occurs."""
    table: Table = field(default_factory=lambda: Table({}))
    """The autotuning table of the device."""
    fusions: tuple[fusion.Report, ...] = ()
    """The report of each function that `jaxfused.fuse` has wrapped."""

    def __str__(self) -> str:
        lines = [str(report) for report in self.fusions]
        lines.append(f"on {self.device.name}:")
        if self.table.files:
            lines.append(f"  measured choices {self.table}:")
            lines += [f"      {file}" for file in self.table.files]
        elif self.device.compute_capability and not self.device.name.startswith(_RULES_OF):
            lines.append(f"  rules come from an {_RULES_OF}; `jaxfused.tune` measures this GPU")
        if not self.calls:
            lines.append("  no operator of jaxfused was called")
        for choice, count in self.calls:
            times = f"{count} x " if count > 1 else ""
            decided = f" ({_SOURCES[choice.source]})" if choice.source in _SOURCES else ""
            lines.append(
                f"  {times}{choice.stage} runs on {choice.implementation!r}{decided}:"
                f" {_shapes((o.dtype, o.shape) for o in choice.operands if o is not None)}"
            )
            if choice.config is not None:
                lines.append(f"      by {choice.config}")
            lines += [f"      {line}" for line in basis(choice)]
        for fallback, count in self.fallbacks:
            times = f"{count} x " if count > 1 else ""
            lines.append(f"  {times}{fallback}")
        return "\n".join(lines)


_RULES_OF = "NVIDIA H200"
"""The GPU on which the implementations were measured that each rule puts first."""

_SOURCES = {
    "named": "as named",
    "table": "measured",
    "neighbour": "measured at near shapes",
}


def basis(choice: dispatch.Choice) -> list[str]:
    """Returns lines: the times or the rule that decided, and why other implementations cannot run."""
    # If the operator's own rule left the call to XLA, the estimates of its kernels decided nothing.
    asked = [c for c in choice.stages if c.implementation == "xla" or c.measured is not None]
    stages = dict.fromkeys(f"{c.stage}, {_figures(c)}" for c in asked if _figures(c))
    cannot = [f"not {name!r}: {reason}" for name, reason in choice.reasons.items() if reason]
    return [*filter(None, [_figures(choice)]), *stages, *cannot]


def _figures(choice: dispatch.Choice) -> str | None:
    """Returns the times or the rule that decided for the implementation, or None if neither did."""
    chosen, estimate, measured = choice.implementation, choice.estimate, choice.measured
    able = [name for name, reason in choice.reasons.items() if reason is None]
    if choice.source == "named" or choice.stages or (choice.source and len(able) < 2):
        return None
    if measured is not None:
        # A ranking has several configs of an implementation; the dict of the reversed one has the
        # fastest.
        times = {r.implementation: r.microseconds for r in reversed(measured.ranking)}
        at = "" if measured.exact else f" at {_shapes(filter(None, measured.operands))}"
        return f"measured{at}: {_compared(chosen, times)}"
    if estimate is not None and chosen in estimate.first:
        return f"{', then '.join(map(repr, estimate.first))} first: {estimate.why}"
    if len(able) < 2:
        return None
    first = f"the first that can run: {', '.join(map(repr, able))}"
    if estimate is None:
        return first
    return (
        f"{first}; {', then '.join(map(repr, estimate.first))} would be before them: {estimate.why}"
    )


def _compared(chosen: str, microseconds: Mapping[str, float]) -> str:
    """Returns each implementation's time, and by how much it exceeds that of the chosen one."""
    least = microseconds[chosen] or math.inf
    others = sorted((time, name) for name, time in microseconds.items() if name != chosen)
    return ", ".join(
        [
            f"{chosen!r} {microseconds[chosen]:.1f} us",
            *(f"{name!r} {time:.1f} us ({time / least - 1:+.0%})" for time, name in others),
        ]
    )


def _shapes(arrays: Iterable[tuple[Any, Sequence[int]]]) -> str:
    return ", ".join(f"{dtype}{list(shape)}" for dtype, shape in arrays)


def explain(f: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Reports for each operator called in `f(*args, **kwargs)` which implementation runs each stage.

    The function is traced, and compiled where XLA splits arrays over devices, but not run. Shapes are
    those that a kernel sees: after `jax.vmap`, on one device's shard. Each stage comes with what
    decided: measured times (see `jaxfused.tune`) and their config, or a rule. To see
    the stages of gradients, pass a function that takes them, such as a training step. Calls of modules
    that Flax's own code serves are listed with the argument that no operator can serve. Of functions
    that `jaxfused.fuse` has wrapped it says which operators were found in them, in which line, and what
    was left alone and why.

    Args:
      f: any function of JAX arrays, jitted or not.
      *args: its arguments; `jax.ShapeDtypeStruct` will do for arrays. All other leaves, such as flags
        and the functions in modules of Equinox, are static.
      **kwargs: further arguments.

    Returns:
      An `Explanation`, to be printed.

    Example:
      >>> import jax, jax.numpy as jnp, jaxfused
      >>> x = jax.ShapeDtypeStruct((8, 64), jnp.bfloat16)
      >>> report = jaxfused.explain(lambda x: jaxfused.layer_norm(x), x)
      >>> [choice.stage.split()[0] for choice, count in report.calls]
      ['layer_norm']

    Source: own work.
    """
    with fusion.recorded() as fusions:
        choices, fallbacks = traced(f, *args, **kwargs)
    # Calls that differ only in a constant get the same implementation, and are counted as one.
    counts = Counter(_Key(_without_kernels(choice)) for choice, _ in choices)
    device = dispatch.current_device()
    return Explanation(
        device,
        tuple((key.choice, count) for key, count in counts.items()),
        tuple(Counter(fallbacks).items()),
        load(device),
        tuple(fusions),
    )


def traced(
    f: Callable[..., Any], *args: Any, **kwargs: Any
) -> tuple[list[tuple[dispatch.Choice, int]], list[dispatch.Fallback]]:
    """Returns the implementations chosen in a program, and the module calls that run Flax's own code.

    Each choice comes with how often its kernel runs, counting the trips of loops of known length.
    """
    with (
        dispatch.recorded() as choices,
        dispatch.recorded_fallbacks() as fallbacks,
        _traced_anew(),
    ):
        of_arrays, arrays = _of_arrays(f, args, kwargs)
        program = jax.jit(of_arrays).trace(*arrays)
        if _is_split_by_xla(args, kwargs):
            choices.clear()
            program.lower().compile()
            by_partitioner = [choice for choice in choices if choice.by_partitioner]
            choices[:] = by_partitioner or choices
    calls = _calls(program.jaxpr.jaxpr)
    names = {name for name, _, _ in calls}
    exact = {_call(c)[:2] for c in choices if c.kernel is not None and _call(c) in calls}

    def runs(choice: dispatch.Choice) -> int:
        if choice.kernel is None or choice.by_partitioner:
            return 1
        # JAX also traces, for a gradient, forwards that save nothing, and drops them: these count
        # 0. Calls from which JAX removed unused operands or results are found by their name alone.
        call = _call(choice)
        return calls[call] or int(call[0] in names and call[:2] not in exact)

    return [(choice, runs(choice)) for choice in choices if runs(choice)], fallbacks


def _of_arrays(
    f: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Callable[..., list[Any]], list[Any]]:
    """Returns f as a function of the arrays among its arguments, and these arrays.

    All else is static, as for `jaxfused.fuse`: flags, names, and functions in modules of Equinox.
    """
    leaves, treedef = jax.tree.flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if _is_array(leaf)]

    def of_arrays(*arrays: Any) -> list[Any]:
        filled = list(leaves)
        for i, array in zip(places, arrays, strict=True):
            filled[i] = array
        args, kwargs = jax.tree.unflatten(treedef, filled)
        return [leaf for leaf in jax.tree.leaves(f(*args, **kwargs)) if _is_array(leaf)]

    return of_arrays, [leaves[i] for i in places]


def _is_array(leaf: Any) -> bool:
    is_shaped = hasattr(leaf, "shape") and hasattr(leaf, "dtype")
    return is_shaped and not isinstance(leaf, type)


def _call(choice: dispatch.Choice) -> tuple[Any, ...]:
    """Returns the key under which `_calls` counts the calls of the chosen kernel."""
    results = choice.kernel.axes(*choice.operands).results
    return (
        lowering.jitted(choice.stage).__name__,
        tuple((_as_rows(o.shape), o.dtype) for o in choice.operands if o is not None),
        sum(letters is not None for letters in results),
    )


def _calls(jaxpr: Jaxpr, times: int = 1) -> Counter[tuple[Any, ...]]:
    """Counts a program's calls of jitted functions by name, operands and number of results."""
    calls: Counter[tuple[Any, ...]] = Counter()
    for equation in jaxpr.eqns:
        avals: list[Any] = [v.aval for v in equation.invars]
        shapes = [getattr(a, "shape", ()) for a in avals]
        dtypes = [getattr(a, "dtype", None) for a in avals]
        operands = tuple(zip(map(_as_rows, shapes), dtypes, strict=True))
        calls[equation.params.get("name"), operands, len(equation.outvars)] += times
        inside = times * equation.params.get("length", 1)
        for value in jax.tree.leaves(
            equation.params, is_leaf=lambda leaf: isinstance(leaf, Jaxpr | ClosedJaxpr)
        ):
            if isinstance(value, Jaxpr | ClosedJaxpr):
                calls += _calls(getattr(value, "jaxpr", value), inside)
    return calls


def _as_rows(shape: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the shape with all axes but the last merged into one axis of rows."""
    return (math.prod(shape[:-1]), *shape[-1:])


_numbers = itertools.count()


@contextlib.contextmanager
def _traced_anew() -> Iterator[None]:
    """Makes JAX trace in this context without its caches of earlier traces."""
    with set_xla_metadata(jaxfused_explain=str(next(_numbers))):
        yield


def _is_split_by_xla(*trees: Any) -> bool:
    """True if an array is sharded over Auto axes, whose shards are known only when XLA compiles."""
    shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(trees)]
    return any(
        isinstance(sharding, jax.sharding.NamedSharding)
        and sharding.mesh.size > 1
        and bool(sharding.mesh.abstract_mesh.auto_axes)
        for sharding in shardings
    )


def _without_kernels(choice: dispatch.Choice) -> dispatch.Choice:
    return choice._replace(kernel=None, stages=tuple(map(_without_kernels, choice.stages)))


class _Key:
    """A `Choice` that is hashable by its text, so that equal choices are counted as one."""

    def __init__(self, choice: dispatch.Choice):
        self.choice = choice
        self._text = str(choice)

    def __hash__(self) -> int:
        return hash(self._text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self._text == other._text
