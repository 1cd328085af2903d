"""Times whole programs on 1, 2, 4, 8 ... devices, a part of `python -m benchmarks parallel`.

Weak scaling gives each device as much work as one has alone; strong scaling divides one problem. A row
has the time and the parallel efficiency; from the compiled program, the bytes that a device receives and
its memory; from the profiler on a GPU, the collectives' share of the kernels' time; and an estimate.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax

from benchmarks.run import peers
from benchmarks.whole import parallel_paper, parallel_programs, parallel_timing
from benchmarks.whole.parallel_programs import FULL, Build, Sizes

Row = dict[str, Any]
Kind = Literal["weak", "strong"]


@dataclass(frozen=True)
class Workload:
    name: str
    kind: Kind
    build: Build
    paper: Callable[[int], parallel_paper.Row] | None = None


def workloads(sizes: Sizes) -> list[Workload]:
    """Returns the workloads of weak and of strong scaling."""
    machine = parallel_paper.Machine()
    first = next(iter(sizes.vit))
    of_vit = {"vit-b16": parallel_paper.VIT_B, "vit-l16": parallel_paper.VIT_L}
    found = [
        Workload(
            f"{model} {variant}",
            "weak",
            functools.partial(parallel_programs.vit, sizes, model, variant, None),
            functools.partial(
                _paper_of_vit, of_vit[model], 2 if variant == "bfloat16" else 4, machine
            )
            if model in of_vit
            else None,
        )
        for model in sizes.vit
        for variant in ("xla", "zero1", "bfloat16", "pmap")
    ]
    found.append(
        Workload(
            f"{first} xla",
            "strong",
            functools.partial(parallel_programs.vit, sizes, first, "xla", sizes.vit_images),
        )
    )
    found.append(
        Workload(
            f"{sizes.language_model} fsdp",
            "weak",
            functools.partial(parallel_programs.language_model, sizes),
            lambda n: parallel_paper.fully_sharded(*parallel_paper.LANGUAGE_MODEL, n, machine),
        )
    )
    attention = functools.partial(
        functools.partial, parallel_programs.attention, sizes, tokens=sizes.tokens
    )
    found += [
        Workload(
            f"attention {method.split()[-1]}",
            "strong",
            attention(method),
            lambda n: parallel_paper.context_parallel(sizes.tokens, n, machine),
        )
        for method in ("all_to_all", "zigzag ring", "zigzag all_gather")
    ]
    found += [
        Workload(
            f"attention window {method}",
            "strong",
            attention(method, window=sizes.tokens // 32),
        )
        for method in ("all_to_all", "ring", "all_gather")
    ]
    found += [
        Workload(
            f"gated_mlp {variant}",
            "strong",
            functools.partial(parallel_programs.gated_mlp, sizes, variant),
            lambda n: parallel_paper.tensor_parallel(n, machine),
        )
        for variant in ("xla", "whole rows", "sequence")
    ]
    return found


def _paper_of_vit(of_one: tuple[float, float], wire: int, machine: Any, count: int) -> Any:
    return parallel_paper.data_parallel("", *of_one, count, machine, wire=wire)


def measure(
    sizes: Sizes, counts: Sequence[int], names: Sequence[str], save: Callable[[str, Row], None]
) -> None:
    """Times the workloads whose name contains one of `names`, or all, on each number of devices."""
    for workload in workloads(sizes):
        if names and not any(name in workload.name for name in names):
            continue
        alone = None
        for count in counts:
            row: Row = dict(model=workload.name, kind=workload.kind, gpus=count)
            try:
                row |= _timed(workload.build, jax.devices()[:count])
            except Exception as error:  # One workload that does not fit must not end the run.
                row["error"] = peers.describe(error)
            if "milliseconds" in row:
                # If the work does not fit on one device, the smallest count that ran is the reference.
                scale = 1 if workload.kind == "weak" else count
                alone = scale * row["milliseconds"] if alone is None else alone
                ideal = alone if workload.kind == "weak" else alone / count
                row["used"] = ideal / row["milliseconds"]
            if workload.paper is not None and sizes is FULL:
                paper = workload.paper(count)
                row["paper"] = dict(
                    collectives=1e3 * paper.collectives,
                    received=paper.received,
                    apart=paper.apart,
                    hidden=paper.hidden,
                )
            save("scaling", row)


def _timed(build: Build, devices: Sequence[Any]) -> Row:
    ready = parallel_timing.lowered(build, devices)()
    return ready.timed() | ready.counted() | ready.shares()


def line(row: Row) -> str:
    """Formats a row as a line of text."""
    head = f"scaling {row['model']:22} {row['kind']:6} {row['gpus']:2}"
    if "error" in row:
        return f"{head} {row['error']}"
    received = sum(row["received"].values()) / 1e6
    memory = row["peak"] / 1e9
    share = ""
    if "share" in row:
        share = f" collectives {row['share']:.0%}, {row['waits']:.2f} ms beside no other kernel"
    paper = row.get("paper")
    beside = (
        f"  on paper {paper['apart']:.0%} to {paper['hidden']:.0%}, {paper['received'] / 1e6:,.0f} MB"
        if paper
        else ""
    )
    return (
        f"{head} {row['milliseconds']:9.2f} ms {row['used']:6.1%} {received:10,.1f} MB received"
        f" {memory:7.2f} GB{share}{beside}"
    )


def draw(device: str, rows: Sequence[Row], path: Path) -> None:
    """Draws each workload's parallel efficiency over the number of devices."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), sharey=True, dpi=150)
    for axis, kind in zip(axes, ("weak", "strong"), strict=True):
        names = dict.fromkeys(row["model"] for row in rows if row["kind"] == kind)
        for name in names:
            points = [r for r in rows if (r["model"], r["kind"]) == (name, kind) and "used" in r]
            axis.plot([r["gpus"] for r in points], [r["used"] for r in points], "o-", label=name)
        axis.set(title=f"{kind} scaling on {device}", xlabel="devices", xscale="log", ylim=(0, 1.1))
        counts = sorted({row["gpus"] for row in rows})
        axis.set_xticks(counts, [str(count) for count in counts])
        axis.minorticks_off()
        if names:
            axis.legend(fontsize=7)
    axes[0].set_ylabel("share of the devices that is used")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
