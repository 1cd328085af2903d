"""`python -m benchmarks.choice.replay`: estimates how changed choices of kernels affect recorded sweeps.

`--out FILE` traces recorded cases as for an H200, without a GPU, and writes each stage's implementation.
`--before FILE` traces them again and compares: a case whose stages all run as before has a ratio of 1.
Cases that change between kernels and XLA are judged by recorded times, ours for kernels and stock's for
XLA; ratios of the rest are unknown. A ratio is the time before over the time now: below 1 the change
makes a case slower. A loss is at least 5 % and half a microsecond, as in the sweep.
"""

import argparse
import contextlib
import json
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax

from benchmarks.report import results
from benchmarks.sweep import configs, programs, report
from benchmarks.sweep.lowering import OURS, WHOLE
from jaxfused import dispatch, explanation
from jaxfused.ops.linear import cublaslt
from jaxfused.runtime import cuda_library

H200 = dispatch.Device("gpu", "NVIDIA H200", (9, 0), 132)
_OUR_KERNELS = ("mosaic", "jaxfused", "pallas")

Stage = dict[str, Any]
Key = tuple[str, str]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("operators", nargs="*", metavar="OPERATOR", help="default: all")
    parser.add_argument("--out", type=Path, help="writes the choices of the present code")
    parser.add_argument("--before", type=Path, help="a file of --out, with which to compare")
    parser.add_argument("--every", type=int, default=1, help="only each N-th case of an operator")
    parser.add_argument("--show", type=int, default=10, help="how many of the slowest to print")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    os.environ["XDG_CACHE_HOME"] = os.devnull
    _, entries = report.load(sorted(results.DIRECTORY.glob("*-sweep.json")))
    entries = [e for e in entries if "microseconds" in e and OURS in e["microseconds"]]
    wanted = [e for e in entries if not options.operators or e["operator"] in options.operators]
    if options.before:
        before = {tuple(key): stages for key, stages in json.loads(options.before.read_text())}
        wanted = [e for e in wanted if _key(e) in before]
    keys = list(dict.fromkeys(map(_key, wanted)))
    now = dict(_choices(keys[:: options.every]))
    if options.out:
        options.out.write_text(json.dumps(list(now.items())) + "\n")
    if options.before:
        _compare(wanted, before, now, options.show)
    return 0


def _key(entry: dict[str, Any]) -> Key:
    return entry["case"], entry["direction"]


# --- which kernels run ----------------------------------------------------------------------------


def _choices(keys: Sequence[Key]) -> Iterator[tuple[Key, list[Stage]]]:
    begin = said = time.monotonic()
    with h200():
        for index, (line, direction) in enumerate(keys):
            try:
                yield (line, direction), _stages(line, direction == WHOLE)
            except (TypeError, ValueError, KeyError) as error:
                print(f"left out: {direction} {line}: {error!r:.200}", flush=True)
            if time.monotonic() - said > 20:
                said = time.monotonic()
                print(f"[{said - begin:4.0f} s] {index + 1} of {len(keys)}", flush=True)


@contextlib.contextmanager
def h200() -> Iterator[None]:
    """Makes operators choose kernels as on an H200 with the CUDA library, without having either."""
    with (
        dispatch.assume(H200),
        mock.patch.object(cuda_library, "why_unavailable", lambda: None),
        mock.patch.object(cuda_library, "architectures", lambda: ("75-real", "90-real")),
        mock.patch.object(cuda_library, "register", lambda: None),
        mock.patch.object(cublaslt, "why_unavailable", lambda: None),
    ):
        yield


def _stages(line: str, with_gradient: bool) -> list[Stage]:
    """Returns the implementation chosen for each kernel call of a case, and those that can run."""
    written = programs.of(configs.from_line(line))
    arrays = jax.eval_shape(written.make_inputs, jax.eval_shape(lambda: jax.random.key(0)))
    found = explanation.traced(written.whole(written.ours, with_gradient), *arrays)[0]
    return [
        {
            "stage": choice.stage,
            "operands": [None if o is None else [str(o.dtype), *o.shape] for o in choice.operands],
            "runs": choice.implementation,
            "able": [name for name, reason in choice.reasons.items() if reason is None],
            "count": runs,
        }
        for choice, runs in found
    ]


# --- effect on recorded times ---------------------------------------------------------------------


def _compare(
    entries: Sequence[dict[str, Any]],
    before: dict[Any, list[Stage]],
    now: dict[Any, list[Stage]],
    show: int,
) -> None:
    ratios: dict[Key, list[tuple[float, str, dict[str, Any]]]] = {}
    for entry in entries:
        key = _key(entry)
        if key in now:
            ratio, how = _ratio(entry, before[key], now[key])
            ratios.setdefault((entry["operator"], entry["direction"]), []).append(
                (ratio, how, entry)
            )
    print(
        f"{'operator':22}{'direction':18}  cases  changed measured  unknown  median    min  losses"
    )
    for (operator, direction), found in sorted(ratios.items()):
        known = [r for r, how, _ in found if how != "unknown"]
        hows = [how for _, how, _ in found]
        print(
            f"{operator:22}{direction:18} {len(found):6} {len(found) - hows.count('same'):8}"
            f" {hows.count('measured'):8} {hows.count('unknown'):8}"
            f" {statistics.median(known or [1]):7.3f} {min(known or [1]):6.3f}"
            f" {sum(map(_is_loss, found)):7}"
        )
    changed = [item for found in ratios.values() for item in found if item[1] != "same"]
    if changed:
        gains = [r for r, how, _ in changed if how != "unknown"]
        print(f"{len(changed)} changed; mean ratio of those {statistics.fmean(gains or [1]):.3f}")
    shown = sorted(changed, key=lambda item: (not _is_loss(item), item[0]))
    for ratio, how, entry in shown[:show]:
        key = _key(entry)
        print(f"{ratio:6.3f} {how:9} {entry['direction']} {entry['case']}")
        print(f"       {_told(before[key])}  ->  {_told(now[key])}")


def _is_loss(item: tuple[float, str, dict[str, Any]]) -> bool:
    """Returns whether a case is slower by more than the sweep's tolerance."""
    ratio, _, entry = item
    before = entry["microseconds"][OURS]
    return ratio < report.NEAR and before / ratio - before > report.MICROSECONDS


def _told(stages: Sequence[Stage]) -> str:
    return ", ".join(f"{s['stage'].split(' ', 1)[-1]}: {s['runs']}" for s in stages)


def _ratio(
    entry: dict[str, Any], before: Sequence[Stage], now: Sequence[Stage]
) -> tuple[float, str]:
    """Returns the time before over the time now, and its source: "same", "measured" or "unknown"."""
    runs = [[stage["runs"] for stage in stages] for stages in (before, now)]
    if runs[0] == runs[1]:
        return 1.0, "same"
    stock, ours = report.stock_time(entry), entry["microseconds"][OURS]
    kernels = entry.get("kernels", {}).get(OURS)
    ran_kernels = kernels is not None and any(
        word in name.lower() for name, _ in kernels for word in _OUR_KERNELS
    )
    in_xla = [all(name == "xla" for name in names) for names in runs]
    if stock is not None and ran_kernels and in_xla[0] != in_xla[1]:
        return (ours / stock[1] if in_xla[1] else stock[1] / ours), "measured"
    return 1.0, "unknown"


if __name__ == "__main__":
    raise SystemExit(main())
