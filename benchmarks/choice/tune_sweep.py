"""`python -m benchmarks.choice.tune_sweep`: measures an autotuning table for models and the sweep.

Each stage of these programs, forward and gradient, is measured in all its implementations, each in its
default config. The file in `--out` has the format of the shipped tables; a run appends to it, so an
interrupted one can be continued. Several processes lower and compile at the same time, but only one at a
time measures. `measured.jsonl` next to it has, for each stage, the code's choice and its rule.
"""

import argparse
import contextlib
import fcntl
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from benchmarks.run import peers
from benchmarks.sweep import configs, programs
from jaxfused import dispatch
from jaxfused.ops.linear import cublaslt
from jaxfused.runtime import cuda_library, table
from jaxfused.tuning import tuner
from jaxfused.tuning.bench import GpuBench

_BATCH = 10
"""Number of kernel calls that a process compiles before it measures them."""
_SLOWER = 1.05
"""Ratio of the chosen implementation's time to the fastest's above which the choice is wrong."""

# Tokens, width, heads and hidden features of models.
_VIT_S, _VIT_B, _VIT_L = (197, 384, 6, 1536), (197, 768, 12, 3072), (197, 1024, 16, 4096)
_GPT2, _LLAMA_1B, _LLAMA_8B = (1024, 768, 12, 3072), (2048, 2048, 32, 8192), (2048, 4096, 32, 14336)
_MODELS = [
    *((batch, model, "layer_norm") for model in (_VIT_S, _VIT_B, _VIT_L) for batch in (64, 256, 1)),
    *((batch, _GPT2, "layer_norm") for batch in (16, 4)),
    *((batch, model, "rms_norm") for model in (_LLAMA_1B, _LLAMA_8B) for batch in (1, 4)),
    # Decoding: one token for each of several requests.
    *(
        (batch, (1, *model[1:]), "rms_norm")
        for model in (_LLAMA_1B, _LLAMA_8B)
        for batch in (8, 64)
    ),
]
_IMAGES = ("conv", "group_norm", "batch_norm", "depthwise_conv", "max_pool", "upsample")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=250.0, help="default: %(default)s")
    parser.add_argument("--out", type=Path, required=True, help="the folder of the table")
    parser.add_argument("--workers", type=int, default=min(8, os.cpu_count() or 1))
    parser.add_argument("--seed", type=int, default=44)
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part is not None:
        _work(options)
        return 0
    if jax.default_backend() != "gpu":
        print("tune_sweep needs an NVIDIA GPU.")
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    given = [f"--{name}={getattr(options, name)}" for name in ("seconds", "out", "workers", "seed")]
    command = [sys.executable, "-m", "benchmarks.choice.tune_sweep", *given]
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    parts = [
        subprocess.Popen([*command, f"--part={part}"], env=environment)
        for part in range(options.workers)
    ]
    for part in parts:
        part.wait()
    _report(options.out, time.monotonic() - begin)
    return 0


# --- the measuring processes ----------------------------------------------------------------------


def _work(options: argparse.Namespace) -> None:
    """Measures every `workers`-th case, from `part` on, until the time is up."""
    device = dispatch.current_device()
    if cuda_library.why_unavailable() is None:
        cuda_library.register()
        cublaslt.why_unavailable()
    path = options.out / table.file_name(device)
    known = set(table.read(path, device)) if path.exists() else set()
    deadline = time.monotonic() + options.seconds
    pace, waiting = 0.0, _stages(options, device, known)
    while True:
        begin = time.monotonic()
        if begin + pace > deadline:
            return
        batch = list(itertools.islice(waiting, _BATCH))
        if not batch:
            return
        _measure(batch, options.out)
        if entries := tuner.entries_of(batch):
            table.write(path, device, entries)
        with open(options.out / "measured.jsonl", "a") as file:
            file.writelines(json.dumps(_record(stage)) + "\n" for stage in batch)
        pace = time.monotonic() - begin
        print(f"part {options.part}: {len(entries)} entries in {pace:.0f} s", flush=True)


def _stages(
    options: argparse.Namespace, device: dispatch.Device, known: set[table.Key]
) -> Iterator[tuner.TunedStage]:
    """Yields the kernel calls that have several implementations and are not yet in the table."""
    for config in list(_cases(options.seed))[options.part :: options.workers]:
        try:
            written = programs.of(config)
            arrays = jax.eval_shape(written.make_inputs, jax.eval_shape(lambda: jax.random.key(0)))
            whole = written.whole(written.ours, bool(written.differentiable))
            stages = tuner.stages_of(whole, arrays, device)
        except Exception as error:
            print(f"left out: {configs.to_line(config)}: {peers.describe(error)}", flush=True)
            continue
        for stage in stages:
            key = table.Key.of(stage.work.kernel, stage.work.operands)
            if key not in known and len(stage.order) > 1:
                known.add(key)
                yield stage


def _measure(stages: Sequence[tuner.TunedStage], folder: Path) -> None:
    """Measures the default config of each implementation of these kernel calls."""
    bench = GpuBench()
    try:
        # Compiling runs XLA's autotuning on the GPU: processes compile together, but measure alone.
        with _lock(folder, fcntl.LOCK_SH):
            for stage in stages:
                for candidate in stage.order:
                    bench.submit(stage.work, candidate)
            bench.wait()
        with _lock(folder, fcntl.LOCK_EX):
            for stage in stages:
                stage.add(bench.measure(stage.work, stage.order))
    finally:
        bench.close()


@contextlib.contextmanager
def _lock(folder: Path, kind: int) -> Iterator[None]:
    with open(folder / "lock", "w") as file:
        fcntl.flock(file, kind)
        yield


def _record(stage: tuner.TunedStage) -> dict[str, Any]:
    choice, estimate = stage.choice, stage.choice.estimate
    return {
        "stage": choice.stage,
        "statics": table.Key.of(choice.kernel, choice.operands).statics,
        "operands": [None if o is None else [str(o.dtype), *o.shape] for o in choice.operands],
        "chosen": choice.implementation,
        "rule": estimate.why if estimate is not None else None,
        "measured": {c.implementation: round(us, 2) for c, us in stage.microseconds.items()},
        "dropped": {c.implementation: why for c, why in stage.dropped.items()},
    }


# --- cases ----------------------------------------------------------------------------------------


def _cases(seed: int) -> Iterator[configs.Config]:
    """Yields the layers of usual models first, then the sweep's draws, operators in turn."""
    for batch, sizes, norm in _MODELS:
        yield from _layers(batch, *sizes, norm)
    names = [name for name in configs.OPERATORS if name != "fp8_mlp"]
    for index in range(200):
        # Image operators are drawn twice, because no model above has them.
        for name in (*names, *_IMAGES):
            yield configs.drawn(name, seed, index + 1000 * (name in _IMAGES))


def _layers(
    batch: int, tokens: int, width: int, heads: int, hidden: int, norm: str
) -> Iterator[configs.Config]:
    """Yields a transformer block's operators in bfloat16 over parameters of float32."""
    of_text = norm == "rms_norm"
    common: dict[str, Any] = dict(batch=batch, tokens=tokens, width=width, dtype="bfloat16")
    weights: dict[str, Any] = common | dict(param_dtype="float32", bias=not of_text)
    for residual in (False, True):
        yield configs.Norm(operator=norm, residual=residual, bias=not of_text, **common)
    mlp = configs.MLP(
        operator="gated_mlp" if of_text else "mlp",
        hidden=hidden,
        activation="silu" if of_text else "gelu_tanh",
        residual=False,
        save="preactivation",
        **weights,
    )
    yield mlp
    yield replace(mlp, residual=True)
    yield configs.Linear(out=width, activation=None, residual=True, **weights)
    yield configs.Linear(out=width, activation=None, residual=False, **weights)
    size = width // heads
    key_heads = heads // 4 if of_text and heads > 16 else heads
    groups = heads // key_heads
    projection: dict[str, Any] = dict(key_heads=key_heads, group=groups, head_size=size)
    yield configs.QKVProjection(
        norm=False, rope=of_text, interleaved=False, **projection, **weights
    )
    attention = configs.Attention(
        batch=batch, queries=tokens, keys=tokens, causal=norm == "rms_norm", dtype="bfloat16",
        **projection,
    )  # fmt: skip
    yield replace(attention, keys=2048, causal=False) if tokens == 1 else attention
    rope = configs.Rope(
        batch=batch, tokens=tokens, heads=heads, key_heads=key_heads, head_size=size,
        rotary_dim=size, dtype="bfloat16", interleaved=True, tables=True,
    )  # fmt: skip
    yield from (rope, replace(rope, interleaved=False)) if of_text else ()


# --- the report -----------------------------------------------------------------------------------


def _report(folder: Path, seconds: float) -> None:
    """Prints the chosen implementation's time relative to the fastest's, by kind of kernel call."""
    found: dict[str, list[tuple[float, dict[str, Any]]]] = {}
    for line in (folder / "measured.jsonl").read_text().splitlines():
        record = json.loads(line)
        times = record["measured"]
        if len(times) > 1 and record["chosen"] in times:
            ratio = times[record["chosen"]] / min(times.values())
            found.setdefault(record["stage"], []).append((ratio, record))
    count = sum(map(len, found.values()))
    print(f"{count} entries in {seconds:.0f} s, {count / seconds:.2f} a second")
    print(f"{'stage':40} entries  wrong  median  worst   (chosen over fastest)")
    for stage, items in sorted(found.items()):
        ratios = [ratio for ratio, _ in items]
        wrong = sum(ratio > _SLOWER for ratio in ratios)
        print(
            f"{stage:40} {len(items):7} {wrong:6} {statistics.median(ratios):7.3f}"
            f" {max(ratios):6.2f}"
        )
    worst = sorted((item for items in found.values() for item in items), key=lambda item: -item[0])
    for ratio, record in worst[:20]:
        shapes = [o for o in record["operands"] if o is not None]
        print(f"{ratio:6.2f} {record['stage']} {record['chosen']} of {record['measured']} {shapes}")


if __name__ == "__main__":
    raise SystemExit(main())
