"""A small-M product for Hopper, which reads its weights as fast as memory delivers them.

If x has at most 64 rows, nearly all of the memory traffic is weights. A CTA takes a block of the
weights' columns and a part of K (split-K); all CTAs are resident at once, and each keeps several copies
in flight, so that the memory is busy from the first microsecond on. The operands are swapped: 64 columns
of w are the rows of a WGMMA, and the few rows of x, filled up to a multiple of 8, its columns. The CTAs
of a block of columns are a cluster: each stores its sums in shared memory, and then adds the sums of all
CTAs for a part of the rows, in a fixed order. Results repeat bit for bit, and need no second kernel.
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import warps
from pallas_kernels.gemm.operands import (
    OperandTile,
    allocated_bytes,
    matrix_of,
    swizzled_columns,
    tiled,
)
from pallas_kernels.gemm.quantized_weights import Format, QuantizedTile
from pallas_kernels.gemm.tiled_product import Block
from pallas_kernels.gemm.weights import Weights, weights
from pallas_kernels.hopper import SHARED_MEMORY_BYTES

MAX_ROWS = 64
"""Largest number of rows of x. With more, the large-tile kernel reads its operands less often."""
MAX_ROWS_QUANTIZED = 2 * MAX_ROWS
"""Largest number of rows of x with quantised weights; large tiles dequantise the weights again for each
64 or 128 rows."""
MAX_PARTS = 8
"""CTAs of the largest cluster that every Hopper GPU can place."""
_CHUNK = 8
"""Rows of the result that the epilogue processes at a time: the 8 rows of a swizzled tile."""


@dataclass(frozen=True)
class FewRowsConfig:
    """Tiles, pipeline and split-K of a small-M product."""

    tile_n: int = 64
    """Columns that a CTA computes of each product."""
    parts: int = 4
    """CTAs that share a block of columns, each of which takes a part of K (split-K)."""
    stages: int = 4
    """Pipeline stages: K steps that are in flight or in use."""

    def __post_init__(self) -> None:
        if self.tile_n not in (64, 128, 256):
            raise ValueError(
                f"FewRowsConfig: tile_n must be 64, 128 or 256, got {self.tile_n}; pass one of these"
            )
        if self.parts not in (1, 2, 4, 8):
            raise ValueError(
                f"FewRowsConfig: parts must be 1, 2, 4 or {MAX_PARTS}, got {self.parts};"
                " pass one of these"
            )
        if self.stages < 2:
            raise ValueError(
                f"FewRowsConfig: stages must be at least 2, got {self.stages}; pass more"
            )


@dataclass(frozen=True)
class QuantizedConfig(FewRowsConfig):
    """Tiles, pipeline and split-K with quantised weights, whose K steps may be longer."""

    step_k: int = 128
    """Elements along K in a step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.step_k not in (128, 256):
            raise ValueError(
                f"QuantizedConfig: step_k must be 128 or 256, got {self.step_k}; pass one of these"
            )


@dataclass(frozen=True)
class FewRows:
    """Static parameters of a small-M launch."""

    m: int
    n: int
    """Columns of each product."""
    ks: tuple[int, ...]
    """Length of K of each term."""
    dtype: Any
    blocks: tuple[Block, ...]
    """Position of each w in the operand arrays: of all products of the first term, then of the next."""
    config: FewRowsConfig
    products: int
    w_dtype: Any
    w_transposed: bool
    """True if w is [N, K]."""
    function: Callable[..., Mapping[str, Any]]
    """The epilogue, a function of tiles [8, tile_n] of products and operands. It returns a dict of the
    outputs' tiles or, if `piece` is not 0, of each tile's pieces."""
    vectors: Mapping[str, jax.ShapeDtypeStruct]
    """Vectors [N], of which a CTA reads its own columns; or [W] with W != N, of which every CTA reads
    the same first columns; or [segments, N or W], of which it reads the row of its columns' segment."""
    matrices: Mapping[str, jax.ShapeDtypeStruct]
    """Matrices [M, N]; or [P, W], the same for all blocks of columns, whose row m % P is for row m."""
    outputs: Mapping[str, Any]
    """Dtypes of the outputs."""
    segments: tuple[int, ...] = ()
    """Columns of each array, a multiple of a CTA's columns, if an output is split into several
    arrays."""
    segments_of: Mapping[str, int] = MappingProxyType({})
    """Number of arrays, keyed by output, of outputs that have only the first of `segments`."""
    piece: int = 0
    """Columns of a piece, if `function` returns tiles in pieces; else 0."""
    quantized: Format | None = None
    """Format of the weights, if they are quantised."""

    @property
    def pieces(self) -> int:
        return self.config.tile_n // (self.piece or self.config.tile_n)

    @property
    def result_widths(self) -> dict[str, tuple[int, ...]]:
        """Columns of each array into which an output is split."""
        widths = self.segments or (self.n,)
        return {name: widths[: self.segments_of.get(name, len(widths))] for name in self.outputs}

    def width(self, columns: int) -> int:
        """Returns how many of the `columns` of a vector or matrix a CTA reads."""
        return self.config.tile_n if columns == self.n else columns

    @property
    def rows(self) -> int:
        """Rows of x, padded to a multiple of 8, as a WGMMA requires."""
        return math.ceil(self.m / _CHUNK) * _CHUNK

    @property
    def chunks(self) -> int:
        """Chunks of the result's rows, which the CTAs of a cluster share."""
        return self.rows // _CHUNK

    @property
    def chunks_of_cta(self) -> int:
        """Largest number of chunks that one CTA finishes."""
        return pl.cdiv(self.chunks, self.config.parts)

    @property
    def sums_by_groups(self) -> bool:
        """True if the scale of a group along K multiplies the group's float32 sum, not each weight."""
        q = self.quantized
        return q is not None and q.group > 0 and not self.quantized_tile.scales_weights

    @property
    def step_k(self) -> int:
        """Elements along K in a step."""
        if isinstance(self.config, QuantizedConfig):
            return self.config.step_k
        return swizzled_columns(self.dtype)

    @property
    def steps(self) -> tuple[int, ...]:
        """K steps of each term."""
        return tuple(pl.cdiv(k, self.step_k) for k in self.ks)

    @property
    def columns(self) -> int:
        """Number of blocks of `tile_n` columns, one for each cluster."""
        return pl.cdiv(self.n, self.config.tile_n)

    @property
    def x_tile(self) -> OperandTile:
        depth = self.quantized_tile.x_columns if self.quantized else 0
        return OperandTile(
            span=self.rows, k_last=True, whole_blocks=False, dtype=self.dtype, depth=depth
        )

    @property
    def x_pieces(self) -> int:
        """Tiles of x in a K step."""
        return self.step_k // self.x_tile.tile_k

    @property
    def w_tile(self) -> Weights:
        return weights(self.w_dtype, self.dtype, self.config.tile_n, k_last=self.w_transposed)

    @property
    def quantized_tile(self) -> QuantizedTile:
        assert self.quantized is not None
        return QuantizedTile(self.quantized, self.config.tile_n, self.dtype, self.step_k)

    def scratch(self) -> dict[str, Any]:
        c = self.config
        w_tile = self.quantized_tile if self.quantized else self.w_tile
        arrivals = self.x_pieces * self.x_tile.blocks + self.products * w_tile.copies
        scratch: dict[str, Any] = dict(
            x_smem=self.x_tile.memory(c.stages * self.x_pieces),
            w_smem=[w_tile.memory(c.stages) for _ in range(self.products)],
            full=plgpu.Barrier(num_arrivals=arrivals, num_barriers=c.stages),
            # The sums are swizzled: storing accumulators transposed would otherwise conflict in banks.
            sums=[
                [tiled((_CHUNK, c.tile_n), jnp.float32, 32) for _ in range(self.chunks)]
                for _ in range(self.products)
            ],
            out_smem={
                name: self._chunk_memory(self.piece or c.tile_n, dtype, self.pieces)
                for name, dtype in self.outputs.items()
            },
        )
        if self.vectors:
            scratch["vector_smem"] = {
                name: plgpu.SMEM((self.width(v.shape[-1]),), v.dtype)
                for name, v in self.vectors.items()
            }
            scratch["vector_full"] = plgpu.Barrier(num_arrivals=len(self.vectors))
        if self.matrices:
            scratch["matrix_smem"] = {
                name: self._chunk_memory(self.width(x.shape[1]), x.dtype)
                for name, x in self.matrices.items()
            }
            scratch["matrix_full"] = plgpu.Barrier(
                num_arrivals=len(self.matrices), num_barriers=self.chunks_of_cta
            )
        if self.quantized is not None and self.quantized.has_table:
            scratch["tables"] = plgpu.Barrier(num_arrivals=self.products)
        if c.parts > 1:
            barrier = functools.partial(plgpu.ClusterBarrier, collective_axes=("part",))
            scratch["summed"], scratch["read"] = barrier(), barrier()
        return scratch

    def _chunk_memory(self, width: int, dtype: Any, pieces: int = 1) -> plgpu.RefUnion:
        """Returns shared memory [chunks, pieces, 8, width] for a CTA's chunks of a matrix, as two views.

        Both have contiguous rows: the first is for registers, the second for copies. The first has
        a tiling of one tile, because Mosaic would choose another, in which rows are not contiguous.
        """
        shape = (self.chunks_of_cta, pieces, _CHUNK, width)
        whole = plgpu.TilingTransform((_CHUNK, width))
        return plgpu.RefUnion(
            plgpu.SMEM(shape, dtype, transforms=(whole,)), plgpu.SMEM(shape, dtype)
        )

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory per CTA."""
        return allocated_bytes(self.scratch())

    def launch(
        self,
        xs: Sequence[jax.Array],
        ws: Sequence[jax.Array],
        others: Sequence[jax.Array],
        *,
        name: str,
    ) -> Sequence[jax.Array]:
        """Runs the kernel on the x of all terms, the arrays with w, the vectors and the matrices."""
        most = MAX_ROWS if self.quantized is None else MAX_ROWS_QUANTIZED
        if self.m > most:
            raise ValueError(
                f"FewRowsConfig: the kernel takes at most {most} rows, got {self.m};"
                " pass a MatmulConfig"
            )
        if self.config.parts > sum(self.steps):
            raise ValueError(
                f"FewRowsConfig: sums of length {sum(self.ks)} have {sum(self.steps)} steps, which"
                f" {self.config.parts} parts cannot share; pass fewer parts"
            )
        if self.shared_bytes > SHARED_MEMORY_BYTES:
            raise ValueError(
                f"FewRowsConfig: a CTA has {SHARED_MEMORY_BYTES} bytes of shared memory, and"
                f" {self.shared_bytes} are needed; pass fewer stages or a smaller tile_n"
                f" ({self.config})"
            )

        def kernel(*refs, memory):
            remaining = iter(refs)
            take = functools.partial(next, remaining)
            _Cta(
                product=self,
                x_gmem=[take() for _ in xs],
                w_gmem=self._of_weights([take() for _ in ws]),
                vectors={name: take() for name in self.vectors},
                matrices={name: take() for name in self.matrices},
                outputs={
                    name: [take() for _ in widths] for name, widths in self.result_widths.items()
                },
                **memory,
            ).run()

        return plgpu.kernel(
            kernel,
            out_type=tuple(
                jax.ShapeDtypeStruct((self.m, width), dtype)
                for name, dtype in self.outputs.items()
                for width in self.result_widths[name]
            ),
            scratch_types={"memory": self.scratch()},
            grid=(self.columns,),
            grid_names=("column",),
            cluster=(self.config.parts,),
            cluster_names=("part",),
            kernel_name=name,
            # Mosaic's own barriers are not needed: between a thread's stores and another thread's reads
            # there is always a commit or a barrier of the cluster, for which the whole warpgroup waits.
            compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        )(*xs, *ws, *others)

    def _of_weights(self, refs: Sequence[Any]) -> Sequence[Any]:
        """Returns the arrays that hold weights; for quantised ones, a tuple for each product."""
        if self.quantized is None:
            return refs
        size = self.quantized.arrays
        return [tuple(refs[start : start + size]) for start in range(0, len(refs), size)]


@dataclass(frozen=True, kw_only=True)
class _Cta:
    """The code of a CTA, which is one warpgroup with a block of columns and a part of K."""

    product: FewRows
    x_gmem: Sequence[Any]
    w_gmem: Sequence[Any]
    vectors: Mapping[str, Any]
    matrices: Mapping[str, Any]
    outputs: Mapping[str, Sequence[Any]]
    x_smem: Any
    w_smem: Sequence[Any]
    full: Any
    """Barriers that say that a stage holds the operands of a K step."""
    sums: Sequence[Sequence[Any]]
    """Buffers for this CTA's sums, one for each product and chunk of rows."""
    out_smem: Mapping[str, Any]
    vector_smem: Any = None
    vector_full: Any = None
    matrix_smem: Any = None
    matrix_full: Any = None
    tables: Any = None
    """Barrier on which the copies of the codebooks' tables arrive."""
    summed: Any = None
    """Cluster barrier that says that every CTA has stored its sums."""
    read: Any = None
    """Cluster barrier that says that every CTA has read the sums in other CTAs' shared memory."""

    @property
    def config(self) -> FewRowsConfig:
        return self.product.config

    @property
    def part(self) -> jax.Array:
        return lax.axis_index("part")

    @property
    def n_start(self) -> jax.Array:
        return lax.axis_index("column") * self.config.tile_n

    @property
    def _accumulator(self) -> Any:
        """Type of the accumulators of a product, [columns, rows]."""
        return plgpu.ACC((self.config.tile_n, self.product.rows), jnp.float32)

    def run(self) -> None:
        c, total = self.config, sum(self.product.steps)
        # The CTAs' numbers of K steps differ by at most 1, and the longer ones are spread evenly.
        first = lax.div(self.part * total, jnp.int32(c.parts))
        last = lax.div((self.part + 1) * total, jnp.int32(c.parts))
        for slot in range(c.stages):
            pl.when(first + slot < last)(functools.partial(self._copy_step, first + slot, slot))
        self._prefetch()
        if self.tables is not None:
            for arrays, memory in zip(self.w_gmem, self.w_smem, strict=True):
                self.product.quantized_tile.copy_table(arrays, memory, self.tables)
            plgpu.barrier_wait(self.tables)
        if self.product.sums_by_groups:
            values = self._accumulate_groups(first, last)
        else:
            accumulate = functools.partial(self._accumulate, first, last)
            values = pl.run_scoped(accumulate, *[self._accumulator] * self.product.products)
        if self.product.quantized is not None:
            values = [value * self.product.quantized_tile.unit for value in values]
        for value, memory in zip(values, self.sums, strict=True):
            self._leave(value, memory)
        plgpu.commit_smem()
        if c.parts > 1:
            plgpu.barrier_arrive(self.summed)
            plgpu.barrier_wait(self.summed)
        if self.vectors:
            plgpu.barrier_wait(self.vector_full)
        self._each_chunk(self._finish_rows)
        if c.parts > 1:
            # A CTA may end only after the other CTAs of its cluster have read its shared memory.
            plgpu.barrier_arrive(self.read)
            plgpu.barrier_wait(self.read)
        plgpu.wait_smem_to_gmem(0)

    @staticmethod
    def _leave(value: jax.Array, memory: Sequence[Any]) -> None:
        """Stores accumulators [columns, rows] in shared memory, where the CTA's cluster reads them."""
        for index, rows in enumerate(memory):
            part = value[:, index * _CHUNK : (index + 1) * _CHUNK]
            turned = plgpu.layout_cast(part, plgpu.Layout.WGMMA_TRANSPOSED)
            rows.transpose((1, 0))[...] = turned

    # --- the product ------------------------------------------------------------------------------

    def _copy_step(self, step: Any, slot: Any) -> None:
        """Starts the copies of a K step; steps are counted over all terms."""
        start = 0
        for term, steps in enumerate(self.product.steps):
            copy = functools.partial(self._copy_of_term, term, step - start, slot)
            if len(self.product.steps) == 1:
                copy()
            else:
                pl.when((step >= start) & (step < start + steps))(copy)
            start += steps

    def _refill(self, step: Any, slot: Any) -> None:
        """Starts the copies of a step into a stage that all warps have read; the warps take turns."""
        warps.await_all()
        warps.run_by_one(step, functools.partial(self._copy_step, step, slot))

    def _copy_of_term(self, term: int, step: Any, slot: Any) -> None:
        product, full = self.product, self.full.at[slot]
        k_start = step * product.step_k
        for index in range(product.products):
            block = product.blocks[term * product.products + index]
            place = (self.w_smem[index], slot, self.n_start, k_start, full)
            if product.quantized is not None:
                product.quantized_tile.copy(self.w_gmem[block.array], *place)
            else:
                product.w_tile.copy(block.view(self.w_gmem, product.w_transposed), *place)
        x = self.x_gmem[term]
        # The zero is traced, because JAX refuses a static span that ends beyond x's rows.
        no_row = 0 * self.part
        for piece in range(product.x_pieces):
            product.x_tile.copy(
                matrix_of(x),
                self.x_smem,
                slot * product.x_pieces + piece,
                no_row,
                k_start + piece * product.x_tile.tile_k,
                full,
            )

    def _accumulate(self, first, last, *accumulators) -> Sequence[jax.Array]:
        """Returns each product's sums [columns, rows] over the K steps `first` to `last` - 1."""
        if self.product.quantized is not None:
            self._each_step(first, last, functools.partial(self._multiply_step, accumulators), None)
            return [acc[...] for acc in accumulators]
        stages = self.config.stages
        count = last - first

        def step(i, _):
            self._multiply(accumulators, lax.rem(i, jnp.int32(stages)))

            # The stage before this one is free once only this stage's WGMMAs are in flight.
            @pl.when((i >= 1) & (i - 1 + stages < count))
            def _():
                self._refill(first + i - 1 + stages, lax.rem(i - 1, jnp.int32(stages)))

        lax.fori_loop(0, count, step, None)
        return [acc[...] for acc in accumulators]

    def _multiply(self, accumulators: Sequence[Any], slot: Any) -> None:
        """Issues the WGMMAs of a stage once it is full; those issued before have ended on return."""
        plgpu.barrier_wait(self.full.at[slot])
        [(_, x)] = self.product.x_tile.operands(self.x_smem, slot)
        tile, count = self.product.w_tile, 0
        for acc, w_smem in zip(accumulators, self.w_smem, strict=True):
            for columns, w in tile.operands(w_smem, slot):
                whole = columns.stop - columns.start == self.config.tile_n
                plgpu.wgmma(acc if whole else acc.at[columns], w, x.transpose((1, 0)))
                count += 1
        plgpu.wgmma_wait(0 if tile.in_registers else count)

    # --- quantised weights ------------------------------------------------------------------------

    def _each_step(self, first, last, multiply: Callable[[Any, Any], Any], totals: Any) -> Any:
        """Calls `multiply(slot, totals)` for each K step, and then starts to fill its stage again."""
        stages = self.config.stages
        count = last - first

        def step(i, totals):
            slot = lax.rem(i, jnp.int32(stages))
            plgpu.barrier_wait(self.full.at[slot])
            totals = multiply(slot, totals)

            @pl.when(i + stages < count)
            def _():
                self._refill(first + i + stages, slot)

            return totals

        return lax.fori_loop(0, count, step, totals)

    def _multiply_step(self, accumulators: Sequence[Any], slot: Any, nothing: None) -> None:
        """Adds a K step's products to the accumulators, where no scale multiplies a group's sum."""
        tile = self.product.quantized_tile
        for acc, w_smem in zip(accumulators, self.w_smem, strict=True):
            of_codes = tile.scales_weights
            operands = tile.pieces(w_smem, slot) if of_codes else tile.operands(w_smem, slot)
            for group, w in enumerate(operands):
                self._multiply_group(slot, group, w, acc)
        plgpu.wgmma_wait(0)
        return nothing

    def _accumulate_groups(self, first, last) -> Sequence[jax.Array]:
        """Returns each product's sums [columns, rows], of groups along K multiplied by their scales."""
        tile = self.product.quantized_tile

        def multiply(slot, totals):
            sums = []
            for total, w_smem in zip(totals, self.w_smem, strict=True):
                scales = tile.scales(w_smem, slot, self.product.rows)
                operands = tile.operands(w_smem, slot)
                for group, (w, scale) in enumerate(zip(operands, scales, strict=True)):
                    of_group = functools.partial(self._sum_group, slot, group, w)
                    total = total + scale * pl.run_scoped(of_group, self._accumulator)
                sums.append(total)
            return tuple(sums)

        zero = plgpu.layout_cast(
            jnp.zeros((self.config.tile_n, self.product.rows), jnp.float32), plgpu.Layout.WGMMA
        )
        return self._each_step(first, last, multiply, (zero,) * self.product.products)

    def _sum_group(self, slot: Any, group: int, w: jax.Array, acc: Any) -> jax.Array:
        self._multiply_group(slot, group, w, acc)
        plgpu.wgmma_wait(0)
        return acc[...]

    def _multiply_group(self, slot: Any, group: int, w: jax.Array, acc: Any) -> None:
        """Issues the WGMMAs of a group's weights [columns, K], which are in registers."""
        product, width = self.product, self.product.x_tile.tile_k
        pieces = w.shape[1] // width
        for piece in range(pieces):
            place = slot * product.x_pieces + group * pieces + piece
            [(_, x)] = product.x_tile.operands(self.x_smem, place)
            part = w if pieces == 1 else w[:, piece * width : (piece + 1) * width]
            plgpu.wgmma(acc, part, x.transpose((1, 0)))

    # --- the epilogue -----------------------------------------------------------------------------

    def _each_chunk(self, of_chunk: Callable[[int], None]) -> None:
        """Calls `of_chunk` for each chunk of 8 rows that this CTA adds up and stores, if any."""
        for chunk in range(self.product.chunks):
            mine = functools.partial(of_chunk, chunk)
            if self.config.parts == 1:
                mine()
            else:
                pl.when(self.part == chunk % self.config.parts)(mine)

    def _first_row(self, chunk: int) -> jax.Array:
        parts = self.config.parts
        # The expression equals this CTA's `chunk * _CHUNK`, but is traced: JAX refuses a static span
        # that ends beyond a matrix.
        return (chunk // parts * parts + self.part) * _CHUNK

    def _own(self, memory: Any, chunk: int) -> tuple[Any, Any]:
        """Returns this CTA's memory for a chunk of rows as two views, for registers and for copies."""
        for_registers, for_copies = memory
        index = chunk // self.config.parts
        return for_registers.at[index], for_copies.at[index]

    def _prefetch(self) -> None:
        """Starts the copies of the epilogue's operands, which overlap the product."""
        for name, ref in self.vectors.items():
            columns = pl.ds(self._first_column(ref), self.vector_smem[name].shape[0])
            source = ref.at[columns] if ref.ndim == 1 else ref.at[self.segment, columns]
            plgpu.copy_gmem_to_smem(source, self.vector_smem[name], self.vector_full)
        if self.matrices:
            self._each_chunk(self._prefetch_rows)

    def _first_column(self, ref: Any) -> jax.Array:
        """Returns the first column of a vector or matrix that this CTA needs."""
        return self.n_start if ref.shape[-1] == self.product.n else 0 * self.n_start

    def _prefetch_rows(self, chunk: int) -> None:
        for name, ref in self.matrices.items():
            row = self._first_row(chunk)
            if ref.shape[0] < self.product.m:
                row = lax.rem(row, jnp.int32(ref.shape[0]))
            columns = pl.ds(self._first_column(ref), self.product.width(ref.shape[1]))
            plgpu.copy_gmem_to_smem(
                ref.at[pl.ds(row, _CHUNK), columns],
                self._own(self.matrix_smem[name], chunk)[1].at[0],
                self.matrix_full.at[chunk // self.config.parts],
            )

    @property
    def segment(self) -> jax.Array:
        """Index of the array with this CTA's columns, among the arrays of an output."""
        ends = itertools.accumulate(self.product.segments[:-1])
        past = [(self.n_start >= end).astype(jnp.int32) for end in ends]
        return sum(past, 0 * self.n_start)

    def _finish_rows(self, chunk: int) -> None:
        product = self.product
        products = [self._sum(memory[chunk]) for memory in self.sums]
        vectors = {name: self._vector(smem) for name, smem in (self.vector_smem or {}).items()}
        if self.matrices:
            plgpu.barrier_wait(self.matrix_full.at[chunk // self.config.parts])
        matrices = {
            name: plgpu.load(self._own(smem, chunk)[0].at[0], layout=self._layout).astype(
                jnp.float32
            )
            for name, smem in (self.matrix_smem or {}).items()
        }
        results = product.function(*products, **vectors, **matrices)
        for name, dtype in product.outputs.items():
            pieces = results[name] if product.piece else [results[name]]
            for index, piece in enumerate(pieces):
                self._own(self.out_smem[name], chunk)[0].at[index][...] = piece.astype(dtype)
        plgpu.commit_smem()
        for name, arrays in self.outputs.items():
            self._store(chunk, self._own(self.out_smem[name], chunk)[1], arrays)

    def _store(self, chunk: int, memory: Any, arrays: Sequence[Any]) -> None:
        """Starts the copies of rows to the output's array that has this CTA's columns."""
        start = 0
        for array in arrays:
            first = self.n_start - start
            start += array.shape[1]

            def store(array=array, first=first):
                width = self.config.tile_n // self.product.pieces
                for index in range(self.product.pieces):
                    columns = pl.ds(first + index * width, width)
                    rows = pl.ds(self._first_row(chunk), _CHUNK)
                    plgpu.copy_smem_to_gmem(memory.at[index], array.at[rows, columns])

            if not self.product.segments:
                store()
            else:
                pl.when((first >= 0) & (first < array.shape[1]))(store)

    def _sum(self, memory: Any) -> jax.Array:
        """Returns a chunk [8, tile_n] of a product, added up over the cluster's CTAs in their order."""
        parts = self.config.parts
        total = None
        for part in range(parts):
            # Mosaic takes references to another CTA's shared memory only to whole arrays, so that each
            # chunk is an array of its own.
            ref = memory if parts == 1 else plgpu.cluster_ref(memory, {"part": jnp.int32(part)})
            value = plgpu.load(ref, layout=self._layout)
            total = value if total is None else total + value
        assert total is not None
        return total

    def _vector(self, smem: Any) -> jax.Array:
        row = plgpu.load(smem, layout=self._layout.reduce(0))
        shape = (_CHUNK, *smem.shape)
        return lax.broadcast_in_dim(row.astype(jnp.float32), shape, (1,))

    @property
    def _layout(self) -> Any:
        return chunk_layout(self.product.piece or self.config.tile_n)


def chunk_layout(columns: int) -> Any:
    """Returns the register layout of a chunk's rows: up to 128 adjacent columns of a row per warp."""
    vec = min(4, columns // 32)
    return plgpu.Layout.TILED(
        plgpu.Tiling(((4, 32 * vec), (vec,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1
    )
