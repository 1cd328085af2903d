"""A matrix product for Hopper whose epilogue is a traced Python function.

The bare product is not the point: XLA has a good one. What XLA pays for separately, bias, activation,
residual, the derivative of an activation and the sums for a bias gradient, is here a function of the
float32 accumulators and of named operands, traced into the kernel.

A CTA has a warpgroup that only copies operand tiles into a ring in shared memory, and two that
multiply. In ping-pong these two hold different output tiles, and one runs its epilogue and stores
while the other one multiplies, so that an epilogue costs nothing as long as it is shorter than the
product of one tile. Otherwise they share one output tile of twice the height, whose operands are
read less often.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

CONSUMERS = 2
"""Warpgroups of a CTA that multiply; the one after them copies."""
SHARED_MEMORY_BYTES = 227 * 1024
ACCUMULATOR_REGISTERS = 192
"""Of a thread of a multiplying warpgroup, of 240 that it has."""


@dataclass(frozen=True)
class MatmulConfig:
    """How the product is cut into tiles."""

    tile_m: int = 128
    """Rows of the accumulator tile of a warpgroup."""
    tile_n: int = 192
    tile_k: int = 64
    stages: int = 4
    """Slots of the ring: tiles of the operands in flight or in use."""
    ping_pong: bool = True
    """The two warpgroups work on different tiles; otherwise on the halves of a tile twice as high."""
    cluster: int = 1
    """CTAs one below the other that share the tiles of b: each copies its part to all of them."""
    epilogue_columns: int = 64
    """Columns of a tile that the epilogue works on at a time."""
    epilogue_slots: int = 1
    """Slots for such columns, of each matrix that the epilogue reads or writes."""
    band: int = 8
    """Output tiles are taken in bands of so many tiles, for the sake of the cache."""
    bands_of_columns: bool = False
    """A band is so many tiles wide, and is worked through downwards; otherwise so many high."""

    @property
    def cta_tile_m(self) -> int:
        return self.tile_m if self.ping_pong else CONSUMERS * self.tile_m


@dataclass(frozen=True)
class Operand:
    """A matrix operand of the product as it lies in memory."""

    array: jax.Array
    transposed: bool = False


def matmul(
    a: jax.Array,
    b: jax.Array | Sequence[jax.Array],
    *,
    a_transposed: bool = False,
    b_transposed: bool = False,
    products: int = 1,
    epilogue: Callable[..., Mapping[str, jax.Array]],
    rows: Mapping[str, jax.Array] = {},
    matrices: Mapping[str, jax.Array] = {},
    outputs: Mapping[str, Any],
    column_sums: Sequence[str] = (),
    multiprocessors: int,
    config: MatmulConfig,
) -> dict[str, jax.Array]:
    """The named results of `epilogue` over a @ b, of which each is [M, N] or the sum over the rows.

    Args:
      a: [M, K], or [K, M] with `a_transposed`.
      b: [K, N], or [N, K] with `b_transposed`; or `products` of them in one pass over a: a sequence,
        or one array that holds them side by side along N.
      epilogue: takes a float32 tile of each product, then by name what `rows` and `matrices` hold at
        this tile, in float32. Returns tiles by name.
      rows: [N] each.
      matrices: [M, N] each.
      outputs: the dtype of each matrix that `epilogue` returns.
      column_sums: what of the rest that it returns is summed over the rows, to float32 [N].
    """
    bs = [b] * products if isinstance(b, jax.Array) else list(b)
    side_by_side = isinstance(b, jax.Array) and products > 1
    m, k = a.shape[::-1] if a_transposed else a.shape
    n = bs[0].shape[0 if b_transposed else 1] // (products if side_by_side else 1)
    dtype = a.dtype
    c = config
    part_n = c.tile_n // products
    m_tiles, n_tiles = pl.cdiv(m, c.cta_tile_m), pl.cdiv(n, part_n)
    cluster_rows = pl.cdiv(m_tiles, c.cluster)
    clusters = min(multiprocessors // c.cluster, cluster_rows * n_tiles)
    tile_count = cluster_rows * n_tiles
    k_steps = pl.cdiv(k, c.tile_k)

    def widest_swizzle(dtype, *widths):
        return min(plgpu.find_swizzle(w * jnp.dtype(dtype).itemsize * 8) for w in widths)

    # A copy wants the rows of its array, not only of its tile, to be whole swizzle patterns.
    swizzle = min(
        widest_swizzle(dtype, *((m, c.tile_m) if a_transposed else (k, c.tile_k))),
        widest_swizzle(dtype, *((k, c.tile_k) if b_transposed else (n, part_n))),
    )

    def tiled(shape, dtype, swizzle):
        lanes = swizzle // jnp.dtype(dtype).itemsize
        return plgpu.SMEM(
            shape,
            dtype,
            transforms=(plgpu.TilingTransform((8, lanes)), plgpu.SwizzleTransform(swizzle)),
        )

    def stream(dtype):
        width = c.epilogue_columns
        return tiled(
            (CONSUMERS, c.epilogue_slots, c.tile_m, width),
            dtype,
            widest_swizzle(dtype, n, width),
        )

    a_tile = (c.tile_k, c.cta_tile_m) if a_transposed else (c.cta_tile_m, c.tile_k)
    b_tile = (part_n, c.tile_k) if b_transposed else (c.tile_k, part_n)
    consumers_of_step = 1 if c.ping_pong else CONSUMERS
    consumed = (
        plgpu.Barrier(num_arrivals=consumers_of_step, num_barriers=c.stages)
        if c.cluster == 1
        else plgpu.ClusterBarrier(
            collective_axes=("cta",), num_arrivals=consumers_of_step, num_barriers=c.stages
        )
    )
    full_sets = CONSUMERS if c.ping_pong else 1
    scratch = dict(
        a_smem=tiled((c.stages, *a_tile), dtype, swizzle),
        b_smem=[tiled((c.stages, *b_tile), dtype, swizzle) for _ in bs],
        full=plgpu.Barrier(num_arrivals=1 + products, num_barriers=full_sets * c.stages),
        consumed=consumed,
        turn=plgpu.Barrier(num_barriers=CONSUMERS),
        out_smem={name: stream(out_dtype) for name, out_dtype in outputs.items()},
    )
    if rows:
        scratch["row_smem"] = {
            name: plgpu.SMEM((CONSUMERS, part_n), row.dtype) for name, row in rows.items()
        }
        scratch["row_barrier"] = plgpu.Barrier(num_arrivals=len(rows), num_barriers=CONSUMERS)
    if matrices:
        scratch["matrix_smem"] = {name: stream(x.dtype) for name, x in matrices.items()}
        scratch["matrix_barrier"] = plgpu.Barrier(
            num_arrivals=len(matrices), num_barriers=CONSUMERS * c.epilogue_slots
        )
    if column_sums:
        scratch["sum_turn"] = plgpu.Barrier(num_barriers=CONSUMERS)

    def kernel(*refs, a_smem, b_smem, full, consumed, turn, out_smem, **smem):
        a_gmem, *refs = refs
        b_gmem, refs = refs[: len(bs)], refs[len(bs) :]
        row_gmem, refs = dict(zip(rows, refs)), refs[len(rows) :]
        matrix_gmem, refs = dict(zip(matrices, refs)), refs[len(matrices) :]
        out_gmem, refs = dict(zip(outputs, refs)), refs[len(outputs) :]
        sum_gmem = dict(zip(column_sums, refs, strict=True))
        wg_idx = lax.axis_index("wg")
        cluster_idx = lax.axis_index("cluster")
        cta_idx = lax.axis_index("cta")
        my_tiles = lax.div(jnp.int32(tile_count - 1) - cluster_idx, jnp.int32(clusters)) + 1

        def place(sequence_idx):
            m_idx, n_idx = plgpu.planar_snake(
                cluster_idx + sequence_idx * clusters,
                (cluster_rows, n_tiles),
                1 if c.bands_of_columns else 0,
                c.band,
            )
            return m_idx * c.cluster + cta_idx, n_idx

        def next_slot(slot):
            return lax.select(slot == c.stages - 1, jnp.int32(0), slot + 1)

        def full_barrier(sequence_idx, slot):
            if not c.ping_pong:
                return full.at[slot]
            return full.at[lax.rem(sequence_idx, jnp.int32(CONSUMERS)) * c.stages + slot]

        def at(ref, transposed, start, size, k_start):
            span, k_span = pl.ds(start, size), pl.ds(k_start, c.tile_k)
            return ref.at[k_span, span] if transposed else ref.at[span, k_span]

        def produce():
            plgpu.set_max_registers(40, action="decrease")

            def tile(sequence_idx, carry):
                m_idx, n_idx = place(sequence_idx)

                def step(k_idx, carry):
                    slot, filled = carry

                    @pl.when(filled >= c.stages)
                    def _():
                        plgpu.barrier_wait(consumed.at[slot])

                    landed = full_barrier(sequence_idx, slot)
                    k_start = k_idx * c.tile_k
                    plgpu.copy_gmem_to_smem(
                        at(a_gmem, a_transposed, m_idx * c.cta_tile_m, c.cta_tile_m, k_start),
                        a_smem.at[slot],
                        landed,
                    )
                    for p, ref in enumerate(b_gmem):
                        start = n_idx * part_n + (p * n if side_by_side else 0)
                        plgpu.copy_gmem_to_smem(
                            at(ref, not b_transposed, start, part_n, k_start),
                            b_smem[p].at[slot],
                            landed,
                            collective_axes="cta" if c.cluster > 1 else None,
                        )
                    return next_slot(slot), filled + 1

                return lax.fori_loop(0, k_steps, step, carry)

            slot, filled = lax.fori_loop(0, my_tiles, tile, (jnp.int32(0), jnp.int32(0)))
            # Nobody may still be about to arrive here when this CTA ends.
            for i in range(c.stages):

                @pl.when(filled > i)
                def _():
                    plgpu.barrier_wait(consumed.at[lax.rem(slot + i, jnp.int32(c.stages))])

        def consume():
            plgpu.set_max_registers(232, action="increase")
            mine = pl.ds(wg_idx * c.tile_m, c.tile_m)
            other = 1 - wg_idx
            step_tiles = CONSUMERS if c.ping_pong else 1
            first = wg_idx if c.ping_pong else jnp.int32(0)

            def a_operand(slot):
                tile = a_smem.at[slot]
                if not c.ping_pong:
                    tile = tile.at[:, mine] if a_transposed else tile.at[mine]
                return tile.transpose((1, 0)) if a_transposed else tile

            def multiply(acc_ref, slot):
                for p in range(products):
                    b = b_smem[p].at[slot]
                    plgpu.wgmma(
                        acc_ref.at[:, p * part_n : (p + 1) * part_n] if products > 1 else acc_ref,
                        a_operand(slot),
                        b.transpose((1, 0)) if b_transposed else b,
                    )

            turns = ([turn] if c.ping_pong else []) + ([smem["sum_turn"]] if column_sums else [])
            for barrier in turns:
                plgpu.barrier_arrive(barrier.at[0], predicate=wg_idx == 1)

            def tile(i, _):
                sequence_idx = first + i * step_tiles
                m_idx, n_idx = place(sequence_idx)
                m_start = m_idx * c.cta_tile_m
                if not c.ping_pong:
                    m_start += wg_idx * c.tile_m
                n_start = n_idx * part_n
                chunks = part_n // c.epilogue_columns
                is_last = sequence_idx == my_tiles - 1
                if not c.ping_pong:
                    is_last &= wg_idx == CONSUMERS - 1

                def hand_over(turns):
                    plgpu.barrier_arrive(turns.at[other], predicate=jnp.logical_not(is_last))

                def block(ref, chunk):
                    columns = pl.ds(n_start + chunk * c.epilogue_columns, c.epilogue_columns)
                    return ref.at[pl.ds(m_start, c.tile_m), columns]

                def load_matrices(chunk):
                    slot = chunk % c.epilogue_slots
                    landed = smem["matrix_barrier"].at[wg_idx * c.epilogue_slots + slot]
                    for name, ref in matrix_gmem.items():
                        destination = smem["matrix_smem"][name].at[wg_idx, slot]
                        plgpu.copy_gmem_to_smem(block(ref, chunk), destination, landed)

                for name, ref in row_gmem.items():
                    plgpu.copy_gmem_to_smem(
                        ref.at[pl.ds(n_start, part_n)],
                        smem["row_smem"][name].at[wg_idx],
                        smem["row_barrier"].at[wg_idx],
                    )
                if matrices:
                    for chunk in range(min(chunks, c.epilogue_slots)):
                        load_matrices(chunk)

                def accumulate(acc_ref):
                    if c.ping_pong:
                        plgpu.barrier_wait(turn.at[wg_idx])
                    first_slot = lax.rem(sequence_idx * k_steps, jnp.int32(c.stages))
                    plgpu.barrier_wait(full_barrier(sequence_idx, first_slot))
                    multiply(acc_ref, first_slot)

                    def step(_, previous):
                        slot = next_slot(previous)
                        plgpu.barrier_wait(full_barrier(sequence_idx, slot))
                        multiply(acc_ref, slot)
                        plgpu.wgmma_wait(products)
                        plgpu.barrier_arrive(consumed.at[previous])
                        return slot

                    last_slot = lax.fori_loop(1, k_steps, step, first_slot)
                    if c.ping_pong:
                        hand_over(turn)
                    return acc_ref[...], last_slot

                acc, last_slot = pl.run_scoped(
                    accumulate, plgpu.ACC((c.tile_m, c.tile_n), jnp.float32)
                )
                plgpu.barrier_arrive(consumed.at[last_slot])

                if rows:
                    plgpu.barrier_wait(smem["row_barrier"].at[wg_idx])
                if column_sums:
                    plgpu.barrier_wait(smem["sum_turn"].at[wg_idx])
                shape = (c.tile_m, c.epilogue_columns)
                row_idx = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
                for chunk in range(chunks):
                    slot = chunk % c.epilogue_slots
                    operands = {}
                    for name in rows:
                        columns = pl.ds(chunk * c.epilogue_columns, c.epilogue_columns)
                        row = plgpu.load(
                            smem["row_smem"][name].at[wg_idx, columns],
                            layout=plgpu.Layout.WGMMA.reduce(0),
                        )
                        operands[name] = lax.broadcast_in_dim(
                            row.astype(jnp.float32), shape, (1,)
                        )
                    if matrices:
                        plgpu.barrier_wait(
                            smem["matrix_barrier"].at[wg_idx * c.epilogue_slots + slot]
                        )
                        for name in matrices:
                            operands[name] = plgpu.load(
                                smem["matrix_smem"][name].at[wg_idx, slot],
                                layout=plgpu.Layout.WGMMA,
                            ).astype(jnp.float32)
                    start = chunk * c.epilogue_columns
                    tiles = [
                        acc[:, p * part_n + start : p * part_n + start + c.epilogue_columns]
                        for p in range(products)
                    ]
                    results = epilogue(*tiles, **operands)
                    plgpu.wait_smem_to_gmem(c.epilogue_slots - 1, wait_read_only=True)
                    for name, out_dtype in outputs.items():
                        out_smem[name].at[wg_idx, slot][...] = results[name].astype(out_dtype)
                    plgpu.commit_smem()
                    for name in outputs:
                        plgpu.copy_smem_to_gmem(
                            out_smem[name].at[wg_idx, slot],
                            block(out_gmem[name], chunk),
                            commit_group=False,
                        )
                    plgpu.commit_smem_to_gmem_group()
                    if matrices and chunk + c.epilogue_slots < chunks:
                        load_matrices(chunk + c.epilogue_slots)
                    for name in column_sums:
                        columns = pl.ds(n_start + start, c.epilogue_columns)
                        m_tile = m_idx if c.ping_pong else m_idx * CONSUMERS + wg_idx
                        summed = results[name]
                        if m % (c.cta_tile_m * c.cluster):
                            summed = jnp.where(row_idx < m - m_start, summed, 0.0)
                        sum_gmem[name].at[m_tile, columns][...] = jnp.sum(summed, axis=0)
                if column_sums:
                    hand_over(smem["sum_turn"])

            count = lax.div(my_tiles - first + (step_tiles - 1), jnp.int32(step_tiles))
            lax.fori_loop(0, count, tile, None)
            plgpu.wait_smem_to_gmem(0)

        lax.cond(wg_idx == CONSUMERS, produce, consume)

    sum_rows = cluster_rows * c.cluster * (c.cta_tile_m // c.tile_m)
    results = plgpu.kernel(
        kernel,
        out_type=(
            *(jax.ShapeDtypeStruct((m, n), d) for d in outputs.values()),
            *(
                jax.ShapeDtypeStruct((sum_rows, n_tiles * part_n), jnp.float32)
                for _ in column_sums
            ),
        ),
        scratch_types=scratch,
        grid=(clusters,),
        grid_names=("cluster",),
        cluster=(c.cluster,),
        cluster_names=("cta",),
        num_threads=CONSUMERS + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=c.epilogue_columns * 128 if column_sums else 512
        ),
    )(a, *bs, *rows.values(), *matrices.values())
    named = dict(zip((*outputs, *column_sums), results, strict=True))
    for name in column_sums:
        named[name] = jnp.sum(named[name], axis=0)[:n]
    return named
