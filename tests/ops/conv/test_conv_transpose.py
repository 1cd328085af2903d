"""conv_transpose: JAX's shapes and numbers, the kernel that enlarges, and Flax's layers."""

import itertools

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
from jaxfused.ops.conv import patch_expand
from jaxfused.runtime.activation import activate
from jaxfused.runtime.runner import Runner
from tests.support.against_float64 import assert_values_and_gradients
from tests.support.arrays import put
from tests.support.grids import parametrize
from tests.support.lowering import kernels, lowered
from tests.support.transforms import assert_transforms


def plain(x, w, bias=None, residual=None, *, strides, padding="SAME", activation=None, **options):
    """Computes the transposed convolution in plain JAX, with all arithmetic in x's dtype."""
    axes = "DHW"[-(x.ndim - 2) :]
    numbers = (f"N{axes}C", f"{axes}IO", f"N{axes}C")
    y = jax.lax.conv_transpose(
        x, w.astype(x.dtype), strides, padding, dimension_numbers=numbers, **options
    )
    y = y if bias is None else y + bias.astype(x.dtype)
    return activate(activation, y if residual is None else y + residual)


@pytest.mark.parametrize("padding", ["SAME", "VALID", ((1, 1), (1, 1)), ((2, 1), (0, 3))], ids=str)
def test_shapes_and_numbers_are_those_of_jax(padding):
    rng = np.random.default_rng(0)
    x = put(rng.normal(size=(2, 5, 4, 3)), jnp.float32)
    for k, s, d, turned in itertools.product((1, 2, 3, 4), (1, 2, 3), (1, 2), (False, True)):
        w = put(rng.normal(size=(k, k, *((4, 3) if turned else (3, 4)))), jnp.float32)
        options = dict(padding=padding, transpose_kernel=turned)
        y = jaxfused.conv_transpose(x, w, strides=s, kernel_dilation=d, **options)
        chex.assert_trees_all_close(
            y, plain(x, w, strides=(s, s), rhs_dilation=(d, d), **options), atol=1e-5
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(padding="CAUSAL"), "'CAUSAL' is not known"),
        (dict(strides=0), "strides is 0"),
        (dict(kernel_dilation=(1, 1, 1)), "kernel_dilation is"),
        (dict(w=jnp.ones((2, 4, 5))), "both need as many axes"),
        (dict(w=jnp.ones((2, 2, 3, 5))), "4 channels"),
        (dict(w=jnp.ones((2, 2, 4, 5), jnp.int32)), "w"),
        (dict(bias=jnp.ones(4)), "bias"),
        (dict(residual=jnp.ones((1, 3, 3, 5))), "residual"),
        (dict(implementation="cuda"), "depthwise"),
        (dict(feature_group_count=2), "must divide the 4 input and the 5"),
    ],
)
def test_refuses(change, message):
    options = dict(x=jnp.ones((1, 3, 3, 4)), w=jnp.ones((2, 2, 4, 5)), strides=2) | change
    with pytest.raises(ValueError, match=f"conv_transpose: .*{message}"):
        jaxfused.conv_transpose(**options)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_groups_with_the_kernel_of_what_is_transposed(groups):
    rng = np.random.default_rng(0)
    x = put(rng.normal(size=(2, 5, 6, 4)), jnp.float32)
    w = put(rng.normal(size=(3, 2, 8 // groups, 4)), jnp.float32)

    def convolution(z):
        return jaxfused.conv(z, w, strides=2, feature_group_count=groups)

    _, transpose = jax.vjp(convolution, jnp.zeros((2, 10, 12, 8)))
    options = dict(strides=2, transpose_kernel=True, feature_group_count=groups)
    y = jaxfused.conv_transpose(x, w, **options)
    chex.assert_trees_all_close(y, transpose(x)[0], atol=1e-5)
    # The same with one call per group.
    plain = put(rng.normal(size=(3, 2, 4 // groups, 8)), jnp.float32)
    parts = zip(jnp.split(x, groups, -1), jnp.split(plain, groups, -1), strict=True)
    apart = [jaxfused.conv_transpose(a, b, strides=2) for a, b in parts]
    y = jaxfused.conv_transpose(x, plain, strides=2, feature_group_count=groups)
    chex.assert_trees_all_close(y, jnp.concatenate(apart, -1), atol=1e-5)


# --- windows that do not overlap ------------------------------------------------------------------

CASES = (
    ((2, 5, 6, 72), (2, 2), 64, "silu", True),
    ((1, 4, 8, 64), (2, 3), 32, "relu", False),
    ((2, 9, 16), (4,), 32, None, False),
    ((1, 3, 5, 8), (1, 2), 32, "gelu_tanh", True),
    ((1, 3, 5, 8), (3, 1), 32, None, True),
)
"""Shape of x, kernel and strides, features, activation, and whether there is a residual."""


def arguments(shape, block, features, has_residual, dtype):
    rng = np.random.default_rng(0)
    enlarged = [n * k for n, k in zip(shape[1:-1], block, strict=True)]
    residual = rng.normal(size=(shape[0], *enlarged, features)) if has_residual else None
    return (
        put(rng.normal(size=shape), dtype),
        put(rng.normal(size=(*block, shape[-1], features)) / shape[-1] ** 0.5, dtype),
        put(rng.normal(size=features), jnp.float32),
        None if residual is None else put(residual, dtype),
    )


def enlarging(block, activation, implementation):
    """Returns (ours, plain), functions of (x, w, bias, residual)."""

    def ours(x, w, bias, residual):
        return jaxfused.conv_transpose(
            x,
            w,
            bias,
            strides=block,
            residual=residual,
            activation=activation,
            implementation=implementation,
        )

    def expected(*args):
        return plain(*args, strides=block, activation=activation)

    return ours, expected


@parametrize(
    ("shape", "block", "features", "activation", "has_residual"), CASES, quick=(3,), ids=str
)
def test_kernel_in_the_interpreter(
    shape, block, features, activation, has_residual, interpreted_hopper
):
    args = arguments(shape, block, features, has_residual, jnp.bfloat16)
    with dispatch.recorded() as choices:
        assert_values_and_gradients(*enlarging(block, activation, "pallas"), *args, cotangents=1)
    chosen = {choice.stage: choice.implementation for choice in choices}
    assert chosen["conv enlarging forward"] == "pallas"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("implementation", [None, "pallas"])
@pytest.mark.parametrize(
    ("shape", "block", "features", "activation", "has_residual"),
    [
        *CASES,
        ((3, 33, 47, 128), (2, 2), 96, "silu", True),
        ((2, 130, 64), (8,), 64, None, False),
        ((1, 1, 1, 64), (2, 2), 64, None, True),
    ],
    ids=str,
)
def test_kernel_is_as_accurate_as_jax(
    shape, block, features, activation, has_residual, implementation, dtype
):
    args = arguments(shape, block, features, has_residual, dtype)
    assert_values_and_gradients(*enlarging(block, activation, implementation), *args, cotangents=2)


@pytest.mark.parametrize("block", [(2,), (2, 2), (3, 2), (2, 2, 2)], ids=str)
def test_xla_moves_products_where_they_belong(block):
    """XLA's implementation takes the kernel's operands, of any number of axes."""
    args = arguments((*(2, 3, 4, 2)[: len(block) + 1], 5), block, 4, True, jnp.float32)
    runner = Runner("xla", dispatch.current_device(args[0]))

    def ours(*args):
        return patch_expand.enlarging_conv(runner, *args, activation="silu", precision=None)

    assert_values_and_gradients(ours, enlarging(block, "silu", None)[1], *args)


def test_kernel_moves_nothing(hopper):
    args = jax.eval_shape(lambda: arguments((4, 32, 32, 64), (2, 2), 64, False, jnp.bfloat16))
    ours, _ = enlarging((2, 2), "silu", "pallas")
    assert kernels(ours, *args) == ["conv"]
    # The only transpose is that of the weights.
    program = lowered(ours, *args)
    assert program.count("stablehlo.transpose") == 1


@pytest.mark.parametrize("features", [24, 40])
def test_kernel_says_what_it_does_not_take(features, hopper):
    args = jax.eval_shape(lambda: arguments((1, 4, 4, 64), (2, 2), features, False, jnp.bfloat16))
    with pytest.raises(ValueError, match="multiples of 32 channels"):
        jax.eval_shape(enlarging((2, 2), None, "pallas")[0], *args)


def test_transforms(interpreted_hopper):
    args = arguments((2, 2, 4, 8), (2, 2), 32, True, jnp.float32)
    assert_transforms(enlarging((2, 2), "silu", "xla")[0], *args)


# --- layers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("transpose_kernel", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        dict(kernel_size=(2, 2), strides=(2, 2)),
        dict(kernel_size=(3, 3), strides=2, padding="VALID", use_bias=False),
        dict(kernel_size=(3, 2), padding=1, kernel_dilation=2),
        dict(kernel_size=(4, 4), strides=(2, 2), padding="CIRCULAR"),
    ],
    ids=str,
)
def test_layers_are_those_of_flax(options, transpose_kernel):
    x = jax.random.normal(jax.random.key(0), (2, 3, 5, 6, 4))
    options = options | dict(transpose_kernel=transpose_kernel)
    names = ("kernel_size", "strides")
    linen_options = options | {n: options[n] for n in names if n in options}
    ours, flaxs = (
        module(8, **linen_options)
        for module in (jaxfused.linen.ConvTranspose, flax.linen.ConvTranspose)
    )
    variables = flaxs.init(jax.random.key(1), x)
    chex.assert_trees_all_equal(ours.init(jax.random.key(1), x), variables)
    chex.assert_trees_all_close(ours.apply(variables, x), flaxs.apply(variables, x), atol=1e-5)
    ours, flaxs = (
        module(4, 8, rngs=flax.nnx.Rngs(0), **options)
        for module in (jaxfused.nnx.ConvTranspose, flax.nnx.ConvTranspose)
    )
    chex.assert_trees_all_equal(*(flax.nnx.state(layer, flax.nnx.Param) for layer in (ours, flaxs)))
    chex.assert_trees_all_close(ours(x), flaxs(x), atol=1e-5)


def test_layers_take_an_image_without_a_batch():
    x = jnp.ones((4, 4, 3))
    layer = jaxfused.nnx.ConvTranspose(3, 5, (2, 2), (2, 2), rngs=flax.nnx.Rngs(0))
    assert layer(x).shape == (8, 8, 5)
    module = jaxfused.linen.ConvTranspose(5, (2, 2), (2, 2), activation="relu")
    y, _ = module.init_with_output(jax.random.key(0), x)
    assert y.shape == (8, 8, 5) and float(y.min()) >= 0


def test_what_runs_the_code_of_flax_is_listed():
    x = jnp.ones((1, 4, 4, 3))
    layer = jaxfused.nnx.ConvTranspose(
        3, 5, (2, 2), (2, 2), padding="CIRCULAR", rngs=flax.nnx.Rngs(0)
    )
    assert "padding" in str(jaxfused.explain(layer, x))
    layer = jaxfused.nnx.ConvTranspose(
        3, 5, (2, 2), padding="CIRCULAR", activation="relu", rngs=flax.nnx.Rngs(0)
    )
    with pytest.raises(ValueError, match="padding"):
        layer(x, residual=jnp.ones((1, 4, 4, 5)))
