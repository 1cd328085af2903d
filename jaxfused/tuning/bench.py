"""Compiles, checks and times the implementations and configs of a kernel on the local GPU."""

import functools
import os
import statistics
from collections.abc import Hashable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jaxfused import dispatch
from jaxfused.runtime import lowering, runner
from jaxfused.tuning import timing

_SECONDS = 0.1
"""Approximate seconds of timing for all candidates of a kernel, without the start of CUPTI."""
_ERROR = 4.0
"""Largest error of a result, as a multiple of the narrowest dtype's eps times the result's largest
magnitude.

Wrong results differ by much more, and another order of rounding by much less.
"""
_COARSEST = 2.0**-10
"""Smallest eps that is assumed: float16's, which float32 products in tf32 have too."""


class Candidate(NamedTuple):
    """An implementation of a kernel with a config."""

    implementation: str
    config: Hashable = None

    def __str__(self) -> str:
        config = "" if self.config is None else f" {self.config}"
        return f"{self.implementation!r}{config}"


@dataclass(frozen=True)
class Work:
    """A kernel, and the shapes of its operands on one device."""

    kernel: runner.Stage
    operands: tuple[jax.ShapeDtypeStruct | None, ...]
    device: dispatch.Device

    def candidates(self, implementation: str) -> list[Candidate]:
        """Returns the candidates of an implementation, the default config first."""
        configs = runner.configs(self.kernel, implementation, self.device, self.operands)
        return [Candidate(implementation, config) for config in configs]


class Bench(Protocol):
    """Interface of an object that measures candidates; tests implement it without a GPU."""

    def submit(self, work: Work, candidate: Candidate) -> None:
        """Begins to compile a candidate."""

    def wait(self) -> None:
        """Waits until all submitted candidates are compiled."""

    def measure(self, work: Work, candidates: Sequence[Candidate]) -> dict[Candidate, float | str]:
        """Returns the microseconds of submitted candidates, or why one was dropped.

        The results of the first candidate that runs are the reference for those of the others.
        """

    def close(self) -> None:
        """Cancels pending compilations."""


@dataclass
class GpuBench:
    """Measures on JAX's default GPU. It lowers in the calling thread and compiles in those of `pool`."""

    pool: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(os.cpu_count() or 1)
    )
    compiled: dict[tuple[Work, Candidate], Future[Any]] = field(default_factory=dict)
    inputs: dict[Work, Future[Any]] = field(default_factory=dict)
    errors: dict[Work, Future[Any]] = field(default_factory=dict)

    def submit(self, work: Work, candidate: Candidate) -> None:
        if work not in self.inputs:
            seed = jax.ShapeDtypeStruct((), jnp.uint32)
            self.inputs[work] = self._compile(jax.jit(_examples, static_argnums=0), work, seed)
            with lowering.jax_defaults("xla"):
                results = jax.eval_shape(_in_xla(work), *work.operands)
            self.errors[work] = self._compile(_largest_error, work, results, results)
        function = lowering.jitted(work.kernel.name)
        chosen = lowering.Chosen(work.kernel, *candidate, work.device)
        self.compiled[work, candidate] = self._compile(function, chosen, *work.operands)

    def _compile(self, function: Any, *args: Any) -> Future[Any]:
        try:
            lowered = function.lower(*args)
        except Exception as error:
            failed: Future[Any] = Future()
            failed.set_exception(error)
            return failed
        return self.pool.submit(lowered.compile)

    def wait(self) -> None:
        # All compilations end before: XLA's autotuning runs kernels, which would disturb a
        # measurement.
        futures.wait([*self.inputs.values(), *self.errors.values(), *self.compiled.values()])

    def measure(self, work: Work, candidates: Sequence[Candidate]) -> dict[Candidate, float | str]:
        try:
            make = self.inputs[work].result()
            sets = [make(jnp.uint32(0))]
            size = sum(a.nbytes for a in jax.tree.leaves(sets))
            sets += [make(jnp.uint32(seed)) for seed in range(1, timing.input_sets(size))]
            jax.block_until_ready(sets)
        except Exception as error:
            return dict.fromkeys(candidates, f"no operands: {_brief(error)}")
        result: dict[Candidate, float | str] = {}
        calls: dict[str, Any] = {}
        wanted = None
        for candidate in candidates:
            try:
                call = self.compiled[work, candidate].result()
                results = jax.block_until_ready(call(*sets[0]))
                wanted = results if wanted is None else wanted
                off = float(self.errors[work].result()(results, wanted))
            except Exception as raised:
                result[candidate] = _brief(raised)
            else:
                if off <= 1.0:
                    calls[str(candidate)] = call
                else:
                    result[candidate] = f"its results are off by {off:.3g} times what is allowed"
        del wanted
        times = _times(calls, sets)
        return result | {c: times[str(c)] for c in candidates if str(c) in times}

    def close(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)


def _examples(work: Work, seed: jax.Array) -> Sequence[jax.Array | None]:
    """Returns random operands: normal floats, unsigned integers of random bits, others of 0 and 1."""
    keys = iter(jax.random.split(jax.random.key(seed), 2 * len(work.operands)))

    def random(operand: Any) -> jax.Array:
        if jnp.issubdtype(operand.dtype, jnp.floating):
            return jax.random.normal(next(keys), operand.shape, operand.dtype)
        if jnp.issubdtype(operand.dtype, jnp.unsignedinteger):
            return jax.random.bits(next(keys), operand.shape, operand.dtype)
        return jax.random.bernoulli(next(keys), shape=operand.shape).astype(operand.dtype)

    with lowering.jax_defaults(""):
        if isinstance(work.kernel, runner.HasExamples):
            return tuple(work.kernel.examples(random, work.device, *work.operands))
        return tuple(None if operand is None else random(operand) for operand in work.operands)


def _in_xla(work: Work) -> Any:
    return lambda *operands: work.kernel.run("xla", work.device, *operands)


def _times(calls: Mapping[str, Any], sets: Sequence[Any]) -> dict[str, float | str]:
    """Returns the median microseconds of each call, or why it could not be timed."""
    if not calls:
        return {}
    try:
        samples = timing.interleaved(calls, sets, _SECONDS)
    except RuntimeError as error:
        if len(calls) == 1:
            return dict.fromkeys(calls, _brief(error))
        # If the markers did not separate the calls' kernels, each call is timed alone.
        alone = [_times({name: call}, sets) for name, call in calls.items()]
        return {name: time for times in alone for name, time in times.items()}
    return {name: statistics.median(s.microseconds) for name, s in samples.items()}


@functools.partial(jax.jit, static_argnums=0)
def _largest_error(work: Work, results: Any, wanted: Any) -> jax.Array:
    """Returns the largest error as a multiple of the allowed one; infinite if only one result is NaN."""
    axes = work.kernel.axes(*work.operands)
    sizes = {
        letter: size
        for letters, operand in zip(axes.operands, work.operands, strict=True)
        if operand is not None
        for letter, size in zip(letters, operand.shape, strict=True)
    }
    floats = [o.dtype for o in work.operands if o and jnp.issubdtype(o.dtype, jnp.floating)]
    tolerance = _ERROR * max(_COARSEST, *(float(jnp.finfo(dtype).eps) for dtype in floats))
    worst = jnp.float32(0.0)
    for letters, mine, theirs in zip(axes.results, results, wanted, strict=True):
        if letters is None:
            continue
        meant = tuple(slice(sizes.get(axes.padded.get(letter, ""))) for letter in letters)
        a, b = (array[meant].astype(jnp.float32) for array in (mine, theirs))
        finite = jnp.isfinite(b)
        largest = jnp.max(jnp.where(finite, jnp.abs(b), 0.0), initial=0.0)
        error = jnp.max(jnp.where(finite, jnp.abs(a - b), 0.0), initial=0.0)
        misplaced = jnp.any(jnp.isfinite(a) != finite)
        allowed = jnp.maximum(tolerance * largest, jnp.finfo(jnp.float32).tiny)
        worst = jnp.maximum(worst, jnp.where(misplaced, jnp.inf, error / allowed))
    return worst


def _brief(error: Exception) -> str:
    """Returns the type and first line of an error, at most 200 characters."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:200]
