"""Reductions of losses: their sum, or their mean over the tokens that are not ignored, with weights."""

from typing import Any, Literal

import jax
import jax.numpy as jnp

Reduction = Literal["mean", "sum", "none"]


def check_reduction(op: str, reduction: str) -> None:
    """Checks that `reduction` is "mean", "sum" or "none"."""
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(
            f"{op}: reduction={reduction!r} is not known; pass 'mean', 'sum' or 'none'."
        )


def reduce_losses(
    losses: jax.Array,
    counts: jax.Array,
    weights: jax.Array | None,
    reduction: str,
    of_labels: jax.Array | None = None,
) -> jax.Array:
    """Returns the sum or the mean of the losses of the tokens that count, or all losses weighted.

    `of_labels` are class weights that the losses already include; a mean divides by them too.
    """
    shares, total = shares_of(counts, weights, reduction, losses.dtype)
    if of_labels is not None:
        _, total = shares_of(counts, times(weights, of_labels), reduction, losses.dtype)
    if weights is not None:
        losses = losses * shares
    if reduction == "none":
        return losses
    return jnp.sum(losses) / total if reduction == "mean" else jnp.sum(losses)


def shares_of(
    counts: jax.Array, weights: jax.Array | None, reduction: str, dtype: Any = jnp.float32
) -> tuple[jax.Array, jax.Array | float]:
    """Returns (shares [...], total): the weight of each loss, and the divisor of the weighted sum.

    Shares are 0 for tokens that do not count. For a mean, total is the sum of the shares, or 1 if
    that is 0; otherwise it is 1.
    """
    shares = counts.astype(dtype)
    if weights is not None:
        shares = shares * weights.astype(dtype)
    if reduction != "mean":
        return shares, 1.0
    total = jnp.sum(shares)
    return shares, jnp.where(total == 0.0, 1.0, total)


def times(weights: jax.Array | None, others: jax.Array | None) -> jax.Array | None:
    """Returns weights * others, where None means ones."""
    if weights is None or others is None:
        return others if weights is None else weights
    return weights * others
