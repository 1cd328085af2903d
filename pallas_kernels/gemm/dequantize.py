"""Conversion of integers of 8 and 4 bits, and of codes, to floats of 16 bits, in registers.

Subnormal floats, and normal ones below twice the smallest normal, are multiples of the smallest
subnormal, and their bits are the multiple. So an unsigned integer of up to 8 bits, once masked out, is
already the bits of a float. One multiply-add makes it (integer + shift) / `unit`, exactly.

A byte of two codes is looked up in a table of pairs of numbers in shared memory. Each lane of a warp has
a copy of the table in a bank of its own, so that lookups have no bank conflicts.
"""

import functools
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
A 32-bit word has a thread's elements of two such runs, each plus 8: those of even index in its low half,
those of odd index in its high half. The four words of a thread for 128 elements are adjacent, 16 bytes.
"""
ADDED_TO_BYTES, ADDED_TO_WORDS = 128, 8
"""Offsets that are added to int8 and int4 numbers to make them unsigned."""


_FACTORS = {"bf16x2": 2.0**127, "f16x2": 2.0**15}
"""Largest power of two of bfloat16 and float16, keyed by PTX's name for a pair of numbers."""


def unit(dtype: Any) -> float:
    """Returns the divisor left in dequantised integers: no power of two in `dtype` removes all of it."""
    factor = _FACTORS["bf16x2" if dtype == jnp.bfloat16 else "f16x2"]
    return 1 / (float(jnp.finfo(dtype).smallest_subnormal) * factor)


LANES = 32
TABLE_SHAPE = (256, LANES)
"""Shape of the table of a codebook of 16 numbers: an entry for each byte of two codes and each lane."""
CODE_BYTES = BLOCK // 2
"""Bytes of codes in a block."""


_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*_E2M1, *(-number for number in _E2M1))
"""The codebook of MXFP4 and NVFP4: a sign, two bits of exponent and one of mantissa."""


def table(codebook: tuple[float, ...], dtype: Any) -> np.ndarray:
    """Returns the table of a codebook, int32: for each byte its two numbers in `dtype`, of 16 bits."""
    bits = np.asarray(codebook, np.float32).astype(dtype).view(np.uint16).astype(np.uint32)
    codes = np.arange(256)
    pairs = (bits[codes & 15] | bits[codes >> 4] << 16).view(np.int32)
    return np.broadcast_to(pairs[:, None], TABLE_SHAPE).copy()


def from_codes(
    stored: Any, entries: Any | None, scales: Sequence[jax.Array], half: int, dtype: Any
) -> jax.Array:
    """Returns number * scale for half of the codes of a block: 64 numbers for each row of `stored`.

    Args:
      stored: reference to the bytes [N, 64] of a block, swizzled; two codes each.
      entries: reference to the `table` of the codebook for `dtype`; None for `E2M1`, whose bits are
        moved to their places in a float.
      scales: vectors [N] in `dtype`, one for each equal part of the columns; or none.
    """
    wgmma = plgpu.Layout.WGMMA
    shape = (stored.shape[0], BLOCK // 2)
    transforms = (plgpu.TilingTransform((8, CODE_BYTES)), plgpu.SwizzleTransform(CODE_BYTES))

    tables = [] if entries is None else [entries]

    @plgpu.inline_mgpu(
        arg_types=(
            plgpu.RefType(transforms),
            *[plgpu.RefType()] * len(tables),
            *[wgmma] * len(scales),
        ),
        return_type=plgpu.ShapeDtypeStruct(shape, dtype, layout=wgmma),
    )
    def convert(ctx, stored, *others):
        del ctx
        entries, scales = (others[0], others[1:]) if tables else (None, others)
        element_type = mgpu.utils.dtype_to_ir_type(dtype)
        return _floats_of_codes(half, shape, element_type, stored, entries, scales)

    columns = (shape[0], _TILE_COLUMNS)
    return convert(stored, *tables, *(jax.lax.broadcast_in_dim(s, columns, (0,)) for s in scales))


def from_bytes(
    stored: jax.Array, shifts: Sequence[jax.Array], scales: Sequence[jax.Array] = ()
) -> jax.Array:
    """Returns ((number + `ADDED_TO_BYTES`) / `unit` + shift) * scale for each number of int8 [N, K].

    Args:
      stored: in the layout of WGMMA, so that nothing is exchanged between threads.
      shifts: vectors [N] in the dtype of the result, one for each equal part of the columns.
      scales: like shifts; none for no factor.
    """
    return _in_registers(_floats_of_bytes, stored, plgpu.Layout.WGMMA, shifts, scales, stored.shape)


def from_words(
    words: jax.Array,
    shifts: Sequence[jax.Array],
    scales: Sequence[jax.Array] = (),
    half: int | None = None,
) -> jax.Array:
    """Returns ((number + `ADDED_TO_WORDS`) / `unit` + shift) * scale for the numbers of words [N, 16].

    Nothing moves between threads: a thread's words become the registers of its own operand.

    Args:
      shifts: like those of `from_bytes`, as are scales.
      half: the half of the 128 numbers that is dequantised, or None for all of them.
    """
    places = range(4) if half is None else range(2 * half, 2 * half + 2)
    function = functools.partial(_floats_of_words, places)
    shape = (words.shape[0], len(places) * BLOCK // 4)
    return _in_registers(function, words, plgpu.Layout.WGMMA_8BIT, shifts, scales, shape)


def _in_registers(
    function: Callable[[Any, Sequence[Any], Sequence[Any]], Any],
    stored: jax.Array,
    layout: Any,
    shifts: Sequence[jax.Array],
    scales: Sequence[jax.Array],
    shape: tuple[int, int],
) -> jax.Array:
    wgmma, count = plgpu.Layout.WGMMA, len(shifts)
    factors = [*shifts, *scales]

    @plgpu.inline_mgpu(
        arg_types=(layout, *[wgmma] * len(factors)),
        return_type=plgpu.ShapeDtypeStruct(shape, shifts[0].dtype, layout=wgmma),
    )
    def convert(ctx, stored, *factors):
        del ctx
        return function(stored, factors[:count], factors[count:])

    columns = (shape[0], _TILE_COLUMNS)
    return convert(stored, *(jax.lax.broadcast_in_dim(f, columns, (0,)) for f in factors))


_TILE_COLUMNS = 8
"""Columns that one register of every thread covers, in the layout of WGMMA."""


def _floats_of_bytes(stored: Any, shifts: Sequence[Any], scales: Sequence[Any]) -> Any:
    """Emits the code of `from_bytes` when a kernel is lowered; returns the registers of floats."""
    i16, i32 = (ir.IntegerType.get_signless(bits) for bits in (16, 32))
    # Flip the sign bits of two numbers of a word, which adds 128 to each.
    flipped = _word(ADDED_TO_BYTES * 0x00010001)
    registers = _Registers(stored.shape, shifts, scales)
    for place, pair in np.ndenumerate(stored.registers):
        both = arith.extui(i32, mgpu.utils.bitcast(pair, i16))
        apart = mgpu.utils.prmt(both, _word(0), _word(0x4140))
        registers.put(place, arith.xori(apart, flipped))
    return registers.array


def _floats_of_words(
    places: range, words: Any, shifts: Sequence[Any], scales: Sequence[Any]
) -> Any:
    """Emits the code of `from_words` when a kernel is lowered; returns the registers of floats."""
    shape = (words.shape[0], len(places) * BLOCK // 4)
    registers = _Registers(shape, shifts, scales)
    # A register's indices: block of 64 rows, and which 8 of a warp's 16 rows.
    for (tile, _, _, _, half, *ones), register in np.ndenumerate(words.registers):
        for index, word in enumerate(places):
            element = vector.extract(register, [], [word])
            for pair in range(4):
                if pair == 2:
                    element = arith.shrui(element, _word(8))
                # Every other pair lies four bits higher, where it is sixteen times as large.
                weight = 16 if pair % 2 else 1
                place = (tile, 4 * index + pair, 0, 0, half, *(0 for _ in ones))
                registers.put(place, arith.andi(element, _word(0x000F000F * weight)), weight)
    return registers.array


def _floats_of_codes(
    half: int,
    shape: tuple[int, int],
    element_type: Any,
    stored: Any,
    entries: Any,
    scales: Sequence[Any],
) -> Any:
    """Emits the code of `from_codes` when a kernel is lowered; returns the registers of floats.

    Of every 16 codes along K, thread t of four reads the bytes t and t + 4 of 8. Units of 16 bytes are
    swizzled by bits 1 and 2 of the row's index.
    """
    i8, i32 = (ir.IntegerType.get_signless(bits) for bits in (8, 32))
    registers = _Registers(shape, (), scales)
    codes = mgpu.utils.memref_ptr(stored)
    element = mgpu.utils.getelementptr
    thread = arith.remui(mgpu.utils.thread_idx(), _word(128))
    lane = arith.remui(thread, _word(LANES))
    group = arith.divui(lane, _word(4))
    row = arith.addi(arith.muli(arith.divui(thread, _word(LANES)), _word(16)), group)
    turn = arith.remui(arith.divui(group, _word(2)), _word(4))
    start = arith.addi(arith.muli(row, _word(CODE_BYTES)), arith.remui(lane, _word(4)))
    own = None if entries is None else element(mgpu.utils.memref_ptr(entries), [lane], i32)
    for chunk in range(2):
        place = arith.xori(turn, _word(2 * half + chunk))
        own_codes = element(codes, [arith.addi(start, arith.muli(place, _word(16)))], i8)
        for tile, eight, part in np.ndindex(shape[0] // 64, 2, 4):
            offset = (64 * tile + 8 * eight) * CODE_BYTES + 4 * part
            byte = llvm.load(i8, element(own_codes, [offset], i8))
            byte = arith.extui(i32, byte)
            if own is None:
                pair = _floats_of_e2m1(byte, element_type)
            else:
                pair = llvm.load(i32, element(own, [arith.muli(byte, _word(LANES))], i32))
            registers.put_floats(
                (tile, 4 * chunk + part, 0, 0, eight, 0, 0, 0, 0), pair, element_type
            )
    return registers.array


def _floats_of_e2m1(byte: Any, element_type: Any) -> Any:
    """Emits the code that makes two floats of a byte of E2M1; returns the word that holds them.

    A code's three bits below its sign go to a float's two lowest exponent bits and highest mantissa bit.
    The exponents differ by a constant, so one product with a power of two makes the number, exactly.
    """
    is_bfloat = element_type == ir.BF16Type.get()
    low = 6 if is_bfloat else 9  # bit index of the mantissa's bit
    name, factor = ("bf16x2", 0x7E807E80) if is_bfloat else ("f16x2", 0x74007400)
    high = low + 12  # the second code begins four bits higher, in the half word sixteen bits higher
    sizes = arith.muli(byte, _word(1 << low | 1 << high))
    signs = arith.muli(byte, _word(1 << 12 | 1 << 24))
    sizes = arith.andi(sizes, _word(0x00070007 << low))
    signs = arith.andi(signs, _word(0x80008000 - 2**32))
    bits = arith.ori(sizes, signs)
    i32 = ir.IntegerType.get_signless(32)
    return llvm.inline_asm(
        i32, [bits, _word(factor)], f"mul.rn.{name} $0, $1, $2;", "=r,r,r", has_side_effects=False
    )


class _Registers:
    """Registers of the dequantised matrix, filled one by one."""

    def __init__(self, shape: tuple[int, int], shifts: Sequence[Any], scales: Sequence[Any]):
        self._shifts, self._scales = shifts, scales
        self._registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape(shape), dtype=object)

    def put(self, place: tuple[int, ...], integers: Any, weight: int = 1) -> None:
        """Converts the two unsigned integers in a word's halves to floats, for the register `place`.

        Each integer is `weight` times too large.
        """
        shift = self._of_part(self._shifts, place)
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
        self.put_floats(place, floats, of.element_type)

    def put_floats(self, place: tuple[int, ...], floats: Any, element_type: Any) -> None:
        """Stores a word of two floats as register `place`, times their row's scale if there is one."""
        of = ir.VectorType.get((2,), element_type)
        if self._scales:
            i32 = ir.IntegerType.get_signless(32)
            scale = mgpu.utils.bitcast(self._of_part(self._scales, place), i32)
            name = "bf16x2" if element_type == ir.BF16Type.get() else "f16x2"
            floats = llvm.inline_asm(
                i32, [floats, scale], f"mul.rn.{name} $0, $1, $2;", "=r,r,r", has_side_effects=False
            )
        self._registers[place] = mgpu.utils.bitcast(floats, of)

    def _of_part(self, numbers: Sequence[Any], place: tuple[int, ...]) -> Any:
        """Returns the register with the shift or scale for the row and columns of register `place`."""
        tile, column, *rest = place
        part = column * len(numbers) // self._registers.shape[1]
        return numbers[part].registers[tile, 0, *rest]

    @property
    def array(self) -> Any:
        return mgpu.FragmentedArray(
            _registers=self._registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None
        )


def _word(value: int) -> Any:
    return mgpu.utils.c(value, ir.IntegerType.get_signless(32))
