"""Microseconds per call: CUPTI's kernel times, and events around replays of a CUDA graph."""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental.mosaic.gpu import profiler

from jaxfused.tuning.timing import SAMPLES, InTurn, Samples, cupti, input_sets, interleaved

__all__ = ["Samples", "cupti", "input_sets", "interleaved", "kernels", "steps"]
__all__ += ["torch_cupti", "torch_graph", "wall"]

_GRAPH_MILLISECONDS = 2.0
_WARM_UP_STEPS = 3
_ROUND_MILLISECONDS = 1500.0


def kernels(call: Callable[[], Any]) -> list[tuple[str, float]]:
    """Returns (name, microseconds) of each kernel of one call, in the order in which they ran."""
    _, timings = profiler.measure(InTurn(call, [()]), aggregate=False)()
    if timings is None:
        raise RuntimeError("CUPTI saw no kernel")
    return [(name, 1e3 * milliseconds) for name, milliseconds in timings]


def torch_cupti(call: Callable[..., Any], sets: Sequence[Any]) -> Samples:
    """Times a torch function as `cupti` does."""
    import torch

    def synchronized(*args: Any) -> Any:
        outputs = call(*args)
        torch.cuda.synchronize()
        return outputs

    return cupti(synchronized, sets)


def torch_graph(call: Callable[..., Any], sets: Sequence[Any]) -> Samples:
    """Times a CUDA graph of one call per input set, at least 8 calls, replayed between two events.

    The graph hides the host's time for a launch; the gap between two kernels remains.
    """
    import torch

    calls = list(itertools.islice(itertools.cycle(sets), max(8, len(sets))))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for args in sets[:2]:
            call(*args)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        # All outputs stay alive, so that no call overwrites those of an earlier call.
        outputs = [call(*args) for args in calls]

    def milliseconds(replays: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    milliseconds(1)
    replays = max(1, math.ceil(_GRAPH_MILLISECONDS / milliseconds(1)))
    result = [1e3 * milliseconds(replays) / (replays * len(calls)) for _ in range(SAMPLES)]
    del outputs
    return Samples(result, [])


def wall(call: Callable[..., Any], sets: Sequence[Any]) -> Samples:
    """Returns the host's time of many calls in flight, divided by their number: for long copies only."""
    jax.block_until_ready(call(*sets[0]))
    calls, result = 24, []
    for _ in range(SAMPLES):
        turns = list(itertools.islice(itertools.cycle(sets), calls))
        start = time.perf_counter()
        jax.block_until_ready([call(*args) for args in turns])
        result.append(1e6 * (time.perf_counter() - start) / calls)
    return Samples(result, [])


def steps(run: Callable[[int], None]) -> dict[str, Any]:
    """Times training steps on the host; `run(n)` takes n steps and waits for the last.

    Returns milliseconds a step: the median of the rounds, each of about 1.5 s.
    """

    def milliseconds(count: int) -> float:
        start = time.perf_counter()
        run(count)
        return 1e3 * (time.perf_counter() - start) / count

    milliseconds(_WARM_UP_STEPS)
    count = max(1, round(_ROUND_MILLISECONDS / milliseconds(_WARM_UP_STEPS)))
    rounds = [milliseconds(count) for _ in range(3)]
    return {"milliseconds": statistics.median(rounds), "rounds": rounds, "steps": count}
