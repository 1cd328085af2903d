"""Whole training steps against stock Flax and torch: `python -m benchmarks end_to_end`.

It measures time, memory and every kernel of a step of ViT-B/16, ViT-L/16, a U-Net, ConvNeXt-T and
ResNet-50 on random images, in bfloat16 with float32 parameters, AdamW and clipping by the global norm.
Models with "answers" and a batch size in their names run inference; they, networks of other libraries,
and those that have bars (evoformer, resnet-50-128), are measured only if --models names them.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from benchmarks.report import plot, results
from benchmarks.run import ceilings, peers, timing
from benchmarks.whole import (
    end_to_end_adopted,
    end_to_end_fused,
    end_to_end_jax,
    end_to_end_report,
    end_to_end_torch,
)
from benchmarks.whole.end_to_end_jax import Program, Workload
from benchmarks.whole.end_to_end_report import LABELS

Row = dict[str, Any]

TORCH = {
    "vit-b16": ("vit_base_patch16_224",),
    "vit-l16": ("vit_large_patch16_224",),
    "unet": (end_to_end_torch.UNET,),
    "convnext-t": ("convnext_tiny",),
    "resnet-50": ("resnet50",),
    "resnet-50-gn": ("resnet50_gn",),
    **dict.fromkeys(
        ("unet-answers-1", "unet-answers-16"),
        (end_to_end_torch.UNET, "--answers", "--image-size", "512"),
    ),
    **dict.fromkeys(
        ("convnext-t-answers-1", "convnext-t-answers-64"), ("convnext_tiny", "--answers")
    ),
    **dict.fromkeys(("resnet-50-answers-1", "resnet-50-answers-64"), ("resnet50", "--answers")),
}
"""Arguments of `benchmarks.whole.end_to_end_torch`, by model: timm's name of the network, and flags."""

_KERNELS_KEPT = 40
_BY_NAME = ("ours-copies", "fused")
"""Variants that are measured only if --variants names them."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    # Without JAX's preallocation torch can use the rest of the memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if jax.default_backend() != "gpu":
        print(
            "The benchmarks need an NVIDIA GPU, but JAX sees only"
            f" {jax.devices()[0].device_kind!r}; install jax[cuda13] on a machine that has one."
        )
        return 2

    begin = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - begin:5.0f} s] {text}", flush=True)

    gpu = jax.devices()[0].device_kind
    known = end_to_end_jax.workloads() | _on_request()
    chosen = [workload for name, workload in known.items() if name in options.models]
    section: dict[str, Any] = {
        "date": results.now(),
        "commit": results.commit(),
        "machine": {"versions": results.versions(), "gpu_before": results.gpu_state()},
        "ceilings": ceilings.measure(),
        "models": [
            {
                "model": workload.name,
                "batch": jax.eval_shape(workload.make_batch, jax.random.key(0))[0].shape[0],
                "flops": workload.flops(),
                "rows": {},
            }
            for workload in chosen
        ],
    }

    def save(model: str, variant: str, row: Row) -> None:
        rows = next(m["rows"] for m in section["models"] if m["model"] == model)
        rows[variant] = row
        results.save_section(options.out, gpu, end_to_end_report.NAME, section)
        say(f"{model} {LABELS[variant]}: {end_to_end_report.short(row)}")

    for number, (workload, model) in enumerate(zip(chosen, section["models"], strict=True)):
        if workload.must is not None:
            chosen[number] = checked(workload, model, save)
    say("compiling")
    run_jax(chosen, options.variants, save)
    if "torch" in options.variants:
        for workload, model in zip(chosen, section["models"], strict=True):
            late = time.monotonic() - begin > options.budget
            skipped: Row = {"skipped": f"the budget of {options.budget:.0f} s was spent"}
            if workload.name in TORCH:
                name, *flags = TORCH[workload.name]
                row = skipped if late else _run_torch(name, model["batch"], flags)
                save(workload.name, "torch", row)
    section["machine"]["gpu_after"] = results.gpu_state()
    section["seconds"] = time.monotonic() - begin
    path = results.save_section(options.out, gpu, end_to_end_report.NAME, section)
    written = results.load(path)["benchmarks"][end_to_end_report.NAME]
    end_to_end_report.print_report(written)
    chart = plot.chart_path(options.out, gpu, end_to_end_report.NAME)
    end_to_end_report.draw(gpu, written, chart)
    say(str(path))
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {end_to_end_report.NAME}", description=__doc__
    )

    def names(known: Sequence[str]) -> Callable[[str], list[str]]:
        def parse(text: str) -> list[str]:
            given = text.split(",")
            if unknown := [name for name in given if name not in known]:
                raise argparse.ArgumentTypeError(
                    f"{', '.join(unknown)} is not known; known are {', '.join(known)}"
                )
            return given

        return parse

    models = end_to_end_jax.workloads()
    steps = [name for name, workload in models.items() if not workload.answers]
    for flag, known, default in (
        ("--models", [*models, *_on_request()], steps),
        ("--variants", list(LABELS), [v for v in LABELS if v not in _BY_NAME]),
    ):
        parser.add_argument(
            flag, type=names(known), default=default, metavar="NAME,...", help=", ".join(known)
        )
    parser.add_argument("--out", type=Path, default=results.DIRECTORY)
    parser.add_argument(
        "--budget",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="no measurement of torch begins later (default %(default).0f)",
    )
    return parser.parse_args(arguments)


def _on_request() -> dict[str, Workload]:
    return end_to_end_adopted.workloads() | end_to_end_fused.workloads()


# --- JAX ------------------------------------------------------------------------------------------


def checked(workload: Workload, model: Row, save: Callable[[str, str, Row], None]) -> Workload:
    """Adds bars and errors to `model`; returns the workload, without `fuse` if its gradients are off."""
    errors = end_to_end_fused.errors(workload)
    model |= {"must": workload.must, "aim": workload.aim, "errors": errors}
    # A NaN is no 0.
    if errors["excess"] == 0:
        return workload
    reason = (
        f"wrong: gradients' relative error {errors['fused']:.3g}, stock's {errors['stock']:.3g}"
    )
    save(workload.name, "fused", {"failed": reason})
    programs = {name: build for name, build in workload.programs.items() if name != "fused"}
    return replace(workload, programs=programs)


@dataclass(frozen=True)
class Compiled:
    """A variant that is ready to run."""

    init: Any
    step: Any
    seconds: float
    """Seconds that XLA took to compile the step."""

    @property
    def planned_bytes(self) -> int:
        """Device memory that XLA plans for a step: inputs, outputs and temporaries."""
        m = self.step.memory_analysis()
        sizes = (m.argument_size_in_bytes, m.output_size_in_bytes, m.temp_size_in_bytes)
        return sum(sizes) - m.alias_size_in_bytes


def run_jax(
    workloads: Sequence[Workload],
    variants: Sequence[str],
    save: Callable[[str, str, Row], None],
) -> None:
    """Measures each variant in JAX; `save` gets the model, the variant and its row.

    The allocator's peak is that of the process. Programs run in ascending order of memory, so that each
    peak is the program's own.
    """
    keys = [(w, variant) for w in workloads for variant in w.programs if variant in variants]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        futures = {(w.name, v): _submit(pool, w.programs[v], w) for w, v in keys}
    ready: list[tuple[Workload, str, Compiled]] = []
    for workload, variant in keys:
        try:
            ready.append((workload, variant, futures[workload.name, variant].result()))
        except Exception as error:
            save(workload.name, variant, {"failed": peers.describe(error)})
    for workload, variant, compiled in sorted(ready, key=lambda entry: entry[2].planned_bytes):
        try:
            row = _measure(workload, compiled)
        except Exception as error:
            row = {"failed": peers.describe(error)}
        save(workload.name, variant, row)


def _submit(
    pool: ThreadPoolExecutor, build: Callable[[], Program], workload: Workload
) -> Future[Compiled]:
    """Traces and lowers a program in this thread, and compiles it in another."""
    key = jax.random.key(0)
    try:
        program = build()
        init = jax.jit(program.init).lower(key)
        shapes = jax.eval_shape(program.init, key), jax.eval_shape(workload.make_batch, key)
        step = jax.jit(program.step, donate_argnums=0).lower(*shapes)
    except Exception as error:
        failed: Future[Compiled] = Future()
        failed.set_exception(error)
        return failed

    def compile_both() -> Compiled:
        begin = time.monotonic()
        compiled = step.compile()
        seconds = time.monotonic() - begin
        return Compiled(init.compile(), compiled, seconds)

    return pool.submit(compile_both)


def _measure(workload: Workload, compiled: Compiled) -> Row:
    device = jax.devices()[0]
    batch = jax.block_until_ready(jax.jit(workload.make_batch)(jax.random.key(1)))
    state = jax.block_until_ready(compiled.init(jax.random.key(2)))
    # On a CPU, memory_stats() returns None.
    before = (device.memory_stats() or {}).get("peak_bytes_in_use", 0)
    row, step = timed_steps(compiled.step, state, batch)
    row |= {"planned_bytes": compiled.planned_bytes, "compile_seconds": compiled.seconds}
    peak = (device.memory_stats() or {}).get("peak_bytes_in_use", 0)
    if peak > before:
        row["peak_bytes"] = peak
    return row | kernel_times(step, compiled.step)


def timed_steps(executable: Any, state: Any, batch: Any) -> tuple[Row, Callable[[], jax.Array]]:
    """Times steps by the host's clock; returns the times, and a function that runs one more step."""
    losses = []

    def step() -> jax.Array:
        nonlocal state
        state, loss = executable(state, batch)
        return loss

    def run(count: int) -> None:
        for _ in range(count):
            loss = step()
        jax.block_until_ready((state, loss))
        losses.append(float(loss))

    return timing.steps(run) | {"losses": losses}, step


def kernel_times(step: Callable[[], jax.Array], executable: Any) -> Row:
    """Times one step's kernels; if CUPTI does not work, returns a note that says why."""
    try:
        timed = timing.kernels(step)
    except Exception as error:
        return {"note": f"no kernel times: {peers.describe(error)}"}
    return summed(timed, sources(executable.as_text()))


def summed(timed: Sequence[tuple[str, float]], source: dict[str, str]) -> Row:
    """Sums milliseconds by kind of kernel, and lists the kernels that take longest, largest first.

    An operation that all layers have is one entry, with its count, microseconds and source: the number
    that XLA appends to a kernel's name, and that of Flax's module in the source, are dropped.
    """
    kinds: dict[str, float] = {}
    times: dict[tuple[str, str], list[float]] = {}
    for name, microseconds in timed:
        kind = end_to_end_report.kind(name)
        kinds[kind] = kinds.get(kind, 0.0) + microseconds / 1e3
        module = re.sub(r"_\d+(?=/|$)", "", source.get(name, ""))
        times.setdefault((re.sub(r"(_\d+)+$", "", name), module), []).append(microseconds)
    kernels = [
        {"name": name, "source": module, "count": len(each), "microseconds": sum(each)}
        for (name, module), each in times.items()
    ]
    kernels.sort(key=lambda kernel: -kernel["microseconds"])
    return {"kinds": kinds, "kernels": kernels[:_KERNELS_KEPT]}


def sources(hlo: str) -> dict[str, str]:
    """Returns the op_name (path in the Python program) of each HLO instruction, by kernel name."""
    found = re.findall(r'^\s*(?:ROOT )?%?([\w.\-]+) = .*?op_name="([^"]*)"', hlo, re.MULTILINE)
    return {re.sub(r"[.\-]", "_", name): source for name, source in found}


# --- torch ----------------------------------------------------------------------------------------


def _run_torch(model: str, batch: int, flags: Sequence[str] = ()) -> Row:
    """Runs `benchmarks.whole.end_to_end_torch` in another process, which has its own memory peak."""
    command = [sys.executable, "-m", "benchmarks.whole.end_to_end_torch", model, str(batch), *flags]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    except subprocess.TimeoutExpired as error:
        return {"failed": peers.describe(error)}
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or ["no message"])[-1][:300]}
    row: Row = json.loads(done.stdout.splitlines()[-1])
    return row | summed(row.pop("kernels", []), {})
