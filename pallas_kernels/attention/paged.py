"""Attention on Hopper for few queries, forward, over keys and values in pages.

As in `split_keys`, the rows of a CTA are the queries of all heads that share a key head, and a second
kernel (`merge_parts`) merges the parts. Here the blocks of keys are copied page by page, through the
sequence's row of the page table, and `page_work` divides them among CTAs by the lengths at run time, so
that a program serves sequences of any lengths. A CTA works through the parts of several tiles of rows;
copies for the next part start before the current part is done.

A contiguous cache is one page for each sequence, as long as the cache.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper
from pallas_kernels.attention import memory
from pallas_kernels.attention.logits import EMPTY_LSE, Logits, Operands
from pallas_kernels.attention.mask import Extent
from pallas_kernels.attention.memory import WGMMA_ROWS, Columns, Heads, Matrix
from pallas_kernels.attention.merge_parts import merge
from pallas_kernels.attention.packing import PackedTile, Packing
from pallas_kernels.attention.page_work import Division, Place, Plan
from pallas_kernels.attention.pages import Layout, Pages, Sizes
from pallas_kernels.attention.shape import Shape
from pallas_kernels.attention.softmax import Softmax, Weighing, across
from pallas_kernels.hopper import ALLOCATION_BYTES, BARRIER_BYTES, SHARED_MEMORY_BYTES

MOST_QUERIES = 64
"""Largest number of queries (new tokens) of a sequence: those of a query head fill one tile of rows."""


def why_unsupported(
    *,
    compute_capability: tuple[int, int] | None,
    dtype: Any,
    query_count: int,
    sizes: Sizes,
) -> str | None:
    """Returns None if the kernel can run, else the rule that rejects the call."""
    reason = hopper.why_unfit(compute_capability)
    if reason is not None:
        return reason
    if sizes.has_scales:
        reason = _why_unfit_in_8_bits(dtype, sizes)
    elif dtype not in (jnp.bfloat16, jnp.float16) or sizes.kept_dtype != dtype:
        kept = sizes.kept_dtype
        reason = f"queries and pages must both be bfloat16 or float16, got {dtype} and {kept}"
    if reason is not None:
        return reason
    for size in (sizes.head_size, sizes.value_size):
        if size % 8 or not 8 <= size <= 256:
            return f"head sizes must be multiples of 8 up to 256, got {size}"
    if not 1 <= query_count <= MOST_QUERIES:
        return f"a sequence must have from 1 to {MOST_QUERIES} queries, got {query_count}"
    if 0 in sizes[1:7]:
        return "there must be pages and heads"
    size = sizes.page_size
    if not sizes.fits(64) or (sizes.most_pages > 1 and size % 8):
        return f"pages must hold 8, 16, 32 or a multiple of 64 tokens, got {size}"
    return None


_SCALES = 32
"""Least number of float32 scales that a copy moves: 128 bytes."""
_BYTES = ("int8", "float8_e4m3fn", "float8_e5m2")


def _why_unfit_in_8_bits(dtype: Any, sizes: Sizes) -> str | None:
    """Returns None if the kernel can convert 8-bit pages, else the rule that rejects them."""
    if dtype != jnp.bfloat16 or sizes.kept_dtype.name not in _BYTES:
        return f"pages of {sizes.kept_dtype} need queries in bfloat16, got {dtype}"
    size = sizes.head_size
    if size not in (32, 64, 128, 256) or sizes.value_size != size:
        return f"heads of 8 bits must have 32, 64, 128 or 256 columns, got {size}"
    if sizes.page_size % _SCALES:
        return f"pages of 8 bits must hold multiples of {_SCALES} tokens, got {sizes.page_size}"
    return None


@dataclass(frozen=True)
class PagedConfig:
    """Division of the work: each CTA has 64 rows at a time."""

    key_block: int = 64
    stages: int = 2
    """Pipeline stages of K, and also of V: blocks of keys that shared memory holds."""
    ctas_per_multiprocessor: int = 2

    def __post_init__(self):
        if self.key_block not in (64, 128):
            raise ValueError(f"key_block must be 64 or 128, got {self.key_block}")
        if self.stages < 1:
            raise ValueError(f"stages must be at least 1, got {self.stages}")

    def ctas(self, shape: Shape, multiprocessors: int) -> int:
        """Returns the CTAs that the GPU holds at once, at most one for each block of keys of a tile."""
        units = shape.batch * shape.key_heads * Packing.of(shape).tiles
        most = units * -(-shape.key_count // self.key_block)
        return min(most, self.ctas_per_multiprocessor * max(1, multiprocessors))

    def columns(self, sizes: Sizes) -> tuple[Columns, Columns, Columns]:
        """Returns how shared memory holds columns (features) of Q, of K and of V."""
        copied = (8,) if sizes.has_scales else (sizes.page_size,)
        head = Columns.of(sizes.head_size, copied)
        query = Columns.in_blocks(sizes.head_size)
        if head.widths != query.widths and any(w % head.swizzled for w in query.widths):
            head = query  # One block of keys can only be sliced by whole swizzles.
        return query, head, Columns.of(sizes.value_size, copied, self.key_block)

    def shared_bytes(self, sizes: Sizes) -> int:
        """Returns a CTA's bytes of shared memory, with a reserve for barriers."""
        query, head, value = self.columns(sizes)
        kept = self.stages * self.key_block
        if sizes.has_scales:
            count = query.bytes(WGMMA_ROWS) + 2 * self.key_block * sizes.head_size
            count += 2 * kept * (sizes.head_size + 4)
            return count + 2 * value.cut(_OUTPUT_COLUMNS).bytes(WGMMA_ROWS) + BARRIER_BYTES
        count = query.bytes(WGMMA_ROWS) + head.bytes(kept) + value.bytes(kept)
        return count + 2 * value.cut(_OUTPUT_COLUMNS).bytes(WGMMA_ROWS) + BARRIER_BYTES

    def fits(self, sizes: Sizes) -> bool:
        # CUDA reserves one allocation unit of shared memory for each CTA of an SM.
        room = (SHARED_MEMORY_BYTES + ALLOCATION_BYTES) // self.ctas_per_multiprocessor
        return sizes.fits(self.key_block) and self.shared_bytes(sizes) <= room - ALLOCATION_BYTES


_OUTPUT_COLUMNS = memory.SWIZZLED_COLUMNS // 2
"""Most columns of a block of the float32 output in shared memory: the widest swizzle, 128 bytes."""


def candidates(sizes: Sizes) -> tuple[PagedConfig, ...]:
    """Returns the configs worth trying, all of them legal, the best guess first."""
    widest = max(sizes.head_size, sizes.value_size)
    shapes = [dict(stages=2), dict(stages=3, ctas_per_multiprocessor=1)]
    if not sizes.has_scales:
        # Blocks of 128 keys take 127 us instead of 144 for 16 sequences of 8,192 keys in pages of 64, on
        # an H200 (2026-11-28).
        shapes = [dict(key_block=128, ctas_per_multiprocessor=1), *shapes]
    if widest <= memory.SWIZZLED_COLUMNS:
        shapes = [dict(ctas_per_multiprocessor=3), dict(stages=3), dict(key_block=128), *shapes]
    elif widest > 2 * memory.SWIZZLED_COLUMNS:
        shapes = [dict(stages=n, ctas_per_multiprocessor=1) for n in (3, 2)]
    if sizes.has_scales:
        more = [dict(stages=3), dict(stages=4, ctas_per_multiprocessor=1), dict(key_block=128)]
        shapes = [*more[:1], *shapes, *more[1:]]
    configs = (PagedConfig(**options) for options in shapes)
    return tuple(config for config in configs if config.fits(sizes))


def forward(
    query: jax.Array,
    pages: Pages,
    operands: Operands,
    *,
    layout: Layout,
    logits: Logits,
    multiprocessors: int,
    config: PagedConfig | None = None,
    is_whole: bool = False,
) -> jax.Array:
    """Returns the output [B, T, N, V] of queries [B, T, N, H].

    `operands` may have sinks, lengths of queries and keys, and the offset of the queries. Rows without a
    visible key are 0. If `is_whole`, one CTA reads all keys of its rows: the order of a sequence's sums
    does not depend on the other sequences.
    """
    sizes = pages.sizes(layout)
    config = config or candidates(sizes)[0]
    shape = sizes.shape(query)
    packing = Packing.of(shape)
    units = shape.key_heads * packing.tiles
    ctas = shape.batch * units if is_whole else config.ctas(shape, multiprocessors)
    division = Division(ctas, units, config.key_block, is_whole)
    plan = division.plan(logits.mask, operands, shape.batch)
    kernel = _Paged(sizes, shape, query.dtype, logits, config, packing, division)
    lengths = operands._replace(sinks=None)
    optional, tree = jax.tree.flatten(lengths)
    given = (pages.key, pages.value, pages.key_scale, pages.value_scale)
    pools = tuple(pool for pool in given if pool is not None)

    def run(q_gmem, table, starts, first, *refs, **shared):
        *refs, out_gmem, lse_gmem = refs
        pool_refs, refs = refs[: len(pools)], refs[len(pools) :]
        ops = jax.tree.unflatten(tree, refs)
        plan = Plan(starts, first)
        kernel(_Cta(Heads(q_gmem), pool_refs, table, plan, ops, (out_gmem, lse_gmem), shared))

    parts = plgpu.kernel(
        run,
        out_type=kernel.results(),
        scratch_types=kernel.memory(),
        grid=(division.ctas,),
        grid_names=("cta",),
        num_threads=1,
        thread_name="wg",
        kernel_name="attention_paged_forward",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(packing.queries(query), pages.table, *plan, *pools, *optional)
    merged = merge(*parts, plan, operands, division, packing, shape, query.dtype)
    rows = merged.reshape(shape.batch, shape.key_heads, -1, shape.value_size)
    return packing.unpacked(rows[:, :, : packing.rows])


class _Cta(NamedTuple):
    """References to the arrays and buffers that a CTA uses."""

    queries: Heads
    pools: tuple[Any, ...]
    """Pools of keys and of values, or one pool of both, and their scales if they have any."""
    table: Any
    plan: Plan
    operands: Operands
    results: tuple[Any, Any]
    """Output and log-sum-exp over each part of the keys, in global memory."""
    shared: dict[str, Any]
    """Buffers of shared memory and barriers, by name."""

    def full(self, name: str, slot: Any) -> Any:
        """Returns the barrier on which the copies to pipeline stage `slot` of "k" or "v" arrive."""
        return self.shared[f"{name}_full"].at[slot]


class _Work(NamedTuple):
    """Range of a CTA's blocks in the list of all sequences' blocks of keys."""

    begin: jax.Array
    stop: jax.Array


class _Rows(NamedTuple):
    """Position of a tile of rows: the queries of all heads that share a key head."""

    batch_idx: jax.Array
    key_head: jax.Array
    start: jax.Array
    """Index of the first row of the tile of 64, among all rows of the key head."""


@dataclass(frozen=True)
class _Paged:
    """The forward kernel over pages: its static parameters, shared memory and code."""

    sizes: Sizes
    shape: Shape
    dtype: Any
    logits: Logits
    config: PagedConfig
    packing: Packing
    division: Division

    @property
    def pieces(self) -> int:
        return self.sizes.pieces(self.config.key_block)

    @property
    def part_rows(self) -> int:
        """Rows of a part's output that are written to global memory; the rest of 64 rows is padding."""
        return min(WGMMA_ROWS, self.packing.rows)

    def memory(self) -> dict[str, Any]:
        query, head, value = self.config.columns(self.sizes)
        block, stages, dtype = self.config.key_block, self.config.stages, self.dtype
        out = value.cut(_OUTPUT_COLUMNS)

        def full(columns: Columns) -> Any:
            copies = self.pieces * (columns.count + int(self.sizes.has_scales))
            return plgpu.Barrier(num_arrivals=copies, num_barriers=stages)

        if self.sizes.has_scales:
            kept = self._bytes()
        else:
            kept = dict(
                k_smem=head.memory((stages,), block, dtype),
                v_smem=value.memory((stages,), block, dtype),
            )
        return dict(
            **kept,
            q_smem=query.memory((), WGMMA_ROWS, dtype),
            out_smem=out.memory((), WGMMA_ROWS, jnp.float32),
            q_full=plgpu.Barrier(num_arrivals=query.count),
            k_full=full(head),
            v_full=full(value),
        )

    def _bytes(self) -> dict[str, Any]:
        """Returns buffers of 8-bit keys and values, their scales, and a block converted to 16 bits."""
        block, stages, size = self.config.key_block, self.config.stages, self.sizes.head_size
        swizzled = min(size, 2 * memory.SWIZZLED_COLUMNS)
        bytes_smem = memory.tiled((stages,), block, size, self.sizes.kept_dtype, swizzled)
        scales = plgpu.SMEM((stages, block), jnp.float32)
        columns = min(size, memory.SWIZZLED_COLUMNS)
        return dict(
            k_smem=[(bytes_smem,)],
            v_smem=[(bytes_smem,)],
            k_scale=scales,
            v_scale=scales,
            wide_smem=[(memory.tiled((), block, size, self.dtype, columns),)],
        )

    def results(self) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        parts = self.division.ctas + self.shape.batch * self.division.units
        return (
            jax.ShapeDtypeStruct((parts, self.part_rows, 1, self.shape.value_size), jnp.float32),
            jax.ShapeDtypeStruct((parts, WGMMA_ROWS), jnp.float32),
        )

    def __call__(self, cta: _Cta) -> None:
        number = lax.axis_index("cta")
        work = _Work(*self.division.work(cta.plan, number))
        first, last = cta.plan.first[number], cta.plan.first[number + 1]
        pl.when(work.begin < work.stop)(
            lambda: self.copy_queries(cta, self.division.place(cta.plan, work.begin, first))
        )
        ahead = first
        for i in range(self.config.stages):
            place = self.ahead(cta, work, work.begin + i, ahead)
            self.copy("k", cta, work, i, place)
            self.copy("v", cta, work, i, place)
            ahead = place.sequence

        def visit(_, carry):
            return self.visit(cta, work, *carry)

        units = self.units(cta, work, first, last)
        lax.fori_loop(0, units, visit, (work.begin, first, ahead))
        plgpu.wait_smem_to_gmem(0)

    def units(self, cta: _Cta, work: _Work, first: jax.Array, last: jax.Array) -> jax.Array:
        """Returns the number of tiles of rows of which a CTA computes blocks.

        `first` and `last` are the sequences of this CTA's and of the next CTA's first block.
        """
        begin = jnp.minimum(work.begin, work.stop - 1)
        start = self.division.place(cta.plan, begin, first)
        stop = self.division.place(cta.plan, work.stop - 1, jnp.maximum(last - 1, first))
        units = self.division.units
        count = (stop.sequence - start.sequence) * units + stop.unit - start.unit + 1
        return jnp.where(work.begin < work.stop, count, 0)

    def rows(self, place: Place) -> _Rows:
        tiles = jnp.int32(self.packing.tiles)
        return _Rows(
            place.sequence,
            lax.div(place.unit, tiles),
            lax.rem(place.unit, tiles) * WGMMA_ROWS,
        )

    # --- copies -----------------------------------------------------------------------------------

    def copy_queries(self, cta: _Cta, place: Place) -> None:
        batch_idx, key_head, start = self.rows(place)
        batch_idx, head_idx = self.packing.place(batch_idx, key_head)
        queries = Matrix.of(cta.shared["q_smem"])
        queries.fill(cta.queries, batch_idx, start, head_idx, cta.shared["q_full"])

    def ahead(self, cta: _Cta, work: _Work, number: jax.Array, sequence: jax.Array) -> Place:
        """Returns the `Place` of block `number`, or of the CTA's last block if that comes earlier."""
        return self.division.place(cta.plan, jnp.minimum(number, work.stop - 1), sequence)

    def copy(self, name: str, cta: _Cta, work: _Work, i: int | jax.Array, place: Place) -> None:
        """Starts the copies of the keys (`name` "k") or values ("v") of the CTA's block i, if any."""
        slot = self.slot(i)

        def copy():
            extent = cta.operands.extent(self.logits.mask, place.sequence)
            first, _ = self.division.blocks(self.logits.mask, extent)
            start = (first + place.block) * self.config.key_block
            key_head = self.rows(place).key_head
            rows = self.config.key_block // self.pieces
            for piece in range(self.pieces):
                page, row = self.page(cta, extent, place.sequence, start + piece * rows)
                part = self.matrix(name, cta, slot)
                part = part if self.pieces == 1 else part.rows(piece * rows, rows)
                self.fill(name, cta, part, page, row, key_head, cta.full(name, slot))
                if self.sizes.has_scales:
                    self.fill_scales(name, cta, slot, piece * rows, rows, page, row, key_head)

        pl.when(work.begin + i < work.stop)(copy)

    def page(
        self, cta: _Cta, extent: Extent, sequence: jax.Array, token: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        return self.sizes.page(cta.table, extent.key_length, sequence, token)

    def fill(
        self,
        name: str,
        cta: _Cta,
        matrix: Matrix,
        page: jax.Array,
        row: jax.Array,
        key_head: jax.Array,
        barrier: Any,
    ) -> None:
        """Starts the copies to `matrix` from row `row` of a page on; each arrives at `barrier`."""
        self.sizes.copy(cta.pools, name == "v", matrix, page, row, key_head, barrier)

    def fill_scales(
        self,
        name: str,
        cta: _Cta,
        slot: Any,
        start: int,
        count: int,
        page: jax.Array,
        row: jax.Array,
        key_head: jax.Array,
    ) -> None:
        """Starts the copy of the scales of `count` rows of a page, from row `row` on.

        They become scales `start` and following of stage `slot`; the copy arrives at its full barrier.
        """
        scales = cta.pools[3 if name == "v" else 2].at[key_head, page, pl.ds(row, count)]
        place = cta.shared[f"{name}_scale"].at[slot, pl.ds(start, count)]
        plgpu.copy_gmem_to_smem(scales, place, cta.full(name, slot))

    def scale(self, name: str, cta: _Cta, slot: Any, end: jax.Array | None = None) -> jax.Array:
        """Returns the scales of a block's keys or values as [64, keys]; 0 from column `end` on."""
        block = self.config.key_block
        scales = cta.shared[f"{name}_scale"].at[slot]
        layout = plgpu.Layout.WGMMA.reduce(0)
        scales = plgpu.load(scales, layout=layout, optimized=False)
        if end is not None:
            column = plgpu.broadcasted_iota(jnp.int32, (block,), 0, layout=layout)
            scales = jnp.where(column < end, scales, 0.0)
        return lax.broadcast_in_dim(scales, (WGMMA_ROWS, block), [1])

    def widen(self, name: str, cta: _Cta, slot: Any) -> Matrix:
        """Converts an 8-bit block of keys or values [keys, H] to the queries' dtype.

        The result is in `wide_smem`, which the next call overwrites: the product that reads it must have
        ended by then.
        """
        [kept] = self.matrix(name, cta, slot).operands
        [[wide]] = cta.shared["wide_smem"]
        for first in range(0, self.config.key_block, WGMMA_ROWS):
            rows = pl.ds(first, WGMMA_ROWS)
            if self.sizes.kept_dtype == jnp.int8:
                values = plgpu.load(kept.at[rows], layout=plgpu.Layout.WGMMA_UPCAST_2X)
                values = plgpu.layout_cast(values, plgpu.Layout.WGMMA)
            else:
                values = plgpu.load(kept.at[rows], layout=plgpu.Layout.WGMMA, optimized=False)
                values = values.astype(jnp.float16).astype(jnp.float32)
            wide[rows] = values.astype(self.dtype)
        plgpu.commit_smem()
        return Matrix((wide,), (wide,))

    def slot(self, i: int | jax.Array) -> int | jax.Array:
        return i if isinstance(i, int) else lax.rem(i, jnp.int32(self.config.stages))

    def matrix(self, name: str, cta: _Cta, slot: Any) -> Matrix:
        return Matrix.of(cta.shared[f"{name}_smem"], slot)

    # --- products ---------------------------------------------------------------------------------

    def visit(
        self, cta: _Cta, work: _Work, number: jax.Array, sequence: jax.Array, ahead: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Computes a part, the output for one tile of rows, that begins at block `number` of the list.

        Returns the next part's first block, this part's sequence, and the sequence of the block whose
        copy started last. `sequence` and `ahead` are the latter two before the call.
        """
        place = self.division.place(cta.plan, number, sequence)
        count = jnp.minimum(place.blocks - place.block, work.stop - number)
        plgpu.barrier_wait(cta.shared["q_full"])

        def block(n, carry):
            return self.block(cta, work, place, number, n, count, *carry)

        value = self.config.columns(self.sizes)[2]
        carry = ahead, value.zeros(), Softmax.start()
        ahead, out, softmax = lax.fori_loop(0, count, block, carry)
        self.write(cta, place, out, softmax)
        return number + count, place.sequence, ahead

    def block(
        self,
        cta: _Cta,
        work: _Work,
        place: Place,
        number: jax.Array,
        n: jax.Array,
        count: jax.Array,
        ahead: jax.Array,
        out: list[jax.Array],
        softmax: Softmax,
    ) -> tuple[jax.Array, list[jax.Array], Softmax]:
        """Adds block n of a part's `count` blocks to `out` [64, V] and to the softmax of 64 rows."""
        block, i = self.config.key_block, number - work.begin + n
        slot, later = self.slot(i), i + self.config.stages
        next_place = self.ahead(cta, work, work.begin + later, ahead)
        plgpu.barrier_wait(cta.full("k", slot))

        rows = self.rows(place)
        has_scales = self.sizes.has_scales
        key_scale = self.scale("k", cta, slot) if has_scales else None
        keys = self.widen("k", cta, slot) if has_scales else self.matrix("k", cta, slot)

        def logits_products(acc):
            self.multiply_queries(acc, cta, keys)
            return acc[...]

        acc = plgpu.ACC((WGMMA_ROWS, block), jnp.float32)
        products = pl.run_scoped(logits_products, acc)
        products = products if key_scale is None else products * key_scale
        self.copy("k", cta, work, later, next_place)

        @pl.when((n + 1 == count) & (number + count < work.stop))
        def _():
            self.copy_queries(cta, self.division.place(cta.plan, number + count, place.sequence))

        mask = self.logits.mask
        extent = cta.operands.extent(mask, place.sequence)
        blocks = mask.key_blocks((0, mask.query_count), block, extent)
        key_block = blocks.start + place.block + n
        is_partial: bool | jax.Array = False
        if not mask.is_always_full(WGMMA_ROWS, block):
            is_partial = (key_block < blocks.full_start) | (key_block >= blocks.full_stop)
        tile = PackedTile(
            rows.batch_idx,
            rows.key_head,
            rows.start,
            key_block * block,
            (WGMMA_ROWS, block),
            packing=self.packing,
        )
        weighing = Weighing(self.logits, self.dtype)
        value_scale = None
        if has_scales:
            plgpu.barrier_wait(cta.full("v", slot))
            value_scale = self.scale("v", cta, slot, extent.key_length - key_block * block)
        weights, softmax, decay = weighing(
            products, tile, cta.operands, extent, is_partial, softmax, value_scale
        )
        if not has_scales:
            plgpu.barrier_wait(cta.full("v", slot))
        values = self.widen("v", cta, slot) if has_scales else self.matrix("v", cta, slot)
        values.clear_beyond(mask, extent, key_block * block)

        def value_products(accs):
            for acc, columns in zip(accs, out, strict=True):
                acc[...] = columns * across(decay, columns.shape)
            memory.multiply(accs, weights, values)
            return memory.load_accumulators(accs)

        value = self.config.columns(self.sizes)[2]
        out = pl.run_scoped(value_products, value.accumulators())
        self.copy("v", cta, work, later, next_place)
        return next_place.sequence, out, softmax

    def multiply_queries(self, accumulator: Any, cta: _Cta, keys: Matrix) -> None:
        """Adds Q K^T to the accumulator [64 rows of queries, keys of a block]."""
        queries = Matrix.of(cta.shared["q_smem"])
        if len(queries.operands) != len(keys.operands):
            # The keys are one block of columns, copied by tiles, and are sliced like the queries'
            # blocks.
            [whole], first, blocks = keys.operands, 0, []
            for operand in queries.operands:
                blocks.append(whole.at[:, pl.ds(first, operand.shape[1])])
                first += operand.shape[1]
            keys = Matrix(tuple(blocks), keys.copied)
        memory.multiply_transposed(accumulator, queries, keys)

    # --- results ----------------------------------------------------------------------------------

    def write(self, cta: _Cta, place: Place, out: list[jax.Array], softmax: Softmax) -> None:
        """Stores output [64, V] over this CTA's part of the keys, and log-sum-exp [64] in base 2."""
        total = jnp.sum(softmax.total, axis=1)
        empty = total == 0.0
        lse = jnp.where(empty, EMPTY_LSE, softmax.maximum + jnp.log2(total))
        inverse = jnp.where(empty, 0.0, 1.0 / jnp.where(empty, 1.0, total))
        out_gmem, lse_gmem = cta.results
        units = place.sequence * self.division.units + place.unit
        part = lax.axis_index("cta") + units
        lse_gmem[part] = lse
        staged = Matrix.of(cta.shared["out_smem"])
        # The copy of the previous part's output may still read this memory.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        staged.store(self.narrow([block * across(inverse, block.shape) for block in out]))
        staged.write(Heads(out_gmem), part, part * 0, part * 0)

    def narrow(self, blocks: list[jax.Array]) -> list[jax.Array]:
        """Cuts float32 blocks [64, columns] into those of `out_smem`, of at most 32 columns."""
        most = _OUTPUT_COLUMNS
        return [b[:, i : i + most] for b in blocks for i in range(0, b.shape[1], most)]
