"""Every operator on two GPUs with Explicit axes, at few rows a device: the numbers of one GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.support.calls import calls

NAMES = list(calls())


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize("name", NAMES)
def test_few_rows_a_device_have_the_numbers_of_one(name, rows):
    if jax.device_count() < 2:
        pytest.skip(f"JAX sees {jax.device_count()} device, and the rows are split over two")
    devices = jax.devices()[:2]
    call = calls(2 * rows, images=2 * min(rows, 8))[name]
    operands = (*call.operands, *call.others)
    random = np.random.default_rng(rows)

    def array(operand):
        if jnp.issubdtype(operand.dtype, jnp.integer):
            return random.integers(0, 2, operand.shape).astype(operand.dtype)
        # Results stay near 1: the loss is their sine, and a rounding of 20 to bfloat16 is 0.06.
        return (0.15 * random.standard_normal(operand.shape)).astype(operand.dtype)

    arrays = [array(operand) for operand in operands]
    wanted = jax.jit(call.gradients)(*jax.device_put(arrays, devices[0]))
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Explicit,), devices=devices)
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(a, NamedSharding(mesh, P("d") if operand.has_batch else P()))
            for a, operand in zip(arrays, operands, strict=True)
        ]
        actual = jax.jit(call.gradients)(*placed)
    # Two roundings to bfloat16 on either side; 8-bit ones may differ by a unit.
    near = 4e-2 if "fp8" in name or "quantize" in name else 1e-2
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        a, b = (np.asarray(x).astype(np.float32) for x in (a, b))
        assert np.linalg.norm(a - b) <= near * np.linalg.norm(b) + 1e-6
