import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import jaxfused
from tests.cases.normal import normal
from tests.support.arrays import put
from tests.support.grids import parametrize
from tests.support.transforms import assert_transforms

CASES = (
    ((2, 8, 12, 3), (1, 2, 4)),
    ((2, 7, 5, 3), (1, 2, 3)),
    ((1, 3, 2, 2), (4,)),
    ((2, 10, 3), (3, 1)),
    ((1, 5, 4, 6, 2), (2, 1)),
)
METHODS = ("max", "avg")
each_way = parametrize(
    ("shape", "levels", "method"),
    [(*case, method) for case in CASES for method in METHODS],
    # Cells that share pixels, with maxima; more cells than rows, with means.
    quick=(2, 5),
)


def cells(shape, level):
    """Yields the slices of each cell, in row-major order."""
    for place in np.ndindex(*(level,) * len(shape)):
        yield tuple(
            slice(int(np.floor(i * n / level)), int(np.ceil((i + 1) * n / level)))
            for i, n in zip(place, shape, strict=True)
        )


def loops(x, levels, method):
    """Computes one cell after the other."""
    axes = tuple(range(1, x.ndim - 1))
    reduce = np.max if method == "max" else np.mean
    parts = [reduce(x[:, *cell], axes) for level in levels for cell in cells(x.shape[1:-1], level)]
    return np.concatenate(parts, 1)


def ours(levels, method):
    return lambda x: jaxfused.spatial_pyramid_pool(x, levels, method)


@each_way
def test_is_one_value_of_each_cell(shape, levels, method):
    x = normal(np.random.default_rng(0), "float32", *shape)
    y = ours(levels, method)(x)
    expected = loops(np.asarray(x, np.float64), levels, method)
    assert y.dtype == x.dtype and y.shape == expected.shape
    if method == "max":
        np.testing.assert_array_equal(y, expected)
    np.testing.assert_allclose(y, expected, rtol=2e-6, atol=1e-6)


@each_way
def test_the_gradient_goes_to_its_cells(shape, levels, method):
    """A maximum passes its gradient to the first of equal values; a mean spreads it over the cell."""
    x = np.random.default_rng(0).integers(0, 3, shape).astype(np.float32)
    y, vjp = jax.vjp(ours(levels, method), put(x))
    dy = np.random.default_rng(1).integers(-4, 5, y.shape).astype(np.float32)
    expected, rest = np.zeros(shape), dy
    for level in levels:
        for cell in cells(shape[1:-1], level):
            cotangent, rest = rest[:, : shape[-1]], rest[:, shape[-1] :]
            values = x[:, *cell].reshape(shape[0], -1, shape[-1])
            share = np.full(values.shape, 1 / values.shape[1])
            if method == "max":
                first = np.argmax(values, 1)[:, None]
                share = np.arange(values.shape[1])[None, :, None] == first
            expected[:, *cell] += (share * cotangent[:, None]).reshape(x[:, *cell].shape)
    np.testing.assert_allclose(vjp(put(dy))[0], expected, atol=1e-5)


@each_way
def test_nothing_is_scattered(shape, levels, method):
    x = normal(np.random.default_rng(0), "float32", *shape)
    text = jax.jit(jax.grad(lambda x: jnp.sin(ours(levels, method)(x)).sum())).lower(x).as_text()
    assert "scatter" not in text and "gather" not in text


@parametrize("method", METHODS, quick=())
def test_derivatives(method):
    x = jax.random.permutation(jax.random.key(0), 2 * 5 * 4 * 2).reshape(2, 5, 4, 2) * 0.1
    check_grads(ours((1, 3), method), (x,), order=2, atol=0.02, rtol=0.02)


def test_sums_are_float32():
    x = jnp.full((1, 64, 64, 1), 100, jnp.float16)
    np.testing.assert_array_equal(ours((1, 3), "avg")(x), np.full((1, 10), 100.0))


@parametrize("method", METHODS, quick=(0,))
def test_transforms(method):
    x = normal(np.random.default_rng(0), "float32", 2, 5, 4, 3)
    assert_transforms(ours((1, 2), method), x)


@parametrize("method", METHODS, quick=(0,))
def test_empty_batches(method):
    x = jnp.ones((0, 5, 4, 3))
    y, vjp = jax.vjp(ours((1, 2), method), x)
    assert y.shape == (0, 15) and vjp(y)[0].shape == x.shape


@pytest.mark.parametrize("method", METHODS)
def test_nan_stays_in_its_cells(method):
    x = jnp.ones((1, 4, 4, 1)).at[0, 0, 0].set(jnp.nan)
    np.testing.assert_array_equal(ours((1, 2), method)(x), [[np.nan, np.nan, 1, 1, 1]])


@parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], quick=(1,))
@parametrize("method", METHODS, quick=(1,))
def test_the_type_of_a_sharded_batch(axis_type, method):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(axis_type,))
    x = normal(np.random.default_rng(0), "float32", 2, 5, 4, 3)
    f = ours((1, 2), method)
    run = jax.jit(lambda x: (f(x), jax.grad(lambda x: jnp.sin(f(x)).sum())(x)))
    actual = run(jax.device_put(x, NamedSharding(mesh, P("data"))))
    chex.assert_trees_all_close(jax.device_get(actual), jax.device_get(run(x)), rtol=1e-6)
    if axis_type == AxisType.Explicit:
        assert all(jax.typeof(a).sharding.spec[0] == "data" for a in actual)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(x=jnp.ones((2, 3))), r"x has shape \(2, 3\), but it needs a batch axis"),
        (dict(x=jnp.ones((2, 4, 4, 1), jnp.int32)), "x has dtype int32"),
        (dict(levels=()), r"levels is \(\), but it has one level or more"),
        (dict(levels=2), "levels is 2, but it has one level or more"),
        (dict(levels=(1, 0)), "a level is 0, but it counts something"),
        (dict(method="mean"), "method='mean' is not known; pass 'max' or 'avg'"),
        (dict(implementation="cuda"), "there is no CUDA kernel of spatial_pyramid_pool yet"),
    ],
)
def test_errors(change, message):
    with pytest.raises(ValueError, match=f"spatial_pyramid_pool: .*{message}"):
        jaxfused.spatial_pyramid_pool(**(dict(x=jnp.ones((2, 4, 4, 1))) | change))
