"""Programs whose arguments and results are this package's pytrees are exported, saved and called."""

import jax
import jax.numpy as jnp
import pytest
from jax import export

import jaxfused

QUANTIZED = jaxfused.quantize(jnp.ones((256, 8)), "int4", group_size=128, layout="columns")
CACHE = jaxfused.KVCache.zeros(
    batch=2, length=8, key_heads=1, head_size=8, dtype="float8_e4m3fn", window=3
)
PYTREES = (
    CACHE,
    QUANTIZED,
    jaxfused.quantization.QuantizedLayer(QUANTIZED),
    jaxfused.QuantizedKernel(QUANTIZED, "int8"),
    jaxfused.BlockSparse.from_dense(jnp.ones((32, 64)), 32),
    jaxfused.router(jnp.zeros((4, 8)), 2),
    jaxfused.sample(jnp.zeros((2, 5)), 0, logprobs=2),
)


@pytest.mark.parametrize("tree", PYTREES, ids=lambda tree: type(tree).__name__)
def test_a_saved_program_takes_and_returns_it(tree):
    saved = export.export(jax.jit(lambda tree: tree))(tree).serialize()
    back = export.deserialize(saved).call(tree)
    assert jax.tree.structure(back) == jax.tree.structure(tree)
