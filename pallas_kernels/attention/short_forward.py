"""Attention on Hopper, forward for S <= 256: whole rows of the softmax at once.

A head's keys and values stay in shared memory, a warpgroup takes its queries 64 at a time, and a
row of logits lies in registers as a whole: one maximum, one sum, nothing rescaled. The warpgroups of
a CTA work on heads of their own and never wait for each other; while one waits for memory, another
multiplies and the third takes exponentials.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention import short_memory as memory
from pallas_kernels.attention.logits import (
    EMPTY_LSE,
    LOG2E,
    Logits,
    Operands,
    Tile,
    saved_length,
)
from pallas_kernels.attention.short_memory import COLUMNS, Heads, Matrix, Shape, ceil_to
from pallas_kernels.hopper import BARRIER_BYTES, SHARED_MEMORY_BYTES

ROWS = 64
"""Queries of a tile: what one wgmma instruction takes."""

_QUERY_SLOTS = 3
"""Tiles of a worker: one on its way in, one in use, one whose results are on their way out."""


@dataclass(frozen=True)
class ForwardConfig:
    """How heads are spread over the chip."""

    workers: int
    """Warpgroups of a CTA."""
    tiles: int
    """Tiles of queries for which a worker loads keys and values."""
    ctas_per_multiprocessor: int


def workers_that_fit(key_count: int, head_size: int, value_size: int) -> int:
    """How many warpgroups of a multiprocessor can have a head each in shared memory."""
    head, value = (ceil_to(size, COLUMNS) for size in (head_size, value_size))
    numbers = (
        ceil_to(key_count, 8) * head + ceil_to(key_count, 64) * value + _QUERY_SLOTS * ROWS * head
    )
    numbers += 0 if head == value else ROWS * value
    return (SHARED_MEMORY_BYTES - BARRIER_BYTES) // (2 * numbers + 4 * ROWS)


def default_config(
    query_count: int,
    key_count: int,
    head_size: int,
    value_size: int,
    heads: int,
    multiprocessors: int,
) -> ForwardConfig:
    """The choice for `heads` heads of the whole batch."""
    # [64, 197, 12, 64]: 32 us with two CTAs of one worker, which may have 255 registers a thread; 37
    # with one CTA of two. 32.0 us with 2 tiles, 33.6 with 4.
    ctas = min(2, workers_that_fit(key_count, head_size, value_size))
    tiles = min(2, ceil_to(query_count, ROWS) // ROWS)
    if heads * (ceil_to(query_count, ROWS) // ROWS) < ctas * multiprocessors * tiles:
        tiles = 1
    return ForwardConfig(1, tiles, ctas)


def forward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    operands: Operands,
    *,
    logits: Logits,
    multiprocessors: int,
    config: ForwardConfig | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(out [B, T, N, V], lse [B, N, R] float32), see pallas_kernels.attention.attention."""
    shape = Shape.of(query, key, value)
    return _forward((query, key, value), shape, operands, logits, multiprocessors, config)


def forward_packed(
    packed: jax.Array,
    operands: Operands,
    *,
    key_heads: int,
    logits: Logits,
    multiprocessors: int,
    config: ForwardConfig | None = None,
) -> tuple[jax.Array, jax.Array]:
    """As `forward`, of [B, T, N + 2 K, H]: the heads of queries, keys and values of one projection.

    Slices of such an array would be copied before a kernel.
    """
    shape = Shape.of_packed(packed, key_heads)
    return _forward((packed,), shape, operands, logits, multiprocessors, config)


def _forward(
    arrays: tuple[jax.Array, ...],
    shape: Shape,
    operands: Operands,
    logits: Logits,
    multiprocessors: int,
    config: ForwardConfig | None,
) -> tuple[jax.Array, jax.Array]:
    batch, query_count, key_count, heads, key_heads, head_size, value_size = shape
    dtype = arrays[0].dtype
    config = config or default_config(
        query_count, key_count, head_size, value_size, batch * heads, multiprocessors
    )
    workers, tiles = config.workers, config.tiles
    key_rows, value_rows = ceil_to(key_count, 8), ceil_to(key_count, 64)
    # A worker's last tiles may lie beyond the queries. Copies fill and write nothing there, but loads
    # of bias and explicit mask into registers need something to read.
    query_rows = ceil_to(query_count, tiles * ROWS)
    parts = query_rows // (tiles * ROWS)
    items = batch * heads * parts
    ctas = min(config.ctas_per_multiprocessor * multiprocessors, -(-items // workers))
    operands = operands.padded(tiles * ROWS, key_rows)
    present = [name for name, array in operands._asdict().items() if array is not None]
    masks_anywhere = not logits.mask.is_always_full(ROWS, 1)

    def kernel(*refs, q_smem, k_smem, v_smem, out_smem, lse_smem, **full):
        *refs, out_gmem, lse_gmem = refs
        ops = Operands(**dict(zip(present, refs[len(arrays) :], strict=True)))
        q_heads, k_heads, v_heads = memory.queries_keys_values(
            refs[: len(arrays)], heads, key_heads
        )
        wg_idx = lax.axis_index("wg")
        worker_idx = wg_idx * ctas + lax.axis_index("cta")
        k_wg_smem, v_wg_smem = Matrix.of(k_smem, wg_idx), Matrix.of(v_smem, wg_idx)
        lse_wg_smem = lse_smem.at[wg_idx]
        q_full = full["q_full"].at[wg_idx]
        k_full, v_full = full["k_full"].at[wg_idx], full["v_full"].at[wg_idx]
        own_items = lax.div(items - worker_idx + (workers * ctas - 1), jnp.int32(workers * ctas))
        steps = own_items * tiles

        def place(step):
            """(batch, head, first query) of the tile of a step."""
            item = worker_idx + lax.div(step, jnp.int32(tiles)) * (workers * ctas)
            batch_head = lax.div(item, jnp.int32(parts))
            tile = lax.rem(item, jnp.int32(parts)) * tiles + lax.rem(step, jnp.int32(tiles))
            batch_idx = lax.div(batch_head, jnp.int32(heads))
            return batch_idx, lax.rem(batch_head, jnp.int32(heads)), tile * ROWS

        def copy_keys(gmem_heads, smem, barrier, step):
            batch_idx, head_idx, _ = place(step)
            key_head = lax.div(head_idx, jnp.int32(heads // key_heads))
            smem.fill(gmem_heads, batch_idx, 0, key_head, barrier)

        def queries(step):
            return Matrix.of(q_smem, wg_idx, lax.rem(step, jnp.int32(_QUERY_SLOTS)))

        def copy_queries(step):
            batch_idx, head_idx, start = place(step)
            queries(step).fill(q_heads, batch_idx, start, head_idx, q_full)

        @pl.when(steps > 0)
        def _():
            copy_queries(0)
            copy_keys(k_heads, k_wg_smem, k_full, 0)
            copy_keys(v_heads, v_wg_smem, v_full, 0)

        @pl.loop(0, steps)
        def _(step):
            batch_idx, head_idx, start = place(step)
            is_first = lax.rem(step, jnp.int32(tiles)) == 0
            has_next = step + 1 < steps
            changes_head = has_next & (lax.rem(step + 1, jnp.int32(tiles)) == 0)
            query_length = (
                query_count if ops.query_lengths is None else ops.query_lengths[batch_idx]
            )
            key_length = key_count if ops.key_lengths is None else ops.key_lengths[batch_idx]
            q_wg_smem = queries(step)
            out_wg_smem = Matrix.of(out_smem, wg_idx) if out_smem else q_wg_smem

            plgpu.barrier_wait(q_full)
            # What was written two steps ago from this memory has left it, see below.
            pl.when(has_next)(lambda: copy_queries(step + 1))
            pl.when(is_first)(lambda: plgpu.barrier_wait(k_full))

            def products(acc):
                memory.multiply_transposed(acc, q_wg_smem, k_wg_smem)
                return acc[...]

            x = pl.run_scoped(products, plgpu.ACC((ROWS, key_rows), jnp.float32))
            pl.when(changes_head)(lambda: copy_keys(k_heads, k_wg_smem, k_full, step + 1))

            # 64 columns at a time, so that few float32 weights are live at once, only those with
            # masked elements are masked, and an element's place costs no division.
            parts_of_row = []
            for first in range(0, key_rows, COLUMNS):
                part = x[:, first : min(first + COLUMNS, key_rows)]
                tile = Tile(batch_idx, head_idx, start, first, part.shape)
                is_masked = masks_anywhere or first + part.shape[1] > key_count
                parts_of_row.append((tile, logits.logits(part, tile, ops, key_length, is_masked)))
            maximum = None
            for _, part in parts_of_row:
                part_maximum = jnp.max(part, axis=1)
                maximum = part_maximum if maximum is None else jnp.maximum(maximum, part_maximum)
            maximum = maximum * logits.multiplier
            if logits.has_sinks:
                sink = ops.sinks[head_idx] * LOG2E
                maximum = jnp.maximum(maximum, sink)
            # Any finite number serves a row of -inf: it only has to keep -inf - maximum from NaN.
            maximum = jnp.where(maximum == -jnp.inf, 0.0, maximum)
            total, weights = 0.0, []
            for tile, part in parts_of_row:
                part = jnp.exp2(part * logits.multiplier - _rows(maximum, part.shape))
                total = total + jnp.sum(part, axis=1)
                if logits.dropout_rate > 0:
                    part = logits.dropped(part, tile, ops)
                part = part.astype(dtype)
                if part.shape[1] < COLUMNS:
                    nothing = jnp.zeros((ROWS, COLUMNS - part.shape[1]), dtype)
                    nothing = plgpu.layout_cast(nothing, plgpu.Layout.WGMMA)
                    part = jnp.concatenate([part, nothing], axis=1)
                weights.append(part)
            if logits.has_sinks:
                total = total + jnp.exp2(sink - maximum)

            pl.when(is_first)(lambda: plgpu.barrier_wait(v_full))

            def outputs(*accs):
                for i, part in enumerate(weights):
                    memory.multiply(accs, part, v_wg_smem.rows(i * COLUMNS, COLUMNS))
                return [acc[...] for acc in accs]

            out = pl.run_scoped(outputs, *memory.accumulators(value_size))
            pl.when(changes_head)(lambda: copy_keys(v_heads, v_wg_smem, v_full, step + 1))

            empty = total == 0.0
            if ops.query_lengths is not None:
                row = start + plgpu.broadcasted_iota(
                    jnp.int32, (ROWS,), 0, layout=plgpu.Layout.WGMMA.reduce(1)
                )
                empty = empty | (row >= query_length)
            # The copies of the last step's results, which have had all of this step's time.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            lse_wg_smem[...] = jnp.where(
                empty, EMPTY_LSE, (maximum + jnp.log2(total)) * (1 / LOG2E)
            )
            total = jnp.where(empty, 1.0, total)
            inverse = jnp.where(empty, 0.0, (1.0 / logits.keep_probability) / total)
            for block, smem in zip(out, out_wg_smem.operands, strict=True):
                smem[...] = (block * _rows(inverse, block.shape)).astype(dtype)
            plgpu.commit_smem()
            out_wg_smem.write(Heads(out_gmem), batch_idx, start, head_idx)
            plgpu.copy_smem_to_gmem(
                lse_wg_smem, lse_gmem.at[batch_idx, head_idx, pl.ds(start, ROWS)]
            )

        plgpu.wait_smem_to_gmem(0)

    head_blocks = memory.blocks(head_size)
    value_blocks = memory.blocks(value_size)
    out_takes_place_of_queries = head_blocks == value_blocks
    return plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct((batch, query_count, heads, value_size), dtype),
            jax.ShapeDtypeStruct((batch, heads, saved_length(query_count)), jnp.float32),
        ),
        scratch_types=dict(
            q_smem=memory.matrix((workers, _QUERY_SLOTS), ROWS, head_size, dtype),
            k_smem=memory.matrix((workers,), key_rows, head_size, dtype),
            v_smem=memory.matrix((workers,), value_rows, value_size, dtype),
            out_smem=[]
            if out_takes_place_of_queries
            else memory.matrix((workers,), ROWS, value_size, dtype),
            lse_smem=plgpu.SMEM((workers, ROWS), jnp.float32),
            q_full=plgpu.Barrier(num_arrivals=head_blocks, num_barriers=workers),
            k_full=plgpu.Barrier(num_arrivals=head_blocks, num_barriers=workers),
            v_full=plgpu.Barrier(num_arrivals=value_blocks, num_barriers=workers),
        ),
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=workers,
        thread_name="wg",
        kernel_name="attention_short_forward",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(*arrays, *(getattr(operands, name) for name in present))


def _rows(vector: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return lax.broadcast_in_dim(vector, shape, [0])
