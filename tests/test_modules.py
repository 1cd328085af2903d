"""nnx = linen = Flax for each module: parameters, outputs and gradients, held by float64."""

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfused.linen
import jaxfused.nnx
from tests.against_float64 import assert_values_and_gradients

B, T, D = 2, 6, 16


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def random_like(tree, seed=0):
    """The tree with random leaves, so that biases are not 0 and scales not 1."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef.unflatten([0.5 * normal(seed + i, *a.shape) for i, a in enumerate(leaves)])


def nnx_apply(module):
    """`f(params, *inputs)` of an nnx module, with Linen's tree of parameters."""
    graphdef, params, rest = flax.nnx.split(module, flax.nnx.Param, ...)

    def f(values, *inputs, **options):
        state = jax.tree.map(lambda a: a, params)
        flax.nnx.replace_by_pure_dict(state, values)
        return flax.nnx.merge(graphdef, state, rest)(*inputs, **options)

    return f


def linen_apply(module):
    return lambda params, *inputs, **options: module.apply({"params": params}, *inputs, **options)


def params_of(module):
    return flax.nnx.to_pure_dict(flax.nnx.state(module, flax.nnx.Param))


def assert_same_trees(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def assert_same(nnx, linen, stock, params, *inputs, **options):
    """Both modules are as near to `stock(params, *inputs)` in float64 as the rule asks."""
    ours = (nnx_apply(nnx), linen_apply(linen))
    assert_values_and_gradients(
        lambda *args: tuple(f(*a, **options) for f, a in zip(ours, args, strict=True)),
        lambda *args: tuple(stock(*a, **options) for a in args),
        (params, *inputs),
        (params, *inputs),
    )


def modules(name, stock_name, *nnx_sizes, linen, **arguments):
    """(nnx module, linen module, stock linen module) with equal arguments, seeds compared too."""
    for seed in (0, 1):
        ours = getattr(jaxfused.nnx, name)(*nnx_sizes, rngs=flax.nnx.Rngs(seed), **arguments)
        stock = getattr(flax.nnx, name)(*nnx_sizes, rngs=flax.nnx.Rngs(seed), **arguments)
        assert_same_trees(params_of(ours), params_of(stock))
    return (
        ours,
        getattr(jaxfused.linen, stock_name)(**linen, **arguments),
        getattr(flax.linen, stock_name)(**linen, **arguments),
    )


def test_linear():
    x = normal(0, B, T, D)
    nnx, linen, stock = modules("Linear", "Dense", D, 5, linen=dict(features=5))
    params = stock.init(jax.random.key(1), x)["params"]
    assert_same_trees(linen.init(jax.random.key(1), x)["params"], params)
    assert_same(nnx, linen, linen_apply(stock), random_like(params), x)


def test_linear_with_activation_and_residual():
    x, residual = normal(0, B, T, D), normal(1, B, T, 5)
    options = dict(use_bias=False, activation="gelu_tanh")
    nnx = jaxfused.nnx.Linear(D, 5, rngs=flax.nnx.Rngs(0), **options)
    linen = jaxfused.linen.Dense(5, **options)
    stock = linen_apply(flax.linen.Dense(5, use_bias=False))

    def expected(params, x, residual):
        return jax.nn.gelu(stock(params, x)) + residual

    ours = (nnx_apply(nnx), linen_apply(linen))
    assert_values_and_gradients(
        lambda *args: [f(p, x, residual=r) for f, (p, x, r) in zip(ours, args, strict=True)],
        lambda *args: [expected(*a) for a in args],
        *[(params_of(nnx), x, residual)] * 2,
    )


@pytest.mark.parametrize("normalize_qk", [False, True])
def test_multi_head_attention(normalize_qk):
    query, key = normal(0, B, T, D), normal(1, B, T + 3, D)
    mask = jax.random.bernoulli(jax.random.key(2), 0.7, (B, 4, T, T + 3)).at[..., 0].set(True)
    nnx, linen, stock = modules(
        "MultiHeadAttention",
        "MultiHeadDotProductAttention",
        4,
        D,
        linen=dict(num_heads=4),
        qkv_features=32,
        out_features=5,
        decode=False,
        normalize_qk=normalize_qk,
    )
    params = stock.init(jax.random.key(1), query, key)["params"]
    assert_same_trees(linen.init(jax.random.key(1), query, key)["params"], params)
    # Flax's masks are float32 by default.
    assert_same(
        nnx, linen, linen_apply(stock), random_like(params), query, key, mask=mask.astype(float)
    )
