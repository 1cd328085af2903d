"""What XLA computes in attention's backward: log-sum-exp and delta of each query, and two gradients.

The gradients are those of sinks, and of a bias that is the same for all keys. For a query, let D be the
sum of out * dout over its features, and p the probability of its sink, 0 without a sink. The gradient of
its logit for key s is dL_s = P_s (dP_s - delta), with delta = D - dlse for all keys.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.attention.logits import Logits, Operands


def row_statistics(
    out: jax.Array, lse: jax.Array, dout: jax.Array, dlse: jax.Array | None, logits: Logits
) -> tuple[jax.Array, jax.Array]:
    """Returns the log-sum-exp in `logits`'s base and delta, both float32 [B, N, T], from lse [B, N, R].

    Queries that attend to nothing get a log-sum-exp of inf, which makes all their probabilities 0.
    """
    delta = jnp.einsum("btnv,btnv->bnt", out.astype(jnp.float32), dout.astype(jnp.float32))
    if dlse is not None:
        delta = delta - dlse
    lse = lse[:, :, : delta.shape[2]]
    return jnp.where(logits.is_empty(lse), jnp.inf, lse * logits.unit), delta


def row_gradients(
    operands: Operands,
    lse2: jax.Array,
    delta: jax.Array,
    dlse: jax.Array | None,
    logits: Logits,
) -> tuple[jax.Array | None, jax.Array | None]:
    """Returns (dbias [B or 1, N or 1, T or 1, 1], dsinks [N]) from lse2, delta and dlse [B, N, T].

    Each is None without its operand; dbias also if the bias differs between keys. A sink is a logit
    whose probability is multiplied by no value, so its dP is 0. A bias that all keys of a query share
    changes lse by 1 - p and out by p * out, so its gradient is p D + (1 - p) dlse.

    The sum of dL over the keys is the same number in exact arithmetic, but has the error of delta, which
    is computed from an output of 16 bits. Without a sink, where the gradient is dlse, that error would
    be too large.
    """
    bias, sinks = operands.bias, operands.sinks
    rows = jnp.zeros_like(delta) if dlse is None else jnp.where(jnp.isinf(lse2), 0.0, dlse)
    dbias, dsinks = None, None
    if sinks is not None:
        rest = None if operands.lse_rest is None else -operands.lse_rest[..., 0]
        of_sinks = logits.exp(sinks[:, None] * logits.unit - lse2, rest) * delta
        dsinks = -jnp.sum(of_sinks, axis=(0, 2))
        rows = rows + of_sinks
    if bias is not None and bias.shape[3] == 1:
        shared = tuple(axis for axis in range(3) if bias.shape[axis] == 1)
        dbias = jnp.sum(rows[..., None], axis=shared, keepdims=True)
    return dbias, dsinks
