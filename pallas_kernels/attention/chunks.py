"""Attention on Hopper of chunks of prompts, forward, over keys and values in pages.

The queries are rows of a ragged batch [R, N, H], in which each sequence has consecutive rows. A tile is
consecutive rows of the batch and the query heads that share a key head, so it may have rows of several
sequences. Its CTA attends to the keys of one sequence after the other, each with all rows of the tile,
and stores the sequence's own rows only. The pipeline is that of `forward`.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper
from pallas_kernels.attention import memory
from pallas_kernels.attention.block_lists import Tables
from pallas_kernels.attention.forward import ForwardConfig, ForwardKernel, ForwardRows
from pallas_kernels.attention.logits import Logits, Operands, Tile
from pallas_kernels.attention.mask import BlockMask, Extent
from pallas_kernels.attention.memory import SWIZZLED_COLUMNS, WGMMA_ROWS, Columns, Matrix
from pallas_kernels.attention.pages import Layout, Pages, Sizes
from pallas_kernels.attention.persistent import Cta, PersistentKernel, Ring, Role
from pallas_kernels.attention.softmax import VECTOR, across
from pallas_kernels.attention.tiles import Place, QueryTiles
from pallas_kernels.longest_first import longest_first


class Sequences(NamedTuple):
    """The sequences of a ragged batch, int32 [B] each; those with `begin` >= `end` have no work."""

    begin: Any
    """First row of each sequence; sequences are in the order of their rows."""
    end: Any
    """One past the last row of each sequence."""
    offset: Any
    """Position of row 0 among the keys: row r of the batch is at the position of key r + offset."""
    keys: Any
    """Number of keys of each sequence."""


class Plan(NamedTuple):
    """Arrays that say which sequences a tile has; in a kernel, references in global memory."""

    order: Any
    """Tiles of a key head, the one with the most keys first, int32 [tiles]."""
    first: Any
    """First sequence of each tile, int32 [tiles]."""
    count: Any
    """Number of sequences of each tile, int32 [tiles]."""
    following: Any
    """The next sequence with rows after each sequence, int32 [B]."""

    @classmethod
    def of(cls, sequences: Sequences, tiles: int, rows: int, window: int | None) -> "Plan":
        """Computes the plan in XLA, for tiles of so many rows of the batch."""
        begin, end, offset, keys = (x[None] for x in sequences)
        sequence = jnp.arange(begin.size, dtype=jnp.int32)[None]
        start = rows * jnp.arange(tiles, dtype=jnp.int32)[:, None]
        first, stop = jnp.maximum(start, begin), jnp.minimum(start + rows, end)
        is_in = first < stop
        last = jnp.minimum(stop + offset, keys)
        seen = last if window is None else last - jnp.maximum(first + offset + 1 - window, 0)
        # Starting and ending a sequence's loop takes about as long as one block of 128 keys.
        cost = jnp.sum(jnp.where(is_in, jnp.maximum(seen, 0) + 128, 0), axis=1)
        is_next = (begin < end) & (sequence > sequence.T)
        least = [jnp.where(x, sequence, begin.size - 1) for x in (is_in, is_next)]
        firsts, following = (jnp.min(x, axis=1) for x in least)
        return cls(longest_first(cost), firsts, jnp.sum(is_in, axis=1, dtype=jnp.int32), following)


def why_unsupported(
    *, compute_capability: tuple[int, int] | None, dtype: Any, group: int, sizes: Sizes
) -> str | None:
    """Returns None if the kernel can run, else the rule that rejects the call.

    `group` is the number of query heads that share a key head.
    """
    reason = hopper.why_unfit(compute_capability)
    if reason is not None:
        return reason
    if dtype not in (jnp.bfloat16, jnp.float16) or sizes.kept_dtype != dtype:
        kept = sizes.kept_dtype
        return f"queries and pages must both be bfloat16 or float16, got {dtype} and {kept}"
    if sizes.head_size not in _HEADS or sizes.value_size not in _HEADS:
        return f"heads must have 64 or 128 columns, got {sizes.head_size} and {sizes.value_size}"
    if group not in _GROUPS:
        return f"a key head must have 1, 2, 4, 8, 16, 32 or 64 query heads, got {group}"
    size = sizes.page_size
    if not sizes.fits(WGMMA_ROWS) or (sizes.most_pages > 1 and size % 8):
        return f"pages must hold 8, 16, 32 or a multiple of 64 tokens, got {size}"
    return None


ROWS = 2 * WGMMA_ROWS
"""Rows of a tile: queries times the query heads that share a key head."""
_HEADS = (64, 128)
_GROUPS = (1, 2, 4, 8, 16, 32, 64)


def candidates(sizes: Sizes) -> tuple[ForwardConfig, ...]:
    """Returns the configs worth trying, all of them legal, the best guess first."""
    configs = (ForwardConfig(), ForwardConfig(key_block=64, stages=4))
    return tuple(config for config in configs if sizes.fits(config.key_block))


def forward(
    query: jax.Array,
    pages: Pages,
    sequences: Sequences,
    *,
    layout: Layout,
    scale: float,
    soft_cap: float | None,
    window: int | None,
    sinks: jax.Array | None,
    multiprocessors: int,
    config: ForwardConfig | None = None,
) -> jax.Array:
    """Returns the output [R, N, V] of queries [R, N, H]; rows of no sequence are 0.

    Each row attends to the keys of its sequence up to itself, at most `window` of them. `sinks` are
    float32 [N] or None.
    """
    sizes = pages.sizes(layout)
    config = config or candidates(sizes)[0]
    rows, heads, _ = query.shape
    shape = sizes.shape(query[None])._replace(batch=1)
    mask = BlockMask(
        rows,
        shape.key_count,
        is_causal=True,
        window=None if window is None else (window - 1, 0),
        has_query_offset=True,
        has_query_lengths=True,
        has_key_lengths=True,
    )
    logits = Logits(scale, mask, soft_cap, has_sinks=sinks is not None)
    of_consumer = WGMMA_ROWS // shape.group
    tiles = _Tiles(mask, shape.key_heads, config.consumers * of_consumer, config.key_block)
    head = Columns(
        (SWIZZLED_COLUMNS,) * (sizes.head_size // SWIZZLED_COLUMNS), SWIZZLED_COLUMNS, True
    )
    value = Columns.of(sizes.value_size, (8,), config.key_block)
    kernel = _Chunks(shape, query.dtype, logits, config, tiles, head, value, sizes)
    plan = Plan.of(sequences, tiles.count, tiles.rows, window)
    by_row = None
    if sinks is not None:
        by_row = jnp.tile(sinks.reshape(shape.key_heads, shape.group), (1, of_consumer))
    launch = PersistentKernel(
        name="attention_chunks_forward",
        tiles=tiles,
        schedule=_schedule(tiles.count * shape.key_heads, multiprocessors),
        roles=(
            Role(range(config.consumers, config.consumers + 1), kernel.produce),
            Role(range(config.consumers), kernel.consume),
        ),
        memory=kernel.memory(),
        results=(jax.ShapeDtypeStruct((rows, heads, sizes.value_size), query.dtype),),
    )
    pools = (pages.key,) if sizes.is_combined else (pages.key, pages.value)
    arrays = (query, pages.table, *sequences, *plan, *pools)
    return launch(arrays, Operands(sinks=by_row), Tables())[0]


def _schedule(tiles: int, multiprocessors: int) -> np.ndarray:
    """Returns each CTA's count of tiles, then their numbers in `Plan.order`, over all key heads.

    Every second round of tiles is in reverse: the CTA with the longest tile gets the shortest next.
    """
    ctas = min(tiles, max(1, multiprocessors))
    rounds = -(-tiles // ctas)
    cta, number = np.arange(ctas)[:, None], np.arange(rounds)[None]
    place = number * ctas + np.where(number % 2, ctas - 1 - cta, cta)
    counts = np.sum(place < tiles, axis=1, keepdims=True)
    return np.concatenate([counts, np.minimum(place, tiles - 1)], axis=1).astype(np.int32)


class _Tiles(QueryTiles):
    """Tiles of rows of the batch; the kernel itself looks up their sequences."""

    def place(self, number: Any, operands: Any, tables: Any) -> Any:
        del operands, tables
        return number


@dataclass(frozen=True)
class _RowsTile(Tile):
    """A tile of logits of which `group` rows, one for each query head, are of the same query."""

    group: int = 1

    def numbers(self, axis: int, from_start: bool = False) -> jax.Array:
        if axis == 1:
            return super().numbers(axis, from_start)
        return self.query_start + _query(self.group)


def _query(group: int) -> jax.Array:
    """Returns the query of each of a consumer's 64 rows, from 0, int32 [64]."""
    row = plgpu.broadcasted_iota(jnp.int32, (WGMMA_ROWS,), 0, layout=VECTOR)
    return row if group == 1 else lax.div(row, jnp.int32(group))


class _Work(NamedTuple):
    """A tile of a CTA."""

    head: jax.Array
    """Key head."""
    start: jax.Array
    """First row of the batch."""
    first: jax.Array
    """First sequence."""
    count: jax.Array
    """Number of sequences."""


@dataclass(frozen=True)
class _Chunks(ForwardKernel):
    """The forward kernel with tiles of rows of several sequences, and keys and values in pages."""

    sizes: Sizes

    @property
    def queries(self) -> int:
        return WGMMA_ROWS // self.shape.group

    @property
    def registers(self) -> tuple[int, int]:
        # The producer computes the places of many copies; two consumers leave it 40 registers.
        return (232, 40) if self.config.consumers == 2 else super().registers

    @property
    def output(self) -> Columns:
        return Columns.in_blocks(self.sizes.value_size)

    @property
    def pieces(self) -> int:
        return self.sizes.pieces(self.config.key_block)

    def memory(self) -> dict[str, Any]:
        head, value = self.head, self.value
        consumers, stages = self.config.consumers, self.config.stages
        q_smem = self.packed(Columns.in_blocks(self.sizes.head_size))
        return super().memory() | dict(
            q_smem=q_smem,
            out_smem=self.packed(self.output),
            q_full=plgpu.Barrier(num_arrivals=len(q_smem), num_barriers=consumers),
            k_full=plgpu.Barrier(num_arrivals=self.pieces * head.count, num_barriers=stages),
            v_full=plgpu.Barrier(num_arrivals=self.pieces * value.count, num_barriers=stages),
        )

    def packed(self, columns: Columns) -> list[Any]:
        """Returns buffers of each consumer's 64 rows, which TMA copies as [queries, group, columns]."""
        leading, memories = (self.config.consumers,), []
        for width in columns.widths:
            operand = memory.tiled(leading, WGMMA_ROWS, width, self.dtype, width)
            swizzle = plgpu.SwizzleTransform(width * jnp.dtype(self.dtype).itemsize)
            shape = (*leading, self.queries, self.shape.group, width)
            copied = plgpu.SMEM(shape, self.dtype, transforms=(swizzle,))
            memories.append(plgpu.RefUnion(operand, copied))
        return memories

    # --- tiles and their sequences ----------------------------------------------------------------

    def work(self, cta: Cta, tile_idx: jax.Array) -> _Work:
        number, plan = cta.place(tile_idx), Plan(*cta.arrays[6:10])
        heads = jnp.int32(self.shape.key_heads)
        tile = plan.order[lax.div(number, heads)]
        start = tile * self.tiles.rows
        return _Work(lax.rem(number, heads), start, plan.first[tile], plan.count[tile])

    def at(self, cta: Cta, work: _Work, sequence: jax.Array) -> Place:
        """Returns the tile as one of a single sequence, with the blocks of that sequence's keys."""
        sequences = Sequences(*cta.arrays[2:6])
        begin = sequences.begin[sequence]
        extent = Extent(
            sequences.end[sequence], sequences.keys[sequence], sequences.offset[sequence]
        )
        mask, block = self.logits.mask, self.config.key_block

        def key_blocks(start, stop):
            return mask.key_blocks((jnp.maximum(start, begin), stop), block, extent)

        blocks = key_blocks(work.start, work.start + self.tiles.rows)
        # A sequence without keys visits one block, which is masked as a whole.
        last = jnp.int32(-(-mask.key_count // block))
        first = lax.min(blocks.start, last - 1)
        stop = lax.clamp(first + 1, blocks.stop, last)
        return Place(sequence, work.head, work.start, extent, key_blocks, first, stop)

    def following(self, cta: Cta, sequence: jax.Array) -> jax.Array:
        return Plan(*cta.arrays[6:10]).following[sequence]

    def tile(self, cta: Cta, rows: ForwardRows, i: int | jax.Array) -> Tile:
        start = rows.visits.block(i) * self.config.key_block
        shape = (WGMMA_ROWS, self.config.key_block)
        place = (rows.at.batch_idx, rows.at.head_idx, rows.start, start)
        return _RowsTile(*place, shape, group=self.shape.group)

    def sink(self, cta: Cta, at: Place) -> jax.Array:
        sinks = cta.operands.sinks.at[at.head_idx]
        return plgpu.load(sinks, layout=VECTOR, optimized=False)

    # --- the producer -----------------------------------------------------------------------------

    def copy_tile(self, cta: Cta, tile_idx: jax.Array, step: jax.Array) -> jax.Array:
        work = self.work(cta, tile_idx)

        def copy(_, carry):
            step, sequence = carry
            step = self.copy_sequence(cta, self.at(cta, work, sequence), step)
            return step, self.following(cta, sequence)

        return lax.fori_loop(0, work.count, copy, (step, work.first))[0]

    def copy_sequence(self, cta: Cta, at: Place, step: jax.Array) -> jax.Array:
        """Copies a tile's queries, and the keys and values that they visit of one sequence."""
        queries, keys, values = self.rings(cta)
        self.copy_queries(cta, queries, 0, at)
        self.copy_block(cta, keys, at, step, 0, is_value=False)
        for consumer in range(1, self.config.consumers):
            self.copy_queries(cta, queries, consumer, at)
        self.copy_block(cta, values, at, step, 0, is_value=True)

        def copy_pair(i, _):
            self.copy_block(cta, keys, at, step, i, is_value=False)
            self.copy_block(cta, values, at, step, i, is_value=True)

        count = at.stop - at.first
        lax.fori_loop(1, count, copy_pair, None)
        return step + count

    def copy_queries(self, cta: Cta, ring: Ring, consumer: int, at: Place) -> None:
        plgpu.barrier_wait(ring.free.at[consumer])
        start = at.start + consumer * self.queries
        for copied, place in self.places(ring.matrix(consumer), cta.arrays[0], start, at.head_idx):
            plgpu.copy_gmem_to_smem(place, copied, ring.full.at[consumer])

    def places(self, matrix: Matrix, gmem: Any, start: jax.Array, key_head: jax.Array) -> Any:
        """Yields each block of columns of a consumer's rows, and its place in an array [R, N, H]."""
        group, first = self.shape.group, 0
        for copied in matrix.copied:
            # JAX refuses static indices beyond the end of an array, but not traced ones.
            columns = pl.ds(start * 0 + first, copied.shape[-1])
            heads = pl.ds(key_head * group, group)
            yield copied, gmem.at[pl.ds(start, self.queries), heads, columns]
            first += copied.shape[-1]

    def copy_block(
        self, cta: Cta, ring: Ring, at: Place, step: Any, i: Any, *, is_value: bool
    ) -> None:
        """Copies a sequence's i-th block of keys or values, page by page."""
        slot = ring.slot(step + i)
        plgpu.barrier_wait(ring.free.at[slot])
        start, matrix = at.block(i) * self.config.key_block, ring.matrix(slot)
        rows = self.config.key_block // self.pieces
        for piece in range(self.pieces):
            token, length = start + piece * rows, at.extent.key_length
            page, row = self.sizes.page(cta.arrays[1], length, at.batch_idx, token)
            part = matrix if self.pieces == 1 else matrix.rows(piece * rows, rows)
            full = ring.full.at[slot]
            self.sizes.copy(cta.arrays[10:], is_value, part, page, row, at.head_idx, full)

    # --- the consumers ----------------------------------------------------------------------------

    def attend(self, cta: Cta, tile_idx: jax.Array, step: jax.Array) -> jax.Array:
        """Computes a consumer's rows of a tile for one sequence after the other."""
        work = self.work(cta, tile_idx)
        # The copies of the previous tile may still be reading this shared memory.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        staged = Matrix.of(cta.memory["out_smem"], cta.wg_idx)
        pl.when(work.count == 0)(lambda: staged.store(self.output.zeros()))

        def of_sequence(i, carry):
            step, sequence = carry
            at = self.at(cta, work, sequence)
            rows, out, softmax, step = self.visit_all(cta, at, step)
            out, _ = self.normalized(cta, rows, out, softmax)
            self.store(cta, staged, rows, i, out)
            return step, self.following(cta, sequence)

        step, _ = lax.fori_loop(0, work.count, of_sequence, (step, work.first))
        start = work.start + cta.wg_idx * self.queries
        for copied, place in self.places(staged, cta.results[0], start, work.head):
            plgpu.copy_smem_to_gmem(copied, place)
        return step

    def store(
        self, cta: Cta, staged: Matrix, rows: ForwardRows, i: jax.Array, out: list[jax.Array]
    ) -> None:
        """Stores the rows of the tile's i-th sequence; those before it keep what they have."""
        query = rows.start + _query(self.shape.group)
        begin = Sequences(*cta.arrays[2:6]).begin[rows.at.batch_idx]
        is_own = (query >= begin) & (query < rows.at.extent.query_length)
        is_stored = query < jnp.where(i > 0, begin, 0)
        blocks = [
            block[:, first : first + SWIZZLED_COLUMNS]
            for block in out
            for first in range(0, block.shape[1], SWIZZLED_COLUMNS)
        ]
        for operand, block in zip(staged.operands, blocks, strict=True):
            stored = plgpu.load(operand, layout=plgpu.Layout.WGMMA, optimized=False)
            block = jnp.where(across(is_own, block.shape), block, 0.0)
            stored = jnp.where(across(is_stored, block.shape), stored.astype(jnp.float32), block)
            operand[...] = stored.astype(self.dtype)
        plgpu.commit_smem()
