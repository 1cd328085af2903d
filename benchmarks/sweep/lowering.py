"""Traces and lowers cases in several processes, because a process of Python uses one core for that.

The modules are sent to the process that has the GPU, which compiles them in threads.
"""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.run.lowering import Module, export, processes
from benchmarks.sweep import configs, programs
from jaxfused import dispatch
from jaxfused.runtime import runner

FORWARD, WHOLE = "forward", "forward+backward"
DIRECTIONS = {"forward": (FORWARD,), "forward+backward": (WHOLE,), "both": (FORWARD, WHOLE)}

INPUTS, TRUTH, YARDSTICK = "inputs", "truth", "yardstick"
OURS, STOCK, COMPARE = "ours", "stock", "compare"


@dataclass(frozen=True)
class Lowered:
    """The lowered modules of a case."""

    shared: Mapping[str, Module]
    """Modules of INPUTS, TRUTH and YARDSTICK (low-precision reference), the last two with gradients."""
    by_direction: Mapping[str, Mapping[str, Module]] = field(default_factory=dict)
    """Modules by direction and name: OURS, COMPARE, and "stock <form>" for each form."""


def lower(line: str, directions: tuple[str, ...], platform: str) -> Lowered:
    """Lowers the case that `line` describes, for the devices of `platform`."""
    config = configs.from_line(line)
    written = programs.of(config)
    module_of = partial(export, platform)
    arrays = jax.eval_shape(written.make_inputs, _KEY)
    yardstick = written.whole(written.plain(), with_gradient=True)
    true, plain = (jax.eval_shape(f, *arrays) for f in (written.in_float32(), yardstick))
    shared = {
        INPUTS: module_of(lambda seed: written.make_inputs(jax.random.key(seed)), _SEED),
        TRUTH: module_of(written.in_float32(), *arrays),
        YARDSTICK: module_of(yardstick, *arrays),
    }
    by_direction = {}
    for direction in directions:
        if direction == WHOLE and not written.differentiable:
            continue
        whole = partial(written.whole, with_gradient=direction == WHOLE)
        count = len(true) if direction == WHOLE else written.cotangents
        forms = {OURS: written.ours}
        forms |= {f"{STOCK} {name}": form for name, form in written.stock.items()}
        modules = {name: module_of(whole(form), *arrays) for name, form in forms.items()}
        kinked = getattr(config, "activation", None) == "relu"
        strict = written.cotangents if kinked else count
        figures = partial(_compare_judged, written.judged, strict=strict)
        modules[COMPARE] = module_of(figures, plain[:count], plain[:count], true[:count])
        by_direction[direction] = modules
    return Lowered(shared, by_direction)


def lower_ours(line: str, direction: str, platform: str) -> tuple[Module, list[str]]:
    """Lowers our program of a case; returns it, and each kernel's implementation and config."""
    written = programs.of(configs.from_line(line))
    if direction == WHOLE and not written.differentiable:
        return "it has no gradient", []
    arrays = jax.eval_shape(written.make_inputs, _KEY)
    with dispatch.recorded() as choices:
        module = export(platform, written.whole(written.ours, direction == WHOLE), *arrays)
    device = dispatch.current_device()
    ways = []
    for choice in choices:
        config = choice.config
        if config is None and choice.kernel is not None:
            config = runner.configs(choice.kernel, choice.implementation, device, choice.operands)[
                0
            ]
        ways.append(f"{choice.stage} {choice.operands} {choice.implementation} {config}")
    return module, ways


_ACROSS_A_KINK = 2.0**-22
"""Fraction of normally distributed float32 sums so near 0 that rounding may change their sign."""

_SEED = jax.ShapeDtypeStruct((), jnp.int32)
_KEY = jax.eval_shape(lambda: jax.random.key(0))


def _compare_judged(judged: Any, ours: Any, plain: Any, truth: Any, *, strict: int) -> jax.Array:
    return compare(judged(ours), judged(plain), judged(truth), strict)


def compare(ours: Any, plain: Any, truth: Any, strict: int) -> jax.Array:
    """Returns per result: error of ours and of plain, largest value, misplaced NaNs, allowance.

    A NaN or infinity is misplaced if either ours or the truth has it, but not both.

    From result number `strict` on, errors are root mean squares: where rounding changes the sign of a
    relu's input, a few gradients change completely. If a random fraction f of the inputs changes sign,
    gradients change by sqrt(f) times their root mean square, which is allowed.
    """
    rows = []
    for index, (mine, other, true) in enumerate(zip(ours, plain, truth, strict=True)):
        finite = jnp.isfinite(true)
        differences = [
            jnp.where(finite, jnp.abs(x.astype(jnp.float32) - true), 0.0) for x in (mine, other)
        ]
        if index < strict:
            errors = [jnp.max(d, initial=0.0) for d in differences]
            excused = jnp.float32(0.0)
        else:
            errors = [_root_mean_square(d) for d in differences]
            excused = _ACROSS_A_KINK**0.5 * _root_mean_square(jnp.where(finite, true, 0.0))
        largest = jnp.max(jnp.where(finite, jnp.abs(true), 0.0), initial=0.0)
        misplaced = jnp.sum(jnp.isfinite(mine) != finite).astype(jnp.float32)
        rows.append(jnp.stack([*errors, largest, misplaced, excused]))
    return jnp.stack(rows)


def _root_mean_square(x: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.sum(x**2) / max(1, x.size))


# --- worker processes -----------------------------------------------------------------------------


_ATTEMPTS = 2


class Workers:
    """Lowers cases in `count` processes, or in this one if that is 0.

    A process that dies ends the whole pool; a new pool then lowers the remaining cases.
    """

    def __init__(
        self, count: int, lines: Sequence[str], directions: tuple[str, ...], platform: str
    ):
        self._count, self._lines = count, lines
        self._lower = partial(lower, directions=directions, platform=platform)
        self._pool: ProcessPoolExecutor | None = None
        self._futures: dict[int, Future[Lowered]] = {}
        if count:
            self._start(range(len(lines)))

    def result(self, index: int) -> Lowered:
        """Returns the modules of a case when they are lowered; raises what lowering them raised."""
        if not self._count:
            return self._lower(self._lines[index])
        for attempt in range(_ATTEMPTS):
            try:
                return self._futures[index].result()
            except BrokenProcessPool:
                last = attempt == _ATTEMPTS - 1
                self._start(range(index + last, len(self._lines)))
        del self._futures[index]
        raise RuntimeError("a process died while it lowered this case, or one beside it; twice")

    def forget(self, index: int) -> None:
        """Drops the modules of a finished case to free their memory."""
        self._futures.pop(index, None)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _start(self, indices: Iterable[int]) -> None:
        self.close()
        self._pool = processes(self._count)
        for index in indices:
            future = self._futures.get(index)
            if future is None or not future.done() or future.exception() is not None:
                self._futures[index] = self._pool.submit(self._lower, self._lines[index])
