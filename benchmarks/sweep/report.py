"""The sweep's files and tables: runs of several seeds and machines add up."""

import json
import os
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.sweep.lowering import OURS, STOCK

Entry = dict[str, Any]

WORST = 10
NEAR = 0.95
"""A ratio under it is a loss, if the time differs by more than MICROSECONDS too."""
MICROSECONDS = 0.5
PEERS = {"cuDNN": "cudnn", "bf16": "bfloat16"}
"""What programs of peers are called, by what they are called in tables: cuDNN's attention, and for a
convolution of quantised numbers that of the bfloat16 that they were."""


# --- files ----------------------------------------------------------------------------------------


def save(path: Path, run: dict[str, Any], entries: Sequence[Entry]) -> None:
    """Writes all entries so far; a run that is cut off leaves what it had."""
    partial = path.with_name(path.name + ".partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial.write_text(json.dumps({"runs": [run | {"entries": list(entries)}]}, indent=1) + "\n")
    os.replace(partial, path)


def load(paths: Iterable[Path]) -> tuple[list[dict[str, Any]], list[Entry]]:
    """(runs, entries) of all files; of a case that ran more than once the last run counts."""
    runs: list[dict[str, Any]] = []
    by_case: dict[tuple[str, str], Entry] = {}
    for path in paths:
        for run in json.loads(path.read_text())["runs"]:
            for entry in run.pop("entries"):
                by_case[entry["case"], entry["direction"]] = entry
            runs.append(run)
    return runs, list(by_case.values())


# --- ratios ---------------------------------------------------------------------------------------


def stock_time(entry: Entry) -> tuple[str, float] | None:
    """The fastest form of stock XLA: (name, microseconds)."""
    times = {n: us for n, us in entry["microseconds"].items() if n.startswith(STOCK)}
    return min(times.items(), key=lambda item: item[1]) if times else None


def over_stock(entry: Entry) -> float | None:
    """How many times as fast as stock XLA; 1 where both are one program, None without stock."""
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
    """The distributions, the worst cases, and what was wrong or raised."""
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
    """By linear interpolation between neighbours."""
    position = (len(ascending) - 1) * percent / 100
    below = int(position)
    above = min(below + 1, len(ascending) - 1)
    return ascending[below] + (position - below) * (ascending[above] - ascending[below])


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
    """The line that runs this case by itself."""
    gradient = f" --gradient {entry['direction']}"
    return f"python -m benchmarks sweep --case '{entry['case']}'{gradient}"


def _failures(entries: Sequence[Entry]) -> list[str]:
    lines = []
    for entry in entries:
        if entry["status"] != "ok":
            lines += [f"{entry['status']}: {entry['why']}", f"       {_again(entry)}"]
    return ["", *lines] if lines else []


def progress(entry: Entry) -> str:
    """One line when a case is done."""
    head = f"{entry['operator']} {entry['direction']}"
    if entry["status"] != "ok":
        return f"{head}: {entry['status']}: {entry['why']}"
    ratios = {against: _ratio(entry, against) for against in ("XLA", *PEERS)}
    parts = [f"{entry['microseconds'][OURS]:.1f} us"]
    parts += [f"{ratio:.2f}x {name}" for name, ratio in ratios.items() if ratio is not None]
    return f"{head}: {', '.join(parts)}  {entry['case']}"
