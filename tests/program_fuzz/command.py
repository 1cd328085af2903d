"""`python -m tests.fuzz programs`: judges random programs under `jaxfused.fuse`."""

import argparse
import collections
import time
from collections.abc import Sequence

from tests.program_fuzz import drawn, judge

DTYPES = ("bfloat16", "float32", "float16", "float32")


def main(arguments: Sequence[str]) -> int:
    """Judges programs, prints each that is wrong, and returns 1 if there is one."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz programs", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--cases", type=int, default=2000, help="default: %(default)s")
    parser.add_argument("--first", type=int, default=0, help="number of the first program")
    parser.add_argument("--show", action="store_true", help="print programs that are right too")
    options = parser.parse_args(arguments)
    counts: collections.Counter[str] = collections.Counter()
    operators: collections.Counter[str] = collections.Counter()
    begin = said = time.monotonic()
    for number in range(options.first, options.first + options.cases):
        verdict = judged(options.seed, number, show=options.show)
        counts[verdict.status] += 1
        operators.update(verdict.found)
        if time.monotonic() - said > 30:
            said = time.monotonic()
            print(f"[{said - begin:5.0f} s] {number}: {dict(counts)}", flush=True)
    print(f"{time.monotonic() - begin:.0f} s, seed {options.seed}: {dict(counts)}")
    print(f"fused: {dict(operators)}")
    return 1 if counts[judge.WRONG] + counts[judge.RAISED] else 0


def judged(seed: int, number: int, *, show: bool = False) -> judge.Verdict:
    """Judges a program; a wrong one is printed, reduced to what makes it wrong."""
    program = drawn.program(seed, number)
    dtype = DTYPES[number % len(DTYPES)]
    verdict = judge.judge(program, dtype, number)
    is_wrong = verdict.status in (judge.WRONG, judge.RAISED)
    if is_wrong:
        program = judge.shrunk(program, dtype, verdict, number)
        verdict = judge.judge(program, dtype, number)
    if is_wrong or show:
        print(f"{verdict.status}: seed {seed}, number {number}, {dtype}: {verdict.why}")
        print(f"fused: {', '.join(verdict.found)}\n{program.source()}\n", flush=True)
    return verdict
