"""Sums over a warp's rows, thread by thread, since the interpreter does not model registers."""

import numpy as np
import pytest
from jax.experimental.mosaic import gpu as mgpu
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func

from pallas_kernels.gemm import column_sums
from tests.support.register_machine import computed

LANES = np.arange(32)


@pytest.mark.parametrize(("rows", "columns"), [(64, 32), (128, 32), (64, 64)])
def test_a_warp_sums_its_rows(rows, columns):
    layout = mgpu.WGMMA_LAYOUT
    shape = layout.registers_shape((rows, columns))
    tile = np.random.default_rng(0).integers(-9, 10, (rows, columns)).astype(np.float32)
    registers = np.empty((*shape, 32, 2), np.float32)
    for place in np.ndindex(shape):
        first_row = 64 * place[0] + 8 * place[4]  # of the first warp
        row, column = first_row + LANES // 4, 8 * place[1] + 2 * (LANES % 4)
        registers[place] = tile[row[:, None], column[:, None] + np.arange(2)]
    count = int(np.prod(shape))
    with mlir.make_ir_context(), ir.Location.unknown(), ir.InsertionPoint(ir.Module.create().body):
        pair = ir.VectorType.get((2,), ir.F32Type.get())
        arguments = [pair] * count + [ir.IntegerType.get_signless(32)]
        block = func.FuncOp("sum", ir.FunctionType.get(arguments, [])).add_entry_block()
        *values, lane = block.arguments
        values = np.array(values, dtype=object).reshape(shape)
        with ir.InsertionPoint(block):
            fragments = mgpu.FragmentedArray(_registers=values, _layout=layout, _is_signed=None)
            sums = column_sums._summed_registers(fragments, lane)
        assert sums.shape == (column_sums.WARPS, columns)
        known = (*registers.reshape(count, 32, 2), LANES)
        actual = np.stack(computed(block, known, list(sums.registers.flat)))
    # The order of threads by what they hold: 8 columns, one of two, four threads.
    threads = actual.reshape(columns // 32, 4, 2, 4).transpose(0, 1, 3, 2).reshape(columns)
    of_warp = tile.reshape(-1, 4, 16, columns)[:, 0].sum(axis=(0, 1))
    np.testing.assert_array_equal(threads, of_warp)
