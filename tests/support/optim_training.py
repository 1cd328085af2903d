"""A small tree with leaves of every kind, for tests of jaxfused.optim against Optax."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax


def make_params(dtype=jnp.float32):
    """Returns a tree with leaves of many shapes and dtypes, an empty leaf, None and a masked node."""
    w, b, s = jax.random.split(jax.random.key(0), 3)
    return {
        "dense": {"w": jax.random.normal(w, (5, 7), dtype), "b": jax.random.normal(b, (33,))},
        "rest": [jax.random.normal(s, (), dtype), jnp.zeros((0, 3)), None, optax.MaskedNode()],
    }


def make_grads(params, step=0):
    """Returns gradients in the parameters' dtypes that depend only on the step."""
    rng = np.random.default_rng(step)
    return jax.tree.map(lambda p: np.asarray(rng.normal(size=p.shape)).astype(p.dtype), params)


def optax_step(tx):
    """Returns a step as users of Optax write it: update, then apply_updates."""

    @jax.jit
    def step(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def exact_bias_correction(moments, decay, count):
    """Stands in for `optax.tree.bias_correction`, which loses digits of 1 - decay^count.

    With it Optax's optimizers have the bits of ours; another test bounds the difference without it.
    """
    log = math.log(decay) if isinstance(decay, float) else jnp.log(decay)
    bias = -jnp.expm1(count * log)
    return jax.tree.map(lambda m: m / bias.astype(m.dtype), moments)


def assert_same_bits(actual, expected):
    chex.assert_trees_all_equal(actual, expected, strict=True)
