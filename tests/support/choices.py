"""Finds which implementation runs each stage of an operator, through the public interface."""

from collections.abc import Callable
from typing import Any

import jax
import pytest

import jaxfused
from jaxfused import dispatch
from jaxfused.runtime import runner


def why_not(f: Callable[..., Any], *args: Any) -> str | None:
    """Returns why the implementation that `f` names cannot run, forward or backward; None if it can."""

    def value_and_gradients(*args):
        results, vjp = jax.vjp(f, *args)
        return vjp(results)

    try:
        jaxfused.explain(value_and_gradients, *args)
    except ValueError as error:
        if "cannot run here" not in str(error):
            raise
        return str(error)
    return None


def skip_where_it_cannot_run(f: Callable[..., Any], *args: Any) -> None:
    """Skips the test with the sentence that a user would read."""
    reason = why_not(f, *args)
    if reason is not None:
        pytest.skip(reason)


def chosen(f: Callable[..., Any], *args: Any) -> dict[str, str]:
    """Returns the implementation that runs each stage of `f`."""
    return {choice.stage: choice.implementation for choice, _ in jaxfused.explain(f, *args).calls}


def choose_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes XLA run every stage that a `Runner` runs, whatever the caller named."""

    def by_xla(self, kernel, *operands):
        return dispatch.Choice(kernel.name, operands, "xla", {"xla": None})

    monkeypatch.setattr(runner.Runner, "choice_on_shard", by_xla)
