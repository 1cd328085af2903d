"""Turns a result section into text: the table, the summary of the bars, the page of results.

Everything is computed from the JSON file, so that every printed number agrees with it.
"""

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.run.case import (
    BEST_PEER,
    BULK_COPY,
    BULK_READ,
    DEFAULT,
    GIGABYTES,
    LABELS,
    LESS,
    OURS,
    TERAFLOPS,
)

Section = dict[str, Any]
CaseResult = dict[str, Any]


def microseconds(case: CaseResult, name: str | None) -> float | None:
    """Returns the median time of one implementation, or None if it has none."""
    time: float | None = case["rows"].get(name, {}).get("microseconds")
    return time


def rate(case: CaseResult, time: float) -> tuple[float, str]:
    """Returns TFLOP/s for a case judged by arithmetic, GB/s for one judged by bytes."""
    if case["flops"]:
        return case["flops"] / time / 1e6, "TFLOP/s"
    return case["bytes"] / time / 1e3, "GB/s"


def ceiling_share(case: CaseResult, time: float, section: Section) -> float | None:
    """Returns a case's rate as a share of the best copy's, or the matrix product's, in the same run."""
    ceiling = section["ceilings"].get("gemm" if case["flops"] else "copy")
    return rate(case, time)[0] / ceiling if ceiling else None


def best_peer(case: CaseResult) -> str | None:
    times = {n: microseconds(case, n) for n in case["rows"] if n not in (*OURS, *LESS)}
    timed = {n: t for n, t in times.items() if t is not None}
    return min(timed, key=lambda name: timed[name]) if timed else None


@dataclass(frozen=True)
class Judgement:
    """A bar (target ratio) at one shape, and the measured ratio, None if a side has no time."""

    case: str
    shape: tuple[int, ...]
    ours: str
    against: str
    must: float | None
    aim: float | None
    ratio: float | None

    @property
    def met(self) -> bool | None:
        """True if `must` (or, without one, `aim`) is reached; None if not measured."""
        goal = self.must if self.must is not None else self.aim
        return None if self.ratio is None or goal is None else self.ratio >= goal


def judge(section: Section) -> list[Judgement]:
    judgements = []
    for case in section["cases"]:
        for bar in case["bars"]:
            ours = case["default"] if bar["ours"] == DEFAULT else bar["ours"]
            judgements.append(
                Judgement(
                    case=case["case"],
                    shape=tuple(case["shape"]),
                    ours=bar["ours"],
                    against=bar["against"],
                    must=bar["must"],
                    aim=bar["aim"],
                    ratio=_ratio(case, ours, bar["against"], section),
                )
            )
    return judgements


def _ratio(case: CaseResult, ours: str, against: str, section: Section) -> float | None:
    time = microseconds(case, ours)
    if time is None:
        return None
    if against in (BULK_COPY, BULK_READ):
        bulk = section["ceilings"].get(against.replace(" ", "_"))
        return case["bytes"] / time / 1e3 / bulk if bulk else None
    if against == GIGABYTES:
        return case["bytes"] / time / 1e3
    if against == TERAFLOPS:
        return case["flops"] / time / 1e6
    other = microseconds(case, best_peer(case) if against == BEST_PEER else against)
    return None if other is None else other / time


# --- tables ---------------------------------------------------------------------------------------


def table(section: Section) -> tuple[list[str], list[list[str]]]:
    """Returns header and rows: one row per case, shape and implementation."""
    header = ["case", "shape", "implementation", "us", "±%", "rate", "x best peer", "ceiling"]
    rows = []
    for case in section["cases"]:
        peer = microseconds(case, best_peer(case))
        first = True
        for name, row in case["rows"].items():
            label = LABELS.get(name, name) + (" (default)" if name == case["default"] else "")
            start = [case["case"], shape_text(case["shape"])] if first else ["", ""]
            first = False
            time = microseconds(case, name)
            if time is None:
                kind = next(k for k in ("wrong", "failed", "skipped") if k in row)
                rows.append([*start, label, f"{kind}: {row[kind]}"[:60], "", "", "", ""])
                continue
            value, unit = rate(case, time)
            share = ceiling_share(case, time, section)
            rows.append(
                [
                    *start,
                    label,
                    f"{time:.1f}",
                    f"{50 * (row['most'] - row['least']) / time:.1f}",
                    f"{value:.0f} {unit}",
                    "" if peer is None else f"{peer / time:.2f}",
                    "" if share is None else f"{share:.0%}",
                ]
            )
    return header, rows


def summary(section: Section) -> tuple[list[str], list[list[str]]]:
    """Returns header and rows: one row per case and bar, with ratios in the order of the shapes.

    "mean" is their geometric mean.
    "." means a shape without this bar, "-" one without a measurement.
    """
    header = ["case", "ours", "against", "must", "aim", "ratio at each shape", "mean", "met"]
    groups: dict[tuple[Any, ...], list[Judgement]] = {}
    for j in judge(section):
        groups.setdefault((j.case, j.ours, j.against, j.must, j.aim), []).append(j)
    shapes: dict[str, list[tuple[int, ...]]] = {}
    for result in section["cases"]:
        shapes.setdefault(result["case"], []).append(tuple(result["shape"]))
    rows = []
    for (case, ours, against, must, aim), group in groups.items():
        met = [j.met for j in group]
        ratios = {j.shape: "-" if j.ratio is None else _ratio_text(j.ratio) for j in group}
        known = [j.ratio for j in group if j.ratio is not None]
        verdict = f"{sum(m is True for m in met)}/{len(met)}"
        if must is not None:
            verdict = ("yes " if all(met) else "NO ") + verdict
        rows.append(
            [
                case,
                ours,
                LABELS.get(against, against),
                "" if must is None else _ratio_text(must),
                "" if aim is None else _ratio_text(aim),
                " ".join(ratios.get(shape, ".") for shape in shapes[case]),
                _ratio_text(statistics.geometric_mean(known)) if len(known) > 1 else "",
                verdict,
            ]
        )
    return header, rows


def _ratio_text(ratio: float) -> str:
    """Formats a ratio; rates against TERAFLOPS need no decimals."""
    return f"{ratio:.2f}" if ratio < 50 else f"{ratio:.0f}"


def slow_defaults(section: Section) -> Iterator[str]:
    """Yields the cases in which another implementation of ours beats the default by more than 3 %."""
    for case in section["cases"]:
        default = microseconds(case, case["default"])
        for name in OURS:
            time = microseconds(case, name)
            if default is not None and time is not None and default > 1.03 * time:
                yield (
                    f"{case['case']} {shape_text(case['shape'])}: {LABELS[name]} {time:.1f} us,"
                    f" the default ({case['default']}) {default:.1f} us"
                )


def untimed(section: Section) -> Iterator[tuple[str, str]]:
    """Yields the implementation and the reason of each row without a time."""
    for case in section["cases"]:
        for name, row in case["rows"].items():
            if "microseconds" not in row:
                kind = next(k for k in ("wrong", "failed", "skipped") if k in row)
                yield name, f"{kind}: {row[kind]}"


def faults(section: Section) -> Iterator[str]:
    """Yields every reason for a row without a time once, with the number of its cases."""
    for (name, reason), count in Counter(untimed(section)).items():
        yield f"{LABELS.get(name, name)}, {count} cases, {reason}"


def print_report(name: str, section: Section) -> None:
    """Prints the table, ceilings, missing peers, rows without a time, and the bars (target ratios)."""
    _print_table(f"{name}: microseconds", *table(section))
    print(ceilings_line(section))
    for peer, reason in section["missing"].items():
        print(f"missing peer: {LABELS.get(peer, peer)}: {reason}")
    for line in faults(section):
        print(line)
    for line in slow_defaults(section):
        print(f"slow default: {line}")
    _print_table(f"{name}: bars, ratios in the order of the shapes above", *summary(section))


def ceilings_line(section: Section) -> str:
    """Formats the measured ceilings in one line; older files lack some."""
    ceilings = section["ceilings"]
    units = dict.fromkeys(("bulk_copy", "bulk_read", "device_copy", "stream"), "GB/s")
    units["gemm"] = "TFLOP/s"
    parts = []
    for name, unit in units.items():
        if name in ceilings:
            parts.append(f"{name.replace('_', ' ')} {ceilings[name]:.0f} {unit}")
        elif f"{name}_error" in ceilings:
            parts.append(f"{name.replace('_', ' ')} {ceilings[f'{name}_error']}")
    return "ceilings: " + ", ".join(parts)


def when(section: Section) -> str:
    """Returns the day of a measurement, and its commit, which older files lack."""
    commit = section.get("commit")
    return section["date"][:10] + (f", commit {commit}" if commit else "")


def _print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
    except ModuleNotFoundError:
        print(plain_table(title, header, rows), flush=True)
        return
    rich_table = Table(*header, title=title, title_justify="left", pad_edge=False)
    for row in rows:
        rich_table.add_row(*row, end_section=False)
    # A log has no width, and rich would fold the columns to 80.
    Console(width=None if Console().is_terminal else 140).print(rich_table)


def plain_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Formats the table without rich."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (header, ["-" * width for width in widths], *rows)
    ]
    return "\n".join((title, *lines))


def shape_text(shape: Sequence[int]) -> str:
    return " x ".join(str(size) for size in shape)


# --- the page of results --------------------------------------------------------------------------


def page(
    results: Sequence[dict[str, Any]],
    images: Mapping[tuple[str, str], str],
    tables: Mapping[str, Callable[[Section], list[str]]],
) -> list[str]:
    """Returns the lines of the page of results: a chart and a table for each GPU and benchmark.

    `images` maps (gpu, benchmark) to a path, and `tables` a benchmark without cases to its lines.
    Other benchmarks without cases, such as `pipeline`, are left out: they print their figures.
    """
    lines = []
    for result in results:
        for name, section in result["benchmarks"].items():
            if name not in tables and not section.get("cases"):
                continue
            lines += ["", f"## {name} on {result['gpu']}", ""]
            if (result["gpu"], name) in images:
                lines += [f"![{name} on {result['gpu']}]({images[result['gpu'], name]})", ""]
            lines += tables.get(name, _page_table)(section)
    return lines


def _page_table(section: Section) -> list[str]:
    by_name: dict[str, list[CaseResult]] = {}
    for case in section["cases"]:
        by_name.setdefault(case["case"], []).append(case)
    lines = [
        "| | shapes | rate | over stock XLA | over the best peer | of the measured ceiling |",
        "|---|---|---|---|---|---|",
    ]
    for name, cases in by_name.items():
        timed = [(case, microseconds(case, case["default"])) for case in cases]
        pairs = [(case, time) for case, time in timed if time is not None]
        rates = _range([rate(case, time)[0] for case, time in pairs], ".0f", "")
        unit = f" {rate(cases[0], 1.0)[1]}" if pairs else ""
        over_xla = [_over(case, "xla", time) for case, time in pairs]
        over_peer = [_over(case, best_peer(case), time) for case, time in pairs]
        share = [ceiling_share(case, time, section) for case, time in pairs]
        lines.append(
            f"| {name} | {len(cases)} | {rates}{unit}"
            f" | {_range(over_xla, '.2f', 'x')} | {_range(over_peer, '.2f', 'x')}"
            f" | {_range(share, '.0%', '')} |"
        )
    versions = section["machine"]["versions"]
    packages = ", ".join(
        f"{package} {versions[package]}"
        for package in ("jax", "torch", "liger-kernel", "tokamax")
        if package in versions and LABELS.get(package) not in section["missing"]
    )
    lines += ["", f"{section['cases'][0]['dtype']}, {ceilings_line(section)}; {packages};"]
    lines[-1] += f" {when(section)}."
    if absent := _absent_peers(section):
        lines[-1] += f" Not timed: {absent}."
    return lines


def _absent_peers(section: Section) -> str:
    """Lists the peers that have no time in some of their cases."""
    counts = Counter(name for name, _ in untimed(section) if name not in OURS)
    of = f"of {len(section['cases'])} cases"
    return ", ".join(f"{LABELS.get(n, n)} in {count} {of}" for n, count in counts.items())


def _over(case: CaseResult, peer: str | None, time: float) -> float | None:
    other = microseconds(case, peer)
    return None if other is None else other / time


def _range(values: Sequence[float | None], form: str, suffix: str) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "not measured"
    low, high = (f"{v:{form}}{suffix}" for v in (min(known), max(known)))
    return low if low == high else f"{low} to {high}"
