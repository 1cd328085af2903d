import itertools

import chex
import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import jaxfused
from tests.cases.normal import normal
from tests.support.against_float64 import assert_values_and_gradients
from tests.support.arrays import put
from tests.support.grids import parametrize
from tests.support.transforms import assert_transforms

WEIGHTS = np.array([[1.0, 2.0, 0.5], [2.0, 4.0, 1.0]])
CASES = (
    ((2, 8, 10, 3), dict(window=2, strides=2)),
    ((2, 9, 11, 3), dict(window=3, strides=2, padding="SAME", count_include_pad=False)),
    ((2, 9, 11, 2), dict(window=3, strides=(2, 3), padding=((1, 2), (0, 1)), ceil_mode=True)),
    ((1, 7, 8, 2), dict(window=(2, 3), strides=2, padding=1, weights=WEIGHTS)),
    ((2, 20, 5), dict(window=4, strides=3, padding=1)),
    ((1, 7, 5, 3), dict(window=(3, 2))),
    ((1, 9, 9, 2), dict(window=5, padding=2, count_include_pad=False)),
    ((2, 11, 11, 2), dict(window=2, strides=3, ceil_mode=True)),
    ((2, 6, 6, 3, 2), dict(window=(3, 3, 2), strides=(2, 2, 1), padding="SAME")),
    (
        (1, 7, 8, 2),
        dict(
            window=(2, 3),
            strides=2,
            padding=1,
            weights=WEIGHTS,
            ceil_mode=True,
            count_include_pad=False,
        ),
    ),
)
each_case = parametrize(("shape", "options"), CASES, quick=(0, 1, 2, 3), ids=str)
# For properties of the definition, `make test` runs uneven strides with `ceil_mode`, and weights.
each_second_case = parametrize(("shape", "options"), CASES, quick=(2, 3), ids=str)


def each_axis(value, spatial):
    return (value,) * spatial if isinstance(value, int) else tuple(value)


def pairs_of(padding, shape, window, strides):
    if isinstance(padding, str):
        return jax.lax.padtype_to_pads(shape, window, strides, padding)
    return [(p, p) if isinstance(p, int) else p for p in each_axis(padding, len(shape))]


def torch_count(n, size, step, low, high, ceil_mode):
    """Returns the number of windows by PyTorch's `pooling_output_shape`."""
    count = (n + low + high - size + (step - 1 if ceil_mode else 0)) // step + 1
    return count - 1 if ceil_mode and (count - 1) * step >= n + low else count


def loops(
    x,
    *,
    window,
    strides=1,
    padding="VALID",
    count_include_pad=True,
    ceil_mode=False,
    weights=None,
    largest=False,
):
    """Computes one window after the other, in float64."""
    spatial = x.shape[1:-1]
    window, strides = each_axis(window, len(spatial)), each_axis(strides, len(spatial))
    pairs = pairs_of(padding, spatial, window, strides)
    geometry = list(zip(spatial, window, strides, pairs, strict=True))
    counts = [torch_count(n, size, step, *pair, ceil_mode) for n, size, step, pair in geometry]
    weights = np.ones(window) if weights is None else np.asarray(weights, np.float64)
    y = np.zeros((x.shape[0], *counts, x.shape[-1]))
    for place in itertools.product(*map(range, counts)):
        total, divisor = np.zeros((x.shape[0], x.shape[-1])), 0.0
        values = [np.full_like(total, -np.inf)]
        for offsets in itertools.product(*map(range, window)):
            at = [
                i * step + o - pair[0]
                for i, o, (_, _, step, pair) in zip(place, offsets, geometry, strict=True)
            ]
            inside = all(0 <= a < n for a, n in zip(at, spatial, strict=True))
            padded = all(
                -low <= a < n + high for a, (n, _, _, (low, high)) in zip(at, geometry, strict=True)
            )
            if inside:
                values.append(x[:, *at])
                total = total + weights[offsets] * values[-1]
            if inside or (padded and count_include_pad):
                divisor += weights[offsets]
        with np.errstate(invalid="ignore"):
            y[:, *place] = np.max(values, 0) if largest else total / divisor
    return y


def ours(options):
    return lambda x: jaxfused.avg_pool(x, **options)


@each_case
def test_is_the_mean_of_each_window(shape, options):
    x = normal(np.random.default_rng(0), "float32", *shape)
    y = jaxfused.avg_pool(x, **options)
    expected = loops(np.asarray(x, np.float64), **options)
    assert y.dtype == x.dtype and y.shape == expected.shape
    np.testing.assert_allclose(y, expected, rtol=2e-6, atol=1e-6)


@each_second_case
def test_the_gradient_is_the_transpose(shape, options):
    """The loops give the matrix of this linear function, whose transpose is the gradient."""
    shape = (1, *(min(n, 7) for n in shape[1:-1]), 1)
    size = int(np.prod(shape))
    with jax.enable_x64(True):
        x = put(np.random.default_rng(0).normal(size=shape))
        y, vjp = jax.vjp(ours(options), x)
        dy = put(np.random.default_rng(1).normal(size=y.shape))
        (dx,) = vjp(dy)
    # The batch has one image for each pixel.
    units = np.eye(size).reshape(size, *shape[1:])
    matrix = loops(units, **options).reshape(size, -1)
    np.testing.assert_allclose(dx.reshape(-1), matrix @ np.asarray(dy).reshape(-1), atol=1e-12)


def axes(least, most):
    """Draws a number for each spatial axis."""
    return st.tuples(*[st.integers(least, most)] * 3)


@pytest.mark.exhaustive
@settings(max_examples=25)
@given(
    spatial=st.integers(1, 2),
    size=axes(1, 7),
    window=axes(1, 5),
    strides=axes(1, 4),
    low=axes(0, 2),
    high=axes(0, 2),
    ceil_mode=st.booleans(),
    count_include_pad=st.booleans(),
    weighted=st.booleans(),
)
def test_any_windows(
    spatial, size, window, strides, low, high, ceil_mode, count_include_pad, weighted
):
    size, strides = size[:spatial], strides[:spatial]
    padding = tuple(zip(low, high, strict=True))[:spatial]
    # Padding may exceed the window, which then lies in the padding alone.
    window = tuple(min(w, n + a + b) for w, n, (a, b) in zip(window, size, padding, strict=False))
    rng = np.random.default_rng(0)
    options = dict(window=window, strides=strides, padding=padding, ceil_mode=ceil_mode)
    weights = rng.uniform(0.5, 2.0, window) if weighted else None
    mean = dict(count_include_pad=count_include_pad, weights=weights)
    with jax.enable_x64(True):
        x = rng.normal(size=(2, *size, 2))
        y = jaxfused.avg_pool(x, **options, **mean)
        np.testing.assert_allclose(y, loops(x, **options, **mean), atol=1e-12)
        y = jaxfused.max_pool(x, **options)
        np.testing.assert_array_equal(y, loops(x, **options, largest=True))


@parametrize(
    ("shape", "options"),
    [case for case in CASES if not {"ceil_mode", "weights"} & set(case[1])],
    quick=(1, 2, 5),
)
def test_is_flax_avg_pool(shape, options):
    x = normal(np.random.default_rng(0), "float32", *shape)
    spatial = len(shape) - 2
    options = dict(strides=1, padding="VALID") | options
    padding = options["padding"]
    padding = ((padding, padding),) * spatial if isinstance(padding, int) else padding
    stock = flax.linen.avg_pool(
        x,
        each_axis(options["window"], spatial),
        each_axis(options["strides"], spatial),
        padding,
        options.get("count_include_pad", True),
    )
    np.testing.assert_allclose(jaxfused.avg_pool(x, **options), stock, rtol=1e-6, atol=1e-6)


@parametrize("ceil_mode", [False, True], quick=(1,))
@pytest.mark.parametrize(
    ("shape", "window", "strides", "padding"),
    [((1, 6, 7, 2), 2, 2, 0), ((2, 8, 3), 3, 2, 1), ((1, 5, 6, 2), 3, (2, 4), 1)],
    ids=str,
)
def test_max_pool_has_the_last_windows_of_torch(shape, window, strides, padding, ceil_mode):
    x = normal(np.random.default_rng(0), "float32", *shape)
    options = dict(window=window, strides=strides, padding=padding, ceil_mode=ceil_mode)
    y, vjp = jax.vjp(lambda x: jaxfused.max_pool(x, **options), x)
    np.testing.assert_array_equal(y, loops(np.asarray(x), **options, largest=True))
    (dx,) = vjp(jnp.ones_like(y))
    assert dx.sum() == y.size


def test_a_window_beyond_the_edge_divides_by_what_is_inside_the_padding():
    """In PyTorch too, the second window of stride 2 has one of three values."""
    x = put([2.0, 4.0, 6.0]).reshape(1, 3, 1)
    y = jaxfused.avg_pool(x, 2, strides=2, ceil_mode=True)
    np.testing.assert_array_equal(y[0, :, 0], [3.0, 6.0])
    y = jaxfused.avg_pool(x, 2, strides=2, padding=((0, 1),), ceil_mode=True)
    np.testing.assert_array_equal(y[0, :, 0], [3.0, 3.0])
    # A window that would begin beyond x does not exist.
    y = jaxfused.avg_pool(x[:, :2], 2, strides=3, padding=1, ceil_mode=True)
    np.testing.assert_array_equal(y[0, :, 0], [1.0])


@parametrize("dtype", ["float32", "bfloat16", "float16"], quick=(1,))
@each_second_case
def test_is_as_accurate_as_jax_numpy(shape, options, dtype):
    """Plain jax.numpy has an axis of windows, and sums and divides in x's dtype."""
    spatial = len(shape) - 2
    window = each_axis(options["window"], spatial)
    strides = each_axis(options.get("strides", 1), spatial)
    pairs = pairs_of(options.get("padding", "VALID"), shape[1:-1], window, strides)
    geometry = zip(shape[1:-1], window, strides, pairs, strict=True)
    counts = [torch_count(n, w, s, *p, options.get("ceil_mode", False)) for n, w, s, p in geometry]
    weights = np.ones(window) if options.get("weights") is None else options["weights"]

    def padded(a, pairs, ceil):
        reach = [
            max(0, (c - 1) * s + w - n)
            for c, s, w, n in zip(counts, strides, window, a.shape[1:-1], strict=True)
        ]
        wide = [
            (low, high + r) for (low, high), r in zip(pairs, ceil * np.array(reach), strict=True)
        ]
        return jnp.pad(a, ((0, 0), *wide, (0, 0)))

    def sums(a):
        total = 0
        for offsets in itertools.product(*map(range, window)):
            taken = [
                slice(o, o + (c - 1) * s + 1, s)
                for o, c, s in zip(offsets, counts, strides, strict=True)
            ]
            total = total + a[:, *taken] * jnp.asarray(weights[offsets], a.dtype)
        return total

    none = [(0, 0)] * spatial

    def plain(x):
        ones = jnp.ones_like(x)
        if options.get("count_include_pad", True):
            ones = jnp.pad(ones, ((0, 0), *pairs, (0, 0)), constant_values=1)
        else:
            ones = padded(ones, pairs, 0)
        zeros = padded(x, pairs, 0)
        return sums(padded(zeros, none, 1)) / sums(padded(ones, none, 1))

    x = normal(np.random.default_rng(0), dtype, *shape)
    assert_values_and_gradients(ours(options), plain, x, cotangents=2)


@each_second_case
def test_nothing_is_scattered(shape, options):
    x = normal(np.random.default_rng(0), "float32", *shape)
    text = jax.jit(jax.grad(lambda x: jnp.sin(ours(options)(x)).sum())).lower(x).as_text()
    assert "scatter" not in text and "gather" not in text


def test_large_windows_are_summed_axis_by_axis():
    x = normal(np.random.default_rng(0), "float32", 1, 40, 40, 2)
    text = jax.jit(ours(dict(window=32, strides=2))).lower(x).as_text()
    assert text.count("stablehlo.reduce_window") == 2


@parametrize(("shape", "options"), CASES, quick=(3,), ids=str)
def test_derivatives(shape, options):
    x = normal(np.random.default_rng(0), "float32", *shape)
    check_grads(ours(options), (x,), order=2, atol=0.02, rtol=0.02)


def test_weights_have_a_gradient_too():
    x = normal(np.random.default_rng(0), "float32", 1, 6, 7, 2)

    def f(weights):
        options = dict(strides=2, padding=1, count_include_pad=False)
        return jaxfused.avg_pool(x, (2, 3), weights=weights, **options)

    check_grads(f, (put(WEIGHTS, "float32"),), order=1, atol=0.02, rtol=0.02)


@parametrize(("shape", "options"), CASES, quick=(3,), ids=str)
def test_transforms(shape, options):
    assert_transforms(ours(options), normal(np.random.default_rng(0), "float32", *shape))


@parametrize(("shape", "options"), CASES, quick=(3,), ids=str)
def test_empty_batches(shape, options):
    x = jnp.ones((0, *shape[1:]))
    y, vjp = jax.vjp(ours(options), x)
    assert y.shape[0] == 0 and vjp(y)[0].shape == x.shape


def test_nan_stays_in_its_windows():
    x = jnp.ones((1, 4, 4, 1)).at[0, 1, 1].set(jnp.nan).at[0, 3, 3].set(jnp.inf)
    y = jaxfused.avg_pool(x, 2, strides=2)[0, ..., 0]
    np.testing.assert_array_equal(y, [[np.nan, 1.0], [1.0, np.inf]])


def test_windows_of_padding_alone():
    x = jnp.ones((1, 3, 1))
    options = dict(padding=((2, 0),), count_include_pad=False)
    np.testing.assert_array_equal(jaxfused.avg_pool(x, 2, **options)[0, :, 0], [np.nan, 1, 1, 1])
    y = jaxfused.avg_pool(x, 2, padding=((2, 0),))[0, :, 0]
    np.testing.assert_array_equal(y, [0, 0.5, 1, 1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(x=jnp.ones((2, 3))), r"x has shape \(2, 3\), but it needs a batch axis"),
        (dict(x=jnp.ones((2, 4, 4, 1), jnp.int32)), "x has dtype int32"),
        (dict(window=0), "window is 0, but x has 2 spatial axes"),
        (dict(strides=(1, -1)), r"strides is \(1, -1\)"),
        (dict(padding="same_lower"), "padding='same_lower' is not known"),
        (dict(padding=-1), "padding is -1"),
        (dict(window=5), r"the window is \(5, 5\), but x of shape \(2, 4, 4, 1\)"),
        (dict(window=6, ceil_mode=True), r"the window is \(6, 6\), but x of shape \(2, 4, 4, 1\)"),
        (dict(weights=jnp.ones(2)), r"weights are float32\[2\], but the window is \(2, 2\)"),
        (dict(weights=np.ones((2, 2), complex)), "weights are complex64"),
        (dict(implementation="cuda"), "there is no CUDA kernel of avg_pool yet"),
        (dict(implementation="pallas"), "there is no Pallas kernel of avg_pool yet"),
    ],
)
def test_errors(change, message):
    with pytest.raises(ValueError, match=f"avg_pool: .*{message}"):
        jaxfused.avg_pool(**(dict(x=jnp.ones((2, 4, 4, 1)), window=2) | change))


# --- the mean of an image -------------------------------------------------------------------------


@parametrize("dtype", ["float32", "bfloat16"], quick=(1,))
@parametrize("shape", [(2, 5, 7, 8), (3, 4, 1), (1, 2, 3, 4, 5), (0, 4, 4, 2)], quick=(0, 3))
def test_global_avg_pool(shape, dtype):
    x = normal(np.random.default_rng(0), dtype, *shape)
    spatial = tuple(range(1, len(shape) - 1))
    assert_values_and_gradients(
        jaxfused.global_avg_pool, lambda x: x.mean(spatial), x, cotangents=2
    )


def test_global_avg_pool_sums_in_float32():
    x = jnp.ones((1, 64, 64, 1), jnp.float16) * 100
    np.testing.assert_array_equal(jaxfused.global_avg_pool(x), [[100.0]])


@pytest.mark.exhaustive
def test_transforms_of_global_avg_pool():
    assert_transforms(
        jaxfused.global_avg_pool, normal(np.random.default_rng(0), "float32", 2, 3, 4, 5)
    )


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (jnp.ones((2, 3)), r"x has shape \(2, 3\)"),
        (jnp.ones((2, 0, 3)), r"x has shape \(2, 0, 3\)"),
        (jnp.ones((2, 3, 3), jnp.int32), "x has dtype int32"),
    ],
)
def test_errors_of_global_avg_pool(x, message):
    with pytest.raises(ValueError, match=f"global_avg_pool: .*{message}"):
        jaxfused.global_avg_pool(x)


# --- shards ---------------------------------------------------------------------------------------


@parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], quick=(1,))
@parametrize(("shape", "options"), CASES, quick=(1, 3), ids=str)
def test_the_type_of_a_sharded_batch(shape, options, axis_type):
    """The mesh has one device and the same types; tests/runtime/test_sharding.py has several devices."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(axis_type,))
    sharding = NamedSharding(mesh, P("data"))
    x = normal(np.random.default_rng(0), "float32", *shape)
    run = jax.jit(lambda x: (ours(options)(x), jax.grad(lambda x: ours(options)(x).sum())(x)))
    actual = run(jax.device_put(x, sharding))
    chex.assert_trees_all_close(jax.device_get(actual), jax.device_get(run(x)), rtol=1e-6)
    if axis_type == AxisType.Explicit:
        assert all(jax.typeof(a).sharding.spec[0] == "data" for a in actual)
