"""Layouts of a product's operands in shared memory, and the copies into them.

WGMMA reads a matrix in swizzled pieces, each 128 bytes of every row, with a piece's rows in groups of
eight. TMA writes that order by itself where the array in global memory is a whole number of pieces
wide. At any other width TMA can still write one piece of every row, row by row: it clips at the end of
the array and fills with zeros beyond it. A block of memory that is one piece wide has the same bytes in
both layouts, so arrays of every width whose rows begin at multiples of 16 bytes need no padded copy.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper
from pallas_kernels.hopper import ALLOCATION_BYTES, MBARRIER_BYTES

SWIZZLE_BYTES = 128
"""Bytes of the longest piece of a row that is swizzled as one unit."""


COPIED_ROWS = 256
"""Largest number of rows of one TMA copy."""


_DTYPES = (jnp.bfloat16, jnp.float16)


def why_unfit(
    compute_capability: tuple[int, int] | None, dtypes: Mapping[str, Any], out_dtype: Any = None
) -> str | None:
    """Returns None if a kernel can multiply operands of 16 bits, else the reason.

    Args:
      compute_capability: of the GPU, or None where there is none.
      dtypes: dtypes of the operands, by name.
      out_dtype: of the result; None where it is the operands' own.
    """
    if reason := hopper.why_unfit(compute_capability):
        return reason
    for name, dtype in dtypes.items():
        if dtype not in _DTYPES:
            return f"it takes bfloat16 and float16, and {name} has dtype {jnp.dtype(dtype)}"
    if len(set(map(jnp.dtype, dtypes.values()))) > 1:
        return "its operands must have one dtype, and have several dtypes"
    if out_dtype is not None and out_dtype not in (*_DTYPES, jnp.float32):
        return f"its results are float32, bfloat16 and float16, not {jnp.dtype(out_dtype)}"
    return None


def swizzled_columns(dtype: Any) -> int:
    """Returns the columns of `dtype` in 128 bytes, the longest piece that is swizzled as one unit."""
    return SWIZZLE_BYTES // jnp.dtype(dtype).itemsize


def bits_of(dtype: Any) -> int:
    """Returns the bits of an element in memory, also for int4, two of which share a byte."""
    return 4 if dtype == jnp.int4 else 8 * jnp.dtype(dtype).itemsize


def tiled(shape: tuple[int, ...], dtype: Any, columns: int) -> Any:
    """Returns shared memory of a shape, as WGMMA reads it: swizzled tiles of 8 rows x `columns`."""
    swizzle = columns * bits_of(dtype) // 8
    transforms = (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def block(leading: tuple[int, ...], rows: int, columns: int, dtype: Any) -> plgpu.RefUnion:
    """Returns shared memory [*leading, rows, columns], one swizzled piece wide, as two views.

    The first is for WGMMA and registers, the second for copies from and to arrays of any width.
    """
    shape = (*leading, rows, columns)
    swizzle = plgpu.SwizzleTransform(columns * bits_of(dtype) // 8)
    return plgpu.RefUnion(
        tiled(shape, dtype, columns), plgpu.SMEM(shape, dtype, transforms=(swizzle,))
    )


def allocated_bytes(scratch: Any) -> int:
    """Returns the bytes of shared memory that Mosaic allocates for a kernel's arrays and barriers."""

    def bytes_of(memory: Any) -> int:
        if isinstance(memory, plgpu.Barrier | plgpu.ClusterBarrier):
            return MBARRIER_BYTES * math.prod(jax.tree.leaves(memory.num_barriers))
        if isinstance(memory, plgpu.RefUnion):
            return max(allocated_bytes(view) for view in memory.refs)
        size = math.prod(memory.shape) * bits_of(memory.dtype) // 8
        return math.ceil(size / ALLOCATION_BYTES) * ALLOCATION_BYTES

    return sum(map(bytes_of, jax.tree.leaves(scratch)))


def matrix_of(array: Any, *index: Any) -> Callable[[Any, Any], Any]:
    """Returns the function from spans of rows and columns to that part of the matrix `array[index]`."""
    return lambda first, second: array.at[(*index, first, second)]


@dataclass(frozen=True)
class OperandTile:
    """A tile of the operand a or b, with at most 128 bytes (one swizzled piece) along K."""

    span: int
    """Rows of a or columns of b in the tile."""
    k_last: bool
    """True if K is the array's last axis."""
    whole_blocks: bool
    """True if the array's width is a multiple of 128 bytes, so that a copy may cover several pieces."""
    dtype: Any
    depth: int = 0
    """Elements of the tile along K, if they fill less than 128 bytes; else 0."""
    columns: int = 0
    """Columns of a swizzled piece, if they fill less than 128 bytes and K is the first axis; else 0. In
    Mosaic a WGMMA takes a multiple of as many elements along K."""

    @property
    def tile_k(self) -> int:
        return self.depth or swizzled_columns(self.dtype)

    @property
    def piece_columns(self) -> int:
        return self.columns or self.tile_k

    @property
    def one_copy(self) -> bool:
        """True if one TMA copy covers the tile, even if it is several pieces of 128 bytes wide.

        One WGMMA then reads the whole tile; otherwise each reads one block.
        """
        return not self.k_last and self.whole_blocks

    @property
    def blocks(self) -> int:
        """Number of blocks of shared memory that hold the tile, each filled by one copy."""
        if self.one_copy:
            return 1
        return pl.cdiv(self.span, COPIED_ROWS) if self.k_last else self.span // self.piece_columns

    @property
    def block_span(self) -> int:
        """Rows of a or columns of b in a block."""
        return self.span // self.blocks

    def memory(self, stages: int) -> Any:
        if self.one_copy:
            return tiled((stages, self.tile_k, self.span), self.dtype, self.piece_columns)
        if self.k_last:
            return block((stages, self.blocks), self.block_span, self.tile_k, self.dtype)
        return block((stages, self.blocks), self.tile_k, self.piece_columns, self.dtype)

    def _blocks(self, memory: Any) -> tuple[Any, Any]:
        """Returns the memory in two views, for WGMMA and for copies."""
        for_instructions, for_copies = memory
        return for_instructions, for_copies

    def copy(
        self,
        matrix: Any,
        memory: Any,
        slot: Any,
        start: Any,
        k_start: Any,
        landed: Any,
        collective_axes: str | None = None,
    ) -> None:
        """Starts the copies of a tile, each of which arrives at the barrier `landed`.

        Args:
          matrix: function from spans of the array's first and second axis to that part of the array; see
            `matrix_of`.
          memory: shared memory of the type that the method `memory` returns.
          start: the first row of a or column of b.
        """
        for index in range(self.blocks):
            span = pl.ds(start + index * self.block_span, self.block_span)
            k_span = pl.ds(k_start, self.tile_k)
            plgpu.copy_gmem_to_smem(
                matrix(span, k_span) if self.k_last else matrix(k_span, span),
                memory.at[slot] if self.one_copy else self._blocks(memory)[1].at[slot, index],
                landed,
                collective_axes=collective_axes,
            )

    def operands(
        self, memory: Any, slot: Any, share: Any = 0, shares: int = 1
    ) -> Iterator[tuple[slice, Any]]:
        """Yields the WGMMA operands in one of `shares` equal parts of a tile.

        Yields:
          Rows of a or columns of b, counted from the part's first, and a view of their shared memory.
        """
        span = self.span // shares
        if self.one_copy:
            assert shares == 1
            yield slice(0, span), memory.at[slot]
            return
        blocks = self._blocks(memory)[0]
        if self.k_last and self.blocks == 1:
            rows = blocks.at[slot, 0]
            yield slice(0, span), rows if shares == 1 else rows.at[pl.ds(share * span, span)]
            return
        count = self.blocks // shares
        for index in range(count):
            part = slice(index * self.block_span, (index + 1) * self.block_span)
            yield part, blocks.at[slot, index if shares == 1 else share * count + index]
