"""tune: measures the implementations and configs of a program's operators, and stores the fastest."""

import importlib
import importlib.util
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from jaxfused import dispatch
from jaxfused.explanation import traced
from jaxfused.runtime import table
from jaxfused.tuning.bench import Bench, Candidate, GpuBench, Work

_TIE = 1.02
"""Ratio of two times up to which the default order decides, because measurements vary by as much."""
_SLOW = 1.5
"""Ratio to the fastest time above which only the default config of an implementation is measured."""
_KEPT = 4
"""Number of configs that are stored for an implementation: at other shapes the fastest may not be legal,
but a slower one."""
_SHARE = 0.005
"""Fraction of all kernels' time; a kernel that takes less is measured in its default configs only."""
_CONFIGS_A_ROUND = 2
"""Number of configs of each kernel that are measured in one round, so that no kernel waits for long."""
_RESERVE = 1.3
"""Factor by which the seconds of a candidate may grow from one round of measurements to the next."""


@dataclass
class TunedStage:
    """Measurements of a kernel at the shapes of its operands."""

    choice: dispatch.Choice
    """Implementation and config that were chosen before tuning."""
    count: int
    """Number of times that the program runs the kernel; trips of loops of known length are counted."""
    work: Work
    waiting: list[Candidate]
    """Candidates still to be measured, in this order."""
    order: list[Candidate]
    """All candidates, most promising first: the one chosen before tuning, then the default order."""
    microseconds: dict[Candidate, float] = field(default_factory=dict)
    dropped: dict[Candidate, str] = field(default_factory=dict)
    """Candidates that raised or returned wrong results, with the reason."""

    @property
    def has_choice(self) -> bool:
        """True if there is more than one candidate."""
        return len(self.order) > 1 or any(len(self.work.candidates(c[0])) > 1 for c in self.order)

    @property
    def before(self) -> float | None:
        """Microseconds of the candidate chosen before tuning, or None if it was not measured."""
        return self.microseconds.get(Candidate(self.choice.implementation, self.choice.config))

    @property
    def ranking(self) -> list[Candidate]:
        """Measured candidates, fastest first; those within `_TIE` of each other in default order."""
        left = [candidate for candidate in self.order if candidate in self.microseconds]
        result = []
        while left:
            limit = _TIE * min(self.microseconds[candidate] for candidate in left)
            first = next(c for c in left if self.microseconds[c] <= limit)
            left.remove(first)
            result.append(first)
        return result

    @property
    def best(self) -> list[Candidate]:
        """The ranking with at most `_KEPT` candidates of each implementation."""
        ranking = self.ranking
        names = [candidate.implementation for candidate in ranking]
        return [c for i, c in enumerate(ranking) if names[:i].count(c.implementation) < _KEPT]

    @property
    def total(self) -> float:
        """Microseconds of all runs of the kernel in the program, with the fastest candidate so far."""
        return self.count * min(self.microseconds.values(), default=0.0)

    @property
    def shapes(self) -> str:
        """Shapes and dtypes of the operands, for a report."""
        return ", ".join(f"{o.dtype}{list(o.shape)}" for o in self.choice.operands if o is not None)

    def add(self, measured: dict[Candidate, float | str]) -> None:
        """Adds measurements, scaled so that the first measured candidate has its earlier time again."""
        reference = next((c for c in self.order if c in self.microseconds), None)
        again = None if reference is None else measured.get(reference)
        scale = 1.0
        if reference is not None and isinstance(again, float) and again > 0:
            # The scale corrects for GPU clocks that differ between two measurements.
            scale = self.microseconds[reference] / again
        for candidate, result in measured.items():
            if isinstance(result, str):
                self.dropped[candidate] = result
            elif candidate != reference:
                self.microseconds[candidate] = scale * result

    def look_closer(self) -> None:
        """Adds the other configs of fast implementations to `waiting`, once defaults are measured."""
        best = min(self.microseconds.values(), default=0.0)
        fast = {
            c.implementation: time for c, time in self.microseconds.items() if time <= _SLOW * best
        }
        for implementation in sorted(fast, key=fast.__getitem__):
            self.waiting += [c for c in self.work.candidates(implementation) if c not in self.order]
        self.order += self.waiting


@dataclass(frozen=True)
class TuningReport:
    """The result of `tune`, whose `str` lists the tuned kernels."""

    device: dispatch.Device
    path: Path | None
    """File that was written, or None if there was nothing to write."""
    seconds: float
    """Seconds that tuning took."""
    stages: tuple[TunedStage, ...]

    def __str__(self) -> str:
        lines = [f"tuned {len(self.stages)} stages on {self.device.name} in {self.seconds:.0f} s:"]
        for stage in self.stages:
            times = f"{stage.count} x " if stage.count > 1 else ""
            lines.append(f"  {times}{stage.choice.stage}: {stage.shapes}")
            ranking = stage.ranking
            if ranking:
                before = "failed" if stage.before is None else f"{stage.before:.1f}"
                now = f"{before} -> {stage.microseconds[ranking[0]]:.1f} us"
                lines.append(f"      {now} by {ranking[0]}, of {len(ranking)} measured")
            lines += [f"      dropped {c}: {reason}" for c, reason in stage.dropped.items()]
        lines.append(f"  {'nothing was written' if self.path is None else self.path}")
        return "\n".join(lines)


def tune(
    f: Callable[..., Any],
    *args: Any,
    seconds: float = 50.0,
    path: Path | str | None = None,
    progress: bool = True,
) -> TuningReport:
    """Measures the operators of `f(*args)` on this GPU, so that later calls run the fastest ways.

    The function is traced, not run: each stage of an operator that it calls is measured by itself, with
    random operands of the shapes that its kernel sees. To tune the stages of gradients, pass a function
    that takes them, such as a training step. The measured choices are added to a file that this process
    and later ones read: `$XDG_CACHE_HOME/jaxfused/tuning/<device>.json`, or the same in `~/.cache`.
    `jaxfused.explain` says which choices come from it.

    First come the implementations, each with the config that it takes by itself, then the configs of
    those that are fast, in the stages that take longest. A candidate that raises, or whose results are
    not those of the default, is dropped. Candidates that take the same time, within 2 %, keep their
    order.

    All functions that JAX has compiled are compiled anew when they are called again, as what they
    contain may have changed (`jax.clear_caches`).

    Args:
      f: any function of JAX arrays, jitted or not.
      *args: its arguments; `jax.ShapeDtypeStruct` will do for arrays.
      seconds: of tuning, about: candidates that are being compiled at the end are still measured.
      path: a file to write instead; it is not read, and so does not change what runs.
      progress: whether to show the progress on standard error, by tqdm where that is installed.

    Returns:
      A `TuningReport`, to be printed.

    Raises:
      RuntimeError: there is no NVIDIA GPU, or the program runs in several processes.
      ValueError: there is a file that cannot be added to, because it is broken, or of another device
        or version.

    Example:
      >>> import jax, jax.numpy as jnp, jaxfused
      >>> def loss(x, scale):
      ...     return jnp.sum(jaxfused.rms_norm(x, scale).astype(jnp.float32))
      >>> x = jax.ShapeDtypeStruct((16384, 768), jnp.bfloat16)
      >>> scale = jax.ShapeDtypeStruct((768,), jnp.float32)
      >>> if jax.default_backend() == "gpu":
      ...     print(jaxfused.tune(jax.grad(loss), x, scale, seconds=10))

    Source: own work.
    """
    if jax.default_backend() != "gpu" or dispatch.current_device().compute_capability is None:
        raise RuntimeError(
            "tune: it measures on an NVIDIA GPU, but JAX would run on"
            f" {dispatch.current_device().name!r}; call it on the machine that the program will run on."
        )
    if jax.process_count() > 1:
        raise RuntimeError(
            f"tune: it measures in one process, but this is one of {jax.process_count()}; call it in a"
            " process of its own, with the shapes of one device's shards, and copy the file to all"
            " hosts."
        )
    bench = GpuBench()
    try:
        return run(f, args, bench, seconds=seconds, path=path, progress=progress)
    finally:
        bench.close()


def run(
    f: Callable[..., Any],
    args: Sequence[Any],
    bench: Bench,
    *,
    seconds: float,
    path: Path | str | None,
    progress: bool,
    clock: Callable[[], float] = time.monotonic,
) -> TuningReport:
    """Implements `tune` with any `Bench`."""
    begin = clock()
    device = dispatch.current_device()
    file = table.user_path(device) if path is None else Path(path)
    table.check_can_write(file, device)
    show = _Progress(seconds, progress)
    stages = stages_of(f, args, device)
    _measure(stages, bench, begin + seconds, clock, lambda text: show(clock() - begin, text))
    entries = entries_of(stages)
    written = None
    if entries:
        try:
            table.write(file, device, entries)
            written = file
        except OSError as error:
            # The report returns the measurements even if the file cannot be written.
            warnings.warn(f"tune: {file} could not be written ({error})", stacklevel=2)
    if written is not None and path is None:
        table.load.cache_clear()
        jax.clear_caches()
    show.close()
    return TuningReport(device, written, clock() - begin, tuple(stages))


def entries_of(stages: Sequence[TunedStage]) -> dict[table.Key, tuple[table.Ranked, ...]]:
    """Returns table entries for the kernels of which at least two candidates were measured."""
    return {
        table.Key.of(stage.work.kernel, stage.work.operands): tuple(
            table.Ranked(c.implementation, table.config_text(c.config), stage.microseconds[c])
            for c in stage.best
        )
        for stage in stages
        if len(stage.ranking) > 1
    }


def stages_of(
    f: Callable[..., Any], args: Sequence[Any], device: dispatch.Device
) -> list[TunedStage]:
    """Returns a program's kernels that have several candidates, one for each set of operand shapes."""
    stages: dict[table.Key, TunedStage] = {}
    choices: list[tuple[dispatch.Choice, int]] = []
    for left_or_run, runs in traced(f, *args)[0]:
        # `stages` has the kernels that would run if the operator had not left the call to XLA.
        left = [c._replace(implementation="xla", config=None) for c in left_or_run.stages]
        choices += [(choice, runs) for choice in left or [left_or_run]]
    for choice, runs in choices:
        if choice.kernel is None:
            continue
        key = table.Key.of(choice.kernel, choice.operands)
        if key in stages:
            continue
        work = Work(choice.kernel, tuple(choice.operands), device)
        can_run = [name for name, reason in choice.reasons.items() if reason is None]
        defaults = [work.candidates(name)[0] for name in can_run]
        # A config of None is replaced by the default config itself, since candidates contain it.
        if choice.config is None:
            choice = choice._replace(config=work.candidates(choice.implementation)[0].config)
        first = Candidate(choice.implementation, choice.config)
        order = list(dict.fromkeys([first, *defaults]))
        stages[key] = TunedStage(choice, runs, work, list(order), order)
    return [stage for stage in stages.values() if stage.has_choice]


def _measure(
    stages: Sequence[TunedStage],
    bench: Bench,
    deadline: float,
    clock: Callable[[], float],
    show: Callable[[str], None],
) -> None:
    """Measures in rounds over all kernels until no candidate is left or the time is up.

    The first round has all implementations of all kernels. Each later round has some configs of each
    kernel; kernels with the largest total time come first. This thread lowers a round while others
    compile, and then the round is measured.
    """
    pace, is_first = 0.0, True
    while any(stage.waiting for stage in stages):
        entries, submitted = [], 0
        total = sum(stage.total for stage in stages)
        for stage in sorted(stages, key=lambda stage: -stage.total):
            if not is_first and stage.total < _SHARE * total:
                stage.waiting.clear()
            batch: list[Candidate] = []
            count = len(stage.waiting) if is_first else _CONFIGS_A_ROUND
            while stage.waiting and len(batch) < count:
                # The reserved time is for measuring the candidates that are already submitted.
                if clock() + _RESERVE * pace * (submitted + 1) >= deadline:
                    break
                batch.append(stage.waiting.pop(0))
                bench.submit(stage.work, batch[-1])
                submitted += 1
                show(f"compiling {stage.choice.stage}")
            if batch:
                entries.append((stage, batch))
        if not entries:
            return
        lowered = clock()
        bench.wait()
        for stage, batch in entries:
            reference = [c for c in stage.order if c in stage.microseconds][:1]
            stage.add(bench.measure(stage.work, [*reference, *batch]))
            show(f"measured {stage.choice.stage}")
            if is_first:
                stage.look_closer()
        pace, is_first = (clock() - lowered) / submitted, False


class _Progress:
    """A tqdm bar of seconds if tqdm is installed and there is a terminal, else a line every 5 s."""

    def __init__(self, seconds: float, wanted: bool):
        self._wanted, self._last, self._bar = wanted, 0.0, None
        if wanted and sys.stderr.isatty() and importlib.util.find_spec("tqdm") is not None:
            form = "{desc:44.44} |{bar}| {n:.0f}/{total:.0f} s"
            self._bar = importlib.import_module("tqdm").tqdm(total=seconds, bar_format=form)

    def __call__(self, elapsed: float, text: str) -> None:
        if self._bar is not None:
            self._bar.n = min(elapsed, self._bar.total)
            self._bar.set_description_str(text)
        elif self._wanted and elapsed >= self._last + 5.0:
            self._last = elapsed
            print(f"tune: {elapsed:.0f} s, {text}", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
