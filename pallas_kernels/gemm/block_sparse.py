"""Products with a block-sparse matrix b for Hopper: only its stored blocks are read and multiplied.

An output tile has the columns of one column of blocks of b. Its K steps are the stored ("kept") blocks
of that column, from a list on the device. Columns of a that these blocks do not multiply are not read. A
step beyond the end of a list reads beyond the end of both arrays, where TMA returns zeros.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gemm import operands
from pallas_kernels.gemm.epilogue import Epilogue
from pallas_kernels.gemm.matmul_config import MatmulConfig
from pallas_kernels.gemm.operands import OperandTile, matrix_of, swizzled_columns
from pallas_kernels.gemm.tiled_product import Ring, Step
from pallas_kernels.gemm.uneven_steps import FEWEST_STEPS, UnevenProduct
from pallas_kernels.hopper import SHARED_MEMORY_BYTES
from pallas_kernels.longest_first import longest_first

BLOCKS = (32, 64, 128)
"""Supported block sizes: rows and columns of a block."""


def why_unsupported(
    *,
    compute_capability: tuple[int, int] | None,
    dtypes: Mapping[str, Any],
    out_dtype: Any,
    block: int,
    kept: int,
) -> str | None:
    """Returns None if the kernels can run, else the reason.

    Args:
      compute_capability: of the GPU, or None where there is none.
      dtypes: dtypes of the operands, keyed by name.
      out_dtype: of the result.
      block: rows and columns of a block.
      kept: number of stored blocks.
    """
    if reason := operands.why_unfit(compute_capability, dtypes, out_dtype):
        return reason
    if block not in BLOCKS:
        return f"it takes blocks of {', '.join(map(str, BLOCKS))}, not of {block}"
    if not kept:
        return "b must have at least one stored block, and has none"
    return None


class Shape(NamedTuple):
    """Sizes of a product of [rows, k] with a block-sparse [k, n] of `kept` blocks [block, block]."""

    rows: int
    k: int
    n: int
    block: int
    kept: int


_TILE_ROWS = {32: (256, 128, 64), 64: (128, 64), 128: (128, 64)}
"""Rows of a warpgroup's tile, by block size; the CTA's two warpgroups share a column of blocks."""
_STAGES = ((4, 2), (4, 1), (6, 2), (3, 2), (3, 1))
"""Pipeline stages, and epilogue buffers for results; earlier pairs win ties of predicted time."""
_BANDS = {32: (2, 4), 64: (4, 8), 128: (8, 16)}
"""Rows of tiles in a group of the raster order, by block size: x's rows of a longer band do not stay in
the L2."""


def candidates(work: Shape, dtype: Any, out_dtype: Any, multiprocessors: int) -> list[MatmulConfig]:
    """Returns the configs that fit into shared memory, predicted fastest first."""
    configs = [
        MatmulConfig(
            tile_m,
            work.block,
            stages,
            ping_pong=False,
            epilogue_columns=min(work.block, swizzled_columns(out_dtype)),
            write_slots=slots,
            band=band,
        )
        for tile_m in _TILE_ROWS[work.block]
        for stages, slots in _STAGES
        for band in _BANDS[work.block]
    ]
    fitting = [
        config
        for config in configs
        if _tiles(work, False, dtype, config, 1, out_dtype).shared_bytes <= SHARED_MEMORY_BYTES
    ]
    return sorted(fitting, key=lambda config: config_time(work, config, multiprocessors))


_STEP_ELEMENT, _STEP_BYTE = 3.67e-7, 1.39e-5
"""Microseconds of a K step for each product of two elements, and for each byte copied. A step takes the
longer of the two (benchmarks/LAB.md, 2026-11-28)."""
_TILE, _STORED_ELEMENT = 0.2, 1e-4
"""Microseconds of a tile in addition to its K steps, and to store one of its elements."""
_MISSING_STAGE = 0.08
"""Fraction by which a K step takes longer for each pipeline stage below four."""
_LONG_BAND = 1.08
"""Factor on the time with a longer `band`, with which less of the left operand a stays in the L2."""
LAUNCH = 5.0
"""Microseconds to launch a kernel."""


def tile_time(steps: float, depth: int, config: MatmulConfig, area: int, copied: int) -> float:
    """Returns the microseconds of a CTA's tile.

    Args:
      steps: number of steps along K.
      depth: elements along K of a step.
      config: config of the kernel.
      area: elements of the tile.
      copied: bytes that a step copies.
    """
    step = max(_STEP_ELEMENT * area * depth, _STEP_BYTE * copied)
    step *= 1 + _MISSING_STAGE * max(0, 4 - config.stages)
    return steps * step + _STORED_ELEMENT * area + _TILE


def config_time(work: Shape, config: MatmulConfig, multiprocessors: int) -> float:
    """Returns the predicted microseconds of a config, with stored blocks spread at random."""
    columns = work.n // work.block
    tiles = math.ceil(work.rows / config.cta_tile_m) * columns
    depth = min(work.block, _TILE_K)
    steps = max(FEWEST_STEPS, work.kept * work.block / depth / columns)
    copied = (config.cta_tile_m + config.tile_n) * 2 * depth
    tile = tile_time(steps, depth, config, config.cta_tile_m * config.tile_n, copied)
    is_long = config.band > _BANDS[work.block][0]
    return LAUNCH + max(1.0, tiles / multiprocessors) * tile * _LONG_BAND**is_long


_TILE_K = 64
"""Most columns of the left operand a in a K step, which multiplies at most one block."""


def block_sparse_product(
    a: jax.Array,
    blocks: jax.Array,
    indptr: jax.Array,
    entries: jax.Array,
    *,
    transposed: bool = False,
    out_dtype: Any,
    multiprocessors: int,
    config: MatmulConfig | None = None,
    name: str = "block_sparse_product",
) -> jax.Array:
    """Returns a times the block-sparse matrix b: [M, N].

    Args:
      a: [M, K], bfloat16 or float16.
      blocks: [kept, B, B] of the same dtype, of b's blocks, or with `transposed` of their transposes.
      indptr: int32 [N / B + 1], the first entry of each column of blocks, and the number of entries.
      entries: int32 [2, kept]: of each entry, its block's index in `blocks` and its row of blocks in b.
      transposed: whether `blocks` has the blocks of b's transpose.
      out_dtype: of the result; sums are in float32, and rounded once.
      multiprocessors: SMs of the device.
      config: one of `candidates`; None for the first.
      name: the kernel's name in a profile.
    """
    rows, k = a.shape
    kept, block, _ = blocks.shape
    shape = Shape(rows, k, (indptr.shape[0] - 1) * block, block, kept)
    if config is None:
        config = candidates(shape, a.dtype, out_dtype, multiprocessors)[0]
    tiles = _tiles(shape, transposed, a.dtype, config, multiprocessors, out_dtype)
    tiles.product.check_shared_bytes(tiles.shared_bytes)
    [y] = tiles.product.launch(
        (a,),
        (blocks,),
        (indptr, entries, _column_order(indptr, block)),
        out_type=[jax.ShapeDtypeStruct((rows, shape.n), out_dtype)],
        scratch=tiles.scratch(),
        epilogue=tiles.of_tile,
        name=name,
    )
    return y


def _column_order(indptr: jax.Array, block: int) -> jax.Array:
    """Returns the columns of blocks in the order in which the kernel computes them, int32.

    With blocks of up to 64, columns with most blocks come first, so that tiles that run at one time are
    equally long. Larger blocks were not measured.
    """
    counts = jnp.diff(indptr)
    return jnp.arange(len(counts), dtype=jnp.int32) if block > 64 else longest_first(counts)


def _tiles(
    shape: Shape,
    transposed: bool,
    dtype: Any,
    config: MatmulConfig,
    multiprocessors: int,
    out_dtype: Any,
) -> Epilogue:
    """Returns the product with an epilogue that rounds the sums and stores them."""
    product = _BlockSparseProduct(
        m=shape.rows,
        n=shape.n,
        ks=(shape.k,),
        dtype=jnp.dtype(dtype),
        blocks=(),
        config=config,
        multiprocessors=multiprocessors,
        b_transposed=transposed,
        b_columns=shape.block,
        block=shape.block,
        kept=shape.kept,
    )
    return Epilogue.of_sums(product, y=out_dtype)


class Span(NamedTuple):
    """Range of the stored blocks (entries) that are multiplied for a tile."""

    start: Any
    end: Any
    """Index of the entry after the last."""
    entries: Any
    """Index among the stored blocks, and position along K or N, of each entry; in global memory."""


@dataclass(frozen=True, kw_only=True)
class _BlockSparseProduct(UnevenProduct):
    """Static parameters of a launch, and the stored blocks that are multiplied for each tile."""

    block: int
    kept: int
    indptr: Any = None
    """First entry of each column of blocks, in global memory."""
    entries: Any = None
    """Index among the stored blocks, and position along K, of each entry; in global memory."""
    order: Any = None
    """Columns of blocks in the order in which they are multiplied, in global memory."""

    @property
    def tile_k(self) -> int:
        return min(self.block, _TILE_K)

    @property
    def a_tile(self) -> OperandTile:
        return replace(super().a_tile, depth=self.tile_k)

    @property
    def b_tile(self) -> OperandTile:
        return replace(super().b_tile, depth=self.tile_k)

    @property
    def steps_of_block(self) -> int:
        return self.block // self.tile_k

    # --- on the device ----------------------------------------------------------------------------

    def on_device(self, others: Sequence[Any]) -> tuple["_BlockSparseProduct", Sequence[Any]]:
        indptr, entries, order, *rest = others
        return replace(self, indptr=indptr, entries=entries, order=order), rest

    def position(self, sequence_idx: Any) -> tuple[jax.Array, ...]:
        m_start, place = super().position(sequence_idx)
        n_idx = self.order[place]
        span = Span(self.indptr[n_idx], self.indptr[n_idx + 1], self.entries)
        return m_start, n_idx, span

    def steps_of(self, group: Span) -> jax.Array:
        return jnp.maximum((group.end - group.start) * self.steps_of_block, FEWEST_STEPS)

    def copy_step(
        self,
        ring: Ring,
        a_gmem: Sequence[Any],
        b_gmem: Sequence[Any],
        slot: Any,
        step: Step,
        full: Any,
    ) -> None:
        [a], [b] = a_gmem, b_gmem
        entry = step.group.start + lax.div(step.k_idx, jnp.int32(self.steps_of_block))
        part = lax.rem(step.k_idx, jnp.int32(self.steps_of_block)) * self.tile_k
        exists = entry < step.group.end
        known = jnp.minimum(entry, self.kept - 1)
        index = jnp.where(exists, self.entries[0, known], self.kept)
        place = jnp.where(exists, self.entries[1, known], self.ks[0] // self.block)

        k_start = place * self.block + part
        self.a_tile.copy(matrix_of(a), ring.a_smem, slot, step.m_start, k_start, full)
        self.b_tile.copy(matrix_of(b, index), ring.b_smem[0], slot, 0, part, full)
