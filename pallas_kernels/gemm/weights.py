"""The weights of a small-M product: from global memory to the left operand of WGMMAs.

WGMMAs read weights of x's dtype from shared memory. Weights of another dtype are converted in registers,
from which a WGMMA can take its left operand too: global memory is read in their own dtype, and no
converted copy is ever written.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gemm.operands import OperandTile, swizzled_columns, tiled

INSTRUCTION_COLUMNS = 64
"""Columns of w that one WGMMA multiplies."""
_CONVERTED = (jnp.float32,)


class Weights(Protocol):
    """A tile of w: some of its columns in one K step."""

    @property
    def copies(self) -> int:
        """Number of TMA copies of a tile, each of which arrives at a barrier."""

    @property
    def in_registers(self) -> bool:
        """True if WGMMAs read the tile from registers, which must not change before the WGMMAs end."""

    def memory(self, stages: int) -> Any:
        """Returns shared memory for `stages` tiles."""

    def copy(
        self,
        matrix: Callable[[Any, Any], Any],
        memory: Any,
        slot: Any,
        start: Any,
        k_start: Any,
        landed: Any,
    ) -> None:
        """Starts the copies of the tile from column `start` on, as `OperandTile.copy` does."""

    def operands(self, memory: Any, slot: Any) -> Iterator[tuple[slice, Any]]:
        """Yields spans of columns, and their weights [columns, step] as the left operand of WGMMAs."""


def why_unsupported(dtype: Any, x_dtype: Any, last_axis: int) -> str | None:
    """Returns None if weights of `dtype` can be multiplied with x as they are stored, else why not.

    Args:
      last_axis: size of w's last axis in memory.
    """
    if dtype == x_dtype:
        return None
    if dtype not in _CONVERTED:
        return f"it converts weights of float32, and they are {jnp.dtype(dtype)}"
    columns = swizzled_columns(dtype)
    if last_axis % columns:
        return (
            f"it converts weights whose last axis is a multiple of {columns}, and has {last_axis}"
        )
    return None


def weights(dtype: Any, x_dtype: Any, span: int, *, k_last: bool) -> Weights:
    """Returns a tile of `span` columns of w, converted to x's dtype where w has another dtype."""
    if dtype == x_dtype:
        # Each WGMMA reads one block of 64 columns, so a copy need not cover the whole tile.
        tile = OperandTile(span=span, k_last=k_last, whole_blocks=False, dtype=dtype)
        return _Multiplied(tile)
    return _Converted(span, k_last, dtype, x_dtype)


@dataclass(frozen=True)
class _Multiplied:
    """Weights of x's dtype, which WGMMAs read from shared memory."""

    tile: OperandTile

    @property
    def copies(self) -> int:
        return self.tile.blocks

    @property
    def in_registers(self) -> bool:
        return False

    def memory(self, stages: int) -> Any:
        return self.tile.memory(stages)

    def copy(self, matrix, memory, slot, start, k_start, landed) -> None:
        self.tile.copy(matrix, memory, slot, start, k_start, landed)

    def operands(self, memory: Any, slot: Any) -> Iterator[tuple[slice, Any]]:
        for columns, w in self.tile.operands(memory, slot):
            if not self.tile.k_last:
                yield columns, w.transpose((1, 0))
                continue
            for start in range(0, self.tile.span, INSTRUCTION_COLUMNS):
                part = slice(start, start + INSTRUCTION_COLUMNS)
                yield part, w if self.tile.span == INSTRUCTION_COLUMNS else w.at[part]


@dataclass(frozen=True)
class _Converted:
    """Weights of another dtype, which are converted to x's in registers."""

    span: int
    k_last: bool
    dtype: Any
    x_dtype: Any

    @property
    def copies(self) -> int:
        return 1

    @property
    def in_registers(self) -> bool:
        return True

    @property
    def tile_k(self) -> int:
        """Elements along K in a step: 128 bytes of x."""
        return swizzled_columns(self.x_dtype)

    def memory(self, stages: int) -> Any:
        shape = (self.span, self.tile_k) if self.k_last else (self.tile_k, self.span)
        return tiled((stages, *shape), self.dtype, swizzled_columns(self.dtype))

    def copy(self, matrix, memory, slot, start, k_start, landed) -> None:
        columns, k_span = pl.ds(start, self.span), pl.ds(k_start, self.tile_k)
        source = matrix(columns, k_span) if self.k_last else matrix(k_span, columns)
        plgpu.copy_gmem_to_smem(source, memory.at[slot], landed)

    def operands(self, memory: Any, slot: Any) -> Iterator[tuple[slice, Any]]:
        w = memory.at[slot]
        w = plgpu.load(w if self.k_last else w.transpose((1, 0)), layout=plgpu.Layout.WGMMA)
        yield slice(0, self.span), w.astype(self.x_dtype)
