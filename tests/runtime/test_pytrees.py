"""This package's pytrees: programs that take them are exported and saved, and their methods compiled."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax import export

import jaxfused
from jaxfused.runtime.serialization import exportable, serializable

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


def test_a_module_of_pytrees_can_be_imported_again():
    def imported():
        class Pair(NamedTuple):
            x: jax.Array

        @dataclasses.dataclass(frozen=True, eq=False)
        class Kept:
            x: jax.Array

        return exportable(Pair), serializable(jax.tree_util.register_dataclass(Kept))

    first, again = imported(), imported()
    for kind in (*first, *again):
        assert jax.jit(lambda tree: tree)(kind(jnp.ones(2))).x.shape == (2,)
    assert first[1] is not again[1]


def test_methods_of_what_holds_arrays_can_be_compiled():
    x = jnp.ones((2, 1, 2, 8), jnp.float32)
    assert jax.jit(CACHE.attend)(x).shape == x.shape
    layer = jaxfused.quantization.QuantizedLayer(QUANTIZED)
    rows = jnp.ones((3, 256))
    assert jax.jit(layer)(rows).shape == jax.jit(jax.vmap(layer))(rows).shape == (3, 8)
    assert layer == jaxfused.quantization.QuantizedLayer(QUANTIZED)
    assert layer != jax.tree.map(jnp.copy, layer)
    assert jax.tree.map(jnp.shape, layer) == jax.tree.map(jnp.shape, jax.tree.map(jnp.copy, layer))
