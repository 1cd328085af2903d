"""Programs that are traced for a GPU, and lowered for the CPU or for both."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfused
from jaxfused import dispatch
from jaxfused.runtime import cuda_library
from tests.support.arrays import put
from tests.support.calls import calls, have_library
from tests.support.grids import parametrize
from tests.support.lowering import kernels

NAMES = list(calls())
QUICK = [NAMES.index(name) for name in ("dot_product_attention", "group_norm", "linear")]


@pytest.fixture
def on_a_machine_with_a_gpu(monkeypatch):
    have_library(monkeypatch)
    with dispatch.assume(dispatch.Device("gpu", "NVIDIA H200", (9, 0), 132)):
        yield
    jax.clear_caches()


def arrays_of(call):
    random = np.random.default_rng(0)
    return [
        put(random.integers(0, 2, shape), dtype)
        if dtype == jnp.int32
        else put(0.3 * random.standard_normal(shape), dtype)
        for shape, dtype, _ in (*call.operands, *call.others)
    ]


def assert_near(actual, expected):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, b = np.float32(a), np.float32(b)
        assert np.linalg.norm(a - b) <= 3e-2 * np.linalg.norm(b) + 1e-6


@parametrize("name", NAMES, quick=QUICK)
def test_jit_of_arrays_on_the_cpu(request, name):
    call = calls(rows=16, images=2)[name]
    arrays = arrays_of(call)
    expected = jax.jit(call.gradients)(*arrays)
    request.getfixturevalue("on_a_machine_with_a_gpu")
    assert_near(jax.jit(call.gradients)(*arrays), expected)


@parametrize("name", NAMES, quick=QUICK)
def test_an_export_for_two_platforms_runs_on_the_cpu(request, name):
    call = calls(rows=16, images=2)[name]
    arrays = arrays_of(call)
    expected = jax.jit(call.gradients)(*arrays)
    request.getfixturevalue("on_a_machine_with_a_gpu")
    targets = ("mosaic_gpu_v2", *cuda_library.TARGETS)
    exported = jax.export.export(
        jax.jit(call.gradients),
        platforms=["cuda", "cpu"],
        disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(name) for name in targets],
    )(*arrays)
    if name == "dot_product_attention":
        assert "custom_call @mosaic_gpu" in exported.mlir_module()
    assert_near(exported.call(*arrays), expected)


def test_nothing_is_decided_where_a_program_is_for_gpus_alone(on_a_machine_with_a_gpu):
    x, scale = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((1024, 768), (768,)))
    lowered = jax.jit(jaxfused.layer_norm).trace(x, scale).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert "stablehlo.case" not in text and text.count("stablehlo.custom_call") == 1
    assert kernels(jaxfused.layer_norm, x, scale) == ["layer_norm_forward"]


def test_vmap_and_shards_are_lowered_for_the_cpu(on_a_machine_with_a_gpu):
    x, w = jnp.ones((2, 4, 64), jnp.bfloat16), jnp.ones((2, 64, 128), jnp.bfloat16)
    f = jax.vmap(lambda x, w: jaxfused.linear(x, w, activation="relu"))
    chex.assert_trees_all_equal(
        np.float32(jax.jit(f)(x, w)), np.full((2, 4, 128), 64.0, np.float32)
    )
