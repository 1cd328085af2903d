"""Compiles, checks and times one case in the process that has the GPU."""

import itertools
import math
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.run import lowering, peers, timing
from benchmarks.run.lowering import Module
from benchmarks.sweep import configs, programs
from benchmarks.sweep.lowering import (
    COMPARE,
    INPUTS,
    OURS,
    STOCK,
    TRUTH,
    WHOLE,
    YARDSTICK,
    Lowered,
)
from benchmarks.sweep.program_parts import Programs
from jaxfused.tuning.timing import COLD_BYTES

MEMORY_LIMIT = 24 * 2**30
"""Bytes of memory beyond which a stock program is left out."""

_TRUTH_ROUNDING = 2.0**-18
"""Allowance for the error of the float32 truth, relative to its largest value."""

_AS_WRITTEN = {"xla_allow_excess_precision": False}
"""XLA's options for the low-precision reference, which must round wherever its formula does: by default
XLA leaves out roundings inside fusions."""

Entry = dict[str, Any]
Compiled = dict[str, Future[Any]]


# --- compile --------------------------------------------------------------------------------------


def compile_case(
    pool: ThreadPoolExecutor, config: configs.Config, lowered: Lowered, *, on_gpu: bool
) -> tuple[Compiled, dict[str, Compiled]]:
    """Compiles a case's programs in threads; returns futures: of shared programs, and by direction.

    Programs of a direction compile one after the other, ours last. XLA autotunes a product or fusion
    once in a process, and the config it selects varies between runs; so a product that two programs
    share has the same config in both.
    """
    quick = lowering.NO_AUTOTUNING if on_gpu else {}
    options = dict.fromkeys((INPUTS, TRUTH, COMPARE), quick) | {YARDSTICK: quick | _AS_WRITTEN}

    def compiling(name: str, module: Module) -> Callable[[], Any]:
        return partial(compile_module, module, options.get(name, {}))

    by_direction = {}
    for direction, modules in lowered.by_direction.items():
        ours_last = sorted(modules, key=lambda name: name == OURS)
        jobs = {name: compiling(name, modules[name]) for name in ours_last}
        by_direction[direction] = _one_after_the_other(pool, jobs)
    if on_gpu:
        written = programs.of(config)
        arrays = jax.eval_shape(written.make_inputs, jax.eval_shape(lambda: jax.random.key(0)))
        for direction, compiled in by_direction.items():
            for name, peer in written.peers.items():
                whole = written.whole(peer, direction == WHOLE)
                compiled[name] = pool.submit(_compile_here, whole, arrays)
    shared = {name: pool.submit(compiling(name, module)) for name, module in lowered.shared.items()}
    return shared, by_direction


def _one_after_the_other(
    pool: ThreadPoolExecutor, jobs: Mapping[str, Callable[[], Any]]
) -> Compiled:
    futures: Compiled = {name: Future() for name in jobs}

    def run_all() -> None:
        for name, job in jobs.items():
            try:
                futures[name].set_result(job())
            except Exception as error:
                futures[name].set_exception(error)

    pool.submit(run_all)
    return futures


def compile_module(module: Module, options: dict[str, Any] | None = None) -> Any:
    """Compiles a module that another process may have lowered."""
    return lowering.lowered(module).compile(compiler_options=options or None)


def _compile_here(f: Callable[..., Any], arrays: Sequence[Any]) -> Any:
    # cuDNN's attention has a partitioning rule in Python, which a serialised module cannot hold.
    return jax.jit(f).lower(*arrays).compile()


def program_text(compiled: Any) -> str:
    """Returns the optimised program without names and sources, which do not affect its speed."""
    text = compiled.as_text()
    text = text[re.search(r"^(%|ENTRY)", text, re.MULTILINE).start() :]  # type: ignore[union-attr]
    text = re.sub(r", metadata=\{[^}]*\}", "", text)
    # A computation's first line lists operands that its body names again.
    text = re.sub(r"^((?:ENTRY )?%\S+) \(.*\) -> ", r"\1 -> ", text, flags=re.MULTILINE)
    names: dict[str, str] = {}
    return re.sub(r"%[\w.\-]+", lambda m: names.setdefault(m[0], f"%{len(names)}"), text)


def memory(compiled: Any) -> int | None:
    """Returns the bytes of arguments, results and temporaries, as XLA plans them."""
    analysis = compiled.memory_analysis()
    if analysis is None:
        return None
    return int(
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        + analysis.temp_size_in_bytes
        - analysis.alias_size_in_bytes
    )


# --- check against the truth ----------------------------------------------------------------------


def judge(
    config: configs.Config,
    shared: Compiled,
    by_direction: Mapping[str, Compiled],
    *,
    seconds: float,
    on_gpu: bool,
) -> list[Entry]:
    """Returns one entry for each direction, which also says what failed."""
    entries = [
        {"operator": configs.label(config), "direction": direction, "case": configs.to_line(config)}
        for direction in by_direction
    ]
    try:
        name = INPUTS
        written = programs.of(config)
        sets = input_sets(shared[name].result(), written.weight_bytes, on_gpu=on_gpu)
        name = TRUTH
        truth = jax.block_until_ready(shared[name].result()(*sets[0]))
        # The low-precision reference may fail: XLA refuses jax.nn's float16 attention of one query,
        # for instance, with "Unsupported dot precision algorithm".
        name = YARDSTICK
        plain = jax.block_until_ready(shared[name].result()(*sets[0]))
    except Exception as error:
        why = f"{name}: {peers.describe(error)}"
        return [e | {"status": "raised", "why": why} for e in entries]
    results = []
    for entry, compiled in zip(entries, by_direction.values(), strict=True):
        begin = time.monotonic()
        try:
            entry |= _check(compiled, sets[0], plain, truth, written)
            if entry["status"] == "ok":
                entry |= _time(compiled, sets, seconds=seconds, on_gpu=on_gpu)
        except Exception as error:
            entry |= {"status": "raised", "why": peers.describe(error)}
        results.append(entry | {"seconds": round(time.monotonic() - begin, 2)})
    return results


def input_sets(make: Callable[[Any], Any], weight_bytes: int, *, on_gpu: bool) -> list[Any]:
    """Returns several sets of inputs for successive calls, so that no call finds its own in the L2."""
    first = make(jnp.int32(0))
    count = _count_of_sets(sum(a.nbytes for a in first), weight_bytes) if on_gpu else 2
    return jax.block_until_ready([first, *(make(jnp.int32(seed)) for seed in range(1, count))])


_COLD_WEIGHTS = 128 * 2**20
_MOST_SETS = 64


def _count_of_sets(set_bytes: int, weight_bytes: int) -> int:
    """Returns the number of input sets, chosen so that weights are read from memory as in a network.

    The weights of all sets then exceed twice an H200's L2. The number is smaller if `_MOST_SETS` bounds
    it, or if a call's other operands are large enough to evict the weights.
    """
    count = timing.input_sets(set_bytes)
    if not weight_bytes:
        return count
    wanted = math.ceil(_COLD_WEIGHTS / weight_bytes)
    held = math.ceil(4 * COLD_BYTES / set_bytes)
    return max(count, min(_MOST_SETS, wanted, held))


def _check(compiled: Compiled, operands: Any, plain: Any, truth: Any, written: Programs) -> Entry:
    """Compares our results with the truth; returns the largest error, and why it is too large."""
    outputs = compiled[OURS].result()(*operands)
    count = len(outputs)
    figures = np.array(compiled[COMPARE].result()(outputs, plain[:count], truth[:count]))
    if written.terms:
        figures[:, 2] = np.maximum(figures[:, 2], written.terms[:count])
    error, why = _worst(figures, written.units[:count] or [o.dtype for o in outputs])
    return {"error": error} | ({"status": "wrong", "why": why} if why else {"status": "ok"})


def _worst(figures: np.ndarray, dtypes: Sequence[Any]) -> tuple[float, str]:
    """Returns the largest error relative to the allowed one, and the results that exceed it."""
    shares, reasons = [], []
    for index, ((error, plain, largest, misplaced, excused), dtype) in enumerate(
        zip(figures, dtypes, strict=True)
    ):
        unit = _ulp(float(largest), dtype)
        allowed = 2 * (plain if np.isfinite(plain) else 0.0) + unit
        allowed += _TRUTH_ROUNDING * largest + excused
        shares.append(float(error / allowed))
        if misplaced:
            reasons.append(
                f"result {index}: {misplaced:.0f} values are not finite where they should"
            )
        elif not error <= allowed:
            reasons.append(
                f"result {index} ({dtype}): error {error:.3g}, allowed {allowed:.3g}"
                f" = 2 x {plain:.3g} of stock + {unit:.3g}; largest value {largest:.3g}"
            )
    return max(shares, default=0.0), "; ".join(reasons)


def _ulp(magnitude: float, dtype: Any) -> float:
    info = jnp.finfo(dtype)
    exponent = np.floor(np.log2(max(magnitude, float(info.smallest_normal))))
    return float(2.0 ** (exponent - info.nmant))


# --- time -----------------------------------------------------------------------------------------


def _time(compiled: Compiled, sets: Sequence[Any], *, seconds: float, on_gpu: bool) -> Entry:
    """Returns the microseconds of all programs that can run, and the bytes that XLA plans for each."""
    programs_by_name: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    sizes: dict[str, int | None] = {}
    for name, future in compiled.items():
        if name == COMPARE:
            continue
        # A peer that cannot run this case is left out.
        try:
            program = future.result()
            sizes[name] = memory(program)
            if name != OURS and (sizes[name] or 0) > MEMORY_LIMIT:
                raise MemoryError(f"takes {(sizes[name] or 0) / 2**30:.1f} GiB")
            jax.block_until_ready(program(*sets[0]))
        except Exception as error:
            left_out[name] = peers.describe(error)
        else:
            programs_by_name[name] = program
    entry: Entry = {"left_out": left_out, "memory": sizes}
    # Name of the form of stock, if any, that compiles to the same program as ours.
    text = program_text(programs_by_name[OURS])
    same = (n for n in programs_by_name if n.startswith(STOCK))
    same = (n for n in same if program_text(programs_by_name[n]) == text)
    entry["same_program"] = next(same, None)
    if on_gpu:
        return entry | _on_gpu(programs_by_name, sets, seconds)
    return entry | _on_host(programs_by_name, sets)


def _on_gpu(calls: Mapping[str, Callable[..., Any]], sets: Sequence[Any], seconds: float) -> Entry:
    note = {}
    try:
        samples = timing.interleaved(calls, sets, seconds)
    except RuntimeError as error:
        # If the programs' kernels cannot be told apart, each program is timed alone; clocks and heat may
        # then bias the comparison.
        note = {"note": f"not interleaved: {peers.describe(error)}"}
        samples = {name: timing.cupti(call, sets) for name, call in calls.items()}
    kernels = {
        name: [[kernel[:80], round(us, 2)] for kernel, us in s.kernels]
        for name, s in samples.items()
    }
    medians = {name: statistics.median(s.microseconds) for name, s in samples.items()}
    return {"microseconds": medians, "kernels": kernels} | note


def _on_host(calls: Mapping[str, Callable[..., Any]], sets: Sequence[Any]) -> Entry:
    """Returns times by the host's clock, for tests of the sweep without a GPU."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    turns = itertools.cycle(sets)
    for _ in range(3):
        for name, call in calls.items():
            begin = time.perf_counter()
            jax.block_until_ready(call(*next(turns)))
            times[name].append(1e6 * (time.perf_counter() - begin))
    return {"microseconds": {name: statistics.median(values) for name, values in times.items()}}
