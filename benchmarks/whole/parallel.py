"""Compares several GPUs with one of them: `python -m benchmarks parallel`.

By default the cases of `parallel_bars`: context, tensor and data parallel and FSDP against one device.
`--scaling` times whole programs on 1, 2, 4 and 8 devices and draws a chart; `--tiny` runs either
on a CPU's virtual devices; `--paper` prints estimates for more GPUs; `--without-gpu` counts memory and
bytes of an FSDP step, or of a named case, compiled for GPUs that are not there.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks.report import results
from benchmarks.whole import (
    parallel_absent,
    parallel_bars,
    parallel_paper,
    parallel_programs,
    parallel_scaling,
)
from benchmarks.without_gpu import target

NAME = "parallel"

Row = dict[str, Any]


def main(arguments: Sequence[str]) -> int:
    """Measures on one device and on all, and prints a table; returns the exit status."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks {NAME}", description=__doc__)
    names = [*parallel_bars.cases(parallel_programs.TINY)]
    parser.add_argument("--cases", nargs="*", choices=names, default=names)
    parser.add_argument("--case", choices=names, help="measure this case in this process")
    parser.add_argument("--out", type=Path, default=results.DIRECTORY)
    parser.add_argument(
        "--scaling", nargs="*", metavar="NAME", help="whole programs; names are parts of theirs"
    )
    parser.add_argument("--devices", nargs="*", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--tiny", action="store_true", help="small sizes, on any devices")
    parser.add_argument("--paper", action="store_true", help="only print the estimates")
    parser.add_argument(
        "--without-gpu",
        action="store_true",
        help="memory and bytes of FSDP, or of --case on two, for absent H200s",
    )
    options = parser.parse_args(arguments)
    sizes = parallel_programs.TINY if options.tiny else parallel_programs.FULL
    if options.without_gpu:
        return _absent(options, sizes)
    if options.paper:
        print(parallel_paper.table(parallel_paper.rows()))
        return 0
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if not options.tiny and (jax.default_backend() != "gpu" or jax.device_count() < 2):
        print(
            f"{NAME}: this needs two NVIDIA GPUs at least, but JAX sees {jax.device_count()} of"
            f" platform {jax.default_backend()!r}."
        )
        return 2
    if options.scaling is not None:
        return _scaling(options, sizes)
    if options.case is not None:
        return _case(options, sizes)
    flags = ["--out", str(options.out), *(["--tiny"] if options.tiny else [])]
    return parallel_bars.run_all(options.cases, parallel_bars.cases(sizes), flags)


def _case(options: argparse.Namespace, sizes: parallel_programs.Sizes) -> int:
    """Measures one case in this process."""
    section: Row = _machine() | {"devices": jax.device_count(), "rows": []}
    kind = jax.devices()[0].device_kind

    def save(row: Row) -> None:
        section["rows"].append(row)
        results.save_section(options.out, kind, f"{NAME} {options.case}", section)
        print(parallel_bars.line(row), flush=True)

    case = parallel_bars.cases(sizes)[options.case]
    return parallel_bars.run(options.case, case, jax.devices(), save)


def _absent(options: argparse.Namespace, sizes: parallel_programs.Sizes) -> int:
    """Compiles for absent H200s: FSDP of a few tokens on several counts of them, or a case on two."""
    if options.case is None:
        return parallel_absent.run(options.devices)
    if reason := target.why_unavailable():
        print(reason)
        return 2
    devices = target.prepare_host(2)
    case = parallel_bars.cases(sizes)[options.case]
    return parallel_bars.run(
        options.case, case, devices, lambda row: print(parallel_bars.line(row), flush=True)
    )


def _machine() -> Row:
    return {
        "date": results.now(),
        "machine": {
            "versions": results.versions(),
            "gpu_before": results.gpu_state(),
            "topology": results.topology(),
        },
    }


def _scaling(options: argparse.Namespace, sizes: parallel_programs.Sizes) -> int:
    """Measures whole programs on several numbers of devices, and draws a chart."""
    counts = sorted(count for count in options.devices if count <= jax.device_count())
    section: Row = _machine() | {"devices": counts, "scaling": []}
    kind = jax.devices()[0].device_kind

    def save(name: str, row: Row) -> None:
        section[name].append(row)
        path = results.save_section(options.out, kind, "parallel_scaling", section)
        parallel_scaling.draw(kind, section[name], path.with_name(path.stem + "-scaling.png"))
        print(parallel_scaling.line(row), flush=True)

    parallel_scaling.measure(sizes, counts, options.scaling, save)
    return 0
