"""Judges cases in several processes, by default one per core, which share the GPU if there is one.

A process that raised is replaced, because after an error of the GPU every later call of the process may
fail. A process that does not answer is stopped, and its case counts as hung.
"""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import connection, get_context
from typing import Any

from benchmarks.fuzz import judge
from benchmarks.fuzz.problem import Options

HUNG, CRASHED = "hung", "crashed"


Judge = Callable[[Options], judge.Verdict]
"""Function that judges a case, at a module's top level so that spawned processes can import it."""


def _work(pipe: Any, judged: Judge) -> None:
    """Receives options and sends verdicts in a process, until None comes or the parent has ended."""
    try:
        while (options := pipe.recv()) is not None:
            pipe.send(judged(options))
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        return


class _Worker:
    def __init__(self, judged: Judge) -> None:
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, judged), daemon=True)
        self._process.start()
        theirs.close()
        self.options: Options | None = None
        self.since = time.monotonic()

    def take(self, options: Options) -> None:
        self.options, self.since = options, time.monotonic()
        self.pipe.send(options)

    def stop(self) -> None:
        self._process.kill()
        self._process.join()
        self.pipe.close()


def run(
    cases: Iterable[Options], judged: Judge, count: int, limit: float, stop: Callable[[], bool]
) -> Iterator[tuple[Options, judge.Verdict, float]]:
    """Yields (case, verdict, seconds), each within `limit` seconds; none starts after `stop()`."""
    remaining = iter(cases)
    workers: list[_Worker] = []

    def next_case() -> Options | None:
        return None if stop() else next(remaining, None)

    try:
        for options in itertools.islice(remaining, count):
            workers.append(_Worker(judged))
            workers[-1].take(options)
        while workers:
            for worker, verdict in _answers(workers, limit):
                assert worker.options is not None
                yield worker.options, verdict, time.monotonic() - worker.since
                options_left = next_case()
                if verdict.status in (judge.RAISED, HUNG, CRASHED):
                    worker.stop()
                    workers.remove(worker)
                    if options_left is not None:
                        workers.append(worker := _Worker(judged))
                if options_left is not None:
                    worker.take(options_left)
                elif worker in workers:
                    worker.stop()
                    workers.remove(worker)
    finally:
        for worker in workers:
            worker.stop()


def _answers(workers: list[_Worker], limit: float) -> list[tuple[_Worker, judge.Verdict]]:
    """Waits for verdicts, and adds verdicts on the cases of workers that died or are too slow."""
    ready = connection.wait([worker.pipe for worker in workers], timeout=1.0)
    answers = []
    for worker in list(workers):
        if worker.pipe in ready:
            try:
                answers.append((worker, worker.pipe.recv()))
            except (EOFError, OSError):
                answers.append((worker, judge.Verdict(CRASHED, "the process died")))
        elif time.monotonic() - worker.since > limit:
            why = f"no answer within {limit:.0f} s"
            answers.append((worker, judge.Verdict(HUNG, why)))
    return answers
