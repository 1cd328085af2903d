"""Activations of the kernels, compared with float64, in both precisions and at extreme x."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfused
import pallas_kernels.activation
from jaxfused import dispatch
from jaxfused.ops.fp8.fp8_products import maximised_of
from jaxfused.ops.fp8.fp8_xla import largest_activation
from jaxfused.runtime.activation import (
    ACTIVATIONS,
    ARITHMETIC,
    FUNCTIONS,
    SLOPE_OF_RESULT,
    function_of,
)
from pallas_kernels.activation import NAMES, activation, activation_and_derivative, derivative
from tests.conftest import HOPPER
from tests.support.arrays import put
from tests.support.grids import parametrize
from tests.support.lowering import kernels

X = np.concatenate([np.linspace(-150.0, 150.0, 6001), np.linspace(-9.0, 9.0, 6000)])
SLOPED = (*NAMES, "leaky_relu(0.2)")
TAILED = ("gelu_erf", "gelu_tanh", "quick_gelu", "silu")


def truth(name: str, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the activation and its derivative in float64."""
    with jax.enable_x64(True):
        f = jax.jit(lambda x: jax.jvp(function_of(name), (x,), (jnp.ones_like(x),)))
        return jax.tree.map(np.asarray, f(np.float64(x)))


def test_kernels_have_every_activation():
    assert NAMES == ACTIVATIONS == jaxfused.ACTIVATIONS
    assert pallas_kernels.activation.ARITHMETIC == ARITHMETIC


@pytest.mark.parametrize("name", SLOPED)
def test_derivatives_at_corners_are_those_of_jax_nn(name):
    x = put([-3.0, -1.0, 0.0, 1.0, 3.0, 6.0])
    stock = jax.vmap(jax.grad(function_of(name)))(x)
    np.testing.assert_allclose(derivative(name, x), stock, atol=3e-5)


@pytest.mark.parametrize("name", SLOPE_OF_RESULT)
def test_the_derivative_at_the_result_is_that_at_the_argument(name):
    x = put(np.linspace(-9.0, 9.0, 181))
    slope = jax.vmap(jax.grad(FUNCTIONS[name]))
    np.testing.assert_array_equal(slope(FUNCTIONS[name](x)), slope(x))


@pytest.mark.parametrize("name", SLOPED)
def test_the_largest_magnitude_is_bounded_by_what_float8_finds_it_from(name):
    for x in (X, -np.abs(X), np.abs(X), X / 1e3, [-0.7], [-1.2], [-1.5]):
        found = maximised_of(name)
        maxima = put(np.max(x) if found == "value" else np.max(np.abs(x)))
        bound = largest_activation(name, maxima)
        assert np.max(np.abs(truth(name, np.asarray(x))[0])) <= bound * (1 + 1e-6)


@parametrize("name", SLOPED[2:4] + SLOPED[8:], quick=(3,))
def test_products_and_convolutions_lower_with_it(name):
    x, w = jax.ShapeDtypeStruct((256, 64), "bfloat16"), jax.ShapeDtypeStruct((64, 64), "bfloat16")
    images, kernel = (
        jax.ShapeDtypeStruct(s, "bfloat16") for s in ((2, 16, 16, 64), (3, 3, 64, 64))
    )

    def f(x, w, images, kernel):
        options = dict(activation=name, implementation="pallas")
        y = jaxfused.mlp(x, w, None, w, **options), jaxfused.conv(images, kernel, **options)
        return sum(a.astype(jnp.float32).sum() for a in y)

    with dispatch.assume(HOPPER):
        launched = kernels(jax.grad(f, (0, 1, 2, 3)), x, w, images, kernel)
    assert len(launched) >= 6


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(jnp.float32, 4e-7), (jnp.bfloat16, 2e-6), (jnp.float16, 2e-6)]
)
@pytest.mark.parametrize("name", SLOPED)
def test_values_and_derivatives(name, dtype, tolerance):
    x = X.astype(np.float32)
    y, slope = activation_and_derivative(name, put(x), dtype)
    true_y, true_slope = truth(name, x)
    scale = np.maximum(1.0, np.abs(x))
    assert np.max(np.abs(y - true_y) / scale) <= tolerance
    assert np.max(np.abs(slope - true_slope) / scale) <= tolerance
    np.testing.assert_array_equal(activation(name, put(x), dtype), y)
    np.testing.assert_array_equal(derivative(name, put(x), dtype), slope)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", TAILED)
def test_the_lower_tail_keeps_its_digits(name, dtype):
    x = np.linspace(-5.0, -0.01, 5000).astype(np.float32)
    true_y, _ = truth(name, x)
    allowed = 5e-6 if dtype == jnp.float32 else 5e-5
    assert np.max(np.abs(activation(name, put(x), dtype) / true_y - 1.0)) <= allowed


@pytest.mark.parametrize("name", TAILED)
def test_beyond_all_numbers(name):
    x = put([jnp.inf, -jnp.inf, jnp.nan, 3e38, -3e38, 0.0, -0.0])
    y, slope = activation_and_derivative(name, x)
    np.testing.assert_array_equal(y, [jnp.inf, 0.0, jnp.nan, x[3], 0.0, 0.0, 0.0])
    np.testing.assert_array_equal(slope, [1.0, 0.0, jnp.nan, 1.0, 0.0, 0.5, 0.5])


@pytest.mark.parametrize("name", ["elu", "softplus"])
def test_values_near_0_keep_their_digits(name):
    x = np.float32(-np.logspace(-6, 1, 200))
    true_y, _ = truth(name, x)
    np.testing.assert_allclose(activation(name, put(x)), true_y, rtol=4e-6)


@pytest.mark.parametrize("name", ["leaky_relu(2)", "leaky_relu(-0.1)", "leaky_relu()", "elu(1)"])
def test_slopes_are_from_0_to_1(name):
    with pytest.raises(ValueError, match=r"linear: activation=.* 'leaky_relu\(0.2\)' for a slope"):
        jaxfused.linear(jnp.ones((2, 2)), jnp.ones((2, 2)), activation=name)


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match="gelu_sometimes"):
        activation("gelu_sometimes", jnp.zeros(1))
    with pytest.raises(ValueError, match="gelu_sometimes"):
        activation_and_derivative("gelu_sometimes", jnp.zeros(1))
