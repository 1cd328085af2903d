"""Compiles, checks and times the cases of one file; a row records its failure, and the run goes on."""

import contextlib
import itertools
import os
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.run import lowering, peers, timing
from benchmarks.run.case import LABELS, LESS, Arrays, Case, Function

_ROUNDS = 2
_FIRST, _TOGETHER = 4, 8
"""Cases that are compiled before the first of them is timed, at first and later."""
_Row = dict[str, Any]


def run(
    cases: Sequence[Case],
    chosen: Collection[str],
    *,
    budget: float,
    save: Callable[[list[dict[str, Any]]], None],
    elsewhere: Sequence[lowering.Futures] = (),
) -> None:
    """Measures `chosen` (ours and peers) on every case; `save` gets all results after each case.

    Nothing compiles while a case is timed, because XLA tunes on the GPU. Other processes may go on
    lowering then, for which `elsewhere` stands: kernel times do not depend on the host.

    After `budget` seconds the remaining cases are measured without torch.compile, which is slow.
    """
    begin = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - begin:5.0f} s] {text}", flush=True)

    results: list[dict[str, Any]] = []
    executables: list[dict[str, Future[Any]]] = []
    for number, case in enumerate(cases):
        if not executables:
            batch = slice(number, number + (_TOGETHER if number else _FIRST))
            say(f"compiling {len(cases[batch])} cases")
            executables = compile_all(cases[batch], chosen, elsewhere[batch])
            say("compiled")
        skipped = {name: reason for name, reason in case.skipped.items() if name in chosen}
        if (
            "torch_compile" in case.torch
            and "torch_compile" in chosen
            and time.monotonic() - begin > budget
        ):
            skipped["torch_compile"] = f"the budget of {budget:.0f} s was spent"
        rows = _run_case(case, {*chosen} - {*skipped}, executables.pop(0), skipped)
        results.append(
            {
                "case": case.name,
                "shape": list(case.shape),
                "dtype": case.dtype,
                "bytes": case.bytes,
                "flops": case.flops,
                "default": case.default,
                "bars": [vars(bar) for bar in case.bars],
                "rows": rows,
            }
        )
        save(results)
        say(f"{number + 1}/{len(cases)} {case.name} {list(case.shape)}: {_summary(rows)}")


def _summary(rows: dict[str, _Row]) -> str:
    """Returns a line of progress: each implementation's microseconds, or why it has none."""
    parts = []
    for name, row in rows.items():
        short = next(k for k in ("microseconds", "wrong", "failed", "skipped") if k in row)
        value = f"{row[short]:.1f}" if short == "microseconds" else short
        parts.append(f"{LABELS.get(name, name)} {value}")
    return ", ".join(parts)


# --- compile --------------------------------------------------------------------------------------


def compile_all(
    cases: Sequence[Case], chosen: Collection[str], elsewhere: Sequence[lowering.Futures] = ()
) -> list[dict[str, Future[Any]]]:
    """Compiles each case's JAX functions, its "truth" and its "inputs" in parallel threads.

    This thread lowers what no other process does, first. Programs of the same text are compiled after
    each other, so that XLA tunes their products once.
    """
    result: list[dict[str, Future[Any]]] = [{} for _ in cases]
    first: dict[str, Future[Any]] = {}
    # Some of the threads only wait for the program with the same text.
    with ThreadPoolExecutor(2 * (os.cpu_count() or 1)) as pool:
        submit = partial(_submit, pool, first)
        later: list[Callable[[], None]] = []
        for number, (case, futures) in enumerate(zip(cases, result, strict=True)):
            key = jax.random.key(0)
            shapes = jax.eval_shape(case.make_inputs, key)
            futures["inputs"] = submit(_lower(case.make_inputs, (key,)), tuned=False)
            truth = in_float64(case.truth)
            futures["truth"] = submit(_lower(truth, shapes), x64=True, tuned=False)
            modules = elsewhere[number] if elsewhere else {}
            for name in [n for n in case.jax if n in {*chosen} - {*case.skipped}]:
                lower = _lower(case.jax[name], shapes, modules.get(name), case.in_place)

                def start(futures=futures, name=name, lower=lower) -> None:
                    futures[name] = submit(lower)

                later.append(start) if name in modules else start()
        for start in later:
            start()
    return result


def _lower(
    f: Function, shapes: Any, module: Future[lowering.Module] | None = None, in_place: int = 0
) -> Callable[[], Any]:
    """Returns a function that lowers `f`, or takes the module of it where that could be made."""

    def lower() -> Any:
        with contextlib.suppress(Exception):
            if module is not None:
                return lowering.lowered(module.result())
        return jax.jit(f, donate_argnums=range(in_place)).lower(*shapes)

    return lower


def _submit(
    pool: ThreadPoolExecutor,
    first: dict[str, Future[Any]],
    lower: Callable[[], Any],
    *,
    x64: bool = False,
    tuned: bool = True,
) -> Future[Any]:
    def compile_in_thread(lowered: Any, options: Any, same: Future[Any] | None) -> Any:
        if same is not None:
            wait([same])
        with jax.enable_x64(x64):
            return lowered.compile(compiler_options=options)

    # An implementation's error belongs to its row and must not end the run.
    try:
        with jax.enable_x64(x64):
            lowered = lower()
    except Exception as error:
        failed: Future[Any] = Future()
        failed.set_exception(error)
        return failed
    text = lowered.as_text()
    on_gpu = jax.default_backend() == "gpu"
    # Convolutions are tuned: cuDNN may have none in float64 that runs untuned.
    tuned = tuned or not on_gpu or "stablehlo.convolution" in text
    options = None if tuned else lowering.NO_AUTOTUNING
    future = pool.submit(compile_in_thread, lowered, options, first.get(text))
    first.setdefault(text, future)
    return future


def in_float64(f: Function) -> Function:
    # One-byte numbers are quantised values and stay as they are.
    def widened(a: jax.Array) -> jax.Array:
        is_wide = jnp.issubdtype(a.dtype, jnp.floating) and a.dtype.itemsize > 1
        return a.astype(jnp.float64) if is_wide else a

    return lambda *inputs: f(*map(widened, inputs))


# --- check ----------------------------------------------------------------------------------------


@jax.jit
def _distance(output: jax.Array, truth: jax.Array) -> jax.Array:
    """Returns the largest relative error of a row, or of a whole vector; NaN if any value is NaN.

    A row's error is divided by its norm, or by the root mean square of all rows' norms if that is
    larger: the gradient of a query that sees one key is 0.
    """
    axis = -1 if truth.ndim > 1 else None
    wide = jnp.promote_types(truth.dtype, jnp.float32)  # The bits of float8 are uint8.
    output, truth = output.astype(wide), truth.astype(wide)
    difference = jnp.linalg.norm(output - truth, axis=axis)
    length = jnp.linalg.norm(truth, axis=axis)
    usual = jnp.sqrt(jnp.mean(length**2))
    return jnp.max(difference / jnp.maximum(jnp.maximum(length, usual), 1e-30))


def distance(outputs: Any, truth: Any) -> float:
    """Returns the largest distance over all outputs; infinite if their number or shapes differ."""
    outputs, truth = jax.tree.leaves(outputs), jax.tree.leaves(truth)
    if [o.shape for o in outputs] != [t.shape for t in truth]:
        return float("inf")
    with jax.enable_x64(True):
        errors = [float(_distance(o, t)) for o, t in zip(outputs, truth, strict=True)]
    return float("nan") if any(e != e for e in errors) else max(errors)


# --- time -----------------------------------------------------------------------------------------


def make_sets(make_inputs: Callable[[jax.Array], Arrays], count: int | None = None) -> list[Arrays]:
    """Returns sets of random inputs; by default as many that none is in the L2 when it is used again."""
    first = make_inputs(jax.random.key(0))
    count = count or timing.input_sets(sum(a.nbytes for a in first))
    more = [make_inputs(jax.random.key(seed)) for seed in range(1, count)]
    return jax.block_until_ready([first, *more])


def _run_case(
    case: Case,
    chosen: Collection[str],
    executables: dict[str, Future[Any]],
    skipped: dict[str, str],
) -> dict[str, _Row]:
    try:
        sets = make_sets(executables["inputs"].result(), case.sets)
        rows, clocks = _admit(case, chosen, executables, sets)
    except Exception as error:
        return {
            name: {"failed": f"no inputs or truth: {peers.describe(error)}"} for name in case.jax
        }
    rows |= {name: {"skipped": reason} for name, reason in skipped.items()}

    rounds: dict[str, list[_Row]] = {name: [] for name in clocks}
    for _ in range(_ROUNDS):
        for name, clock in clocks.items():
            if "failed" in rows[name]:
                continue
            try:
                rounds[name].append(clock())
            except Exception as failure:
                rows[name] = {"failed": peers.describe(failure)}
    for name in clocks:
        if "failed" not in rows[name]:
            rows[name] |= _combine(rounds[name])
    return rows


def _admit(
    case: Case,
    chosen: Collection[str],
    executables: dict[str, Future[Any]],
    sets: Sequence[Arrays],
) -> tuple[dict[str, _Row], dict[str, Callable[[], _Row]]]:
    """Runs every implementation once; returns rows, and timers of those whose result is right."""
    prepared: dict[str, Callable[[], tuple[Function, Callable[[], _Row]]]] = {}
    for name in case.jax:
        if name in chosen:
            prepared[name] = partial(_prepare_jax, executables[name], sets, case.in_place)
    for name, build in case.torch.items():
        if name in chosen:
            prepared[name] = partial(_prepare_torch, case, build, sets)

    truth = executables["truth"].result()(*sets[0])
    rows: dict[str, _Row] = {}
    clocks: dict[str, Callable[[], _Row]] = {}
    for name, prepare in prepared.items():
        try:
            call, clock = prepare()
            outputs = call(*sets[0])
            error = 0.0 if name in LESS else distance(outputs, truth)
        except Exception as failure:
            rows[name] = {"failed": peers.describe(failure)}
            continue
        if error <= case.error_limit:
            rows[name] = {} if name in LESS else {"error": error}
            clocks[name] = clock
        else:
            rows[name] = {"wrong": f"relative error {error:.3g}, limit {case.error_limit:.3g}"}
    return rows, clocks


def _prepare_jax(
    executable: Future[Any], sets: Sequence[Arrays], in_place: int
) -> tuple[Function, Callable[[], _Row]]:
    compiled = executable.result()
    calls = [_InPlace(compiled, arrays, in_place) for arrays in sets] if in_place else []

    def clock() -> _Row:
        if in_place:
            return {"cupti": timing.cupti(_InPlace.again, [(call,) for call in calls])}
        return {"cupti": timing.cupti(compiled, sets)}

    return lambda *first: calls[0].again().kept if in_place else compiled(*first), clock


class _InPlace:
    """A function that overwrites its leading inputs, a copy of `arrays`, at each call."""

    def __init__(self, compiled: Function, arrays: Arrays, count: int):
        self._compiled, self._others = compiled, arrays[count:]
        self.kept = jax.tree.map(jnp.copy, arrays[:count])

    def again(self) -> "_InPlace":
        self.kept = self._compiled(*self.kept, *self._others)
        return self

    def block_until_ready(self) -> None:
        """Waits for the last call, as the arrays of the earlier ones are gone."""
        jax.block_until_ready(self.kept)


def _prepare_torch(
    case: Case, build: Callable[[], Function], sets: Sequence[Arrays]
) -> tuple[Function, Callable[[], _Row]]:
    import torch

    function = build()

    def tensors_of(arrays: Arrays) -> tuple[Any, ...]:
        tensors = [torch.from_dlpack(a).detach() for a in arrays]
        for tensor in tensors[: case.differentiable]:
            tensor.requires_grad_()
        return tuple(tensors)

    def call(*args: Any) -> Any:
        with torch.set_grad_enabled(case.differentiable > 0):
            return function(*args)

    def call_on_jax(*args: jax.Array) -> Any:
        outputs = call(*tensors_of(args))
        torch.cuda.synchronize()
        return jax.tree.map(lambda t: jnp.from_dlpack(t.detach().contiguous()), outputs)

    tensor_sets = [tensors_of(arrays) for arrays in sets]

    def clock() -> _Row:
        samples: _Row = {"events": timing.torch_graph(call, tensor_sets)}
        # Without the events' time the row fails; CUPTI's time is used only if it is lower.
        try:
            samples["cupti"] = timing.torch_cupti(call, tensor_sets)
        except Exception as error:
            samples["note"] = f"no CUPTI time: {peers.describe(error)}"
        torch.cuda.empty_cache()
        return samples

    return call_on_jax, clock


def _combine(rounds: Sequence[_Row]) -> _Row:
    """Returns a row: the median of all samples by CUPTI or by CUDA events, whichever is smaller."""
    by_clock: dict[str, list[list[float]]] = {}
    for clock in ("cupti", "events"):
        if all(clock in r for r in rounds):
            by_clock[clock] = [r[clock].microseconds for r in rounds]
    samples = {clock: list(itertools.chain(*parts)) for clock, parts in by_clock.items()}
    medians = {clock: statistics.median(values) for clock, values in samples.items()}
    clock = min(medians, key=lambda name: medians[name])
    row: _Row = {
        "microseconds": medians[clock],
        "clock": clock,
        "rounds": [statistics.median(part) for part in by_clock[clock]],
        "least": min(samples[clock]),
        "most": max(samples[clock]),
        "samples": len(samples[clock]),
        "by_clock": medians,
    }
    if "cupti" in medians:
        row["kernels"] = rounds[0]["cupti"].kernels
    if notes := {r["note"] for r in rounds if "note" in r}:
        row["note"] = "; ".join(sorted(notes))
    return row
