"""Integers of 8 and 4 bits converted to floats, since the interpreter does not model registers."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.mosaic import gpu as mgpu
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func

from jaxfused.runtime.packing import pack_words
from pallas_kernels.gemm import dequantize
from tests.support import mosaic_interpreter
from tests.support.register_machine import computed

LANES = np.arange(32)
SHAPE = (64, 128)


def of_first_warp(tile, layout, length):
    """Returns the first warp's part of a tile by register: [registers, 32, length]."""
    with mlir.make_ir_context():
        shape = layout.registers_shape(tile.shape)
    registers = []
    for _, column, _, _, half, *_ in np.ndindex(shape):
        row = 8 * half + LANES // 4
        columns = length * (4 * column + LANES % 4)
        registers.append(tile[row[:, None], columns[:, None] + np.arange(length)])
    return registers


def fragments(registers, layout, shape, is_signed=None):
    registers = np.array(registers, dtype=object).reshape(layout.registers_shape(shape))
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=is_signed)


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("bits", [8, 4])
def test_registers_become_what_the_interpreter_has(bits, dtype, parts, monkeypatch):
    rng = np.random.default_rng(0)
    numbers = rng.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), SHAPE).astype(np.int8)
    shifts = (rng.integers(-(2**bits), 1, (parts, SHAPE[0])) / dequantize.unit(dtype)).astype(dtype)
    if bits == 8:
        stored, layout, length = numbers, mgpu.WGMMA_LAYOUT, 2
        convert, stated = dequantize._floats_of_bytes, "from_bytes"
    else:
        stored, layout, length = np.asarray(pack_words(numbers)), mgpu.WGMMA_LAYOUT_8BIT, 4
        convert = functools.partial(dequantize._floats_of_words, range(4))
        stated = "from_words"
    of_words = of_first_warp(stored, layout, length)
    wide = (np.tile(shift[:, None], (1, 8)) for shift in shifts)
    of_shifts = [of_first_warp(shift, mgpu.WGMMA_LAYOUT, 2) for shift in wide]
    with mlir.make_ir_context(), ir.Location.unknown(), ir.InsertionPoint(ir.Module.create().body):
        integer = ir.IntegerType.get_signless(8 if bits == 8 else 32)
        number = ir.BF16Type.get() if dtype == jnp.bfloat16 else ir.F16Type.get()
        arguments = [ir.VectorType.get((length,), integer)] * len(of_words)
        arguments += [ir.VectorType.get((2,), number)] * sum(map(len, of_shifts))
        block = func.FuncOp("convert", ir.FunctionType.get(arguments, [])).add_entry_block()
        values = list(block.arguments)
        with ir.InsertionPoint(block):
            of_stored = fragments(values[: len(of_words)], layout, stored.shape, is_signed=True)
            rows = np.array(values[len(of_words) :], dtype=object).reshape(parts, -1)
            of_rows = [fragments(row, mgpu.WGMMA_LAYOUT, (SHAPE[0], 8)) for row in rows]
            floats = convert(of_stored, of_rows, ())
        assert floats.shape == SHAPE and floats.layout == mgpu.WGMMA_LAYOUT
        known = (*of_words, *(register for of_part in of_shifts for register in of_part))
        actual = computed(block, known, list(floats.registers.flat))
    mosaic_interpreter.upcast_integers(monkeypatch)
    expected = getattr(dequantize, stated)(jnp.asarray(stored), list(map(jnp.asarray, shifts)))
    expected = of_first_warp(np.asarray(expected), mgpu.WGMMA_LAYOUT, 2)
    np.testing.assert_array_equal(np.array(actual), np.array(expected))
    # The kernel multiplies the integer divided by a power of two.
    columns = np.arange(SHAPE[1]) * parts // SHAPE[1]
    integers = (
        numbers + 2.0 ** (bits - 1) + shifts[columns].T.astype(float) * dequantize.unit(dtype)
    )
    truth = of_first_warp(integers / dequantize.unit(dtype), mgpu.WGMMA_LAYOUT, 2)
    np.testing.assert_array_equal(np.array(actual).astype(float), np.array(truth))
