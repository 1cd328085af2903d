"""Grids of cases: `make test` runs a few of each, and `make test-all` the others."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest


def pairwise(*options: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Returns cases, one value of each option, in which every two values of two options meet.

    They are far fewer than all combinations, which hardly ever find more errors. They come in the order
    of `itertools.product`, whose first case is among them, and are the same in every run.

    >>> pairwise("ab", "cd", "ef")
    [('a', 'c', 'e'), ('a', 'd', 'f'), ('b', 'c', 'f'), ('b', 'd', 'e')]
    """

    def pairs(case: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
        return set(itertools.combinations(enumerate(case), 2))

    combinations = list(itertools.product(*(range(len(values)) for values in options)))
    missing = set().union(*map(pairs, combinations))
    chosen = []
    while missing:
        chosen.append(max(combinations, key=lambda case: len(pairs(case) & missing)))
        missing -= pairs(chosen[-1])
    return [
        tuple(values[i] for values, i in zip(options, case, strict=True)) for case in sorted(chosen)
    ]


def parametrize(
    names: str | tuple[str, ...],
    values: Sequence[Any],
    *,
    quick: slice | Iterable[int],
    ids: Callable[[Any], str] | Sequence[str] = str,
) -> pytest.MarkDecorator:
    """Works like `pytest.mark.parametrize`, and marks values outside `quick` as `exhaustive`.

    Args:
      names: of one argument, or of several as a tuple.
      values: one each, or a tuple each where there are several names.
      quick: the indices of those that `make test` runs: a kernel's smallest case of each kind.
      ids: names a value, or their names.
    """

    def name(value: Any) -> str:
        # pytest-xdist stops where two of its processes give a test different names.
        assert callable(ids)
        assert " at 0x" not in ids(value), f"{ids(value)} is an address, which differs; pass ids"
        return ids(value)

    kept = set(range(len(values))[quick] if isinstance(quick, slice) else quick)
    assert kept <= set(range(len(values))), f"quick has {kept}, and there are {len(values)} values"
    return pytest.mark.parametrize(
        names,
        [
            pytest.param(
                *((value,) if isinstance(names, str) else value),
                marks=() if i in kept else pytest.mark.exhaustive,
            )
            for i, value in enumerate(values)
        ],
        ids=name if callable(ids) else ids,
    )
