"""Programs exported for any batch size, where XLA replaces kernels that need known sizes."""

import contextlib
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfused
from jaxfused import dispatch
from jaxfused.runtime import cuda_library
from tests.support.calls import calls, have_library
from tests.support.grids import parametrize

H200 = dispatch.Device("gpu", "NVIDIA H200", (9, 0), 132)
PLACES = ("cpu", "cuda")
GRID = list(itertools.product(calls(), PLACES))


def any_batch(operands):
    (batch,) = jax.export.symbolic_shape("b")
    return [
        jax.ShapeDtypeStruct((batch, *shape[1:]) if has_batch else shape, dtype)
        for shape, dtype, has_batch in operands
    ]


def exported(f, operands, place):
    with dispatch.assume(H200) if place == "cuda" else contextlib.nullcontext():
        # Weights have known sizes, so that CUDA C kernels may process them.
        unchecked = [jax.export.DisabledSafetyCheck.custom_call(n) for n in cuda_library.TARGETS]
        return jax.export.export(jax.jit(f), platforms=[place], disabled_checks=unchecked)(
            *any_batch(operands)
        )


@parametrize(
    ("name", "place"),
    GRID,
    quick=[
        GRID.index((name, place))
        for name, place in (
            ("layer_norm", "cuda"),
            ("linear of residual", "cuda"),
            ("conv", "cuda"),
            ("rope", "cpu"),
            ("quantized_matmul", "cuda"),
        )
    ],
)
def test_every_operator_is_exported_for_any_batch(monkeypatch, name, place):
    have_library(monkeypatch)
    call = calls()[name]
    exported(call.gradients, (*call.operands, *call.others), place)


@pytest.mark.parametrize("rows", (1, 5))
@pytest.mark.parametrize("name", ("rope", "quantized_matmul", "linear_softmax_cross_entropy"))
def test_it_computes_what_is_computed_for_a_known_batch(name, rows):
    call = calls()[name]
    random = np.random.default_rng(0)
    operands = [
        operand._replace(dtype=jnp.float32) if operand.dtype == jnp.bfloat16 else operand
        for operand in (*call.operands, *call.others)
    ]
    arrays = [
        random.integers(0, 9, shape) if dtype == jnp.int32 else random.normal(size=shape)
        for shape, dtype in (
            ((rows, *o.shape[1:]) if o.has_batch else o.shape, o.dtype) for o in operands
        )
    ]
    arrays = [jnp.asarray(a, o.dtype) for a, o in zip(arrays, operands, strict=True)]
    actual = exported(call.f, operands, "cpu").call(*arrays)
    chex.assert_trees_all_close(actual, jax.jit(call.f)(*arrays), rtol=1e-4, atol=1e-4)


def test_the_reason_is_told():
    call = calls()["layer_norm"]
    with dispatch.assume(H200), dispatch.recorded() as choices:
        jax.jit(call.f).trace(*any_batch(call.operands))
    (choice,) = choices
    assert choice.implementation == "xla" and "symbolic" in choice.reasons["pallas"]


def test_a_named_kernel_refuses():
    call = calls()["layer_norm"]
    with (
        dispatch.assume(H200),
        pytest.raises(ValueError, match="cannot run here: kernels are made for known sizes"),
    ):
        jax.eval_shape(
            lambda *a: jaxfused.layer_norm(*a, implementation="pallas"), *any_batch(call.operands)
        )


def test_fuse_leaves_it_to_xla():
    f = jaxfused.fuse(lambda x: x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6))
    operands = calls()["layer_norm"].operands[:1]
    x = jnp.ones((3, 128), jnp.bfloat16)
    chex.assert_trees_all_close(exported(f, operands, "cpu").call(x), x)
    assert "symbolic" in jaxfused.explain(f, *any_batch(operands)).fusions[0].left_alone


@pytest.mark.parametrize("chunk_size", (None, 4))
def test_weights_of_classes_with_label_smoothing(chunk_size):
    """An exported program has the loss and gradients of a known batch, under x64 too."""
    random = np.random.default_rng(0)
    weights = random.uniform(0.5, 1.5, 10)

    def loss(x, w, labels):
        return jaxfused.linear_softmax_cross_entropy(
            x, w, labels, class_weights=weights, label_smoothing=0.1, chunk_size=chunk_size
        )

    for dtype in (jnp.float32, jnp.float64):
        with jax.enable_x64(dtype == jnp.float64):
            x, w = (jnp.asarray(random.normal(size=s), dtype) for s in ((6, 8), (8, 10)))
            labels = jnp.asarray(random.integers(0, 10, 6), jnp.int32)
            f = jax.jit(jax.value_and_grad(loss, (0, 1)))
            (rows,) = jax.export.symbolic_shape("rows")
            exported = jax.export.export(f)(
                jax.ShapeDtypeStruct((rows, 8), dtype), w, jax.ShapeDtypeStruct((rows,), jnp.int32)
            )
            for found, known in zip(
                jax.tree.leaves(exported.call(x, w, labels)),
                jax.tree.leaves(f(x, w, labels)),
                strict=True,
            ):
                tolerance = 1e-5 if dtype == jnp.float32 else 1e-13
                np.testing.assert_allclose(found, known, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("is_an_array", (False, True))
def test_attention_at_an_offset_of_any_length(is_an_array):
    """Also with functions, which get the places of queries."""
    batch, queries, keys = jax.export.symbolic_shape("b, t, s", constraints=["s >= t"])
    slopes = jnp.array([0.1, 0.2])

    def f(query, key, offset):
        return jaxfused.dot_product_attention(
            *(query, key, key),
            is_causal=True,
            local_window_size=3,
            query_offset=offset if is_an_array else "bottom_right",
            score_mod=lambda score, b, h, q, k: score + slopes[h] * (k - q),
            mask_mod=lambda b, h, q, k: (k < q) | (k % 2 == 0),
        )

    shapes = [(batch, queries, 2, 4), (batch, keys, 2, 4)]
    exported = jax.export.export(jax.jit(f))(
        *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes),
        jax.ShapeDtypeStruct((batch,), jnp.int32),
    )
    for sizes in ((1, 3, 5), (2, 1, 7)):
        arrays = [jax.random.normal(jax.random.key(0), (sizes[0], n, 2, 4)) for n in sizes[1:]]
        arrays.append(jnp.arange(sizes[0], dtype=jnp.int32) + 2)
        chex.assert_trees_all_close(exported.call(*arrays), f(*arrays), rtol=1e-5, atol=1e-6)
