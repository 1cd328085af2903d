"""A command's rows within a budget of seconds: each is printed and saved as soon as it is measured."""

import contextlib
import multiprocessing
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import jax

from benchmarks.report import results
from benchmarks.run import peers

_COMPILING = 0.6
"""Share of the budget during which nothing is timed while a program compiles."""


@contextlib.contextmanager
def limited(seconds: float | None, *, remove: str | None = None) -> Iterator[None]:
    """Ends the process with status 0 after so many seconds, whatever it waits for; None for no limit.

    Its processes are then killed, and the folder `remove` is removed.
    """
    if seconds is None:
        yield
        return

    def end() -> None:
        print(f"the budget of {seconds:g} s is spent; what was measured is saved", flush=True)
        for process in multiprocessing.active_children():
            process.kill()
        if remove is not None:
            shutil.rmtree(remove, ignore_errors=True)
        os._exit(0)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class Rows:
    """Rows of a section of the results, in the order of their worth."""

    def __init__(self, name: str, out: Path, seconds: float):
        self._name, self._out, self._seconds = name, out, seconds
        self._begin = time.monotonic()
        self._gpu = jax.devices()[0].device_kind
        machine = {"versions": results.versions(), "gpu_before": results.gpu_state()}
        self._section = {"date": results.now(), "commit": results.commit(), "machine": machine}
        self.rows: dict[str, dict[str, Any]] = {}

    def add(self, name: str, row: dict[str, Any]) -> None:
        """Saves and prints a row."""
        self.rows[name] = row
        section = {**self._section, "rows": self.rows}
        results.save_section(self._out, self._gpu, self._name, section)
        fields = ", ".join(f"{key} {value}" for key, value in results.rounded(row).items())
        print(f"[{time.monotonic() - self._begin:5.1f} s] {name}: {fields}", flush=True)

    def measure(
        self,
        programs: Mapping[str, Callable[[], Any]],
        measure: Callable[[str, Any], dict[str, Any]],
    ) -> None:
        """Lowers and compiles programs, and adds the row that `measure` returns of each.

        A failure costs one row. When most of the budget is spent, those that have been compiled are
        timed, first in order, beside the others' compilation; their rows say so.
        """
        with ThreadPoolExecutor(4) as pool:

            def started(lower: Callable[[], Any]) -> Any:
                try:
                    return pool.submit(lower().compile)
                except Exception as error:
                    return pool.submit(_raise, error)

            pending = {name: started(lower) for name, lower in programs.items()}
            left = _COMPILING * self._seconds - (time.monotonic() - self._begin)
            wait(pending.values(), timeout=max(0.0, left))
            for name in sorted(pending, key=lambda name: not pending[name].done()):
                try:
                    row = measure(name, pending[name].result())
                except Exception as error:
                    row = {"failed": peers.describe(error)}
                if not all(future.done() for future in pending.values()):
                    row["note"] = "timed while another program compiled"
                self.add(name, row)

    def compare(self, bars: Sequence[tuple[str, str, float]]) -> int:
        """Adds `over` to rows, how many times as fast as another; returns 1 if any bar is missed."""
        missed = 0
        for ours, other, must in bars:
            times = [self.rows.get(name, {}).get("milliseconds") for name in (ours, other)]
            if None not in times:
                ratio = times[1] / times[0]
                missed += ratio < must
                over = self.rows[ours].get("over", {}) | {other: {"ratio": ratio, "must": must}}
                self.add(ours, self.rows[ours] | {"over": over})
        return int(missed > 0)


def _raise(error: Exception) -> Any:
    raise error
