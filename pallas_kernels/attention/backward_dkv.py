"""Gradients of attention's keys and values on Hopper, without that of the queries.

A tile of keys stays in shared memory, dK and dV stay in registers, and blocks of queries stream past.
Tiles are transposed, keys by queries, so that P^T and dS^T leave the registers they were computed in
only as operands of the next products: warpgroups neither wait for nor write to each other.

With wide heads dK and dV of 64 keys fill the registers of two warpgroups. There one computes S^T, P^T
and dV, and hands P^T to the other, which computes dP^T, dS^T and dK: four products, two for each.
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
from pallas_kernels.attention.logits import Logits, Operands, TransposedTile
from pallas_kernels.attention.mask import segment_blocks
from pallas_kernels.attention.tiles import KeyTiles, operand_memory, padded_columns

_KEYS = 64
"""Keys of a warpgroup: what one wgmma instruction takes."""


@dataclass(frozen=True)
class KeyGradientConfig:
    """How the work is cut: a tile of 64 keys a warpgroup against blocks of queries."""

    warpgroups: int = 2
    query_block: int = 64
    query_stages: int = 2
    """Blocks of Q in shared memory."""
    dout_stages: int = 2
    """Blocks of dO in shared memory."""
    splits_roles: bool = False
    """For wide heads: the two warpgroups have the same keys, one has dV and the other dK."""
    tile_stages: int = 2
    """Tiles of K and V in shared memory: with 2 those of the next tile are there when it starts."""
    heads_together: int = 4
    """Key heads whose tiles are next to each other, for their Q and dO to stay in the L2 cache."""

    @property
    def key_block(self) -> int:
        return _KEYS if self.splits_roles else self.warpgroups * _KEYS

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a thread that multiplies and of one that copies, from 64 Ki a multiprocessor."""
        return {1: (232, 40), 2: (240, 24), 3: (160, 32)}[self.warpgroups]


def default_config(head_size: int, value_size: int, logits: Logits) -> KeyGradientConfig:
    """What registers and shared memory hold.

    On an H200, [4, 4096, 16, H]: H 128 1675 us with 3 blocks of Q and 1713 with 2, but causal 851 and
    843; H 64 936 us, causal 494; [2, 4096, 16, 256] causal 844 us.
    """
    widest = max(head_size, value_size)
    if widest <= 64 and not logits.needs_registers:
        return KeyGradientConfig(query_block=128)
    if widest <= 128:
        visits_all_queries = logits.mask.reach() == (None, None)
        return KeyGradientConfig(query_stages=3 if visits_all_queries else 2)
    return KeyGradientConfig(splits_roles=True, tile_stages=1)


def key_gradients(
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
    config: KeyGradientConfig | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(dkey, dvalue); lse2 and delta [B, N, T filled up to whole blocks]."""
    batch, _, heads, head_size = query.shape
    key_count, key_heads, value_size = value.shape[1:]
    group = heads // key_heads
    mask, dtype = logits.mask, query.dtype
    config = config or default_config(head_size, value_size, logits)
    rows, block, wgs = config.query_block, config.key_block, config.warpgroups
    key_parts = block // _KEYS
    q_stages, do_stages, kv_stages = config.query_stages, config.dout_stages, config.tile_stages
    head_width, value_width = shared_width(head_size), shared_width(value_size)
    # Without a cap the scale is left for the end, where there is less to multiply.
    scale = logits.scale if logits.soft_cap is None else 1.0
    query, key, value, dout = (copyable(x) for x in (query, key, value, dout))
    segment_bounds = []
    if mask.has_segments:
        segments = (operands.key_segments, operands.query_segments)
        segment_bounds = [segment_blocks(*segments, block, rows)]
    operands = operands.padded(rows, block).transposed()
    present = [name for name, array in operands._asdict().items() if array is not None]
    tiles = KeyTiles(mask, key_heads, group, block, rows)
    schedule = tiles.schedule(batch, config.heads_together, multiprocessors)

    def kernel(
        q_gmem, k_gmem, v_gmem, do_gmem, lse_gmem, delta_gmem, schedule_gmem, *refs, **scratch
    ):
        *operand_refs, dk_gmem, dv_gmem = refs
        bounds_gmem = operand_refs.pop(0) if mask.has_segments else None
        ops = Operands(**dict(zip(present, operand_refs, strict=True)))
        q_smem, do_smem = scratch["q_smem"], scratch["do_smem"]
        k_smem, v_smem = scratch["k_smem"], scratch["v_smem"]
        lse_smem, delta_smem = scratch["lse_smem"], scratch["delta_smem"]
        kv_full, kv_free = scratch["kv_full"], scratch["kv_free"]
        q_full, q_free = scratch["q_full"], scratch["q_free"]
        do_full, do_free = scratch["do_full"], scratch["do_free"]
        wg_idx = lax.axis_index("wg")
        cta_idx = lax.axis_index("cta")
        tile_count = schedule_gmem[cta_idx, 0]

        def place(tile_idx):
            return tiles.place(schedule_gmem[cta_idx, tile_idx + 1], ops, bounds_gmem)

        def kv_slot(tile_idx, part):
            return lax.rem(tile_idx, jnp.int32(kv_stages)) * key_parts + part

        @pl.when(wg_idx == wgs)
        def _producer():
            plgpu.set_max_registers(config.registers[1], action="decrease")

            def copy_keys(tile_idx):
                at = place(tile_idx)
                for part in range(key_parts):
                    slot = kv_slot(tile_idx, part)
                    plgpu.barrier_wait(kv_free.at[slot])
                    keys = pl.ds(at.start + part * _KEYS, _KEYS)
                    for gmem, smem, width in (
                        (k_gmem, k_smem, head_width),
                        (v_gmem, v_smem, value_width),
                    ):
                        plgpu.copy_gmem_to_smem(
                            gmem.at[
                                at.batch_idx,
                                keys,
                                at.key_head_idx,
                                padded_columns(width, at.batch_idx),
                            ],
                            smem.at[slot],
                            kv_full.at[slot],
                        )

            def copy_tile(tile_idx, first):
                at = place(tile_idx)
                following = tile_idx + 1
                if kv_stages == 1:
                    copy_keys(tile_idx)

                def copy_head(g, step):
                    head_idx = at.key_head_idx * group + g

                    def copy_pair(i, step):
                        queries = pl.ds(i * rows, rows)
                        if kv_stages > 1:
                            # Not before the first blocks of queries: these are needed earlier.
                            is_time = (step == first + q_stages) & (following < tile_count)
                            pl.when(is_time)(lambda: copy_keys(following))

                        def copy(gmem, smem, width, vector_gmem, vector_smem, full, free, stages):
                            slot = lax.rem(step, jnp.int32(stages))
                            plgpu.barrier_wait(free.at[slot])
                            plgpu.copy_gmem_to_smem(
                                gmem.at[
                                    at.batch_idx,
                                    queries,
                                    head_idx,
                                    padded_columns(width, at.batch_idx),
                                ],
                                smem.at[slot],
                                full.at[slot],
                            )
                            plgpu.copy_gmem_to_smem(
                                vector_gmem.at[at.batch_idx, head_idx, queries],
                                vector_smem.at[slot],
                                full.at[slot],
                            )

                        copy(
                            q_gmem, q_smem, head_width, lse_gmem, lse_smem, q_full, q_free, q_stages
                        )
                        copy(
                            do_gmem,
                            do_smem,
                            value_width,
                            delta_gmem,
                            delta_smem,
                            do_full,
                            do_free,
                            do_stages,
                        )
                        return step + 1

                    return lax.fori_loop(at.blocks.start, at.blocks.stop, copy_pair, step)

                end = lax.fori_loop(0, group, copy_head, first)
                if kv_stages > 1:
                    is_late = (end <= first + q_stages) & (following < tile_count)
                    pl.when(is_late)(lambda: copy_keys(following))
                return end

            if kv_stages > 1:
                copy_keys(0)
            lax.fori_loop(0, tile_count, copy_tile, jnp.int32(0))
            # Every arrival is waited for: the interpreter's race detection insists on it.
            for free, slots in (
                (q_free, q_stages),
                (do_free, do_stages),
                (kv_free, kv_stages * key_parts),
            ):
                for slot in range(slots):
                    plgpu.barrier_wait(free.at[slot])

        def own():
            """The index of the warpgroup, unknown before the loop: addresses occupy registers."""
            return lax.optimization_barrier(wg_idx)

        def slots(step):
            return lax.rem(step, jnp.int32(q_stages)), lax.rem(step, jnp.int32(do_stages))

        def release(step):
            """Gives the slots of a visit back to the producer."""
            # Copies come after what threads have read, the log-sum-exp and delta.
            plgpu.commit_smem()
            q_slot, do_slot = slots(step)
            plgpu.barrier_arrive(q_free.at[q_slot])
            plgpu.barrier_arrive(do_free.at[do_slot])

        def begin(part):
            plgpu.set_max_registers(config.registers[0], action="increase")
            for stage in range(kv_stages):
                plgpu.barrier_arrive(kv_free.at[stage * key_parts + part])
            for free, slots in ((q_free, q_stages), (do_free, do_stages)):
                for slot in range(slots):
                    plgpu.barrier_arrive(free.at[slot])

        def all_visits(at, step, visit):
            """visit(step, tile, is_partial) for every block of queries; the next step."""
            blocks = at.blocks

            def of_head(g, first):
                def body(i, _):
                    tile = TransposedTile(
                        at.batch_idx,
                        at.key_head_idx * group + g,
                        i * rows,
                        at.start + (0 if config.splits_roles else own() * _KEYS),
                        (_KEYS, rows),
                        transposed=True,
                    )
                    is_partial = (i < blocks.full_start) | (i >= blocks.full_stop)
                    visit(first + i - blocks.start, tile, is_partial)

                lax.fori_loop(blocks.start, blocks.stop, body, None)
                return first + blocks.stop - blocks.start

            return lax.fori_loop(0, group, of_head, step)

        def probabilities(products, tile, q_slot, is_partial, key_length):
            """P, and the derivative of the cap or None."""
            if mask.is_always_full(rows, block):
                is_partial = False
            x = logits.logits_if_masked(products, tile, ops, key_length, is_partial)
            p = jnp.exp2(x * logits.multiplier - tile.along_queries(lse_smem.at[q_slot]))
            if logits.soft_cap is None:
                return p, None
            return p, logits.derivative_of_capped(products)

        def write(gradient, smem, gmem, keys, at, width):
            smem[...] = gradient.astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(
                smem,
                gmem.at[at.batch_idx, keys, at.key_head_idx, padded_columns(width, at.batch_idx)],
            )

        tile_acc = plgpu.ACC((_KEYS, rows), jnp.float32)
        dk_acc_type = plgpu.ACC((_KEYS, head_width), jnp.float32)
        dv_acc_type = plgpu.ACC((_KEYS, value_width), jnp.float32)
        dv_factor = 1 / logits.keep_probability

        def both_gradients():
            begin(wg_idx)

            def of_tile(tile_idx, step):
                at = place(tile_idx)
                plgpu.barrier_wait(kv_full.at[kv_slot(tile_idx, wg_idx)])

                def accumulate(dk_acc, dv_acc):
                    def visit(step, tile, is_partial):
                        q_slot, do_slot = slots(step)

                        def products(s_acc, dp_acc):
                            plgpu.barrier_wait(q_full.at[q_slot])
                            plgpu.wgmma(
                                s_acc, k_smem.at[kv_slot(tile_idx, own())], q_smem.at[q_slot].T
                            )
                            plgpu.barrier_wait(do_full.at[do_slot])
                            plgpu.wgmma(
                                dp_acc, v_smem.at[kv_slot(tile_idx, own())], do_smem.at[do_slot].T
                            )
                            s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
                            p, derivative = probabilities(
                                s, tile, q_slot, is_partial, at.key_length
                            )
                            # Rounded, as dV needs it: more registers than that are not left.
                            p = lax.optimization_barrier(p.astype(dtype))
                            kept = logits.dropped(p, tile, ops) if logits.dropout_rate > 0 else None
                            plgpu.wgmma(dv_acc, p if kept is None else kept, do_smem.at[do_slot])
                            dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=1)
                            delta_tile = tile.along_queries(delta_smem.at[do_slot])
                            return logits.gradient(p, dp, delta_tile, kept, derivative)

                        ds = pl.run_scoped(products, tile_acc, tile_acc).astype(dtype)
                        plgpu.wgmma(dk_acc, ds, q_smem.at[q_slot])
                        # Left in flight, they would occupy the registers of P and dS: the other
                        # warpgroup has the tensor cores meanwhile.
                        plgpu.wgmma_accumulator_load(dk_acc, wait_n=0)
                        release(step)

                    end = all_visits(at, step, visit)
                    return dk_acc[...], dv_acc[...], end

                dk, dv, end = pl.run_scoped(accumulate, dk_acc_type, dv_acc_type)

                slot = kv_slot(tile_idx, wg_idx)
                keys = pl.ds(at.start + wg_idx * _KEYS, _KEYS)
                write(dv * dv_factor, v_smem.at[slot], dv_gmem, keys, at, value_width)
                write(dk * scale, k_smem.at[slot], dk_gmem, keys, at, head_width)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(kv_free.at[slot])
                return end

            lax.fori_loop(0, tile_count, of_tile, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)

        def one_gradient(gives_dv):
            """Of the warpgroup that computes P and dV, or of the one that gets P and computes dK."""
            begin(0)
            p_smem, p_full, p_free = scratch["p_smem"], scratch["p_full"], scratch["p_free"]
            if not gives_dv:
                for slot in range(2):
                    plgpu.barrier_arrive(p_free.at[slot])

            def visit_dv(acc, step, tile, is_partial, at, own_slot):
                q_slot, do_slot = slots(step)
                p_slot = lax.rem(step, jnp.int32(2))

                def with_s(s_acc):
                    plgpu.barrier_wait(q_full.at[q_slot])
                    plgpu.wgmma(s_acc, k_smem.at[own_slot()], q_smem.at[q_slot].T)
                    products = plgpu.wgmma_accumulator_load(s_acc, wait_n=0)
                    p, derivative = probabilities(products, tile, q_slot, is_partial, at.key_length)
                    return p, p if derivative is None else p * derivative

                p, factor = pl.run_scoped(with_s, tile_acc)
                plgpu.barrier_wait(p_free.at[p_slot])
                p_smem[p_slot] = factor.astype(dtype)
                plgpu.barrier_arrive(p_full.at[p_slot])
                p = p.astype(dtype)
                if logits.dropout_rate > 0:
                    p = logits.dropped(p, tile, ops)
                plgpu.barrier_wait(do_full.at[do_slot])
                plgpu.wgmma(acc, p, do_smem.at[do_slot])
                plgpu.wgmma_accumulator_load(acc, wait_n=0)
                release(step)

            def visit_dk(acc, step, tile, is_partial, at, own_slot):
                q_slot, do_slot = slots(step)
                p_slot = lax.rem(step, jnp.int32(2))

                def with_dp(dp_acc):
                    plgpu.barrier_wait(do_full.at[do_slot])
                    plgpu.wgmma(dp_acc, v_smem.at[own_slot()], do_smem.at[do_slot].T)
                    dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=0)
                    plgpu.barrier_wait(p_full.at[p_slot])
                    factor = plgpu.load(p_smem.at[p_slot], layout=tile.layout)
                    plgpu.barrier_arrive(p_free.at[p_slot])
                    kept = logits.dropped(factor, tile, ops) if logits.dropout_rate > 0 else None
                    delta_tile = tile.along_queries(delta_smem.at[do_slot])
                    return logits.gradient(factor, dp, delta_tile, kept, None)

                ds = pl.run_scoped(with_dp, tile_acc).astype(dtype)
                plgpu.barrier_wait(q_full.at[q_slot])
                plgpu.wgmma(acc, ds, q_smem.at[q_slot])
                plgpu.wgmma_accumulator_load(acc, wait_n=0)
                release(step)

            def of_tile(tile_idx, step):
                at = place(tile_idx)
                slot = kv_slot(tile_idx, 0)
                plgpu.barrier_wait(kv_full.at[slot])

                def own_slot():
                    return lax.optimization_barrier(slot)

                def accumulate(acc):
                    visit = visit_dv if gives_dv else visit_dk
                    end = all_visits(at, step, lambda *a: visit(acc, *a, at, own_slot))
                    return acc[...], end

                acc_type = dv_acc_type if gives_dv else dk_acc_type
                gradient, end = pl.run_scoped(accumulate, acc_type)
                # The other warpgroup's products may still be reading K or V.
                plgpu.barrier_arrive(scratch["kv_read"])
                plgpu.barrier_wait(scratch["kv_read"])
                keys = pl.ds(at.start, _KEYS)
                if gives_dv:
                    write(gradient * dv_factor, v_smem.at[slot], dv_gmem, keys, at, value_width)
                else:
                    write(gradient * scale, k_smem.at[slot], dk_gmem, keys, at, head_width)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(kv_free.at[slot])
                return end

            lax.fori_loop(0, tile_count, of_tile, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)
            if gives_dv:
                for slot in range(2):
                    plgpu.barrier_wait(p_free.at[slot])

        if config.splits_roles:
            pl.when(wg_idx == 0)(lambda: one_gradient(True))
            pl.when(wg_idx == 1)(lambda: one_gradient(False))
        else:
            pl.when(wg_idx < wgs)(both_gradients)

    shared = functools.partial(operand_memory, dtype=dtype)
    readers = wgs // key_parts
    scratch: dict[str, Any] = dict(
        q_smem=shared((q_stages, rows, head_width)),
        do_smem=shared((do_stages, rows, value_width)),
        k_smem=shared((kv_stages * key_parts, _KEYS, head_width)),
        v_smem=shared((kv_stages * key_parts, _KEYS, value_width)),
        lse_smem=plgpu.SMEM((q_stages, rows), jnp.float32),
        delta_smem=plgpu.SMEM((do_stages, rows), jnp.float32),
        kv_full=plgpu.Barrier(num_arrivals=2, num_barriers=kv_stages * key_parts),
        kv_free=plgpu.Barrier(num_arrivals=readers, num_barriers=kv_stages * key_parts),
        q_full=plgpu.Barrier(num_arrivals=2, num_barriers=q_stages),
        q_free=plgpu.Barrier(num_arrivals=wgs, num_barriers=q_stages),
        do_full=plgpu.Barrier(num_arrivals=2, num_barriers=do_stages),
        do_free=plgpu.Barrier(num_arrivals=wgs, num_barriers=do_stages),
    )
    if config.splits_roles:
        scratch["p_smem"] = shared((2, _KEYS, rows))
        scratch["p_full"] = plgpu.Barrier(num_barriers=2)
        scratch["p_free"] = plgpu.Barrier(num_barriers=2)
        scratch["kv_read"] = plgpu.Barrier(num_arrivals=2)
    dk, dv = plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct(key.shape, dtype),
            jax.ShapeDtypeStruct(value.shape, dtype),
        ),
        scratch_types=scratch,
        grid=(schedule.shape[0],),
        grid_names=("cta",),
        num_threads=wgs + 1,
        thread_name="wg",
        kernel_name="attention_key_gradient",
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
    return dk[:, :key_count, :, :head_size], dv[:, :key_count, :, :value_size]
