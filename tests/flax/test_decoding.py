"""Attention layers with a cache: Flax's numbers and names, and several tokens a call."""

import functools

import chex
import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfused.linen
import jaxfused.nnx
from tests.support.arrays import put
from tests.support.grids import parametrize

S, D = 8, 16
X = put(np.random.default_rng(0).normal(size=(2, S, D)), jnp.float32)


def nnx_layer(package, **options):
    layer = package.MultiHeadAttention(4, D, rngs=flax.nnx.Rngs(0), decode=True, **options)
    layer.init_cache(X.shape)
    return layer


@functools.partial(flax.nnx.jit, donate_argnums=0)
def nnx_step(layer, x, mask=None):
    return layer(x, mask=mask)


def linen_decoder(package, x=X, **options):
    """Returns a step of the layer, `f(variables, x) -> (output, variables)`, and its variables."""
    layer = package.MultiHeadDotProductAttention(4, decode=True, **options)
    variables = layer.init(jax.random.key(1), x)

    def step(variables, x):
        output, cache = layer.apply(variables, x, mutable=["cache"])
        return output, {**variables, **cache}

    return jax.jit(step, donate_argnums=0), variables


def fed(step, state, sizes, x=X):
    outputs, start = [], 0
    for size in sizes:
        output, state = step(state, x[..., start : start + size, :])
        outputs.append(output)
        start += size
    return jnp.concatenate(outputs, axis=-2), state


def nnx_fed(layer, sizes, x=X):
    return fed(lambda layer, x: (nnx_step(layer, x), layer), layer, sizes, x)[0]


@parametrize("options", [{}, dict(num_kv_heads=2, normalize_qk=True)], quick=(0, 1), ids=str)
def test_nnx_gives_flaxs_numbers_one_token_at_a_time(options):
    ours, stock = (nnx_layer(package, **options) for package in (jaxfused.nnx, flax.nnx))
    outputs = [nnx_fed(layer, (1,) * 5) for layer in (ours, stock)]
    np.testing.assert_allclose(*outputs, rtol=2e-5, atol=2e-6)
    caches = [
        flax.nnx.to_pure_dict(flax.nnx.state(layer, flax.nnx.Cache)) for layer in (ours, stock)
    ]
    chex.assert_trees_all_close(*caches, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("sizes", [(5, 1, 2), (8,)], ids=str)
def test_nnx_takes_several_tokens(sizes):
    layer = nnx_layer(jaxfused.nnx)
    expected = layer(X, decode=False, is_causal=True)
    np.testing.assert_allclose(nnx_fed(layer, sizes), expected, rtol=2e-5, atol=2e-6)


def test_nnx_sequences_of_different_lengths():
    layer = nnx_layer(jaxfused.nnx)
    expected = layer(X, decode=False, is_causal=True)
    layer.init_cache(X.shape, per_sequence=True)
    nnx_step(layer, X[:, :6])
    layer.cache_index[...] = put([2, 6])  # The first sequence's last four tokens were padding.
    rows = np.array([[2, 3], [6, 7]])
    output = nnx_step(layer, jnp.take_along_axis(X, rows[..., None], axis=1))
    wanted = jnp.take_along_axis(expected, rows[..., None], axis=1)
    np.testing.assert_allclose(output, wanted, rtol=2e-5, atol=2e-6)
    np.testing.assert_array_equal(layer.cache_index[...], [4, 8])


def test_nnx_with_anothers_attention_function():
    ours = nnx_layer(jaxfused.nnx, attention_fn=flax.nnx.dot_product_attention)
    expected = nnx_layer(jaxfused.nnx)
    outputs = [nnx_fed(layer, (4, 1, 3)) for layer in (ours, expected)]
    np.testing.assert_allclose(*outputs, rtol=2e-5, atol=2e-6)


def test_nnx_masks_tokens_of_the_cache():
    mask = np.ones((1, 1, 1, S), bool)
    mask[..., 1] = False
    outputs = []
    for layer in (nnx_layer(package) for package in (jaxfused.nnx, flax.nnx)):
        for t in range(3):
            output = nnx_step(layer, X[:, t : t + 1], put(mask, jnp.bool_))
        outputs.append(output)
    np.testing.assert_allclose(*outputs, rtol=2e-5, atol=2e-6)


def test_linen_gives_flaxs_numbers_one_token_at_a_time():
    (ours, variables), (stock, theirs) = (
        linen_decoder(package) for package in (jaxfused.linen, flax.linen)
    )
    chex.assert_trees_all_equal(variables, theirs)
    outputs, states = zip(fed(ours, variables, (1,) * 5), fed(stock, theirs, (1,) * 5), strict=True)
    np.testing.assert_allclose(*outputs, rtol=2e-5, atol=2e-6)
    chex.assert_trees_all_close(*states, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("batch", [(2,), (), (1, 2)], ids=str)
def test_linen_takes_several_tokens(batch):
    x = X[0] if batch == () else X.reshape(*batch, S, D)
    step, variables = linen_decoder(jaxfused.linen, x)
    causal = functools.partial(jaxfused.linen.attention_fn, is_causal=True)
    whole = jaxfused.linen.MultiHeadDotProductAttention(4, attention_fn=causal)
    expected = whole.apply({"params": variables["params"]}, x)
    output, _ = fed(step, variables, (5, 1, 2), x)
    np.testing.assert_allclose(output, expected, rtol=2e-5, atol=2e-6)


def test_linen_sequences_of_different_lengths():
    step, variables = linen_decoder(jaxfused.linen)
    expected, _ = fed(step, jax.tree.map(jnp.copy, variables), (S,))
    variables["cache"]["cache_index"] = jnp.zeros(2, jnp.int32)
    _, variables = step(variables, X[:, :6])
    variables["cache"]["cache_index"] = put([2, 6])
    rows = np.array([[2, 3], [6, 7]])[..., None]
    output, _ = step(variables, jnp.take_along_axis(X, rows, axis=1))
    wanted = jnp.take_along_axis(expected, rows, axis=1)
    np.testing.assert_allclose(output, wanted, rtol=2e-5, atol=2e-6)


def test_refuses_what_does_not_fit_the_cache():
    layer = nnx_layer(jaxfused.nnx)
    with pytest.raises(ValueError, match=r"the cache has shape \(2, 8, 4, 4\) and an index of"):
        layer(jnp.ones((3, 1, D)))
    layer = jaxfused.nnx.MultiHeadAttention(4, D, rngs=flax.nnx.Rngs(0), decode=True)
    with pytest.raises(ValueError, match=r"there is no cache .* call init_cache first"):
        layer(X)
