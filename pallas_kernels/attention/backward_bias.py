"""Gradient of attention's bias on Hopper: the logits' gradient, summed over what the bias shares.

A CTA owns a tile of the bias and goes over all batch entries, heads and, where the bias has one row,
tiles of queries that share it. It computes their logits' gradients again, which costs two products
more, and holds the sum in registers: a gradient of the size of the logits is never written.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.forward import copyable, shared_width
from pallas_kernels.attention.logits import Logits, Operands, Tile
from pallas_kernels.attention.tiles import operand_memory, padded_columns

_ROWS, _COLUMNS = 64, 128
"""Queries and keys of a tile."""


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
) -> jax.Array:
    """float32, of the bias's shape, which differs between keys: see attention_bwd_rows for others.

    lse2 and delta are [B, N, T filled up to whole tiles].
    """
    shape = operands.bias.shape
    batch, query_count, heads, head_size = query.shape
    key_count, key_heads, value_size = value.shape[1:]
    dtype = query.dtype
    head_width, value_width = shared_width(head_size), shared_width(value_size)
    tiles = (pl.cdiv(query_count, _ROWS), pl.cdiv(key_count, _COLUMNS))
    whole = (batch, heads, *tiles)
    own = tuple(1 if size == 1 else count for size, count in zip(shape, whole, strict=True))
    shared = tuple(count // mine for count, mine in zip(whole, own, strict=True))[:3]
    query, key, value, dout = (copyable(x) for x in (query, key, value, dout))
    operands = operands.padded(_ROWS, _COLUMNS)
    optional = {name: x for name, x in operands._asdict().items() if x is not None}
    mask = logits.mask

    def kernel(q_gmem, k_gmem, v_gmem, do_gmem, lse_gmem, delta_gmem, *refs, **scratch):
        *optional_refs, dbias_gmem = refs
        ops = Operands(**dict(zip(optional, optional_refs, strict=True)))
        tile_idx = [lax.axis_index(name) for name in ("b", "n", "t", "s")]
        full = scratch["full"]

        def add(step, total):
            *other_idx, s = tile_idx
            place = []
            for index, count in zip(reversed(other_idx), reversed(shared), strict=True):
                place.append(index + lax.rem(step, count))
                step = lax.div(step, count)
            t, n, b = place
            queries, keys = pl.ds(t * _ROWS, _ROWS), pl.ds(s * _COLUMNS, _COLUMNS)
            kv_head = lax.div(n, heads // key_heads)
            for gmem, rows, head, width, smem in (
                (q_gmem, queries, n, head_width, scratch["q_smem"]),
                (k_gmem, keys, kv_head, head_width, scratch["k_smem"]),
                (v_gmem, keys, kv_head, value_width, scratch["v_smem"]),
                (do_gmem, queries, n, value_width, scratch["do_smem"]),
            ):
                plgpu.copy_gmem_to_smem(
                    gmem.at[b, rows, head, padded_columns(width, b)], smem, full
                )
            plgpu.barrier_wait(full)

            def products(s_acc, dp_acc):
                plgpu.wgmma(s_acc, scratch["q_smem"], scratch["k_smem"].T)
                plgpu.wgmma(dp_acc, scratch["do_smem"], scratch["v_smem"].T)
                return s_acc[...], dp_acc[...]

            acc = plgpu.ACC((_ROWS, _COLUMNS), jnp.float32)
            x, dp = pl.run_scoped(products, acc, acc)

            def of_rows(gmem):
                values = plgpu.load(
                    gmem.at[b, n, queries], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False
                )
                return lax.broadcast_in_dim(values, x.shape, [0])

            tile = Tile(b, n, t * _ROWS, s * _COLUMNS, x.shape)
            key_length = key_count if ops.key_lengths is None else ops.key_lengths[b]
            x = logits.logits(x, tile, ops, key_length, True)
            p = jnp.exp2(x * logits.multiplier - of_rows(lse_gmem))
            if logits.dropout_rate > 0:
                dp = logits.dropped(dp, tile, ops) * (1 / logits.keep_probability)
            return total + p * (dp - of_rows(delta_gmem))

        count = math.prod(shared)
        if shared[2] == 1:
            first = tile_idx[2] * _ROWS
            blocks = mask.key_blocks((first, first + _ROWS), _COLUMNS, query_count, key_count)
            visited = (tile_idx[3] >= blocks.start) & (tile_idx[3] < blocks.stop)
            count = jnp.where(visited, count, 0)
        zeros = plgpu.layout_cast(jnp.zeros((_ROWS, _COLUMNS), jnp.float32), plgpu.Layout.WGMMA)
        b, n, t, s = tile_idx
        dbias_gmem[b, n, pl.ds(t * _ROWS, _ROWS), pl.ds(s * _COLUMNS, _COLUMNS)] = lax.fori_loop(
            0, count, add, zeros
        )

    dbias = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((*own[:2], own[2] * _ROWS, own[3] * _COLUMNS), jnp.float32),
        grid=own,
        grid_names=("b", "n", "t", "s"),
        scratch_types=dict(
            q_smem=operand_memory((_ROWS, head_width), dtype),
            k_smem=operand_memory((_COLUMNS, head_width), dtype),
            v_smem=operand_memory((_COLUMNS, value_width), dtype),
            do_smem=operand_memory((_ROWS, value_width), dtype),
            full=plgpu.Barrier(num_arrivals=4),
        ),
        kernel_name="attention_bias_gradient",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(query, key, value, dout, lse2, delta, *optional.values())
    if shape[2] == 1:
        dbias = jnp.sum(dbias, axis=2, keepdims=True)
    return dbias[:, :, : shape[2], : shape[3]]
