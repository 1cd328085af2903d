"""XLA's part of attention's backward: log-sum-exp and delta of each query, and some gradients.

The gradients are those of sinks, and of a bias that is the same for all keys. Let D = sum(out * dout) of
a query, and p the probability of its sink, which is 0 without a sink. Then delta = D - dlse is
common to the gradients of all its logits: dL_s = P_s (dP_s - delta).
"""

import functools
import operator

import jax
import jax.numpy as jnp

from pallas_kernels.attention.logits import EMPTY_LSE, LOG2E, Logits, Operands


def row_statistics(
    out: jax.Array, lse: jax.Array, dout: jax.Array, dlse: jax.Array | None, logits: Logits
) -> tuple[list[jax.Array], jax.Array]:
    """Returns ([log-sum-exp in base 2], delta), all [B, N, T] in float32, from what a forward saved.

    Queries that attend to nothing get a log-sum-exp of inf, which makes all their probabilities 0. If
    `logits.saves_apart`, the list has the maxima instead, then log2 of the sums.
    """
    delta = jnp.einsum("btnv,btnv->bnt", out.astype(jnp.float32), dout.astype(jnp.float32))
    if dlse is not None:
        delta = delta - dlse
    lse, *log_sum = (
        numbers[:, :, : delta.shape[2]] for numbers in jnp.split(lse, logits.row_numbers, axis=2)
    )
    lse2 = jnp.where(lse <= EMPTY_LSE, jnp.inf, lse if log_sum else lse * LOG2E)
    return [lse2, *log_sum], delta


def row_gradients(
    operands: Operands, saved: list[jax.Array], delta: jax.Array, dlse: jax.Array | None
) -> tuple[jax.Array | None, jax.Array | None]:
    """Returns (dbias, dsinks) for sinks, and for a bias that is the same for all keys; else None.

    A sink is a logit whose probability is multiplied by no value, so its dP is 0. A bias that all keys
    of a query share changes the log-sum-exp by 1 - p and the output by p times the output, so its
    gradient is p D + (1 - p) dlse. The sum of dL over the keys is the same number in exact arithmetic,
    but it also contains the error of delta, whose output was rounded to 16 bits. That error is too
    large without a sink, where the gradient is just dlse.
    """
    bias, sinks = operands.bias, operands.sinks
    rows = jnp.zeros_like(delta) if dlse is None else jnp.where(jnp.isinf(saved[0]), 0.0, dlse)
    dbias, dsinks = None, None
    if sinks is not None:
        exponent = functools.reduce(operator.sub, saved, sinks[:, None] * LOG2E)
        of_sinks = jnp.exp2(exponent) * delta
        dsinks = -jnp.sum(of_sinks, axis=(0, 2))
        rows = rows + of_sinks
    if bias is not None and bias.shape[3] == 1:
        shared = tuple(axis for axis in range(3) if bias.shape[axis] == 1)
        dbias = jnp.sum(rows[..., None], axis=shared, keepdims=True)
    return dbias, dsinks
