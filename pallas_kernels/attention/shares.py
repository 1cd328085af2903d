"""Results of tiles whose blocks of keys are divided among CTAs (shares), and how these are merged.

Where few queries attend to all keys, as global tokens do, the SM that computes their tile would end long
after the others. So the tile's list of key blocks is divided into shares. The CTA of a share computes
output and log-sum-exp of the tile's queries over the share's keys, in float32, and XLA merges a tile's
shares in a fixed order, so that results repeat bit for bit.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.attention.logits import Logits
from pallas_kernels.attention.own_lists import OwnLists


def result_of_shares(
    own: OwnLists | None, batch: int, heads: int, rows: int, *width: int
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns the shape of the shares' results [B, N, all shares, rows, *width]; () for none."""
    if own is None or not own.split:
        return ()
    sizes = (batch, heads, len(own.split) * own.shares, rows, *width)
    return (jax.ShapeDtypeStruct(sizes, jnp.float32),)


def store_share(gmem: Any, place: tuple[Any, ...], blocks: Sequence[jax.Array]) -> None:
    """Stores float32 blocks [64, columns] in `gmem` [B, N, all shares, rows, width].

    `place` has the indices (batch, head, share, range of rows); the blocks are adjacent in the width.
    """
    column = 0
    for block in blocks:
        gmem[(*place, pl.ds(column, block.shape[1]))] = block
        column += block.shape[1]


def with_shares(
    results: Sequence[jax.Array],
    of_shares: Sequence[jax.Array],
    logits: Logits,
    starts: Sequence[int],
) -> tuple[jax.Array, ...]:
    """Returns the results of `Forward` with the rows of divided tiles filled in.

    Args:
      results: `forward_results`; rows of divided tiles are undefined.
      of_shares: the same of each share; columns of the output from V on are padding.
      logits: parameters of the logits.
      starts: first row of each divided tile.
    """
    share_outs, *rows_of_shares = of_shares
    batch, heads, _, rows, value_size = share_outs.shape
    share_outs = share_outs.reshape(batch, heads, len(starts), -1, rows, value_size)
    rows_of_shares = [x.reshape(batch, heads, len(starts), -1, rows) for x in rows_of_shares]
    # Without the barrier XLA fuses the updates with the kernel whose output they read: a cycle.
    results, share_outs, rows_of_shares = lax.optimization_barrier(
        (tuple(results), share_outs, rows_of_shares)
    )
    out, *of_rows = results
    share_lses, *rests = rows_of_shares
    highest = jnp.max(share_lses, axis=3, keepdims=True)
    weights = jnp.exp(share_lses - highest)
    if rests:
        weights = weights * jnp.exp2(rests[0])
    total = jnp.sum(weights, axis=3)
    merged = jnp.einsum("bntsr,bntsrv->bntrv", weights, share_outs) / total[..., None]
    highest = highest[:, :, :, 0]
    merged_rows = logits.log_sum_exp(highest, total) if rests else [highest + jnp.log(total)]
    for i, start in enumerate(starts):
        count = min(rows, of_rows[0].shape[2] - start)
        of_rows = [
            lax.dynamic_update_slice_in_dim(x, merged[:, :, i, :count], start, axis=2)
            for x, merged in zip(of_rows, merged_rows, strict=True)
        ]
    return _filled(out, merged, starts), *of_rows


def with_sums(gradient: jax.Array, shares: Sequence[jax.Array], starts: Sequence[int]) -> jax.Array:
    """Returns the gradient [B, T, N, H] with the sums of shares in the rows of divided tiles.

    Args:
      gradient: of queries, keys or values; rows of divided tiles are undefined.
      shares: the shares' gradients [B, N, all shares, rows, padded H] as the only item, or none.
      starts: first row of each divided tile.
    """
    for parts in shares:
        gradient, parts = lax.optimization_barrier((gradient, parts))
        batch, heads, _, rows, width = parts.shape
        apart = parts.reshape(batch, heads, len(starts), -1, rows, width)
        gradient = _filled(gradient, jnp.sum(apart, axis=3), starts)
    return gradient


def _filled(array: jax.Array, tiles: jax.Array, starts: Sequence[int]) -> jax.Array:
    """Returns the array [B, T, N, V] with `tiles` [B, N, tiles, rows, padded V] at rows `starts`."""
    for i, start in enumerate(starts):
        count = min(tiles.shape[3], array.shape[1] - start)
        values = tiles[:, :, i, :count, : array.shape[3]].swapaxes(1, 2).astype(array.dtype)
        array = lax.dynamic_update_slice_in_dim(array, values, start, axis=1)
    return array


def sum_of_shares(gradient: jax.Array, shares: int) -> jax.Array:
    """Sums the shares of each key head in float32: [B, S, K * shares, .] to [B, S, K, .]."""
    if shares == 1:
        return gradient
    batch, count, heads, size = gradient.shape
    apart = gradient.reshape(batch, count, heads // shares, shares, size)
    return jnp.sum(apart, axis=3, dtype=jnp.float32).astype(gradient.dtype)
