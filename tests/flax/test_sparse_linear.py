"""SparseLinear of nnx and linen: kept blocks and 2:4 weights, gradients, places without gradients."""

import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfused
import jaxfused.linen
import jaxfused.nnx
from tests.support.arrays import put

D, F = 64, 96
X = put(np.random.default_rng(0).normal(size=(5, D)), "float32")
OPTIONS = dict(block_size=32, density=0.5)


def layer(**options):
    return jaxfused.nnx.SparseLinear(D, F, **OPTIONS | options, rngs=flax.nnx.Rngs(0))


def test_blocks_are_trained_and_places_are_not():
    module = layer()
    dense = module.weight.to_dense()
    np.testing.assert_allclose(module(X), X @ dense, rtol=1e-4, atol=1e-5)
    optimizer = flax.nnx.Optimizer(module, optax.sgd(0.1), wrt=flax.nnx.Param)
    optimizer.update(module, flax.nnx.grad(lambda m: jnp.sum(m(X)))(module))
    after = module.weight.to_dense()
    assert ((after != 0) == (dense != 0)).all() and not (after == dense).all()


@pytest.mark.exhaustive
@pytest.mark.parametrize("straight_through", [False, True])
def test_two_of_four(straight_through):
    module = layer(pattern="2:4", straight_through=straight_through)
    pruned = jaxfused.prune24(module.kernel[...])
    np.testing.assert_allclose(module(X), X @ pruned, rtol=1e-4, atol=1e-5)
    gradient = flax.nnx.grad(lambda m: jnp.sum(m(X)))(module).kernel[...]
    assert bool((gradient != 0).all()) == straight_through


@pytest.mark.exhaustive
@pytest.mark.parametrize("pattern", ["blocks", "2:4"])
def test_linen(pattern):
    module = jaxfused.linen.SparseLinear(F, pattern=pattern, **OPTIONS)
    variables = module.init(jax.random.key(0), X)
    y = jax.jit(module.apply)(variables, X)
    assert y.shape == (5, F)
    gradient = jax.grad(lambda params: jnp.sum(module.apply(variables | {"params": params}, X)))(
        variables["params"]
    )
    assert jax.tree.map(jnp.shape, gradient) == jax.tree.map(jnp.shape, variables["params"])


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(density=0.0), "jaxfused.nnx.SparseLinear: density is 0.0"),
        (dict(pattern="4:8"), "'blocks' or '2:4'"),
        (dict(block_size=128), "multiples of 128"),
    ],
)
def test_messages(options, words):
    with pytest.raises(ValueError, match=words):
        layer(**options)


def test_two_of_four_of_66_inputs():
    with pytest.raises(ValueError, match=r"66 input features.*pass a multiple of 4"):
        jaxfused.nnx.SparseLinear(66, 8, pattern="2:4", rngs=flax.nnx.Rngs(0))
