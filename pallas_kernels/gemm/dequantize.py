"""Conversion of integers of 8 and 4 bits to floats of 16 bits, in registers.

Subnormal floats, and the normal ones below twice the smallest normal, are equally far apart. There the
bits of a float count steps of the smallest one, so that an unsigned integer of up to 8 bits is a float
as it stands, after nothing but masks. One multiply-add brings it to (integer + shift) / `unit`, exactly.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

BLOCK = 128
"""Elements along K in a block of int4 weights, whose words are stored together.

Of every 16 elements along K, thread t of four holds four for a WGMMA: 2 t, 2 t + 1, 2 t + 8 and 2 t + 9.
A word has those of two such runs, the four even ones in its low half and the odd ones in its high half,
8 added to each. The four words of a thread for 128 elements are adjacent, 16 bytes.
"""
ADDED_TO_BYTES, ADDED_TO_WORDS = 128, 8
"""Offsets that are added to int8 and int4 numbers to make them unsigned."""


_FACTORS = {"bf16x2": 2.0**127, "f16x2": 2.0**15}
"""Largest power of two of bfloat16 and float16, by PTX's name for a pair of numbers."""


def unit(dtype: Any) -> float:
    """Returns the divisor left in dequantised integers; no factor is large enough to remove it."""
    factor = _FACTORS["bf16x2" if dtype == jnp.bfloat16 else "f16x2"]
    return 1 / (float(jnp.finfo(dtype).smallest_subnormal) * factor)


def from_bytes(stored: jax.Array, shifts: Sequence[jax.Array]) -> jax.Array:
    """Returns (number + `ADDED_TO_BYTES`) / `unit` + shift for each number of int8 [N, K].

    Args:
      stored: in the layout of WGMMA, so that nothing is exchanged between threads.
      shifts: [N] each, in the dtype of the result, one for each of as many equal parts of the columns.
    """
    return _in_registers(_floats_of_bytes, stored, plgpu.Layout.WGMMA, shifts, stored.shape)


def from_words(words: jax.Array, shifts: Sequence[jax.Array]) -> jax.Array:
    """Returns (number + `ADDED_TO_WORDS`) / `unit` + shift for each number [N, 128] of words [N, 16].

    Nothing moves between threads: a thread's words become the registers of its own operand.

    Args:
      shifts: like those of `from_bytes`.
    """
    shape = (words.shape[0], BLOCK)
    return _in_registers(_floats_of_words, words, plgpu.Layout.WGMMA_8BIT, shifts, shape)


def _in_registers(
    function: Callable[[Any, Sequence[Any]], Any],
    stored: jax.Array,
    layout: Any,
    shifts: Sequence[jax.Array],
    shape: tuple[int, int],
) -> jax.Array:
    wgmma = plgpu.Layout.WGMMA

    @plgpu.inline_mgpu(
        arg_types=(layout, *[wgmma] * len(shifts)),
        return_type=plgpu.ShapeDtypeStruct(shape, shifts[0].dtype, layout=wgmma),
    )
    def convert(ctx, stored, *shifts):
        del ctx
        return function(stored, shifts)

    columns = (shape[0], _TILE_COLUMNS)
    return convert(stored, *(jax.lax.broadcast_in_dim(shift, columns, (0,)) for shift in shifts))


_TILE_COLUMNS = 8
"""Columns that one register of each thread holds together, in the layout of WGMMA."""


def _floats_of_bytes(stored: Any, shifts: Sequence[Any]) -> Any:
    """Emits the code of `from_bytes` when a kernel is lowered, and returns its registers."""
    i16, i32 = (ir.IntegerType.get_signless(bits) for bits in (16, 32))
    # Flip the sign bits of two numbers of a word, which adds 128 to each.
    flipped = _word(ADDED_TO_BYTES * 0x00010001)
    registers = _Registers(stored.shape, shifts)
    for place, pair in np.ndenumerate(stored.registers):
        both = arith.extui(i32, mgpu.utils.bitcast(pair, i16))
        apart = mgpu.utils.prmt(both, _word(0), _word(0x4140))
        registers.put(place, arith.xori(apart, flipped))
    return registers.array


def _floats_of_words(words: Any, shifts: Sequence[Any]) -> Any:
    """Emits the code of `from_words` when a kernel is lowered, and returns its registers."""
    registers = _Registers((words.shape[0], BLOCK), shifts)
    # A register's indices: block of 64 rows, and which 8 of a warp's 16 rows.
    for (tile, _, _, _, half, *ones), register in np.ndenumerate(words.registers):
        for word in range(4):
            element = vector.extract(register, [], [word])
            for pair in range(4):
                if pair == 2:
                    element = arith.shrui(element, _word(8))
                # Every other pair lies four bits higher, where it is sixteen times as large.
                weight = 16 if pair % 2 else 1
                place = (tile, 4 * word + pair, 0, 0, half, *(0 for _ in ones))
                registers.put(place, arith.andi(element, _word(0x000F000F * weight)), weight)
    return registers.array


class _Registers:
    """Registers of the dequantised matrix, filled one by one."""

    def __init__(self, shape: tuple[int, int], shifts: Sequence[Any]):
        self._shifts = shifts
        self._registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape(shape), dtype=object)

    def put(self, place: tuple[int, ...], integers: Any, weight: int = 1) -> None:
        """Converts two unsigned integers, each `weight` times too large, in the halves of a word."""
        tile, column, *rest = place
        part = column * len(self._shifts) // self._registers.shape[1]
        shift = self._shifts[part].registers[tile, 0, *rest]
        of = shift.type
        name = "bf16x2" if of.element_type == ir.BF16Type.get() else "f16x2"
        number = ir.FloatAttr.get(of.element_type, _FACTORS[name] / weight)
        factor = arith.constant(of, ir.DenseElementsAttr.get_splat(of, number))
        i32 = ir.IntegerType.get_signless(32)
        operands = [integers, *(mgpu.utils.bitcast(floats, i32) for floats in (factor, shift))]
        # Inline PTX, because LLVM would compute in float32.
        floats = llvm.inline_asm(
            i32,
            operands,
            f"fma.rn.{name} $0, $1, $2, $3;",
            "=r,r,r,r",
            has_side_effects=False,
        )
        self._registers[place] = mgpu.utils.bitcast(floats, of)

    @property
    def array(self) -> Any:
        return mgpu.FragmentedArray(
            _registers=self._registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None
        )


def _word(value: int) -> Any:
    return mgpu.utils.c(value, ir.IntegerType.get_signless(32))
