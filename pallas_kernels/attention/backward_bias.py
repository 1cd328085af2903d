"""Gradient of attention's bias on Hopper: the logits' gradient, summed over the bias's broadcast axes.

For a bias that is not broadcast, `backward_dq` writes the gradient.

A CTA owns a tile of the bias and visits every tile of logits that this tile is broadcast to: all batch
entries and heads that share it and, where the bias has a single row, all tiles of queries. The CTA
recomputes the gradient of these logits from the products Q K^T and dO V^T, and holds the sum in
registers, so that no array of the size of the logits is ever written.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention import memory
from pallas_kernels.attention.logits import Logits, Operands, Tile
from pallas_kernels.attention.memory import Columns, Heads, Matrix
from pallas_kernels.attention.shape import Shape

BIAS_GRADIENT_TILE = (64, 128)
"""Queries and keys of a tile of the bias gradient."""


def bias_gradient(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    operands: Operands,
    lse2: jax.Array,
    delta: jax.Array,
    dout: jax.Array,
    *,
    logits: Logits,
    bias_shape: tuple[int, ...] | None = None,
    read: int | None = None,
    dtype: Any = jnp.float32,
) -> jax.Array:
    """Returns the gradient in the bias's shape and in `dtype`, for a bias that differs between keys.

    The gradient is summed in float32 and rounded once. `backward_rows` serves a bias that is the same
    for all keys. lse2 and delta are [B, N, T padded to whole tiles]. With `read`, the result is instead
    the gradient of an array of shape `bias_shape` that `logits.score` reads: number `read`, from 1,
    among those with a gradient.
    """
    shape = Shape.of(query, key, value)
    bias_shape = bias_shape or operands.bias.shape
    tiles = (
        pl.cdiv(shape.query_count, BIAS_GRADIENT_TILE[0]),
        pl.cdiv(shape.key_count, BIAS_GRADIENT_TILE[1]),
    )
    whole = (shape.batch, shape.heads, *tiles)
    own = tuple(1 if n == 1 else count for n, count in zip(bias_shape, whole, strict=True))
    lengths = (shape.query_count, shape.key_count)
    kernel = _BiasGradient(
        shape,
        query.dtype,
        logits,
        read,
        shared=tuple(count // mine for count, mine in zip(whole, own, strict=True))[:3],
        head=Columns.of(shape.head_size, lengths),
        value=Columns.of(shape.value_size, lengths),
    )
    operands = operands.padded(*BIAS_GRADIENT_TILE)
    optional, tree = jax.tree.flatten(operands)

    def run(q, k, v, do, lse, delta, *refs, **scratch):
        *optional_refs, dbias_gmem = refs
        ops = jax.tree.unflatten(tree, optional_refs)
        kernel(_References((q, k, v, do), lse, delta, ops, dbias_gmem, scratch))

    out_shape = (*own[:2], own[2] * BIAS_GRADIENT_TILE[0], own[3] * BIAS_GRADIENT_TILE[1])
    dbias = plgpu.kernel(
        run,
        # If all queries share a row of the bias, the result has one row for each query of a tile; XLA
        # adds up these rows, so they are in float32.
        out_type=jax.ShapeDtypeStruct(out_shape, jnp.float32 if bias_shape[2] == 1 else dtype),
        grid=own,
        grid_names=("b", "n", "t", "s"),
        scratch_types=kernel.memory(),
        kernel_name="attention_bias_gradient",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(query, key, value, dout, lse2, delta, *optional)
    if bias_shape[2] == 1:
        dbias = jnp.sum(dbias, axis=2, keepdims=True).astype(dtype)
    return dbias[:, :, : bias_shape[2], : bias_shape[3]]


class _References(NamedTuple):
    """References to arrays in global memory and to buffers in shared memory."""

    arrays: tuple[Any, ...]
    """Q [B, T, N, H], K [B, S, K, H], V [B, S, K, V] and dO [B, T, N, V]."""
    lse: Any
    """Log-sum-exp in base 2, and delta in the next field, both [B, N, padded T]."""
    delta: Any
    operands: Operands
    dbias: Any
    scratch: dict[str, Any]
    """The buffers of shared memory by name, and the barrier on which their copies arrive."""


@dataclass(frozen=True)
class _BiasGradient:
    """The kernel of the bias's gradient: its static parameters, shared memory and code."""

    shape: Shape
    dtype: Any
    logits: Logits
    read: int | None
    shared: tuple[int, ...]
    """How many batch entries, heads and tiles of queries share a tile of the bias."""
    head: Columns
    value: Columns

    def memory(self) -> dict[str, Any]:
        rows, columns = BIAS_GRADIENT_TILE
        return dict(
            q_smem=self.head.memory((), rows, self.dtype),
            k_smem=self.head.memory((), columns, self.dtype),
            v_smem=self.value.memory((), columns, self.dtype),
            do_smem=self.value.memory((), rows, self.dtype),
            full=plgpu.Barrier(num_arrivals=2 * (self.head.count + self.value.count)),
        )

    def __call__(self, refs: _References) -> None:
        rows, columns = BIAS_GRADIENT_TILE
        own_idx = [lax.axis_index(name) for name in ("b", "n", "t", "s")]
        count: Any = math.prod(self.shared)
        # With query offsets no tile is skipped: batch entries that share the bias may have different
        # offsets, and with them different empty tiles.
        if self.shared[2] == 1 and not self.logits.mask.has_query_offset:
            first = own_idx[2] * rows
            blocks = self.logits.mask.key_blocks(
                (first, first + rows), columns, self.logits.mask.extent
            )
            is_visited = (own_idx[3] >= blocks.start) & (own_idx[3] < blocks.stop)
            count = jnp.where(is_visited, count, 0)
        zeros = plgpu.layout_cast(jnp.zeros(BIAS_GRADIENT_TILE, jnp.float32), plgpu.Layout.WGMMA)
        b, n, t, s = own_idx
        total = lax.fori_loop(0, count, functools.partial(self.add, refs, own_idx), zeros)
        place = refs.dbias.at[b, n, pl.ds(t * rows, rows), pl.ds(s * columns, columns)]
        place[...] = total.astype(place.dtype)

    def add(self, refs: _References, own_idx: list[Any], step: jax.Array, total: jax.Array) -> Any:
        """Returns `total` plus the gradient of logits tile `step` of those that share a bias tile.

        `own_idx` is the bias tile's index (batch entry, head, tile of queries, tile of keys); `total` is
        float32 [64, 128].
        """
        *other_idx, s = own_idx
        place: list[Any] = []
        for index, count in zip(reversed(other_idx), reversed(self.shared), strict=True):
            place.append(index + lax.rem(step, count))
            step = lax.div(step, count)
        t, n, b = place
        tile = Tile(b, n, t * BIAS_GRADIENT_TILE[0], s * BIAS_GRADIENT_TILE[1], BIAS_GRADIENT_TILE)
        self.copy(refs, tile)
        acc = plgpu.ACC(BIAS_GRADIENT_TILE, jnp.float32)
        products, dp = pl.run_scoped(functools.partial(self.products, refs), acc, acc)
        logits, operands = self.logits, refs.operands
        x = logits.logits(products, tile, operands, operands.extent(logits.mask, b), True)
        lse2 = self.of_rows(refs.lse, tile)
        shift = logits.shift(tile, operands)
        of_tile = lse2
        if shift is not None:
            of_tile = lse2 - lax.broadcast_in_dim(shift, BIAS_GRADIENT_TILE, [0])
        p = logits.within_rows(logits.probabilities(x, of_tile, tile, operands), lse2)
        if logits.dropout_rate > 0:
            dp = logits.dropped(dp, tile, operands) * (1 / logits.keep_probability)
        gradient = p * (dp - self.of_rows(refs.delta, tile))
        if self.read is not None:
            (part,) = logits.derivatives_of_score([self.read], products, tile, operands)
            derivative = part.over((0, 1), tile.shape).astype(jnp.float32)
            gradient = logits.chained(gradient, derivative)
        return total + gradient

    def copy(self, refs: _References, tile: Tile) -> None:
        """Copies a tile's rows of Q, K, V and dO to shared memory, and waits for the copies."""
        key_head = lax.div(tile.head, self.shape.group)
        q_gmem, k_gmem, v_gmem, do_gmem = refs.arrays
        full = refs.scratch["full"]
        for name, gmem, start, head in (
            ("q_smem", q_gmem, tile.query_start, tile.head),
            ("k_smem", k_gmem, tile.key_start, key_head),
            ("v_smem", v_gmem, tile.key_start, key_head),
            ("do_smem", do_gmem, tile.query_start, tile.head),
        ):
            Matrix.of(refs.scratch[name]).fill(Heads(gmem), tile.batch, start, head, full)
        plgpu.barrier_wait(full)

    def products(self, refs: _References, s_acc: Any, dp_acc: Any) -> tuple[jax.Array, jax.Array]:
        """Returns S = Q K^T and dP = dO V^T of the copied tile, in float32 registers."""
        names = ("q_smem", "k_smem", "do_smem", "v_smem")
        q, k, do, v = (Matrix.of(refs.scratch[name]) for name in names)
        memory.multiply_transposed(s_acc, q, k)
        memory.multiply_transposed(dp_acc, do, v)
        return s_acc[...], dp_acc[...]

    def of_rows(self, gmem: Any, tile: Tile) -> jax.Array:
        """Loads a tile's 64 queries of `gmem` [B, N, T], broadcast over keys to [64, 128]."""
        values = plgpu.load(
            gmem.at[tile.batch, tile.head, pl.ds(tile.query_start, BIAS_GRADIENT_TILE[0])],
            layout=plgpu.Layout.WGMMA.reduce(1),
            optimized=False,
        )
        return lax.broadcast_in_dim(values, BIAS_GRADIENT_TILE, [0])
