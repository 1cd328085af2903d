"""Results of tiles whose blocks of keys are divided among CTAs (shares), and how these are merged.

Where few rows attend to all keys, as those of global tokens do, one SM would work on them long after the
others have ended. Each share writes its rows' output and log-sum-exp in float32, and XLA merges them in
the order of the shares, so that bits repeat.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.attention.shape import Shape


def results_of_shares(
    shape: Shape, tiles: int, shares: int, rows: int
) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Returns the shapes of output [B, N, tiles * shares, rows, V] and log-sum-exp, without V."""
    sizes = (shape.batch, shape.heads, tiles * shares, rows)
    return (
        jax.ShapeDtypeStruct((*sizes, shape.value_size), jnp.float32),
        jax.ShapeDtypeStruct(sizes, jnp.float32),
    )


def with_shares(
    out: jax.Array,
    lse: jax.Array,
    share_outs: jax.Array,
    share_lses: jax.Array,
    starts: Sequence[int],
) -> tuple[jax.Array, jax.Array]:
    """Returns (out [B, T, N, V], lse [B, N, R]) with the rows of divided tiles filled in.

    Args:
      out: output; rows of divided tiles are undefined.
      lse: log-sum-exp, likewise.
      share_outs: output of each share; columns from V on are padding.
      share_lses: log-sum-exp of each share.
      starts: first row of each divided tile.
    """
    batch, heads, _, rows, value_size = share_outs.shape
    share_outs = share_outs.reshape(batch, heads, len(starts), -1, rows, value_size)
    share_lses = share_lses.reshape(batch, heads, len(starts), -1, rows)
    highest = jnp.max(share_lses, axis=3, keepdims=True)
    weights = jnp.exp(share_lses - highest)
    total = jnp.sum(weights, axis=3)
    merged = jnp.einsum("bntsr,bntsrv->bntrv", weights, share_outs) / total[..., None]
    merged_lse = highest[:, :, :, 0] + jnp.log(total)
    for i, start in enumerate(starts):
        count = min(rows, out.shape[1] - start)
        values = merged[:, :, i, :count, : out.shape[3]].swapaxes(1, 2).astype(out.dtype)
        out = jax.lax.dynamic_update_slice_in_dim(out, values, start, axis=1)
        count = min(rows, lse.shape[2] - start)
        lse = jax.lax.dynamic_update_slice_in_dim(lse, merged_lse[:, :, i, :count], start, axis=2)
    return out, lse


def sum_of_shares(gradient: jax.Array, shares: int) -> jax.Array:
    """Sums the shares of each key head in float32: [B, S, K * shares, .] to [B, S, K, .]."""
    if shares == 1:
        return gradient
    batch, count, heads, size = gradient.shape
    apart = gradient.reshape(batch, count, heads // shares, shares, size)
    return jnp.sum(apart, axis=3, dtype=jnp.float32).astype(gradient.dtype)
