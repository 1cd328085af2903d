"""The gradient of a block-sparse matrix for Hopper: x^T @ dy at the matrix's stored ("kept") blocks.

An output tile has several stored blocks of one row of blocks, adjacent or not: they share their columns
of x. Each warpgroup has half the rows of each block if blocks have 128 rows, else half the blocks. A
row's blocks are spread evenly over its tiles. For a block that a tile lacks it reads beyond the end of
dy, where TMA returns zeros, and stores nothing.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import warps
from pallas_kernels.gemm.block_sparse import LAUNCH, Shape, Span, tile_time
from pallas_kernels.gemm.epilogue import Epilogue
from pallas_kernels.gemm.mainloop import Product
from pallas_kernels.gemm.matmul_config import CONSUMERS, MatmulConfig
from pallas_kernels.gemm.operands import OperandTile, matrix_of, swizzled_columns
from pallas_kernels.gemm.tiled_product import Ring, Step, TilePlace, part, run_of
from pallas_kernels.gemm.weight_gradient import PIECE_ROWS
from pallas_kernels.hopper import SHARED_MEMORY_BYTES, WARPS

_TILE_M = 64
_TILES = {32: (256,), 64: (192, 128, 256, 64), 128: (256, 128)}
"""Columns of a warpgroup's tile, keyed by block size."""
_STAGES = ((4, 2), (3, 2), (5, 2), (4, 1), (3, 1), (2, 1))
"""Pipeline stages, and epilogue buffers for results; earlier pairs win ties of predicted time."""


def candidates(work: Shape, dtype: Any, out_dtype: Any, multiprocessors: int) -> list[MatmulConfig]:
    """Returns the configs that fit into shared memory, predicted fastest first."""
    columns = min(work.block, swizzled_columns(out_dtype))
    configs = [
        MatmulConfig(
            _TILE_M,
            tile_n,
            stages,
            ping_pong=False,
            epilogue_columns=columns,
            write_slots=slots,
        )
        for tile_n in _TILES[work.block]
        for stages, slots in _STAGES
    ]
    fitting = [
        config
        for config in configs
        if _tiles(work, dtype, config, 1, out_dtype).shared_bytes <= SHARED_MEMORY_BYTES
    ]
    return sorted(fitting, key=lambda config: config_time(work, config, multiprocessors))


_NARROW = 1.35
"""Factor of a K step whose WGMMAs have 64 columns of dy each, because each WGMMA reads x again."""


def config_time(work: Shape, config: MatmulConfig, multiprocessors: int) -> float:
    """Returns the predicted microseconds of a config, with stored blocks spread at random.

    Args:
      work: sizes of x^T @ dy with x [k, rows] and dy [k, n], and the number of stored blocks.
      config: one of `candidates`.
      multiprocessors: SMs of the device.
    """
    product = _tiles(work, jnp.bfloat16, config, multiprocessors, jnp.bfloat16).product
    # The last tile of a row of blocks is half full on average.
    count = work.kept / product.pieces + 0.5 * work.rows / work.block
    copied = (product.a_tile.span + product.pieces * work.block) * 2 * product.tile_k
    steps = math.ceil(work.k / product.tile_k) * (1.0 if product.shares_rows else _NARROW)
    area = product.pieces * product.a_tile.span * work.block
    tile = tile_time(steps, product.tile_k, config, area, copied)
    return 2 * LAUNCH + math.ceil(count / multiprocessors) * tile


def block_sparse_weights(
    x: jax.Array,
    dy: jax.Array,
    indptr: jax.Array,
    entries: jax.Array,
    *,
    block: int,
    out_dtype: Any,
    multiprocessors: int,
    config: MatmulConfig | None = None,
    name: str = "block_sparse_weights",
) -> jax.Array:
    """Returns x^T @ dy at the stored blocks: [kept, B, B].

    Args:
      x: [M, K], bfloat16 or float16.
      dy: [M, N] of the same dtype.
      indptr: int32 [K / B + 1], the first entry of each row of blocks, and the number of entries.
      entries: int32 [2, kept]: of each entry, its block's index in the result and its column of blocks.
      block: B.
      out_dtype: of the result; sums are in float32, and rounded once.
      multiprocessors: SMs of the device.
      config: one of `candidates`; None for the first.
      name: the kernel's name in a profile.
    """
    # TMA writes the layout that WGMMA reads only if the number of rows is a multiple of 8.
    missing = -x.shape[0] % PIECE_ROWS
    if missing:
        x, dy = (jnp.pad(array, ((0, missing), (0, 0))) for array in (x, dy))
    kept = entries.shape[1]
    work = Shape(x.shape[1], x.shape[0], dy.shape[1], block, kept)
    if config is None:
        config = candidates(work, x.dtype, out_dtype, multiprocessors)[0]
    tiles = _tiles(work, x.dtype, config, multiprocessors, out_dtype)
    product = tiles.product
    product.check_shared_bytes(tiles.shared_bytes)
    counts = jnp.diff(indptr)
    of_rows = (counts + (product.pieces - 1)) // product.pieces
    tiles_before = jnp.cumsum(of_rows, dtype=jnp.int32)
    table = jnp.stack([jnp.concatenate([jnp.zeros(1, jnp.int32), tiles_before]), indptr])
    [dw] = product.launch(
        (x,),
        (dy,),
        (table, entries),
        out_type=[jax.ShapeDtypeStruct((kept, block, block), out_dtype)],
        scratch=tiles.scratch(),
        epilogue=tiles.of_tile,
        name=name,
    )
    return dw


def _tiles(
    work: Shape, dtype: Any, config: MatmulConfig, multiprocessors: int, out_dtype: Any
) -> Any:
    """Returns the product with an epilogue that rounds the sums and stores them."""
    product = _BlockSparseWeights(
        m=work.rows,
        n=config.tile_n,
        ks=(work.k,),
        dtype=jnp.dtype(dtype),
        blocks=(),
        config=config,
        multiprocessors=multiprocessors,
        a_transposed=True,
        b_columns=work.n,
        block=work.block,
        kept=work.kept,
    )
    return Epilogue.of_sums(product, dw=out_dtype)


@dataclass(frozen=True, kw_only=True)
class _BlockSparseWeights(Product):
    """Static parameters of a launch, and the stored blocks of each tile."""

    block: int
    kept: int
    table: Any = None
    """Number of tiles and of entries before each row of blocks, in global memory."""
    entries: Any = None
    """Index in the result, and position along N, of each entry; in global memory."""

    @property
    def columns(self) -> int:
        """Columns of a swizzled piece; WGMMA needs one swizzle for x and dy, that of a block of dy."""
        return min(self.block, swizzled_columns(self.dtype))

    @property
    def shares_rows(self) -> bool:
        """True if each warpgroup has half of a block's rows; false if each has half of the blocks."""
        return self.block == CONSUMERS * self.config.tile_m

    @property
    def pieces_of_warpgroup(self) -> int:
        return self.config.tile_n // self.block

    @property
    def pieces(self) -> int:
        """Number of blocks of a tile."""
        return self.pieces_of_warpgroup * (1 if self.shares_rows else CONSUMERS)

    @property
    def a_tile(self) -> OperandTile:
        """Tile of x; of blocks of 32, it has the next row of blocks too, for a WGMMA's 64 rows."""
        span, whole = max(self.block, _TILE_M), self.block < _TILE_M
        return replace(super().a_tile, span=span, whole_blocks=whole, columns=self.columns)

    @property
    def b_tile(self) -> OperandTile:
        """Tile of dy for one block of an output tile."""
        return replace(super().b_tile, span=self.block, columns=self.columns)

    def operand_memory(self) -> dict[str, Any]:
        stages = self.config.stages
        blocks = self.b_tile.memory(stages * self.pieces)
        return dict(a_smem=self.a_tile.memory(stages), b_smem=[blocks])

    @property
    def copies_of_slot(self) -> int:
        return self.a_tile.blocks + self.pieces * self.b_tile.blocks

    @property
    def tile_count(self) -> int:
        """Upper limit on the number of tiles, each of which has at least one stored block."""
        return self.kept

    # --- on the device ----------------------------------------------------------------------------

    def on_device(self, others: Sequence[Any]) -> tuple["_BlockSparseWeights", Sequence[Any]]:
        return replace(self, table=others[0], entries=others[1]), others[2:]

    def tiles_of_cluster(self) -> jax.Array:
        return self.share_of_cluster(self.table[0, self.m // self.block])

    def position(self, sequence_idx: Any) -> tuple[Any, ...]:
        item = lax.axis_index("cluster") + sequence_idx * self.clusters
        row = run_of(lambda run: self.table[0, run], self.m // self.block, item)
        first, tiles = self.table[0, row], self.table[0, row + 1] - self.table[0, row]
        entries = self.table[1, row + 1] - self.table[1, row]

        def start(index: Any) -> Any:
            return self.table[1, row] + lax.div(index * entries, jnp.maximum(tiles, 1))

        return row * self.block, 0, Span(start(item - first), start(item - first + 1), self.entries)

    def copy_step(
        self,
        ring: Ring,
        a_gmem: Sequence[Any],
        b_gmem: Sequence[Any],
        slot: Any,
        step: Step,
        full: Any,
    ) -> None:
        [x], [dy] = a_gmem, b_gmem
        k_start = step.k_idx * self.tile_k

        def copy_pieces(pieces: Sequence[int], with_x: bool) -> None:
            if with_x:
                self.a_tile.copy(matrix_of(x), ring.a_smem, slot, step.m_start, k_start, full)
            entries = [step.group.start + piece for piece in pieces]
            known = [self.entries[1, jnp.minimum(entry, self.kept - 1)] for entry in entries]
            for piece, entry, column in zip(pieces, entries, known, strict=True):
                n_start = jnp.where(entry < step.group.end, column * self.block, self.b_columns)
                place = slot * self.pieces + piece
                self.b_tile.copy(matrix_of(dy), ring.b_smem[0], place, n_start, k_start, full)

        if self.shares_rows:
            copy_pieces(range(self.pieces), True)
            return
        # To start the copies of many small blocks takes one warp longer than the copies themselves.
        issuers = min(WARPS, self.pieces)
        for warp in range(issuers):
            pieces, with_x = range(warp, self.pieces, WARPS), warp == issuers - 1
            warps.run_by_one(jnp.int32(warp), functools.partial(copy_pieces, pieces, with_x))

    def instructions(
        self, acc_ref: Any, ring: Ring, slot: Any, k_idx: Any, share: Any, shares: int
    ) -> Iterator[tuple[Any, Any, Any]]:
        del k_idx
        height = (share, shares) if self.shares_rows else (0, 1)
        first = slot * self.pieces + (0 if self.shares_rows else share * self.pieces_of_warpgroup)
        for index in range(self.pieces_of_warpgroup):
            for columns, b in self.b_tile.operands(ring.b_smem[0], first + index):
                for rows, a in self.a_tile.operands(ring.a_smem, slot, *height):
                    start = index * self.block
                    of_block = slice(start + columns.start, start + columns.stop)
                    yield part(acc_ref, rows, of_block), a.transpose((1, 0)), b

    def store_rows(self, source: Any, ref: Any, place: TilePlace, columns: Any) -> None:
        index, first_column = divmod(columns.start, self.block)
        entry, first_row = place.group.start + index, place.wg_idx * self.config.tile_m
        if not self.shares_rows:
            entry, first_row = entry + place.wg_idx * self.pieces_of_warpgroup, 0
        height = min(self.config.tile_m, self.block)
        rows, within = pl.ds(first_row, height), pl.ds(first_column, columns.size)

        @pl.when(entry < place.group.end)
        def _():
            destination = ref.at[place.group.entries[0, entry], rows, within]
            of_block = source if height == self.config.tile_m else source.at[pl.ds(0, height)]
            plgpu.copy_smem_to_gmem(of_block, destination, commit_group=False)
