import functools

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

import jaxfused
from jaxfused import dispatch
from jaxfused.ops.conv import conv as conv_operator
from jaxfused.ops.conv import (
    dense_conv,
    dense_conv_backward,
    dense_conv_regimes,
    depthwise_conv,
    depthwise_conv_cuda,
    patch_expand,
)
from jaxfused.ops.conv.depthwise_conv_cuda import Strips, Tile, Window
from jaxfused.ops.conv.depthwise_conv_regimes import useful_strips
from jaxfused.runtime import cuda_library
from jaxfused.runtime.activation import activate
from pallas_kernels.conv import conv as pallas_conv
from pallas_kernels.conv import weight_gradient as pallas_weight_gradient
from tests.cases.conv import (
    CASES,
    DENSE_CASES,
    DENSE_KERNEL_CASES,
    DEPTHWISE_CASES,
    DEPTHWISE_KERNEL_CASES,
    TILED_CASES,
    Case,
)
from tests.cases.normal import normal
from tests.support.against_float64 import assert_values_and_gradients
from tests.support.arrays import put
from tests.support.grids import pairwise, parametrize
from tests.support.lowering import kernels, lowered
from tests.support.transforms import assert_transforms


def plain_conv(x, w, bias, residual, *, activation=None, strides=1, padding="SAME", **groups):
    """Computes the convolution in plain JAX, with all arithmetic in x's dtype."""
    y = jax.lax.conv_general_dilated(
        x,
        w.astype(x.dtype),
        strides if isinstance(strides, tuple) else (strides,) * (x.ndim - 2),
        padding,
        dimension_numbers=("NHWC", "HWIO", "NHWC") if x.ndim == 4 else ("NWC", "WIO", "NWC"),
        **groups,
    )
    y = y if bias is None else y + bias.astype(x.dtype)
    return activate(activation, y if residual is None else y + residual)


@pytest.mark.parametrize("activation", [None, "relu", "silu"])
def test_gradient_of_a_bias_in_16_bits_is_summed_in_float32(activation):
    """The gradient is float32 also where cuDNN's kernel computes the forward's sum in 16 bits."""
    x, w = jnp.ones((3, 100, 1), jnp.bfloat16), jnp.ones((1, 1, 2), jnp.bfloat16)
    bias, residual = jnp.full(2, 100, jnp.bfloat16), jnp.zeros((3, 100, 2), jnp.bfloat16)

    def total(bias, residual):
        y = jaxfused.conv(
            x, w, bias, activation=activation, residual=residual, implementation="xla"
        )
        return y.astype(jnp.float32).sum()

    dbias, dresidual = jax.grad(total, (0, 1))(bias, residual)
    # bfloat16 has 8 bits: beyond 256 it holds even numbers only.
    np.testing.assert_array_equal(dbias, 300.0)
    np.testing.assert_array_equal(dresidual, 1.0)
    _, tangent = jax.jvp(lambda b: total(b, residual), (bias,), (jnp.ones_like(bias),))
    assert tangent == 600.0


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, "float32") for case in CASES] + [(CASES[0], "bfloat16"), (CASES[1], "float16")],
    ids=str,
)
def test_is_as_accurate_as_jax_numpy(case, dtype):
    def ours(x, w, bias, residual):
        return jaxfused.conv(x, w, bias, residual=residual, **case.options)

    def plain(*args):
        return plain_conv(*args, **case.options)

    args = case.arguments(jnp.dtype(dtype))
    assert_values_and_gradients(ours, plain, *args)
    assert jax.eval_shape(ours, *args).dtype == dtype


def naive_conv(x, w, *, strides, padding, kernel_dilation, input_dilation, groups):
    """Sums over a kernel's weights along one axis, in float64, by loops."""
    x, w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    spread = np.zeros((x.shape[0], (x.shape[1] - 1) * input_dilation + 1, x.shape[2]))
    spread[:, ::input_dilation] = x
    spread = np.pad(spread, ((0, 0), padding, (0, 0)))
    length = spread.shape[1] - (w.shape[0] - 1) * kernel_dilation
    y = np.zeros((x.shape[0], -(-length // strides), w.shape[2]))
    ins, outs = w.shape[1], w.shape[2] // groups
    for g in range(groups):
        for k in range(w.shape[0]):
            window = spread[:, k * kernel_dilation :][:, :length:strides, g * ins : (g + 1) * ins]
            out = slice(g * outs, (g + 1) * outs)
            y[..., out] += window @ w[k, :, out]
    return y


@settings(max_examples=5)
@given(
    length=st.integers(4, 11),
    kernel=st.integers(1, 4),
    strides=st.integers(1, 3),
    low=st.integers(0, 3),
    high=st.integers(0, 3),
    kernel_dilation=st.integers(1, 2),
    input_dilation=st.integers(1, 3),
    groups=st.integers(1, 3),
)
def test_odd_shapes_against_loops(
    length, kernel, strides, low, high, kernel_dilation, input_dilation, groups
):
    if (kernel - 1) * kernel_dilation >= length:
        kernel = 2
    keys = jax.random.split(jax.random.key(0))
    x = jax.random.normal(keys[0], (2, length, 2 * groups))
    w = jax.random.normal(keys[1], (kernel, 2, 3 * groups))
    options = dict(strides=strides, kernel_dilation=kernel_dilation, input_dilation=input_dilation)
    y = jaxfused.conv(x, w, padding=[(low, high)], feature_group_count=groups, **options)
    expected = naive_conv(x, w, padding=(low, high), groups=groups, **options)
    np.testing.assert_allclose(y, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "kernel", "options"),
    [
        ((2, 7, 6, 3), (3, 2), {"padding": "SAME", "strides": (2, 1)}),
        ((2, 7, 6, 3), (3, 2), {"padding": "CIRCULAR", "kernel_dilation": 2}),
        ((2, 7, 6, 3), (4, 3), {"padding": "REFLECT", "strides": 2}),
        ((2, 7, 3), (3,), {"padding": "CAUSAL", "kernel_dilation": 2}),
        ((2, 7, 6, 3), (3, 3), {"padding": 1}),
        ((2, 7, 6, 3), (3, 3), {"padding": (2, (0, 1))}),
        ((2, 7, 6, 4), (3, 3), {"feature_group_count": 4}),
        ((1, 4, 3, 5, 2), (2, 3, 2), {"padding": "SAME"}),
        ((0, 7, 3), (3,), {}),
    ],
    ids=str,
)
def test_arguments_are_those_of_flax(shape, kernel, options):
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], shape)
    channels = shape[-1] // options.get("feature_group_count", 1)
    w = jax.random.normal(keys[1], (*kernel, channels, 4))
    bias = jax.random.normal(keys[2], (4,))
    stock = flax.linen.Conv(4, kernel, **options).apply({"params": {"kernel": w, "bias": bias}}, x)
    np.testing.assert_allclose(jaxfused.conv(x, w, bias, **options), stock, atol=1e-5)


@pytest.mark.parametrize(
    ("padding", "pairs", "mode"),
    [
        ([(2, 0), (1, 1), (0, 2)], [(2, 0), (1, 1), (0, 2)], "edge"),
        ("CAUSAL", [(2, 0), (1, 1), (1, 1)], "zeros"),
        ("CAUSAL", [(2, 0), (1, 1), (1, 1)], "edge"),
        ("SAME", [(1, 1), (1, 1), (1, 1)], "reflect"),
        (1, [(1, 1), (1, 1), (1, 1)], "circular"),
    ],
)
def test_padding_with_values_of_the_input(padding, pairs, mode):
    rng = np.random.default_rng(0)
    x, w = (put(rng.normal(size=s), jnp.float32) for s in ((2, 5, 6, 7, 4), (3, 3, 3, 4, 6)))
    numpy_mode = {"zeros": "constant", "circular": "wrap"}.get(mode, mode)
    widths = [(0, 0), *pairs, (0, 0)]
    residual = put(rng.normal(size=(2, 5, 6, 7, 6)), jnp.float32)

    def ours(x, w):
        window = dict(padding=padding, padding_mode=mode)
        y, shortcut, _ = conv_operator.run(
            x, w, window=window, residual=residual, return_input=True
        )
        return y, 2.0 * shortcut

    def plain(x, w):
        padded = jnp.pad(x, widths, mode=numpy_mode)
        y = jax.lax.conv(jnp.moveaxis(padded, -1, 1), w.transpose(4, 3, 0, 1, 2), (1,) * 3, "VALID")
        return jnp.moveaxis(y, 1, -1) + residual, 2.0 * x

    assert_values_and_gradients(ours, plain, x, w, cotangents=2)


def test_edges_by_name_and_in_modules():
    rng = np.random.default_rng(0)
    x, w = (put(rng.normal(size=s), jnp.float32) for s in ((2, 6, 7, 4), (3, 4, 4, 5)))
    options = dict(padding=[(1, 1), (1, 2)], padding_mode="edge")
    y = jaxfused.conv(x, w, **options)
    np.testing.assert_array_equal(jaxfused.conv(x, w, padding="edge"), y)
    module = jaxfused.linen.Conv(5, (3, 4), use_bias=False, **options)
    np.testing.assert_array_equal(module.apply({"params": {"kernel": w}}, x), y)
    layer = jaxfused.nnx.Conv(4, 5, (3, 4), use_bias=False, **options, rngs=nnx.Rngs(0))
    layer.kernel.set_value(w)
    np.testing.assert_array_equal(layer(x), y)
    masked = jaxfused.linen.Conv(5, (3, 4), mask=jnp.ones_like(w), **options)
    with pytest.raises(ValueError, match="padding_mode='edge' needs the operator"):
        masked.init(jax.random.key(0), x)
    quantized = jaxfused.quantize(w.reshape(-1, 5))
    of_floats = jaxfused.quantized_conv(x, quantized, kernel_size=(3, 4), **options)
    weights = quantized.dequantize(jnp.float32).reshape(w.shape)
    np.testing.assert_allclose(of_floats, jaxfused.conv(x, weights, **options), atol=1e-5)
    integers = jaxfused.quantize(x, axis=-1, per_tensor=True)
    found = jaxfused.quantized_conv(integers, quantized, kernel_size=(3, 4), **options)
    expected = jaxfused.conv(integers.dequantize(jnp.float32), weights, **options)
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_kernels_read_what_has_been_padded(hopper, dense_stand_ins):
    x, w = jnp.ones((2, 16, 16, 64), jnp.bfloat16), jnp.ones((3, 3, 64, 64), jnp.bfloat16)
    with dispatch.recorded() as choices:
        jax.eval_shape(lambda x: jaxfused.conv(x, w, padding="EDGE", implementation="pallas"), x)
    assert [choice.implementation for choice in choices] == ["pallas"]


def test_bias_residual_and_activation_are_applied_before_the_rounding():
    x = jnp.ones((1, 1, 1), jnp.bfloat16)
    # 256 + 1 - 256 is 0 where each sum is rounded to bfloat16, which has 8 bits.
    y = jaxfused.conv(x, 256 * x, jnp.ones(1), residual=-256 * x, activation="relu2")
    assert y.dtype == jnp.bfloat16
    assert y.item() == 1.0


def test_transforms():
    x, w, bias, residual = CASES[0].arguments(jnp.float32)
    assert_transforms(
        lambda x, w, bias, residual: jaxfused.conv(
            x, w, bias, residual=residual, activation="gelu_tanh"
        ),
        x,
        w,
        bias,
        residual,
    )


def test_derivatives_of_both_orders_and_modes():
    with jax.enable_x64(True):
        args = jax.tree.map(lambda a: a.astype(jnp.float64), CASES[1].arguments(jnp.float32))
        check_grads(
            jax.jit(lambda x, w, bias, _: jaxfused.conv(x, w, bias, strides=2, activation="silu")),
            args,
            order=2,
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": jnp.ones((2, 4))}, r"x has shape \(2, 4\), but it needs a batch axis"),
        ({"x": jnp.ones((2, 5, 0))}, r"x has shape \(2, 5, 0\)"),
        ({"x": jnp.ones((2, 5, 4), jnp.int32)}, "x has dtype int32"),
        ({"w": jnp.ones((3, 3, 4, 6))}, r"w has shape \(3, 3, 4, 6\), but x .* 1 spatial axes"),
        ({"w": jnp.ones((3, 3, 6))}, r"w has shape \(3, 3, 6\), but x has 4 channels in 1 groups"),
        ({"feature_group_count": 3}, "feature_group_count is 3"),
        ({"feature_group_count": 2}, "pass w with 2 input channels"),
        ({"bias": jnp.ones(4)}, r"bias has shape \(4,\), but w has 6 output channels"),
        ({"residual": jnp.ones((2, 5, 4))}, r"residual has shape .*result has shape \(2, 5, 6\)"),
        ({"strides": (1, 1)}, r"strides is \(1, 1\), but x has 1 spatial axes"),
        ({"kernel_dilation": 0}, "kernel_dilation is 0"),
        ({"padding": "FULL"}, "padding='FULL' is not known"),
        ({"padding": (1, 2)}, r"padding is \(1, 2\), but x has 1 spatial axes"),
        ({"padding": -9}, r"takes away more than the \[\d+\] values"),
        (
            {"padding_mode": "white"},
            "padding_mode='white' is not known; pass one of 'zeros', 'edge'",
        ),
        ({"padding": "REFLECT", "padding_mode": "edge"}, "leave out one of the two"),
        ({"padding": [(1, -1)], "padding_mode": "edge"}, "pass numbers of 0 or more"),
        (
            {"padding": 1, "padding_mode": "edge", "input_dilation": 2},
            "values are repeated outside of x alone",
        ),
        (
            {"input_dilation": 2},
            r"padding is 'SAME' and input_dilation is \(2,\), .* pass \(low, high\)",
        ),
        ({"activation": "swish"}, "activation='swish' is not known"),
        ({"implementation": "cuda"}, "the CUDA kernels of conv are depthwise, and x has"),
        ({"implementation": "pallas"}, "it needs a Hopper GPU"),
        (
            {"implementation": "pallas", "padding": "CIRCULAR"},
            "the Pallas kernels of conv are dense, and padding is 'CIRCULAR'",
        ),
    ],
)
def test_errors(change, message):
    with pytest.raises(ValueError, match=f"conv: .*{message}"):
        jaxfused.conv(**({"x": jnp.ones((2, 5, 4)), "w": jnp.ones((3, 4, 6))} | change))


# --- dense kernels --------------------------------------------------------------------------------


def dense(case, implementation="pallas"):
    def ours(x, w, bias, residual):
        return jaxfused.conv(
            x, w, bias, residual=residual, implementation=implementation, **case.options
        )

    def plain(*args):
        return plain_conv(*args, **case.options)

    return ours, plain


@pytest.mark.parametrize("kernels_are_faster", [False, True])
def test_stages_of_a_strided_window(hopper, monkeypatch, kernels_are_faster):
    """If the model gives all stages to XLA, derivatives of every order and mode remain."""
    why = None if kernels_are_faster else "cuDNN is faster"
    for name in ("why_cudnn", "why_strided_cudnn"):
        monkeypatch.setattr(dense_conv_regimes, name, lambda *call, **of: why)
    x = jax.ShapeDtypeStruct((4, 16, 16, 64), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((3, 3, 64, 64), jnp.bfloat16)
    f = functools.partial(jaxfused.conv, strides=2)

    def gradient(x, w):
        y, pull = jax.vjp(f, x, w)
        return pull(y)

    with dispatch.recorded() as choices:
        jax.eval_shape(gradient, x, w)
    chosen = {choice.stage: choice.implementation for choice in choices}
    if kernels_are_faster:
        # The gradient of w has no kernel.
        assert chosen == {
            "conv dense forward": "pallas",
            "conv dense input gradient": "pallas",
            "conv dense weight gradient": "xla",
        }
    else:
        assert chosen == {"conv": "xla"}
        jax.eval_shape(lambda x, w: jax.jvp(f, (x, w), (x, w)), x, w)


@parametrize("case", DENSE_CASES, quick=(0,))
def test_dense_kernels_in_the_interpreter(case, interpreted_hopper):
    with dispatch.recorded() as choices:
        args = case.arguments(jnp.bfloat16)
        assert_values_and_gradients(*dense(case), *args, cotangents=1)
    chosen = {choice.stage: choice.implementation for choice in choices}
    assert chosen["conv dense forward"] == "pallas"
    assert chosen["conv dense input gradient"] == "pallas"


STRIDED_CASES = (
    Case((2, 8, 12, 64), (3, 3), 40, {"strides": 2, "padding": [(1, 1), (1, 1)]}),
    Case((1, 10, 12, 64), (5, 5), 8, {"strides": 2}),
    Case((1, 8, 8, 128), (7, 7), 72, {"strides": (2, 4)}),
    Case((2, 12, 64), (4,), 24, {"strides": 3, "padding": [(3, 0)]}),
    Case((2, 8, 8, 64), (2, 2), 32, {"strides": 2, "padding": "VALID"}),
    Case((3, 12, 9, 64), (4, 3), 16, {"strides": (4, 1)}),
)


@parametrize("case", STRIDED_CASES, quick=())
def test_gradients_of_strided_windows_are_made_in_blocks(case, interpreted_hopper):
    test_dense_kernels_in_the_interpreter(case, interpreted_hopper)


@pytest.mark.parametrize(
    ("shape", "kernel", "options", "reason"),
    [
        ((2, 9, 8, 64), (3, 3), {"strides": 2}, "must divide the spatial sizes"),
        ((2, 8, 8, 64), (3, 3), {"strides": 2, "kernel_dilation": 2}, "dilated"),
        ((2, 8, 8, 64), (1, 2), {"strides": 2}, "smaller than its strides"),
        ((2, 8, 8, 72), (3, 3), {"strides": 2}, "multiples of 32 channels"),
    ],
)
def test_strided_windows_whose_gradient_is_not_made_in_blocks(
    hopper, shape, kernel, options, reason
):
    x = jnp.zeros(shape, jnp.bfloat16)
    w = jnp.zeros((*kernel, shape[-1], 64), jnp.bfloat16)
    gradient = dense_conv_backward.InputGradient(
        dense_conv.window_of(
            x,
            w,
            strides=(2, 2),
            padding="SAME",
            input_dilation=(1, 1),
            kernel_dilation=(options.get("kernel_dilation", 1),) * 2,
            feature_group_count=1,
        ),
        shape[1:3],
        None,
    )
    dz = jax.eval_shape(functools.partial(jaxfused.conv, implementation="xla", **options), x, w)
    assert reason in gradient.why_not(hopper, dz, w)["pallas"]


POINTWISE_CASES = (
    Case((2, 5, 6, 16), (1, 1), 24, {"activation": "relu"}, True, (2, 5, 6, 24)),
    Case((2, 5, 6, 16), (1, 1), 24, {"strides": 2}),
    Case((2, 4, 5, 6, 8), (1, 1, 1), 16, {"strides": 2, "activation": "silu"}, bias=True),
)


@pytest.mark.parametrize("case", POINTWISE_CASES, ids=str)
def test_one_weight_a_window_makes_a_product(case, hopper):
    x, w, bias, residual = case.arguments(jnp.bfloat16)

    def ours(x, w, bias, residual, implementation=None):
        return jaxfused.conv(
            x, w, bias, residual=residual, implementation=implementation, **case.options
        )

    def xla(*args):
        return ours(*args, implementation="xla")

    assert_values_and_gradients(ours, xla, x, w, bias, residual)
    assert "convolution" not in lowered(ours, x, w, bias, residual)
    assert "convolution" in lowered(xla, x, w, bias, residual)


@pytest.mark.parametrize(
    ("sides", "kernel", "strides", "padding"),
    [
        ((12, 13), (3, 3), 1, "SAME"),
        ((13, 12), (7, 7), 2, "SAME"),
        ((16, 15), (5, 5), 2, "VALID"),
        ((17, 11), (4, 4), 4, "VALID"),
        ((9, 9), (3, 5), 1, ((2, 0), (1, 3))),
        ((9, 8), (2, 3), (1, 2), ((0, -1), (2, 1))),
    ],
)
def test_few_channels_are_joined(sides, kernel, strides, padding):
    rng = np.random.default_rng(0)
    x, w = normal(rng, "float32", 2, *sides, 3), normal(rng, "float32", *kernel, 3, 8)
    steps = (strides,) * 2 if isinstance(strides, int) else strides
    geometry = dict(strides=steps, padding=padding, input_dilation=(1, 1), kernel_dilation=(1, 1))
    window = dense_conv.window_of(x, w, feature_group_count=1, **geometry)
    simplify, joined = dense_conv.simplified(window, x)
    assert joined.kernel[1] == 1 and not joined.is_strided

    def ours(x, w):
        return jaxfused.conv(*simplify(x, w), padding=joined.padding)

    assert_values_and_gradients(
        ours, lambda x, w: jaxfused.conv(x, w, strides=strides, padding=padding), x, w
    )


def test_explain_says_why_a_kernel_runs_images_of_few_channels():
    x = jax.ShapeDtypeStruct((32, 64, 64, 3), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((7, 7, 3, 64), jnp.bfloat16)
    with dispatch.assume(dispatch.Device("gpu", "NVIDIA Test 1g", (9, 0), 132)):
        for named, said in (("pallas", "(as named)"), (None, "'pallas' first: XLA's convolution")):
            conv = functools.partial(jaxfused.conv, strides=1, padding=3, implementation=named)
            assert said in str(jaxfused.explain(conv, x, w))


@pytest.mark.parametrize(
    ("shape", "kernel", "strides"), [((64, 112, 112, 3), (7, 7), 2), ((8, 64, 64, 64), (1, 1), 2)]
)
def test_of_what_is_rewritten_the_gradient_keeps_what_the_caller_has(
    shape, kernel, strides, hopper
):
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    w = jax.ShapeDtypeStruct((*kernel, shape[-1], 64), jnp.float32)

    def gradient(x, w):
        return jax.vjp(lambda x, w: jaxfused.conv(x, w, strides=strides), x, w)[1]

    saved = jax.tree.leaves(jax.eval_shape(gradient, x, w))
    assert sorted(a.shape for a in saved) == sorted([x.shape, w.shape])


@pytest.fixture
def dense_stand_ins(hopper, monkeypatch):
    """Replaces the dense kernels by XLA, for any dtype, to test the operator around them."""

    def convolve(x, w, window):
        x = jnp.concatenate(x, axis=-1) if isinstance(x, tuple) else x
        return jax.lax.conv_general_dilated(
            x, w, window.strides, window.padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def forward(x, w, bias, residual, *, window, activation, save_preactivation, block=(1, 1), **_):
        z = convolve(x, w, window)
        z = patch_expand.moved(z if bias is None else z + bias, block)
        z = z if residual is None else z + residual
        return activate(activation, z), z if save_preactivation else None

    def input_gradient(dy, w, *, window, other=None, rectified=None, **_):
        turned = jnp.flip(w, (0, 1)).swapaxes(2, 3)
        dx = convolve(dy, turned, window.transposed())
        dx = dx if other is None else dx + other
        return dx if rectified is None else jnp.where(rectified > 0, dx, 0)

    def weight_gradient(x, dz, *, window, **_):
        w = jax.ShapeDtypeStruct((*window.kernel, x.shape[-1], dz.shape[-1]), x.dtype)
        return jax.linear_transpose(lambda w: convolve(x, w, window), w)(dz)[0]

    monkeypatch.setattr(pallas_conv, "why_unsupported", lambda **_: None)
    monkeypatch.setattr(pallas_conv, "forward", forward)
    monkeypatch.setattr(pallas_conv, "input_gradient", input_gradient)
    monkeypatch.setattr(pallas_weight_gradient, "weight_gradient", weight_gradient)


def test_transforms_of_the_way_to_the_dense_kernels(dense_stand_ins):
    case = DENSE_CASES[0]
    assert_transforms(dense(case)[0], *case.arguments(jnp.float32))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(x=jnp.ones((2, 5, 5, 8))), "x has dtype float32"),
        (dict(w=jnp.ones((3, 3, 8, 12))), "multiples of 8 channels, and the result has 12"),
        (dict(input_dilation=2, padding=1), "the input is dilated"),
        (dict(strides=2), "multiples of 64 channels, and x has 8"),
        (dict(w=jnp.ones((3, 3, 4, 8)), feature_group_count=2), "x has 2 groups of channels"),
    ],
)
def test_what_the_dense_kernels_refuse(hopper, change, message):
    arguments = dict(x=jnp.ones((2, 5, 5, 8), jnp.bfloat16), w=jnp.ones((3, 3, 8, 8)))
    with pytest.raises(ValueError, match=message):
        jaxfused.conv(**(arguments | change), implementation="pallas")
    assert kernels(lambda: jaxfused.conv(**(arguments | change))) == []


def test_dense_kernels_leave_what_32_bits_do_not_count_to_xla(hopper):
    x = jax.ShapeDtypeStruct((2, 2**15, 2**15, 8), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((3, 3, 8, 8), jnp.bfloat16)
    assert kernels(jaxfused.conv, x, w) == []
    with pytest.raises(ValueError, match="at most 1073741824 pixels, and x has 2147483648"):
        jax.eval_shape(lambda x, w: jaxfused.conv(x, w, implementation="pallas"), x, w)


@parametrize(
    ("kernel", "dilation"),
    [((3, 3), 150), ((3, 3), 24), ((5, 5), 12), ((7, 7), 1), ((31, 5), 1)],
    quick=(0, 2),
)
def test_large_windows_lower(hopper, kernel, dilation):
    x = jax.ShapeDtypeStruct((2, 320, 320, 64), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((*kernel, 64, 64), jnp.bfloat16)

    def conv(x, w):
        return jaxfused.conv(x, w, kernel_dilation=dilation, implementation="pallas")

    assert kernels(conv, x, w) == ["conv"]
    launched = kernels(jax.grad(lambda *args: conv(*args).astype(jnp.float32).sum(), (0, 1)), x, w)
    # The gradient of the weights has no kernel for windows of many or widely spaced rows.
    small = kernel[0] <= 5 and (kernel[0] - 1) * dilation <= 48
    assert launched == ["conv_input_gradient", *["conv_weight_gradient"] * small]


@parametrize(
    ("spatial", "channels", "kernel"),
    pairwise(
        [(8, 56, 56), (4, 16, 28, 28), (64, 400), (1, 128, 128), (1, 3, 500)], [64, 320], [1, 3]
    ),
    quick=(),
)
def test_dense_kernels_lower(hopper, spatial, channels, kernel):
    x = jax.ShapeDtypeStruct((*spatial, channels), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((*(kernel,) * (len(spatial) - 1), channels, channels), jnp.bfloat16)
    bias = jax.ShapeDtypeStruct((channels,), jnp.float32)

    def conv(x, w, bias):
        return jaxfused.conv(x, w, bias, activation="silu", implementation="pallas")

    assert kernels(conv, x, w, bias) == ["conv"]
    gradient = jax.grad(lambda *args: conv(*args).astype(jnp.float32).sum(), (0, 1, 2))
    of_weights = "conv_weight_gradient" if kernel > 1 else "weight_gradient"
    launched = ["conv", "conv_input_gradient", of_weights]
    assert kernels(gradient, x, w, bias) == launched


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", [*DENSE_CASES, *DENSE_KERNEL_CASES], ids=str)
def test_dense_kernels_are_as_accurate_as_jax_numpy(case, dtype):
    args = case.arguments(jnp.dtype(dtype))
    assert_values_and_gradients(*dense(case), *args, cotangents=2)


# --- depthwise kernels ----------------------------------------------------------------------------

SAME = Window((3, 3), 1, ((1, 1), (1, 1)))

CONV, WEIGHTS = "jaxfused_depthwise_conv", "jaxfused_depthwise_conv_weights"
TILES, TILES_WEIGHTS = "jaxfused_depthwise_conv_mma", "jaxfused_depthwise_conv_mma_weights"


@pytest.mark.parametrize("size", [3, 5, 7, 31])
def test_depthwise_windows_where_no_library_is_built(hopper, monkeypatch, tmp_path, size):
    """XLA convolves, as an installation without nvcc asks for."""
    monkeypatch.setattr(cuda_library, "PATH", tmp_path / "libjaxfused.so")
    uncached = cuda_library.why_unavailable.__wrapped__
    monkeypatch.setattr(cuda_library, "why_unavailable", uncached)
    x, w = jnp.ones((2, 40, 40, 64), jnp.bfloat16), jnp.ones((size, size, 1, 64), jnp.bfloat16)
    with dispatch.recorded() as choices:
        jax.eval_shape(lambda x, w: jaxfused.conv(x, w, feature_group_count=64), x, w)
    assert [choice.implementation for choice in choices] == ["xla"]


@pytest.fixture
def with_library(with_library, monkeypatch):
    """The same for a library that was built for Turing and Ampere GPUs too."""
    monkeypatch.setattr(cuda_library, "architectures", lambda: ("75-real", "80-real", "90"))
    return with_library


def stand_in(window):
    def convolve(x, w):
        return jax.lax.conv_general_dilated(
            x,
            w.astype(x.dtype)[:, :, None],
            (window.stride,) * 2,
            window.padding,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=x.shape[-1],
        )

    return convolve


@pytest.fixture
def stand_ins(with_library, monkeypatch):
    """Replaces the depthwise kernels by XLA, to test the operator around them."""

    def conv(x, w, bias, residual, *, window, activation, save_preactivation, config, turned=False):
        z = stand_in(window)(x, w[::-1, ::-1] if turned else w)
        z = z if bias is None else z + bias.astype(z.dtype)
        z = z if residual is None else z + residual
        return activate(activation, z), z if save_preactivation else None

    def weight_gradient(x, dy, *, window, multiprocessors, config):
        w = jax.ShapeDtypeStruct((*window.kernel, x.shape[-1]), x.dtype)
        (dw,) = jax.linear_transpose(lambda w: stand_in(window)(x, w), w)(dy)
        return dw, dy.sum((0, 1, 2))

    monkeypatch.setattr(depthwise_conv_cuda, "conv", conv)
    monkeypatch.setattr(depthwise_conv_cuda, "weight_gradient", weight_gradient)


def depthwise(case, implementation):
    def ours(x, w, bias, residual):
        return jaxfused.conv(
            x, w, bias, residual=residual, implementation=implementation, **case.options
        )

    def plain(*args):
        return plain_conv(*args, **case.options)

    return ours, plain


@pytest.mark.parametrize("case", DEPTHWISE_CASES, ids=str)
def test_the_way_to_the_kernels(case, stand_ins):
    with dispatch.recorded() as choices:
        assert_values_and_gradients(*depthwise(case, "cuda"), *case.arguments(jnp.float32))
    chosen = {choice.stage: choice.implementation for choice in choices}
    strided = case.options.get("strides", 1) > 1
    assert chosen == {
        "conv depthwise forward": "cuda",
        "conv depthwise input gradient": "xla" if strided else "cuda",
        "conv depthwise weight gradient": "cuda",
    }


def test_transforms_of_the_way_to_the_kernels(stand_ins):
    case = DEPTHWISE_CASES[0]
    assert_transforms(depthwise(case, "cuda")[0], *case.arguments(jnp.float32))


def test_depthwise_kernels_are_launched(with_library):
    case = DEPTHWISE_CASES[0]
    x, w, bias, residual = case.arguments(jnp.bfloat16)
    ours, _ = depthwise(case, "cuda")
    assert kernels(ours, x, w, bias, residual) == [CONV]
    gradient = jax.grad(lambda *args: ours(*args).astype(jnp.float32).sum(), (0, 1, 2, 3))
    assert kernels(gradient, x, w, bias, residual) == [CONV, CONV, WEIGHTS]


@pytest.mark.parametrize(
    ("size", "stride", "dtype", "launched"),
    [
        (7, 1, "bfloat16", [TILES]),
        (7, 1, "float32", [CONV]),
        (7, 2, "bfloat16", []),
        (5, 1, "bfloat16", [TILES]),
        (5, 1, "float32", []),
        (3, 1, "bfloat16", [CONV]),
        (3, 2, "bfloat16", [CONV]),
        (3, 1, "float32", []),
    ],
)
def test_which_depthwise_kernels_need_not_be_named(with_library, size, stride, dtype, launched):
    x, w = jnp.ones((1, 28, 28, 64), dtype), jnp.ones((size, size, 1, 64), dtype)

    def conv(x, w):
        return jaxfused.conv(x, w, feature_group_count=64, strides=stride)

    assert kernels(conv, x, w) == launched


@pytest.mark.parametrize(
    ("channels", "columns", "stride", "useful"),
    [
        (128, 56, 1, 1.0),
        (16, 8, 1, 1.0),
        (8, 8, 1, 0.5),
        (24, 8, 1, 0.75),
        (48, 8, 1, 0.75),
        (96, 8, 1, 0.75),
        (640, 14, 1, 0.875),
        (64, 14, 2, 0.875),
        (64, 0, 1, 0.0),
    ],
)
def test_useful_results_of_strips(channels, columns, stride, useful):
    window = Window((3, 3), stride, ((1, 1), (1, 1)))
    assert useful_strips(channels, columns, window) == pytest.approx(useful)


@pytest.mark.parametrize("shape", [(0, 28, 28, 64), (2, 0, 28, 64), (2, 3, 3, 64)])
@pytest.mark.parametrize("size", [5, 7])
def test_depthwise_results_without_pixels(with_library, shape, size):
    x, w = jnp.ones(shape, jnp.bfloat16), jnp.ones((size, size, 1, 64), jnp.bfloat16)
    for padding in ("SAME", "VALID") if shape[0] == 0 else ("VALID",):
        y = jax.eval_shape(
            lambda x, w, padding=padding: jaxfused.conv(
                x, w, feature_group_count=64, padding=padding
            ),
            x,
            w,
        )
        assert y.size == 0


def test_depthwise_kernels_on_tensor_cores_are_launched(with_library):
    x, w, bias, residual = TILED_CASES[-1].arguments(jnp.bfloat16)
    ours, _ = depthwise(TILED_CASES[-1], "cuda")
    gradient = jax.grad(lambda *args: ours(*args).astype(jnp.float32).sum(), (0, 1, 2, 3))
    assert kernels(gradient, x, w, bias, residual) == [TILES, TILES, TILES_WEIGHTS]


def test_configs_of_the_depthwise_kernels(with_library):
    window = Window((7, 7), 1, ((3, 3), (3, 3)))
    x = jax.ShapeDtypeStruct((128, 14, 14, 384), jnp.bfloat16)
    few = jax.ShapeDtypeStruct((1, 9, 9, 64), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((7, 7, 384), jnp.bfloat16)
    kernels = (
        (depthwise_conv._InputGradient(window, (14, 14)), (x, w)),
        (depthwise_conv._WeightGradient(window), (x, x)),
    )
    for kernel, operands in kernels:
        first, *_, last = kernel.configs("cuda", with_library, *operands)
        assert last == Strips()
        # Blocks in two rows and two columns waste the fewest products.
        assert (first.images, first.blocks_down, first.blocks_across) == (4, 2, 2)
        # Strips are the default if most of a tile's products would be wasted.
        assert kernel.configs("cuda", with_library, few, few)[0] == Strips()
    narrow = jax.ShapeDtypeStruct((128, 14, 14, 12), jnp.bfloat16)
    kernel, _ = kernels[0]
    assert kernel.configs("cuda", with_library, narrow, w) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(images=3), "powers of two whose product is 16, got 3, 4, 2"),
        (dict(blocks_down=8), "powers of two whose product is 16, got 2, 8, 2"),
        (dict(block_rows=5), r"block_rows must be one of \(7, 8\), got 5"),
    ],
)
def test_what_a_tile_must_be(change, message):
    good = dict(block_rows=7, images=2, blocks_down=4, blocks_across=2)
    with pytest.raises(ValueError, match=message):
        Tile(**(good | change))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(compute_capability=(7, 5)), "it needs compute capability 8.0 or later"),
        (dict(dtype=jnp.float32), "x has dtype float32"),
        (dict(channels=12), "a multiple of 8 channels, and x has 12"),
        (dict(window=SAME), "no kernel on tensor cores of 3 x 3 with stride 1"),
    ],
)
def test_limits_of_the_depthwise_kernels_on_tensor_cores(with_library, change, reason):
    window = Window((7, 7), 1, ((3, 3), (3, 3)))
    good = dict(compute_capability=(8, 0), channels=8, window=window, dtype=jnp.bfloat16)
    assert Tile.why_unfit(**good) is None
    assert reason in Tile.why_unfit(**good | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(w=jnp.ones((3, 3, 1, 8))), "in 4 groups and the result 8"),
        (dict(kernel_dilation=2), "it is dilated"),
        (dict(strides=(1, 2)), r"the strides are \(1, 2\)"),
        (dict(padding="CIRCULAR"), "padding is 'CIRCULAR'"),
        (dict(x=jnp.ones((2, 5, 5, 5, 4)), w=jnp.ones((3, 3, 3, 1, 4))), "x has 3 spatial axes"),
        (dict(w=jnp.ones((2, 2, 1, 4))), "there is no kernel of 2 x 2 with stride 1"),
        (dict(strides=3), "there is no kernel of 3 x 3 with stride 3"),
        (dict(padding=4), r"it pads with 0 to \[2, 2\] zeros on a side"),
        (
            dict(x=jnp.ones((2, 5, 5, 3)), w=jnp.ones((3, 3, 1, 3)), feature_group_count=3),
            "an even number of channels, and x has 3",
        ),
    ],
)
def test_what_the_depthwise_kernels_refuse(with_library, change, message):
    arguments = dict(x=jnp.ones((2, 5, 5, 4)), w=jnp.ones((3, 3, 1, 4)), feature_group_count=4)
    with pytest.raises(ValueError, match=message):
        jaxfused.conv(**(arguments | change), implementation="cuda")
    assert kernels(lambda: jaxfused.conv(**(arguments | change))) == []


GOOD = dict(
    compute_capability=(8, 0),
    images=2,
    height=5,
    width=5,
    channels=8,
    window=SAME,
    dtype=jnp.bfloat16,
)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(compute_capability=(7, 0)), "this GPU has 7.0"),
        (dict(dtype=jnp.dtype("int8")), "x has dtype int8"),
        (dict(residual_dtype=jnp.float32), "residual float32"),
        (dict(images=2**26), "less than 268435456 pixels"),
        (dict(height=1, window=Window((3, 3), 1, ((0, 0), (1, 1)))), "the result has -1 rows"),
        (dict(channels=2**23), "at most 4194240 channels"),
    ],
)
def test_limits_of_the_depthwise_kernels(with_library, change, reason):
    assert reason in depthwise_conv_cuda.why_unsupported(**GOOD | change)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("case", [*DEPTHWISE_CASES, *DEPTHWISE_KERNEL_CASES, *TILED_CASES], ids=str)
def test_depthwise_kernels_are_as_accurate_as_jax_numpy(case, dtype):
    ours, plain = depthwise(case, "cuda")
    args = case.arguments(jnp.dtype(dtype))
    assert_values_and_gradients(ours, plain, *args, cotangents=2)


@pytest.mark.gpu
@pytest.mark.parametrize("place", (0, 1, 3))
@pytest.mark.parametrize("case", TILED_CASES, ids=str)
def test_tiles_of_the_depthwise_kernels(case, place, monkeypatch):
    candidates = depthwise_conv_cuda.candidates
    monkeypatch.setattr(
        depthwise_conv_cuda, "candidates", lambda *a, **sized: candidates(*a, **sized)[place:]
    )
    monkeypatch.setattr(depthwise_conv, "_USEFUL", 0.0)
    jax.clear_caches()
    ours, plain = depthwise(case, "cuda")
    args = case.arguments(jnp.bfloat16)
    assert_values_and_gradients(ours, plain, *args, cotangents=1)
    # A call that saves nothing for a gradient has its own kernel.
    np.testing.assert_array_equal(ours(*args), jax.vjp(ours, *args)[0])
