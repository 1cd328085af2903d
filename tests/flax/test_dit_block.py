"""The block of a diffusion Transformer, compared with the formula in its authors' form."""

import functools

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
from tests.flax.test_modules import normal
from tests.support.grids import parametrize

B, T, D, C = 2, 8, 64, 16
X, CONDITION = normal(0, B, T, D), normal(1, B, C)
WILD = flax.linen.initializers.normal(0.2)


def layer_norm(x, epsilon=1e-6):
    x = x - x.mean(-1, keepdims=True)
    return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + epsilon)


def formula(params, x, condition, num_heads=4, mlp_epsilon=1e-6):
    """Computes DiT's block with the parameters of ours."""

    def dense(name, x):
        return x @ params[name]["kernel"] + params[name]["bias"]

    modulation = dense("modulation", jax.nn.silu(condition))[:, None]
    shift1, scale1, gate1, shift2, scale2, gate2 = jnp.split(modulation, 6, axis=-1)
    y = layer_norm(x) * (1 + scale1) + shift1
    q, k, v = (h.reshape(B, T, num_heads, -1) for h in jnp.split(dense("qkv", y), 3, axis=-1))
    attended = jax.nn.dot_product_attention(q, k, v).reshape(x.shape)
    x = x + gate1 * dense("project", attended)
    y = layer_norm(x, mlp_epsilon) * (1 + scale2) + shift2
    up, down = params["mlp"]["up"], params["mlp"]["down"]
    hidden = jax.nn.gelu(y @ up["kernel"] + up["bias"])
    return x + gate2 * (hidden @ down["kernel"] + down["bias"])


def linen_block(**options):
    block = jaxfused.linen.DiTBlock(4, modulation_init=WILD, bias_init=WILD, **options)
    params = block.init(jax.random.key(0), X, CONDITION)["params"]
    return params, lambda params, *args, **more: block.apply({"params": params}, *args, **more)


def nnx_block(**options):
    options |= dict(modulation_init=WILD, bias_init=WILD, rngs=flax.nnx.Rngs(0))
    graph, state = flax.nnx.split(jaxfused.nnx.DiTBlock(D, 4, condition_features=C, **options))
    params = flax.nnx.to_pure_dict(state)

    def apply(params, *args, **more):
        flax.nnx.replace_by_pure_dict(state, params)
        return flax.nnx.merge(graph, state)(*args, **more)

    return params, apply


@parametrize("make", [linen_block, nnx_block], quick=(0,), ids=lambda f: f.__name__)
@parametrize("gradients", [False, True], quick=(0,))
def test_block_is_the_formula(make, gradients):
    params, block = make()
    if not gradients:
        actual, expected = (jax.jit(f)(params, X, CONDITION) for f in (block, formula))
        np.testing.assert_allclose(actual, expected, rtol=2e-4, atol=2e-4)
        return

    def loss(f):
        return jax.jit(
            jax.value_and_grad(lambda *args: jnp.sum(jnp.sin(f(*args))), argnums=(0, 1, 2))
        )

    actual = loss(block)(params, X, CONDITION)
    chex.assert_trees_all_close(actual, loss(formula)(params, X, CONDITION), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("make", [linen_block, nnx_block])
def test_two_epsilons(make):
    """The second epsilon, as in diffusers' DiT, matters for small activations."""
    params, block = make(mlp_epsilon=1e-2)
    small = X * 0.01
    actual, expected, other = (
        jax.jit(f)(params, small, CONDITION)
        for f in (block, functools.partial(formula, mlp_epsilon=1e-2), formula)
    )
    np.testing.assert_allclose(actual, expected, rtol=2e-4, atol=2e-4)
    assert np.abs(actual - other).max() > 0.01


@parametrize("make", [linen_block, nnx_block], quick=(1,), ids=lambda f: f.__name__)
def test_blocks_pass_the_stream_on(make):
    params, block = make()
    stream, gate = normal(2, B, T, D), normal(3, B, D)
    branch, h, gate2 = block(params, X, CONDITION, residual=stream, gate=gate)
    expected = block(params, stream + gate[:, None] * X, CONDITION)
    actual = h + gate2[:, None] * branch
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="residual and gate go together"):
        block(params, X, CONDITION, residual=stream)


def test_a_block_begins_as_the_identity_and_takes_one_image():
    block = jaxfused.linen.DiTBlock(4)
    variables = block.init(jax.random.key(0), X, CONDITION)
    np.testing.assert_array_equal(block.apply(variables, X, CONDITION), X)
    params, apply = linen_block()
    one = jax.vmap(lambda x, c: apply(params, x, c))(X, CONDITION)
    np.testing.assert_allclose(one, apply(params, X, CONDITION), rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="not shared evenly by 5 heads"):
        jaxfused.linen.DiTBlock(5).init(jax.random.key(0), X, CONDITION)


@parametrize("package", [jaxfused.linen, jaxfused.nnx], quick=(0,), ids=lambda p: p.__name__)
@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
def test_norms_take_parameters_of_each_image(package, name):
    x, stream = X, normal(2, B, T, D)
    scale, shift, gate = normal(3, 3, B, D)
    options = dict(image_scale=scale, image_shift=shift, gate=gate, residual=stream)
    if package is jaxfused.nnx:
        y, h = getattr(package, name)(D, rngs=flax.nnx.Rngs(0))(x, **options)
    else:
        (y, h), _ = getattr(package, name)().init_with_output(jax.random.key(0), x, **options)
    h_expected = stream + gate[:, None] * x
    op = jaxfused.layer_norm if name == "LayerNorm" else jaxfused.rms_norm
    expected = op(h_expected) * (1 + scale[:, None]) + shift[:, None]
    np.testing.assert_allclose(h, h_expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)


def test_flax_cannot_serve_them():
    norm = jaxfused.linen.LayerNorm(reduction_axes=(-2, -1))
    with pytest.raises(ValueError, match="image_scale needs the operator of jaxfused"):
        norm.init(jax.random.key(0), X, image_scale=CONDITION)
