"""The sweep's files and tables, which combine runs of several seeds and machines."""

import json
import os
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.sweep.lowering import FORWARD, OURS, STOCK, WHOLE

Entry = dict[str, Any]

WORST = 10
NEAR = 0.95
"""Ratio below which a case is a loss, if the time differs by more than MICROSECONDS too."""
MICROSECONDS = 0.5
PEERS = {"cuDNN": "cudnn", "bf16": "bfloat16"}
"""Names of peers' programs by their names in tables: cuDNN's attention, and for quantised convolutions
the bfloat16 convolution of the unquantised operands."""


# --- result files ---------------------------------------------------------------------------------


def save(path: Path, run: dict[str, Any], entries: Sequence[Entry]) -> None:
    """Writes all entries so far, so that an interrupted run does not lose them."""
    partial = path.with_name(path.name + ".partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial.write_text(json.dumps({"runs": [run | {"entries": list(entries)}]}, indent=1) + "\n")
    os.replace(partial, path)


def load(paths: Iterable[Path]) -> tuple[list[dict[str, Any]], list[Entry]]:
    """Returns (runs, entries) of all files; for each GPU the last run of a case counts."""
    runs: list[dict[str, Any]] = []
    by_case: dict[tuple[str, str, str], Entry] = {}
    for path in paths:
        for run in json.loads(path.read_text())["runs"]:
            for entry in run.pop("entries"):
                by_case[run["device"], entry["case"], entry["direction"]] = entry
            runs.append(run)
    return runs, list(by_case.values())


# --- ratios of stock's time to ours ---------------------------------------------------------------


def stock_time(entry: Entry) -> tuple[str, float] | None:
    """Returns the fastest form of stock XLA as (name, microseconds)."""
    times = {n: us for n, us in entry["microseconds"].items() if n.startswith(STOCK)}
    return min(times.items(), key=lambda item: item[1]) if times else None


def over_stock(entry: Entry) -> float | None:
    """Returns stock's time over ours; 1 if both are one program, None without stock."""
    stock = stock_time(entry)
    if stock is None:
        return None
    if entry["same_program"] and stock[0] == entry["same_program"]:
        return 1.0
    return stock[1] / entry["microseconds"][OURS]


def _peer_time(entry: Entry, against: str) -> tuple[str, float] | None:
    if against == "XLA":
        return stock_time(entry)
    name = PEERS[against]
    time = entry["microseconds"].get(name)
    return None if time is None else (name, time)


def _ratio(entry: Entry, against: str) -> float | None:
    if against == "XLA":
        return over_stock(entry)
    peer = _peer_time(entry, against)
    return None if peer is None else peer[1] / entry["microseconds"][OURS]


def _is_loss(entry: Entry, against: str) -> bool:
    ratio, peer = _ratio(entry, against), _peer_time(entry, against)
    if ratio is None or peer is None:
        return False
    return ratio < NEAR and entry["microseconds"][OURS] - peer[1] > MICROSECONDS


# --- tables ---------------------------------------------------------------------------------------


def text(entries: Sequence[Entry]) -> str:
    """Formats the distributions of ratios, the worst cases, and those that were wrong or raised."""
    lines = [
        f"{'operator':20} {'direction':17} {'against':7} {'count':>5} {'5th':>6} {'median':>6}"
        f" {'min':>6} {'<0.95':>5} {'<1.00':>5} {'wrong':>5} {'raised':>6}"
    ]
    keys = dict.fromkeys((e["operator"], e["direction"]) for e in entries)
    for operator, direction in sorted(keys):
        here = [e for e in entries if (e["operator"], e["direction"]) == (operator, direction)]
        for against in ("XLA", *PEERS):
            if against == "XLA" or any(PEERS[against] in e.get("microseconds", {}) for e in here):
                lines.append(f"{operator:20} {direction:17} {against:7} {_row(here, against)}")
    timed = [e for e in entries if e["status"] == "ok"]
    for against in ("XLA", *PEERS):
        lines += _worst(timed, against)
    lines += _failures(entries)
    return "\n".join(lines)


def _row(entries: Sequence[Entry], against: str) -> str:
    timed = [e for e in entries if e["status"] == "ok"]
    ratios = sorted(r for e in timed if (r := _ratio(e, against)) is not None)
    losses = sum(_is_loss(e, against) for e in timed)
    slower = sum(r < 1.0 for r in ratios)
    wrong, raised = (sum(e["status"] == status for e in entries) for status in ("wrong", "raised"))
    if ratios:
        figures = (percentile(ratios, 5), statistics.median(ratios), ratios[0])
        middle = " ".join(f"{figure:6.2f}" for figure in figures)
    else:
        middle = " ".join(["     -"] * 3)
    return f"{len(ratios):5} {middle} {losses:5} {slower:5} {wrong:5} {raised:6}"


def percentile(ascending: Sequence[float], percent: float) -> float:
    """Returns a percentile, linearly interpolated."""
    position = (len(ascending) - 1) * percent / 100
    below = int(position)
    above = min(below + 1, len(ascending) - 1)
    return ascending[below] + (position - below) * (ascending[above] - ascending[below])


README_ROWS = {
    "attention": ("softmax(q k^T + mask) v", "dot_product_attention"),
    "layer_norm": ("LayerNorm", "layer_norm"),
    "layer_norm_residual": ("x + branch, then LayerNorm", "layer_norm(branch, residual=x)"),
    "rms_norm": ("RMSNorm", "rms_norm"),
    "rms_norm_residual": ("x + branch, then RMSNorm", "rms_norm(branch, residual=x)"),
    "qkv_projection": ("Dense for q, k, v, norm of heads, rope", "qkv_projection"),
    "rope": ("rotary embedding of q and k", "rope"),
    "linear": ("Dense, activation, residual", "linear"),
    "mlp": ("Dense, gelu, Dense, residual", "mlp"),
    "gated_mlp": ("SwiGLU or GEGLU", "gated_mlp"),
    "softmax_cross_entropy": ("log_softmax, negative log-likelihood", "softmax_cross_entropy"),
    "group_norm": ("GroupNorm, residual, activation", "group_norm"),
    "batch_norm": ("BatchNorm in training, residual, activation", "batch_norm"),
    "conv": ("Conv, bias, residual, activation", "conv"),
    "depthwise_conv": ("depthwise Conv, bias, activation", "conv(groups=channels)"),
    "max_pool": ("max_pool", "max_pool"),
    "upsample": ("bilinear upsampling by 2", "upsample"),
    "quantized_matmul": ("Dense of int8, int4 or float8 weights", "quantized_matmul"),
    "quantized_norm": ("norm, then quantised rows", 'layer_norm(quantize_rows="int8")'),
}
"""Rows of the README by the sweep's operator: the layer in a model, and the call that replaces it."""


def readme_table(runs: Sequence[dict[str, Any]], entries: Sequence[Entry]) -> list[str]:
    """Returns the README's lines: an operator's kernels and ratios to stock XLA, over all GPUs."""
    lines = [
        "| in your model | call | kernels, forward | forward | with gradients | shapes |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    timed = [e for e in entries if e["status"] == "ok" and over_stock(e) is not None]
    used: list[Entry] = []
    for operator, (written, call) in README_ROWS.items():
        here = [e for e in timed if e["operator"] == operator]
        if not here:
            continue
        used += here
        forward, both = ([e for e in here if e["direction"] == d] for d in (FORWARD, WHOLE))
        cells = [_kernel_counts(forward), _gain(forward), _gain(both), str(len(forward))]
        lines.append(f"| {written} | `{call}` | {' | '.join(cells)} |")
    failed = sum(e["status"] != "ok" for e in entries if e["operator"] in README_ROWS)
    devices = " and ".join(sorted({run["device"] for run in runs}))
    dates = sorted(run["date"][:10] for run in runs)
    versions = " and ".join(sorted({run["versions"]["jax"] for run in runs}))
    commits = len({run["commit"] for run in runs})
    return [
        *lines,
        "",
        f"Medians, and in brackets the 5th percentile, of {len(used):,} timings on {devices} with jax"
        f" {versions}, from {dates[0]} to {dates[-1]}, over {commits} commits; {failed} more raised or"
        " were wrong when they were measured.",
    ]


def _kernel_counts(entries: Sequence[Entry]) -> str:
    """Returns median kernel counts of ours and of the fastest stock form, if they were listed."""
    pairs = [
        (len(entry["kernels"][OURS]), len(entry["kernels"][stock[0]]))
        for entry in entries
        if entry.get("kernels") and (stock := stock_time(entry)) is not None
    ]
    if not pairs:
        return "not counted"
    ours, stocks = (statistics.median_low(counts) for counts in zip(*pairs, strict=True))
    return f"{ours} instead of {stocks}" if ours != stocks else str(ours)


def _gain(entries: Sequence[Entry]) -> str:
    ratios = sorted(ratio for e in entries if (ratio := over_stock(e)) is not None)
    if not ratios:
        return "not measured"
    return f"{statistics.median(ratios):.2f}x ({percentile(ratios, 5):.2f}x)"


def _worst(timed: Sequence[Entry], against: str) -> list[str]:
    ranked = sorted(
        (e for e in timed if _ratio(e, against) is not None), key=lambda e: _ratio(e, against) or 0
    )
    if not ranked:
        return []
    lines = ["", f"worst against {against}: ratio, microseconds (peak MiB) of ours and of the peer"]
    for entry in ranked[:WORST]:
        name, time = _peer_time(entry, against) or ("", 0.0)
        lines.append(
            f"{_ratio(entry, against):5.2f}  {entry['microseconds'][OURS]:.1f}"
            f" ({_mebibytes(entry, OURS)}) {time:.1f} ({_mebibytes(entry, name)}) {name}"
        )
        lines.append(f"       {_again(entry)}")
    return lines


def _mebibytes(entry: Entry, name: str) -> str:
    size = entry["memory"].get(name)
    return "?" if size is None else f"{size / 2**20:.0f}"


def _again(entry: Entry) -> str:
    """Returns the command that runs this case alone."""
    gradient = f" --gradient {entry['direction']}"
    return f"python -m benchmarks sweep --case '{entry['case']}'{gradient}"


def _failures(entries: Sequence[Entry]) -> list[str]:
    lines = []
    for entry in entries:
        if entry["status"] != "ok":
            lines += [f"{entry['status']}: {entry['why']}", f"       {_again(entry)}"]
    return ["", *lines] if lines else []


def progress(entry: Entry) -> str:
    head = f"{entry['operator']} {entry['direction']}"
    if entry["status"] != "ok":
        return f"{head}: {entry['status']}: {entry['why']}"
    ratios = {against: _ratio(entry, against) for against in ("XLA", *PEERS)}
    parts = [f"{entry['microseconds'][OURS]:.1f} us"]
    parts += [f"{ratio:.2f}x {name}" for name, ratio in ratios.items() if ratio is not None]
    return f"{head}: {', '.join(parts)}  {entry['case']}"
