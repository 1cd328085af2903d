"""Gradients of attention on Hopper by one kernel: dK and dV, and dQ added up in a fixed order.

A CTA owns a block of keys of one key head and visits the blocks of queries that attend to it, those
of all query heads that share the key head one after the other. dK and dV stay in registers. The part
of dQ that a visit gives is added to float32 dQ in global memory by the copy engine, once the CTAs
whose turn comes first have done so: a counter for each block of queries says whose turn it is, so the
sum has one order and the same bits come out every time. A CTA waits only for CTAs of lower index.
That these have been started is what GPUs do and no document promises, so this kernel is nobody's
default before its CTAs draw their index from a counter.

Five products a visit instead of the seven of one kernel for dQ and another for dK and dV. Tiles are
transposed, keys by queries, so that P^T and dS^T are where dV and dK need them. The products of a
visit that need dS^T of all warpgroups are issued during the next visit: nobody waits for anybody's
exponentials with idle tensor cores.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention_fwd import copyable, shared_width
from pallas_kernels.attention_logits import Logits, Operands, TransposedTile
from pallas_kernels.attention_mask import BlockMask, Blocks, Index, segment_blocks
from pallas_kernels.attention_tiles import padded_columns

_KEYS = 64
"""Keys of a warpgroup: what one wgmma instruction takes."""


@dataclass(frozen=True)
class FusedConfig:
    """How the work is cut, and in which order it is done."""

    query_block: int = 64
    """128 for narrow heads: each warpgroup takes 64 rows of a part of dQ; else each takes columns."""
    warpgroups: int = 2
    shares_keys: bool = False
    """For wide heads: all warpgroups have the same keys, and each has columns of dK and dV."""
    query_stages: int = 2
    """Blocks of Q in shared memory."""
    dout_stages: int = 2
    """Blocks of dO in shared memory."""
    heads_together: int = 4
    """Key heads that take turns in the order of the CTAs, so that one's wait for each other less."""
    keys_descending: bool = False
    """Whether CTAs with later keys come first."""
    queries_descending: bool = False
    """Whether later queries are visited first."""
    registers: tuple[int, int] = (232, 24)
    """Registers of a thread that multiplies and of one that copies, from 64 Ki a multiprocessor."""

    @property
    def key_parts(self) -> int:
        return 1 if self.shares_keys else self.warpgroups

    @property
    def key_block(self) -> int:
        return self.key_parts * _KEYS

    @property
    def splits_columns(self) -> bool:
        """Whether a part of dQ is cut by columns and not by rows."""
        return self.query_block == 64

    def widths(self, head_size: int, value_size: int) -> tuple[int, int]:
        """The head sizes in shared memory."""
        if not self.splits_columns:
            return shared_width(head_size), shared_width(value_size)
        unit = 64 * self.warpgroups
        head_width = -(-head_size // unit) * unit
        if not self.shares_keys:
            return head_width, shared_width(value_size)
        return head_width, -(-value_size // unit) * unit


def default_config(head_size: int, value_size: int, mask: BlockMask) -> FusedConfig:
    """What was fastest."""
    left, right = mask.reach()
    # Causal: the longest work first, which needs later queries first. In a window the work is equal,
    # and from the last keys on nobody comes to a block of queries before it is his turn.
    order: dict[str, Any] = {"heads_together": 2}
    if right is not None and left is not None:
        order = {"heads_together": 2, "keys_descending": True}
    elif right is not None:
        order = {"heads_together": 8, "queries_descending": True}
    if max(head_size, value_size) > 128:
        return FusedConfig(shares_keys=True, dout_stages=1, **order)
    if max(head_size, value_size) > 64:
        return FusedConfig(query_stages=3, **order)
    return FusedConfig(query_block=128, **order)


class _Visits(NamedTuple):
    """Whom the CTA of a block of keys visits."""

    batch_idx: jax.Array
    key_head_idx: jax.Array
    block_idx: jax.Array
    """Of keys."""
    key_length: Any
    blocks: Blocks
    """Of queries."""
    count: jax.Array
    """Visits, over all query heads."""


def gradients(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    operands: Operands,
    lse2: jax.Array,
    delta: jax.Array,
    dout: jax.Array,
    *,
    logits: Logits,
    config: FusedConfig,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(dquery, dkey, dvalue); lse2 and delta [B, N, T filled up to whole blocks of queries]."""
    batch, query_count, heads, head_size = query.shape
    key_count, key_heads, value_size = value.shape[1:]
    group = heads // key_heads
    mask, dtype = logits.mask, query.dtype
    rows, block, wgs = config.query_block, config.key_block, config.warpgroups
    q_stages, do_stages = config.query_stages, config.dout_stages
    query_blocks, key_blocks = pl.cdiv(query_count, rows), pl.cdiv(key_count, block)
    head_width, value_width = config.widths(head_size, value_size)
    key_parts, column_parts = config.key_parts, wgs if config.shares_keys else 1
    chunk = min(head_width, 64)
    chunks = head_width // chunk
    pieces = chunks // wgs if config.splits_columns else 1
    own_width, own_value_width = head_width // column_parts, value_width // column_parts

    # Without a cap the scale is left for the ends, where there is less to multiply.
    scale = logits.scale if logits.soft_cap is None else 1.0

    query, key, value, dout = (copyable(x) for x in (query, key, value, dout))
    if config.splits_columns:
        query, key = (_widened(x, head_width) for x in (query, key))
    if config.shares_keys:
        value, dout = (_widened(x, value_width) for x in (value, dout))
    tables = _tables(mask, config, operands)
    operands = operands.padded(rows, block).transposed()
    optional = {name: x for name, x in (tables | operands._asdict()).items() if x is not None}

    def kernel(q_gmem, k_gmem, v_gmem, do_gmem, lse_gmem, delta_gmem, *refs, **scratch):
        *optional_refs, dq_gmem, dk_gmem, dv_gmem = refs
        present = dict(zip(optional, optional_refs, strict=True))
        bounds_gmem, ranks_gmem = present.pop("bounds", None), present.pop("ranks", None)
        ops = Operands(**present)
        q_smem, k_smem, v_smem, do_smem = (scratch[f"{x}_smem"] for x in ("q", "k", "v", "do"))
        lse_smem, delta_smem = scratch["lse_smem"], scratch["delta_smem"]
        ds_smem, dq_smem = scratch["ds_smem"], scratch["dq_smem"]
        kv_full = scratch["kv_full"]
        q_full, q_free = scratch["q_full"], scratch["q_free"]
        do_full, do_free = scratch["do_full"], scratch["do_free"]
        ds_full, dq_full, dq_free = scratch["ds_full"], scratch["dq_full"], scratch["dq_free"]
        turns_gmem = pl.get_global(plgpu.SemaphoreType.REGULAR((batch * heads * query_blocks,)))
        wg_idx = lax.axis_index("wg")
        at = place(lax.axis_index("cta"), ops, bounds_gmem)
        first_key = at.block_idx * block

        def visited(step):
            """(query head, block of queries) of a visit."""
            each = lax.max(at.blocks.stop - at.blocks.start, 1)
            i = lax.rem(step, each)
            i = at.blocks.stop - 1 - i if config.queries_descending else at.blocks.start + i
            # Without visits it may be none of them.
            i = lax.clamp(0, jnp.asarray(i, jnp.int32), query_blocks - 1)
            return at.key_head_idx * group + lax.div(step, each), i

        def rank(i):
            """How many CTAs add to block i of dQ before this one does."""
            if ranks_gmem is not None:
                table_idx = at.batch_idx if ranks_gmem.shape[0] > 1 else 0
                return ranks_gmem[table_idx, at.block_idx, i]
            return _rank(mask, config, at.block_idx, i)

        @pl.when(wg_idx == wgs)
        def _copy_in():
            plgpu.set_max_registers(config.registers[1], action="decrease")
            for w in range(key_parts):
                keys = pl.ds(first_key + w * _KEYS, _KEYS)
                head = (at.batch_idx, keys, at.key_head_idx)
                for c in range(chunks):
                    columns = padded_columns(chunk, at.batch_idx, c * chunk)
                    plgpu.copy_gmem_to_smem(k_gmem.at[*head, columns], k_smem.at[w, c], kv_full)
                for c in range(column_parts):
                    columns = padded_columns(own_value_width, at.batch_idx, c * own_value_width)
                    plgpu.copy_gmem_to_smem(v_gmem.at[*head, columns], v_smem.at[w, c], kv_full)

            def copy(step, _):
                head_idx, i = visited(step)
                queries = pl.ds(i * rows, rows)

                def copy_pair(gmem, smem, vector_gmem, vector_smem, width, full, free, stages):
                    slot = lax.rem(step, stages)

                    @pl.when(step >= stages)
                    def _():
                        plgpu.barrier_wait(free.at[slot])

                    for c in range(column_parts):
                        columns = padded_columns(width, at.batch_idx, c * width)
                        plgpu.copy_gmem_to_smem(
                            gmem.at[at.batch_idx, queries, head_idx, columns],
                            smem.at[slot, c],
                            full.at[slot],
                        )
                    plgpu.copy_gmem_to_smem(
                        vector_gmem.at[at.batch_idx, head_idx, queries],
                        vector_smem.at[slot],
                        full.at[slot],
                    )

                copy_pair(q_gmem, q_smem, lse_gmem, lse_smem, own_width, q_full, q_free, q_stages)
                copy_pair(
                    do_gmem,
                    do_smem,
                    delta_gmem,
                    delta_smem,
                    own_value_width,
                    do_full,
                    do_free,
                    do_stages,
                )

            # Without visits too the end below multiplies zeros by a block of queries.
            lax.fori_loop(0, lax.max(at.count, 1), copy, None)

        @pl.when(wg_idx == wgs + 1)
        def _add_to_dq():
            plgpu.set_max_registers(config.registers[1], action="decrease")

            def add(step, _):
                head_idx, i = visited(step)
                turn = turns_gmem.at[(at.batch_idx * heads + head_idx) * query_blocks + i]
                before = rank(i)

                def store(piece, reduction_op):
                    for w in range(wgs):
                        row, column = 0, (w * pieces + piece) * chunk
                        if not config.splits_columns:
                            row, column = w * 64, 0
                        plgpu.copy_smem_to_gmem(
                            dq_smem.at[w],
                            dq_gmem.at[
                                at.batch_idx,
                                pl.ds(i * rows + row, 64),
                                head_idx,
                                pl.ds(column, chunk),
                            ],
                            commit_group=False,
                            reduction_op=reduction_op,
                        )
                    plgpu.commit_smem_to_gmem_group()

                plgpu.semaphore_wait(turn, before, decrement=False, memory_scope="gpu")
                for piece in range(pieces):
                    plgpu.barrier_wait(dq_full)
                    pl.when(before == 0)(functools.partial(store, piece, None))
                    pl.when(before > 0)(functools.partial(store, piece, "add"))
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    plgpu.barrier_arrive(dq_free)
                plgpu.wait_smem_to_gmem(0)
                plgpu.semaphore_signal(turn, memory_scope="gpu")

            lax.fori_loop(0, at.count, add, None)

        @pl.when(wg_idx < wgs)
        def _multiply():
            plgpu.set_max_registers(config.registers[0], action="increase")
            plgpu.barrier_wait(kv_full)

            # Which of the parts that are one for each warpgroup, or one for all. Unknown before the
            # loop, or addresses computed there would occupy registers: H 128 spilled 184 bytes.
            def own():
                return lax.optimization_barrier(wg_idx)

            def own_keys():
                return lax.optimization_barrier(jnp.int32(0)) if config.shares_keys else own()

            def own_columns():
                return own() if config.shares_keys else 0

            def issue_dq(dq_acc, ds_slot, piece):
                row = 0 if config.splits_columns else own()
                column = own() * pieces + piece if config.splits_columns else 0
                for w in range(key_parts):
                    ds_part = own() if config.shares_keys else w
                    plgpu.wgmma(dq_acc, ds_smem.at[ds_slot, ds_part, row].T, k_smem.at[w, column])

            def issue_dk(dk_acc, q_slot, ds_slot):
                for r in range(rows // 64):
                    plgpu.wgmma(
                        dk_acc,
                        ds_smem.at[ds_slot, own(), r],
                        q_smem.at[q_slot, own_columns(), pl.ds(r * 64, 64)],
                    )

            def store_ds(ds, ds_slot):
                for r in range(rows // 64):
                    ds_smem[ds_slot, own(), r] = ds[:, r * 64 : (r + 1) * 64]
                plgpu.commit_smem()
                plgpu.barrier_arrive(ds_full)

            def hand_over(part, step, piece):
                """Gives a part of dQ to the warpgroup that adds it to the others'."""

                @pl.when((step > 0) | (piece > 0))
                def _():
                    plgpu.barrier_wait(dq_free)

                dq_smem[own()] = part
                plgpu.commit_smem()
                plgpu.barrier_arrive(dq_full)

            dq_acc_type = plgpu.ACC((64, chunk), jnp.float32)
            tile_acc_type = plgpu.ACC((_KEYS, rows), jnp.float32)

            def part_of_dq(ds_slot, piece):
                def product(dq_acc):
                    issue_dq(dq_acc, ds_slot, piece)
                    return dq_acc[...]

                return pl.run_scoped(product, dq_acc_type)

            def visit(step, dk_acc, dv_acc):
                head_idx, i = visited(step)
                q_slot, do_slot, ds_slot = (lax.rem(step, n) for n in (q_stages, do_stages, 2))
                previous = lax.max(step - 1, 0)
                start = first_key + own_keys() * _KEYS
                tile = TransposedTile(
                    at.batch_idx, head_idx, i * rows, start, (_KEYS, rows), transposed=True
                )
                plgpu.barrier_wait(q_full.at[q_slot])
                plgpu.barrier_wait(ds_full)

                def with_s(s_acc):
                    def previous_dq(dq_acc):
                        issue_dq(dq_acc, 1 - ds_slot, 0)
                        for c in range(chunks):
                            q_part, column = divmod(c * chunk, own_width)
                            columns = pl.ds(column, chunk)
                            plgpu.wgmma(
                                s_acc,
                                k_smem.at[own_keys(), c],
                                q_smem.at[q_slot, q_part, :, columns].T,
                            )
                        return plgpu.wgmma_accumulator_load(dq_acc, wait_n=chunks)

                    dq_part = pl.run_scoped(previous_dq, dq_acc_type)

                    pl.when(step > 0)(functools.partial(hand_over, dq_part, previous, 0))
                    for piece in range(1, pieces):
                        dq_part = part_of_dq(1 - ds_slot, piece)
                        pl.when(step > 0)(functools.partial(hand_over, dq_part, previous, piece))
                    # At the first visit zeros, times a block of queries that is there.
                    issue_dk(dk_acc, lax.rem(previous, q_stages), 1 - ds_slot)
                    products = plgpu.wgmma_accumulator_load(s_acc, wait_n=rows // 64)
                    p = probabilities(products, tile.along_queries(lse_smem.at[q_slot]), tile, i)
                    derivative = None
                    if logits.soft_cap is not None:
                        derivative = logits.derivative_of_capped(products)
                    return p, derivative

                # Rounded, as dV needs it: more registers than that are not left.
                p, derivative = pl.run_scoped(with_s, tile_acc_type)
                p = p.astype(dtype)
                kept = logits.dropped(p, tile, ops) if logits.dropout_rate > 0 else p

                def with_dp(dp_acc):
                    plgpu.barrier_wait(do_full.at[do_slot])
                    for c in range(column_parts):
                        plgpu.wgmma(dp_acc, v_smem.at[own_keys(), c], do_smem.at[do_slot, c].T)
                    plgpu.wgmma(dv_acc, kept, do_smem.at[do_slot, own_columns()])
                    return plgpu.wgmma_accumulator_load(dp_acc, wait_n=1)

                dp = pl.run_scoped(with_dp, tile_acc_type)

                # dK of the previous visit is complete too, as it was issued before dP.
                @pl.when(step > 0)
                def _():
                    plgpu.barrier_arrive(q_free.at[lax.rem(previous, q_stages)])

                if logits.dropout_rate > 0:
                    dp = jnp.where(kept == 0, 0.0, dp * (1 / logits.keep_probability))
                ds = p.astype(jnp.float32) * (dp - tile.along_queries(delta_smem.at[do_slot]))
                if derivative is not None:
                    ds = ds * derivative
                store_ds(ds.astype(dtype), ds_slot)
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(do_free.at[do_slot])

            def probabilities(products, lse2, tile, i):
                def logits_of(masked):
                    return lambda x: plgpu.layout_cast(
                        logits.logits(x, tile, ops, at.key_length, masked), tile.layout
                    )

                if mask.is_always_full(rows, block):
                    x = logits_of(False)(products)
                elif mask.has_explicit:
                    x = logits_of(True)(products)
                else:
                    is_partial = (i < at.blocks.full_start) | (i >= at.blocks.full_stop)
                    x = lax.cond(is_partial, logits_of(True), logits_of(False), products)
                return jnp.exp2(x * logits.multiplier - lse2)

            def all_visits(dk_acc, dv_acc):
                zeros = jnp.zeros((_KEYS, rows), dtype)
                store_ds(plgpu.layout_cast(zeros, plgpu.Layout.WGMMA), 1)
                lax.fori_loop(0, at.count, lambda step, _: visit(step, dk_acc, dv_acc), None)

                @pl.when(at.count == 0)
                def _():
                    plgpu.barrier_wait(q_full.at[0])
                    plgpu.barrier_wait(do_full.at[0])

                last = at.count - 1
                ds_slot = lax.rem(last + 2, 2)
                plgpu.barrier_wait(ds_full)

                issue_dk(dk_acc, lax.rem(lax.max(last, 0), q_stages), ds_slot)
                for piece in range(pieces):
                    dq_part = part_of_dq(ds_slot, piece)
                    pl.when(at.count > 0)(functools.partial(hand_over, dq_part, last, piece))

                # The other warpgroups' last parts of dQ read this one's keys.
                plgpu.barrier_arrive(ds_full)
                plgpu.barrier_wait(ds_full)
                dv = (dv_acc[...] * (1 / logits.keep_probability)).astype(dtype)
                v_smem[own_keys(), own_columns()] = dv
                dk = (dk_acc[...] * scale).astype(dtype)
                own_chunks = chunks // column_parts
                first_chunk = own_columns() * own_chunks
                for c in range(own_chunks):
                    k_smem[own_keys(), first_chunk + c] = dk[:, c * chunk : (c + 1) * chunk]
                plgpu.commit_smem()
                keys = pl.ds(first_key + own_keys() * _KEYS, _KEYS)
                head = (at.batch_idx, keys, at.key_head_idx)
                first = own_columns() * own_value_width
                columns = padded_columns(own_value_width, at.batch_idx, first)
                plgpu.copy_smem_to_gmem(
                    v_smem.at[own_keys(), own_columns()], dv_gmem.at[*head, columns]
                )
                for c in range(own_chunks):
                    columns = padded_columns(chunk, at.batch_idx, (first_chunk + c) * chunk)
                    plgpu.copy_smem_to_gmem(
                        k_smem.at[own_keys(), first_chunk + c], dk_gmem.at[*head, columns]
                    )
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

            pl.run_scoped(
                all_visits,
                plgpu.ACC((_KEYS, own_width), jnp.float32),
                plgpu.ACC((_KEYS, own_value_width), jnp.float32),
            )

    def place(cta_idx, ops: Operands, bounds_gmem) -> _Visits:
        pair, block_idx = _work(config, cta_idx, batch * key_heads, key_blocks)
        batch_idx, key_head_idx = lax.div(pair, key_heads), lax.rem(pair, key_heads)
        query_length = query_count if ops.query_lengths is None else ops.query_lengths[batch_idx]
        key_length = key_count if ops.key_lengths is None else ops.key_lengths[batch_idx]
        bounds = None
        if bounds_gmem is not None:
            bounds = Blocks(*(bounds_gmem[batch_idx, block_idx, i] for i in range(4)))
        start = block_idx * block
        blocks = mask.query_blocks((start, start + block), rows, query_length, key_length, bounds)
        count = (blocks.stop - blocks.start) * group
        return _Visits(
            batch_idx, key_head_idx, block_idx, key_length, blocks, jnp.asarray(count, jnp.int32)
        )

    def shared(*shape, dtype=dtype, like: int | None = None):
        """`like`: the width whose swizzle to use, where operands of a product must have the same."""
        swizzle = next(
            x for x in (128, 64, 32) if (like or shape[-1]) * jnp.dtype(dtype).itemsize % x == 0
        )
        return plgpu.SMEM(
            shape,
            dtype,
            transforms=(
                plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize)),
                plgpu.SwizzleTransform(swizzle),
            ),
        )

    dq, dk, dv = plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct((batch, query_blocks * rows, heads, head_width), jnp.float32),
            jax.ShapeDtypeStruct(key.shape, dtype),
            jax.ShapeDtypeStruct(value.shape, dtype),
        ),
        grid=(batch * key_heads * key_blocks,),
        grid_names=("cta",),
        num_threads=wgs + 2,
        thread_name="wg",
        scratch_types=dict(
            q_smem=shared(q_stages, column_parts, rows, own_width),
            k_smem=shared(key_parts, chunks, _KEYS, chunk),
            v_smem=shared(key_parts, column_parts, _KEYS, own_value_width),
            do_smem=shared(do_stages, column_parts, rows, own_value_width),
            lse_smem=plgpu.SMEM((q_stages, rows), jnp.float32),
            delta_smem=plgpu.SMEM((do_stages, rows), jnp.float32),
            ds_smem=shared(2, wgs, rows // 64, _KEYS, 64, like=chunk),
            dq_smem=shared(wgs, 64, chunk, dtype=jnp.float32),
            kv_full=plgpu.Barrier(num_arrivals=key_parts * (chunks + column_parts)),
            q_full=plgpu.Barrier(num_arrivals=column_parts + 1, num_barriers=q_stages),
            q_free=plgpu.Barrier(num_arrivals=wgs, num_barriers=q_stages),
            do_full=plgpu.Barrier(num_arrivals=column_parts + 1, num_barriers=do_stages),
            do_free=plgpu.Barrier(num_arrivals=wgs, num_barriers=do_stages),
            ds_full=plgpu.Barrier(num_arrivals=wgs),
            dq_full=plgpu.Barrier(num_arrivals=wgs),
            dq_free=plgpu.Barrier(),
        ),
        # What threads write to shared memory, only copies and products read.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )(query, key, value, dout, lse2, delta, *optional.values())
    dq = dq[:, :query_count, :, :head_size] * scale
    if "ranks" in tables:
        visited = jnp.any(tables["ranks"] >= 0, axis=1)
        visited = jnp.repeat(visited, rows, axis=1)[:, :query_count, None, None]
        dq = jnp.where(visited, dq, 0.0)
    dk, dv = dk[:, :key_count, :, :head_size], dv[:, :key_count, :, :value_size]
    return dq.astype(dtype), dk, dv


def _work(
    config: FusedConfig, cta_idx: Index, pairs: int, key_blocks: int
) -> tuple[jax.Array, jax.Array]:
    """(which pair of batch entry and key head, which block of keys) is a CTA's."""
    together = max(n for n in range(1, config.heads_together + 1) if pairs % n == 0)
    within = lax.rem(cta_idx, together * key_blocks)
    pair = lax.div(cta_idx, together * key_blocks) * together + lax.rem(within, together)
    block_idx = lax.div(within, together)
    return pair, key_blocks - 1 - block_idx if config.keys_descending else block_idx


def _rank(mask: BlockMask, config: FusedConfig, key_block_idx: Index, i: Index) -> Index:
    """How many CTAs add to block i of dQ before that of a block of keys, of a mask without tables."""
    if not config.keys_descending:
        return key_block_idx
    last = pl.cdiv(mask.key_count, config.key_block) - 1
    if mask.is_causal:
        last = lax.min(last, lax.div((i + 1) * config.query_block - 1, config.key_block))
    return last - key_block_idx


def _widened(array: jax.Array, width: int) -> jax.Array:
    return jnp.pad(array, ((0, 0),) * 3 + ((0, width - array.shape[3]),))


def _tables(mask: BlockMask, config: FusedConfig, operands: Operands) -> dict[str, jax.Array]:
    """What depends on the data or has no short formula.

    bounds [B, key blocks, 4]: the blocks of queries that segments leave to a block of keys; ranks
    [B or 1, key blocks, query blocks]: how many blocks of keys add to one of dQ before, -1 where it
    is not visited.
    """
    rows, block = config.query_block, config.key_block
    tables = {}
    within = None
    if mask.has_segments:
        tables["bounds"] = segment_blocks(
            operands.key_segments, operands.query_segments, block, rows
        )
        within = Blocks(*(tables["bounds"][..., i] for i in range(4)))
    elif not (mask.has_query_lengths or mask.has_key_lengths or mask.window is not None):
        return {}
    start = jnp.arange(pl.cdiv(mask.key_count, block), dtype=jnp.int32)[None] * block
    lengths = [
        count if array is None else array[:, None]
        for array, count in (
            (operands.query_lengths, mask.query_count),
            (operands.key_lengths, mask.key_count),
        )
    ]
    blocks = mask.query_blocks((start, start + block), rows, *lengths, within)
    i = jnp.arange(pl.cdiv(mask.query_count, rows), dtype=jnp.int32)
    first, end = (
        jnp.broadcast_to(x, jnp.broadcast_shapes(jnp.shape(x), start.shape))[..., None]
        for x in (blocks.start, blocks.stop)
    )
    visits = (i >= first) & (i < end)
    counts = lax.cumsum(visits.astype(jnp.int32), axis=1, reverse=config.keys_descending)
    tables["ranks"] = jnp.where(visits, counts - 1, -1)
    return tables
