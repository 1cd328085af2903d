"""Norms over few values, as in the last blocks of a ResNet for small images.

The gradient through two values is a cancellation's remainder, a hundred thousandth of its terms. Through
up to a dozen values it depends on every bit of the normalised input.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfused
from tests.support.against_float64 import assert_values_and_gradients
from tests.support.arrays import put
from tests.support.fused import assert_fuses, counts
from tests.support.grids import parametrize

EPSILON = 1e-5


def layer(x, w, scale, bias):
    """Computes a convolution and a batch norm as Flax does."""
    y = jax.lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    wide = y.astype(jnp.promote_types(y.dtype, jnp.float32))
    mean = wide.mean((0, 1, 2))
    var = jnp.square(wide).mean((0, 1, 2)) - jnp.square(mean)
    return ((wide - mean) * (jax.lax.rsqrt(var + EPSILON) * scale) + bias).astype(y.dtype)


def arguments(values, ratio, dtype):
    """Returns a layer's arguments: `values` per channel, whose mean is `ratio` deviations."""
    rng = np.random.default_rng(values)
    x = rng.normal(size=(values, 1, 1, 16))
    x[..., 0] = ratio * 16**0.5
    shapes = (1, 1, 16, 32), (32,), (32,)
    w, scale, bias = (rng.normal(size=shape) for shape in shapes)
    return put(x, dtype), put(w / 4, dtype), put(scale), put(bias)


SWEEP = [
    (values, ratio, dtype)
    for dtype in ("bfloat16", "float32", "float16")
    for values in (2, 3, 4, 8, 16, 64)
    for ratio in (0, 1, 10)
]


@parametrize("case", SWEEP, quick=(0, 5, 9))
def test_a_fused_convolution_and_norm_are_as_accurate_as_stock(case):
    assert_fuses(layer, *arguments(*case), into={"conv": 1})


@pytest.mark.parametrize("values", [2, 8])
def test_what_a_fused_convolution_hands_to_the_norm_is_not_rounded(values):
    args = arguments(values, 1, "bfloat16")
    assert counts(layer, *args) == {"conv": 1}
    dy = put(np.random.default_rng(1).normal(size=(values, 1, 1, 32)), "bfloat16")

    def gradient(f, args, dy):
        return jax.jit(jax.grad(lambda w: jnp.vdot(dy, f(args[0], w, *args[2:]))))(args[1])

    found = gradient(jaxfused.fuse(layer), args, dy)
    with jax.enable_x64(True):
        truth = gradient(layer, *jax.tree.map(lambda a: np.asarray(a, np.float64), (args, dy)))
    # One rounding to bfloat16 gives this error; a rounding in between gave 0.1.
    near_zero = 1e-5 * np.abs(truth).max()
    np.testing.assert_allclose(np.asarray(found, np.float64), truth, rtol=5e-3, atol=near_zero)


@pytest.mark.parametrize("shape", [(2, 1, 1, 8), (1, 2, 8), (2, 8)])
def test_two_values_leave_all_bits_of_their_gradient(shape):
    assert_pairs(lambda x: jaxfused.batch_norm(x)[0], put(spread(*shape)), axis=0)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((3, 2, 8), dict(group_size=1)),
        ((3, 1, 1, 8), dict(num_groups=4)),
        ((3, 8), dict(num_groups=4)),
    ],
)
def test_groups_of_two_values_do_too(shape, options):
    pair = 1 if len(shape) == 3 else 2
    assert_pairs(
        lambda x: jaxfused.group_norm(x, epsilon=EPSILON, **options), put(spread(*shape)), axis=pair
    )


def spread(*shape):
    return np.random.default_rng(0).normal(size=shape) + 3.0


def assert_pairs(norm, x, axis):
    """Checks pairs at h from their mean, whose derivative is epsilon / (h^2 + epsilon)^1.5."""
    dy = put(np.random.default_rng(1).normal(size=x.shape))
    found = np.asarray(jax.jit(lambda x, dy: jax.vjp(norm, x)[1](dy)[0])(x, dy), np.float64)
    pairs = (-1, 2, x.shape[-1]) if axis == 0 else (3, 2, 8) if axis == 1 else (3, 4, 2)
    along = 2 if axis == 2 else 1
    x, dy = (np.asarray(a, np.float64).reshape(pairs) for a in (x, dy))
    half, difference = ((a - np.flip(a, along)) / 2 for a in (x, dy))
    slope = EPSILON / (half**2 + EPSILON) ** 1.5
    np.testing.assert_allclose(found.reshape(pairs) / slope, difference, atol=2e-6)


@parametrize("case", [(n, d) for d in ("bfloat16", "float32") for n in (2, 4, 16)], quick=(1,))
def test_convolution_then_norm_by_hand(case):
    values, dtype = case

    def ours(x, w, scale, bias):
        return jaxfused.batch_norm(jaxfused.conv(x, w), scale, bias)[0]

    assert_values_and_gradients(ours, layer, *arguments(values, 1, dtype))


def group_norm_layer(x, w, scale, bias):
    """Computes a convolution and a group norm as Flax does."""
    y = jax.lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    wide = y.astype(jnp.promote_types(y.dtype, jnp.float32)).reshape(len(y), -1, 4, 8)
    mean = wide.mean((1, 3), keepdims=True)
    var = jnp.square(wide - mean).mean((1, 3), keepdims=True)
    normalised = ((wide - mean) * jax.lax.rsqrt(var + EPSILON)).reshape(y.shape)
    return (normalised * scale + bias).astype(y.dtype)


@pytest.mark.parametrize("f", [layer, group_norm_layer])
def test_nothing_keeps_xla_from_leaving_out_the_rounding_before_a_norm(f):
    args = arguments(64, 1, "bfloat16")
    # A bfloat16 reshape between conv and norm would keep XLA from leaving out the rounding.
    program = jax.make_jaxpr(jaxfused.fuse(f))(*args)
    results = [
        eqn
        for eqn in program.eqns
        if eqn.primitive.name == "reshape"
        and eqn.invars[0].aval.dtype == jnp.bfloat16
        and eqn.invars[0].aval.size == 64 * 32
    ]
    assert len(results) <= 1, program
    assert_values_and_gradients(jaxfused.fuse(f), f, *args, cotangents=2)
