"""Lowered operations of the kernel, computed one by one, since the interpreter lacks registers."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.mosaic import gpu as mgpu
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func

from pallas_kernels.gemm import interleaved_rope
from pallas_kernels.gemm.small_m import chunk_layout
from tests.support import mosaic_interpreter
from tests.support.register_machine import computed


@pytest.mark.parametrize("is_fixed", [0, 1])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize(
    ("layout", "columns"),
    [(mgpu.WGMMA_LAYOUT, 32), (chunk_layout(64).to_mgpu(), 64), (chunk_layout(128).to_mgpu(), 128)],
    ids=["wgmma", "rows of 64", "rows of 128"],
)
def test_registers_turn_as_the_interpreter_has_them_turn(
    layout, columns, dtype, is_fixed, monkeypatch
):
    shape = (64, columns)
    count, size = np.prod(layout.registers_shape(shape)), layout.vector_length
    rng = np.random.default_rng(0)
    x = rng.normal(size=(count, size)).astype(np.float32)
    angles = rng.uniform(-1, 1, size=(count, size)).astype(dtype) * (1 - is_fixed)
    with mlir.make_ir_context(), ir.Location.unknown(), ir.InsertionPoint(ir.Module.create().body):
        wide = ir.F32Type.get()
        narrow = ir.F16Type.get() if dtype == np.float16 else wide
        types = [ir.VectorType.get((size,), number) for number in (wide, narrow)]
        arguments = [kind for kind in types for _ in range(count)] + [narrow]
        block = func.FuncOp("turn", ir.FunctionType.get(arguments, [])).add_entry_block()
        registers = np.array(list(block.arguments), dtype=object)

        def fragments(registers):
            registers = registers.reshape(layout.registers_shape(shape))
            return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

        with ir.InsertionPoint(block):
            turned = interleaved_rope._turned_registers(
                *map(fragments, (registers[:count], registers[count : 2 * count])),
                SimpleNamespace(registers=registers[2 * count :]),
            )
        assert turned.shape == shape and turned.layout == layout
        values = (*x, *angles, dtype(is_fixed))
        actual = computed(block, values, list(turned.registers.flat))
    mosaic_interpreter.turn_neighbours(monkeypatch)
    stated = interleaved_rope.turned(*map(jnp.asarray, (x, angles, dtype(is_fixed))))
    np.testing.assert_allclose(actual, stated, rtol=1e-6, atol=1e-6)
    if is_fixed:
        np.testing.assert_array_equal(actual, x)
