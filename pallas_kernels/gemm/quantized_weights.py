"""Weights of 8 or 4 bits in a product: from global memory to operands in registers.

Weights are stored as [N, K], so that a thread loads adjacent numbers of a row, as many at a time as a
register holds. In registers they are converted to x's dtype, which holds each of them exactly; entries
of a codebook are rounded. A scale of a whole column is left to the epilogue. A small-M product
multiplies a group's float32 sum along K by its scale, and so rounds no weight. Large tiles, and all
products of codebook weights, multiply the weights by the scale and round them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gemm import dequantize
from pallas_kernels.gemm.dequantize import BLOCK
from pallas_kernels.gemm.operands import bits_of, block

DTYPES = (jnp.int8, jnp.int4, jnp.float8_e4m3fn, jnp.float8_e5m2)
"""Dtypes of weights; int4 are packed in int32 words."""
_X_COLUMNS = 64
"""Numbers of x in 128 bytes, which are swizzled as one unit."""
_BLOCK_WORDS = BLOCK // 8
PIECE = 64
"""Elements along K of each WGMMA operand that `QuantizedTile.pieces` yields."""


@dataclass(frozen=True)
class Format:
    """The storage of a product's weights, apart from their shape."""

    dtype: Any
    group: int = 0
    """Weights along K that share a scale; 0 where the epilogue scales whole columns."""
    has_zero_point: bool = False
    codebook: tuple[float, ...] | None = None
    """The 16 numbers that codes of uint4 index, two codes in a byte [N, K / 2]; None without codes."""
    scales_exponents: bool = False
    """True if scales are bytes of E8M0, powers of two: byte b is 2^(b - 127)."""

    @property
    def in_words(self) -> bool:
        """True if the weights are int4, packed in words [N, K / 8] in the order described at `BLOCK`."""
        return self.dtype == jnp.int4

    @property
    def bits(self) -> int:
        return 4 if self.codebook is not None else bits_of(self.dtype)

    @property
    def arrays(self) -> int:
        """Number of arrays of a product's weights: values, scales, zero points, a codebook's table."""
        of_groups = int(self.group > 0) + int(self.has_zero_point)
        return 1 + of_groups + int(self.has_table)

    @property
    def has_table(self) -> bool:
        """True if codes are looked up in a table."""
        return self.codebook is not None and self.codebook != dequantize.E2M1

    @property
    def of_element(self) -> int:
        """Number of weights in one element of the array that stores them."""
        if self.in_words:
            return 8
        return 1 if self.codebook is None else 2


def why_unsupported(*, dtype: Any, group: int, k: int, step: int) -> str | None:
    """Returns None if x [M, k] @ w [N, k]^T, w of `dtype`, can run in K steps of `step`, else why not.

    Args:
      group: weights along K that share a scale; 0 for one scale a column.
    """
    if dtype not in (*DTYPES, jnp.uint4):
        return f"it takes weights of int8, int4 and float8, and they are {jnp.dtype(dtype)}"
    row_bytes = 16
    of_byte = 2 if dtype == jnp.uint4 else 1
    if dtype != jnp.int4 and k % (of_byte * row_bytes):
        return (
            f"it copies rows of weights that are whole multiples of {row_bytes} bytes, and a row has"
            f" {k} numbers, of which a byte holds {of_byte}"
        )
    small = (16, 32, 64) if dtype == jnp.uint4 else (32, 64)
    if group and group not in small and group % step:
        names = ", ".join(map(str, small))
        return f"it takes groups of {names} and multiples of {step}, and they have {group}"
    return None


@dataclass(frozen=True)
class QuantizedTile:
    """`span` columns of the weights [N, K] in one K step of `step_k` elements."""

    format: Format
    span: int
    x_dtype: Any
    step_k: int

    in_registers = True

    @property
    def copies(self) -> int:
        return self.blocks + self.format.arrays - 1 - int(self.format.has_table)

    @property
    def scales_weights(self) -> bool:
        """True if weights are multiplied by scales before they are summed, also in small-M products."""
        return self.format.codebook is not None

    @property
    def blocks(self) -> int:
        """Blocks of `BLOCK` elements along K in a step."""
        return self.step_k // BLOCK

    @property
    def group(self) -> int:
        """Elements along K of one operand: those that share a scale, at most a block."""
        return min(self.format.group or BLOCK, BLOCK)

    @property
    def scale_rows(self) -> int:
        """Number of a column's scales in one K step."""
        return max(1, self.step_k // (self.format.group or self.step_k))

    def _scale_row(self, group: int) -> int:
        """Returns the row, among a step's scales, that a group uses."""
        return group * self.scale_rows // self.groups

    @property
    def groups(self) -> int:
        """Number of operands, of `group` elements along K each, in a step."""
        return self.step_k // self.group

    @property
    def x_columns(self) -> int:
        """Elements of x along K in one swizzled piece, as a WGMMA reads them."""
        return _X_COLUMNS if self.scales_weights else min(_X_COLUMNS, self.group)

    def memory(self, stages: int) -> Mapping[str, Any]:
        f = self.format
        memory: dict[str, Any] = {}
        if f.in_words:
            # A row of a block is 64 bytes: two rows cover all banks, and need no swizzle.
            shape = (stages * self.blocks, self.span, _BLOCK_WORDS)
            memory["values"] = plgpu.SMEM(shape, jnp.int32)
        elif f.codebook is not None:
            leading = (stages * self.blocks,)
            memory["values"] = block(leading, self.span, dequantize.CODE_BYTES, jnp.uint8)
            if f.has_table:
                memory["table"] = plgpu.SMEM(dequantize.TABLE_SHAPE, jnp.int32)
        else:
            # A row of a block is 128 bytes, which are swizzled as one unit.
            memory["values"] = block((stages * self.blocks,), self.span, BLOCK, f.dtype)
        # A TMA copy into shared memory must begin at a multiple of 128 bytes: a stage of scales or zero
        # points of one byte has as many rows as that takes.
        rows = self.scale_rows
        while rows * self.span % 128:
            rows += 1
        if f.group and f.scales_exponents:
            memory["scale"] = plgpu.SMEM((stages, rows, self.span), jnp.uint8)
        elif f.group:
            memory["scale"] = plgpu.SMEM((stages, self.scale_rows, self.span), jnp.float32)
        if f.has_zero_point:
            memory["zero_point"] = plgpu.SMEM((stages, rows, self.span), jnp.int8)
        return memory

    def copy_table(self, arrays: Sequence[Any], memory: Mapping[str, Any], landed: Any) -> None:
        """Starts the copy of a codebook's table, which stays in shared memory."""
        plgpu.copy_gmem_to_smem(arrays[-1], memory["table"], landed)

    def copy(
        self,
        arrays: Sequence[Any],
        memory: Mapping[str, Any],
        slot: Any,
        start: Any,
        k_start: Any,
        landed: Any,
    ) -> None:
        """Starts the copies of a K step of `span` columns from `start` on, and of their scales."""
        values, *of_groups = arrays
        columns = pl.ds(start, self.span)
        for index, place in enumerate(self._pieces_for_copies(memory["values"], slot)):
            width = place.shape[1]
            first = lax.div(k_start, jnp.int32(self.format.of_element)) + index * width
            plgpu.copy_gmem_to_smem(values.at[columns, pl.ds(first, width)], place, landed)
        names = [name for name in ("scale", "zero_point") if name in memory]
        for name, array in zip(names, of_groups[: len(names)], strict=True):
            first = lax.div(k_start, jnp.int32(self.format.group)) if self.format.group else 0
            place = memory[name].at[slot]
            if place.shape[0] > self.scale_rows:
                place = place.at[: self.scale_rows]
            rows = pl.ds(first, self.scale_rows)
            plgpu.copy_gmem_to_smem(array.at[rows, columns], place, landed)

    def _pieces_for_copies(self, memory: Any, slot: Any) -> Iterator[Any]:
        """Yields the memory of each block of a step, in the view for copies."""
        for_copies = memory if self.format.in_words else memory[1]
        for index in range(self.blocks):
            yield for_copies.at[slot * self.blocks + index]

    @property
    def _is_integer(self) -> bool:
        of_codes = self.format.codebook is not None
        return not of_codes and bool(jnp.issubdtype(self.format.dtype, jnp.integer))

    @property
    def unit(self) -> float:
        """Factor by which integers in registers are too small; sums or scales take it. 1 for floats."""
        return dequantize.unit(self.x_dtype) if self._is_integer else 1.0

    def operands(self, memory: Mapping[str, Any], slot: Any) -> Iterator[jax.Array]:
        """Yields each group's weights [span, group], divided by `unit`, as WGMMA operands."""
        return self._floats(memory, slot, 0, self.span)

    def dequantized(
        self, memory: Mapping[str, Any], slot: Any, start: int, width: int
    ) -> Iterator[jax.Array]:
        """Yields each group's dequantised weights in x's dtype, for the columns from `start` on.

        A scale of a whole column is left to the epilogue here too.
        """
        for group, w in enumerate(self._floats(memory, slot, start, width)):
            if self.format.group:
                scale = self._of_group(memory["scale"], slot, group, start, width)
                w = self._scaled(w, scale * self.unit)
            elif self.unit != 1:
                w = w * self.unit
            yield w

    def pieces(
        self, memory: Mapping[str, Any], slot: Any, start: Any = 0, width: int = 0
    ) -> Iterator[jax.Array]:
        """Yields the dequantised weights [width, PIECE] of a step, for the columns from `start` on.

        A scale of a whole column, times `unit`, is left to the epilogue. Each piece is dequantised when
        the caller asks for it, while the tensor cores multiply the piece before it.
        """
        width = width or self.span
        for index in range(self.blocks):
            load = self._loader(memory, slot, index, start, width)
            shifts = self._shifts(memory, slot, index, start, width) if self._is_integer else []
            scales = self._scales(memory, slot, index, start, width)
            for piece in range(BLOCK // PIECE):
                yield load(piece, _part_of(shifts, piece), _part_of(scales, piece))

    def _scales(
        self, memory: Mapping[str, Any], slot: Any, index: int, start: Any, width: int
    ) -> list[jax.Array]:
        """Returns the scales [width] of each group of a block times `unit`; none without groups."""
        if not self.format.group:
            return []
        groups = BLOCK // self.group
        return [
            self._of_group(memory["scale"], slot, group, start, width) * self.unit
            for group in range(index * groups, (index + 1) * groups)
        ]

    def _codes_loader(
        self, memory: Mapping[str, Any], slot: Any, index: int, start: Any, width: int
    ) -> Callable[[int, Sequence[jax.Array], Sequence[jax.Array]], jax.Array]:
        """Returns a function from a piece, its shifts (not used) and scales to its weights.

        The stored codes are indices into a codebook; the function reads them from shared memory.
        """
        stored = memory["values"][0].at[slot * self.blocks + index]
        if width < self.span:
            stored = stored.at[pl.ds(start, width)]
        narrows = self.x_dtype == jnp.bfloat16

        def piece_of(piece: int, shifts: Sequence[Any], scales: Sequence[Any]) -> jax.Array:
            del shifts
            narrow = [s.astype(self.x_dtype) for s in scales if narrows]
            w = dequantize.from_codes(stored, memory.get("table"), narrow, piece, self.x_dtype)
            return w if narrows else self._scaled_parts(w, scales)

        return piece_of

    def _scaled_parts(self, w: jax.Array, scales: Sequence[jax.Array]) -> jax.Array:
        """Multiplies equal parts of the columns of w [width, K], each by its scales [width]."""
        if not scales:
            return w
        each = w.shape[1] // len(scales)
        parts = [
            self._scaled(w[:, i * each : (i + 1) * each], scale) for i, scale in enumerate(scales)
        ]
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)

    def _loader(
        self, memory: Mapping[str, Any], slot: Any, index: int, start: Any, width: int
    ) -> Callable[[int, Sequence[jax.Array], Sequence[jax.Array]], jax.Array]:
        """Loads a block; returns a function from a piece's index, shifts and scales to its weights.

        The weights of a piece are [width, PIECE], dequantised.
        """
        if self.format.codebook is not None:
            return self._codes_loader(memory, slot, index, start, width)
        stored = (memory["values"] if self.format.in_words else memory["values"][0]).at[
            slot * self.blocks + index
        ]
        if width < self.span:
            stored = stored.at[pl.ds(start, width)]
        in_words = self.format.in_words
        layout = plgpu.Layout.WGMMA_8BIT if in_words else plgpu.Layout.WGMMA
        numbers = plgpu.load(stored, layout=layout)

        def piece_of(piece: int, shifts: Sequence[Any], scales: Sequence[Any]) -> jax.Array:
            # bfloat16 has the range of float32 scales; with float16, `_scaled` applies them in float32.
            narrow = [s.astype(jnp.bfloat16) for s in scales if self.x_dtype == jnp.bfloat16]
            if in_words:
                w = dequantize.from_words(numbers, shifts, narrow, piece)
            else:
                part = numbers[:, piece * PIECE : (piece + 1) * PIECE]
                if self._is_integer:
                    w = dequantize.from_bytes(part, shifts, narrow)
                else:
                    w, narrow = _from_float8(part, self.x_dtype), []
            return w if narrow else self._scaled_parts(w, scales)

        return piece_of

    def _scaled(self, w: jax.Array, scale: jax.Array) -> jax.Array:
        """Returns each row of w [width, group] times its scale, in x's dtype."""
        if self.x_dtype == jnp.float16:
            # Below 6e-5 float16 is subnormal and loses bits; scales of float8_e5m2 weights are smaller.
            wide = w.astype(jnp.float32) * lax.broadcast_in_dim(scale, w.shape, (0,))
            return wide.astype(self.x_dtype)
        return w * lax.broadcast_in_dim(scale.astype(self.x_dtype), w.shape, (0,))

    def _of_group(self, memory: Any, slot: Any, group: int, start: int, width: int) -> jax.Array:
        """Returns the scales or zero points of a group, for some columns."""
        numbers = memory.at[slot, self._scale_row(group)]
        if width < self.span:
            numbers = numbers.at[pl.ds(start, width)]
        loaded = plgpu.load(numbers, layout=plgpu.Layout.WGMMA.reduce(1))
        return _from_exponents(loaded) if loaded.dtype == jnp.uint8 else loaded

    def _floats(
        self, memory: Mapping[str, Any], slot: Any, start: int, width: int
    ) -> Iterator[jax.Array]:
        """Yields the weights of each group without their scale, divided by `unit`.

        Each thread loads what it multiplies. Loads of four bytes would be fewer, but their layout takes
        three more instructions for each to exchange pairs between threads.
        """
        for_registers = memory["values"] if self.format.in_words else memory["values"][0]
        for index in range(self.blocks):
            stored = for_registers.at[slot * self.blocks + index]
            if width < self.span:
                stored = stored.at[pl.ds(start, width)]
            if not self._is_integer:
                numbers = plgpu.load(stored, layout=plgpu.Layout.WGMMA)
                wide = _from_float8(numbers, self.x_dtype)
            elif self.format.in_words:
                words = plgpu.load(stored, layout=plgpu.Layout.WGMMA_8BIT)
                wide = dequantize.from_words(words, self._shifts(memory, slot, index, start, width))
            else:
                numbers = plgpu.load(stored, layout=plgpu.Layout.WGMMA)
                wide = dequantize.from_bytes(
                    numbers, self._shifts(memory, slot, index, start, width)
                )
            for first in range(0, BLOCK, self.group):
                yield wide if self.group == BLOCK else wide[:, first : first + self.group]

    def _shifts(
        self, memory: Mapping[str, Any], slot: Any, index: int, start: int, width: int
    ) -> list[jax.Array]:
        """Returns a vector [width] for each group: what is added to its unsigned integers over `unit`.

        Without zero points, one vector is for all groups.
        """
        added = dequantize.ADDED_TO_WORDS if self.format.in_words else dequantize.ADDED_TO_BYTES
        if not self.format.has_zero_point:
            splat = jnp.full((width,), -added / self.unit, self.x_dtype)
            return [plgpu.layout_cast(splat, plgpu.Layout.WGMMA.reduce(1))]
        groups = BLOCK // self.group
        zero_points = (
            self._of_group(memory["zero_point"], slot, group, start, width).astype(jnp.float32)
            for group in range(index * groups, (index + 1) * groups)
        )
        # The sum is exact: bfloat16 holds every integer up to 256.
        return [((z + added) * (-1 / self.unit)).astype(self.x_dtype) for z in zero_points]

    def scales(self, memory: Mapping[str, Any], slot: Any, rows: int) -> Iterator[jax.Array]:
        """Yields the scales of each group along K, broadcast to the shape of its sums [span, rows]."""
        for group in range(self.groups):
            scale = self._of_group(memory["scale"], slot, group, 0, self.span)
            yield lax.broadcast_in_dim(scale, (self.span, rows), (0,))


def _part_of(numbers: Sequence[jax.Array], piece: int) -> Sequence[jax.Array]:
    """Returns the shifts or scales of a piece, given a block's, each for an equal part along K."""
    if len(numbers) < 2:
        return numbers
    count = max(1, len(numbers) * PIECE // BLOCK)
    return numbers[piece * count : (piece + 1) * count]


def _from_exponents(stored: jax.Array) -> jax.Array:
    """Converts E8M0 exponents to powers of two in float32: 0 to the subnormal 2^-127, 255 to NaN."""
    exponent = stored.astype(jnp.int32)
    mantissa = jnp.where((exponent == 0) | (exponent == 255), jnp.int32(1 << 22), jnp.int32(0))
    return lax.bitcast_convert_type((exponent << 23) | mantissa, jnp.float32)


def _from_float8(numbers: jax.Array, dtype: Any) -> jax.Array:
    # Hopper's instructions convert float8 only to float16.
    w = numbers.astype(jnp.float16)
    return w if dtype == jnp.float16 else w.astype(jnp.float32).astype(dtype)
