"""Microseconds of kernels by CUPTI, for the tuner and the benchmarks."""

import collections
import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import profiler

SAMPLES = 12
"""Number of timed calls in a measurement; the benchmarks measure each implementation twice."""

COLD_BYTES = 256 * 2**20
"""Bytes of all input sets together: several times the L2 cache of any GPU, so that a set that is used
again is not in the cache."""


@dataclass(frozen=True)
class Samples:
    """Microseconds of each call, and the names and median microseconds of its kernels."""

    microseconds: list[float]
    kernels: list[tuple[str, float]]


def input_sets(bytes_per_set: int) -> int:
    """Returns the number of input sets to use in turn, so that none is still in the L2 when reused."""
    return min(16, max(2, math.ceil(COLD_BYTES / max(1, bytes_per_set))))


class InTurn:
    """Calls a function with each input set in turn, in the form that JAX's `profiler.measure` accepts.

    `measure` passes the same arguments to every iteration and requires a jax.stages.Wrapped. This class
    has the methods of one, so that torch's kernels can be timed in the same way as JAX's.
    """

    def __init__(self, call: Callable[..., Any], sets: Sequence[Any]):
        self._call = call
        self._sets = itertools.cycle(sets)

    def __call__(self) -> Any:
        return self._call(*next(self._sets))

    def trace(self) -> Any:
        raise NotImplementedError

    def lower(self) -> Any:
        raise NotImplementedError


def cupti(call: Callable[..., Any], sets: Sequence[Any]) -> Samples:
    """Returns the time of each call: the sum over its kernels, without copies by the copy engines.

    `measure` keeps all outputs alive, so that each call writes to other memory.
    """
    measured = profiler.measure(InTurn(call, sets), aggregate=False, iterations=SAMPLES)
    _, timings = measured()
    if timings is None:
        raise RuntimeError("CUPTI saw no kernel")
    names = [name for name, _ in timings[0]]
    medians = [1e3 * statistics.median(call[i][1] for call in timings) for i in range(len(names))]
    totals = [1e3 * sum(milliseconds for _, milliseconds in call) for call in timings]
    return Samples(totals, list(zip(names, medians, strict=True)))


# --- several programs in turn ---------------------------------------------------------------------

_FEWEST_ROUNDS, _MOST_ROUNDS = 4, 24


def interleaved(
    calls: Mapping[str, Callable[..., Any]], sets: Sequence[Any], seconds: float
) -> dict[str, Samples]:
    """Returns the kernel times of programs that run in turn, so that clocks and heat are the same.

    Each call takes the next input set. A small marker kernel, which none of the programs contains,
    separates the kernels of one call from the next. As many rounds run as fit in `seconds`, from
    `_FEWEST_ROUNDS` to `_MOST_ROUNDS`.

    Raises:
      RuntimeError: CUPTI saw no kernel, or not the same kernels in each round.
    """
    turns, flag = itertools.cycle(sets), jnp.zeros(1, jnp.int32)
    outputs: collections.deque[Any] = collections.deque()

    def take_turns() -> Any:
        for call in calls.values():
            outputs.append(call(*next(turns)))
            last = _marker(flag)
        # The outputs stay alive, as in `cupti`, so that calls write to different memory, up to
        # twice COLD_BYTES in all.
        while sum(a.nbytes for out in outputs for a in jax.tree.leaves(out)) > 2 * COLD_BYTES:
            outputs.popleft()
        return last

    jax.block_until_ready(take_turns())
    begin = time.perf_counter()
    jax.block_until_ready(take_turns())
    rounds = int(seconds / (time.perf_counter() - begin))
    rounds = min(_MOST_ROUNDS, max(_FEWEST_ROUNDS, rounds))
    measured = profiler.measure(InTurn(take_turns, [()]), aggregate=False, iterations=rounds)
    _, timings = measured()
    if timings is None:
        raise RuntimeError("CUPTI saw no kernel")
    by_round = [split_at_markers(timing, len(calls)) for timing in timings]
    result = {}
    for index, name in enumerate(calls):
        of_rounds = [parts[index] for parts in by_round]
        totals = [1e3 * sum(milliseconds for _, milliseconds in part) for part in of_rounds]
        medians = [
            (kernel, 1e3 * statistics.median(part[i][1] for part in of_rounds))
            for i, (kernel, _) in enumerate(of_rounds[0])
        ]
        result[name] = Samples(totals, medians)
    return result


@jax.jit
def _marker(flag: jax.Array) -> jax.Array:
    return jax.lax.population_count(flag)


def split_at_markers(
    timings: Sequence[tuple[str, float]], count: int
) -> list[list[tuple[str, float]]]:
    """Returns the kernels of each program, split at the marker kernel, which is the last of the list."""
    marker = timings[-1][0]
    parts: list[list[tuple[str, float]]] = [[]]
    for name, milliseconds in timings:
        if name == marker:
            parts.append([])
        else:
            parts[-1].append((name, milliseconds))
    if len(parts) != count + 1:
        raise RuntimeError(f"{count} programs ran, and {len(parts) - 1} markers {marker!r}")
    return parts[:-1]
