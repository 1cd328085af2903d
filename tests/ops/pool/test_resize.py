"""resize against torch's recorded numbers, jax.image.resize, and its own derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import jaxfused
from jaxfused.ops.pool.resize_taps import ResizedAxis, taps
from tests.cases.normal import normal
from tests.recorded import values
from tests.support.against_float64 import assert_values_and_gradients
from tests.support.grids import parametrize
from tests.support.transforms import assert_transforms

ROWS = {name: row for name, row in values.load("resample.npz").items() if "mode" in row.options}


def last(array):
    """Returns torch's [B, C, H, W] as [B, H, W, C]."""
    return np.moveaxis(array, 1, -1)


def arguments(name):
    """Returns our arguments for those of torch's interpolate."""
    given = dict(ROWS[name].options)
    mode = given.pop("mode")
    methods = {"nearest-exact": "nearest", "nearest": "nearest_floor"}
    factor = given.pop("scale_factor", None)
    return dict(given, factor=factor, method=methods.get(mode, mode))


@parametrize("name", list(ROWS), quick=[1, 5])
def test_values_and_gradients_are_torchs(name):
    row, options = ROWS[name], arguments(name)
    x = last(row.input("x", (2, 3, 7, 8)))
    dy = last(row.input("dy", row.results["y"].shape))
    y, pull = jax.vjp(lambda x: jaxfused.resize(x, **options), x)
    np.testing.assert_allclose(y, last(row.results["y"]), atol=2e-6)
    np.testing.assert_allclose(pull(dy)[0], last(row.results["dx"]), atol=4e-6)


@pytest.mark.parametrize(
    ("method", "size", "change", "at", "place"),
    [
        ("nearest", 30, dict(size=11), 5, 15),
        ("nearest", 2, dict(size=49), 24, 1),
        ("nearest", 2, dict(size=41), 20, 0),
        ("nearest_floor", 2, dict(size=82), 41, 0),
        ("nearest_floor", 46, dict(factor=1.02), 45, 45),
    ],
    ids=str,
)
def test_the_nearest_at_a_tie_is_torchs(method, size, change, at, place):
    # Recorded from interpolate of torch 2.14.1, of images [1, 1, 1, size] on a CPU.
    x = jnp.arange(float(size)).reshape(1, size, 1)
    assert jaxfused.resize(x, method=method, **change)[0, at, 0] == place


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [(14, 3), (2, 31), (7, 9)], ids=str)
@pytest.mark.parametrize("method", ["nearest", "bilinear", "bicubic", "lanczos3", "lanczos5"])
def test_antialiased_it_is_jax_image_resize(method, size):
    x = normal(np.random.default_rng(0), "float32", 2, 7, 9, 3)
    names = {"bilinear": "linear", "bicubic": "cubic"}
    expected = jax.image.resize(x, (2, *size, 3), names.get(method, method))
    ours = jaxfused.resize(x, size, method=method, antialias=method != "nearest")
    np.testing.assert_allclose(ours, expected, atol=3e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("size", "options"),
    [
        ((11, 3), {}),
        ((11, 3), dict(align_corners=True)),
        ((12, 5), dict(method="bicubic")),
        ((1, 29), dict(method="lanczos5", antialias=True)),
    ],
    ids=str,
)
def test_is_as_accurate_as_matrices(size, options, dtype):
    x = normal(np.random.default_rng(0), dtype, 2, 5, 8, 3)

    def plain(x):
        for axis, m in enumerate(size, 1):
            spec = dict(method="bilinear", align_corners=False, antialias=False) | options
            n = x.shape[axis]
            matrix = jnp.asarray(taps(ResizedAxis(n, m, n / m, **spec)).matrix(), x.dtype)
            x = jnp.moveaxis(jnp.tensordot(x, matrix, (axis, 1)), -1, axis)
        return x

    ours = lambda x: jaxfused.resize(x, size, **options)  # noqa: E731
    assert_values_and_gradients(ours, plain, x, cotangents=2)


def test_taps_of_the_transposed_matrix():
    axis = ResizedAxis(9, 4, 9 / 4, "bicubic", False, True)
    matrix = taps(axis).matrix()
    np.testing.assert_allclose(taps(axis).transposed().matrix(), matrix.T)
    np.testing.assert_allclose(matrix.sum(axis=1), 1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", ["bilinear", "lanczos3"])
def test_derivatives_and_transforms(method):
    f = lambda x: jaxfused.resize(x, (5, 3), method=method)  # noqa: E731
    check_grads(f, (jax.random.normal(jax.random.key(0), (1, 3, 4, 2)),), order=2)
    assert_transforms(f, jax.random.normal(jax.random.key(0), (2, 3, 4, 2)))
    text = jax.jit(jax.grad(lambda x: f(x).sum())).lower(jnp.ones((1, 3, 4, 2))).as_text()
    assert "scatter" not in text  # whose additions have no fixed order on a GPU


@pytest.mark.exhaustive
def test_any_number_of_axes_and_empty_batches():
    x = normal(np.random.default_rng(0), "float32", 2, 5, 3)
    volume = normal(np.random.default_rng(0), "float32", 1, 2, 3, 4, 2)
    np.testing.assert_allclose(
        jaxfused.resize(volume, (4, 6, 8)),
        jaxfused.upsample(volume, 2),
        atol=1e-6,
    )
    assert jaxfused.resize(x, 7).shape == (2, 7, 3)
    assert jaxfused.resize(x, 5) is not None and jaxfused.resize(x[:0], 7).shape == (0, 7, 3)
    np.testing.assert_array_equal(jaxfused.resize(x, 5), x)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(x=jnp.ones((2, 3))), r"x has shape \(2, 3\), but it needs a batch axis"),
        (dict(x=jnp.ones((2, 4, 4, 1), jnp.int32)), "x has dtype int32"),
        (dict(size=None), "size is None and factor None, but one of them"),
        (dict(factor=2), "size is 3 and factor 2"),
        (dict(size=0), "size is 0, but x has 2 spatial axes"),
        (dict(size=None, factor=0.2), r"factor is 0.2, but of x of shape \(2, 4, 4, 1\)"),
        (dict(size=None, factor=(2, 2, 2)), r"factor is \(2.0, 2.0, 2.0\)"),
        (dict(size=None, factor=float("nan")), "factor is nan"),
        (dict(method="cubic"), "method is 'cubic'; pass 'nearest' or"),
        (dict(method="nearest", align_corners=True), "align_corners=True goes with"),
        (dict(antialias=True, align_corners=True), "align_corners=True goes with"),
        (dict(method="nearest", antialias=True), "antialias=True was passed with method 'nearest'"),
        (dict(implementation="cuda"), "there is no CUDA kernel of resize"),
    ],
)
def test_errors(change, message):
    with pytest.raises(ValueError, match=f"resize: .*{message}"):
        jaxfused.resize(**(dict(x=jnp.ones((2, 4, 4, 1)), size=3) | change))
