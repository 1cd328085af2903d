"""Rules that say which implementations of an operator are expected to be the fastest.

A stage (one kernel's work) says why an implementation cannot run (`why_not`) and may say which of the
others it expects to be faster (`estimate`). This module alone derives the order from both.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple


class Rule(NamedTuple):
    """A rule that puts some implementations of a stage first."""

    first: Sequence[str]
    """Implementations that come before the others, in this order."""
    why: str
    """The reason as part of a sentence, such as "the rows are short"."""


Estimate = Rule | None
"""A rule, or None if implementations are tried in the order of `Stage.why_not`."""


KERNELS = ("pallas", "cuda")
MEGABYTE = 1e6
"""Bytes in a megabyte, the unit of thresholds of weights."""


def always(first: Sequence[str], why: str) -> Callable[..., Rule]:
    """Returns an `estimate` that puts implementations first at all sizes, for the reason `why`."""

    def estimate(stage: Any, device: Any, able: Collection[str], *operands: Any) -> Rule:
        del stage, device, able, operands
        return Rule(first, why)

    return estimate


def kernels_first(why: str) -> Callable[..., Rule]:
    """Returns an `estimate` that orders kernels before XLA at all sizes, for the reason `why`."""
    return always(KERNELS, why)


def in_order(why_not: Mapping[str, str | None], estimate: Estimate) -> dict[str, str | None]:
    """Returns `why_not` with the implementations that `estimate` prefers first."""
    names = list(why_not)
    if estimate is not None:
        first = [name for name in estimate.first if name in why_not]
        names = [*first, *(name for name in names if name not in first)]
    return {name: why_not[name] for name in names}
