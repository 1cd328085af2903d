"""The names that operators give their values, by which policies of `jax.checkpoint` select them.

A name is "jaxfused.<operator>.<what>". Every value that an operator's backward reads is one of its
inputs or has such a name, and so has every result. Where a policy saves all of an operator's names, the
operator's forward kernel does not run again.
"""

from typing import Any, Literal

from jax.ad_checkpoint import checkpoint_name

PREFIX = "jaxfused."

What = Literal[
    "output", "next_residual", "statistics", "log_sum_exp", "preactivation", "hidden", "projections"
]
"""Kinds of an operator's values: its result; the residual stream after a norm; means and 1 / standard
deviations; attention's log-sum-exp; the input of an activation; an MLP's hidden layer and the
derivative of its activation; queries and keys before their norm and rotation."""


def name_of(operator: str, what: What) -> str:
    """Returns the name of a value, such as "jaxfused.layer_norm.statistics"."""
    return f"{PREFIX}{operator}.{what}"


def named(value: Any, operator: str, what: What) -> Any:
    """Gives each array of a tree the checkpoint name of `what`; returns None for None."""
    return checkpoint_name(value, name_of(operator, what))
