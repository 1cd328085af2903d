"""Draws charts, writes tables of both README.md: `python -m benchmarks.report.plot`."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import report, results
from benchmarks.run.case import BARE, LABELS, MIXED, UNROTATED
from benchmarks.sweep import report as sweep_report
from benchmarks.whole import end_to_end_report

README = Path(__file__).parents[2] / "README.md"
PAGE = results.DIRECTORY / "README.md"
SWEEP = "sweep"
"""Last word in the names of the sweep's files."""

# Our implementations have one hue, and peers have muted colours, so that ours stand out.
_COLORS = {
    MIXED: "#0b4f4a",
    "pallas": "#0f766e",
    "cuda": "#5eb8ad",
    "xla": "#9aa5b1",
    "cudnn": "#8aa399",
    "cudnn_padded": "#b9c9c2",
    "torch_compile": "#e0a458",
    "torch_cudnn": "#c98d5e",
    "torch_flash": "#ecd2a0",
    "liger": "#b07aa1",
    "tokamax": "#6b8fc9",
    "tokamax_triton": "#aebfe0",
    BARE: "#52606d",
    UNROTATED: "#52606d",
}
_INK = "#1f2933"
_FAINT = "#d5dbe1"
_CEILING_LINE: dict[str, Any] = {"color": _INK, "lw": 1, "ls": (0, (4, 3))}


def draw(gpu: str, name: str, section: dict[str, Any], path: Path) -> None:
    """Draws one panel per operation, with bars of the implementations at each shape."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    by_name: dict[str, list[dict[str, Any]]] = {}
    for case in section["cases"]:
        by_name.setdefault(case["case"], []).append(case)
    columns = 1 if len(by_name) == 1 else 2
    lines = -(-len(by_name) // columns)
    style = {"font.size": 9, "text.color": _INK, "axes.labelcolor": _INK, "xtick.color": _INK}
    style |= {"ytick.color": _INK, "axes.edgecolor": _FAINT, "font.family": "sans-serif"}
    with plt.rc_context(style):
        figure, axes = plt.subplots(
            lines, columns, figsize=(6.2 * columns, 2.5 * lines + 0.9), squeeze=False, dpi=150
        )
        for axis, (case_name, cases) in zip(axes.flat, by_name.items(), strict=False):
            _panel(axis, case_name, cases, section)
        for axis in list(axes.flat)[len(by_name) :]:
            axis.set_visible(False)
        height = figure.get_figheight()
        figure.suptitle(
            f"{name} on {gpu}, {section['cases'][0]['dtype']}: rate reached, higher is better",
            x=0.012,
            y=1 - 0.10 / height,
            ha="left",
            va="top",
            fontsize=13,
            fontweight="bold",
        )
        handles = [Patch(color=_COLORS[n], label=LABELS[n]) for n in _shown(section["cases"])]
        figure.legend(
            handles=[*handles, Line2D([], [], label="measured ceiling", **_CEILING_LINE)],
            loc="upper left",
            bbox_to_anchor=(0.005, 1 - 0.36 / height),
            ncols=len(handles) + 1,
            frameon=False,
            handlelength=1.0,
            columnspacing=1.0,
        )
        figure.tight_layout(rect=(0, 0, 1, 1 - 0.50 / height), h_pad=1.6, w_pad=2.0)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
        plt.close(figure)


def _shown(cases: Sequence[dict[str, Any]]) -> list[str]:
    """Returns the implementations with a time in any of the cases, in the order of their colours."""
    return [n for n in _COLORS if any(report.microseconds(case, n) is not None for case in cases)]


def _panel(axis: Any, title: str, cases: Sequence[dict[str, Any]], section: Any) -> None:
    arithmetic = bool(cases[0]["flops"])
    scale, unit = (1.0, "TFLOP/s") if arithmetic else (1e-3, "TB/s")
    shown = _shown(cases)
    width = 0.84 / max(1, len(shown))
    for i, name in enumerate(shown):
        xs, heights = [], []
        for j, case in enumerate(cases):
            time = report.microseconds(case, name)
            if time is not None:
                xs.append(j + (i - (len(shown) - 1) / 2) * width)
                heights.append(scale * report.rate(case, time)[0])
        axis.bar(xs, heights, width * 0.92, color=_COLORS[name], zorder=2)
    ceiling = section["ceilings"].get("gemm" if arithmetic else "copy")
    if ceiling:
        axis.axhline(scale * ceiling, zorder=3, **_CEILING_LINE)
        axis.set_ylim(0, 1.08 * scale * ceiling)
    axis.set_title(title, loc="left", fontsize=10, fontweight="bold")
    shapes = [report.shape_text(case["shape"]).replace(" ", "") for case in cases]
    axis.set_xticks(range(len(cases)), shapes, fontsize=8)
    axis.set_ylabel(unit)
    axis.grid(axis="y", color=_FAINT, lw=0.6, zorder=0)
    axis.tick_params(length=0)
    axis.set_xlim(-0.55, len(cases) - 0.45)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)


def chart_path(directory: Path, gpu: str, name: str) -> Path:
    return directory / f"{results.slug(gpu)}-{name}.png"


def replace_part(path: Path, part: str, lines: Sequence[str]) -> None:
    """Replaces the lines between a part's two markers in a Markdown file.

    Raises:
      ValueError: the file does not have both markers, in order.
    """
    begin, end = f"<!-- {part}:begin -->\n", f"<!-- {part}:end -->"
    before, found, rest = path.read_text().partition(begin)
    _, found_end, after = rest.partition(end)
    if not found or not found_end:
        raise ValueError(
            f"{path} must hold the lines {begin.strip()} and {end}, but does not; add both where the"
            " tables belong."
        )
    path.write_text("\n".join([before + begin, *lines, "", end + after]))


def write_tables(directory: Path, readme: Path, page: Path) -> None:
    """Writes the tables of both files from the result files alone; charts that exist are linked."""
    sections, sweeps = [], []
    for path in sorted(directory.glob("*.json")):
        (sweeps if path.stem.endswith(f"-{SWEEP}") else sections).append(path)
    measured = [results.load(path) for path in sections]
    images = {
        (result["gpu"], name): os.path.relpath(chart, page.parent)
        for result in measured
        for name in result["benchmarks"]
        if (chart := chart_path(directory, result["gpu"], name)).exists()
    }
    tables = {end_to_end_report.NAME: end_to_end_report.page_table}
    replace_part(page, "benchmarks", report.page(measured, images, tables))
    steps = [
        (result["gpu"], result["benchmarks"][end_to_end_report.NAME])
        for result in measured
        if end_to_end_report.NAME in result["benchmarks"]
    ]
    if steps:
        replace_part(readme, "models", end_to_end_report.readme_table(steps))
    if sweeps:
        replace_part(readme, "operators", sweep_report.readme_table(*sweep_report.load(sweeps)))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report.plot", description=__doc__)
    parser.add_argument("--results", type=Path, default=results.DIRECTORY)
    parser.add_argument("--readme", type=Path, default=README)
    parser.add_argument("--page", type=Path, default=PAGE, help="default: %(default)s")
    parser.add_argument("--tables", action="store_true", help="write the tables, draw no chart")
    options = parser.parse_args(arguments)

    for path in [] if options.tables else sorted(options.results.glob("*.json")):
        for name, section in results.load(path).get("benchmarks", {}).items():
            gpu = results.load(path)["gpu"]
            chart = chart_path(options.results, gpu, name)
            if name == end_to_end_report.NAME:
                end_to_end_report.draw(gpu, section, chart)
            elif section.get("cases"):
                draw(gpu, name, section, chart)
            else:
                continue
            print(chart)
    write_tables(options.results, options.readme, options.page)
    print(options.readme, options.page, sep="\n")


if __name__ == "__main__":
    main()
