"""Compares the sweep's cases with stock for an absent H200: `benchmarks sweep --without-gpu`.

Where XLA alone runs an operator, its program should move as many bytes as stock's, in as many kernels.
Nothing is timed: a kernel's estimated time is its launch plus its bytes at the memory's bandwidth, even
for a product. Cases that run kernels of this package are not judged: that needs a GPU.
"""

import collections
import multiprocessing
import re
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax

from benchmarks.run import peers
from benchmarks.sweep import configs, judge, programs
from benchmarks.sweep.lowering import DIRECTIONS, WHOLE
from benchmarks.without_gpu import hlo, target

KERNELS, SAME, LIKE, MORE, FAILED = "kernels", "same program", "like stock", "more", "failed"

_START, _OF_MEGABYTE = 0.8, 0.25
"""Microseconds per kernel launch, and per megabyte."""
_RATIO, _MICROSECONDS = 1.03, 0.3
"""Factor and microseconds by which our program may be slower, because the same kernels in another order
may read an array once more."""
_OURS = r"custom_call @(mosaic_gpu|jaxfused_)"


@dataclass(frozen=True)
class Found:
    """The outcome of a case in one direction."""

    operator: str
    direction: str
    line: str
    status: str
    text: str = ""

    def __str__(self) -> str:
        return f"{self.operator} {self.direction}: {self.status}{self.text}"


def run(cases: Sequence[configs.Config], directions: str, jobs: int, seconds: float) -> int:
    """Compares cases and prints what differs; returns 1 if a program does more than stock's."""
    if reason := target.why_unavailable():
        print(reason)
        return 2
    begin, counts = time.monotonic(), collections.Counter[tuple[str, str]]()
    lines = [configs.to_line(case) for case in cases]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max(1, jobs), context, initializer=_prepare) as pool:
        futures = [pool.submit(compare, line, directions) for line in lines]
        for future in futures:
            if time.monotonic() - begin > seconds:
                future.cancel()
            if future.cancelled():
                continue
            for found in future.result():
                counts[found.operator, found.status] += 1
                if found.status in (MORE, FAILED):
                    print(f"{found}\n    {found.line}", flush=True)
    print(f"{'operator':16} {KERNELS:>13} {SAME:>13} {LIKE:>13} {MORE:>13} {FAILED:>13}")
    for operator in dict.fromkeys(name for name, _ in counts):
        numbers = (counts[operator, status] for status in (KERNELS, SAME, LIKE, MORE, FAILED))
        print(f"{operator:16} " + " ".join(f"{number:13}" for number in numbers))
    return int(any(status in (MORE, FAILED) for _, status in counts))


_device: Any = None


def _prepare() -> None:
    global _device
    _device = target.prepare()


def compare(line: str, directions: str) -> list[Found]:
    """Compares one case in each direction."""
    config = configs.from_line(line)
    found = []
    for direction in DIRECTIONS[directions]:
        try:
            status, text = _compared(config, direction == WHOLE)
        except Exception as error:
            status, text = FAILED, f", {peers.describe(error)}"
        found.append(Found(configs.label(config), direction, line, status, text))
    return found


def _compared(config: configs.Config, with_gradient: bool) -> tuple[str, str]:
    written = programs.of(config)
    shapes = jax.eval_shape(written.make_inputs, jax.eval_shape(lambda: jax.random.key(0)))
    lowered = target.lower_for(_device, written.whole(written.ours, with_gradient), shapes)
    if re.search(_OURS, lowered.as_text()):
        return KERNELS, ""
    ours = target.compile(lowered, triton_products=True)
    own_text, own = judge.program_text(ours), hlo.kernels(ours.as_text())
    forms = {}
    for name, form in written.stock.items():
        whole = written.whole(form, with_gradient)
        stock = target.compile(target.lower_for(_device, whole, shapes), triton_products=True)
        if judge.program_text(stock) == own_text:
            return SAME, ""
        forms[name] = hlo.kernels(stock.as_text())
    best = min(forms, key=lambda name: microseconds(forms[name]))
    times = microseconds(own), microseconds(forms[best])
    text = f", {len(own)} kernels {times[0]:.1f} us, {best} {len(forms[best])} {times[1]:.1f} us"
    if times[0] <= _RATIO * times[1] + _MICROSECONDS:
        return LIKE, text
    return MORE, text + _told("ours", own) + _told(best, forms[best])


def microseconds(kernels: Sequence[hlo.Kernel]) -> float:
    """Returns the microseconds of kernels if only launches and memory took time."""
    return sum(_START + _OF_MEGABYTE * kernel.megabytes for kernel in kernels)


def _told(name: str, kernels: Sequence[hlo.Kernel]) -> str:
    parts = (
        f"{re.sub(r'[.0-9]+$', '', kernel.name)} {kernel.megabytes:.2f} {' '.join(kernel.results)}"
        for kernel in kernels
    )
    return f"\n      {name}: {'; '.join(parts)}"
