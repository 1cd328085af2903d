"""`python -m benchmarks fuzz`: draws cases, judges them in processes, prints what failed."""

import argparse
import collections
import json
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.fuzz import judge, operators, processes
from benchmarks.fuzz.problem import Options
from benchmarks.fuzz.without_gpu import WITHOUT_GPU
from benchmarks.without_gpu import target

NAME = "fuzz"

_EVERY_SECONDS = 20.0
_CHEAP_COMPILES = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
"""XLA's flags that turn off autotuning, which takes most of the time, and Triton's products, which
without autotuning are wrong for int8 (see LAB.md)."""


def main(arguments: Sequence[str]) -> int:
    options = parsed(arguments)
    if options.without_gpu:
        if reason := target.why_unavailable():
            print(reason)
            return 2
        return run(options, WITHOUT_GPU[options.without_gpu])
    _prepare(options.jobs)
    return run(options, judge.judge)


def run(options: argparse.Namespace, judged: processes.Judge) -> int:
    """Judges the cases that `options` asks for, and returns 1 if any of them is not right."""
    named = {} if options.implementation is None else {"implementation": options.implementation}
    cases: Any = [json.loads(line) | named for line in options.case]
    if not cases:
        names = options.operators or [*operators.OPERATORS]
        cases = (
            operators.drawn(options.seed, index, names, options.largest) | named
            for index in range(options.first, options.first + options.cases)
        )
    begin = time.monotonic()
    counts: collections.Counter[str] = collections.Counter()
    by_operator: dict[str, list[float]] = collections.defaultdict(list)
    said = begin
    for case, verdict, seconds in _verdicts(cases, judged, options, begin):
        counts[verdict.status] += 1
        by_operator[case["operator"]].append(seconds)
        if verdict.status not in (judge.OK, judge.REFUSED) or options.case or options.verbose:
            print(_told(case, verdict), flush=True)
        if time.monotonic() - said > _EVERY_SECONDS:
            said = time.monotonic()
            print(f"[{said - begin:5.0f} s] {_summary(counts)}", flush=True)
    for operator, times in sorted(by_operator.items()):
        print(f"{operator:30} {len(times):5} cases, {sum(times) / len(times):5.1f} s each")
    print(f"{time.monotonic() - begin:.0f} s, seed {options.seed}: {_summary(counts)}")
    return 0 if set(counts) <= {judge.OK, judge.REFUSED} else 1


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks {NAME}", description=__doc__)
    known = ", ".join(operators.OPERATORS)
    parser.add_argument("operators", nargs="*", metavar="OPERATOR", help=f"of: {known}")
    parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--cases", type=int, default=3000, help="default: %(default)s")
    parser.add_argument("--first", type=int, default=0, help="number of the first case of the seed")
    parser.add_argument("--largest", type=int, metavar="N", help="bounds most sizes of the cases")
    parser.add_argument("--implementation", metavar="NAME", help="for all cases, not one for each")
    parser.add_argument("--seconds", type=float, default=540.0, help="no case begins later")
    # The slowest cases compile for tens of seconds while all cores are busy.
    parser.add_argument("--limit", type=float, default=180.0, help="seconds that a case may take")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="0: no processes")
    parser.add_argument("--case", action="append", default=[], help="a line that the fuzz printed")
    parser.add_argument("--verbose", action="store_true", help="print cases that are right too")
    parser.add_argument(
        "--without-gpu",
        nargs="?",
        const="compiled",
        choices=[*WITHOUT_GPU],
        help="only lower the cases, or compile them too, for an H200 that is not there",
    )
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.operators) - set(operators.OPERATORS)):
        parser.error(f"{', '.join(unknown)} is not known; known are {known}")
    return options


def _prepare(jobs: int) -> None:
    """Sets the environment of the processes, before any of them initialises the GPU."""
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{0.8 / max(1, jobs):.3f}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_CHEAP_COMPILES}"


def _verdicts(
    cases: Any, judged: processes.Judge, options: argparse.Namespace, begin: float
) -> Iterator[tuple[Options, judge.Verdict, float]]:
    def spent() -> bool:
        return time.monotonic() - begin > options.seconds

    if options.jobs:
        yield from processes.run(cases, judged, options.jobs, options.limit, spent)
        return
    for case in cases:
        if spent():
            return
        start = time.monotonic()
        yield case, judged(case), time.monotonic() - start


def _told(case: Options, verdict: judge.Verdict) -> str:
    return (
        f"{verdict.status}: {verdict.why or f'{verdict.share:.2f}'}\n    {operators.to_line(case)}"
    )


def _summary(counts: collections.Counter[str]) -> str:
    """Formats the counts so far; refused cases are counted separately."""
    wrong, raised = counts[judge.WRONG], counts[judge.RAISED]
    cases = counts.total() - counts[judge.REFUSED]
    hung = counts[processes.HUNG] + counts[processes.CRASHED]
    return (
        f"{cases} cases, {wrong} wrong, {raised} raised, {counts[judge.DIFFERENT]} different between"
        f" runs, {hung} hung or crashed ({counts[judge.REFUSED]} more were refused with a sentence)"
    )
