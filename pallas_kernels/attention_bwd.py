"""Backward of attention on Hopper: one kernel gives dK and dV, and adds up dQ in a fixed order.

A CTA owns a block of keys of one key head and visits the blocks of queries that attend to it, those
of all query heads that share the key head one after the other. dK and dV stay in registers. The part
of dQ that a visit gives is added to float32 dQ in global memory by the copy engine, when the CTAs
whose turn it is earlier have done so: a counter for each block of queries says whose turn it is, so
the sum has one order and the same bits come out every time. CTAs only wait for CTAs with a lower
index, which the GPU starts earlier.

Five products a block instead of the seven of separate kernels for dQ and for dK, dV.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention_logits import EMPTY_LSE, LOG2E, Logits, Operands, Tile
from pallas_kernels.attention_mask import BlockMask, Index


@dataclass(frozen=True)
class BackwardConfig:
    """Tiles and order of the backward kernel."""

    block_q: int = 64
    """64: the warpgroups share the columns of a block of dQ; 128: its rows."""
    warpgroups: int = 2
    """Each owns 64 keys."""
    stages: int = 2
    """Blocks of queries and dO in shared memory."""
    compute_registers: int = 216
    memory_registers: int = 40
    heads_together: int = 1
    """So many key heads take turns in the order of CTAs."""
    keys_descending: bool = False
    """Whether CTAs with later keys come first."""
    queries_descending: bool = False
    no_auto_barriers: bool = False

    @property
    def block_kv(self) -> int:
        return 64 * self.warpgroups

    @property
    def column_splits(self) -> int:
        return self.warpgroups if self.block_q == 64 else 1


def backward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    operands: Operands,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    dlse: jax.Array | None,
    *,
    logits: Logits,
    config: BackwardConfig,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    batch, query_count, heads, head_size = query.shape
    _, key_count, key_heads, value_head_size = value.shape
    groups = heads // key_heads
    bq, bkv, wgs, stages = config.block_q, config.block_kv, config.warpgroups, config.stages
    q_blocks, kv_blocks = pl.cdiv(query_count, bq), pl.cdiv(key_count, bkv)
    splits = config.column_splits
    split_size = head_size // splits
    dtype = query.dtype

    lse2, delta = _row_statistics(out, lse, dout, dlse, q_blocks * bq)

    def kernel(q, k, v, do, lse2, delta, dq, dk, dv, scratch):
        (k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem, ds_smem, dq_smem) = scratch[:8]
        (kv_ready, q_ready, do_ready, consumed, ds_ready, dq_ready, dq_consumed) = scratch[8:]
        turns = pl.get_global(plgpu.SemaphoreType.REGULAR((batch * heads * q_blocks,)))
        wg = lax.axis_index("wg")
        item = lax.axis_index("item")
        pair, n = _item(item, config, batch * key_heads, kv_blocks)
        b, kv_head = lax.div(pair, key_heads), lax.rem(pair, key_heads)
        query_length, key_length = query_count, key_count
        first_key = n * bkv
        blocks = logits.mask.query_blocks(
            (first_key, first_key + bkv), bq, query_length, key_length
        )
        visits = blocks.stop - blocks.start
        steps = visits * groups

        def visit(step):
            """(query head, block of queries)"""
            i = lax.rem(step, visits)
            i = blocks.stop - 1 - i if config.queries_descending else blocks.start + i
            return kv_head * groups + lax.div(step, visits), i

        @pl.when(wg == wgs)
        def load():
            plgpu.set_max_registers(config.memory_registers, action="decrease")
            for w in range(wgs):
                rows = pl.ds(first_key + w * 64, 64)
                for c in range(splits):
                    columns = pl.ds(c * split_size, split_size)
                    plgpu.copy_gmem_to_smem(
                        k.at[b, rows, kv_head, columns], k_smem.at[w, c], kv_ready
                    )
                plgpu.copy_gmem_to_smem(v.at[b, rows, kv_head], v_smem.at[w], kv_ready)

            def copy(step, _):
                slot = lax.rem(step, stages)

                @pl.when(step >= stages)
                def _():
                    plgpu.barrier_wait(consumed.at[slot])

                head, i = visit(step)
                rows = pl.ds(i * bq, bq)
                plgpu.copy_gmem_to_smem(q.at[b, rows, head], q_smem.at[slot], q_ready.at[slot])
                plgpu.copy_gmem_to_smem(
                    lse2.at[b, head, rows], lse_smem.at[slot], q_ready.at[slot]
                )
                plgpu.copy_gmem_to_smem(do.at[b, rows, head], do_smem.at[slot], do_ready.at[slot])
                plgpu.copy_gmem_to_smem(
                    delta.at[b, head, rows], delta_smem.at[slot], do_ready.at[slot]
                )

            lax.fori_loop(0, steps, copy, None)

        @pl.when(wg == wgs + 1)
        def add_dq():
            plgpu.set_max_registers(config.memory_registers, action="decrease")

            def add(step, _):
                head, i = visit(step)
                turn = turns.at[(b * heads + head) * q_blocks + i]
                rank = _rank(logits.mask, config, i, n, key_length)
                plgpu.barrier_wait(dq_ready)
                plgpu.semaphore_wait(turn, rank, decrement=False, memory_scope="gpu")

                def store(reduction_op):
                    for w in range(wgs):
                        source = dq_smem.at[w]
                        if splits == 1:
                            rows, columns = pl.ds(i * bq + w * 64, 64), pl.ds(0, head_size)
                        else:
                            rows, columns = pl.ds(i * bq, 64), pl.ds(w * split_size, split_size)
                        plgpu.copy_smem_to_gmem(
                            source,
                            dq.at[b, rows, head, columns],
                            commit_group=False,
                            reduction_op=reduction_op,
                        )
                    plgpu.commit_smem_to_gmem_group()

                @pl.when(rank == 0)
                def _():
                    store(None)

                @pl.when(rank > 0)
                def _():
                    store("add")

                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(dq_consumed)
                plgpu.wait_smem_to_gmem(0)
                plgpu.semaphore_signal(turn, memory_scope="gpu")

            lax.fori_loop(0, steps, add, None)

        @pl.when(wg < wgs)
        def compute():
            plgpu.set_max_registers(config.compute_registers, action="increase")
            plgpu.barrier_wait(kv_ready)

            def visits_and_results(dk_acc, dv_acc):
                lax.fori_loop(0, steps, lambda step, _: add_step(step, dk_acc, dv_acc), None)
                # The other warpgroups' last parts of dQ read this one's keys.
                plgpu.barrier_arrive(ds_ready)
                plgpu.barrier_wait(ds_ready)
                v_smem[wg] = dv_acc[...].astype(dtype)
                dk_value = (dk_acc[...] * logits.scale).astype(dtype)
                for c in range(splits):
                    k_smem[wg, c] = dk_value[:, c * split_size : (c + 1) * split_size]
                plgpu.commit_smem()
                rows = pl.ds(first_key + wg * 64, 64)
                plgpu.copy_smem_to_gmem(v_smem.at[wg], dv.at[b, rows, kv_head])
                for c in range(splits):
                    plgpu.copy_smem_to_gmem(
                        k_smem.at[wg, c],
                        dk.at[b, rows, kv_head, pl.ds(c * split_size, split_size)],
                    )
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

            def add_step(step, dk_acc, dv_acc):
                slot, ds_slot = lax.rem(step, stages), lax.rem(step, 2)
                head, i = visit(step)
                tile = Tile(b, head, i * bq, first_key + wg * 64, (64, bq), transposed=True)

                def gradient_of_logits(s_acc, dp_acc):
                    plgpu.barrier_wait(q_ready.at[slot])
                    for c in range(splits):
                        columns = pl.ds(c * split_size, split_size)
                        plgpu.wgmma(
                            s_acc,
                            k_smem.at[wg, c],
                            q_smem.at[slot, :, columns].transpose((1, 0)),
                        )
                    plgpu.barrier_wait(do_ready.at[slot])
                    plgpu.wgmma(dp_acc, v_smem.at[wg], do_smem.at[slot].transpose((1, 0)))
                    x = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
                    if logits.mask.is_always_full(bq, bkv):
                        x = logits.logits(x, tile, operands, key_length, False)
                    else:
                        x = lax.cond(
                            (i < blocks.full_start) | (i >= blocks.full_stop),
                            lambda x: logits.logits(x, tile, operands, key_length, True),
                            lambda x: logits.logits(x, tile, operands, key_length, False),
                            x,
                        )
                    along_queries = plgpu.Layout.WGMMA.reduce(0)
                    lse2 = plgpu.load(lse_smem.at[slot], layout=along_queries)
                    lse2 = lax.broadcast_in_dim(lse2, x.shape, [1])
                    p = jnp.exp2(x * logits.multiplier - lse2)
                    plgpu.wgmma(dv_acc, p.astype(dtype), do_smem.at[slot])
                    dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=1)
                    delta = plgpu.load(delta_smem.at[slot], layout=along_queries)
                    return (p * (dp - lax.broadcast_in_dim(delta, x.shape, [1]))).astype(dtype)

                tile_acc = plgpu.ACC((64, bq), jnp.float32)
                ds = pl.run_scoped(gradient_of_logits, tile_acc, tile_acc)
                for r in range(bq // 64):
                    ds_smem[ds_slot, wg, r] = ds[:, r * 64 : (r + 1) * 64]
                plgpu.commit_smem()
                plgpu.wgmma(dk_acc, ds, q_smem.at[slot])
                plgpu.barrier_arrive(ds_ready)
                plgpu.barrier_wait(ds_ready)
                row_part, column_part = (wg, 0) if splits == 1 else (0, wg)

                def part_of_dq(dq_acc):
                    for w in range(wgs):
                        plgpu.wgmma(
                            dq_acc,
                            ds_smem.at[ds_slot, w, row_part].transpose((1, 0)),
                            k_smem.at[w, column_part],
                        )
                    plgpu.wgmma_wait(wgs)
                    plgpu.barrier_arrive(consumed.at[slot])
                    return dq_acc[...]

                part = pl.run_scoped(part_of_dq, plgpu.ACC((64, split_size), jnp.float32))

                @pl.when(step > 0)
                def _():
                    plgpu.barrier_wait(dq_consumed)

                dq_smem[wg] = part
                plgpu.commit_smem()
                plgpu.barrier_arrive(dq_ready)

            pl.run_scoped(
                visits_and_results,
                plgpu.ACC((64, head_size), jnp.float32),
                plgpu.ACC((64, value_head_size), jnp.float32),
            )

    def smem(*shape, dtype=dtype):
        return plgpu.SMEM(
            shape,
            dtype,
            transforms=(
                plgpu.TilingTransform((8, 128 // jnp.dtype(dtype).itemsize)),
                plgpu.SwizzleTransform(128),
            ),
        )

    dq, dk, dv = plgpu.kernel(
        lambda *refs: kernel(*refs[:9], refs[9:]),
        out_type=(
            jax.ShapeDtypeStruct(query.shape, jnp.float32),
            jax.ShapeDtypeStruct(key.shape, dtype),
            jax.ShapeDtypeStruct(value.shape, dtype),
        ),
        grid=(batch * key_heads * kv_blocks,),
        grid_names=("item",),
        num_threads=wgs + 2,
        thread_name="wg",
        scratch_types=(
            smem(wgs, splits, 64, split_size),
            smem(wgs, 64, value_head_size),
            smem(stages, bq, head_size),
            smem(stages, bq, value_head_size),
            plgpu.SMEM((stages, bq), jnp.float32),
            plgpu.SMEM((stages, bq), jnp.float32),
            smem(2, wgs, bq // 64, 64, 64),
            smem(wgs, 64, split_size, dtype=jnp.float32),
            plgpu.Barrier(num_arrivals=wgs * (splits + 1)),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_arrivals=wgs, num_barriers=stages),
            plgpu.Barrier(num_arrivals=wgs),
            plgpu.Barrier(num_arrivals=wgs),
            plgpu.Barrier(),
        ),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=config.no_auto_barriers
        ),
    )(query, key, value, dout, lse2, delta)
    return (dq * logits.scale).astype(dtype), dk, dv


def _row_statistics(out, lse, dout, dlse, padded: int) -> tuple[jax.Array, jax.Array]:
    """The log-sum-exp in base 2 and delta, [B, N, padded]; rows that attend to nothing give 0."""
    delta = jnp.einsum("btnv,btnv->bnt", out.astype(jnp.float32), dout.astype(jnp.float32))
    if dlse is not None:
        delta = delta - dlse
    fill = ((0, 0), (0, 0), (0, padded - lse.shape[2]))
    lse2 = jnp.where(lse <= EMPTY_LSE, jnp.inf, lse * LOG2E)
    return jnp.pad(lse2, fill, constant_values=jnp.inf), jnp.pad(delta, fill)


def _item(item, config: BackwardConfig, pairs: int, kv_blocks: int):
    """(pair of batch entry and key head, block of keys) of a CTA."""
    together = config.heads_together
    within = lax.rem(item, together * kv_blocks)
    pair = lax.div(item, together * kv_blocks) * together + lax.rem(within, together)
    n = lax.div(within, together)
    return pair, kv_blocks - 1 - n if config.keys_descending else n


def _rank(mask: BlockMask, config: BackwardConfig, i: Index, n: Index, key_length: Index):
    """How many CTAs add to block i of dQ before the CTA of block n of keys does."""
    left, right = mask.reach()
    bq, bkv = config.block_q, config.block_kv
    key_length = jnp.asarray(key_length, jnp.int32)
    if config.keys_descending:
        last = lax.div(key_length - 1, bkv)
        if right is not None:
            last = lax.min(last, lax.div((i + 1) * bq - 1 + right, bkv))
        return last - n
    first = jnp.int32(0)
    if left is not None:
        first = lax.max(first, lax.div(i * bq - left + bkv, bkv) - 1)
    return n - first
