"""Weights of 8 or 4 bits in a product of few rows: from global memory to operands in registers.

The weights lie as [N, K], so that a thread finds the numbers of a row next to one another, as many at a
time as a register holds. They become numbers of x's dtype, which holds each of them exactly, in
registers. A scale that a whole column of the product shares is left to the epilogue; one of a group
along the sums multiplies the sum of that group in float32, so that no weight is ever rounded.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.product.operands import bits_of, block

DTYPES = (jnp.int8, jnp.int4, jnp.float8_e4m3fn, jnp.float8_e5m2)
"""int4 only in words."""
_X_COLUMNS = 64
"""Numbers of x in 128 bytes, which are swizzled as one."""


@dataclass(frozen=True)
class Format:
    """How the weights of a product are stored, beside their shape."""

    dtype: Any
    group: int = 0
    """Weights along the sums that share a scale; 0 where the epilogue scales whole columns."""
    has_zero_point: bool = False

    @property
    def in_words(self) -> bool:
        """int4 lie in words of 32 bits [N, K / 8], as threads take them: see `BLOCK`."""
        return self.dtype == jnp.int4

    @property
    def bits(self) -> int:
        return bits_of(self.dtype)

    @property
    def arrays(self) -> int:
        """How many arrays a product's weights are made of."""
        return 1 + int(self.group > 0) + int(self.has_zero_point)


def why_unsupported(
    *, dtype: Any, group: int, has_zero_point: bool, k: int, n: int, step: int
) -> str | None:
    """None where a product [M, k] @ [n, k]^T with such weights can run in steps of `step`, else why not.

    Args:
      group: weights along the sums that share a scale; 0 for one scale a column.
    """
    if dtype not in DTYPES:
        return f"it takes weights of int8, int4 and float8, and they are {jnp.dtype(dtype)}"
    row_bytes = 16
    if dtype != jnp.int4 and k % row_bytes:
        return (
            f"it copies rows of weights that are whole multiples of {row_bytes} bytes, and a row has"
            f" {k} numbers of a byte"
        )
    if group and group not in (32, 64) and group % step:
        return f"it takes groups of 32, 64 and multiples of {step}, and they have {group}"
    if has_zero_point and n % row_bytes:
        return (
            f"it copies zero points of a multiple of {row_bytes} columns, and there are {n} columns"
        )
    return None


@dataclass(frozen=True)
class QuantizedTile:
    """`span` columns of the weights in a step along the sums."""

    format: Format
    span: int
    x_dtype: Any
    step_k: int
    """Numbers along the sums in a step."""

    in_registers = True

    @property
    def copies(self) -> int:
        return self.blocks + self.format.arrays - 1

    @property
    def blocks(self) -> int:
        """Of a step."""
        return self.step_k // BLOCK

    @property
    def group(self) -> int:
        """Numbers along the sums that are multiplied one after another by instructions."""
        return min(self.format.group or BLOCK, BLOCK)

    @property
    def scale_rows(self) -> int:
        """Scales along the sums that a step needs for a column."""
        return max(1, self.step_k // (self.format.group or self.step_k))

    def _scale_row(self, group: int) -> int:
        """Which of them is that of a group."""
        return group * self.scale_rows // self.groups

    @property
    def groups(self) -> int:
        """Of a step."""
        return self.step_k // self.group

    @property
    def x_columns(self) -> int:
        """Numbers of x that an instruction finds swizzled as one."""
        return min(_X_COLUMNS, self.group)

    def memory(self, stages: int) -> Mapping[str, Any]:
        f = self.format
        memory: dict[str, Any] = {}
        if f.in_words:
            # A row of a block is 64 bytes, so that threads find two rows in all banks unswizzled.
            shape = (stages * self.blocks, self.span, _BLOCK_WORDS)
            memory["values"] = plgpu.SMEM(shape, jnp.int32)
        else:
            # Numbers of a byte, which are swizzled together.
            memory["values"] = block((stages * self.blocks,), self.span, BLOCK, f.dtype)
        if f.group:
            memory["scale"] = plgpu.SMEM((stages, self.scale_rows, self.span), jnp.float32)
        if f.has_zero_point:
            # A copy begins at a multiple of 128 bytes.
            rows = self.scale_rows
            while rows * self.span % 128:
                rows += 1
            memory["zero_point"] = plgpu.SMEM((stages, rows, self.span), jnp.int8)
        return memory

    def copy(
        self,
        arrays: Sequence[Any],
        memory: Mapping[str, Any],
        slot: Any,
        start: Any,
        k_start: Any,
        landed: Any,
    ) -> None:
        """Starts the copies of the columns from `start` on, of a step, with their scales."""
        values, *of_groups = arrays
        columns = pl.ds(start, self.span)
        for index, place in enumerate(self._pieces_for_copies(memory["values"], slot)):
            width = place.shape[1]
            scale = 8 if self.format.in_words else 1
            first = lax.div(k_start, jnp.int32(scale)) + index * width
            plgpu.copy_gmem_to_smem(values.at[columns, pl.ds(first, width)], place, landed)
        names = [name for name in ("scale", "zero_point") if name in memory]
        for name, array in zip(names, of_groups, strict=True):
            first = lax.div(k_start, jnp.int32(self.format.group)) if self.format.group else 0
            place = memory[name].at[slot]
            if place.shape[0] > self.scale_rows:
                place = place.at[: self.scale_rows]
            rows = pl.ds(first, self.scale_rows)
            plgpu.copy_gmem_to_smem(array.at[rows, columns], place, landed)

    def _pieces_for_copies(self, memory: Any, slot: Any) -> Iterator[Any]:
        """Yields the memory of a step as copies see it, block by block."""
        for_copies = memory if self.format.in_words else memory[1]
        for index in range(self.blocks):
            yield for_copies.at[slot * self.blocks + index]

    def operands(self, memory: Mapping[str, Any], slot: Any) -> Iterator[jax.Array]:
        """Yields the weights [span, group] of each group in registers, as instructions take them."""
        for group, w in enumerate(self._floats(memory["values"], slot, 0, self.span)):
            offset = self._offset(memory, slot, group, 0, self.span)
            yield w if offset is None else w - lax.broadcast_in_dim(offset, w.shape, (0,))

    def dequantized(
        self, memory: Mapping[str, Any], slot: Any, start: int, width: int
    ) -> Iterator[jax.Array]:
        """Yields for each group what the weights of columns from `start` on stand for, in x's dtype.

        One scale for a whole column is left to the epilogue here too.
        """
        for group, w in enumerate(self._floats(memory["values"], slot, start, width)):
            offset = self._offset(memory, slot, group, start, width)
            if offset is not None:
                w = w - lax.broadcast_in_dim(offset, w.shape, (0,))
            if self.format.group:
                scale = self._of_group(memory["scale"], slot, group, start, width)
                w = self._scaled(w, scale)
            yield w

    def _scaled(self, w: jax.Array, scale: jax.Array) -> jax.Array:
        """Each row of w [width, group] times its scale, in x's dtype."""
        if self.x_dtype == jnp.float16:
            # float16 does not hold scales below 6e-5 to all its digits, and float8_e5m2's are smaller.
            wide = w.astype(jnp.float32) * lax.broadcast_in_dim(scale, w.shape, (0,))
            return wide.astype(self.x_dtype)
        return w * lax.broadcast_in_dim(scale.astype(self.x_dtype), w.shape, (0,))

    def _of_group(self, memory: Any, slot: Any, group: int, start: int, width: int) -> jax.Array:
        """The scales or zero points of a group, for some columns."""
        numbers = memory.at[slot, self._scale_row(group)]
        if width < self.span:
            numbers = numbers.at[pl.ds(start, width)]
        return plgpu.load(numbers, layout=plgpu.Layout.WGMMA.reduce(1))

    def _floats(self, values: Any, slot: Any, start: int, width: int) -> Iterator[jax.Array]:
        """Yields the numbers of each group, with what `_offset` returns added to them."""
        for_registers = values if self.format.in_words else values[0]
        for index in range(self.blocks):
            stored = for_registers.at[slot * self.blocks + index]
            if width < self.span:
                stored = stored.at[pl.ds(start, width)]
            if self.format.in_words:
                words = plgpu.load(stored, layout=plgpu.Layout.WGMMA_8BIT)
                wide = from_words(words, self.x_dtype)
            else:
                # Of this layout a thread's registers need few exchanges to become an operand.
                narrow = plgpu.load(stored, layout=plgpu.Layout.WGMMA_UPCAST_2X)
                wide = _to_floats(narrow, self.x_dtype)
            for first in range(0, BLOCK, self.group):
                yield wide if self.group == BLOCK else wide[:, first : first + self.group]

    def _offset(
        self, memory: Mapping[str, Any], slot: Any, group: int, start: int, width: int
    ) -> jax.Array | None:
        """What has to be subtracted from the numbers of a group [width], if anything."""
        base = _word_base(self.x_dtype) + 8 if self.format.in_words else 0
        if not self.format.has_zero_point:
            if not base:
                return None
            splat = jnp.full((width,), base, self.x_dtype)
            return plgpu.layout_cast(splat, plgpu.Layout.WGMMA.reduce(1))
        zero_point = self._of_group(memory["zero_point"], slot, group, start, width)
        # Every integer up to 256 is a number of bfloat16.
        return (zero_point.astype(jnp.float32) + base).astype(self.x_dtype)

    def scales(self, memory: Mapping[str, Any], slot: Any, rows: int) -> Iterator[jax.Array]:
        """Yields for each group what multiplies its sums [span, rows]."""
        for group in range(self.groups):
            scale = self._of_group(memory["scale"], slot, group, 0, self.span)
            yield lax.broadcast_in_dim(scale, (self.span, rows), (0,))


BLOCK = 128
"""Numbers along the sums whose words are stored together.

Of 16 numbers along the sums a thread of four, t, gives an instruction four: 2 t, 2 t + 1, 2 t + 8
and 2 t + 9. A word has those of two such runs, the four even ones in its low half and the odd ones in
its high half, 8 added to each. The four words of a thread for 128 numbers are neighbours, 16 bytes.
"""
_BLOCK_WORDS = BLOCK // 8


def _word_base(dtype: Any) -> float:
    """The number of a dtype whose last four bits are the units."""
    return 128.0 if dtype == jnp.bfloat16 else 1024.0


def from_words(words: jax.Array, dtype: Any) -> jax.Array:
    """Of words [N, 16] the numbers [N, 128], to each of which 8 and `_word_base` are added.

    Four bits under the exponent of a power of two are a float without a conversion. Nothing is moved:
    what becomes of a thread's words are the very registers of its operand.
    """
    layout, shape = plgpu.Layout.WGMMA_8BIT, (words.shape[0], BLOCK)

    @plgpu.inline_mgpu(
        arg_types=(layout,),
        return_type=plgpu.ShapeDtypeStruct(shape, dtype, layout=plgpu.Layout.WGMMA),
    )
    def convert(ctx, words):
        del ctx
        return _operand_of_words(words, shape, dtype)

    return convert(words)


def _operand_of_words(words: Any, shape: tuple[int, int], dtype: Any) -> Any:
    """The registers of `from_words`, when a kernel is lowered."""
    target = mgpu.WGMMA_LAYOUT
    registers = np.empty(target.registers_shape(shape), dtype=object)
    narrow = ir.VectorType.get((2,), mgpu.utils.dtype_to_ir_type(jnp.dtype(dtype)))
    i32 = ir.IntegerType.get_signless(32)
    exponent = mgpu.utils.c(0x43004300 if dtype == jnp.bfloat16 else 0x64006400, i32)
    mask = mgpu.utils.c(0x000F000F, i32)
    # Of each register: which 64 rows, and which 8 rows of 16.
    for (tile, _, _, _, half, *ones), register in np.ndenumerate(words.registers):
        for word in range(4):
            element = vector.extract(register, [], [word])
            for pair in range(4):
                shifted = arith.shrui(element, mgpu.utils.c(4 * pair, i32)) if pair else element
                # One instruction, of which the compiler makes two where both are constants.
                numbers = llvm.inline_asm(
                    i32,
                    [shifted, mask, exponent],
                    "lop3.b32 $0, $1, $2, $3, 0xea;",
                    "=r,r,r,r",
                    has_side_effects=False,
                )
                place = (tile, 4 * word + pair, 0, 0, half, *(0 for _ in ones))
                registers[place] = mgpu.utils.bitcast(numbers, narrow)
    return mgpu.FragmentedArray(_registers=registers, _layout=target, _is_signed=None)


def _to_floats(w: jax.Array, dtype: Any) -> jax.Array:
    """Weights, as they were loaded, in a dtype of 16 bits and in the layout of instructions."""
    # Narrow registers are exchanged, since fewer of them are.
    w = plgpu.layout_cast(w, plgpu.Layout.WGMMA)
    if jnp.issubdtype(w.dtype, jnp.integer):
        return w.astype(jnp.bfloat16) if dtype == jnp.bfloat16 else w.astype(dtype)
    # The hardware converts float8 to float16 alone.
    w = w.astype(jnp.float16)
    return w if dtype == jnp.float16 else w.astype(jnp.float32).astype(dtype)
