"""`python -m benchmarks.choice.side_by_side BEFORE`: compares two checkouts on new cases of the sweep.

BEFORE is the folder of the other checkout, which has this program too. Each checkout lowers every case
in its own processes. Cases whose stages run the same implementations and configs in both count as equal;
the others are run in turns on this GPU, in one process, and compared in their results and times. A ratio
is the time before over the time now.
"""

import argparse
import os
import pickle
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.run import peers, timing
from benchmarks.sweep import configs, judge, programs, report
from benchmarks.sweep.lowering import DIRECTIONS, lower_ours
from jaxfused.ops.linear import cublaslt
from jaxfused.runtime import cuda_library

_BUILDS = ("before", "now")
_BATCH = 16


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", type=Path, help="the folder of the other checkout")
    parser.add_argument("operators", nargs="*", metavar="OPERATOR", help="default: all")
    parser.add_argument("--seconds", type=float, default=100.0, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=90, help="default: %(default)s")
    parser.add_argument("--count", type=int, default=12, help="cases an operator")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) // 2 - 1))
    parser.add_argument("--folder", type=Path, required=True, help="where programs are kept")
    parser.add_argument("--lower", metavar="BUILD", help=argparse.SUPPRESS)
    parser.add_argument("--part", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    lines = _lines(options)
    if options.lower:
        for index in range(options.part, len(lines), options.workers):
            _lower(options.folder / options.lower, index, lines[index])
        return 0
    options.folder.mkdir(parents=True, exist_ok=True)
    (options.folder / "cases").write_text("\n".join(lines))
    processes = [
        _process(options, build, part) for part in range(options.workers) for build in _BUILDS
    ]
    try:
        _compare(options, lines, processes)
    finally:
        for process in processes:
            process.kill()
    return 0


def _lines(options: argparse.Namespace) -> list[str]:
    """Returns the cases as JSON lines: the main process draws them, lowering processes read its file."""
    if options.lower:
        return (options.folder / "cases").read_text().splitlines()
    names = options.operators or list(configs.OPERATORS)
    return [
        configs.to_line(configs.drawn(name, options.seed, index))
        for index in range(options.count)
        for name in names
    ]


def _process(options: argparse.Namespace, build: str, part: int) -> "subprocess.Popen[bytes]":
    """Starts a process that lowers every `workers`-th case, from `part` on, with one checkout."""
    (options.folder / build).mkdir(exist_ok=True)
    folder = Path.cwd() if build == "now" else options.before.resolve()
    given = [f"--lower={build}", f"--part={part}", f"--workers={options.workers}"]
    given += [f"--folder={options.folder.resolve()}"]
    environment = os.environ | {
        "PYTHONPATH": str(folder),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    command = [sys.executable, "-m", "benchmarks.choice.side_by_side", ".", *given]
    return subprocess.Popen(command, cwd=folder, env=environment)


def _lower(folder: Path, index: int, line: str) -> None:
    for direction in DIRECTIONS["both"]:
        lowered = lower_ours(line, direction, "cuda")
        path = folder / f"{index}.{direction}"
        partial = path.with_suffix(".partial" + path.suffix)
        partial.write_bytes(pickle.dumps(lowered))
        partial.rename(path)


# --- the process with the GPU ---------------------------------------------------------------------


def _compare(options: argparse.Namespace, lines: Sequence[str], processes: Sequence[Any]) -> None:
    if cuda_library.why_unavailable() is None:
        # Modules lowered in other processes call CUDA kernels by names that this process must register.
        cuda_library.register()
        cublaslt.why_unavailable()
    deadline = time.monotonic() + options.seconds
    ratios: dict[tuple[str, str], list[tuple[float, str]]] = {}
    keys = [(i, direction) for i in range(len(lines)) for direction in DIRECTIONS["both"]]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for start in range(0, len(keys), _BATCH):
            batch = []
            for index, direction in keys[start : start + _BATCH]:
                pair = _modules(options.folder, index, direction, processes, deadline)
                if pair is None:
                    break
                key = configs.label(configs.from_line(lines[index])), direction
                modules, ways = zip(*pair, strict=True)
                raised = [module for module in modules if isinstance(module, str)]
                if len(raised) == 1:
                    print(f"one build raised: {direction} {lines[index]}: {raised}", flush=True)
                elif not raised and ways[0] == ways[1]:
                    ratios.setdefault(key, []).append((1.0, "same program"))
                elif not raised:
                    compiled = [pool.submit(judge.compile_module, module) for module in modules]
                    batch.append((key, lines[index], compiled))
            # Timing begins after all compilations, whose autotuning uses the GPU too.
            wait([future for _, _, compiled in batch for future in compiled])
            for key, line, compiled in batch:
                if time.monotonic() < deadline:
                    _time(key, line, compiled, ratios)
            if time.monotonic() > deadline:
                print(f"the time is up after {start} of {len(keys)} programs")
                break
    _print(ratios)


def _modules(
    folder: Path, index: int, direction: str, processes: Sequence[Any], deadline: float
) -> Any:
    """Returns a case's lowered modules of both checkouts; None if the deadline passes before."""
    paths = [folder / build / f"{index}.{direction}" for build in _BUILDS]
    while not all(path.exists() for path in paths):
        if time.monotonic() > deadline or all(p.poll() is not None for p in processes):
            return None
        time.sleep(0.05)
    return [pickle.loads(path.read_bytes()) for path in paths]


def _time(key: Any, line: str, compiled: Sequence[Any], ratios: Any) -> None:
    """Times both programs of a case in turns, and adds the ratio of their times to `ratios`."""
    try:
        written = programs.of(configs.from_line(line))
        make = jax.jit(lambda seed: written.make_inputs(jax.random.key(seed)))
        sets = judge.input_sets(make, written.weight_bytes, on_gpu=True)
        calls = dict(zip(_BUILDS, (future.result() for future in compiled), strict=True))
        results = [jax.tree.leaves(call(*sets[0])) for call in calls.values()]
        off = max(float(_difference(a, b)) for a, b in zip(*results, strict=True))
        samples = timing.interleaved(calls, sets, 0.1)
        before, now = (statistics.median(samples[name].microseconds) for name in _BUILDS)
    except Exception as error:
        print(f"not timed: {key[1]} {line}: {peers.describe(error)}", flush=True)
        return
    ratios.setdefault(key, []).append((before / now, f"{before:.1f} -> {now:.1f} us"))
    mark = "  LOSS" if before / now < report.NEAR and now - before > report.MICROSECONDS else ""
    text = f"{before / now:6.3f} {before:8.1f} {now:8.1f} us, results differ by {off:.1e}"
    print(f"{text} {key[1]} {line}{mark}", flush=True)


@jax.jit
def _difference(a: jax.Array, b: jax.Array) -> jax.Array:
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.max(jnp.abs(a - b), initial=0.0) / jnp.max(jnp.abs(a), initial=1e-30)


def _print(ratios: Any) -> None:
    print(f"{'operator':22}{'direction':18} cases  timed  median    min  losses")
    for (operator, direction), found in sorted(ratios.items()):
        values = [ratio for ratio, _ in found]
        timed = [how for _, how in found if how != "same program"]
        losses = sum(ratio < report.NEAR for ratio in values)
        print(
            f"{operator:22}{direction:18} {len(found):5} {len(timed):6}"
            f" {statistics.median(values):7.3f} {min(values):6.3f} {losses:7}"
        )


if __name__ == "__main__":
    raise SystemExit(main())
