"""Runner: how an operator's call becomes kernels of a program, for all operators alike.

An operator consists of stages: its forward, its backward, each one kernel's work with several
implementations (Pallas, CUDA C, XLA). Its custom_vjp calls a `Runner` with each stage and its operands.
The Runner takes these steps:

1. Trace: equal stages on operands of equal types are traced once in a program (`traced_once`).
2. Shards: `sharding.per_shard` runs the stage on the shards that a device holds. The batch of a
   `jax.vmap` is an axis that may be split too.
3. `jax.vmap`: a device's part of a batch is merged into axes of the kernel, or its entries run one by
   one.
4. Choice: the shapes of the shards decide which implementation runs, and in which config: by the
   autotuning table (`table`) if it has these shapes or near ones, else by the stage's own rule
   (`estimate`). The operands and results of a stage are the same for all implementations, XLA's
   included, so that each stage of an operator chooses for itself.
5. Lowering: `lowering` makes the chosen implementation a function of the program that is lowered once.

docs/kernels/call.md follows a call of `layer_norm` through all steps.
"""

import functools
import itertools
import math
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Protocol, cast, get_args, runtime_checkable

import jax
from jax.custom_batching import custom_vmap

from jaxfused import dispatch
from jaxfused.runtime import gate, lowering, mapped, sharding, traced_once
from jaxfused.runtime import table as tables
from jaxfused.runtime.estimate import Estimate, Rule, in_order
from jaxfused.runtime.shapes import shapes_of, why_symbolic
from jaxfused.runtime.vmap import batch_all, is_batched, one_by_one

Operands = Sequence[jax.Array | None]
Results = tuple[jax.Array | None, ...]

ROWS = "."
"""Letter that stands for all leading axes of an array, which a kernel sees as one axis."""


class Axes(NamedTuple):
    """Letters of the axes of a kernel's arrays, as in `jnp.einsum`; `ROWS` is for all leading axes."""

    operands: Sequence[str]
    results: Sequence[str | None]
    """Letters of each result's axes, or None for a result that is None."""
    whole: str = ""
    """Letters of axes that must not be split over devices."""
    padded: Mapping[str, str] = MappingProxyType({})
    """For each padded result axis, the letter of the operand axis that has the valid length."""
    parts: str = ""
    """Letters of contracted axes, over which the kernel sums before its last step. If devices split the
    first operand with such an axis along it, the stage's `on_parts` runs."""
    parts_by: str | None = None
    """The only implementation in which `on_parts` runs, or None if it can run any. If the caller names
    another one, the contracted axes are gathered on each device."""

    def split(self, implementation: str | None) -> tuple[str, str]:
        """Returns (letters not to split, letters of contracted axes to split) for an implementation."""
        if implementation in (None, self.parts_by) or self.parts_by is None:
            return self.whole, self.parts
        return self.whole + self.parts, ""


class Stage(Protocol):
    """One kernel's work in an operator, such as the forward, in all its implementations.

    A stage is a frozen dataclass of its static parameters, and equal stages compute the same function.
    Operands and results may be None.
    """

    @property
    def name(self) -> str:
        """Name of the operator and of the kernel's work in it, such as "layer_norm forward"."""

    @property
    def axes(self) -> Callable[..., Axes]:
        """Function `axes(*operands)`, which returns the letters of operands and results.

        The letters may depend only on the rank of the operands and on which of them are None.
        """

    @property
    def why_not(self) -> Callable[..., Mapping[str, str | None]]:
        """The function `why_not(device, *operands)`: why each implementation cannot run these operands.

        The reason is None for an implementation that can run. Where the stage has no estimate, the first
        of these runs. The rows of the operands are one axis here, as in `run`. XLA can always run; an
        implementation that is not listed has no kernel for this stage and leaves it to XLA.
        """

    @property
    def run(self) -> Callable[..., Results]:
        """The function `run(implementation, device, *operands)`, which computes the results.

        If the stage `HasConfigs`, it takes `config=` too; None stands for the default.
        """

    @property
    def batched(self) -> Callable[..., Results | None]:
        """The function `batched(call, axis_size, in_batched, *operands)`, the rule for `jax.vmap`.

        It returns None if the entries of the batch have to run one by one. `call(stage, *operands)`
        runs a stage on operands that include the batch.
        """


@runtime_checkable
class HasConfigs(Protocol):
    """A `Stage` with an implementation that can be compiled in several configs, such as tile sizes."""

    def configs(
        self, implementation: str, device: dispatch.Device, *operands: Any
    ) -> Sequence[Hashable]:
        """Returns an implementation's legal configs for these operands, the default first.

        They are hashable and consist of dataclasses, tuples, numbers and strings. None stands for a
        default that is not among the other configs; an empty sequence means that there is no choice.
        """


@runtime_checkable
class HasEstimate(Protocol):
    """A `Stage` with a rule that says which implementation is expected to be the fastest."""

    def estimate(self, device: dispatch.Device, able: Collection[str], *operands: Any) -> Estimate:
        """Returns the rule that puts some of the implementations `able` to run first, or None."""


class HasParts(Protocol):
    """A `Stage` that can run while its contracted axes, `Axes.parts`, are split over devices."""

    def on_parts(
        self, names: Sequence[str], call: Callable[..., Results], *operands: Any
    ) -> Results:
        """Computes the results of `run` from a device's shards, with sums over the mesh axes `names`.

        The rows of operands and results are one axis. `call(stage, *operands)` runs a stage on shards.
        """


@runtime_checkable
class TakesRows(Protocol):
    """A `Stage` whose XLA implementation gets the caller's leading axes, not merged into one.

    XLA computes an array [M, F] of odd F one value at a time, but one of more axes several at a time.
    """

    xla_takes_rows: ClassVar[bool]


@runtime_checkable
class HasExamples(Protocol):
    """A `Stage` that cannot be timed on random operands, such as lengths that have to fit an array."""

    def examples(
        self, random: Callable[..., Any], device: dispatch.Device, *operands: Any
    ) -> Operands:
        """Returns operands of the given shapes and dtypes to time the kernels with.

        `random(operand)` returns a random array of an operand's shape and dtype.
        """


StageCall = tuple[Stage, Sequence[Any]]
"""A `Stage`, and its operands or their shapes."""


@dataclass(frozen=True)
class Runner:
    """Runs an operator's kernels, in the implementation that the caller named or in the fastest one.

    A Runner is a static argument of every function that JAX traces below an operator. The device's
    autotuning table is therefore part of the keys of JAX's caches, and a gradient uses the table of its
    forward.
    """

    implementation: str | None
    """Name of the implementation, or None for the fastest."""
    device: dispatch.Device
    """Device that the operator will run on."""
    why: str | None = None
    """Reason for `implementation` if the operator named it, or None if the caller did."""
    table: tables.Table = field(init=False, repr=False)
    """Autotuning table of the device."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "table", tables.load(self.device))

    def __call__(self, stage: Stage, *operands: jax.Array | None) -> Any:
        """Runs a kernel and returns its results; the operands are arrays of any rank, or None.

        Raises:
          ValueError: the named implementation cannot run the shapes that the kernel sees.
        """
        call = _Call(stage, self)
        return traced_once.apply(call, _traced.trace(call, *operands), operands)

    def choice(self, stage: Stage, *operands: Any) -> dispatch.Choice:
        """Returns the implementation chosen for these operands or shapes, and why others cannot run.

        The choice is for the shards of one device. Under Auto mesh axes these are the operands
        themselves, because XLA's partitioner splits them later.

        Raises:
          ValueError: the named implementation cannot run the shapes that the kernel would see.
        """
        axes = stage.axes(*operands)
        leading = sharding.leading_axes(_row_axes(operands, axes), "".join(axes.operands))
        whole, parts = axes.split(self.implementation)
        shards = sharding.shards(
            operands,
            operand_axes=[letters.replace(ROWS, leading) for letters in axes.operands],
            whole=whole,
            parts=parts,
        )
        matrices = [
            None
            if shard is None
            else jax.ShapeDtypeStruct(_merged(shard.shape, letters), shard.dtype)
            for shard, letters in zip(shards, axes.operands, strict=True)
        ]
        return self.choice_on_shard(stage, *matrices)

    def left_to_xla(self, why: str, stages: Iterable[StageCall]) -> gate.LeftToXla | None:
        """Returns `why` with the choices of the kernels that would run otherwise.

        Returns None if the autotuning table has a kernel that is faster than XLA.

        Args:
          why: the operator's reason, such as "nothing is fused".
          stages: the stages of the call and of its gradient that would run otherwise.
        """
        choices = [self.choice(stage, *operands) for stage, operands in stages]
        if any(c.measured is not None and c.implementation != "xla" for c in choices):
            return None
        return gate.LeftToXla(why, choices)

    def choice_on_shard(self, stage: Stage, *operands: Any) -> dispatch.Choice:
        """Returns the implementation chosen for one device's shards, whose leading axes are merged."""
        shapes = shapes_of(operands)
        if (unknown := why_symbolic(*operands)) is not None:
            reasons = {"pallas": unknown, "cuda": unknown, "xla": None}
            return self._among(stage, shapes, reasons)
        if any(operand is not None and operand.size == 0 for operand in operands):
            # An empty array leaves a kernel nothing to compute, and CUDA rejects an empty launch.
            return dispatch.Choice(stage.name, shapes, "xla", {"xla": None})
        return _choice_of_shapes(
            self, cast(Hashable, stage), shapes, jax.config.jax_default_matmul_precision
        )

    def _among(
        self,
        stage: Stage,
        shapes: Sequence[jax.ShapeDtypeStruct | None],
        reasons: Mapping[str, str | None],
        estimate: Estimate = None,
    ) -> dispatch.Choice:
        """Chooses the implementation that the caller named, or else the first that can run."""
        named = self._named(reasons)
        by_operator = self.why is not None and named == self.implementation is not None
        rule = Rule((str(named),), str(self.why)) if by_operator else None
        return dispatch.Choice(
            stage.name,
            shapes,
            dispatch.choose(stage.name.split(" ")[0], named, reasons),
            dict(reasons),
            source="model" if named is None or rule is not None else "named",
            kernel=stage,
            estimate=rule or estimate,
        )

    def _named(self, reasons: Mapping[str, str | None]) -> str | None:
        """Returns the implementation named by the caller, "xla" if that has no kernel here, or None."""
        named = self.implementation
        is_known = named in get_args(dispatch.Implementation)
        return "xla" if is_known and named not in reasons else named

    def _measured(self, choice: dispatch.Choice, found: tables.Found) -> dispatch.Choice:
        """Returns `choice` with the fastest measured implementation and config that can run, if any."""
        named = self._named(choice.reasons)
        for ranked in found.ranking:
            implementation = ranked.implementation
            can_run = choice.reasons.get(implementation, "it is not known") is None
            if not can_run or named not in (None, implementation):
                continue
            legal: dict[str | None, Hashable] = {None: None}
            legal |= {
                tables.config_text(config): config
                for config in configs(choice.kernel, implementation, self.device, choice.operands)
            }
            if ranked.config in legal:
                return choice._replace(
                    implementation=implementation,
                    config=legal[ranked.config],
                    source="table" if found.exact else "neighbour",
                    measured=found,
                )
        return choice


@functools.lru_cache(maxsize=4096)
def _choice_of_shapes(
    runner: Runner,
    stage: Stage,
    shapes: Sequence[jax.ShapeDtypeStruct | None],
    precision: Any,
) -> dispatch.Choice:
    """Returns the implementation chosen for operands of known sizes, none of which is 0.

    A stage may read JAX's `precision` setting, so `precision` is part of the cache's key.
    """
    del precision
    reasons, estimate = stage.why_not(runner.device, *shapes), None
    if isinstance(stage, HasEstimate):
        able = [name for name, reason in reasons.items() if reason is None]
        estimate = stage.estimate(runner.device, able, *shapes)
        reasons = in_order(reasons, estimate)
    choice = runner._among(stage, shapes, reasons, estimate)
    found = runner.table.find(stage, shapes)
    return choice if found is None else runner._measured(choice, found)


def forget() -> None:
    """Clears the caches of choices and traces, for tests that change what a choice depends on."""
    _choice_of_shapes.cache_clear()
    cast(Any, _traced).clear_cache()
    traced_once.forget()
    mapped.forget()


def batched_rows(
    stage: Stage,
    call: Callable[..., Results],
    axis_size: int,
    in_batched: Sequence[Any],
    *operands: jax.Array | None,
) -> Results | None:
    """Implements `Stage.batched` for a stage over rows: the batch becomes one more leading axis.

    Returns None if an operand that all rows share is batched, or if the stage sums over rows.
    """
    axes = stage.axes(*operands)
    over_rows = [ROWS in letters for letters in axes.operands]
    shared_is_batched = any(
        is_batched(batched) and not rows
        for batched, rows in zip(in_batched, over_rows, strict=True)
    )
    sums_rows = any(letters is not None and ROWS not in letters for letters in axes.results)
    if shared_is_batched or sums_rows:
        return None
    batched = batch_all(axis_size, in_batched, operands)
    return call(
        stage,
        *(
            with_batch if rows else operand
            for with_batch, operand, rows in zip(batched, operands, over_rows, strict=True)
        ),
    )


@dataclass(frozen=True)
class _Call:
    """The static arguments of a kernel call: all but its operands."""

    stage: Stage
    runner: Runner
    batches: tuple[tuple[bool, ...], ...] = ()
    """Whether each operand has the batch, for each `jax.vmap` around the call, outermost first.

    The batches are the first axes of an operand, in this order.
    """

    def batched(self, in_batched: Sequence[bool], *operands: jax.Array | None) -> Results:
        """Runs the call under one more `jax.vmap`, whose batch is the first axis of these operands."""
        call = replace(self, batches=(tuple(in_batched), *self.batches))
        return traced_once.apply(call, _traced.trace(call, *operands), operands)

    def run(self, *operands: jax.Array | None) -> traced_once.Traced:
        """Runs the call on each device's shards; the batch axis of a `jax.vmap` may be sharded too."""
        entry = [
            None
            if operand is None
            else jax.ShapeDtypeStruct(operand.shape[sum(batched) :], operand.dtype)
            for operand, *batched in zip(operands, *self.batches, strict=True)
        ]
        axes = self.stage.axes(*entry)
        leading = sharding.leading_axes(_row_axes(entry, axes))
        taken = leading + "".join(axes.operands)
        batches = sharding.leading_axes(len(self.batches), taken)
        whole, parts = axes.split(self.runner.implementation)

        def spelt(letters: str, batched: Sequence[bool]) -> str:
            own = "".join(itertools.compress(batches, batched))
            return own + letters.replace(ROWS, leading)

        with dispatch.recorded(alone=True) as choices:
            results = sharding.per_shard(
                _OnShard(self, in_own_module=False),
                operands,
                operand_axes=[
                    spelt(letters, batched)
                    for letters, *batched in zip(axes.operands, *self.batches, strict=True)
                ],
                result_axes=[
                    None if letters is None else spelt(letters, [True] * len(batches))
                    for letters in axes.results
                ],
                whole=whole,
                parts=parts,
                in_own_module=_OnShard(self, in_own_module=True),
            )
        return traced_once.Traced(results, traced_once.Choices(choices))


_traced = jax.jit(_Call.run, static_argnums=0)
"""Traces a call; `jax.jit` caches the trace by the call, its operands' types and JAX's settings."""


@dataclass(frozen=True)
class _OnShard:
    """Runs a kernel call on one device's shards of the operands."""

    call: _Call
    in_own_module: bool
    """True if XLA lowers the call into a separate module, where cached `jax.jit`s cannot be reused."""

    def __call__(self, *operands: jax.Array | None) -> Results:
        if self.call.batches:
            return self._over_batches(_OnShard.__call__, operands)
        stage = self.call.stage
        axes = stage.axes(*operands)
        rows, matrices = _flatten_rows(operands, axes.operands)
        chosen = self._choose(matrices)
        # XLA's implementation of a `TakesRows` stage gets the caller's leading axes unmerged.
        as_they_are = chosen.implementation == "xla" and isinstance(stage, TakesRows)
        results = self.lower(chosen, *(operands if as_they_are else matrices))
        return results if as_they_are else _with_rows(results, axes.results, rows)

    def on_parts(self, names: Sequence[str], *operands: jax.Array | None) -> Results:
        """Runs the call on a device's shards when the contracted axes are split over devices."""

        def of_entry(on_shard: _OnShard, *operands: jax.Array | None) -> Results:
            return on_shard._entry_on_parts(names, operands)

        return self._over_batches(of_entry, operands)

    def _over_batches(self, of_entry: Callable[..., Results], operands: Operands) -> Results:
        """Runs `of_entry(self, *operands)`, with the stage's `batched` rule for each `jax.vmap`."""
        if not self.call.batches:
            return of_entry(self, *operands)
        without = replace(self, call=replace(self.call, batches=()))
        f = functools.partial(without._batchable, of_entry)
        for batched in reversed(self.call.batches):
            f = jax.vmap(f, in_axes=[0 if b else None for b in batched])
        return f(*operands)

    def _batchable(self, of_entry: Callable[..., Results], *operands: jax.Array | None) -> Results:
        @custom_vmap
        def call(*operands):
            return of_entry(self, *operands)

        @call.def_vmap
        def rule(axis_size, in_batched, *operands):
            def merged(stage: Stage, *operands: jax.Array | None) -> Results:
                on_shard = replace(self, call=replace(self.call, stage=stage))
                return on_shard._batchable(of_entry, *operands)

            results = self.call.stage.batched(merged, axis_size, in_batched, *operands)
            if results is None:
                results = one_by_one(call, in_batched, operands)
            return results, jax.tree.map(lambda _: True, results)

        return call(*operands)

    def _entry_on_parts(self, names: Sequence[str], operands: Operands) -> Results:
        stage: Any = self.call.stage

        def call(stage: Stage, *operands: jax.Array | None) -> Results:
            present = [operand for operand in operands if operand is not None]
            own = sharding.varying(*present)
            remaining = iter(sharding.vary(present, own))
            on_shard = replace(self, call=replace(self.call, stage=stage))
            own_operands = [None if operand is None else next(remaining) for operand in operands]
            results = self.lower(on_shard._choose(own_operands), *own_operands)
            # The types of a kernel's results do not state the mesh axes along which they vary.
            stated = iter(sharding.vary([r for r in results if r is not None], own))
            return tuple(None if result is None else next(stated) for result in results)

        def run(*matrices: jax.Array | None) -> Results:
            by = stage.axes(*operands).parts_by
            if by is not None:
                why = "devices share the axis that it sums over"
                reasons = dict.fromkeys(("pallas", "cuda"), why) | {by: None}
                dispatch.record(dispatch.Choice(stage.name, shapes_of(matrices), by, reasons))
            return stage.on_parts(names, call, *matrices)

        axes = stage.axes(*operands)
        rows, matrices = _flatten_rows(operands, axes.operands)
        return _with_rows(run(*matrices), axes.results, rows)

    @property
    def lower(self) -> Callable[..., Results]:
        """Returns the function of (chosen, *operands) that runs the chosen implementation."""
        in_module = self.in_own_module
        return lowering.in_own_module if in_module else lowering.jitted(self.call.stage.name)

    def _choose(self, operands: Operands) -> lowering.Chosen:
        """Returns the implementation to run, with its config or None for its default one."""
        stage, runner = self.call.stage, self.call.runner
        choice = runner.choice_on_shard(stage, *operands)
        if choice.source is not None:
            dispatch.record(choice._replace(by_partitioner=self.in_own_module))
        return lowering.Chosen(stage, choice.implementation, choice.config, runner.device)


def configs(
    stage: Stage, implementation: str, device: dispatch.Device, operands: Sequence[Any]
) -> Sequence[Hashable]:
    """Returns an implementation's configs, the default first; (None,) if it has only the default."""
    if not isinstance(stage, HasConfigs):
        return (None,)
    return stage.configs(implementation, device, *operands) or (None,)


def _row_axes(operands: Sequence[Any], axes: Axes) -> int:
    """Returns the number of leading axes that the letter `ROWS` names."""
    return next(
        (
            operand.ndim - (len(letters) - 1)
            for operand, letters in zip(operands, axes.operands, strict=True)
            if operand is not None and ROWS in letters
        ),
        0,
    )


def _flatten_rows(
    operands: Operands, axes: Sequence[str]
) -> tuple[tuple[int, ...], list[jax.Array | None]]:
    """Returns the sizes of the leading axes, and the operands with these axes merged into one."""
    rows: tuple[int, ...] = ()
    flat = []
    for operand, letters in zip(operands, axes, strict=True):
        if operand is not None and ROWS in letters:
            rows = _rows(operand.shape, letters)
            operand = operand.reshape(_merged(operand.shape, letters))
        flat.append(operand)
    return rows, flat


def _with_rows(
    results: Results, axes: Sequence[str | None], rows: tuple[int, ...]
) -> tuple[jax.Array | None, ...]:
    """Splits the merged leading axis of each result into axes of the sizes `rows` again."""
    return tuple(
        result
        if result is None or letters is None or ROWS not in letters
        else result.reshape(
            *result.shape[: letters.index(ROWS)], *rows, *result.shape[letters.index(ROWS) + 1 :]
        )
        for result, letters in zip(results, axes, strict=True)
    )


def _rows(shape: tuple[int, ...], letters: str) -> tuple[int, ...]:
    """Returns the sizes of an array's axes that the letter `ROWS` names."""
    start = letters.index(ROWS)
    return shape[start : len(shape) - (len(letters) - start - 1)]


def _merged(shape: tuple[int, ...], letters: str) -> tuple[int, ...]:
    """Returns the shape with the axes of `ROWS`, if there are any, merged into one."""
    if ROWS not in letters:
        return shape
    start, rows = letters.index(ROWS), _rows(shape, letters)
    return (*shape[:start], math.prod(rows), *shape[start + len(rows) :])
