"""conv with long windows by Fourier transforms, and when that is chosen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfused
from jaxfused import dispatch
from jaxfused.ops.conv import conv as conv_operator
from jaxfused.ops.conv import fft_conv
from jaxfused.runtime.rectified import Rectified
from tests.support.against_float64 import assert_values_and_gradients
from tests.support.arrays import put
from tests.support.grids import parametrize
from tests.support.transforms import assert_transforms

STAGE = "conv by Fourier transforms"

# (shape of x, window, options)
CASES = (
    ((2, 13, 11, 3), (9, 11), {}),
    ((2, 40, 5), (40,), dict(padding="CAUSAL", activation="silu")),
    ((1, 17, 4), (6,), dict(padding="VALID")),
    ((3, 12, 14, 4), (12, 8), dict(padding=((11, 11), (0, 3)), activation="relu")),
    ((2, 9, 20, 6), (1, 16), dict(padding="SAME_LOWER")),
    ((2, 20, 3, 6), (15, 1), {}),
)


@pytest.fixture
def transforms(with_library, monkeypatch):
    """Makes transforms free, so that they are chosen wherever they can run."""
    monkeypatch.setattr(fft_conv, "_START", 0.0)
    monkeypatch.setattr(fft_conv, "_OF_VALUE", 0.0)


def arguments(case, dtype):
    shape, window, _ = case
    rng = np.random.default_rng(0)
    x = put(rng.normal(size=shape), dtype)
    w = put(rng.normal(size=(*window, 1, shape[-1])) / np.sqrt(np.prod(window)), dtype)
    bias = put(rng.normal(size=shape[-1]), jnp.float32)
    result = jax.eval_shape(lambda x, w: convolution(case, "xla")(x, w), x, w)
    return x, w, bias, put(rng.normal(size=result.shape), dtype)


def convolution(case, implementation=None):
    shape, _, options = case

    def conv(x, w, bias=None, residual=None):
        return jaxfused.conv(
            x,
            w,
            bias,
            residual=residual,
            feature_group_count=shape[-1],
            implementation=implementation,
            **options,
        )

    return conv


@parametrize("case", CASES, quick=(0, 1, 4))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_is_the_convolution(transforms, case, dtype):
    args = arguments(case, dtype)
    with dispatch.recorded() as choices:
        assert_values_and_gradients(convolution(case), convolution(case, "xla"), *args)
    assert {choice.stage for choice in choices} == {STAGE, "conv"}


def test_transformations(transforms):
    assert_transforms(convolution(CASES[1]), *arguments(CASES[1], "float32"))


def test_what_stands_beside_the_result(transforms):
    x, w, _, _ = arguments(CASES[0], "float32")
    window = dict(feature_group_count=3)
    y, returned_input, statistics = conv_operator.run(
        x, w, window=window, statistics=True, return_input=True
    )
    assert statistics is None
    np.testing.assert_array_equal(returned_input, x)
    rectified = conv_operator.run(Rectified(jax.nn.relu(x)), w, window=window).y
    np.testing.assert_array_equal(
        rectified, jaxfused.conv(jax.nn.relu(x), w, feature_group_count=3)
    )
    assert y.shape == x.shape


@pytest.mark.parametrize(
    ("shape", "window", "options", "taken"),
    [
        ((32, 56, 56, 96), (31, 31), {}, True),
        ((64, 28, 28, 192), (9, 9), {}, True),
        ((8, 2048, 768), (128,), dict(padding="CAUSAL"), True),
        ((8, 2048, 768), (2048,), dict(padding="CAUSAL"), True),
        # A kernel of ours or of XLA is fast for these windows.
        ((32, 56, 56, 96), (7, 7), {}, False),
        ((32, 56, 56, 96), (5, 3), {}, False),
        ((8, 2048, 768), (4,), dict(padding="CAUSAL"), False),
        # Ten kernels cost more than so few values, or transforms compute values that nothing needs.
        ((1, 64, 32), (9,), {}, False),
        ((32, 56, 56, 96), (31, 31), dict(strides=2), False),
        ((32, 56, 56, 96), (31, 31), dict(kernel_dilation=2), False),
        ((32, 56, 56, 96), (31, 31), dict(padding="CIRCULAR"), False),
        ((32, 56, 56, 96), (31, 31), dict(padding=31), False),
        ((2**12, 256, 256, 96), (31, 31), {}, False),
        ((32, 56, 56, 96), (31, 31), dict(implementation="xla"), False),
        # Results without elements.
        ((0, 56, 56, 96), (31, 31), {}, False),
        ((32, 28, 28, 96), (31, 31), dict(padding="VALID"), False),
    ],
)
def test_where_transforms_are_taken(with_library, shape, window, options, taken):
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    w = jax.ShapeDtypeStruct((*window, 1, shape[-1]), jnp.bfloat16)

    def conv(x, w):
        return jaxfused.conv(x, w, feature_group_count=shape[-1], **options)

    with dispatch.recorded() as choices:
        jax.eval_shape(conv, x, w)
    assert any(choice.stage == STAGE for choice in choices) == taken


def test_a_cpu_adds_products():
    x, w = jnp.ones((32, 56, 56, 96), jnp.bfloat16), jnp.ones((31, 31, 1, 96), jnp.bfloat16)
    with dispatch.recorded() as choices:
        jax.eval_shape(lambda x, w: jaxfused.conv(x, w, feature_group_count=96), x, w)
    assert [choice.stage for choice in choices] == ["conv"]


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_is_the_convolution_on_a_gpu(monkeypatch, case, dtype):
    monkeypatch.setattr(fft_conv, "_START", 0.0)
    monkeypatch.setattr(fft_conv, "_OF_VALUE", 0.0)
    assert_values_and_gradients(
        convolution(case), convolution(case, "xla"), *arguments(case, dtype)
    )
