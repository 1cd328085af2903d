"""Reports of what `fuse` found in a program, for `jaxfused.explain`."""

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from jaxfused.fusion.site import Miss


@dataclass(frozen=True)
class Found:
    """One replacement: an operator that runs in place of operations of the program."""

    label: str
    """Label such as "layer_norm#3", for the argument `without` of `fuse`."""
    operator: str
    line: str
    detail: str
    replaced: int
    """Number of the program's operations that the operator replaces."""


@dataclass(frozen=True)
class Report:
    """The parts of a program that `fuse` replaces, and those that it nearly matches."""

    name: str
    """Name of the function that `fuse` was given."""
    found: tuple[Found, ...] = ()
    misses: tuple[Miss, ...] = ()
    left_alone: str = ""
    """Reason why the whole program is left as it is, or ""."""

    def counts(self) -> dict[str, int]:
        """Returns how often each operator replaces operations."""
        return dict(Counter(site.operator for site in self.found))

    def __str__(self) -> str:
        if self.left_alone:
            return f"fuse({self.name}) changes nothing: {self.left_alone}"
        counts = ", ".join(f"{n} x {operator}" for operator, n in self.counts().items())
        lines = [f"fuse({self.name}) found {counts or 'nothing'}:"]
        lines += [
            f"  {site.label} at {site.line}: {site.detail}, for {site.replaced} operations"
            for site in self.found
        ]
        for miss, count in Counter(self.misses).items():
            times = f"{count} x " if count > 1 else ""
            lines.append(f"  {times}no {miss.operator} at {miss.line}: {miss.reason}")
        return "\n".join(lines)


_recordings: list[list[Report]] = []


def record(report: Report) -> None:
    """Adds a report to the lists of all active `recorded` contexts."""
    for recording in _recordings:
        recording.append(report)


@contextlib.contextmanager
def recorded() -> Iterator[list[Report]]:
    """Yields a list to which the reports of all functions that `fuse` traces in it are added."""
    recording: list[Report] = []
    _recordings.append(recording)
    try:
        yield recording
    finally:
        _recordings[:] = [other for other in _recordings if other is not recording]
