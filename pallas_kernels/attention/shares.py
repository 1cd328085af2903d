"""Results of tiles whose blocks of keys are divided among CTAs (shares), and how these are merged.

Where few rows attend to all keys, as those of global tokens do, one SM would work on them long after the
others have ended. Each share writes its rows' output and log-sum-exp in float32, and XLA merges them in
the order of the shares, so that bits repeat.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

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
    """Stores a warpgroup's rows in blocks of columns at `place`, (batch, head, share, rows)."""
    column = 0
    for block in blocks:
        gmem[(*place, pl.ds(column, block.shape[1]))] = block
        column += block.shape[1]


def with_shares(
    out: jax.Array,
    saved: jax.Array,
    share_outs: jax.Array,
    of_shares: Sequence[jax.Array],
    starts: Sequence[int],
) -> tuple[jax.Array, jax.Array]:
    """Returns (out [B, T, N, V], saved [B, N, R or 2 R]) with the rows of divided tiles filled in.

    Args:
      out: output; rows of divided tiles are undefined.
      saved: log-sum-exp, or its two parts (`Logits.saves_apart`), likewise.
      share_outs: output of each share; columns from V on are padding.
      of_shares: log-sum-exp of each share, or its two parts in an array each.
      starts: first row of each divided tile.
    """
    batch, heads, _, rows, value_size = share_outs.shape
    share_outs = share_outs.reshape(batch, heads, len(starts), -1, rows, value_size)
    of_shares = [x.reshape(batch, heads, len(starts), -1, rows) for x in of_shares]
    # Without the barrier XLA joins the kernel and the updates of its own output, which is a cycle.
    out, saved, share_outs, *of_shares = lax.optimization_barrier(
        (out, saved, share_outs, *of_shares)
    )
    highest = jnp.max(of_shares[0], axis=3, keepdims=True)
    weights = of_shares[0] - highest
    weights = jnp.exp(weights) if len(of_shares) == 1 else jnp.exp2(weights + of_shares[1])
    total = jnp.sum(weights, axis=3)
    merged = jnp.einsum("bntsr,bntsrv->bntrv", weights, share_outs) / total[..., None]
    merged_rows = [highest[:, :, :, 0], jnp.log2(total)]
    if len(of_shares) == 1:
        merged_rows = [highest[:, :, :, 0] + jnp.log(total)]
    length = saved.shape[2] // len(merged_rows)
    for i, start in enumerate(starts):
        count = min(rows, length - start)
        for first, numbers in zip((0, length), merged_rows, strict=False):
            numbers = numbers[:, :, i, :count]
            saved = lax.dynamic_update_slice_in_dim(saved, numbers, first + start, axis=2)
    return _filled(out, merged, starts), saved


def with_sums(gradient: jax.Array, shares: Sequence[jax.Array], starts: Sequence[int]) -> jax.Array:
    """Returns the gradient [B, T, N, H] with the sums of shares in the rows of divided tiles.

    Args:
      gradient: of queries, keys or values; rows of divided tiles are undefined.
      shares: the one result of the shares, or none.
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
