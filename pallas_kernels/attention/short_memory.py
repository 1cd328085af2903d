"""Matrices in shared memory that TMA fills or empties row by row, for any number of rows.

wgmma takes its operands in tiles of 8 rows; a copy through those tiles exists only where the array in
global memory has a multiple of 8 rows, which 197 is not. Without the row tiles such a copy clips and
fills with zeros at any row, and in a block of columns as wide as the swizzle both descriptions are
the same bytes. So every block of columns is one piece of memory under two descriptions.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

COLUMNS = 64
"""Of a block: 128 bytes, the widest swizzle. Narrower heads take a whole block all the same."""

_SWIZZLE = plgpu.SwizzleTransform(128)


def ceil_to(count: int, multiple: int) -> int:
    """The least multiple that is not below the count."""
    return -(-count // multiple) * multiple


def blocks(width: int) -> int:
    """How many blocks of columns hold a matrix of `width` columns."""
    return -(-width // COLUMNS)


def square(leading: tuple[int, ...], dtype: Any) -> Any:
    """The memory of `leading` matrices [64, 64] that registers fill and wgmma reads."""
    return _operand(leading, COLUMNS, dtype)


def matrix(leading: tuple[int, ...], rows: int, width: int, dtype: Any) -> list[plgpu.RefUnion]:
    """The memory of `leading` matrices [rows, width], rows a multiple of 8; see `Matrix`."""
    copied = plgpu.SMEM((*leading, rows, COLUMNS), dtype, transforms=(_SWIZZLE,))
    return [plgpu.RefUnion(_operand(leading, rows, dtype), copied) for _ in range(blocks(width))]


def _operand(leading, rows, dtype):
    tiles = plgpu.TilingTransform((8, COLUMNS))
    return plgpu.SMEM((*leading, rows, COLUMNS), dtype, transforms=(tiles, _SWIZZLE))


class Shape(NamedTuple):
    """B, T, S, N, K, H, V."""

    batch: int
    query_count: int
    key_count: int
    heads: int
    key_heads: int
    head_size: int
    value_size: int

    @classmethod
    def of(cls, query: jax.Array, key: jax.Array, value: jax.Array) -> "Shape":
        """That of three arrays."""
        batch, query_count, heads, head_size = query.shape
        key_count, key_heads, value_size = value.shape[1:]
        return cls(batch, query_count, key_count, heads, key_heads, head_size, value_size)

    @classmethod
    def of_packed(cls, packed: jax.Array, key_heads: int) -> "Shape":
        """That of one array [B, T, N + 2 K, H]."""
        batch, count, all_heads, size = packed.shape
        return cls(batch, count, count, all_heads - 2 * key_heads, key_heads, size, size)


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
    def of(cls, unions: Any, *index: Any) -> "Matrix":
        """That with a leading index, of the references to what `matrix` describes."""
        operands, copied = zip(*unions, strict=True)
        if index:
            operands, copied = (tuple(r.at[index] for r in refs) for refs in (operands, copied))
        return cls(operands, copied)

    def rows(self, start: int, count: int) -> "Matrix":
        """Some rows, both numbers multiples of 8."""
        index = pl.ds(start, count)
        return Matrix(*(tuple(ref.at[index] for ref in refs) for refs in self))

    def _places(self, heads: Heads, batch, start, head):
        """The place of each block in global memory, rows from `start` on."""
        rows = self.copied[0].shape[0]
        # Indices that are known while tracing would be refused where a block ends beyond its axis.
        traced_zero = batch * 0
        for block in range(len(self.copied)):
            columns = pl.ds(traced_zero + block * COLUMNS, COLUMNS)
            rows_from_start = pl.ds(traced_zero + start, rows)
            yield heads.gmem.at[batch, rows_from_start, heads.first + head, columns]

    def fill(self, heads: Heads, batch: Any, start: Any, head: Any, barrier: Any) -> None:
        """Starts the copies, each of which arrives at the barrier; zeros beyond the array's end."""
        places = self._places(heads, batch, start, head)
        for copied, place in zip(self.copied, places, strict=True):
            plgpu.copy_gmem_to_smem(place, copied, barrier)

    def write(self, heads: Heads, batch: Any, start: Any, head: Any) -> None:
        """Starts the copies to global memory, nothing beyond the array's end."""
        places = self._places(heads, batch, start, head)
        for copied, place in zip(self.copied, places, strict=True):
            plgpu.copy_smem_to_gmem(copied, place)


def accumulators(width: int) -> list[Any]:
    """Those of a product [64, width], one for each block of columns."""
    return [plgpu.ACC((64, COLUMNS), jnp.float32)] * blocks(width)


def multiply_transposed(accumulator: Any, a: Matrix, b: Matrix) -> None:
    """Adds a b^T, a sum over the columns of both, to the accumulator."""
    for a_block, b_block in zip(a.operands, b.operands, strict=True):
        plgpu.wgmma(accumulator, a_block, b_block.transpose((1, 0)))


def multiply(block_accumulators: Any, a: jax.Array, b: Matrix) -> None:
    """Adds a b, with a in registers or a reference, to the accumulators of its blocks."""
    for accumulator, block in zip(block_accumulators, b.operands, strict=True):
        plgpu.wgmma(accumulator, a, block)
