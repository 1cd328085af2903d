"""fuse finds linear, mlp and gated_mlp as models write them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfused
from tests.support.fused import assert_fuses, assert_left_alone, counts, fusion, normal, wide

pytestmark = pytest.mark.exhaustive

DTYPES = ["bfloat16", pytest.param("float32", marks=pytest.mark.exhaustive)]


def weights(*shape, seed=1, dtype="float32"):
    return normal(seed, *shape, dtype=dtype, scale=0.3)


def x_of(dtype, *shape):
    return normal(0, *(shape or (3, 5, 16)), dtype=dtype)


def gelu_of_gpt2(x):
    return 0.5 * x * (1.0 + jnp.tanh(jnp.sqrt(2.0 / jnp.pi) * (x + 0.044715 * x**3)))


def gelu_by_erf(x):
    return x * 0.5 * (1.0 + jax.lax.erf(x / jnp.sqrt(2.0).astype(x.dtype)))


ACTIVATIONS = {
    "gelu": jax.nn.gelu,
    "gelu_erf": partial(jax.nn.gelu, approximate=False),
    "gpt2": gelu_of_gpt2,
    "by_erf": gelu_by_erf,
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "silu": jax.nn.silu,
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
    "by_exp": lambda x: 1 / (1 + jnp.exp(-x)),
    "x_over_1_plus_exp": lambda x: x / (1 + jnp.exp(-x)),
    "relu": jax.nn.relu,
    "relu2": lambda x: jax.nn.relu(x) ** 2,
    "relu6": jax.nn.relu6,
    "leaky_relu": jax.nn.leaky_relu,
    "hard_sigmoid": jax.nn.hard_sigmoid,
    "hard_swish": jax.nn.hard_swish,
    "mish": jax.nn.mish,
    "leaky_relu of 0.2": partial(jax.nn.leaky_relu, negative_slope=0.2),
    "softplus": jax.nn.softplus,
    "softplus_by_log1p": lambda x: jnp.log1p(jnp.exp(x)),
    "elu": jax.nn.elu,
    "celu": jax.nn.celu,
    "selu": jax.nn.selu,
    "hard_tanh": jax.nn.hard_tanh,
    "relu6_by_clamp": lambda x: jax.lax.clamp(x.dtype.type(0), x, x.dtype.type(6)),
    "hard_swish_by_relu6": lambda x: x * (jax.nn.relu6(x + 3) * (1 / 6)),
    "mish_by_log1p": lambda x: x * jnp.tanh(jnp.log1p(jnp.exp(x))),
    "silu_by_tanh": lambda x: 0.5 * x * (1 + jnp.tanh(0.5 * x)),
    "wide_gelu": lambda x: jax.nn.gelu(wide(x)).astype(x.dtype),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_linear_with_its_activation(activation, dtype):
    def f(x, w, b):
        return ACTIVATIONS[activation](x @ w.astype(x.dtype) + b.astype(x.dtype)) * 2

    args = (x_of(dtype), weights(16, 24), weights(24, seed=2))
    assert_fuses(f, *args, into={"linear": 1})


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_with_the_residual(dtype):
    def f(x, w, b, residual):
        return residual + (x @ w + b)

    x = x_of(dtype)
    args = (x, weights(16, 16, dtype=dtype), weights(16, seed=2, dtype=dtype), x[::-1])
    assert_fuses(f, *args, into={"linear": 1})


def test_linear_accumulates_into_a_wider_result():
    def f(x, w, residual):
        return jnp.dot(x, w, preferred_element_type=jnp.float32) + residual

    x = x_of("bfloat16", 6, 16)
    found = fusion(f, x, weights(16, 8, dtype="bfloat16"), normal(3, 6, 8))
    assert found.counts() == {"linear": 1}
    y = jaxfused.fuse(f)(x, weights(16, 8, dtype="bfloat16"), normal(3, 6, 8))
    assert y.dtype == jnp.float32


def test_a_bias_may_follow_a_reshape_of_the_features():
    def f(x, w, b):
        y = jnp.einsum("...d,dnh->...nh", x, w)
        return jax.nn.relu(y.reshape(*x.shape[:-1], -1) + b)

    args = (x_of("float32"), weights(16, 4, 8), weights(32, seed=2))
    assert_fuses(f, *args, into={"linear": 1})
    assert "linear(bias, relu)" in str(fusion(f, *args))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_activation_or_a_residual_may_follow_a_reshape(dtype):
    def images(z, w, b):
        """Returns the first images of a generator."""
        return jax.nn.relu((z.reshape(10, 16) @ w + b).reshape(2, 5, 4, 4, 2))

    def attended(x, w, b):
        """Adds the result of an attention over pixels to an image."""
        return x.reshape(2, 5, 1, 2, 8) + (x @ w[:, :16] + b[:16]).reshape(2, 5, 1, 2, 8)

    def gated_heads(x, w, b):
        return x.reshape(2, 5, 4, 4) * jax.nn.sigmoid((x @ w[:, :16] + b[:16]).reshape(2, 5, 4, 4))

    args = (x_of(dtype, 2, 5, 16), weights(16, 32, dtype=dtype), weights(32, seed=2, dtype=dtype))
    for f, operator in ((images, "linear"), (attended, "linear"), (gated_heads, "gate")):
        assert_fuses(f, *args, into={operator: 1})


def test_a_product_over_two_axes_and_into_two():
    def f(x, w, b):
        y = jnp.einsum("btnh,nhkd->btkd", x, w) + b
        return jax.nn.gelu(y)

    args = (x_of("float32", 2, 3, 4, 5), weights(4, 5, 6, 7), weights(6, 7, seed=2))
    assert_fuses(f, *args, into={"linear": 1})


def test_a_matrix_times_each_vector_is_a_product_of_rows():
    def f(x, w, b):
        return jax.vmap(jax.vmap(lambda x: jax.nn.silu(w @ x + b)))(x)

    args = (x_of("float32"), weights(24, 16), weights(24, seed=2))
    assert_fuses(f, *args, into={"linear": 1})


def perceptron(x, w1, b1, w2, b2, activation=jax.nn.gelu):
    h = activation(x @ w1.astype(x.dtype) + b1.astype(x.dtype))
    return h @ w2.astype(x.dtype) + b2.astype(x.dtype)


def of_perceptron(dtype):
    shapes = ((16, 32), (32,), (32, 16), (16,))
    return x_of(dtype), *(weights(*shape, seed=i + 1) for i, shape in enumerate(shapes))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("residual", [False, True])
def test_mlp(residual, dtype):
    def f(*args):
        return args[0] + perceptron(*args) if residual else perceptron(*args)

    assert_fuses(f, *of_perceptron(dtype), into={"mlp": 1})


def gated(x, w_gate, w_up, w_down, activation=jax.nn.silu):
    return (activation(x @ w_gate) * (x @ w_up)) @ w_down


def of_gated(dtype):
    shapes = ((16, 32), (16, 32), (32, 16))
    return x_of(dtype), *(weights(*s, seed=i + 1, dtype=dtype) for i, s in enumerate(shapes))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", [jax.nn.silu, jax.nn.gelu, jax.nn.relu, jax.nn.sigmoid])
def test_gated_mlp(activation, dtype):
    assert_fuses(partial(gated, activation=activation), *of_gated(dtype), into={"gated_mlp": 1})


def test_gated_mlp_with_factors_the_other_way_round_and_residual():
    def f(x, w_gate, w_up, w_down, b):
        return x + ((x @ w_up + b) * jax.nn.silu(x @ w_gate + b)) @ w_down

    assert_fuses(f, *of_gated("float32"), weights(32, seed=7), into={"gated_mlp": 1})


def test_gated_mlp_of_one_product():
    def f(x, w, w_down, first):
        a, b = jnp.split(x @ w, 2, axis=-1)
        return (jax.nn.silu(a) * b if first else a * jax.nn.silu(b)) @ w_down

    args = (x_of("float32", 3, 6, 16), weights(16, 64), weights(32, 16, seed=3))
    assert_fuses(partial(f, first=True), *args, into={"gated_mlp": 1})
    assert_fuses(partial(f, first=False), *args, into={"gated_mlp": 1})


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_mlp_of_one_product_with_its_biases(dtype):
    def f(x, w, b, w_down, b_down, first):
        y = x @ w.astype(x.dtype) + b.astype(x.dtype)
        a, c = jnp.split(y, 2, axis=-1)
        y = jax.nn.gelu(a) * c if first else a * jax.nn.gelu(c)
        return y @ w_down.astype(x.dtype) + b_down.astype(x.dtype)

    shapes = ((16, 64), (64,), (32, 16), (16,))
    x = x_of(dtype, 3, 6, 16)
    args = (x, *(weights(*shape, seed=i + 1) for i, shape in enumerate(shapes)))
    assert_fuses(partial(f, first=True), *args, into={"gated_mlp": 1})
    assert_fuses(partial(f, first=False), *args, into={"gated_mlp": 1})


def by_strides(h):
    return h[..., ::2], h[..., 1::2]


def by_strides_up_first(h):
    return h[..., 1::2], h[..., ::2]


def by_pairs(h):
    h = h.reshape(*h.shape[:-1], -1, 2)
    return h[..., 0], h[..., 1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("cut", [by_strides, by_strides_up_first, by_pairs])
def test_gated_mlp_of_interleaved_columns_is_left_alone(cut, has_bias, dtype):
    def f(x, w, w_down, *b):
        h = x @ w + b[0] if has_bias else x @ w
        gate, up = cut(h)
        return (jax.nn.silu(gate) * up) @ w_down

    shapes = ((16, 64), (32, 16), (64,))[: 2 + has_bias]
    args = [weights(*s, seed=i + 1, dtype=dtype) for i, s in enumerate(shapes)]
    assert_left_alone(f, x_of(dtype, 3, 6, 16), *args, because="its matrix would be copied")


def test_gpt_oss_clamped_gate_is_left_with_a_reason():
    def f(x, w, w_down):
        gate, up = by_strides(x @ w)
        gate, up = jnp.minimum(gate, 7.0), jnp.clip(up, -7.0, 7.0)
        return (gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)) @ w_down

    args = (x_of("float32", 3, 6, 16), weights(16, 64), weights(32, 16, seed=3))
    assert_left_alone(f, *args, because="the activation is none of")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", [jax.nn.sigmoid, jax.nn.silu])
@pytest.mark.parametrize("biases", [0, 1, 2])
def test_gated_unit_that_no_product_reads(biases, activation, dtype):
    """A triangle product transposes its edges, which are gated units, before it multiplies them."""

    def f(x, w_gate, w_up, *b):
        gate, up = (jnp.einsum("bijd,dhf->bijhf", x, w.astype(x.dtype)) for w in (w_gate, w_up))
        gate = gate + b[0].astype(x.dtype) if biases else gate
        up = up + b[1].astype(x.dtype) if biases > 1 else up
        return jnp.moveaxis(up * activation(gate), 2, 1) * 2

    shapes = ((8, 2, 4), (8, 2, 4), (2, 4), (2, 4))[: 2 + biases]
    args = (x_of(dtype, 1, 3, 3, 8), *(weights(*s, seed=i + 1) for i, s in enumerate(shapes)))
    assert_fuses(f, *args, into={"gated_unit": 1})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_gated_unit_of_one_product(has_bias, dtype):
    def f(x, w, *b):
        return jax.nn.glu(x @ w + b[0] if has_bias else x @ w) * 2

    args = [weights(16, 64, dtype=dtype), weights(64, seed=2, dtype=dtype)][: 1 + has_bias]
    assert_fuses(f, x_of(dtype, 3, 6, 16), *args, into={"gated_unit": 1})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", [jax.nn.sigmoid, jax.nn.silu])
def test_gate_of_another_array(activation, dtype):
    """An attention's output, in heads, is gated before its projection."""

    def f(x, y, w, b):
        z = jnp.einsum("btd,dhf->bthf", x, w.astype(x.dtype)) + b.astype(x.dtype)
        return y * activation(z).astype(y.dtype) * 2

    args = (x_of(dtype), x_of(dtype, 3, 5, 2, 4), weights(16, 2, 4), weights(2, 4, seed=2))
    assert_fuses(f, *args, into={"gate": 1})


def test_gate_of_a_product_of_another_array():
    def f(x, y, w_gate, w_up):
        return jax.nn.sigmoid(x @ w_gate) * (y @ w_up)

    x = x_of("float32")
    assert_fuses(f, x, x[::-1], weights(16, 8), weights(16, 8, seed=2), into={"gate": 1})


@pytest.mark.parametrize("kernel", ["NDF", "NFD", "DNF"])
def test_gated_mlp_of_one_product_with_an_axis_of_two(kernel):
    """Gemma's gating_einsum."""

    def f(x, w, w_down):
        gate = jnp.einsum(f"...D,{kernel}->...NF", x, w)
        return (jax.nn.gelu(gate[..., 0, :]) * gate[..., 1, :]) @ w_down

    shape = [{"N": 2, "D": 16, "F": 24}[axis] for axis in kernel]
    args = (x_of("float32"), weights(*shape), weights(24, 16, seed=2))
    assert_fuses(f, *args, into={"gated_mlp": 1})


def test_gated_mlp_of_stacked_kernels():
    def f(x, w, w_down):
        return (jax.nn.gelu(jnp.dot(x, w[0])) * jnp.dot(x, w[1])) @ w_down

    args = (x_of("float32"), weights(2, 16, 32), weights(32, 16, seed=3))
    assert_fuses(f, *args, into={"gated_mlp": 1})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", [("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW")])
def test_a_convolution_that_cuts_patches(layout, dtype):
    channels_last = layout[0] == "NHWC"

    def f(x, w, b):
        y = jax.lax.conv_general_dilated(
            x, w.astype(x.dtype), (2, 4), "VALID", dimension_numbers=layout
        )
        return y + (b if channels_last else b[:, None, None]).astype(x.dtype)

    x = x_of(dtype, 2, 8, 8, 3) if channels_last else x_of(dtype, 2, 3, 8, 8)
    w = weights(2, 4, 3, 16) if channels_last else weights(16, 3, 2, 4)
    assert_fuses(f, x, w, weights(16, seed=3), into={"linear": 1})


# --- what is left alone ---------------------------------------------------------------------------


def test_a_product_alone_is_left_alone():
    assert_left_alone(lambda x, w, b: x @ w + b, x_of("float32"), weights(16, 8), weights(8))


@pytest.mark.parametrize(
    "activation",
    [
        lambda x: x * jax.nn.sigmoid(1.6 * x),
        lambda x: 0.5 * x * (1 + jnp.tanh(0.8 * (x + 0.05 * x**3))),
        lambda x: jnp.tanh(1.1 * x),
        partial(jax.nn.elu, alpha=0.5),
        jax.nn.soft_sign,
        jax.nn.squareplus,
        jax.nn.log_sigmoid,
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_other_activations_are_left_alone(activation, dtype):
    def f(x, w, b):
        return activation(x @ w + b)

    args = (x_of(dtype), weights(16, 8, dtype=dtype), weights(8, dtype=dtype))
    assert_left_alone(f, *args)


@pytest.mark.parametrize(
    "activation",
    [
        lambda x: x * jax.nn.sigmoid(1.70201 * x),
        lambda x: 0.5 * x * (1 + jnp.tanh(0.797884 * (x + 0.04472 * x**3))),
        lambda x: x * jax.nn.sigmoid(x + 1e-5),
    ],
)
def test_constants_of_activations_are_told_to_their_last_place(activation):
    assert_left_alone(lambda x, w: activation(x @ w), x_of("float32"), weights(16, 8))


def test_a_number_after_an_activation_stays():
    def f(x, w):
        return jax.nn.silu(x @ w) + 1e-3

    for dtype in ("float32", "bfloat16"):
        assert_fuses(f, x_of(dtype), weights(16, 8, dtype=dtype), into={"linear": 1})
    x = jnp.zeros((4, 16), jnp.bfloat16)
    assert float(jaxfused.fuse(f)(x, weights(16, 8, dtype="bfloat16"))[0, 0]) > 9e-4


def test_products_of_two_precisions_are_no_gated_mlp():
    def f(x, w_gate, w_up, w_down):
        up = jnp.dot(x, w_up, precision="highest")
        return (jax.nn.silu(x @ w_gate) * up) @ w_down

    assert "gated_mlp" not in counts(f, *of_gated("float32"))


def test_a_maximum_is_no_relu_where_it_bends():
    def f(x, w):
        return jnp.maximum(x @ w, 0)

    assert_left_alone(f, x_of("float32"), weights(16, 8), because="write jax.nn.relu")


@pytest.mark.parametrize(
    "activation, because",
    [
        (lambda x: jnp.clip(x, 0, 6), "write jax.nn.relu6"),
        (lambda x: jnp.where(x >= 0, x, 0), "none of"),
        (lambda x: jnp.where(jnp.isnan(x), 0, jnp.tanh(x)), "none of"),
        (lambda x: jnp.where(x > 0, x, 0.01 * x), "jax.nn.leaky_relu"),
        (lambda x: jnp.maximum(x, 0.01 * x), "jax.nn.leaky_relu"),
        (lambda x: jax.nn.leaky_relu(x, -0.2), "none of"),
        (lambda x: jax.nn.elu(x, 0.5), "none of"),
        (lambda x: jnp.clip(x, -1, 1), "write jax.nn.hard_tanh"),
        (lambda x: jnp.maximum(x, 0.2 * x), "jax.nn.leaky_relu"),
        (lambda x: jnp.where(x > 1e-4, x, 0), "none of"),
        (lambda x: jnp.where(x > -1e-6, x, 0), "none of"),
        (jax.nn.soft_sign, "none of"),
    ],
    ids=[
        "clip",
        "from 0",
        "guard",
        "leak from 0",
        "leak by max",
        "leak",
        "elu",
        "clip to 1",
        "leak of 0.2",
        "above",
        "below",
        "soft sign",
    ],
)
def test_an_activation_whose_corner_is_another_is_left_alone(activation, because):
    def f(x, w):
        return activation(x @ w)

    assert_left_alone(f, x_of("float32"), weights(16, 8), because=because)


@pytest.mark.parametrize(
    "activation",
    [
        lambda x: jnp.nan_to_num(jax.nn.relu(x)),
        lambda x: jnp.where(jnp.isnan(x), 0, jax.nn.relu(x)),
        lambda x: jnp.where(x > 0, x, 0),
    ],
    ids=["nan_to_num", "isnan", "relu of NaN"],
)
def test_an_activation_that_replaces_nan_still_does(activation):
    def f(x, w):
        return activation(x @ w)

    x = x_of("float32").at[0, 0, 0].set(jnp.nan)
    assert not jnp.isnan(jaxfused.fuse(f)(x, weights(16, 8))).any()


@pytest.mark.parametrize("most", [20.0, 1e5])
def test_a_relu_that_is_clipped_keeps_its_clip(most):
    def f(x, w):
        return jnp.minimum(jax.nn.relu(x @ w), most)

    x = 1e6 * x_of("float32")
    assert counts(f, x, weights(16, 8)) == {"linear": 1}
    y = jaxfused.fuse(f)(x, weights(16, 8))
    assert float(y.max()) == most


def test_a_relu_of_the_users_own_gradient_is_a_wall():
    @jax.custom_jvp
    def relu(x):
        return jnp.maximum(x, 0)

    for slope in (0.0, 0.01, 0.5):
        relu.defjvp(lambda x, dx, slope=slope: (relu(*x), jnp.where(x[0] > 0, 1, slope) * dx[0]))
        if slope:
            assert_left_alone(lambda x, w: relu(x @ w), x_of("float32"), weights(16, 8))
        else:
            assert_fuses(
                lambda x, w: relu(x @ w), x_of("float32"), weights(16, 8), into={"linear": 1}
            )


@pytest.mark.parametrize("activation", [jax.nn.relu, jax.nn.hard_swish, jax.nn.mish])
def test_activations_under_meshes(activation):
    def f(x, w):
        return activation(x @ w)

    x, w = x_of("float32", 4, 16), weights(16, 8)
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    rows = jax.sharding.PartitionSpec("d")
    with jax.set_mesh(mesh):
        x, plain = jax.device_put(x, rows), f(x, w)
        assert counts(f, x, w) == {"linear": 1}
        functions = [jaxfused.fuse(f)]
        for check in (False, True):
            in_specs = (rows, jax.sharding.PartitionSpec())
            functions.append(
                jax.shard_map(jaxfused.fuse(f), in_specs=in_specs, out_specs=rows, check_vma=check)
            )
        for function in functions:
            np.testing.assert_allclose(jax.jit(function)(x, w), plain, rtol=1e-5, atol=1e-6)


def test_a_hidden_layer_that_is_used_elsewhere_is_no_mlp():
    def f(x, w1, b1, w2, b2):
        h = jax.nn.gelu(x @ w1 + b1)
        return h @ w2 + b2, h

    assert counts(f, *of_perceptron("float32")) == {"linear": 1}
    assert_fuses(f, *of_perceptron("float32"), into={"linear": 1})


def test_a_preactivation_that_is_used_elsewhere_is_left_alone():
    def f(x, w):
        z = x @ w
        return jax.nn.gelu(z), z

    assert_left_alone(f, x_of("float32"), weights(16, 8))


def test_integers_are_left_alone():
    def f(x, w, residual):
        return x @ w + residual

    args = (
        jnp.ones((2, 4, 4), jnp.int32),
        jnp.ones((4, 4), jnp.int32),
        jnp.ones((2, 4, 4), jnp.int32),
    )
    assert_left_alone(f, *args)


@pytest.mark.parametrize("activation", [jax.nn.relu, jax.nn.hard_swish, jax.nn.silu])
def test_an_activation_of_an_integer_product_is_left_alone(activation):
    def f(x, w):
        product = jax.lax.dot(x, w, preferred_element_type=jnp.int32)
        return activation(product.astype(jnp.float32))

    assert_left_alone(f, jnp.ones((8, 16), jnp.int8), jnp.ones((16, 8), jnp.int8))


def test_an_active_dropout_stays_between_two_products():
    def f(x, w1, b1, w2, b2):
        h = jax.nn.gelu(x @ w1 + b1)
        keep = jax.random.bernoulli(jax.random.key(0), 0.5, h.shape)
        return jnp.where(keep, h / 0.5, 0) @ w2 + b2

    assert_fuses(f, *of_perceptron("float32"), into={"linear": 1})


def test_a_quantised_weight_is_not_looked_through():
    """A conversion to 8 bits and back stays, because it rounds the weight on purpose."""

    def f(x, w):
        return jax.nn.gelu(x @ w.astype(jnp.float8_e4m3fn).astype(x.dtype))

    x, w = x_of("float32"), weights(16, 8)
    assert counts(f, x, w) == {"linear": 1}
    ours, plain = jaxfused.fuse(f)(x, w), f(x, w)
    assert float(jnp.abs(ours - plain).max()) < 1e-5


@pytest.mark.parametrize("strides", [(1, 1), (2, 2)])
def test_windows_that_overlap_or_pad_are_no_patches(strides):
    def f(x, w):
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, w, strides, "SAME", dimension_numbers=numbers)

    assert counts(f, x_of("float32", 2, 9, 9, 3), weights(2, 2, 3, 8)) == {"conv": 1}
