"""`python -m benchmarks.choice.measured`: judges today's choices of kernels by times measured on a GPU.

benchmarks/results/choice lists stages, each with the times of its implementations, the choice at that
time, and a case of the sweep that contains it. Each case is traced as for an H200, without a GPU and
without a table of measured choices. A choice is wrong if it takes 5 % longer than the fastest
implementation.
"""

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax

from benchmarks.choice import replay
from benchmarks.report import results
from benchmarks.sweep import configs, programs
from benchmarks.sweep.lowering import WHOLE
from jaxfused import dispatch, explanation
from jaxfused.runtime import table

_SLOWER = 1.05


class Judged(NamedTuple):
    """A measured kernel call: times of the implementations chosen now, and when recorded (`then`).

    Both times are divided by that of the fastest implementation.
    """

    now: float
    then: float
    record: dict[str, Any]
    chosen: str


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, help="default: those recorded")
    parser.add_argument("--show", type=int, default=10, help="how many of the slowest to print")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    files = options.files or sorted((results.DIRECTORY / "choice").glob("*.jsonl"))
    for file in files:
        records = [json.loads(line) for line in file.read_text().splitlines()]
        _print(file.name, list(_judged(records)), options.show)
    return 0


def _judged(records: Sequence[dict[str, Any]]) -> Iterator[Judged]:
    cases: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for record in records:
        if len(record.get("measured", ())) > 1 and "case" in record:
            cases.setdefault((record["case"], record["direction"]), []).append(record)
    for (line, direction), stages in cases.items():
        chosen = _choices(line, direction == WHOLE)
        for record in stages:
            times, now = record["measured"], chosen.get(_key(record))
            if now in times and record["chosen"] in times:
                least = min(times.values())
                yield Judged(times[now] / least, times[record["chosen"]] / least, record, now)


def _choices(line: str, with_gradient: bool) -> dict[str, str]:
    """Returns the implementation of each kernel call of a case, also inside calls left to XLA."""
    found: dict[str, str] = {}

    def add(choice: dispatch.Choice) -> None:
        if choice.kernel is not None:
            operands = [None if o is None else [str(o.dtype), *o.shape] for o in choice.operands]
            statics = table.Key.of(choice.kernel, choice.operands).statics
            found[json.dumps([choice.stage, statics, operands])] = choice.implementation
        for stage in choice.stages:
            add(stage)

    with replay.h200(), mock.patch.object(table, "SHIPPED", Path("nowhere")):
        table.load.cache_clear()
        written = programs.of(configs.from_line(line))
        arrays = jax.eval_shape(written.make_inputs, jax.eval_shape(lambda: jax.random.key(0)))
        for choice, _ in explanation.traced(written.whole(written.ours, with_gradient), *arrays)[0]:
            add(choice)
    table.load.cache_clear()
    return found


def _key(record: dict[str, Any]) -> str:
    return json.dumps([record["stage"], record["statics"], record["operands"]])


def _print(title: str, judged: Sequence[Judged], show: int) -> None:
    stages: dict[str, list[Judged]] = {}
    for each in judged:
        stages.setdefault(each.record["stage"], []).append(each)
    print(f"{title:38} stages  wrong  wrong then  time over then  worst")
    for stage, found in [*sorted(stages.items()), ("all", list(judged))]:
        ratio = math.exp(sum(math.log(each.now / each.then) for each in found) / len(found))
        wrong, then = (
            sum(x > _SLOWER for x in values)
            for values in ([e.now for e in found], [e.then for e in found])
        )
        worst = max(each.now for each in found)
        print(f"  {stage:36} {len(found):6} {wrong:6} {then:11} {ratio:15.3f} {worst:6.2f}")
    for each in sorted(judged, key=lambda e: -e.now)[:show]:
        record = each.record
        shapes = [o for o in record["operands"] if o is not None]
        print(f"  {each.now:.2f} {record['stage']}: {each.chosen} of {record['measured']} {shapes}")


if __name__ == "__main__":
    raise SystemExit(main())
