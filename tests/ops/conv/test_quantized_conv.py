"""quantized_conv: compared with the dequantised convolution, in its kernel, and with bad input."""

from dataclasses import replace
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfused
from jaxfused.runtime.activation import activate
from jaxfused.runtime.quantized_array import QuantizedArray
from pallas_kernels.conv.conv import ConvCall, fitting, quantized_forward
from pallas_kernels.conv.product import ConvConfig
from pallas_kernels.conv.window import Window
from tests.flax.test_modules import normal
from tests.support.arrays import put
from tests.support.grids import parametrize
from tests.support.lowering import kernels, lowered

LETTERS = {1: ("NHC", "HIO", "NHC"), 2: ("NHWC", "HWIO", "NHWC"), 3: ("NDHWC", "DHWIO", "NDHWC")}


def float64_conv(x, kernel, bias, residual, activation, **options):
    """Computes the plain convolution in float64."""

    @jax.jit
    def convolved(x, kernel, bias, residual):
        y = jax.lax.conv_general_dilated(
            x,
            kernel,
            options.get("strides", (1,) * (x.ndim - 2)),
            options.get("padding", "SAME"),
            feature_group_count=options.get("feature_group_count", 1),
            rhs_dilation=options.get("kernel_dilation"),
            dimension_numbers=LETTERS[x.ndim - 2],
        )
        y = y if bias is None else y + bias
        return activate(activation, y if residual is None else y + residual)

    with jax.enable_x64(True):
        arrays = jax.tree.map(lambda a: np.asarray(a, np.float64), (x, kernel, bias, residual))
        return np.asarray(convolved(*arrays))


def quantized_weights(kernel, dtype="int8", **options):
    return jaxfused.quantize(kernel.reshape(-1, kernel.shape[-1]), dtype, **options)


CASES = [
    ((2, 7, 9, 16), (3, 3), 8, {}, "int8", {}),
    (
        (2, 8, 8, 16),
        (3, 3),
        8,
        dict(strides=(2, 2), padding="VALID"),
        "int8",
        dict(layout="columns"),
    ),
    ((1, 6, 6, 16), (3, 3), 8, dict(kernel_dilation=(2, 2)), "int4", {}),
    ((1, 6, 6, 16), (3, 3), 8, {}, "int4", dict(group_size=16, symmetric=False)),
    ((2, 6, 6, 8), (5, 5), 8, dict(feature_group_count=8), "int8", {}),
    ((2, 20, 8), (3,), 6, dict(feature_group_count=2), "int8", {}),
    ((1, 4, 5, 6, 4), (3, 3, 3), 6, {}, "int8", {}),
    ((2, 5, 6, 8), (3, 3), 4, {}, "float8_e4m3fn", {}),
]


@parametrize(("shape", "size", "features", "options", "dtype", "format"), CASES, quick=(0, 3))
@pytest.mark.parametrize("x_dtype", [None, "int8", "float8_e4m3fn"])
def test_is_the_dequantised_convolution(shape, size, features, options, dtype, format, x_dtype):
    kernel = normal(0, *size, shape[-1] // options.get("feature_group_count", 1), features)
    w = quantized_weights(kernel, dtype, **format)
    x, bias = normal(1, *shape), normal(2, features)
    like = jax.eval_shape(lambda: jaxfused.conv(x, kernel, **options))
    residual = normal(3, *like.shape)
    for per_image in (False, True)[: 1 + (x_dtype is not None)]:
        q = x
        if x_dtype is not None:
            scale = jnp.abs(x).max(axis=None if not per_image else tuple(range(1, x.ndim)))
            shaped = scale.reshape(-1, *(1,) * (x.ndim - 1)) / (127 if x_dtype == "int8" else 448)
            q = jaxfused.quantize(x, x_dtype, axis=-1, scale=shaped)
        y = jax.jit(
            lambda q, w, bias, residual: jaxfused.quantized_conv(
                q, w, bias, residual=residual, activation="silu", kernel_size=size, **options
            )
        )(q, w, bias, residual)
        floats = x if x_dtype is None else q.dequantize()
        expected = float64_conv(
            floats, w.dequantize().reshape(kernel.shape), bias, residual, "silu", **options
        )
        assert y.dtype == jnp.float32
        np.testing.assert_allclose(y, expected, rtol=2e-5, atol=2e-5)


def test_integers_are_summed_exactly():
    """All magnitudes are maximal, and their sum has more bits than float32."""
    x = jaxfused.quantize(jnp.full((1, 3, 3, 1024), 127.0), axis=-1, scale=1.0)
    x = QuantizedArray(x.values.at[0, 1, 1, 0].set(126), x.scale.reshape(1, 1, 1, 1), None, -1)
    w = jaxfused.quantize(jnp.full((9 * 1024, 2), -127.0), scale=1.0)
    y = jaxfused.quantized_conv(x, w, kernel_size=3, padding="VALID")
    np.testing.assert_array_equal(
        y, np.full((1, 1, 1, 2), np.float32(-(127 * 127 * 9 * 1024 - 127)))
    )


def test_gradients():
    x, bias, residual = normal(0, 2, 5, 5, 8), normal(1, 4), normal(2, 2, 5, 5, 4)
    w = quantized_weights(normal(3, 3, 3, 8, 4), layout="rows")
    kernel = w.dequantize().reshape(3, 3, 8, 4)

    def ours(x, bias, residual):
        y = jaxfused.quantized_conv(
            x, w, bias, residual=residual, activation="gelu_tanh", kernel_size=(3, 3)
        )
        return jnp.square(y).sum()

    def plain(x, bias, residual):
        y = jaxfused.conv(x, kernel, bias, residual=residual, activation="gelu_tanh")
        return jnp.square(y).sum()

    actual, expected = (jax.jit(jax.grad(f, (0, 1, 2)))(x, bias, residual) for f in (ours, plain))
    chex.assert_trees_all_close(actual, expected, rtol=1e-5, atol=1e-5)
    frozen = jax.jit(
        jax.grad(
            lambda scale: jnp.sum(
                jaxfused.quantized_conv(x, QuantizedArray(w.values, scale, None, -2), kernel_size=3)
            )
        )
    )(w.scale)
    np.testing.assert_array_equal(frozen, jnp.zeros_like(w.scale))


def int8_operands(shape, size, features):
    x = jaxfused.quantize(normal(0, *shape), axis=-1, per_tensor=True)
    w = quantized_weights(normal(1, *size, shape[-1], features), layout="columns")
    return x, w, normal(2, features)


@parametrize(
    ("shape", "size", "features", "options"),
    [
        ((2, 9, 11, 32), (3, 3), 40, dict(activation="silu")),
        ((1, 10, 8, 128), (3, 3), 64, dict(strides=2)),
        ((1, 70, 16), (4,), 8, dict(padding="CAUSAL")),
        ((1, 4, 5, 8, 16), (3, 3, 3), 24, {}),
        ((3, 8, 8, 144), (3, 3), 160, dict(kernel_dilation=2)),
    ],
    quick=(0,),
)
def test_kernel_in_the_interpreter(shape, size, features, options, interpreted_hopper):
    x, w, bias = int8_operands(shape, size, features)
    like = jax.eval_shape(
        lambda: jaxfused.quantized_conv(x, w, kernel_size=size, implementation="xla", **options)
    )
    residual = normal(3, *like.shape)

    def run(implementation):
        def f(values, bias, residual):
            q = QuantizedArray(values, x.scale, None, -1)
            return jaxfused.quantized_conv(
                q,
                w,
                bias,
                residual=residual,
                kernel_size=size,
                implementation=implementation,
                **options,
            )

        def value_and_gradients(bias, residual):
            y, vjp = jax.vjp(lambda *args: f(x.values, *args), bias, residual)
            return y, vjp(jnp.ones_like(y))

        return jax.jit(value_and_gradients)(bias, residual)

    chex.assert_trees_all_close(run("pallas"), run("xla"), rtol=1e-5, atol=1e-5)


def test_kernel_under_vmap(interpreted_hopper):
    x, w, _ = int8_operands((1, 6, 8, 16), (3, 3), 8)
    values = jnp.stack([x.values, -x.values])

    def run(implementation):
        def f(values):
            q = QuantizedArray(values, x.scale, None, -1)
            return jaxfused.quantized_conv(q, w, kernel_size=3, implementation=implementation)

        return jax.jit(jax.vmap(f))(values)

    np.testing.assert_allclose(run("pallas"), run("xla"), rtol=1e-6)


def check_sixteen_bits(case, x_dtype, out_dtype, implementation):
    """Checks a result and its gradient. Returns it as a function of the bias, and the bias."""
    shape, size, features, options, dtype, format = case
    kernel = normal(0, *size, shape[-1] // options.get("feature_group_count", 1), features)
    w = quantized_weights(kernel, dtype, **format)
    x = jaxfused.quantize(normal(1, *shape), x_dtype, axis=-1, per_tensor=True)
    bias = normal(2, features)

    def convolved(bias):
        return jaxfused.quantized_conv(
            x,
            w,
            bias,
            kernel_size=size,
            out_dtype=out_dtype,
            implementation=implementation,
            **options,
        )

    y = jax.jit(convolved)(bias)
    floats = x.dequantize(), w.dequantize().reshape(kernel.shape)
    expected = float64_conv(*floats, bias, None, None, **options)
    assert y.dtype == out_dtype
    unit = float(jnp.finfo(out_dtype).eps) * np.abs(expected).max()
    np.testing.assert_allclose(np.float64(y), expected, rtol=0, atol=2 * unit)
    (dbias,) = jax.jit(lambda bias: jax.vjp(convolved, bias)[1](jnp.ones_like(y)))(bias)
    np.testing.assert_allclose(dbias, np.full(features, y.size / features), rtol=1e-6)
    return convolved, bias


@parametrize("case", CASES, quick=(3,))
@pytest.mark.parametrize("x_dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("out_dtype", ["bfloat16", "float16"])
def test_xla_convolves_sixteen_bits(case, x_dtype, out_dtype, hopper):
    convolved, bias = check_sixteen_bits(case, x_dtype, out_dtype, "xla")
    program = lowered(convolved, bias).splitlines()
    convolutions = [line for line in program if "stablehlo.convolution" in line]
    assert convolutions and all("f32" not in line for line in convolutions)


@parametrize("channels", [64, 320], quick=(0,))
def test_lowers_for_a_gpu(channels, hopper):
    x, w, bias = jax.eval_shape(lambda: int8_operands((4, 64, 64, channels), (3, 3), channels))

    def run(x, w, bias):
        return jaxfused.quantized_conv(
            x,
            w,
            bias,
            kernel_size=3,
            activation="silu",
            out_dtype=jnp.bfloat16,
            implementation="pallas",
        )

    assert kernels(run, x, w, bias) == ["quantized_conv"]


def test_few_channels_take_the_kernel_of_sixteen_bits(hopper):
    x, w, bias = jax.eval_shape(lambda: int8_operands((4, 64, 64, 64), (3, 3), 64))

    def run(x, w, bias, **options):
        return jaxfused.quantized_conv(x, w, bias, kernel_size=3, activation="silu", **options)

    assert kernels(partial(run, out_dtype=jnp.bfloat16), x, w, bias) == ["conv"]
    assert not kernels(run, x, w, bias)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(kernel_size=(3,)), r"kernel_size is \(3,\), but x has shape"),
        (dict(kernel_size=0), "kernel_size is 0"),
        (
            dict(kernel_size=5),
            "windows of 25 weights over 16 channels in 1 groups have 400 numbers",
        ),
        (dict(feature_group_count=3), "feature_group_count is 3"),
        (
            dict(w=jnp.ones((144, 8))),
            "w has to be a QuantizedArray .* ArrayImpl; pass jaxfused.quantize",
        ),
        # The test quantises the arrays, so that processes that only import this file need not.
        (lambda: dict(w=jaxfused.quantize(jnp.ones((144, 8)), axis=-1)), "it has axis -1"),
        (
            lambda: dict(x=jaxfused.quantize_rows(jnp.ones((2, 5, 6, 16)))),
            "a scale of shape .* sums over pixels",
        ),
        (
            lambda: dict(
                x=jaxfused.quantize(
                    jnp.ones((2, 5, 6, 16)), axis=-1, per_tensor=True, symmetric=False
                )
            ),
            "x has zero points, but the padding",
        ),
        (dict(bias=jnp.ones(7)), r"bias has shape \(7,\)"),
        (dict(residual=jnp.ones((2, 5, 6, 7))), r"residual has shape"),
        (dict(out_dtype="int8"), "out_dtype is int8, but the result is of floats"),
        (dict(implementation="cuda"), "there is no CUDA kernel of quantized_conv"),
        (dict(implementation="pallas"), "needs an NVIDIA GPU|Hopper"),
    ],
)
def test_errors(change, message):
    x, w, _ = int8_operands((2, 5, 6, 16), (3, 3), 8)
    options = dict(x=x, w=w, kernel_size=3) | (change() if callable(change) else change)
    with pytest.raises(ValueError, match=message):
        jaxfused.quantized_conv(
            options.pop("x"), options.pop("w"), options.pop("bias", None), **options
        )


def test_sums_that_might_not_fit_are_refused():
    x = jaxfused.quantize(jnp.ones((1, 3, 3, 16384)), axis=-1, per_tensor=True)
    w = jax.tree.map(
        lambda a: jnp.zeros(a.shape, a.dtype),
        jax.eval_shape(lambda: quantized_weights(jnp.ones((3, 3, 16384, 2)))),
    )
    with pytest.raises(ValueError, match=r"an output sums 147456 products.*split the channels"):
        jaxfused.quantized_conv(x, w, kernel_size=3)


def test_why_the_kernel_cannot_run(hopper):
    x, w, _ = int8_operands((2, 8, 8, 24), (3, 3), 8)
    with pytest.raises(ValueError, match="multiples of 16 channels, and x has 24"):
        jaxfused.quantized_conv(x, w, kernel_size=3, implementation="pallas")
    x, w, _ = int8_operands((2, 8, 8, 16), (3, 3), 8)
    images = QuantizedArray(x.values, jnp.ones((2, 1, 1, 1)), None, -1)
    with pytest.raises(ValueError, match="it takes one scale for all of x"):
        jaxfused.quantized_conv(images, w, kernel_size=3, implementation="pallas")
    with pytest.raises(ValueError, match="are dense, and x has 2 groups"):
        jaxfused.quantized_conv(
            x,
            quantized_weights(normal(0, 3, 3, 8, 8)),
            kernel_size=3,
            feature_group_count=2,
            implementation="pallas",
        )


SMALL = ConvConfig(tile_m=64, tile_n=64, stages=2, epilogue_columns=32, turns_weights=True)


def check_config(channels, features, config, strides=(1, 1)):
    """Integer sums are exact in every plan, and scales and bias are applied in float32."""
    rng = np.random.default_rng(0)
    x = put(rng.integers(-127, 128, (3, 8, 10, channels)), jnp.int8)
    w = put(rng.integers(-127, 128, (3, 3, channels, features)), jnp.int8)
    scale = put(rng.integers(1, 5, features) / 64.0, jnp.float32)
    bias = put(rng.integers(-99, 99, features), jnp.float32)
    window = Window((3, 3), ((1, 1), (1, 0)), strides, (1, 1))
    y = jax.jit(
        lambda x, w: quantized_forward(
            x,
            w,
            scale,
            bias,
            None,
            window=window,
            activation=None,
            out_dtype=jnp.float32,
            multiprocessors=2,
            config=config,
        )
    )(x, w)
    padding = dict(strides=strides, padding=window.padding)
    exact = float64_conv(x, w, None, None, None, **padding)
    np.testing.assert_array_equal(y, np.float32(exact) * scale + bias)


@parametrize(
    ("channels", "features", "config", "strides"),
    [
        (80, 48, SMALL, (1, 1)),
        (32, 64, replace(SMALL, plan="rows"), (1, 1)),
        (32, 64, replace(SMALL, plan="resident"), (1, 1)),
        (144, 160, replace(SMALL, tile_m=128, tile_n=160, ping_pong=False), (1, 1)),
        (128, 72, replace(SMALL, tile_n=96), (2, 2)),
    ],
    quick=(1,),
)
def test_plans_in_the_interpreter(channels, features, config, strides, interpreted_hopper):
    check_config(channels, features, config, strides)


@pytest.mark.exhaustive
@pytest.mark.parametrize("plan", ["taps", "rows", "resident"])
def test_threads_do_not_race(plan, race_detector):
    check_config(32, 64, replace(SMALL, plan=plan))


def test_configs_fit(hopper):
    call = ConvCall(
        (16, 64, 64), 320, 320, Window((3, 3), ((1, 1),) * 2, (1, 1), (1, 1)), jnp.int8, 132
    )
    configs = fitting(call, written_bytes=2)
    assert configs and all(config.turns_weights for config in configs)
    assert "channels must be contiguous" in call.why_not(replace(SMALL, turns_weights=False))


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [64, 80, 320])
def test_on_a_gpu(channels):
    x, w, bias = int8_operands((4, 30, 33, channels), (3, 3), channels)

    def run(implementation):
        return jax.jit(
            lambda x, w, bias: jaxfused.quantized_conv(
                x, w, bias, kernel_size=3, activation="silu", implementation=implementation
            )
        )(x, w, bias)

    expected = float64_conv(
        x.dequantize(), w.dequantize().reshape(3, 3, channels, channels), bias, None, "silu"
    )
    for implementation in ("pallas", "xla"):
        np.testing.assert_allclose(run(implementation), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@parametrize("case", CASES, quick=(0, 3))
@pytest.mark.parametrize("x_dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("out_dtype", ["bfloat16", "float16"])
def test_sixteen_bits_on_a_gpu(case, x_dtype, out_dtype):
    check_sixteen_bits(case, x_dtype, out_dtype, None)
