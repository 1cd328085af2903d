"""fuse finds LayerNorm and RMSNorm as models write them."""

import jax
import jax.numpy as jnp
import pytest

import jaxfused
from tests.support.fused import assert_fuses, assert_left_alone, counts, fusion, normal, wide

pytestmark = pytest.mark.exhaustive

DTYPES = ["bfloat16", pytest.param("float32", marks=pytest.mark.exhaustive)]


def inputs(dtype, *shape):
    x = normal(0, *(shape or (3, 5, 32)), dtype=dtype) * 2 + 1
    features = x.shape[-1]
    return x, normal(1, features) * 0.3 + 1, normal(2, features) * 0.3


def flax_fast_variance(x, scale, bias):
    y = wide(x)
    mean = y.mean(-1)
    variance = jnp.maximum(0.0, jnp.square(y).mean(-1) - jnp.square(mean))
    mean, variance = mean[..., None], variance[..., None]
    y = (y - mean) * (jax.lax.rsqrt(variance + 1e-6) * scale) + bias
    return y.astype(x.dtype)


def by_deviations(x, scale, bias):
    y = wide(x)
    mean = jnp.mean(y, axis=-1, keepdims=True)
    variance = jnp.mean((y - mean) ** 2, axis=-1, keepdims=True)
    return (scale * (y - mean) / jnp.sqrt(variance + 1e-5) + bias).astype(x.dtype)


def by_jnp_var(x, scale, bias):
    y = wide(x)
    y = (y - y.mean(-1, keepdims=True)) * jax.lax.rsqrt(y.var(-1, keepdims=True) + 1e-5)
    return (y * scale[None, None, :] + bias[None, None, :]).astype(x.dtype)


def rounded_before_scale(x, scale, bias):
    y = wide(x)
    mean = y.mean(-1, keepdims=True)
    y = (y - mean) / (jnp.var(y, axis=-1, keepdims=True) + 1e-5) ** 0.5
    return y.astype(x.dtype) * scale.astype(x.dtype) + bias.astype(x.dtype)


def keras(x, scale, bias):
    y = wide(x)
    mean, variance = y.mean(-1, keepdims=True), y.var(-1, keepdims=True)
    inverse = jax.lax.rsqrt(variance + 1e-3) * scale
    return (y * inverse + (-mean * inverse + bias)).astype(x.dtype)


def tensorflow(x, scale, bias):
    y = wide(x)
    mean = y.mean(-1, keepdims=True)
    variance = jnp.square(y).mean(-1, keepdims=True) - jnp.square(mean)
    inverse = scale / jnp.sqrt(variance + 1e-3)
    return (y * inverse + (bias - mean * inverse)).astype(x.dtype)


def without_parameters(x, scale, bias):
    y = wide(x)
    y = y - y.mean(-1, keepdims=True)
    return (y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + 1e-5)).astype(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "norm",
    [
        flax_fast_variance,
        by_deviations,
        by_jnp_var,
        rounded_before_scale,
        keras,
        tensorflow,
        without_parameters,
    ],
)
def test_layer_norm_in_its_spellings(norm, dtype):
    args = inputs(dtype)
    if norm is without_parameters:
        assert_fuses(lambda x: norm(x, None, None), args[0], into={"layer_norm": 1})
    else:
        assert_fuses(norm, *args, into={"layer_norm": 1})


def test_a_norm_of_keras_after_a_residual_sum_with_two_readers():
    def f(x, residual, scale, bias):
        y = keras(x + residual, scale, bias)
        return 2 * y, y + 1, x + residual

    x, scale, bias = inputs("float32")
    assert_fuses(f, x, x[::-1], scale, bias, into={"layer_norm": 1})


@pytest.mark.parametrize("sign, axis", [(1, -1), (-1, 1)])
def test_two_terms_that_are_no_difference_from_the_mean(sign, axis):
    def f(x, scale, bias):
        inverse = jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-3) * scale
        return x * inverse + (bias + sign * x.mean(axis, keepdims=True) * inverse)

    assert_left_alone(f, *inputs("float32"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", [jax.nn.silu, jax.nn.hard_swish, jnp.tanh])
def test_the_activation_after_a_norm(activation, dtype):
    def f(x, scale, bias):
        return activation(by_jnp_var(x, scale, bias))

    assert_fuses(f, *inputs(dtype), into={"layer_norm": 1})
    name = {jnp.tanh: "tanh", jax.nn.silu: "silu"}.get(activation, "hard_swish")
    assert f"layer_norm(scale, bias, {name})" in str(fusion(f, *inputs(dtype)))


def test_the_activation_after_a_norm_of_a_residual_sum():
    def f(x, residual, scale):
        h = x + residual
        return jax.nn.relu(gemma(h, scale)), h

    x, scale, _ = inputs("float32")
    assert_fuses(f, x, x[::-1], scale, into={"rms_norm": 1})


def test_a_norm_that_is_read_before_its_activation_too():
    def f(x, scale, bias):
        y = by_jnp_var(x, scale, bias)
        return jax.nn.silu(y), y

    assert_fuses(f, *inputs("float32"), into={"layer_norm": 1})
    assert "silu" not in str(fusion(f, *inputs("float32")))


def test_the_mean_square_of_another_row_is_no_norm():
    def f(x, scale):
        mean_square = jnp.mean(jnp.square(x), axis=-1)[:, None, :]
        return x * jax.lax.rsqrt(jnp.broadcast_to(mean_square, x.shape) + 1e-5) * scale

    x, scale, _ = inputs("float32", 3, 8, 8)
    assert_left_alone(f, x, scale)


def test_the_difference_from_the_mean_over_another_axis_is_no_norm():
    def f(x, scale, bias):
        centred = x - x.mean(1, keepdims=True)
        return centred * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-3) * scale + bias

    assert_left_alone(f, *inputs("float32"))


def times_rsqrt(x, scale):
    y = wide(x)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-6)
    return (y * scale).astype(x.dtype)


def over_root(x, scale):
    y = wide(x)
    rms = jnp.sqrt(jnp.mean(jnp.square(y), -1, keepdims=True) + 1e-5)
    return (scale * y / rms).astype(x.dtype)


def gemma(x, scale):
    y = wide(x)
    variance = jnp.mean(jnp.square(y), axis=-1, keepdims=True)
    y = y * jax.lax.rsqrt(variance + 1e-06)
    return (y * (1 + scale)).astype(x.dtype)


def llama(x, scale):
    y = wide(x)
    y = (y / jnp.sqrt(jnp.power(y, 2).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype)
    return y * scale.astype(x.dtype)


def haiku(x, scale):
    y = wide(x)
    mean_square = jnp.mean(jnp.square(y), axis=-1, keepdims=True)
    mean_square = jnp.broadcast_to(mean_square, y.shape)
    return (y * (scale * jax.lax.rsqrt(mean_square + 1e-5))).astype(x.dtype)


def by_power(x, scale):
    y = wide(x)
    return (y * ((y**2).mean(-1, keepdims=True) + 1e-6) ** -0.5 * scale).astype(x.dtype)


def by_sum(x, scale):
    y = wide(x)
    mean_square = jnp.sum(y**2, axis=-1, keepdims=True) * (1 / x.shape[-1])
    return (y * (scale * jax.lax.rsqrt(mean_square + 1e-6))).astype(x.dtype)


def by_reciprocal(x, scale):
    y = wide(x)
    root = jnp.sqrt(jnp.square(y).mean(-1, keepdims=True) + 1e-6)
    return (y * jnp.reciprocal(root) * (1 + scale)).astype(x.dtype)


def by_einsum(x, scale):
    y = wide(x)
    mean_square = jnp.einsum("...d,...d->...", y, y)[..., None] / x.shape[-1]
    return (y * jax.lax.rsqrt(mean_square + 1e-6) * scale).astype(x.dtype)


def by_vecdot(x, scale):
    """RMSNorm of the rows by `vmap`, whose sum is in the dtype of x."""

    def of_row(row):
        mean_square = jnp.vecdot(row, row) / row.size
        return row * jax.lax.rsqrt(mean_square + 1e-6) * scale.astype(row.dtype)

    return jax.vmap(jax.vmap(of_row))(x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "norm",
    [
        times_rsqrt,
        over_root,
        gemma,
        llama,
        haiku,
        by_power,
        by_sum,
        by_reciprocal,
        by_einsum,
        by_vecdot,
    ],
)
def test_rms_norm_in_its_spellings(norm, dtype):
    x, scale, _ = inputs(dtype)
    assert_fuses(norm, x, scale, into={"rms_norm": 1})


@pytest.mark.parametrize("equation", ["btd,btd->b", "tbd,btd->bt", "btd,ced->bt"])
def test_other_products_of_an_array_are_no_mean_of_squares(equation):
    def f(x):
        found = jnp.einsum(equation, x, x)
        found = found.reshape(*found.shape, *[1] * (3 - found.ndim))
        return x * jax.lax.rsqrt(found / x.shape[-1] + 1e-6)

    assert_left_alone(f, jnp.abs(normal(0, 4, 4, 8)))


@pytest.mark.parametrize(
    "norm",
    [
        lambda x: x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-6),
        lambda x: x * jax.lax.rsqrt(jnp.sum(x**2, -1, keepdims=True) + 1e-6),
        lambda x: x / jnp.sqrt(jnp.vecdot(x, x))[..., None] * 8**0.5,
    ],
)
def test_rows_of_length_1_are_left_with_a_reason(norm):
    assert_left_alone(norm, normal(0, 4, 4, 8), because="of a sum of squares")


def test_what_a_librarys_jitted_function_does_has_the_line_of_its_call():
    def f(x):
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

    jnp.linalg.norm(normal(0, 4, 4, 8), axis=-1, keepdims=True)
    (miss,) = fusion(f, normal(0, 4, 4, 8)).misses
    assert miss.line == f"{__file__}:{f.__code__.co_firstlineno + 1}"


def test_deviations_that_are_squared_by_a_product():
    def f(x, scale, bias):
        u = x - x.mean(-1, keepdims=True)
        variance = jnp.einsum("btd,btd->bt", u, u)[..., None] / x.shape[-1]
        return u * jax.lax.rsqrt(variance + 1e-5) * scale + bias

    assert_fuses(f, *inputs("float32"), into={"layer_norm": 1})


def test_a_norm_of_what_an_axis_was_taken_off():
    """Queries are normalised after they are sliced from one product for q, k and v."""
    x, scale, _ = inputs("float32", 3, 5, 1, 4, 16)
    assert_fuses(lambda x, s: times_rsqrt(x[:, :, 0], s), x, scale, into={"rms_norm": 1})


def test_one_plus_scale_is_the_operators_offset():
    x, scale, _ = inputs("bfloat16")
    assert "scale_offset=1" in str(fusion(gemma, x, scale))


def residual_block(x, residual, bias, w, norm_scale, norm_bias):
    stream = residual + (x @ w + bias)
    return flax_fast_variance(stream, norm_scale, norm_bias), stream


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_residual_sum_and_the_bias_before_belong_to_the_norm(dtype):
    x, scale, bias = inputs(dtype)
    args = (x, x[::-1], bias.astype(dtype), normal(5, 32, 32, dtype=dtype) * 0.2, scale, bias)
    assert_fuses(residual_block, *args, into={"layer_norm": 1})
    assert "layer_norm(scale, bias, residual, pre_bias)" in str(fusion(residual_block, *args))


def test_what_is_normalised_may_itself_be_a_product():
    x, scale, bias = inputs("float32")
    assert_fuses(
        lambda x, s, b: times_rsqrt(x * jnp.tanh(x), s) + b, x, scale, bias, into={"rms_norm": 1}
    )


def test_one_value_written_in_several_converts_is_one_input():
    def f(x, scale):
        y = wide(x)
        z = wide(x)
        y = y * jax.lax.rsqrt(jnp.mean(z * z, -1, keepdims=True) + 1e-6) * scale
        return y.astype(x.dtype) + 1, y.astype(x.dtype) * 2

    x, scale, _ = inputs("bfloat16")
    assert_fuses(f, x, scale, into={"rms_norm": 1})


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_are_not_used_are_not_normalised(dtype):
    """Only the class token's row of each image is used, also in the sum before the norm."""

    def f(x, residual, scale, bias):
        return flax_fast_variance(x + residual, scale, bias)[:, 0]

    x, scale, bias = inputs(dtype)
    # XLA may skip the rounding of an inner sum; this sum needs none.
    x = jnp.round(x * 8) / 8
    args = (x, x[::-1], scale, bias)
    assert_fuses(f, *args, into={"layer_norm": 1})
    assert "of which [3, 1, 32] are used" in str(fusion(f, *args))


def test_every_other_row_is_cut_by_the_program():
    x, scale, bias = inputs("float32")
    f = lambda *args: flax_fast_variance(*args)[:, ::2]  # noqa: E731
    assert_fuses(f, x, scale, bias, into={"layer_norm": 1})


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_modulation_by_image_follows_the_norm(dtype):
    """AdaLN of a DiT: the norm has no parameters, and the scale differs between images."""

    def f(x, scale, shift, gate, w):
        y = wide(x)
        y = y - y.mean(-1, keepdims=True)
        y = (y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype)
        y = y * (1 + scale[:, None]) + shift[:, None]
        return x + gate[:, None] * (y @ w)

    x, _, _ = inputs(dtype)
    by_image = [normal(i, 3, 32, dtype=dtype, scale=0.3) for i in (4, 5, 6)]
    w = normal(7, 32, 32, dtype=dtype, scale=0.2)
    assert_fuses(f, x, *by_image, w, into={"layer_norm": 1})


# --- what is left alone ---------------------------------------------------------------------------


@pytest.mark.parametrize("axes", [1, (1, 2)])
def test_other_axes_are_left_alone(axes):
    def f(x):
        return x * jax.lax.rsqrt(jnp.mean(x * x, axis=axes, keepdims=True) + 1e-6)

    assert_left_alone(f, normal(0, 3, 4, 8), because="no rms_norm at")


@pytest.mark.parametrize(
    "root",
    [
        lambda x: x.std(-1, keepdims=True, ddof=1) + 1e-6,
        lambda x: jnp.sqrt(jnp.maximum(x.var(-1, keepdims=True), 1e-6)),
    ],
    ids=["of a sample", "clamped"],
)
def test_a_norm_by_another_deviation_is_left_with_a_reason(root):
    def f(x):
        return (x - x.mean(-1, keepdims=True)) / root(x)

    assert_left_alone(f, inputs("float32")[0], because="its root is of a sum of squares")


def test_statistics_that_are_returned_are_left_alone():
    def f(x):
        rstd = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
        return x * rstd, rstd

    assert_left_alone(f, inputs("float32")[0])


def test_statistics_of_another_array_are_left_alone():
    def f(x):
        y = x[::-1]
        return y * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)

    assert_left_alone(f, inputs("float32")[0], because="nothing is multiplied")


def test_the_root_of_a_sum_is_not_that_of_a_mean():
    def f(x):
        return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)

    assert_left_alone(f, inputs("float32")[0])


def test_epsilon_outside_the_root_is_left_alone():
    def f(x):
        return x / (jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True)) + 1e-3)

    assert_left_alone(f, inputs("float32")[0])


def test_a_scale_that_differs_by_row_stays_outside():
    def f(x, scale):
        return times_rsqrt(x, 1.0) * scale

    x, _, _ = inputs("float32")
    assert_fuses(f, x, normal(3, 3, 5, 1), into={"rms_norm": 1})


def test_a_result_that_stays_wider_is_left_alone():
    def f(x):
        y = wide(x)
        return y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-6)

    assert_left_alone(f, inputs("bfloat16")[0], because="stays in float32")


def test_a_stop_gradient_in_the_middle_is_a_wall():
    def f(x):
        rstd = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
        return x * jax.lax.stop_gradient(rstd)

    assert_left_alone(f, inputs("float32")[0])


def test_the_users_own_gradient_is_a_wall():
    @jax.custom_vjp
    def f(x, scale):
        return times_rsqrt(x, scale)

    f.defvjp(lambda x, scale: (f(x, scale), None), lambda _, dy: (dy, dy.sum((0, 1))))
    x, scale, _ = inputs("float32")
    assert_left_alone(f, x, scale)
    dx = jax.grad(lambda x: jaxfused.fuse(f)(x, scale).sum())(x)
    assert bool((dx == 1).all())


def test_square_shapes_tell_rows_from_features():
    """A scale along the rows is not the norm's scale, although it has as many numbers."""

    def f(x, scale):
        return times_rsqrt(x, scale[:, None])

    x = normal(0, 8, 8)
    assert counts(f, x, normal(1, 8)) == {"rms_norm": 1}
    assert_fuses(f, x, normal(1, 8), into={"rms_norm": 1})


@pytest.mark.parametrize("count", [299, 301, 300.001])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_sum_over_nearly_as_many_is_no_mean(count, dtype):
    """`ddof=1` gives such a count, as in torch's standard deviation."""

    def f(x):
        return x * jax.lax.rsqrt((x * x).sum(-1, keepdims=True) / count + 1e-6)

    with jax.enable_x64(dtype == "float64"):
        assert_left_alone(f, normal(0, 2, 300, dtype=dtype))


@pytest.mark.parametrize("ddof", [1, 2])
def test_an_unbiased_variance_is_another(ddof):
    def f(x):
        return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(
            x.var(-1, keepdims=True, ddof=ddof) + 1e-6
        )

    assert_left_alone(f, normal(0, 2, 512))


@pytest.mark.parametrize("dtype, features", [("bfloat16", 300), ("float16", 300), ("float32", 7)])
def test_one_over_a_count_may_be_rounded_to_its_dtype(dtype, features):
    def f(x):
        mean_square = (x * x).sum(-1, keepdims=True) * (1 / features)
        return x * jax.lax.rsqrt(mean_square + jnp.asarray(1e-3, x.dtype))

    assert counts(f, normal(0, 2, features, dtype=dtype)) == {"rms_norm": 1}
    # In bfloat16 the next number after 1 / 300 is 1 / 298.6.
    off = 1 + 1.5 * float(jnp.finfo(dtype).eps)

    def g(x):
        mean_square = (x * x).sum(-1, keepdims=True) * (off / features)
        return x * jax.lax.rsqrt(mean_square + jnp.asarray(1e-3, x.dtype))

    assert counts(g, normal(0, 2, features, dtype=dtype)) == {}


def mean_of_columns(x):
    y = x - x.mean(-1)
    return y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + 1e-6)


def two_means_apart(x):
    variance = jnp.square(x).mean(-1)[:, None] - jnp.square(x.mean(-1))[None]
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(jnp.abs(variance) + 1e-6)


def lifted_from_below(x):
    y = x - x.mean(-1, keepdims=True)
    variance = jnp.maximum(jnp.square(y).mean(-1, keepdims=True) - 1.5, 0.0)
    return y * jax.lax.rsqrt(variance + 1e-3)


def nearly_one(x):
    y = x - x.mean(-1, keepdims=True)
    return y * 1.0000005 * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + 1e-6)


@pytest.mark.parametrize("f", [two_means_apart, lifted_from_below])
def test_what_is_nearly_a_norm_of_rows(f):
    assert counts(f, normal(0, 8, 8)) == {}


def test_layer_norm_of_an_einsum_that_is_transposed():
    """The product has its batch axis, the features, first: its norm is none of images of one pixel."""

    def f(a, b, scale, bias):
        x = jnp.einsum("ikc,jkc->ijc", a, b)
        centred = x - x.mean(-1, keepdims=True)
        variance = jnp.mean(centred**2, axis=-1, keepdims=True)
        return centred * jax.lax.rsqrt(variance + 1e-5) * scale + bias

    a, b = (normal(seed, 3, 4, 8) for seed in (1, 2))
    assert_fuses(f, a, b, normal(3, 8), normal(4, 8), into={"layer_norm": 1})


def test_a_mean_that_stands_at_other_rows_is_no_layer_norms():
    assert_fuses(mean_of_columns, normal(0, 8, 8), into={"rms_norm": 1})


def test_a_factor_near_1_stays():
    x = normal(0, 3, 8)
    ours, plain = jaxfused.fuse(nearly_one)(x), nearly_one(x)
    assert float(jnp.abs(ours - plain).max()) < 3e-7


# --- parameters of each image ---------------------------------------------------------------------


def modulated(x, shift, scale):
    """The norm of a diffusion Transformer, in its authors' form."""
    y = without_parameters(x, None, None)
    return y * (1 + scale[:, None]) + shift[:, None]


def images(dtype, count):
    return [normal(10 + i, 3, 32, dtype=dtype) * 0.3 for i in range(count)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_modulation_of_each_image(dtype):
    x, _, _ = inputs(dtype)
    assert_fuses(modulated, x, *images(dtype, 2), into={"layer_norm": 1})


@pytest.mark.parametrize("dtype", DTYPES)
def test_gate_before_the_sum(dtype):
    x, _, _ = inputs(dtype)
    w = normal(5, 32, 32, dtype=dtype) * 0.2

    def block(x, w, shift1, scale1, gate, shift2, scale2):
        x = x + gate[:, None] * (modulated(x, shift1, scale1) @ w)
        return modulated(x, shift2, scale2), x

    found = fusion(block, x, w, *images(dtype, 5))
    assert_fuses(block, x, w, *images(dtype, 5), into={"layer_norm": 2})
    assert "gate" in str(found)
