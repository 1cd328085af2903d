"""Matrices in shared memory, as TMA fills and empties them and wgmma multiplies them.

wgmma takes its operands in tiles of 8 rows. TMA copies through such tiles only where the array in
global memory consists of whole ones, which an array of 197 rows or of 72 columns does not. There a
matrix lies in blocks of columns, each of them as wide as its swizzle: in such a block, rows in order
and rows in tiles are the same bytes. TMA is given the rows in order, of which it reads and writes any
number, and wgmma the tiles.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

WGMMA_ROWS = 64
"""Rows of the accumulator of one wgmma instruction, and so of what a warpgroup works on at a time."""

SWIZZLED_COLUMNS = 64
"""Columns of 16 bits in the widest swizzle, 128 bytes."""

_WIDTHS = (64, 32, 16)
"""Columns of each swizzle there is."""


def ceil_to(count: int, multiple: int) -> int:
    """The least multiple that is not below the count."""
    return -(-count // multiple) * multiple


def shared_width(size: int) -> int:
    """How many columns a matrix of `size` columns takes in shared memory, where TMA adds zeros."""
    for width in reversed(_WIDTHS):
        if size <= width:
            return width
    return ceil_to(size, 16)


@dataclass(frozen=True)
class Columns:
    """How the columns of matrices [rows, size] of 16-bit numbers lie in shared memory."""

    widths: tuple[int, ...]
    """Of the blocks, one after the other; together they may be wider than the matrix."""
    swizzled: int
    """Columns of a swizzle, which is less than the width only in a single block copied by tiles."""
    copies_tiles: bool = False
    """Whether TMA copies through the tiles of 8 rows."""

    @classmethod
    def of(
        cls, size: int, lengths: tuple[int, ...], contracted: int = SWIZZLED_COLUMNS
    ) -> "Columns":
        """Of arrays [.., length, .., size] of these lengths.

        `contracted` is how many rows a product contracts, if it does: it takes as many of them at a
        time as a swizzle has columns.
        """
        whole = size <= SWIZZLED_COLUMNS or size % SWIZZLED_COLUMNS == 0
        if whole and all(length % 8 == 0 for length in lengths):
            width = shared_width(size)
            return cls((width,), _widest(width, contracted), copies_tiles=True)
        return cls.in_blocks(size, contracted)

    @classmethod
    def in_blocks(cls, size: int, contracted: int = SWIZZLED_COLUMNS) -> "Columns":
        """Of arrays of any length: as many blocks of 64 columns as are full, and narrower ones."""
        widest = _widest(SWIZZLED_COLUMNS, contracted)
        widths: list[int] = []
        while sum(widths) < size:
            rest = ceil_to(size - sum(widths), 16)
            widths.append(next(w for w in _WIDTHS if w <= min(rest, widest)))
        return cls(tuple(widths), widest)

    @classmethod
    def in_wide_blocks(cls, size: int) -> "Columns":
        """As `in_blocks`, with 64 columns in each block, so that all of them are alike."""
        return cls((SWIZZLED_COLUMNS,) * -(-size // SWIZZLED_COLUMNS), SWIZZLED_COLUMNS)

    @property
    def width(self) -> int:
        return sum(self.widths)

    @property
    def count(self) -> int:
        """How many blocks there are, and so copies and products of a matrix."""
        return len(self.widths)

    def memory(self, leading: tuple[int, ...], rows: int, dtype: Any) -> list[Any]:
        """The memory of `leading` matrices with so many rows, a multiple of 8; see `Matrix`."""
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
        """Those of a product [64, width], one for each block."""
        return [plgpu.ACC((WGMMA_ROWS, width), jnp.float32) for width in self.widths]

    def zeros(self) -> list[jax.Array]:
        """The values that such accumulators start with."""
        return [
            plgpu.layout_cast(jnp.zeros((WGMMA_ROWS, width), jnp.float32), plgpu.Layout.WGMMA)
            for width in self.widths
        ]

    def bytes(self, rows: int) -> int:
        """Of a matrix with so many rows."""
        return 2 * rows * self.width


def _widest(columns: int, contracted: int) -> int:
    return next(w for w in _WIDTHS if columns % w == 0 and contracted % w == 0)


def tiled(leading: tuple[int, ...], rows: int, columns: int, dtype: Any, swizzled: int = 64) -> Any:
    """The memory of `leading` matrices [rows, columns] that registers fill and wgmma reads."""
    tiling = plgpu.TilingTransform((8, swizzled))
    swizzle = plgpu.SwizzleTransform(swizzled * jnp.dtype(dtype).itemsize)
    return plgpu.SMEM((*leading, rows, columns), dtype, transforms=(tiling, swizzle))


class Heads(NamedTuple):
    """The heads of an array [B, rows, heads, width] in global memory, counted from `first`."""

    gmem: Any
    first: int = 0


def queries_keys_values(refs: Any, heads: int, key_heads: int) -> tuple[Heads, Heads, Heads]:
    """Of three arrays, or of one that holds all of their heads after each other."""
    if len(refs) == 1:
        return tuple(Heads(refs[0], first) for first in (0, heads, heads + key_heads))
    return tuple(Heads(ref) for ref in refs)


class Matrix(NamedTuple):
    """One matrix, in blocks of columns; `operands` for wgmma and registers, `copied` for TMA."""

    operands: tuple[Any, ...]
    copied: tuple[Any, ...]

    @classmethod
    def of(cls, memory: Any, *index: Any) -> "Matrix":
        """That with a leading index, of the references to what `Columns.memory` describes."""
        # A block has one description for both purposes, or two.
        blocks = [tuple(block) for block in memory]
        operands, copied = tuple(b[0] for b in blocks), tuple(b[-1] for b in blocks)
        if index:
            operands, copied = (tuple(r.at[index] for r in refs) for refs in (operands, copied))
        return cls(operands, copied)

    def rows(self, start: int, count: int) -> "Matrix":
        """Some rows, both numbers multiples of 8."""
        index = pl.ds(start, count)
        return Matrix(*(tuple(ref.at[index] for ref in refs) for refs in self))

    def _places(self, heads: Heads, batch, start, head):
        """The place of each block in global memory, rows from `start` on."""
        # Indices that are known while tracing would be refused where a block ends beyond its axis.
        traced_zero = batch * 0
        first = 0
        for block in self.copied:
            rows, width = block.shape
            columns = pl.ds(traced_zero + first, width)
            rows_from_start = pl.ds(traced_zero + start, rows)
            yield heads.gmem.at[batch, rows_from_start, heads.first + head, columns]
            first += width

    def fill(self, heads: Heads, batch: Any, start: Any, head: Any, barrier: Any) -> None:
        """Starts the copies, each of which arrives at the barrier; zeros beyond the array's end."""
        places = self._places(heads, batch, start, head)
        for copied, place in zip(self.copied, places, strict=True):
            plgpu.copy_gmem_to_smem(place, copied, barrier)

    def store(self, blocks: list[jax.Array]) -> None:
        """Writes registers, for TMA and wgmma to see."""
        for operand, block in zip(self.operands, blocks, strict=True):
            operand[...] = block.astype(operand.dtype)
        plgpu.commit_smem()

    def write(self, heads: Heads, batch: Any, start: Any, head: Any) -> None:
        """Starts the copies to global memory, nothing beyond the array's end."""
        places = self._places(heads, batch, start, head)
        for copied, place in zip(self.copied, places, strict=True):
            plgpu.copy_smem_to_gmem(copied, place)


def multiply_transposed(accumulator: Any, a: Matrix | list[jax.Array], b: Matrix) -> None:
    """Adds a b^T, a sum over the columns of both, to the accumulator; a may be blocks in registers."""
    a_blocks = a.operands if isinstance(a, Matrix) else a
    for a_block, b_block in zip(a_blocks, b.operands, strict=True):
        plgpu.wgmma(accumulator, a_block, b_block.transpose((1, 0)))


def multiply(accumulators: Any, a: jax.Array, b: Matrix) -> None:
    """Adds a b, with a in registers or a reference, to the accumulators of b's blocks."""
    for accumulator, block in zip(accumulators, b.operands, strict=True):
        plgpu.wgmma(accumulator, a, block)


def load_accumulators(accumulators: Any, wait_n: int = 0) -> list[jax.Array]:
    """Their values, when all products but the last `wait_n` are done."""
    return [plgpu.wgmma_accumulator_load(acc, wait_n=wait_n) for acc in accumulators]
