import chex
import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

import jaxfused
from jaxfused.ops.pool import max_pool_cuda, max_pool_xla
from jaxfused.ops.pool.max_pool_cuda import Window
from tests.support.arrays import put
from tests.support.lowering import kernels
from tests.support.transforms import assert_transforms

pytestmark = pytest.mark.exhaustive

FORWARD, BACKWARD = "jaxfused_max_pool", "jaxfused_max_pool_gradient"
CASES = (
    ((2, 8, 10, 8), dict(window=2, strides=2)),
    ((2, 9, 11, 16), dict(window=3, strides=2, padding="SAME")),
    ((2, 9, 11, 6), dict(window=3, strides=(2, 3), padding=((1, 2), (0, 1)))),
    ((2, 20, 5), dict(window=4, strides=3, padding=1)),
    ((1, 7, 5, 3), dict(window=(3, 2))),
    ((2, 11, 11, 8), dict(window=2, strides=3)),
)
OTHER_CASE = ((2, 6, 6, 3, 8), dict(window=(3, 3, 2), strides=(2, 2, 1), padding="SAME"))
"""Shapes with three spatial axes, which the kernels do not support."""


def with_ties(*shape, seed=0):
    """Returns few different values, so that windows have ties."""
    return put(np.random.default_rng(seed).integers(0, 4, size=shape), jnp.float32)


def results(x, options, implementation=None):
    y, vjp = jax.vjp(lambda x: jaxfused.max_pool(x, **options, implementation=implementation), x)
    return y, vjp(jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape).astype(y.dtype))


@pytest.mark.parametrize(("shape", "options"), CASES, ids=str)
def test_is_flax_max_pool(shape, options):
    x = with_ties(*shape)
    spatial = len(shape) - 2
    options = dict(padding="VALID") | options

    def each(value):
        return (value,) * spatial if isinstance(value, int) else value

    padding = options["padding"]
    padding = ((padding, padding),) * spatial if isinstance(padding, int) else padding
    stock = flax.linen.max_pool(
        x, each(options["window"]), each(options.get("strides", 1)), padding
    )
    np.testing.assert_array_equal(jaxfused.max_pool(x, **options), stock)


def axes(least, most):
    """Draws a number for each spatial axis."""
    return st.tuples(*[st.integers(least, most)] * 3)


def stock(x, *, window, strides, padding):
    """Computes the pool by XLA's operations; the gradient is a select-and-scatter."""
    return jax.lax.reduce_window(
        x,
        -jnp.inf,
        jax.lax.max,
        (1, *window, 1),
        (1, *strides, 1),
        ((0, 0), *padding, (0, 0)),
    )


def of_integers(y, seed):
    """Returns a cotangent of integers, whose sums are exact."""
    return put(np.random.default_rng(seed).integers(-8, 9, size=y.shape), y.dtype)


@settings(max_examples=10)
@given(
    spatial=st.integers(1, 3),
    size=axes(1, 9),
    window=axes(1, 9),
    strides=axes(1, 4),
    low=axes(0, 3),
    high=axes(0, 3),
    seed=st.integers(0, 9),
)
def test_the_gradient_goes_where_that_of_xla_goes(spatial, size, window, strides, low, high, seed):
    size, strides = size[:spatial], strides[:spatial]
    padding = tuple(zip(low, high, strict=True))[:spatial]
    # Padding may exceed the window, which then lies in the padding alone.
    window = tuple(min(w, n + a + b) for w, n, (a, b) in zip(window, size, padding, strict=False))
    options = dict(window=window, strides=strides, padding=padding)
    x = np.asarray(with_ties(2, *size, 3, seed=seed))
    minus_infinity, nan = np.random.default_rng(seed).random((2, *x.shape)) < 0.1

    def of(pool):
        """Returns one jitted program for the result and its gradient."""

        @jax.jit
        def f(x, dy):
            y, vjp = jax.vjp(lambda x: pool(x, **options), x)
            return y, vjp(dy)[0]

        return f

    ours, stocks = of(max_pool_xla.pool), of(stock)
    x = np.where(minus_infinity, -np.inf, x).astype(np.float32)
    dy = np.asarray(of_integers(jax.eval_shape(lambda x: stock(x, **options), x), seed))
    y = np.asarray(stocks(x, dy)[0])
    np.testing.assert_array_equal(ours(x, dy)[0], y)
    # If a whole window is minus infinity, XLA may select the padding.
    finite = np.where(np.isfinite(y), dy, 0.0)
    np.testing.assert_array_equal(ours(x, finite)[1], stocks(x, finite)[1])
    if max_pool_cuda.why_window_unfit(window):
        return  # A place is a byte.

    @jax.jit
    def by_places(x, dy):
        y, places = max_pool_xla.pool_and_places(x, **options)
        return y, max_pool_xla.gradient(dy, places, size=size, **options)

    # XLA ignores a NaN if values follow it. Here and in the kernels the first NaN is the maximum.
    x = np.where(nan, np.nan, x).astype(np.float32)
    chex.assert_trees_all_equal(by_places(x, dy), ours(x, dy))


@pytest.mark.parametrize(
    ("shape", "window", "strides"),
    [((1, 64, 64, 2), (64, 64), (1, 1)), ((1, 90, 2), (37,), (2,))],
    ids=str,
)
def test_large_windows(shape, window, strides):
    x = with_ties(*shape)
    options = dict(window=window, strides=strides, padding=((0, 0),) * len(window))
    y, vjp = jax.vjp(lambda x: jaxfused.max_pool(x, window, strides=strides), x)
    dy = of_integers(y, 0)
    np.testing.assert_array_equal(vjp(dy)[0], jax.vjp(lambda x: stock(x, **options), x)[1](dy)[0])
    text = jax.jit(vjp).lower(dy).as_text()
    assert 0 < text.count("stablehlo.pad") < 50


@pytest.mark.parametrize(("shape", "options"), [*CASES, OTHER_CASE], ids=str)
def test_nothing_is_scattered(shape, options):
    def gradient(x):
        return jax.grad(lambda x: jaxfused.max_pool(x, **options, implementation="xla").sum())(x)

    text = jax.jit(gradient).lower(with_ties(*shape)).as_text()
    assert "stablehlo.pad" in text and "scatter" not in text


def test_the_gradient_is_rounded_once():
    x = with_ties(2, 9, 9, 3).astype(jnp.bfloat16)
    y, vjp = jax.vjp(lambda x: jaxfused.max_pool(x, 3), x)
    dy = jax.random.normal(jax.random.key(0), y.shape, y.dtype)
    wide = jax.vjp(lambda x: jaxfused.max_pool(x, 3), x.astype(jnp.float32))[1](
        dy.astype(jnp.float32)
    )
    np.testing.assert_array_equal(vjp(dy)[0], wide[0].astype(jnp.bfloat16))


def test_the_first_nan_is_the_largest():
    x = put([3.0, jnp.nan, 4.0, jnp.nan, 5.0]).reshape(1, 5, 1)
    dx = jax.grad(lambda x: jaxfused.max_pool(x, 5).sum())(x)
    np.testing.assert_array_equal(dx[0, :, 0], [0, 1, 0, 0, 0])


def test_pixels_between_windows_have_no_gradient():
    dx = jax.grad(lambda x: jaxfused.max_pool(x, 2, strides=3).sum())(jnp.ones((1, 8, 1)))
    np.testing.assert_array_equal(dx[0, :, 0], [1, 0, 0, 1, 0, 0, 1, 0])


def test_only_x_is_saved():
    x = with_ties(2, 9, 9, 3)
    _, vjp = jax.vjp(lambda x: jaxfused.max_pool(x, 3, strides=2), x)
    assert [leaf.shape for leaf in jax.tree.leaves(vjp)] == [x.shape]


def test_derivatives():
    x = jax.random.permutation(jax.random.key(0), 2 * 6 * 7 * 3).reshape(2, 6, 7, 3) * 0.1

    def f(x):
        return jnp.sin(jaxfused.max_pool(x, 3, strides=2))

    check_grads(f, (x,), order=2, atol=0.05, rtol=0.05)


def test_transforms_of_three_axes():
    shape, options = OTHER_CASE
    x = jax.random.normal(jax.random.key(0), shape)
    assert_transforms(lambda x: jaxfused.max_pool(x, **options), x)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_gradient_under_jit(dtype):
    x = with_ties(2, 6, 6, 3).astype(dtype)
    dx = jax.jit(jax.grad(lambda x: jaxfused.max_pool(x, 2, strides=2).sum()))(x)
    assert dx.dtype == x.dtype and dx.sum() == 2 * 9 * 3


def test_nan_and_infinity():
    x = with_ties(1, 4, 4, 1).at[0, 1, 1, 0].set(jnp.nan).at[0, 2:, 2:].set(-jnp.inf)
    y = jaxfused.max_pool(x, 2, strides=2)[0, ..., 0]
    assert jnp.isnan(y[0, 0]) and y[1, 1] == -jnp.inf


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(x=jnp.ones((2, 3))), r"x has shape \(2, 3\), but it needs a batch axis"),
        (dict(x=jnp.ones((2, 0, 3, 1))), r"x has shape \(2, 0, 3, 1\)"),
        (dict(x=jnp.ones((2, 4, 4, 1), jnp.int32)), "x has dtype int32"),
        (dict(window=0), "window is 0, but x has 2 spatial axes"),
        (dict(window=(2, 2, 2)), r"window is \(2, 2, 2\)"),
        (dict(strides=(1, -1)), r"strides is \(1, -1\)"),
        (dict(padding="same_lower"), "padding='same_lower' is not known"),
        (dict(padding=-1), "padding is -1"),
        (dict(padding=(1,)), r"padding is \(1,\)"),
        (dict(window=5), r"the window is \(5, 5\), but x of shape \(2, 4, 4, 1\)"),
        (dict(implementation="cuda"), "it needs an NVIDIA GPU"),
        (dict(implementation="pallas"), "there is no Pallas kernel of max_pool"),
        (
            dict(x=jnp.ones((2, 4, 4, 4, 1)), implementation="cuda"),
            "x has 3 spatial axes, and the kernels take 1 or 2",
        ),
    ],
)
def test_errors(change, message):
    with pytest.raises(ValueError, match=f"max_pool: .*{message}"):
        jaxfused.max_pool(**(dict(x=jnp.ones((2, 4, 4, 1)), window=2) | change))


# --- kernels --------------------------------------------------------------------------------------


@pytest.fixture
def stand_ins(with_library, monkeypatch):
    """Replaces the kernels by the reference's stages, to test the operator around them."""

    def options(window):
        return dict(window=window.size, strides=window.strides, padding=window.padding)

    def forward(x, *, window, save_places):
        y, places = max_pool_xla.pool_and_places(x, **options(window))
        return y, places if save_places else None

    def backward(dy, places, *, size, window):
        return max_pool_xla.gradient(dy, places, size=size, **options(window))

    monkeypatch.setattr(max_pool_cuda, "forward", forward)
    monkeypatch.setattr(max_pool_cuda, "backward", backward)


@pytest.mark.parametrize(("shape", "options"), CASES, ids=str)
def test_the_way_to_the_kernels(shape, options, stand_ins):
    x = with_ties(*shape)
    chex.assert_trees_all_close(results(x, options, "cuda"), results(x, options, "xla"), atol=1e-6)


def test_transforms_of_the_way_to_the_kernels(stand_ins):
    x = jax.random.normal(jax.random.key(0), (2, 6, 7, 3))
    assert_transforms(lambda x: jaxfused.max_pool(x, 3, strides=2, implementation="cuda"), x)


def test_the_forward_is_a_kernel_where_there_is_a_backward(with_library):
    x = jax.ShapeDtypeStruct((2, 8, 8, 16), jnp.bfloat16)

    def f(x):
        return jaxfused.max_pool(x, 2, strides=2).astype(jnp.float32).sum()

    assert kernels(f, x) == []
    assert kernels(jax.grad(f), x) == [FORWARD, BACKWARD]


def test_windows_that_no_kernel_takes(with_library):
    """A position in such a window does not fit in a byte."""

    def f(x):
        return jaxfused.max_pool(x, 16).sum()

    x = with_ties(2, 20, 18, 3)
    assert kernels(jax.grad(f), x) == []
    np.testing.assert_array_equal(
        jax.grad(f)(x), jax.grad(lambda x: jaxfused.max_pool(x, 16, implementation="xla").sum())(x)
    )


GOOD = dict(
    compute_capability=(8, 0),
    shape=(2, 8, 8, 4),
    window=Window((2, 2), (2, 2), ((0, 0), (0, 0))),
    dtype=jnp.bfloat16,
)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(compute_capability=None), "it needs an NVIDIA GPU"),
        (dict(dtype=jnp.float64), "x has dtype float64"),
        (dict(window=Window((16, 16), (1, 1), ((8, 8), (8, 8)))), "at most 255 values"),
        (dict(window=Window((2, 2), (2, 2), ((2, 0), (0, 0)))), "in the padding"),
        (dict(window=Window((2, 2), (2, 2), ((0, 4), (0, 0)))), "in the padding"),
        (dict(shape=(2**20, 64, 64, 1)), "at most 2147482624 values"),
    ],
)
def test_limits(with_library, change, reason):
    assert max_pool_cuda.why_unsupported(**GOOD) is None
    assert reason in max_pool_cuda.why_unsupported(**GOOD | change)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("shape", "options"),
    [*CASES, ((4, 112, 112, 64), dict(window=3, strides=2, padding=1))],
    ids=str,
)
def test_kernels(shape, options, dtype):
    x = with_ties(*shape).astype(dtype)
    y, (dx,) = results(x, options, "cuda")
    expected, (wide,) = results(x.astype(jnp.float32), options, "xla")
    np.testing.assert_array_equal(y.astype(jnp.float32), expected)
    unit = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(dx.astype(jnp.float32), wide, rtol=4 * unit, atol=4 * unit)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "options", "dtype"),
    [
        (
            (18, 6, 6, 2, 128),
            dict(window=(3, 3, 2), strides=(2, 2, 1), padding="SAME"),
            "float32",
        ),
        (
            (3, 6, 2, 1, 32),
            dict(window=(3, 2, 1), strides=(2, 1, 2), padding=((1, 2), (1, 1), (0, 0))),
            "bfloat16",
        ),
        ((4, 56, 56, 64), dict(window=3, strides=2, padding=1), "float32"),
    ],
    ids=str,
)
def test_the_same_bits_without_a_kernel(shape, options, dtype):
    x = with_ties(*shape).astype(dtype)
    run = jax.jit(lambda x: results(x, options, "xla"))
    first = run(x)
    for _ in range(20):
        chex.assert_trees_all_equal(run(x), first)
