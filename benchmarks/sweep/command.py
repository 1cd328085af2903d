"""`python -m benchmarks sweep`: draws cases, then lowers, compiles, checks and times them."""

import argparse
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from benchmarks.report import results
from benchmarks.run import lowering, peers
from benchmarks.sweep import configs, judge, report
from benchmarks.sweep.lowering import DIRECTIONS, Workers
from benchmarks.without_gpu import beside_stock

NAME = "sweep"

_BATCH = 24
"""Number of cases that are compiled at the same time; they are timed afterwards, one by one."""
_SAVE_SECONDS = 10.0


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    if options.report:
        runs, entries = report.load(options.report)
        for run in runs:
            mark = " with changes" if run["dirty"] else ""
            print(f"{run['date']} {run['device']}, {run['commit'][:12]}{mark}: {run['arguments']}")
        print(report.text(entries))
        return 0
    if options.without_gpu:
        return beside_stock.run(_cases(options), options.gradient, options.workers, options.budget)
    on_gpu = jax.default_backend() == "gpu"
    if not on_gpu and not options.dry_run:
        print(
            "The sweep needs an NVIDIA GPU; --dry-run tries tiny shapes on whatever is here, and"
            " --without-gpu compares programs for an H200."
        )
        return 2
    run = results.run_tags(arguments) | {"device": jax.devices()[0].device_kind}
    mark = " with changes" if run["dirty"] else ""
    without = f", cuBLASLt {run['versions']['cuBLASLt']}" if "cuBLASLt" in run["versions"] else ""
    print(f"{run['device']}, commit {run['commit'][:12]}{mark}{without}", flush=True)
    sweep = _Sweep(options, run, on_gpu=on_gpu)
    try:
        sweep.run(_cases(options))
    finally:
        sweep.save()
    print(report.text(sweep.entries), flush=True)
    if options.out:
        print(f"\n{options.out}")
    return 0 if all(entry["status"] == "ok" for entry in sweep.entries) else 1


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    known = [*configs.OPERATORS, "all"]
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks {NAME}", description=__doc__)
    parser.add_argument("operators", nargs="*", metavar="OPERATOR", help=f"of: {', '.join(known)}")
    parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--count", type=int, default=20, help="cases an operator (default 20)")
    parser.add_argument("--first", type=int, default=0, help="number of the first case of the seed")
    parser.add_argument("--gradient", choices=DIRECTIONS, default="both")
    parser.add_argument("--case", action="append", default=[], help="a line that a sweep printed")
    parser.add_argument("--out", type=Path, help="a JSON file, rewritten as cases are done")
    parser.add_argument("--report", nargs="+", type=Path, metavar="FILE", help="add up and print")
    parser.add_argument(
        "--without-gpu", action="store_true", help="XLA's programs beside stock's, for an H200"
    )
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes, the host's clock")
    parser.add_argument(
        "--seconds", type=float, default=0.12, help="of timing a case and direction (default 0.12)"
    )
    parser.add_argument(
        "--budget", type=float, default=570.0, help="seconds after which no case begins"
    )
    parser.add_argument("--workers", type=int, help="processes that lower (default: the cores)")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.operators) - set(known)):
        parser.error(f"{', '.join(unknown)} is not known; known are {', '.join(known)}")
    if not (options.operators or options.case or options.report):
        parser.error("name an operator, or all")
    if "all" in options.operators:
        options.operators = list(configs.OPERATORS)
    if options.workers is None:
        options.workers = 0 if options.dry_run else os.cpu_count() or 1
    return options


def _cases(options: argparse.Namespace) -> list[configs.Config]:
    """Returns the cases, with operators in turn, so that an interrupted run has some of each."""
    cases = [configs.from_line(line) for line in options.case]
    if not options.case:
        cases = [
            configs.drawn(operator, options.seed, index)
            for index in range(options.first, options.first + options.count)
            for operator in options.operators
        ]
    return [case.tiny() for case in cases] if options.dry_run else cases


class _Sweep:
    """The state of a run: its measurements, and when they were last written."""

    def __init__(self, options: argparse.Namespace, run: dict[str, Any], *, on_gpu: bool):
        self.entries: list[report.Entry] = []
        self._options, self._run, self._on_gpu = options, run, on_gpu
        self._begin = self._saved = time.monotonic()

    def run(self, cases: Sequence[configs.Config]) -> None:
        """Lowers all cases in other processes, and compiles and times them batch by batch."""
        lowering.register()
        workers = Workers(
            min(self._options.workers, len(cases)),
            [configs.to_line(case) for case in cases],
            DIRECTIONS[self._options.gradient],
            "cuda" if self._on_gpu else jax.default_backend(),
        )
        try:
            for start in range(0, len(cases), _BATCH):
                if self._spent() > self._options.budget:
                    self._say(f"the budget is spent; {len(cases) - start} cases are left out")
                    break
                batch = range(start, min(start + _BATCH, len(cases)))
                self._batch({index: cases[index] for index in batch}, workers)
        finally:
            workers.close()

    def _batch(self, cases: Mapping[int, configs.Config], workers: Workers) -> None:
        """Compiles these cases at the same time, then times them one by one."""
        compiled: dict[int, Any] = {}
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for index, config in cases.items():
                try:
                    modules = workers.result(index)
                    compiled[index] = judge.compile_case(pool, config, modules, on_gpu=self._on_gpu)
                except Exception as error:
                    self._add([self._failed(config, error)])
                workers.forget(index)
            self._say(f"{len(cases)} cases are lowered")
        self._say("and compiled")
        for index in [*compiled]:
            shared, by_direction = compiled.pop(index)
            entries = judge.judge(
                cases[index],
                shared,
                by_direction,
                seconds=self._options.seconds,
                on_gpu=self._on_gpu,
            )
            self._add(entries)
            if any("CUDA_ERROR" in entry.get("why", "") for entry in entries):
                raise SystemExit(f"the GPU is lost to this process after {entries[0]['case']}")

    def _failed(self, config: configs.Config, error: Exception) -> report.Entry:
        return {
            "operator": configs.label(config),
            "direction": self._options.gradient,
            "case": configs.to_line(config),
            "status": "raised",
            "why": peers.describe(error),
        }

    def _add(self, entries: Sequence[report.Entry]) -> None:
        for entry in entries:
            self.entries.append(entry)
            self._say(report.progress(entry))
        if time.monotonic() - self._saved > _SAVE_SECONDS:
            self.save()

    def save(self) -> None:
        self._saved = time.monotonic()
        if self._options.out:
            run = self._run | {"seconds": round(self._spent(), 1)}
            report.save(self._options.out, run, self.entries)

    def _spent(self) -> float:
        return time.monotonic() - self._begin

    def _say(self, text: str) -> None:
        print(f"[{self._spent():5.0f} s] {text}", flush=True)
