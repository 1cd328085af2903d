"""The whole training steps as text and as a chart, from the result file alone."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import report

NAME = "end_to_end"

LABELS = {
    "ours": "jaxfused",
    "ours-copies": "jaxfused, bfloat16 copies of kernels",
    "ours-fp8": "jaxfused, fp8",
    "ours-cudnn": "jaxfused, padded cuDNN attention",
    "fused": "stock under jaxfused.fuse, jaxfused.optim",
    "stock": "stock (Flax or Equinox) + Optax",
    "cudnn": "stock, padded cuDNN attention",
    "torch": "timm + torch.compile",
}
"""Labels by variant, in the order of tables and charts."""

KINDS = {
    "attention": r"sdpa|flash|fmha|attention",
    "convolutions": r"fprop|dgrad|wgrad|conv2d|convolve|implicit|nchw|nhwc",
    "matrix products": (
        r"gemm|nvjet|cutlass|cublas|xmma|splitK|_dot_|^(linear|matmul|hidden|gated|qkv)_"
    ),
    "norms": r"norm",
    "optimizer": r"adam|multi_tensor",
}
"""Patterns of kernel names, by kind; the first that matches counts, and the rest are "other"."""

_COLORS = {
    "attention": "#e0a458",
    "convolutions": "#6b8fc9",
    "matrix products": "#0f766e",
    "norms": "#5eb8ad",
    "optimizer": "#b07aa1",
    "other": "#9aa5b1",
    "gaps": "#d5dbe1",
}
_INK = "#1f2933"
_TOP_KERNELS = 10
_GIB = 2**30

Section = dict[str, Any]
Row = dict[str, Any]


def kind(kernel: str) -> str:
    for name, pattern in KINDS.items():
        if re.search(pattern, kernel, re.IGNORECASE):
            return name
    return "other"


def kernel_milliseconds(row: Row) -> float | None:
    """Returns the milliseconds of a step's kernels in all, or None if they were not timed."""
    return sum(row["kinds"].values()) if row.get("kinds") else None


def by_kind(row: Row) -> dict[str, float]:
    """Returns a step's milliseconds by kind of kernel; "gaps" are those in which no kernel runs."""
    shares = dict.fromkeys([*KINDS, "other"], 0.0) | row.get("kinds", {})
    # Kernels that ran at the same time may add up to more than the step.
    return shares | {"gaps": max(0.0, row["milliseconds"] - sum(shares.values()))}


def tflops(model: Section, row: Row) -> float:
    """Returns model TFLOP/s: operations that the network needs, whatever the variant computes."""
    rate: float = model["flops"] / row["milliseconds"] / 1e9
    return rate


def fault(row: Row) -> str | None:
    """Returns why a row has no time, or None if it has one."""
    return next((f"{k}: {row[k]}" for k in ("failed", "skipped") if k in row), None)


def short(row: Row) -> str:
    return fault(row) or f"{row['milliseconds']:.1f} ms"


# --- text -----------------------------------------------------------------------------------------


def table(section: Section) -> tuple[list[str], list[list[str]]]:
    """Returns header and rows: one row per model and variant."""
    header = ["model", "variant", "ms", "±%", "kernels ms", "images/s", "TFLOP/s", "peak", "GiB"]
    header += ["x stock", "compile s"]
    rows = []
    for model in section["models"]:
        stock = model["rows"].get("stock", {}).get("milliseconds")
        first = f"{model['model']}, batch {model['batch']}"
        for variant in (v for v in LABELS if v in model["rows"]):
            row = model["rows"][variant]
            start, first = [first, LABELS[variant]], ""
            if (reason := fault(row)) is not None:
                rows.append([*start, reason[:60], *[""] * (len(header) - 3)])
                continue
            time, kernels, rounds = row["milliseconds"], kernel_milliseconds(row), row["rounds"]
            peak = section["ceilings"].get("gemm")
            rows.append(
                [
                    *start,
                    f"{time:.1f}",
                    f"{50 * (max(rounds) - min(rounds)) / time:.1f}",
                    "" if kernels is None else f"{kernels:.1f}",
                    f"{1e3 * model['batch'] / time:.0f}",
                    f"{tflops(model, row):.0f}",
                    "" if peak is None else f"{tflops(model, row) / peak:.0%}",
                    memory(row),
                    "" if stock is None else f"{stock / time:.2f}",
                    f"{row['compile_seconds']:.0f}",
                ]
            )
    return header, rows


def bars(section: Section) -> list[str]:
    """Returns a line for each model that has a bar (target ratio) for its step under `fuse`."""
    lines = []
    for model in (m for m in section["models"] if "must" in m):
        rows = [model["rows"].get(variant, {}) for variant in ("stock", "fused")]
        stock, fused = (row.get("milliseconds") for row in rows)
        ratio = stock / fused if stock and fused else None
        goals = [f"must {model['must']:.2f}"]
        goals += [] if model["aim"] is None else [f"aim {model['aim']:.2f}"]
        told = "not measured" if ratio is None else f"{ratio:.3f}x stock"
        verdict = "met" if ratio is not None and ratio >= model["must"] else "NOT met"
        errors = ", ".join(f"{name} {error:.2g}" for name, error in model["errors"].items())
        lines.append(
            f"{model['model']} under fuse: {told}, {', '.join(goals)}, {verdict};"
            f" relative errors of gradients: {errors}"
        )
    return lines


def memory(row: Row) -> str:
    """Formats the allocator's peak in GiB, or XLA's plan in brackets if the peak is an earlier row's."""
    if "peak_bytes" in row:
        return f"{row['peak_bytes'] / _GIB:.1f}"
    return f"({row['planned_bytes'] / _GIB:.1f})"


def kernel_table(row: Row) -> tuple[list[str], list[list[str]]]:
    total = 1e3 * sum(row["kinds"].values())
    rows = [
        [
            f"{kernel['microseconds'] / 1e3:.2f}",
            f"{kernel['microseconds'] / total:.1%}",
            str(kernel["count"]),
            kernel["name"][:60],
            kernel["source"][-70:],
        ]
        for kernel in row["kernels"][:_TOP_KERNELS]
    ]
    return ["ms", "share", "calls", "kernel", "from"], rows


def print_report(section: Section) -> None:
    """Prints the kernels of every variant, and last the table of all variants."""
    for model in section["models"]:
        for variant, row in model["rows"].items():
            if row.get("kinds"):
                title = f"{model['model']}, {LABELS[variant]}: {_kinds_line(row)}"
                print(report.plain_table(title, *kernel_table(row)), end="\n\n")
            elif (reason := fault(row) or row.get("note")) is not None:
                print(f"{model['model']}, {LABELS[variant]}: {reason}", end="\n\n")
    print(report.ceilings_line(section))
    print(report.plain_table("training steps in bfloat16", *table(section)), flush=True)
    for line in bars(section):
        print(line, flush=True)


def _kinds_line(row: Row) -> str:
    return ", ".join(f"{name} {time:.1f}" for name, time in by_kind(row).items() if time) + " ms"


def readme_table(steps: Sequence[tuple[str, Section]]) -> list[str]:
    """Returns the README's table of what steps gain by `fuse` and `jaxfused.optim`."""
    lines = [
        "| training step | GPU | with Optax | with `fuse`, `jaxfused.optim` | faster | memory, GiB |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    sources = []
    for gpu, section in steps:
        for model in section["models"]:
            pair = [model["rows"].get(variant) for variant in ("stock", "fused")]
            rows = [row for row in pair if row is not None and fault(row) is None]
            if len(rows) < len(pair):
                continue
            before, after = (row["milliseconds"] for row in rows)
            lines.append(
                f"| {model['model']}, batch {model['batch']} | {gpu.removeprefix('NVIDIA ')}"
                f" | {before:.1f} ms | {after:.1f} ms | {before / after:.2f}x"
                f" | {memory(rows[0])} to {memory(rows[1])} |"
            )
        versions = section["machine"]["versions"]
        packages = ", ".join(f"{p} {versions[p]}" for p in ("jax", "flax") if p in versions)
        sources.append(f"{gpu}, {packages}, {report.when(section)}")
    return [*lines, "", f"Measured on {'; '.join(sources)}."]


def page_table(section: Section) -> list[str]:
    lines = [
        "| | ms a step | images/s | model TFLOP/s | of the matrix-product peak | memory, GiB |",
        "|---|---|---|---|---|---|",
    ]
    peak = section["ceilings"].get("gemm")
    for model in section["models"]:
        for variant in (v for v in LABELS if v in model["rows"]):
            row = model["rows"][variant]
            if fault(row) is not None:
                continue
            rate = tflops(model, row)
            lines.append(
                f"| {model['model']}, batch {model['batch']}: {LABELS[variant]}"
                f" | {row['milliseconds']:.1f} | {1e3 * model['batch'] / row['milliseconds']:.0f}"
                f" | {rate:.0f} | {'' if peak is None else f'{rate / peak:.0%}'} | {memory(row)} |"
            )
    return [*lines, "", f"{report.ceilings_line(section)}; {report.when(section)}."]


# --- chart ----------------------------------------------------------------------------------------


def draw(gpu: str, section: Section, path: Path) -> None:
    """Draws one panel per model, with each variant's step as a bar by kind of kernel."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    models = [m for m in section["models"] if _timed(m)]
    bars = [len(_timed(model)) for model in models]
    style = {"font.size": 9, "text.color": _INK, "axes.labelcolor": _INK, "xtick.color": _INK}
    style |= {"ytick.color": _INK, "axes.edgecolor": "#d5dbe1", "font.family": "sans-serif"}
    with plt.rc_context(style):
        figure, axes = plt.subplots(
            len(models),
            1,
            figsize=(8.5, 1.1 + sum(0.34 * n + 0.75 for n in bars)),
            height_ratios=bars,
            squeeze=False,
            dpi=150,
            layout="constrained",
        )
        for axis, model in zip(axes[:, 0], models, strict=True):
            _panel(axis, model)
        figure.suptitle(f"Training steps on {gpu}, bfloat16: ms, less is better", x=0.01, ha="left")
        used = {k for m in models for v in _timed(m) for k, t in by_kind(m["rows"][v]).items() if t}
        handles = [Patch(color=color, label=k) for k, color in _COLORS.items() if k in used]
        figure.legend(handles=handles, loc="outside lower center", ncols=7, frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
        plt.close(figure)


def _timed(model: Section) -> list[str]:
    return [v for v in LABELS if v in model["rows"] and fault(model["rows"][v]) is None]


def _panel(axis: Any, model: Section) -> None:
    variants: Sequence[str] = _timed(model)
    for i, variant in enumerate(variants):
        row = model["rows"][variant]
        left = 0.0
        for name, milliseconds in by_kind(row).items():
            axis.barh(i, milliseconds, 0.72, left=left, color=_COLORS[name])
            left += milliseconds
        axis.text(left, i, f" {row['milliseconds']:.1f}", va="center", fontsize=8)
    axis.set_yticks(range(len(variants)), [LABELS[v] for v in variants], fontsize=8)
    axis.invert_yaxis()
    axis.margins(x=0.08)
    axis.set_title(f"{model['model']}, batch {model['batch']}", loc="left", fontsize=10)
    axis.tick_params(length=0)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
