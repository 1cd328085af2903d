"""ragged_dot_general: values and gradients of jax.lax's, our kernels and XLA's share, messages."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfused
from tests.support.arrays import put
from tests.support.lowering import kernels

ROWS, SIZES = 24, (5, 0, 12, 4)


def numbers(lhs, rhs, ragged, groups, batch=((), ())):
    return jax.lax.RaggedDotDimensionNumbers(((lhs, rhs), batch), ragged, groups)


CASES = {
    "as ragged_dot": ((ROWS, 8), (4, 8, 16), numbers([1], [1], [0], [0])),
    "weights of [E, out, in]": ((ROWS, 8), (4, 16, 8), numbers([1], [2], [0], [0])),
    "rows last": ((8, ROWS), (8, 4, 16), numbers([0], [0], [1], [1])),
    "two summed axes": ((2, ROWS, 4), (4, 4, 2, 3, 5), numbers([2, 0], [1, 2], [1], [0])),
    "gradient of weights": ((ROWS, 8), (ROWS, 16), numbers([0], [0], [0], [])),
    "gradient of weights, axes last": ((2, 4, ROWS), (16, ROWS), numbers([2], [1], [2], [])),
    "rows in two axes, by XLA": ((ROWS, 2, 8), (4, 8, 16), numbers([2], [1], [0], [0])),
    "a batch, by XLA": (
        (2, ROWS, 8),
        (4, 2, 8, 16),
        numbers([2], [2], [1], [0], ((0,), (1,))),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_of_jax(name):
    *shapes, dims = CASES[name]
    rng = np.random.default_rng(0)
    lhs, rhs = (put(rng.normal(size=shape), "float32") for shape in shapes)
    sizes = put(SIZES, "int32")

    def results(f):
        f = functools.partial(f, ragged_dot_dimension_numbers=dims)
        y, pull_back = jax.vjp(lambda lhs, rhs: f(lhs, rhs, sizes), lhs, rhs)
        return y, *pull_back(jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape))

    def dense(lhs, rhs, sizes, ragged_dot_dimension_numbers):
        """Returns the gradient of weights, of which JAX has no gradient."""
        (left, right), _ = ragged_dot_dimension_numbers.dot_dimension_numbers
        group = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(ROWS), side="right")
        lhs, rhs = jnp.moveaxis(lhs, left[0], 0), jnp.moveaxis(rhs, right[0], 0)
        of_groups = jax.nn.one_hot(group, len(SIZES), dtype=lhs.dtype)
        return jnp.einsum("ig,i...m,in->g...mn", of_groups, lhs, rhs)

    theirs = results(dense if "gradient" in name else jax.lax.ragged_dot_general)
    ours = results(jaxfused.ragged_dot_general)
    if "gradient" in name:
        f = functools.partial(jax.lax.ragged_dot_general, ragged_dot_dimension_numbers=dims)
        np.testing.assert_allclose(ours[0], f(lhs, rhs, sizes), rtol=1e-5, atol=1e-5)
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        lhs, rhs = jax.reshard(lhs, jax.P()), jax.reshard(rhs, jax.P())
        explicit = results(jaxfused.ragged_dot_general)
    for results_of in (ours, explicit):
        for actual, expected in zip(results_of, theirs, strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.exhaustive
def test_kernels_by_dimension_numbers(hopper):
    for name, (left, right, dims) in CASES.items():
        lhs, rhs = jnp.ones(left, jnp.bfloat16), jnp.ones(right, jnp.bfloat16)
        f = functools.partial(jaxfused.ragged_dot_general, ragged_dot_dimension_numbers=dims)
        expected = ["ragged_dot_general_drhs" if "gradient" in name else "ragged_dot"]
        if "XLA" in name or "two" in name:
            expected = []
        assert kernels(f, lhs, rhs, put(SIZES, "int32")) == expected, name


def test_messages():
    left, right, dims = CASES["a batch, by XLA"]
    f = functools.partial(jaxfused.ragged_dot_general, ragged_dot_dimension_numbers=dims)
    args = jnp.ones(left), jnp.ones(right), put(SIZES, "int32")
    with pytest.raises(ValueError, match=r"ragged_dot_general: .* it takes no batch axes"):
        f(*args, implementation="pallas")
    with pytest.raises(
        ValueError, match=r"ragged_dot_general: group_offset .* without group_offset"
    ):
        f(*args, group_offset=1)
    with pytest.raises(ValueError, match=r"ragged_dot_general: .* is None; pass jax.lax.Ragged"):
        jaxfused.ragged_dot_general(*args, None)
