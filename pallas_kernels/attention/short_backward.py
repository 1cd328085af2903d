"""Attention on Hopper, backward for S <= 256: one kernel, a head's keys on one multiprocessor.

Since a CTA holds all keys of a head, dQ of 64 queries is complete when it is computed: nothing is
added up in global memory, and the bits are the same in every run. Two warpgroups hold dK and dV of
up to 128 keys each in registers and pass over the queries, 64 at a time, with keys as rows: P^T and
dS^T are then in registers where dV = P^T dO and dK = dS^T Q need them. dS^T also goes through shared
memory to a third warpgroup, which computes dQ = dS K, the sums of out dO over each row that dS needs,
and copies what comes next.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention import short_memory as memory
from pallas_kernels.attention.backward_rows import row_gradients, row_statistics
from pallas_kernels.attention.logits import EMPTY_LSE, LOG2E, Logits, Operands, TransposedTile
from pallas_kernels.attention.short_memory import COLUMNS, Heads, Matrix, Shape, ceil_to
from pallas_kernels.hopper import BARRIER_BYTES, SHARED_MEMORY_BYTES

ROWS = 64
"""Queries of a step and keys of a tile: what one wgmma instruction takes."""


@dataclass(frozen=True)
class BackwardConfig:
    """How a head is cut, and how much is copied ahead."""

    warpgroups: int
    """Those that compute dK and dV; one more copies and computes dQ."""
    key_tiles: int
    """Tiles of 64 keys of each of them."""
    key_slots: int
    """Heads whose keys and values are in shared memory: 2 to copy the next head's in time."""
    query_slots: int = 2
    """Steps whose queries are in shared memory."""

    @property
    def keys(self) -> int:
        return self.warpgroups * self.key_tiles * ROWS

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a thread that computes dK and dV, and of the warpgroup beside them.

        All warpgroups together have what the compiler gave them at the start: 168 for each of 3.
        """
        return {1: (240, 128), 2: (216, 72)}[self.warpgroups]

    def accumulator_columns(self, head_size: int, value_size: int) -> int:
        """Columns of dK and dV that a warpgroup holds in registers."""
        return self.key_tiles * (ceil_to(head_size, COLUMNS) + ceil_to(value_size, COLUMNS))

    def fits(self, head_size: int, value_size: int) -> bool:
        """Whether shared memory suffices."""
        head, value = (ceil_to(size, COLUMNS) for size in (head_size, value_size))
        numbers = self.key_slots * self.keys * (head + value)
        numbers += self.query_slots * ROWS * (head + 2 * value)
        numbers += self.keys * ROWS + ROWS * head
        return 2 * numbers + self.query_slots * 4 * ROWS * 4 <= (
            SHARED_MEMORY_BYTES - BARRIER_BYTES
        )


def default_config(key_count: int) -> BackwardConfig:
    """The choice for so many keys; with large heads it may not fit."""
    tiles = ceil_to(key_count, ROWS) // ROWS
    warpgroups = min(2, tiles)
    # [64, 197, 12, 64]: 98 us with one slot of keys and 129 us with two, whose number that changes
    # from head to head costs registers that dK and dV need.
    return BackwardConfig(warpgroups, -(-tiles // warpgroups), key_slots=1)


Gradients = tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, jax.Array | None]


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
    multiprocessors: int,
    config: BackwardConfig | None = None,
) -> Gradients:
    """(dquery, dkey, dvalue, dbias, dsinks), see pallas_kernels.attention.attention.

    lse is [B, N, R] as `forward` returned it. With a bias that differs between keys the
    gradient of the logits passes through global memory, [B, N, S, T] in float32, and XLA adds it up
    over the bias's broadcast axes.
    """
    (dquery, dkey, dvalue), dbias, dsinks = _backward(
        (query, key, value),
        Shape.of(query, key, value),
        operands,
        (out, lse, dout, dlse),
        logits,
        multiprocessors,
        config,
    )
    return dquery, dkey, dvalue, dbias, dsinks


def backward_packed(
    packed: jax.Array,
    operands: Operands,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    dlse: jax.Array | None,
    *,
    key_heads: int,
    logits: Logits,
    multiprocessors: int,
    config: BackwardConfig | None = None,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """(dpacked, dbias, dsinks) of `forward_packed`."""
    (dpacked,), dbias, dsinks = _backward(
        (packed,),
        Shape.of_packed(packed, key_heads),
        operands,
        (out, lse, dout, dlse),
        logits,
        multiprocessors,
        config,
    )
    return dpacked, dbias, dsinks


def _backward(
    arrays: tuple[jax.Array, ...],
    shape: Shape,
    operands: Operands,
    results: tuple[jax.Array, jax.Array, jax.Array, jax.Array | None],
    logits: Logits,
    multiprocessors: int,
    config: BackwardConfig | None,
) -> tuple[list[jax.Array], jax.Array | None, jax.Array | None]:
    batch, query_count, key_count, heads, key_heads, head_size, value_size = shape
    out, lse, dout, dlse = results
    dtype = arrays[0].dtype
    groups = heads // key_heads
    config = config or default_config(key_count)
    chunks = -(-query_count // ROWS)
    steps = groups * chunks
    items = batch * key_heads
    ctas = min(multiprocessors, items)
    warpgroups, key_tiles = config.warpgroups, config.key_tiles
    key_slots, query_slots = config.key_slots, config.query_slots
    tile_count = warpgroups * key_tiles
    bias = operands.bias
    dbias, dsinks = None, None
    if bias is not None or operands.sinks is not None:
        dbias, dsinks = row_gradients(operands, *row_statistics(out, lse, dout, dlse), dlse)
    writes_dlogits = bias is not None and dbias is None
    operands = operands.padded(ROWS, config.keys).transposed()
    present = [name for name, array in operands._asdict().items() if array is not None]
    inputs = [*arrays, out, lse, dout]
    if dlse is not None:
        inputs.append(jnp.pad(dlse, ((0, 0), (0, 0), (0, lse.shape[-1] - dlse.shape[-1]))))
    masked = not logits.mask.is_always_full(ROWS, config.keys)
    head_blocks, value_blocks = memory.blocks(head_size), memory.blocks(value_size)

    def kernel(
        *refs,
        q_smem,
        k_smem,
        v_smem,
        o_smem,
        do_smem,
        ds_smem,
        dq_smem,
        rows_smem,
        **bars,
    ):
        refs = iter(refs)
        q_heads, k_heads, v_heads = memory.queries_keys_values(
            [next(refs) for _ in arrays], heads, key_heads
        )
        o_gmem, lse_gmem, do_gmem = (next(refs) for _ in range(3))
        dlse_gmem = None if dlse is None else next(refs)
        ops = Operands(**{name: next(refs) for name in present})
        dq_heads, dk_heads, dv_heads = memory.queries_keys_values(
            [next(refs) for _ in arrays], heads, key_heads
        )
        dlogits_gmem = next(refs) if writes_dlogits else None
        wg_idx, cta_idx = lax.axis_index("wg"), lax.axis_index("cta")
        lse_smem, dlse_smem, delta_smem, lse2_smem = rows_smem
        own_items = lax.div(items - cta_idx + (ctas - 1), jnp.int32(ctas))
        own_steps = own_items * steps

        def place_item(item):
            """(batch, key head) of an item of this CTA."""
            number = cta_idx + item * ctas
            return lax.div(number, jnp.int32(key_heads)), lax.rem(number, jnp.int32(key_heads))

        def place(step):
            """(batch, head, first query) of a step of this CTA."""
            batch_idx, key_head = place_item(lax.div(step, jnp.int32(steps)))
            within = lax.rem(step, jnp.int32(steps))
            group = lax.div(within, jnp.int32(chunks))
            start = lax.rem(within, jnp.int32(chunks)) * ROWS
            return batch_idx, key_head * groups + group, start

        def key_slot(item):
            return lax.rem(item, jnp.int32(key_slots))

        def query_slot(step):
            return lax.rem(step, jnp.int32(query_slots))

        @pl.when(wg_idx == warpgroups)
        def _copy_and_dq():
            plgpu.set_max_registers(config.registers[1], action="decrease")

            def copy_queries(step):
                batch_idx, head_idx, start = place(step)
                slot = query_slot(step)
                plgpu.barrier_wait(bars["query_free"].at[slot])
                full = bars["query_full"].at[slot]
                for smem, gmem_heads in (
                    (q_smem, q_heads),
                    (do_smem, Heads(do_gmem)),
                    (o_smem, Heads(o_gmem)),
                ):
                    Matrix.of(smem, slot).fill(gmem_heads, batch_idx, start, head_idx, full)
                for smem, gmem in ((lse_smem, lse_gmem), (dlse_smem, dlse_gmem)):
                    if gmem is not None:
                        plgpu.copy_gmem_to_smem(
                            gmem.at[batch_idx, head_idx, pl.ds(start, ROWS)],
                            smem.at[slot],
                            full,
                        )

            def copy_keys(item):
                batch_idx, key_head = place_item(item)
                slot = key_slot(item)
                plgpu.barrier_wait(bars["key_free"].at[slot])
                full = bars["key_full"].at[slot]
                for smem, gmem_heads in ((k_smem, k_heads), (v_smem, v_heads)):
                    for tile in range(tile_count):
                        Matrix.of(smem, slot, tile).fill(
                            gmem_heads, batch_idx, tile * ROWS, key_head, full
                        )

            def prepare_rows(step):
                """What dK and dV need of each query of a step: sum(out dout) - dlse and the lse."""
                slot = query_slot(step)
                rows = plgpu.Layout.WGMMA.reduce(1)
                plgpu.barrier_wait(bars["query_full"].at[slot])
                delta = None
                for o_ref, do_ref in zip(
                    Matrix.of(o_smem, slot).operands,
                    Matrix.of(do_smem, slot).operands,
                    strict=True,
                ):
                    o, do = (
                        plgpu.load(ref, layout=plgpu.Layout.WGMMA).astype(jnp.float32)
                        for ref in (o_ref, do_ref)
                    )
                    part = jnp.sum(o * do, axis=1)
                    delta = part if delta is None else delta + part
                if dlse is not None:
                    delta -= plgpu.load(dlse_smem.at[slot], layout=rows)
                delta_smem.at[slot][...] = delta
                lse_rows = plgpu.load(lse_smem.at[slot], layout=rows)
                # exp2 of anything less infinity is 0: such queries attend to nothing.
                is_empty = lse_rows <= EMPTY_LSE
                if query_count % ROWS:
                    row = place(step)[2] + plgpu.broadcasted_iota(
                        jnp.int32, (ROWS,), 0, layout=rows
                    )
                    is_empty = is_empty | (row >= query_count)
                lse2_smem.at[slot][...] = jnp.where(is_empty, jnp.inf, lse_rows * LOG2E)
                plgpu.barrier_arrive(bars["rows_full"].at[slot])

            def compute_dq(step):
                batch_idx, head_idx, start = place(step)
                slot = key_slot(lax.div(step, jnp.int32(steps)))
                plgpu.barrier_wait(bars["ds_full"])

                def products(*accs):
                    for tile in range(tile_count):
                        ds_tile = ds_smem.at[tile].transpose((1, 0))
                        memory.multiply(accs, ds_tile, Matrix.of(k_smem, slot, tile))
                    return [acc[...] for acc in accs]

                dq = pl.run_scoped(products, *memory.accumulators(head_size))
                plgpu.barrier_arrive(bars["ds_free"])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                staged = Matrix.of(dq_smem)
                for block, smem in zip(dq, staged.operands, strict=True):
                    smem[...] = (block * logits_scale).astype(dtype)
                plgpu.commit_smem()
                staged.write(dq_heads, batch_idx, start, head_idx)

            plgpu.barrier_arrive(bars["ds_free"])
            copy_keys(0)
            copy_queries(0)
            prepare_rows(0)

            @pl.loop(0, own_steps)
            def _(step):
                @pl.when(step + 1 < own_steps)
                def _():
                    copy_queries(step + 1)
                    prepare_rows(step + 1)

                compute_dq(step)
                item, within = (
                    lax.div(step, jnp.int32(steps)),
                    lax.rem(step, jnp.int32(steps)),
                )
                pl.when(within == steps - 1)(lambda: plgpu.barrier_arrive(bars["key_read"]))
                # With one slot the next keys come when this head is done, else during it.
                copies = within == (0 if key_slots > 1 else steps - 1)
                pl.when(copies & (item + 1 < own_items))(lambda: copy_keys(item + 1))

            plgpu.wait_smem_to_gmem(0)

        @pl.when(wg_idx < warpgroups)
        def _dk_and_dv():
            plgpu.set_max_registers(config.registers[0], action="increase")
            for slot in range(query_slots):
                plgpu.barrier_arrive(bars["query_free"].at[slot])
            for slot in range(key_slots):
                plgpu.barrier_arrive(bars["key_free"].at[slot])

            def accumulate(item, within, dv_accs, dk_accs):
                """Adds what the queries of a step give to dK and dV, and passes dS on."""
                step = item * steps + within
                batch_idx, head_idx, start = place(step)
                slot = query_slot(step)
                key_length = key_count if ops.key_lengths is None else ops.key_lengths[batch_idx]
                q, do = Matrix.of(q_smem, slot), Matrix.of(do_smem, slot)
                plgpu.barrier_wait(bars["query_full"].at[slot])

                # One tile after the other: the registers hold dK and dV of all, but P of one.
                # Where it is unknown before the loop, so that addresses do not occupy registers there:
                # [64, 197, 12, 64] spilled 228 bytes, not 68.
                first_tile = lax.optimization_barrier(wg_idx) * key_tiles
                for j in range(key_tiles):
                    tile = first_tile + j
                    k = Matrix.of(k_smem, key_slot(item), tile)
                    v = Matrix.of(v_smem, key_slot(item), tile)
                    logits_tile = TransposedTile(
                        batch_idx,
                        head_idx,
                        start,
                        tile * ROWS,
                        (ROWS, ROWS),
                        transposed=True,
                    )

                    def logits_products(acc, k=k):
                        memory.multiply_transposed(acc, k, q)
                        return acc[...]

                    s = pl.run_scoped(logits_products, plgpu.ACC((ROWS, ROWS), jnp.float32))
                    if j == 0:
                        plgpu.barrier_wait(bars["rows_full"].at[slot])
                    lse2 = logits_tile.along_queries(lse2_smem.at[slot])
                    x = logits.logits(s, logits_tile, ops, key_length, masked)
                    p = jnp.exp2(x * logits.multiplier - lse2)
                    kept = logits.dropped(p, logits_tile, ops) if logits.dropout_rate > 0 else None
                    # From here on P is rounded, and the barrier keeps the compiler from going back to
                    # it in float32: with those registers all products would wait for each other.
                    p = lax.optimization_barrier(p.astype(dtype))
                    kept = p if kept is None else lax.optimization_barrier(kept.astype(dtype))

                    def value_products(dp_acc, kept=kept, dv_acc=dv_accs[j], v=v):
                        memory.multiply(dv_acc, kept, do)
                        memory.multiply_transposed(dp_acc, v, do)
                        return dp_acc[...]

                    dp = pl.run_scoped(value_products, plgpu.ACC((ROWS, ROWS), jnp.float32))
                    if logits.dropout_rate > 0:
                        dp = logits.dropped(dp, logits_tile, ops)
                        dp = dp * (1.0 / logits.keep_probability)
                    if j == 0:
                        plgpu.barrier_wait(bars["ds_free"])
                    delta = logits_tile.along_queries(delta_smem.at[slot])
                    ds = p.astype(jnp.float32) * (dp - delta)
                    if dlogits_gmem is not None:
                        keys, queries = pl.ds(tile * ROWS, ROWS), pl.ds(start, ROWS)
                        dlogits_gmem.at[batch_idx, head_idx, keys, queries][...] = ds
                    if logits.soft_cap is not None:
                        ds = ds * logits.derivative_of_capped(s)
                    ds = ds.astype(dtype)
                    memory.multiply(dk_accs[j], ds, q)
                    ds_smem.at[tile][...] = ds
                plgpu.commit_smem()
                plgpu.barrier_arrive(bars["ds_full"])
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(bars["query_free"].at[slot])

            @pl.loop(0, own_items)
            def _(item):
                slot = key_slot(item)
                batch_idx, key_head = place_item(item)
                plgpu.barrier_wait(bars["key_full"].at[slot])

                def all_steps(dv_accs, dk_accs):
                    @pl.loop(0, steps)
                    def _(within):
                        accumulate(item, within, dv_accs, dk_accs)
                        if key_slots > 1:

                            @pl.when((within == 0) & (item > 0))
                            def _():
                                # The last head's results have left the memory of its keys long ago.
                                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                                plgpu.barrier_arrive(bars["key_free"].at[key_slot(item - 1)])

                    return jax.tree.map(lambda acc: acc[...], (dv_accs, dk_accs))

                dvs, dks = pl.run_scoped(
                    all_steps,
                    [memory.accumulators(value_size)] * key_tiles,
                    [memory.accumulators(head_size)] * key_tiles,
                )

                def write(smem, gmem_heads, results, factor):
                    """Through the memory of this warpgroup's own tiles, which nobody reads now."""
                    for j in range(key_tiles):
                        tile = wg_idx * key_tiles + j
                        staged = Matrix.of(smem, slot, tile)
                        for block, ref in zip(results[j], staged.operands, strict=True):
                            ref[...] = (block * factor).astype(dtype)
                        plgpu.commit_smem()
                        staged.write(gmem_heads, batch_idx, tile * ROWS, key_head)

                write(v_smem, dv_heads, dvs, 1.0 / logits.keep_probability)
                plgpu.barrier_wait(bars["key_read"])
                write(k_smem, dk_heads, dks, logits_scale)
                if key_slots == 1:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    plgpu.barrier_arrive(bars["key_free"].at[slot])

            plgpu.wait_smem_to_gmem(0)

    # A cap has a slope of its own for each element, which contains the scale.
    logits_scale = logits.scale if logits.soft_cap is None else 1.0
    rows = plgpu.SMEM((query_slots, ROWS), jnp.float32)
    copies = head_blocks + 2 * value_blocks + (1 if dlse is None else 2)
    outputs = [jax.ShapeDtypeStruct(a.shape, dtype) for a in arrays]
    if writes_dlogits:
        dlogits_shape = (batch, heads, config.keys, chunks * ROWS)
        outputs.append(jax.ShapeDtypeStruct(dlogits_shape, jnp.float32))
    gradients = plgpu.kernel(
        kernel,
        out_type=outputs,
        scratch_types=dict(
            q_smem=memory.matrix((query_slots,), ROWS, head_size, dtype),
            k_smem=memory.matrix((key_slots, tile_count), ROWS, head_size, dtype),
            v_smem=memory.matrix((key_slots, tile_count), ROWS, value_size, dtype),
            o_smem=memory.matrix((query_slots,), ROWS, value_size, dtype),
            do_smem=memory.matrix((query_slots,), ROWS, value_size, dtype),
            ds_smem=memory.square((tile_count,), dtype),
            dq_smem=memory.matrix((), ROWS, head_size, dtype),
            rows_smem=[rows] * 4,
            query_full=plgpu.Barrier(num_arrivals=copies, num_barriers=query_slots),
            query_free=plgpu.Barrier(num_arrivals=warpgroups, num_barriers=query_slots),
            key_full=plgpu.Barrier(
                num_arrivals=tile_count * (head_blocks + value_blocks),
                num_barriers=key_slots,
            ),
            key_free=plgpu.Barrier(num_arrivals=warpgroups, num_barriers=key_slots),
            key_read=plgpu.Barrier(),
            rows_full=plgpu.Barrier(num_barriers=query_slots),
            ds_full=plgpu.Barrier(num_arrivals=warpgroups),
            ds_free=plgpu.Barrier(),
        ),
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=warpgroups + 1,
        thread_name="wg",
        kernel_name="attention_short_backward",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(*inputs, *(getattr(operands, name) for name in present))
    if writes_dlogits:
        dbias = gradients[-1][:, :, :key_count, :query_count].swapaxes(2, 3)
        broadcast = tuple(axis for axis in range(4) if bias.shape[axis] == 1)
        dbias = jnp.sum(dbias, axis=broadcast, keepdims=True)
    return gradients[: len(arrays)], dbias, dsinks
