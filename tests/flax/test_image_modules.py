"""Pooling, upsampling, separable and local convolutions, compared with Flax's layers."""

import math

import chex
import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfused
import jaxfused.linen
import jaxfused.nnx
from jaxfused import dispatch
from jaxfused.runtime import cuda_library
from tests.flax.test_modules import (
    assert_same,
    assert_same_trees,
    linen_apply,
    normal,
    params_of,
    shared_params,
)
from tests.support.grids import parametrize
from tests.support.lowering import kernels

PACKAGES = pytest.mark.parametrize("ours", [jaxfused.linen, jaxfused.nnx], ids=["linen", "nnx"])
KEY = jax.random.key(1)

# --- pools ----------------------------------------------------------------------------------------

POOLS = (
    ((2, 8, 9, 3), dict(window_shape=(2, 2), strides=(2, 2))),
    ((2, 8, 9, 3), dict(window_shape=(3, 2), padding="SAME")),
    ((8, 9, 3), dict(window_shape=(3, 3), strides=(2, 1), padding=((1, 0), (0, 2)))),
    ((2, 3, 8, 4), dict(window_shape=(4,), strides=(3,), padding="SAME_LOWER")),
    ((2, 3, 2, 8, 8, 4), dict(window_shape=(3, 3), padding="same")),
    ((0, 8, 8, 4), dict(window_shape=(2, 2))),
)


@PACKAGES
@parametrize("dtype", ["float32", "bfloat16"], quick=(0, 1))
@parametrize(("shape", "options"), POOLS, quick=(1, 2, 3), ids=str)
def test_pools_are_flax(ours, shape, options, dtype):
    x = normal(0, *shape, dtype=jnp.dtype(dtype))
    tolerance = float(jnp.finfo(dtype).eps) * 4
    calls = (("max_pool", {}), ("avg_pool", {}), ("avg_pool", dict(count_include_pad=False)))

    @jax.jit
    def pooled(x):
        return [
            [getattr(of, name)(x, **options, **more) for of in (ours, flax.linen)]
            for name, more in calls
        ]

    with dispatch.recorded_fallbacks() as fallbacks:
        for actual, expected in pooled(x):
            assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
            # Flax sums in bfloat16, which is less exact.
            np.testing.assert_allclose(
                np.asarray(actual, np.float32),
                np.asarray(expected, np.float32),
                rtol=math.prod(options["window_shape"]) * tolerance,
                atol=math.prod(options["window_shape"]) * tolerance,
            )
    assert not fallbacks


def test_the_arguments_of_pools_have_flax_order():
    x = normal(0, 2, 6, 6, 3)
    arguments = (x, (3, 3), (2, 2), "SAME")
    chex.assert_trees_all_equal(
        jaxfused.linen.max_pool(*arguments), flax.linen.max_pool(*arguments)
    )
    chex.assert_trees_all_close(
        jaxfused.linen.avg_pool(*arguments, False),
        flax.linen.avg_pool(*arguments, False),
        rtol=1e-6,
    )
    assert jaxfused.nnx.avg_pool is jaxfused.linen.avg_pool
    assert jaxfused.nnx.min_pool is flax.nnx.min_pool


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_gradient_of_pools(dtype):
    x = normal(0, 2, 3, 6, 7, 4, dtype=jnp.dtype(dtype))

    def loss(pool):
        return lambda x: jnp.sin(pool(x.astype("float32"), (2, 2), (2, 2))).sum()

    for name in ("max_pool", "avg_pool"):
        ours, stock = (
            jax.jit(jax.grad(loss(getattr(of, name))))(x) for of in (jaxfused.nnx, flax.linen)
        )
        chex.assert_trees_all_close(ours, stock, rtol=1e-2 if dtype == "bfloat16" else 1e-5)


@pytest.mark.parametrize(
    ("x", "padding", "reason"),
    [
        (jnp.arange(16).reshape(1, 4, 4, 1), "VALID", "int32 is no floating-point dtype"),
        (jnp.ones((1, 4, 4, 1)), ((-1, 0), (0, 0)), "padding is negative"),
        (jnp.ones((1, 1, 4, 1)), "VALID", "the window is larger than the inputs"),
        (jnp.ones((1, 4, 4, 0)), "VALID", "the inputs have no values"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_explain_lists_pools_that_flax_serves(x, padding, reason):
    def outcome(pool):
        try:
            return pool(x, (2, 2), padding=padding)
        except (TypeError, ValueError) as error:
            return str(error)

    with dispatch.recorded_fallbacks() as fallbacks:
        actual = outcome(jaxfused.nnx.max_pool)
    assert fallbacks == [dispatch.Fallback("max_pool", reason)]
    expected = outcome(flax.linen.max_pool)
    np.testing.assert_array_equal(actual, expected)


# --- separable convolution ------------------------------------------------------------------------

SEPARABLE = (
    dict(),
    dict(strides=2, depthwise_activation="relu", activation="silu", channel_multiplier=2),
    dict(use_bias=False, kernel_dilation=2, padding="CIRCULAR", activation="gelu_tanh"),
)
ACTIVATIONS = {
    None: lambda x: x,
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "gelu_tanh": jax.nn.gelu,
}


@parametrize("options", SEPARABLE, quick=(1,))
@parametrize("size", [(3, 3), 3, (3,)], quick=(0,))
def test_separable_conv(options, size):
    x = normal(0, 2, 8, 4) if size != (3, 3) else normal(0, 2, 6, 8, 4)
    nnx = jaxfused.nnx.SeparableConv(4, 6, size, rngs=flax.nnx.Rngs(0), **options)
    linen = jaxfused.linen.SeparableConv(6, size, **options)
    rest = dict(options)
    inner, outer = (ACTIVATIONS[rest.pop(k, None)] for k in ("depthwise_activation", "activation"))
    bias = dict(use_bias=rest.pop("use_bias", True))
    between = 4 * rest.pop("channel_multiplier", 1)

    class Stock(flax.linen.Module):
        @flax.linen.compact
        def __call__(self, x):
            names = dict(feature_group_count=4, name="depthwise")
            y = inner(flax.linen.Conv(between, size, **rest, **bias, **names)(x))
            ones = (1,) * (x.ndim - 2)
            return outer(flax.linen.Conv(6, ones, **bias, name="pointwise")(y))

    stock = Stock()
    assert_same_trees(linen.init(KEY, x), stock.init(KEY, x))
    assert_same(nnx, linen, linen_apply(stock), shared_params(nnx, linen, x), x)


def test_separable_conv_adds_a_residual():
    x, residual = normal(0, 2, 3, 6, 6, 4), normal(1, 2, 3, 6, 6, 8)
    nnx = jaxfused.nnx.SeparableConv(4, 8, (3, 3), rngs=flax.nnx.Rngs(0))
    linen = jaxfused.linen.SeparableConv(8, (3, 3))
    params = params_of(nnx)
    expected = nnx(x) + residual
    np.testing.assert_allclose(nnx(x, residual=residual), expected, rtol=1e-5, atol=1e-5)
    actual = linen_apply(linen)(params, x, residual=residual)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


@parametrize("library", ["linen", "nnx"], quick=(1,))
def test_a_depthwise_kernel_serves_separable_conv(hopper, monkeypatch, library):
    monkeypatch.setattr(cuda_library, "why_unavailable", lambda: None)
    monkeypatch.setattr(cuda_library, "architectures", lambda: ("90",))
    monkeypatch.setattr(cuda_library, "register", lambda: None)
    x = jax.ShapeDtypeStruct((2, 32, 32, 64), jnp.bfloat16)

    def layer(x):
        if library == "nnx":
            options = dict(dtype=jnp.bfloat16, rngs=flax.nnx.Rngs(0))
            return jaxfused.nnx.SeparableConv(64, 128, (7, 7), **options)(x)
        module = jaxfused.linen.SeparableConv(128, (7, 7), dtype=jnp.bfloat16)
        return module.init_with_output(KEY, x)[0]

    assert any("depthwise" in name for name in kernels(layer, x))


# --- Upsample -------------------------------------------------------------------------------------


@PACKAGES
@parametrize("method", ["nearest", "bilinear"], quick=(0, 1))
@parametrize(
    ("shape", "factor", "size"),
    [
        ((2, 3, 4, 5), 2, (2, 6, 8, 5)),
        ((3, 4, 5), (2, 3), (6, 12, 5)),
        ((2, 3, 4, 5), (3,), (2, 3, 12, 5)),
        ((0, 3, 4, 5), (2, 2), (0, 6, 8, 5)),
    ],
    quick=(0, 2),
    ids=str,
)
def test_upsample_without_parameters(ours, method, shape, factor, size):
    x = normal(0, *shape)
    layer = ours.Upsample(method, factor)
    y = layer(x) if ours is jaxfused.nnx else layer.apply({}, x)
    assert y.shape == size
    if x.size:
        np.testing.assert_allclose(y, jax.image.resize(x, size, method), rtol=1e-5, atol=1e-5)


@parametrize(
    ("shape", "factor", "features"),
    [((2, 3, 4, 5), 2, 6), ((2, 3, 4), (3,), None), ((2, 2, 3, 4, 5), (2, 1), 3)],
    quick=(0, 1),
    ids=str,
)
@parametrize("use_bias", [True, False], quick=(0,))
def test_upsample_learned(shape, factor, features, use_bias):
    x = normal(0, *shape)
    size = (factor, factor) if isinstance(factor, int) else factor
    nnx = jaxfused.nnx.Upsample(
        "learned",
        factor,
        in_features=shape[-1],
        out_features=features,
        use_bias=use_bias,
        rngs=flax.nnx.Rngs(0),
    )
    linen = jaxfused.linen.Upsample("learned", factor, features, use_bias=use_bias)

    class Stock(flax.linen.Module):
        @flax.linen.compact
        def __call__(self, x):
            options = dict(strides=size, use_bias=use_bias, name="conv")
            return flax.linen.ConvTranspose(features or shape[-1], size, **options)(x)

    stock = Stock()
    assert_same_trees(linen.init(KEY, x), stock.init(KEY, x))
    assert isinstance(nnx.conv, jaxfused.nnx.ConvTranspose)
    assert_same(nnx, linen, linen_apply(stock), shared_params(nnx, linen, x), x)


@PACKAGES
def test_upsample_has_a_dtype(ours):
    x = normal(0, 1, 3, 4, 5)
    layer = ours.Upsample("bilinear", dtype=jnp.bfloat16)
    y = layer(x) if ours is jaxfused.nnx else layer.apply({}, x)
    assert y.dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            dict(method="cubic"),
            "method='cubic' is not known; pass 'nearest', 'bilinear' or 'learned'",
        ),
        (
            dict(method="nearest", features=3),
            "3 channels were asked for, but method 'nearest' keeps",
        ),
    ],
)
def test_errors_of_upsample(arguments, message):
    with pytest.raises(ValueError, match=f"Upsample: {message}"):
        jaxfused.linen.Upsample(**arguments).init(KEY, jnp.ones((1, 2, 2, 1)))
    of_nnx = {("out_" if k == "features" else "") + k: v for k, v in arguments.items()}
    with pytest.raises(ValueError, match=f"Upsample: {message}"):
        jaxfused.nnx.Upsample(**of_nnx)


def test_errors_of_upsample_learned():
    with pytest.raises(ValueError, match="in_features or rngs is None"):
        jaxfused.nnx.Upsample("learned", rngs=flax.nnx.Rngs(0))
    x = jnp.ones((2, 4, 3))
    message = r"factor is 2, which is for two spatial axes .* pass .* such as \(2,\) for one"
    with pytest.raises(ValueError, match=message):
        jaxfused.nnx.Upsample("learned", in_features=3, rngs=flax.nnx.Rngs(0))(x)
    with pytest.raises(ValueError, match=message):
        jaxfused.linen.Upsample("learned").init(KEY, x)
    with pytest.raises(ValueError, match=r"factor is \(2, 2, 2\), but x has 1 spatial axes"):
        jaxfused.nnx.Upsample("nearest", (2, 2, 2))(x)


# --- ConvLocal ------------------------------------------------------------------------------------


def test_conv_local_is_flax_and_explain_says_so():
    x = normal(0, 2, 6, 5, 3)
    ours, stock = (of.ConvLocal(4, (3, 2), strides=2) for of in (jaxfused.linen, flax.linen))
    variables = stock.init(KEY, x)
    assert_same_trees(ours.init(KEY, x), variables)
    np.testing.assert_array_equal(ours.apply(variables, x), stock.apply(variables, x))
    report = jaxfused.explain(ours.apply, variables, x)
    expected = dispatch.Fallback("jaxfused.linen.ConvLocal", "it has a kernel for each place")
    assert report.fallbacks == ((expected, 1),)
    assert "jaxfused.linen.ConvLocal runs Flax's own code" in str(report)
