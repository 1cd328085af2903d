"""The stage that computes the gradients of weights and bias: dtypes of its sums, choices, batches."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfused
from jaxfused import dispatch
from jaxfused.ops.linear.weight_gradient import (
    WeightGradients,
    weight_and_bias_gradients,
    weight_gradients,
)
from jaxfused.runtime.product_xla import sum_over_rows
from jaxfused.runtime.runner import Runner
from tests.support.arrays import put
from tests.support.lowering import kernels

H200 = dispatch.Device("gpu", "NVIDIA H200", (9, 0), multiprocessors=132)


def integers(*shape, dtype="bfloat16", seed=0):
    return put(np.random.default_rng(seed).integers(-3, 4, size=shape), dtype)


def stage(*, count=1, sums_rows=False, side_by_side=False):
    return WeightGradients("linear", jnp.dtype("float32"), None, count, sums_rows, side_by_side)


@pytest.mark.parametrize("side_by_side", (False, True))
def test_several_cotangents(side_by_side, interpreted_hopper):
    x, *dys = integers(75, 24), integers(75, 16, seed=1), integers(75, 40, seed=2)
    expected = [np.asarray(x, np.float32).T @ np.asarray(dy, np.float32) for dy in dys]
    for implementation in ("pallas", "xla"):
        dws, sums = weight_gradients(
            Runner(implementation, interpreted_hopper),
            "linear",
            x,
            dys,
            jnp.float32,
            None,
            sums_rows=True,
            side_by_side=side_by_side,
        )
        chex.assert_trees_all_equal(list(map(np.asarray, dws)), expected)
        chex.assert_trees_all_equal(sums, [dy.astype(jnp.float32).sum(0) for dy in dys])


@pytest.mark.parametrize("shape", [(8, 96, 5), (700, 5), (2, 350, 5), (521, 5), (5000, 5), (0, 5)])
def test_sums_of_rows_in_parts(shape):
    """Parts come from the batch axis or from a divisor of the rows; other counts have no parts."""
    dy = integers(*shape)
    expected = np.asarray(dy, np.float32).reshape(-1, 5).sum(0)
    np.testing.assert_array_equal(sum_over_rows(dy), expected)


def test_a_wide_cotangent_is_summed_as_it_is(interpreted_hopper):
    """The bias gradient sums dy as it is; the product rounds it to bfloat16, where 257 becomes 256."""
    x, dy = jnp.ones((64, 16), jnp.bfloat16), jnp.full((64, 8), 257.0)
    dw, dbias = weight_and_bias_gradients(
        Runner("pallas", interpreted_hopper), "linear", x, dy, jnp.float32, jnp.zeros(8), None
    )
    np.testing.assert_array_equal(dw, np.full((16, 8), 64 * 256.0))
    np.testing.assert_array_equal(dbias, np.full(8, 64 * 257.0))


def test_a_batch_is_one_product(hopper):
    """A batch of models or of examples takes no loop."""

    def gradient(x, dy):
        run = Runner("pallas", hopper)
        return weight_and_bias_gradients(run, "linear", x, dy, jnp.float32, jnp.zeros(8), None)

    # XLA's CPU client lacks batched bfloat16 products.
    x, dy = (integers(3, 40, n, dtype="float32", seed=n) for n in (16, 8))
    program = str(jax.make_jaxpr(jax.vmap(gradient))(x, dy))
    assert "scan" not in program and "while" not in program
    dw, dbias = jax.vmap(gradient)(x, dy)
    np.testing.assert_array_equal(dw, jnp.einsum("bmd,bmf->bdf", x, dy))
    np.testing.assert_array_equal(dbias, dy.sum(1))
    dw, _ = jax.vmap(gradient, in_axes=(None, 0))(x[0], dy)
    np.testing.assert_array_equal(dw, jnp.einsum("md,bmf->bdf", x[0], dy))


@pytest.mark.parametrize(
    ("rows", "dtype", "features", "width", "words"),
    [
        (203, "bfloat16", 64, 64, None),
        (203, "float16", 8, 2152, None),
        (200, "bfloat16", 64, 60, "cotangent 0 has 60"),
        (200, "bfloat16", 66, 64, "x has 66"),
    ],
)
def test_what_runs_it(rows, dtype, features, width, words):
    x, dy = (jax.ShapeDtypeStruct((rows, n), dtype) for n in (features, width))
    reasons = stage().why_not(H200, x, dy)
    assert set(reasons) == {"pallas", "xla"}
    reason = reasons["pallas"]
    assert reason is None if words is None else words in reason


def test_float32_is_left_to_xla():
    x = jax.ShapeDtypeStruct((200, 64), jnp.float32)
    assert stage().why_not(H200, x, x) == {"xla": None}


@pytest.mark.parametrize("sums_rows", (False, True))
def test_configs_are_the_kernels(sums_rows):
    x, dy = (jax.ShapeDtypeStruct((1224, n), jnp.bfloat16) for n in (640, 1280))
    kernel = stage(sums_rows=sums_rows)
    configs = kernel.configs("pallas", H200, x, dy)
    assert len(set(configs)) == len(configs) > 1
    assert not kernel.configs("xla", H200, x, dy)
    run = functools.partial(kernel.run, "pallas", H200, config=configs[-1])
    assert kernels(run, x, dy) == ["weight_gradient"]


def test_a_linear_layer_takes_the_kernel(hopper):

    def gradients(x, w, bias, dy):
        call = functools.partial(jaxfused.linear, implementation="pallas")
        return jax.vjp(call, x, w, bias)[1](dy)

    shapes = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (
            ((75, 64), "bfloat16"),
            ((64, 32), "float32"),
            ((32,), "float32"),
            ((75, 32), "bfloat16"),
        )
    ]
    assert "weight_gradient" in kernels(gradients, *shapes)
