"""Holds an operator and its gradients against a plain jax.numpy statement in float64."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.tolerances import assert_accurate


def assert_values_and_gradients(ours, plain, *args, seed=0):
    """`ours` and its gradients are as accurate as the rule of tests/tolerances.py asks.

    Both functions take `args`, pytrees of float arrays, and return a pytree of arrays; what else
    they need they close over. The cotangents are random.
    """
    rng = np.random.default_rng(seed)
    dy = jax.tree.map(
        lambda a: jnp.asarray(rng.normal(size=a.shape), a.dtype), jax.eval_shape(ours, *args)
    )

    def results(f, args, dy):
        y, vjp = jax.vjp(f, *args)
        return {"y": y, "gradients": vjp(dy)}

    actual, low = jax.jit(lambda *a: (results(ours, *a), results(plain, *a)))(args, dy)
    with jax.enable_x64(True):
        args, dy = jax.tree.map(lambda a: np.asarray(a, np.float64), (args, dy))
        truth = jax.tree.map(np.asarray, jax.jit(lambda *a: results(plain, *a))(args, dy))
    for (path, a), b, t in zip(
        jax.tree.leaves_with_path(actual), jax.tree.leaves(low), jax.tree.leaves(truth), strict=True
    ):
        assert_accurate(jax.tree_util.keystr(path), a, b, t)
