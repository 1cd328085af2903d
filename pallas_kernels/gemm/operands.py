"""How the matrices of a product lie in shared memory, and how they are copied there.

wgmma reads a matrix whose rows are cut into pieces of 128 bytes, swizzled, eight rows of a piece after
one another. The copy engine writes that order by itself where the array in global memory is a whole
number of pieces wide. At any other width it can still write one piece of every row: it clips at the
end of the array and fills with zeros beyond it. A block of memory that is one piece wide is the same
bytes under both descriptions, so arrays of every width whose rows begin at multiples of 16 bytes are
copied as they are.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import ALLOCATION_BYTES, MBARRIER_BYTES

SWIZZLE_BYTES = 128
"""The longest piece of a row that is swizzled as one."""


def swizzled_columns(dtype: Any) -> int:
    """Columns in the longest piece of a row."""
    return SWIZZLE_BYTES // jnp.dtype(dtype).itemsize


def bits_of(dtype: Any) -> int:
    """Bits of a number in memory, also of int4, two of which are in a byte."""
    return 4 if dtype == jnp.int4 else 8 * jnp.dtype(dtype).itemsize


def tiled(shape: tuple[int, ...], dtype: Any, columns: int) -> Any:
    """Shared memory in pieces of `columns`, 8 rows of a piece after one another, as wgmma reads it."""
    swizzle = columns * bits_of(dtype) // 8
    transforms = (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def block(leading: tuple[int, ...], rows: int, columns: int, dtype: Any) -> plgpu.RefUnion:
    """`leading` blocks [rows, columns] of shared memory, one piece wide, under two descriptions.

    The first is for wgmma and registers, the second for copies from and to arrays of any width.
    """
    shape = (*leading, rows, columns)
    swizzle = plgpu.SwizzleTransform(columns * bits_of(dtype) // 8)
    return plgpu.RefUnion(
        tiled(shape, dtype, columns), plgpu.SMEM(shape, dtype, transforms=(swizzle,))
    )


def allocated_bytes(scratch: Any) -> int:
    """Shared memory that Mosaic takes for the arrays and barriers of a kernel."""

    def bytes_of(memory: Any) -> int:
        if isinstance(memory, plgpu.Barrier | plgpu.ClusterBarrier):
            return MBARRIER_BYTES * math.prod(jax.tree.leaves(memory.num_barriers))
        if isinstance(memory, plgpu.RefUnion):
            return max(allocated_bytes(view) for view in memory.refs)
        size = math.prod(memory.shape) * bits_of(memory.dtype) // 8
        return math.ceil(size / ALLOCATION_BYTES) * ALLOCATION_BYTES

    return sum(map(bytes_of, jax.tree.leaves(scratch)))


@dataclass(frozen=True)
class OperandTile:
    """A tile of an operand, as deep along the sums as a piece of a row is long."""

    span: int
    """Its rows of a or columns of b."""
    k_last: bool
    """Whether the sums run along the array's last axis."""
    whole_blocks: bool
    """Whether the array is a whole number of pieces wide, so that a copy may cover several."""
    dtype: Any
    depth: int = 0
    """Of a tile whose sums run along the array's last axis: how many, if fewer than a piece holds."""

    @property
    def tile_k(self) -> int:
        return self.depth or swizzled_columns(self.dtype)

    @property
    def one_copy(self) -> bool:
        """Whether the tile is more than one piece wide and nevertheless copied at once.

        An instruction then reads all of it, where otherwise each takes a block.
        """
        return not self.k_last and self.whole_blocks

    @property
    def blocks(self) -> int:
        """Pieces of memory that are copied by themselves."""
        if self.k_last or self.one_copy:
            return 1
        return self.span // swizzled_columns(self.dtype)

    @property
    def block_span(self) -> int:
        """Rows of a or columns of b in a block."""
        return self.span // self.blocks

    def memory(self, stages: int) -> Any:
        if self.one_copy:
            return tiled((stages, self.tile_k, self.span), self.dtype, swizzled_columns(self.dtype))
        if self.k_last:
            return block((stages, 1), self.span, self.tile_k, self.dtype)
        columns = swizzled_columns(self.dtype)
        return block((stages, self.blocks), self.tile_k, columns, self.dtype)

    def _blocks(self, memory: Any) -> tuple[Any, Any]:
        """The memory as instructions and as copies see it."""
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
          matrix: in global memory, one view of two axes.
          memory: what has been allocated by `memory`.
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
        """What instructions read of one of equal shares of a tile.

        Yields:
          The part of the share's span, and the memory with the array's axes.
        """
        span = self.span // shares
        if self.one_copy:
            assert shares == 1
            yield slice(0, span), memory.at[slot]
            return
        blocks = self._blocks(memory)[0]
        if self.k_last:
            rows = blocks.at[slot, 0]
            yield slice(0, span), rows if shares == 1 else rows.at[pl.ds(share * span, span)]
            return
        count = self.blocks // shares
        for index in range(count):
            part = slice(index * self.block_span, (index + 1) * self.block_span)
            yield part, blocks.at[slot, index if shares == 1 else share * count + index]
