"""Backward of attention, query by query: what its kernels need of each, and what needs no kernel.

Let D = sum(out * dout) of a query, and p the probability that its sink takes, 0 without one. Then
delta = D - dlse is what the gradients of its logits have in common, dL_s = P_s (dP_s - delta).
"""

import jax
import jax.numpy as jnp

from pallas_kernels.attention.logits import EMPTY_LSE, LOG2E, Operands


def row_statistics(
    out: jax.Array, lse: jax.Array, dout: jax.Array, dlse: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """The log-sum-exp in base 2 and delta, both [B, N, T] float32, from lse [B, N, R].

    Queries that attend to nothing have a log-sum-exp of inf, which makes all probabilities 0.
    """
    delta = jnp.einsum("btnv,btnv->bnt", out.astype(jnp.float32), dout.astype(jnp.float32))
    if dlse is not None:
        delta = delta - dlse
    lse = lse[:, :, : delta.shape[2]]
    return jnp.where(lse <= EMPTY_LSE, jnp.inf, lse * LOG2E), delta


def row_gradients(
    operands: Operands, lse2: jax.Array, delta: jax.Array, dlse: jax.Array | None
) -> tuple[jax.Array | None, jax.Array | None]:
    """(dbias, dsinks) of a bias that is the same for all keys of a query, and of sinks; else None.

    A sink is a logit whose probability has no value to give, so its dP is 0. Such a bias moves the
    log-sum-exp by 1 - p and the output by p times itself, which is p D + (1 - p) dlse. A sum of dL
    over the keys is that and some of the error that delta has from an output in 16 bits, too much
    where without a sink nothing but dlse is due.
    """
    bias, sinks = operands.bias, operands.sinks
    rows = jnp.zeros_like(delta) if dlse is None else jnp.where(jnp.isinf(lse2), 0.0, dlse)
    dbias, dsinks = None, None
    if sinks is not None:
        of_sinks = jnp.exp2(sinks[:, None] * LOG2E - lse2) * delta
        dsinks = -jnp.sum(of_sinks, axis=(0, 2))
        rows = rows + of_sinks
    if bias is not None and bias.shape[3] == 1:
        shared = tuple(axis for axis in range(3) if bias.shape[axis] == 1)
        dbias = jnp.sum(rows[..., None], axis=shared, keepdims=True)
    return dbias, dsinks
