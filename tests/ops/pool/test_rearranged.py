"""pixel_shuffle, pixel_unshuffle, blur_pool and carafe against torch's recorded numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import jaxfused
from tests.cases.normal import normal
from tests.recorded import values
from tests.support.against_float64 import assert_values_and_gradients
from tests.support.grids import parametrize
from tests.support.transforms import assert_transforms


def last(array):
    return np.moveaxis(array, 1, -1)


def test_pixels_are_shuffled_as_in_torch():
    row = values.load("resample.npz")["shuffle"]
    x = last(row.input("x", (2, 12, 3, 4)))
    y = last(row.input("y", (2, 3, 6, 8)))
    np.testing.assert_array_equal(jaxfused.pixel_shuffle(x), last(row.results["y"]))
    np.testing.assert_array_equal(jaxfused.pixel_unshuffle(y), last(row.results["back"]))


@pytest.mark.exhaustive
@pytest.mark.parametrize("order", ["channel_first", "pixel_first"])
@pytest.mark.parametrize(
    ("shape", "factor"), [((2, 3, 12), 4), ((1, 2, 3, 12), (3, 2)), ((1, 2, 1, 3, 8), 2)]
)
def test_pixels_come_back(shape, factor, order):
    x = normal(np.random.default_rng(0), "bfloat16", *shape)
    y = jaxfused.pixel_shuffle(x, factor, order=order)
    assert y.size == x.size
    np.testing.assert_array_equal(jaxfused.pixel_unshuffle(y, factor, order=order), x)


@pytest.mark.exhaustive
def test_pixels_of_tensorflow():
    # depth_to_space of 8 channels reads 0 2 4 6 and 1 3 5 7 for its two.
    x = jnp.arange(8.0).reshape(1, 1, 1, 8)
    y = jaxfused.pixel_shuffle(x, order="pixel_first")
    np.testing.assert_array_equal(y[..., 0].ravel(), [0, 2, 4, 6])
    np.testing.assert_array_equal(y[..., 1].ravel(), [1, 3, 5, 7])


def test_blur_is_timms():
    row = values.load("resample.npz")["blur"]
    x = last(row.input("x", (2, 3, 7, 8)))
    np.testing.assert_allclose(jaxfused.blur_pool(x), last(row.results["y"]), atol=1e-6)
    five = jaxfused.blur_pool(x, filter_size=5)
    np.testing.assert_allclose(five, last(row.results["y5"]), atol=1e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", ["reflect", "edge", "zeros"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blur_is_as_accurate_as_a_convolution(mode, dtype):
    x = normal(np.random.default_rng(0), dtype, 2, 6, 7, 3)
    modes = dict(zeros="constant")

    def plain(x):
        w = jnp.asarray([0.25, 0.5, 0.25], x.dtype)
        kernel = jnp.broadcast_to((w[:, None] * w)[:, :, None, None], (3, 3, 1, 3))
        x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), modes.get(mode, mode))
        return jax.lax.conv_general_dilated(
            x,
            kernel,
            (2, 2),
            "VALID",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=3,
        )

    ours = lambda x: jaxfused.blur_pool(x, padding_mode=mode)  # noqa: E731
    assert_values_and_gradients(ours, plain, x, cotangents=2)


def plain_carafe(x, kernels, size, groups):
    """The definition, in NumPy."""
    batch, height, width, channels = x.shape
    _, rows, columns, _ = kernels.shape
    factor, r = rows // height, size // 2
    y = np.zeros((batch, rows, columns, channels))
    each = channels // groups
    for b, i, j, c in np.ndindex(y.shape):
        k = kernels[b, i, j].reshape(groups, size, size)[c // each]
        for m, n in np.ndindex(size, size):
            row, column = i // factor + m - r, j // factor + n - r
            if 0 <= row < height and 0 <= column < width:
                y[b, i, j, c] += k[m, n] * x[b, row, column, c]
    return y


@parametrize(("size", "groups", "factor"), [(3, 1, 2), (5, 2, 3)], quick=[1])
def test_carafe_is_its_definition(size, groups, factor):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 3, 4, 4)).astype(np.float32)
    kernels = rng.standard_normal((2, 3 * factor, 4 * factor, groups * size**2)).astype(np.float32)
    y = jax.jit(lambda *a: jaxfused.carafe(*a, kernel_size=size, groups=groups))(x, kernels)
    np.testing.assert_allclose(y, plain_carafe(x, kernels, size, groups), atol=2e-5)


@pytest.mark.exhaustive
def test_derivatives_and_transforms():
    x = jax.random.normal(jax.random.key(0), (2, 4, 4, 4))
    kernels = jax.random.normal(jax.random.key(1), (2, 8, 8, 9))
    carafe = lambda x, k: jaxfused.carafe(x, k, kernel_size=3)  # noqa: E731
    check_grads(carafe, (x, kernels), order=2)
    assert_transforms(carafe, x, kernels)
    for f in (jaxfused.pixel_shuffle, jaxfused.pixel_unshuffle, jaxfused.blur_pool):
        check_grads(f, (x,), order=2)
        assert_transforms(f, x)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: jaxfused.pixel_shuffle(x, 3), "pixel_shuffle: x has 4 channels and factor is 3"),
        (lambda x: jaxfused.pixel_shuffle(x, 0), "pixel_shuffle: factor is 0"),
        (lambda x: jaxfused.pixel_unshuffle(x, 3), "pixel_unshuffle: x has shape"),
        (lambda x: jaxfused.pixel_unshuffle(x, order="CRD"), "pixel_unshuffle: order is 'CRD'; pass"),
        (lambda x: jaxfused.blur_pool(x[:, :1]), "blur_pool: x has shape .* an axis of 1 pixels is too"),
        (lambda x: jaxfused.blur_pool(x, filter_size=0), "blur_pool: filter_size is 0"),
        (lambda x: jaxfused.blur_pool(x, padding_mode="wrap"), "blur_pool: padding_mode is 'wrap'"),
        (lambda x: jaxfused.carafe(x, x), r"carafe: kernels has shape \(1, 4, 4, 4\)"),
        (lambda x: jaxfused.carafe(x, x, kernel_size=2), "carafe: kernel_size is 2, but"),
        (lambda x: jaxfused.carafe(x, x, groups=3), "carafe: groups is 3, but it divides the channels"),
        (lambda x: jaxfused.carafe(x[0], x), "carafe: x has shape"),
    ],
)  # fmt: skip
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call(jnp.ones((1, 4, 4, 4)))
