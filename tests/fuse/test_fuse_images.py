"""fuse finds the norms, convolutions, pools and upsampling of images as models write them."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxfused
from jaxfused import dispatch
from tests.support.fused import assert_fuses, assert_left_alone, fusion, normal, wide

pytestmark = pytest.mark.exhaustive

DTYPES = ["bfloat16", pytest.param("float32", marks=pytest.mark.exhaustive)]
EPSILON = 1e-5
H200 = dispatch.Device("gpu", "NVIDIA H200", (9, 0), multiprocessors=132)


def inputs(dtype, *shape):
    x = normal(0, *(shape or (2, 4, 6, 8)), dtype=dtype) * 2 + 1
    return x, normal(1, x.shape[-1]) * 0.3 + 1, normal(2, x.shape[-1]) * 0.3


# --- group norm -----------------------------------------------------------------------------------


def of_linen(x, scale, bias, **options):
    norm = nn.GroupNorm(4, epsilon=EPSILON, dtype=x.dtype, **options)
    return norm.apply({"params": {"scale": scale, "bias": bias}}, x)


def of_linen_by_deviations(x, scale, bias):
    return of_linen(x, scale, bias, use_fast_variance=False)


def of_nnx(x, scale, bias):
    norm = nnx.GroupNorm(x.shape[-1], 4, epsilon=EPSILON, dtype=x.dtype, rngs=nnx.Rngs(0))
    norm.scale[...], norm.bias[...] = scale, bias
    return norm(x)


def by_reshape(x, scale, bias):
    y = wide(x).reshape(*x.shape[:-1], 4, -1)
    axes = (*range(1, x.ndim - 1), x.ndim)
    mean, variance = y.mean(axes, keepdims=True), y.var(axes, keepdims=True)
    y = ((y - mean) / jnp.sqrt(variance + EPSILON)).reshape(x.shape)
    return (y * scale + bias).astype(x.dtype)


def in_rows(x, scale, bias):
    """Normalises each group as one row of numbers, like ports of channels-first code."""
    images, channels = x.shape[0], x.shape[-1]
    y = wide(x).reshape(images, -1, 4, channels // 4).transpose(0, 2, 1, 3).reshape(images, 4, -1)
    y = y - y.mean(-1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + EPSILON)
    y = y.reshape(images, 4, -1, channels // 4).transpose(0, 2, 1, 3).reshape(x.shape)
    return (y * scale + bias).astype(x.dtype)


def with_factor_and_offset(x, scale, bias):
    """Normalises by one product and one sum for each number: x * factor + offset."""
    y = wide(x).reshape(*x.shape[:-1], 4, -1)
    axes = (*range(1, x.ndim - 1), x.ndim)
    mean = y.mean(axes, keepdims=True)
    variance = jnp.square(y).mean(axes, keepdims=True) - jnp.square(mean)
    factor = scale.reshape(4, -1) * jax.lax.rsqrt(variance + EPSILON)
    return (y * factor + (bias.reshape(4, -1) - mean * factor)).reshape(x.shape).astype(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "norm", [of_linen, of_linen_by_deviations, of_nnx, by_reshape, in_rows, with_factor_and_offset]
)
def test_group_norm_in_its_spellings(norm, dtype):
    f = lambda *args: jax.nn.silu(norm(*args))  # noqa: E731
    assert_fuses(f, *inputs(dtype), into={"group_norm": 1})
    assert "group_norm(scale, bias, silu)" in str(fusion(f, *inputs(dtype)))


def of_channels(x, scale, bias):
    """Instance norm."""
    y = wide(x)
    y = y - y.mean((1, 2), keepdims=True)
    y = y * jax.lax.rsqrt(jnp.square(y).mean((1, 2), keepdims=True) + EPSILON)
    return (y * scale + bias).astype(x.dtype)


def of_images(x, scale, bias):
    """Group norm of a single group."""
    y = wide(x)
    y = y - y.mean((1, 2, 3), keepdims=True)
    y = y * jax.lax.rsqrt(jnp.square(y).mean((1, 2, 3), keepdims=True) + EPSILON)
    return (y * scale + bias).astype(x.dtype)


@pytest.mark.parametrize("norm, groups", [(of_channels, 8), (of_images, 1)])
def test_norms_with_as_many_groups_as_channels_and_with_one(norm, groups):
    assert_fuses(norm, *inputs("bfloat16"), into={"group_norm": 1})
    assert f"num_groups={groups}" in str(fusion(norm, *inputs("bfloat16")))


@pytest.mark.parametrize("shape", [(2, 3, 4, 6, 8), (3, 7, 8), (5, 8), (1, 4, 6, 8)])
def test_images_of_any_rank(shape):
    assert_fuses(of_linen, *inputs("bfloat16", *shape), into={"group_norm": 1})


@pytest.mark.parametrize("dtype", DTYPES)
def test_modulation_of_each_image_follows(dtype):
    def block(x, scale, bias, embedding):
        shift, factor = jnp.split(embedding[:, None, None], 2, axis=-1)
        return jax.nn.silu(of_linen(x, scale, bias) * (1 + factor) + shift)

    args = (*inputs(dtype), normal(3, 2, 16, dtype=dtype, scale=0.3))
    assert_fuses(block, *args, into={"group_norm": 1})
    words = "group_norm(scale, bias, image_scale, image_shift, silu)"
    assert words in str(fusion(block, *args))


@pytest.mark.parametrize("dtype", DTYPES)
def test_residual_sum_and_activation_follow(dtype):
    def block(x, scale, bias, residual):
        return jax.nn.relu(residual + of_linen(x, scale, bias))

    x, scale, bias = inputs(dtype)
    args = (x, scale, bias, x[::-1])
    assert_fuses(block, *args, into={"group_norm": 1})
    assert "group_norm(scale, bias, residual, relu)" in str(fusion(block, *args))


def channels_first(x, scale, bias):
    y = x.reshape(len(x), 4, -1, *x.shape[2:])
    y = wide(y)
    y = (y - y.mean((2, 3, 4), keepdims=True)) * jax.lax.rsqrt(
        y.var((2, 3, 4), keepdims=True) + EPSILON
    )
    y = y.reshape(x.shape) * scale[:, None, None] + bias[:, None, None]
    return y.astype(x.dtype)


def test_channels_may_come_first_in_16_bits():
    x, scale, bias = inputs("bfloat16")
    assert_fuses(channels_first, x.transpose(0, 3, 1, 2), scale, bias, into={"group_norm": 1})


def test_channels_that_come_first_in_float32_are_left_alone():
    x, scale, bias = inputs("float32")
    x = x.transpose(0, 3, 1, 2)
    assert_left_alone(channels_first, x, scale, bias, because="the channels come first")


@pytest.mark.parametrize("after", [jnp.square, lambda y: y**3, lambda y: 1.0 / (y + 3.0)])
def test_a_power_of_a_norm_stays_outside(after):
    """The power of a norm is not mistaken for a factor per image."""
    f = lambda *args: after(of_linen(*args))  # noqa: E731
    assert_fuses(f, *inputs("float32"), into={"group_norm": 1})


def test_gelu_follows_a_group_norm():
    f = lambda *args: jax.nn.gelu(of_linen(*args))  # noqa: E731
    assert "group_norm(scale, bias, gelu_tanh)" in str(fusion(f, *inputs("float32")))


def test_a_scale_that_differs_from_pixel_to_pixel_stays_outside():
    def f(x, scale, bias, weights):
        return of_linen(x, scale, bias) * weights

    x, scale, bias = inputs("float32")
    assert_fuses(f, x, scale, bias, normal(3, 4, 6, 1), into={"group_norm": 1})
    assert "group_norm(scale, bias) of" in str(fusion(f, x, scale, bias, normal(3, 4, 6, 1)))


def test_a_group_norm_whose_result_stays_wider_is_left_alone():
    def f(x):
        y = wide(x)
        y = y - y.mean((1, 2), keepdims=True)
        return y * jax.lax.rsqrt(jnp.square(y).mean((1, 2), keepdims=True) + EPSILON)

    assert_left_alone(f, inputs("bfloat16")[0], because="stays in float32")


# --- batch norm -----------------------------------------------------------------------------------


def train(x, scale, bias, mean, variance):
    norm = nn.BatchNorm(use_running_average=False, epsilon=EPSILON, dtype=x.dtype)
    variables = {
        "params": {"scale": scale, "bias": bias},
        "batch_stats": {"mean": mean, "var": variance},
    }
    y, changed = norm.apply(variables, x, mutable=["batch_stats"])
    return y, changed["batch_stats"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_batch_norm_returns_what_the_running_averages_need(dtype):
    def block(*args):
        y, averages = train(*args)
        return jax.nn.relu(y + args[0][::-1]), averages

    # In float32, few squares of 16-bit numbers sum exactly, so the plain error would be no yardstick.
    args = (*inputs(dtype, 4, 12, 10, 8), normal(3, 8), normal(4, 8) ** 2)
    assert_fuses(block, *args, into={"batch_norm": 1})
    assert "batch_norm(scale, bias, residual, relu)" in str(fusion(block, *args))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_convolution_takes_the_statistics_of_the_batch_norm_after_it(dtype):
    def block(x, w, *parameters):
        y, averages = train(convolved(x, w.astype(x.dtype)), *parameters)
        return jax.nn.relu(y), averages

    x, scale, bias = inputs(dtype)
    # XLA may skip a rounding before the norm; this convolution's result needs none.
    w = jnp.zeros((3, 3, 8, 8)).at[0, 2].set(jnp.eye(8) / 2)
    args = (x, w, scale, bias, normal(3, 8), normal(4, 8) ** 2)
    assert_fuses(block, *args, into={"conv": 1})
    assert "batch_norm(scale, bias, relu)" in str(fusion(block, *args))


def residual_blocks(x, w_in, w, w_out, scales, biases, *, projects):
    """Two bottlenecks; the sum of the first follows the norm of its shortcut if it `projects`."""
    parameters = zip(scales, biases, strict=True)
    w_in, w, w_out = (kernel.astype(x.dtype) for kernel in (w_in, w, w_out))

    def norm(y):
        scale, bias = next(parameters)
        return train(y, scale, bias, bias, scale)[0]

    for is_first in (True, False):
        y = jax.nn.relu(norm(convolved(jax.nn.relu(norm(convolved(x, w_in))), w)))
        shortcut = norm(convolved(x, w_out)) if projects and is_first else x
        x = jax.nn.relu(norm(convolved(y, w_out)) + shortcut)
    return x.mean((1, 2))


@pytest.mark.parametrize("projects", [False, True])
def test_dgrad_of_a_blocks_first_convolution_adds_the_shortcuts_gradient(projects):
    x, _, _ = inputs("float32", 2, 5, 5, 64)
    kernels = [normal(i, n, n, 64, 64, scale=0.1) for i, n in enumerate((1, 3, 1), 3)]
    scales, biases = ([0.3 * normal(7 * n + i, 64) + 1 for i in range(7)] for n in (1, 2))
    args = (x, *kernels, scales, biases)
    f = functools.partial(residual_blocks, projects=projects)
    assert_fuses(f, *args, into={"conv": 7 if projects else 6})

    def gradient(*args):
        return jax.grad(lambda *args: jaxfused.fuse(f)(*args).sum())(*args)

    images = jax.ShapeDtypeStruct((64, 56, 56, 64), jnp.bfloat16)
    with dispatch.assume(H200), dispatch.recorded(alone=True) as choices:
        jax.eval_shape(gradient, images, *args[1:])
    assert [c.stage for c in choices].count("conv dense joined input gradient") == 2


def test_rows_of_features_have_batch_norms_too():
    x, scale, bias = inputs("float32", 16, 8)

    def f(x, scale, bias):
        y = (x - x.mean(0)) / jnp.sqrt(x.var(0) + EPSILON)
        return y * scale + bias

    assert_fuses(f, x, scale, bias, into={"batch_norm": 1})


def test_other_statistics_that_are_returned_leave_a_batch_norm_alone():
    def f(x):
        y = x - x.mean((0, 1, 2))
        rstd = jax.lax.rsqrt(jnp.square(y).mean((0, 1, 2)) + EPSILON)
        return y * rstd, rstd

    assert_left_alone(f, inputs("float32")[0], because="an intermediate result is used")


def test_an_unbiased_variance_of_a_batch_is_another():
    def by_it(x):
        return (x - x.mean((0, 1, 2))) / jnp.sqrt(x.var((0, 1, 2), ddof=1) + EPSILON)

    def beside_it(x):
        y = (x - x.mean((0, 1, 2))) / jnp.sqrt(x.var((0, 1, 2)) + EPSILON)
        return y, x.var((0, 1, 2), ddof=1)

    x = inputs("float32", 4, 12, 12, 8)[0]
    assert_left_alone(by_it, x)
    assert_fuses(beside_it, x, into={"batch_norm": 1})


# --- convolutions ---------------------------------------------------------------------------------


def convolved(x, w, **options):
    options = {"window_strides": (1, 1), "padding": "SAME"} | options
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, w, dimension_numbers=numbers, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "options, inner",
    [
        ({}, 8),
        ({"window_strides": (2, 1), "rhs_dilation": (1, 2), "padding": ((0, 2), (3, 1))}, 8),
        ({"feature_group_count": 8}, 1),
        ({"lhs_dilation": (2, 2), "padding": ((2, 1), (1, 2))}, 8),
    ],
)
def test_a_convolution_with_its_bias_sum_and_activation(options, inner, dtype):
    def f(x, w, bias, residual):
        y = convolved(x, w, **options)
        return jax.nn.relu(residual[:, : y.shape[1], : y.shape[2]] + (y + bias.astype(y.dtype)))

    residual = normal(3, 2, 8, 12, 8, dtype=dtype)
    w = normal(4, 3, 3, inner, 8, dtype=dtype, scale=0.2)
    args = (inputs(dtype)[0], w, normal(5, 8), residual)
    assert_fuses(f, *args, into={"conv": 1})
    assert "conv(bias, residual, relu)" in str(fusion(f, *args))


@pytest.mark.parametrize("dtype", DTYPES)
def test_batch_norm_by_running_averages_is_folded_into_weights(dtype):
    def f(x, w, mean, variance, scale, bias):
        norm = nn.BatchNorm(use_running_average=True, dtype=x.dtype)
        variables = {
            "params": {"scale": scale, "bias": bias},
            "batch_stats": {"mean": mean, "var": variance},
        }
        return jax.nn.silu(norm.apply(variables, convolved(x, w.astype(x.dtype))))

    x, scale, bias = inputs(dtype)
    args = (x, normal(4, 3, 3, 8, 8, scale=0.2), normal(5, 8), normal(6, 8) ** 2 + 0.3, scale, bias)
    assert_fuses(f, *args, into={"conv": 1})
    assert "conv(scaled weights, bias, silu)" in str(fusion(f, *args))


def test_what_follows_a_convolution_in_any_order():
    def f(x, w, a, b):
        return 1.5 - (b - convolved(x, w) * a) / 3.0

    x, a, b = inputs("float32")
    assert_fuses(f, x, normal(4, 3, 3, 8, 8, scale=0.2), a, b, into={"conv": 1})


def test_a_number_is_folded_into_16_bits_where_it_rounds_nothing():
    def f(x, w, number):
        return jax.nn.silu(convolved(x, w) * number)

    x, w = inputs("float16")[0], normal(4, 3, 3, 8, 8, dtype="float16", scale=0.2)
    assert "conv(scaled weights, silu)" in str(fusion(lambda x, w: f(x, w, 4.0), x, w))
    assert "conv() of" in str(fusion(lambda x, w: f(x, w, 100.0), x, w))


def test_a_convolution_of_a_concatenation_reads_its_parts():
    def f(a, b, w, bias):
        return jax.nn.silu(convolved(jnp.concatenate((a, b), axis=-1), w) + bias)

    a, b = normal(0, 2, 6, 8, 8), normal(1, 2, 6, 8, 4)
    args = a, b, normal(2, 3, 3, 12, 16, scale=0.2), normal(3, 16)
    assert_fuses(f, *args, into={"conv": 1})
    of_parts = "of float32[2,6,8,8] and float32[2,6,8,4] and [3, 3, 12, 16]"
    assert of_parts in str(fusion(f, *args))

    def and_more(a, b, *args):
        x = jnp.concatenate((a, b), axis=-1)
        return convolved(x, args[0]), x

    assert_fuses(and_more, *args, into={"conv": 1})
    assert "of float32[2,6,8,12] and" in str(fusion(and_more, *args))


def test_a_convolution_along_one_axis():
    conv = nn.Conv(4, (5,), padding="CAUSAL")
    x = inputs("float32", 2, 9, 8)[0]
    params = conv.init(jax.random.key(0), x)
    assert_fuses(lambda p, x: jax.nn.silu(conv.apply(p, x)), params, x, into={"conv": 1})


def first(x, w, bias):
    numbers = ("NCHW", "OIHW", "NCHW")
    y = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)
    return jax.nn.relu(y + bias.astype(y.dtype)[:, None, None])


def test_a_convolution_whose_channels_come_first_in_16_bits():
    x = inputs("bfloat16")[0].transpose(0, 3, 1, 2)
    w = normal(4, 6, 8, 3, 3, dtype="bfloat16", scale=0.2)
    assert_fuses(first, x, w, normal(5, 6), into={"conv": 1})


def test_a_convolution_whose_channels_come_first_in_float32_is_left_alone():
    x = inputs("float32")[0].transpose(0, 3, 1, 2)
    w = normal(4, 6, 8, 3, 3, scale=0.2)
    assert_left_alone(first, x, w, normal(5, 6), because="the channels come first")


def test_a_sum_that_others_read_ends_the_convolution():
    def f(x, w, bias):
        y = convolved(x, w) + bias
        return jax.nn.silu(y), y

    x, _, bias = inputs("float32")
    args = (x, normal(4, 3, 3, 8, 8, scale=0.2), bias)
    assert_fuses(f, *args, into={"conv": 1})
    assert "conv(bias) of" in str(fusion(f, *args))


# --- short convolutions ---------------------------------------------------------------------------


def of_padded(x, w, b):
    z = jnp.pad(x, ((0, 0), (3, 0), (0, 0)))
    y = w[0] * z[:, : x.shape[1]]
    for j in range(1, 4):
        y = y + w[j] * z[:, j : j + x.shape[1]]
    return jax.nn.silu(y + b)


def of_padded_parts(x, w, b):
    """Causal convolution as in Griffin, from the latest step backwards."""
    y = 0.0
    for back in range(4):
        part = jnp.pad(x[:, : x.shape[1] - back], ((0, 0), (back, 0), (0, 0)))
        y = y + part * w[3 - back][None, None]
    return jax.nn.silu(y + b[None, None])


def after_zeros(x, w, b):
    z = jnp.concatenate([jnp.zeros_like(x[:, :3]), x], axis=1)
    return jax.nn.silu(b + sum(z[:, j : j + x.shape[1]] * w[j] for j in range(4)))


def with_its_next_state(x, w, b):
    z = jnp.pad(x, ((0, 0), (3, 0), (0, 0)))
    return jax.nn.silu(sum(w[j] * z[:, j : j + x.shape[1]] for j in range(4)) + b), z[:, -3:]


def of_each_sequence(x, w, b):
    return jax.vmap(lambda x: of_padded(x[None], w, b)[0])(x)


def shifted(dtype):
    return normal(0, 2, 9, 8, dtype=dtype), normal(1, 4, 8, dtype=dtype), normal(2, 8, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "f", [of_padded, of_padded_parts, after_zeros, with_its_next_state, of_each_sequence]
)
def test_a_short_convolution_as_shifted_products(f, dtype):
    assert_fuses(f, *shifted(dtype), into={"conv": 1})
    assert "conv(bias, silu)" in str(fusion(f, *shifted(dtype)))


def test_shifts_that_go_both_ways_or_leave_entries_out():
    def centred(x, w, b):
        z = jnp.pad(x, ((0, 0), (1, 1), (0, 0)))
        return sum(z[:, j : j + x.shape[1]] * w[j] for j in range(3))

    def dilated(x, w, b):
        z = jnp.pad(x, ((0, 0), (6, 0), (0, 0)))
        return x + sum(z[:, 2 * j : 2 * j + x.shape[1]] * w[j] for j in range(4))

    def after_a_state(x, w, b):
        return sum(x[:, j : j + x.shape[1] - 3] * w[j] for j in range(4))

    for f in (centred, dilated, after_a_state):
        assert_fuses(f, *shifted("float32"), into={"conv": 1})


@pytest.mark.parametrize(
    "tap",
    [
        lambda z, w, j: (2.0 if j == 1 else 1.0) * w[j] * z[:, j : j + 9],
        lambda z, w, j: w[j] * z[:, j + (j == 3) : j + (j == 3) + 9],
        lambda z, w, j: w[j] * z[:, min(j, 2) : min(j, 2) + 9],
        lambda z, w, j: w[j, 0] * z[:, j : j + 9],
        lambda z, w, j: w[j] * jnp.square(z)[:, j : j + 9] if j else w[j] * z[:, :9],
        lambda z, w, j: w[j] * (z[:, j : j + 9] + 1),
    ],
)
def test_other_sums_of_shifts_are_left_alone(tap):
    def f(x, w, b):
        z = jnp.pad(x, ((0, 0), (3, 1), (0, 0)))
        return sum(tap(z, w, j) for j in range(4)) + b

    assert_left_alone(f, *shifted("float32"))


def test_zeros_inside_of_the_array_are_no_padding():
    def f(x, w, b):
        z = jnp.pad(x[:, :5], ((0, 0), (3, 4), (0, 0)))
        return sum(w[j] * z[:, j : j + 9] for j in range(4)), x

    found = fusion(f, *shifted("float32"))
    assert "of float32[2,5,8]" in str(found)
    assert_fuses(f, *shifted("float32"), into={"conv": 1})


# --- pools ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_value_of_each_window(dtype):
    def f(x):
        # All zeros are equal, and the gradient goes to the first.
        return nn.max_pool(jax.nn.relu(x), (3, 2), strides=(2, 1), padding="SAME")

    assert_fuses(f, inputs(dtype)[0] - 1, into={"max_pool": 1})


def test_a_pool_over_channels_is_left_alone():
    def f(x):
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 1, 1, 2), (1, 1, 1, 2), "VALID")

    assert_left_alone(f, inputs("float32")[0])


# --- upsampling -----------------------------------------------------------------------------------


def resized(x, *shape, method="bilinear"):
    return jax.image.resize(x, (x.shape[0], *shape, x.shape[-1]), method)


@pytest.mark.parametrize("dtype", DTYPES)
def test_images_that_are_enlarged_by_two(dtype):
    f = lambda x: resized(x, 8, 12)  # noqa: E731
    assert_fuses(f, inputs(dtype)[0], into={"upsample": 1})


@pytest.mark.parametrize(
    "options",
    [
        {"shape": (8, 6)},
        {"shape": (12, 18)},
        {"shape": (8, 12), "method": "cubic"},
        {"shape": (8, 12), "method": "nearest"},
    ],
)
def test_images_that_are_enlarged_otherwise_are_left_alone(options):
    shape, rest = options["shape"], {k: v for k, v in options.items() if k != "shape"}
    assert_left_alone(lambda x: resized(x, *shape, **rest), inputs("float32")[0])


# --- a block --------------------------------------------------------------------------------------


def test_the_hot_path_of_a_diffusion_u_net():
    """The block is GroupNorm, SiLU, convolution and time embedding, twice, and the block's sum."""

    def block(x, embedding, scale, bias, w1, w2):
        y = convolved(jax.nn.silu(of_linen(x, scale, bias)), w1.astype(x.dtype))
        y = y + bias.astype(x.dtype)
        y = y + embedding[:, None, None]
        y = convolved(jax.nn.silu(of_linen(y, scale, bias)), w2.astype(x.dtype))
        return x + (y + bias.astype(x.dtype))

    x, scale, bias = inputs("bfloat16")
    weights = [normal(i, 3, 3, 8, 8, scale=0.2) for i in (4, 5)]
    args = (x, normal(3, 2, 8, dtype="bfloat16"), scale, bias, *weights)
    assert_fuses(block, *args, into={"group_norm": 2, "conv": 2})
