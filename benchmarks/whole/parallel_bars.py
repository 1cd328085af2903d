"""Holds programs on all devices against one device: the default of `python -m benchmarks parallel`.

Each case is a process with a time limit. It compiles its programs, compares what all devices compute
with what one does, and then times each: the slowest device alone over all of them, as a quotient for one
problem that they divide, and as a share where each device has as much work as one alone.
"""

import functools
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.run import peers
from benchmarks.whole import parallel_programs as programs
from benchmarks.whole.parallel_programs import Build, Sizes
from benchmarks.whole.parallel_timing import Ready, lowered

Row = dict[str, Any]
Projection = Callable[[], list[np.ndarray]]
"""A program's run; returns its results' products with a fixed vector along the last axis."""

ERROR = 1e-2
"""Largest difference from one device, as norms' quotient: twice that of two roundings to bfloat16."""


@dataclass(frozen=True)
class Variant:
    """A program for all devices."""

    build: Build
    bar: float = 0.0
    """Smallest quotient or share that is wanted; 0 for none."""
    expected: str = ""
    """The forecast, printed next to the result."""
    alone: Build | None = None
    """The program on one device if it is another than that of the case."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """XLA's compiler options."""


@dataclass(frozen=True)
class Case:
    """A program on one device, and its variants on all of them."""

    seconds: int
    """Time limit."""
    alone: Build
    variants: Mapping[str, Variant]
    is_weak: bool = False
    """True if each device has as much work as one alone."""
    jobs: int = 8
    """Programs that are compiled at the same time; 1 where XLA's autotuner chooses the products."""


def cases(sizes: Sizes) -> dict[str, Case]:
    """Returns the cases, those first whose bars matter most."""
    attention = functools.partial(
        functools.partial, programs.attention, sizes, tokens=sizes.sequence
    )
    windowed = functools.partial(attention, window=sizes.sequence // 8, documents=True)
    vit = functools.partial(functools.partial, programs.vit, sizes, next(iter(sizes.vit)))
    mlp = functools.partial(functools.partial, programs.gated_mlp, sizes)
    language_model = functools.partial(programs.language_model, sizes)
    found = {
        "context": Case(
            120,
            attention("all_gather"),
            {
                "all_to_all": Variant(attention("all_to_all"), 1.85, "1.87x"),
                "zigzag ring": Variant(attention("zigzag ring"), 1.85, "1.85x"),
                "zigzag all_gather": Variant(attention("zigzag all_gather"), 0, "1.78x"),
            },
        ),
        "context window": Case(
            100,
            windowed("all_gather"),
            {
                "all_to_all": Variant(windowed("all_to_all"), 1.7, "1.60 to 1.70x"),
                "ring": Variant(windowed("ring"), 0, "1.6x, halves of 0.54 and 0.46"),
                "zigzag all_gather": Variant(windowed("zigzag all_gather"), 0, "1.53x"),
            },
        ),
        "tensor": Case(
            100,
            mlp("xla"),
            {
                "xla": Variant(mlp("xla"), 1.88, "1.86x"),
                "stock": Variant(mlp("stock"), 0, "1.83x", alone=mlp("stock")),
                "whole rows": Variant(mlp("whole rows"), 0, "1.83x"),
            },
            jobs=1,
        ),
        "data": Case(
            190,
            vit("xla", None),
            {
                "xla": Variant(vit("xla", None), 0.965, "93.7 %"),
                "zero1": Variant(vit("zero1", None), 0.965, "95 %"),
                "shard_map bfloat16 last": Variant(
                    vit("shard_map bfloat16 last", None), 0.965, "97.5 %"
                ),
                "zero1 bfloat16 last": Variant(vit("zero1 bfloat16 last", None), 0.965, "98 %"),
                "shard_map last": Variant(vit("shard_map last", None), 0.965, "96 %"),
                "shard_map bfloat16": Variant(vit("shard_map bfloat16", None), 0.965, "95 %"),
            },
            is_weak=True,
        ),
        "fsdp": Case(
            170,
            language_model,
            {
                "fsdp": Variant(language_model, 0.93, "90 %"),
                "bfloat16": Variant(functools.partial(language_model, bfloat16=True), 0.93, "92 %"),
            },
            is_weak=True,
        ),
    }
    if "flash_attn3" not in peers.missing(["flash_attn3"]):
        found["context"].variants["flash-attn3-jax"] = Variant(  # type: ignore[index]
            attention("ring", attend=_flash_attn3), 0, "1.2x: contiguous, so one device has 3/4"
        )
    return found


def _flash_attn3(query, key, value):
    from flash_attn3_jax import flash_mha

    return flash_mha(query, key, value, is_causal=True)


def run_all(names: Sequence[str], chosen: Mapping[str, Case], flags: Sequence[str]) -> int:
    """Runs each case in a process of its own; returns the exit status, 1 if one failed."""
    failed = False
    for name in names:
        begin = time.monotonic()
        command = [sys.executable, "-m", "benchmarks", "parallel", "--case", name, *flags]
        try:
            status: Any = subprocess.run(command, timeout=chosen[name].seconds).returncode
        except subprocess.TimeoutExpired:
            status = f"stopped after its {chosen[name].seconds} s"
        failed |= status != 0
        print(f"{name}: {time.monotonic() - begin:.0f} s, status {status}", flush=True)
    return int(failed)


def run(name: str, case: Case, devices: Sequence[Any], save: Callable[[Row], None]) -> int:
    """Measures a case, or for absent devices compiles it; returns 1 if a result is wrong or missing."""
    begin = time.monotonic()
    is_here = devices[0] in jax.devices()
    # Each device is timed alone, because devices are not equally fast.
    alone = {
        f"alone {i}{kind}": (build, [device], {})
        for kind, build in (
            ("", case.alone),
            *((f" {n}", v.alone) for n, v in case.variants.items() if v.alone),
        )
        for i, device in enumerate(devices if is_here else devices[:1])
    }
    every = {n: (v.build, devices, v.options) for n, v in case.variants.items()}
    times: dict[str, float] = {}
    truths: dict[str, list[np.ndarray]] = {}
    is_wrong = False
    for label, found in _compiled({**alone, **every}, case.jobs):
        row: Row = dict(case=name, model=label, devices=1 if label in alone else len(devices))
        row["seconds"] = time.monotonic() - begin
        variant = case.variants.get(label)
        if isinstance(found, Exception):
            row["error"] = peers.describe(found)
        else:
            ready, project = found
            try:
                row |= ready.counted()
                if is_here:
                    arrays = project()
                    # Stock is compared with stock on one device: XLA rounds it otherwise than ours.
                    other = next(
                        (n for n, v in case.variants.items() if v.alone and n in label), ""
                    )
                    row["differs"] = difference(arrays, truths.setdefault(other, arrays))
                    row |= ready.timed()
                    times[label] = row["milliseconds"]
                if is_here and variant is not None:
                    kind = f" {label}" if variant.alone else ""
                    slowest = max(times[f"alone {i}{kind}"] for i in range(len(devices)))
                    row["x"] = slowest / times[label]
                    row |= dict(bar=variant.bar, expected=variant.expected, weak=case.is_weak)
                    row |= ready.shares()
            except Exception as error:
                row["error"] = peers.describe(error)
        is_wrong |= "error" in row or not row.get("differs", 0.0) <= ERROR
        save(row)
    return int(is_wrong)


def _compiled(
    builds: Mapping[str, tuple[Build, Sequence[Any], Mapping[str, Any]]], jobs: int
) -> Iterator[tuple[str, tuple[Ready, Projection] | Exception]]:
    """Yields each program once all are compiled; others take the products tuned for the first."""
    with ThreadPoolExecutor(jobs) as pool:
        futures: dict[str, Future[tuple[Ready, Projection]]] = {}
        first: Future[Any] | None = None
        for label, (build, devices, options) in builds.items():
            try:
                # The rest is traced while the first compiles.
                futures[label] = pool.submit(_ready, lowered(build, devices, options), first)
                first = first or futures[label]
            except Exception as error:
                yield label, error
    # No reference is kept, so that a program's operands are freed after it ran.
    first = None
    while futures:
        label, future = next(iter(futures.items()))
        del futures[label]
        error = future.exception()
        yield label, error if isinstance(error, Exception) else future.result()
        del future


def _ready(compile: Callable[[], Ready], first: Future[Any] | None) -> tuple[Ready, Projection]:
    """Compiles a program, and what projects its results, once `first` is done."""
    if first is not None:
        first.exception()
    ready = compile()
    return ready, projection(ready)


def projection(ready: Ready) -> Projection:
    """Compiles what projects a program's results; an absent device runs nothing."""

    @jax.jit
    def project(tree: Any) -> Any:
        def of_leaf(a: jax.Array) -> jax.Array:
            wide = a.astype(jnp.float32)
            return jnp.sum(wide * jnp.cos(jnp.arange(a.shape[-1], dtype=jnp.float32)), axis=-1)

        return [of_leaf(a) for a in jax.tree.leaves(tree) if a.ndim and a.size]

    program, compiled = ready.program, ready.compiled
    shapes = jax.tree.map(
        lambda a, sharding: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding),
        compiled.out_info,
        compiled.output_shardings,
    )
    is_here = ready.mesh.devices.flat[0] in jax.devices()
    projecting = project.lower(program.judged(shapes)).compile() if is_here else project

    def run() -> list[np.ndarray]:
        arrays = [np.asarray(a) for a in jax.device_get(projecting(program.judged(ready.call())))]
        if program.order is None:
            return arrays
        return [a[:, np.argsort(program.order)] for a in arrays]

    return run


def difference(found: Sequence[np.ndarray], truth: Sequence[np.ndarray]) -> float:
    """Returns the largest norm of an array's difference from the truth over the truth's norm.

    A thousandth of the largest array's norm is added to the latter: gradients to attention's key biases
    are zero but for rounding.
    """
    if [a.shape for a in found] != [a.shape for a in truth]:
        raise ValueError(f"{len(found)} arrays of other shapes than one device's {len(truth)}")
    norms = [float(np.linalg.norm(b)) for b in truth]
    least = 1e-3 * max(norms)
    differences = [float(np.linalg.norm(a - b)) for a, b in zip(found, truth, strict=True)]
    return max(d / (norm + least) for d, norm in zip(differences, norms, strict=True))


def line(row: Row) -> str:
    """Formats a row as a line of text."""
    head = f"[{row['seconds']:3.0f} s] {row['case']:14} {row['model']:23}"
    if "error" in row:
        return f"{head} {row['error']}"
    received = sum(row["received"].values()) / 1e6
    text = f"{row['peak'] / 1e9:6.2f} GB {received:7,.0f} MB received"
    if "milliseconds" not in row:
        return f"{head} {text}"
    differs = f"differs {row['differs']:.1e}{'' if row['differs'] <= ERROR else ' WRONG'}"
    text = f"{row['milliseconds']:8.2f} ms  {text}  {differs}"
    if "x" not in row:
        return f"{head} {text}"
    shown = "{:.1%}" if row["weak"] else "{:.3f}x"
    against = f", must {shown.format(row['bar'])}" if row["bar"] else ""
    share = ""
    if "share" in row:
        share = (
            f"  collectives {row['collectives']:.2f} ms, {row['waits']:.2f} beside no other kernel;"
            f" other kernels {row['computes']:.2f}"
        )
    note = row.get("note", "")
    return f"{head} {text}  {shown.format(row['x'])}{against} (expected {row['expected']}){share}{note}"
