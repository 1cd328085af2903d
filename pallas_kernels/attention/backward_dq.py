"""Gradient of attention's queries on Hopper, by a kernel of its own.

As in the forward, a consumer holds 64 queries and K and V stream past it; it multiplies S = Q K^T and
dP = dO V^T again, and adds dS K to dQ in its registers. That is two products more in all than where
the kernel of dK and dV adds up dQ too, but nobody waits for another CTA, dQ is never in memory in
float32, and sums have one order by themselves.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.forward import copyable, shared_width
from pallas_kernels.attention.logits import Logits, Operands, Tile
from pallas_kernels.attention.mask import segment_blocks
from pallas_kernels.attention.tiles import QueryTiles, operand_memory, padded_columns

_ROWS = 64
"""Queries of a consumer: what one wgmma instruction takes."""


@dataclass(frozen=True)
class QueryGradientConfig:
    """How the work is cut: a tile of 64 queries a consumer against blocks of keys."""

    consumers: int = 2
    key_block: int = 128
    key_stages: int = 2
    """Blocks of K in shared memory."""
    value_stages: int = 2
    """Blocks of V in shared memory."""
    separate_output: bool = True
    """Whether dQ has shared memory of its own, or goes where Q was."""
    heads_together: int = 4
    """Heads whose tiles are next to each other, for their K and V to stay in the L2 cache."""

    @property
    def query_block(self) -> int:
        return self.consumers * _ROWS

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a thread of a consumer and of the producer, from 64 Ki a multiprocessor."""
        return {1: (232, 40), 2: (240, 24), 3: (160, 32)}[self.consumers]


def default_config(head_size: int, value_size: int, logits: Logits) -> QueryGradientConfig:
    """The largest blocks that registers and shared memory hold.

    On an H200, [4, 4096, 16, H] causal: H 128 571 us (blocks of 64 keys 569; not causal 1025 and 1108),
    H 64 388 us (393 with 4 heads together), and [2, 4096, 16, 256] 530 us (576 with 48 keys).
    """
    widest = max(head_size, value_size)
    if 64 < widest <= 128 and logits.needs_registers:
        return QueryGradientConfig(key_block=64, key_stages=3, value_stages=3)
    if widest <= 64:
        return QueryGradientConfig(heads_together=16)
    if widest <= 128:
        return QueryGradientConfig()
    return QueryGradientConfig(key_block=64, value_stages=1, separate_output=False)


def query_gradient(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    operands: Operands,
    lse2: jax.Array,
    delta: jax.Array,
    dout: jax.Array,
    *,
    logits: Logits,
    multiprocessors: int,
    config: QueryGradientConfig | None = None,
) -> jax.Array:
    """The gradient, [B, T, N, H]; lse2 and delta [B, N, T filled up to whole tiles]."""
    batch, query_count, heads, head_size = query.shape
    key_heads, value_size = value.shape[2:]
    mask, dtype = logits.mask, query.dtype
    config = config or default_config(head_size, value_size, logits)
    rows, block, consumers = config.query_block, config.key_block, config.consumers
    k_stages, v_stages = config.key_stages, config.value_stages
    head_width, value_width = shared_width(head_size), shared_width(value_size)
    # Without a cap the scale is left for the end, where there is less to multiply.
    scale = logits.scale if logits.soft_cap is None else 1.0
    query, key, value, dout = (copyable(x) for x in (query, key, value, dout))
    segment_bounds = []
    if mask.has_segments:
        segments = (operands.query_segments, operands.key_segments)
        segment_bounds = [segment_blocks(*segments, rows, block)]
    operands = operands.padded(rows, block)
    present = [name for name, array in operands._asdict().items() if array is not None]
    tiles = QueryTiles(mask, heads, rows, block)
    schedule = tiles.schedule(batch, config.heads_together, multiprocessors)

    def kernel(
        q_gmem, k_gmem, v_gmem, do_gmem, lse_gmem, delta_gmem, schedule_gmem, *refs, **scratch
    ):
        *operand_refs, dq_gmem = refs
        bounds_gmem = operand_refs.pop(0) if mask.has_segments else None
        ops = Operands(**dict(zip(present, operand_refs, strict=True)))
        q_smem, do_smem = scratch["q_smem"], scratch["do_smem"]
        k_smem, v_smem = scratch["k_smem"], scratch["v_smem"]
        q_full, q_free = scratch["q_full"], scratch["q_free"]
        k_full, k_free = scratch["k_full"], scratch["k_free"]
        v_full, v_free = scratch["v_full"], scratch["v_free"]
        wg_idx = lax.axis_index("wg")
        cta_idx = lax.axis_index("cta")
        tile_count = schedule_gmem[cta_idx, 0]

        def place(tile_idx):
            return tiles.place(schedule_gmem[cta_idx, tile_idx + 1], ops, bounds_gmem)

        @pl.when(wg_idx == consumers)
        def _producer():
            plgpu.set_max_registers(config.registers[1], action="decrease")

            def copy_tile(tile_idx, step):
                at = place(tile_idx)
                key_head = lax.div(at.head_idx, jnp.int32(heads // key_heads))

                def copy_queries(consumer):
                    plgpu.barrier_wait(q_free.at[consumer])
                    queries = pl.ds(at.start + consumer * _ROWS, _ROWS)
                    for gmem, smem, width in (
                        (q_gmem, q_smem, head_width),
                        (do_gmem, do_smem, value_width),
                    ):
                        plgpu.copy_gmem_to_smem(
                            gmem.at[
                                at.batch_idx,
                                queries,
                                at.head_idx,
                                padded_columns(width, at.batch_idx),
                            ],
                            smem.at[consumer],
                            q_full.at[consumer],
                        )

                def copy_block(gmem, smem, free, full, width, i, stages):
                    slot = lax.rem(step + i, jnp.int32(stages))
                    plgpu.barrier_wait(free.at[slot])
                    keys = pl.ds((at.stop - 1 - i) * block, block)
                    plgpu.copy_gmem_to_smem(
                        gmem.at[at.batch_idx, keys, key_head, padded_columns(width, at.batch_idx)],
                        smem.at[slot],
                        full.at[slot],
                    )

                def copy_pair(i, _):
                    copy_block(k_gmem, k_smem, k_free, k_full, head_width, i, k_stages)
                    copy_block(v_gmem, v_smem, v_free, v_full, value_width, i, v_stages)

                # The first consumer starts as soon as its own queries are there.
                copy_queries(0)
                copy_pair(0, None)
                for consumer in range(1, consumers):
                    copy_queries(consumer)
                count = at.stop - at.first
                lax.fori_loop(1, count, copy_pair, None)
                return step + count

            lax.fori_loop(0, tile_count, copy_tile, jnp.int32(0))
            # Every arrival is waited for: the interpreter's race detection insists on it.
            for free, slots in ((k_free, k_stages), (v_free, v_stages), (q_free, consumers)):
                for slot in range(slots):
                    plgpu.barrier_wait(free.at[slot])

        @pl.when(wg_idx < consumers)
        def _consumer():
            plgpu.set_max_registers(config.registers[0], action="increase")
            for free, slots in ((k_free, k_stages), (v_free, v_stages)):
                for slot in range(slots):
                    plgpu.barrier_arrive(free.at[slot])
            plgpu.barrier_arrive(q_free.at[wg_idx])
            dq_wg_smem = scratch.get("dq_smem", q_smem).at[wg_idx]
            vector = plgpu.Layout.WGMMA.reduce(1)

            def add_up(tile_idx, step):
                at = place(tile_idx)
                start = at.start + wg_idx * _ROWS
                # Blocks beyond what its own rows reach a consumer leaves to the others.
                own = at.key_blocks(start, start + _ROWS)
                own_stop = at.stop
                if mask.reach()[1] is not None:
                    own_stop = lax.clamp(at.first + 1, jnp.int32(own.stop), at.stop)

                def pass_over(i, _):
                    k_slot = lax.rem(step + i, jnp.int32(k_stages))
                    v_slot = lax.rem(step + i, jnp.int32(v_stages))
                    plgpu.barrier_wait(k_full.at[k_slot])
                    plgpu.barrier_arrive(k_free.at[k_slot])
                    plgpu.barrier_wait(v_full.at[v_slot])
                    plgpu.barrier_arrive(v_free.at[v_slot])

                skipped = at.stop - own_stop
                lax.fori_loop(0, skipped, pass_over, None)
                step += skipped
                count = own_stop - at.first
                lse_wg, delta_wg = (
                    plgpu.load(
                        gmem.at[at.batch_idx, at.head_idx, pl.ds(start, _ROWS)],
                        layout=vector,
                        optimized=False,
                    )
                    for gmem in (lse_gmem, delta_gmem)
                )
                plgpu.barrier_wait(q_full.at[wg_idx])

                def visit(i, dq_acc):
                    k_slot = lax.rem(step + i, jnp.int32(k_stages))
                    v_slot = lax.rem(step + i, jnp.int32(v_stages))
                    tile = Tile(
                        at.batch_idx,
                        at.head_idx,
                        start,
                        (own_stop - 1 - i) * block,
                        (_ROWS, block),
                    )

                    def both_products(s_acc, dp_acc):
                        own = lax.optimization_barrier(wg_idx)
                        plgpu.barrier_wait(k_full.at[k_slot])
                        plgpu.wgmma(s_acc, q_smem.at[own], k_smem.at[k_slot].T)
                        plgpu.barrier_wait(v_full.at[v_slot])
                        plgpu.wgmma(dp_acc, do_smem.at[own], v_smem.at[v_slot].T)
                        products = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)

                        is_partial = False
                        if not mask.is_always_full(rows, block):
                            is_partial = (i < full_first) | (i >= full_last)
                        x = logits.logits_if_masked(products, tile, ops, at.key_length, is_partial)
                        p = jnp.exp2(x * logits.multiplier - _across(lse_wg, block))
                        derivative = None
                        if logits.soft_cap is not None:
                            derivative = logits.derivative_of_capped(products)
                        kept = logits.dropped(p, tile, ops) if logits.dropout_rate > 0 else None
                        dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=0)
                        plgpu.barrier_arrive(v_free.at[v_slot])
                        ds = logits.gradient(p, dp, _across(delta_wg, block), kept, derivative)
                        return ds.astype(dtype)

                    ds = pl.run_scoped(
                        both_products,
                        plgpu.ACC((_ROWS, block), jnp.float32),
                        plgpu.ACC((_ROWS, block), jnp.float32),
                    )
                    plgpu.wgmma(dq_acc, ds, k_smem.at[k_slot])
                    # Left in flight, it would occupy the registers of dS: the other consumer has
                    # the tensor cores meanwhile.
                    plgpu.wgmma_accumulator_load(dq_acc, wait_n=0)
                    plgpu.barrier_arrive(k_free.at[k_slot])

                # Visits [full_first, full_last) need no masking.
                full_first = own_stop - own.full_stop
                full_last = own_stop - own.full_start

                def all_visits(dq_acc):
                    lax.fori_loop(0, count, lambda i, _: visit(i, dq_acc), None)
                    return dq_acc[...]

                dq = pl.run_scoped(all_visits, plgpu.ACC((_ROWS, head_width), jnp.float32))
                if config.separate_output:
                    plgpu.barrier_arrive(q_free.at[wg_idx])
                    # The copy of the previous tile may still be reading this shared memory.
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                dq_wg_smem[...] = (dq * scale).astype(dtype)
                plgpu.commit_smem()
                queries = pl.ds(start, _ROWS)
                plgpu.copy_smem_to_gmem(
                    dq_wg_smem,
                    dq_gmem.at[
                        at.batch_idx, queries, at.head_idx, padded_columns(head_width, at.batch_idx)
                    ],
                )
                if not config.separate_output:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    plgpu.barrier_arrive(q_free.at[wg_idx])
                return step + count

            lax.fori_loop(0, tile_count, add_up, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)

    shared = functools.partial(operand_memory, dtype=dtype)
    scratch: dict[str, Any] = dict(
        q_smem=shared((consumers, _ROWS, head_width), contracted=block),
        do_smem=shared((consumers, _ROWS, value_width)),
        k_smem=shared((k_stages, block, head_width), contracted=block),
        v_smem=shared((v_stages, block, value_width)),
        q_full=plgpu.Barrier(num_arrivals=2, num_barriers=consumers),
        q_free=plgpu.Barrier(num_barriers=consumers),
        k_full=plgpu.Barrier(num_barriers=k_stages),
        k_free=plgpu.Barrier(num_arrivals=consumers, num_barriers=k_stages),
        v_full=plgpu.Barrier(num_barriers=v_stages),
        v_free=plgpu.Barrier(num_arrivals=consumers, num_barriers=v_stages),
    )
    if config.separate_output:
        scratch["dq_smem"] = shared((consumers, _ROWS, head_width))
    dq = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(query.shape, dtype),
        scratch_types=scratch,
        grid=(schedule.shape[0],),
        grid_names=("cta",),
        num_threads=consumers + 1,
        thread_name="wg",
        kernel_name="attention_query_gradient",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(
        query,
        key,
        value,
        dout,
        lse2,
        delta,
        schedule,
        *segment_bounds,
        *(getattr(operands, name) for name in present),
    )
    return dq[:, :query_count, :, :head_size]


def _across(vector: jax.Array, columns: int) -> jax.Array:
    """[rows] to [rows, columns]."""
    return lax.broadcast_in_dim(vector, (vector.shape[0], columns), [0])
