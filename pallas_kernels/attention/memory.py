"""Matrices in shared memory, in layouts that both TMA and WGMMA can read and write.

WGMMA reads its operands in tiles of 8 rows. Mosaic's TMA copies fill such tiles only if the array in
global memory consists of whole tiles, which an array of 197 rows or of 72 columns does not. In that case
a matrix is stored as blocks of columns, each as wide as its swizzle. In such a block, a layout of rows
in order and one of tiles of 8 rows are the same bytes: TMA copies use the former, WGMMA the latter.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.mask import BlockMask, Extent

WGMMA_ROWS = 64
"""Rows of a WGMMA's accumulator, and of a warpgroup's tile."""

SWIZZLED_COLUMNS = 64
"""Columns of 16 bits in the widest swizzle, which is 128 bytes."""

_WIDTHS = (64, 32, 16)
"""Columns of 16 bits in each of WGMMA's swizzles, widest first."""


def ceil_to(count: int, multiple: int) -> int:
    """Returns the least multiple of `multiple` that is at least `count`."""
    return -(-count // multiple) * multiple


def shared_width(size: int) -> int:
    """Returns the columns that `size` columns of 16 bits occupy in shared memory.

    They are 16, 32 or 64, and above 64 a multiple of 16, so that whole swizzles cover them.
    """
    for width in reversed(_WIDTHS):
        if size <= width:
            return width
    return ceil_to(size, 16)


@dataclass(frozen=True)
class Columns:
    """Layout of the columns of matrices [rows, size] of 16-bit numbers in shared memory."""

    widths: tuple[int, ...]
    """Widths of the blocks in order; their sum may be more than the width of the matrix."""
    swizzled: int
    """Columns of 16 bits of a block's swizzle (a narrower block has a swizzle of its own width). Only a
    single block that TMA copies by tiles is wider than its swizzle."""
    copies_tiles: bool = False
    """True if TMA copies through tiles of 8 rows."""

    @classmethod
    def of(
        cls, size: int, lengths: tuple[int, ...], contracted: int = SWIZZLED_COLUMNS
    ) -> "Columns":
        """Returns the layout for arrays [B, length, heads, size] of the given `lengths`.

        `contracted` is the number of rows of a matrix, if a product sums over its rows. WGMMA then takes
        as many rows at a time as the swizzle has columns, so the swizzle is chosen to divide it.
        """
        whole = size <= SWIZZLED_COLUMNS or size % SWIZZLED_COLUMNS == 0
        if whole and all(length % 8 == 0 for length in lengths):
            width = shared_width(size)
            return cls((width,), _widest(width, contracted), copies_tiles=True)
        return cls.in_blocks(size, contracted)

    @classmethod
    def in_blocks(cls, size: int, contracted: int = SWIZZLED_COLUMNS) -> "Columns":
        """Returns the layout for arrays of any length: blocks of 64 columns, then narrower ones."""
        widest = _widest(SWIZZLED_COLUMNS, contracted)
        widths: list[int] = []
        while sum(widths) < size:
            rest = ceil_to(size - sum(widths), 16)
            widths.append(next(w for w in _WIDTHS if w <= min(rest, widest)))
        return cls(tuple(widths), widest)

    @classmethod
    def in_wide_blocks(cls, size: int) -> "Columns":
        """Returns the layout of blocks of 64 columns each; the last one is padded."""
        return cls((SWIZZLED_COLUMNS,) * -(-size // SWIZZLED_COLUMNS), SWIZZLED_COLUMNS)

    def cut(self, widest: int) -> "Columns":
        """Returns the layout of the same columns in blocks of at most `widest` columns."""
        firsts = ((width, first) for width in self.widths for first in range(0, width, widest))
        return Columns(tuple(min(widest, width - first) for width, first in firsts), widest)

    @property
    def width(self) -> int:
        return sum(self.widths)

    @property
    def count(self) -> int:
        """Number of blocks of columns; each takes a copy and WGMMAs of its own."""
        return len(self.widths)

    def memory(self, leading: tuple[int, ...], rows: int, dtype: Any) -> list[Any]:
        """Returns buffers [*leading, rows, width], one for each block; `rows` is a multiple of 8."""
        memory: list[Any] = []
        for width in self.widths:
            swizzled = min(width, self.swizzled)
            operand = tiled(leading, rows, width, dtype, swizzled)
            if self.copies_tiles:
                memory.append((operand,))
            else:
                swizzle = plgpu.SwizzleTransform(swizzled * jnp.dtype(dtype).itemsize)
                copied = plgpu.SMEM((*leading, rows, width), dtype, transforms=(swizzle,))
                memory.append(plgpu.RefUnion(operand, copied))
        return memory

    def accumulators(self) -> list[Any]:
        """Returns the accumulators of a product [64, width], one for each block."""
        return [plgpu.ACC((WGMMA_ROWS, width), jnp.float32) for width in self.widths]

    def zeros(self) -> list[jax.Array]:
        """Returns zeros in registers for `accumulators`, one array for each block."""
        return [
            plgpu.layout_cast(jnp.zeros((WGMMA_ROWS, width), jnp.float32), plgpu.Layout.WGMMA)
            for width in self.widths
        ]

    def bytes(self, rows: int) -> int:
        """Returns the bytes of a matrix of 16-bit numbers with `rows` rows."""
        return 2 * rows * self.width


def _widest(columns: int, contracted: int) -> int:
    return next(w for w in _WIDTHS if columns % w == 0 and contracted % w == 0)


def tiled(leading: tuple[int, ...], rows: int, columns: int, dtype: Any, swizzled: int = 64) -> Any:
    """Returns a buffer [*leading, rows, columns] in tiles of 8 rows, which WGMMA can read."""
    tiling = plgpu.TilingTransform((8, swizzled))
    swizzle = plgpu.SwizzleTransform(swizzled * jnp.dtype(dtype).itemsize)
    return plgpu.SMEM((*leading, rows, columns), dtype, transforms=(tiling, swizzle))


class Heads(NamedTuple):
    """Heads of an array [B, rows, heads, width] in global memory, from head `first` on."""

    gmem: Any
    first: int = 0


def queries_keys_values(refs: Any, heads: int, key_heads: int) -> tuple[Heads, Heads, Heads]:
    """Returns the heads of Q, K and V, given three arrays or one array with the heads of all three."""
    if len(refs) == 1:
        return tuple(Heads(refs[0], first) for first in (0, heads, heads + key_heads))
    return tuple(Heads(ref) for ref in refs)


class Matrix(NamedTuple):
    """A matrix [rows, columns] in shared memory, as references to its blocks of columns.

    `operands` are for WGMMA, loads and stores, `copied` for TMA: other views of the same bytes.
    """

    operands: tuple[Any, ...]
    copied: tuple[Any, ...]

    @classmethod
    def of(cls, memory: Any, *index: Any) -> "Matrix":
        """Returns the matrix at a leading index of the buffers that `Columns.memory` describes."""
        # A block has one reference for both WGMMA and TMA, or one for each of them.
        blocks = [tuple(block) for block in memory]
        operands, copied = tuple(b[0] for b in blocks), tuple(b[-1] for b in blocks)
        if index:
            operands, copied = (tuple(r.at[index] for r in refs) for refs in (operands, copied))
        return cls(operands, copied)

    def rows(self, start: int, count: int) -> "Matrix":
        """Returns `count` rows from `start` on; both numbers are multiples of 8."""
        index = pl.ds(start, count)
        return Matrix(*(tuple(ref.at[index] for ref in refs) for refs in self))

    def _places(self, heads: Heads, batch, start, head, first=0):
        """Yields the slice of `heads` for each block of columns, from row `start` and column `first`."""
        # JAX rejects static indices if a block ends beyond its axis, so these are traced.
        traced_zero = batch * 0
        for block in self.copied:
            rows, width = block.shape
            columns = pl.ds(traced_zero + first, width)
            rows_from_start = pl.ds(traced_zero + start, rows)
            yield heads.gmem.at[batch, rows_from_start, heads.first + head, columns]
            first += width

    def fill(
        self, heads: Heads, batch: Any, start: Any, head: Any, barrier: Any, first: int = 0
    ) -> None:
        """Starts the copies from `heads` into this matrix: one for each block of columns.

        They begin with row `start` and column `first`, and each arrives at `barrier`. Elements beyond
        the end of the array become zeros.
        """
        places = self._places(heads, batch, start, head, first)
        for copied, place in zip(self.copied, places, strict=True):
            plgpu.copy_gmem_to_smem(place, copied, barrier)

    def clear_beyond(self, mask: BlockMask, extent: Extent, start: Any) -> None:
        """Sets rows (values of keys) from the key length on to zero; row 0 is the value of key `start`.

        Their weights are 0, but the cache may hold NaN there, and 0 times NaN is NaN.
        """
        if mask.has_key_lengths:
            end = extent.key_length - start
            pl.when(end < self.operands[0].shape[0])(lambda: self.clear(end))

    def clear(self, first: jax.Array) -> None:
        """Sets the rows from `first` on to zero, and makes the stores visible to WGMMA."""
        for operand in self.operands:
            rows, width = operand.shape
            for start in range(0, rows, WGMMA_ROWS):
                start = min(start, rows - WGMMA_ROWS)
                some = operand.at[pl.ds(start, WGMMA_ROWS)]
                layout = plgpu.Layout.WGMMA
                row = plgpu.broadcasted_iota(jnp.int32, (WGMMA_ROWS, width), 0, layout=layout)
                values = plgpu.load(some, layout=layout, optimized=False)
                some[...] = jnp.where(row < first - start, values, jnp.zeros_like(values))
        plgpu.commit_smem()

    def store(self, blocks: list[jax.Array]) -> None:
        """Writes registers to shared memory, and makes the writes visible to TMA and WGMMA."""
        for operand, block in zip(self.operands, blocks, strict=True):
            operand[...] = block.astype(operand.dtype)
        plgpu.commit_smem()

    def write(self, heads: Heads, batch: Any, start: Any, head: Any) -> None:
        """Starts the copies to global memory; elements beyond the end of the array are not written."""
        places = self._places(heads, batch, start, head)
        for copied, place in zip(self.copied, places, strict=True):
            plgpu.copy_smem_to_gmem(copied, place)


def multiply_transposed(accumulator: Any, a: Matrix | list[jax.Array], b: Matrix) -> None:
    """Adds a b^T to the accumulator [rows of a, rows of b]; a may be blocks of columns in registers."""
    a_blocks = a.operands if isinstance(a, Matrix) else a
    for a_block, b_block in zip(a_blocks, b.operands, strict=True):
        plgpu.wgmma(accumulator, a_block, b_block.transpose((1, 0)))


def multiply(accumulators: Any, a: jax.Array, b: Matrix) -> None:
    """Adds a b to the accumulators, one for each block of b's columns; a may be in registers."""
    for accumulator, block in zip(accumulators, b.operands, strict=True):
        plgpu.wgmma(accumulator, a, block)


def load_accumulators(accumulators: Any) -> list[jax.Array]:
    """Returns the accumulators' values once all WGMMAs are done."""
    return [plgpu.wgmma_accumulator_load(acc, wait_n=0) for acc in accumulators]
