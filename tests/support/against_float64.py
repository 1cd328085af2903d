"""Compares an operator and its gradients with a plain jax.numpy statement in float64."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.support.arrays import put
from tests.support.tolerances import assert_accurate

COTANGENTS = 8
"""Number of random cotangents for each gradient. Few parameters have few sums as their gradient, for
which the error of plain jax.numpy in one draw is a matter of chance; the largest over eight draws is a
reference."""


def assert_values_and_gradients(ours, plain, *args, cotangents=COTANGENTS, seed=0):
    """Asserts that `ours` and its gradients are as accurate as tests/support/tolerances.py requires.

    Both functions take `args`, pytrees of float arrays, and return a pytree of arrays; other operands
    are in their closures. The cotangents are random; pass fewer if a call takes seconds, as in an
    interpreter.
    """
    rng = np.random.default_rng(seed)
    y = jax.eval_shape(ours, *args)
    draws = [
        jax.tree.map(lambda a: put(rng.normal(size=a.shape), a.dtype), y) for _ in range(cotangents)
    ]

    def results(f, args, dy):
        y, vjp = jax.vjp(f, *args)
        return {"y": y, "gradients": vjp(dy)}

    def over_draws(f, args, draws):
        compiled = jax.jit(f)
        return jax.tree.map(lambda *a: np.stack(a), *(compiled(args, dy) for dy in draws))

    actual, low = over_draws(lambda *a: (results(ours, *a), results(plain, *a)), args, draws)
    with jax.enable_x64(True):
        args, draws = jax.tree.map(lambda a: np.asarray(a, np.float64), (args, draws))
        truth = over_draws(lambda *a: results(plain, *a), args, draws)
    for (path, a), b, t in zip(
        jax.tree.leaves_with_path(actual), jax.tree.leaves(low), jax.tree.leaves(truth), strict=True
    ):
        assert_accurate(jax.tree_util.keystr(path), a, b, t)


def assert_outputs(actual, expected, operands, narrow):
    """Asserts that a kernel's named outputs are as accurate as plain jax.numpy with float32 sums.

    `expected` takes the operands, the dtype of arithmetic, and that of the outputs that are rounded.
    """
    compiled = jax.jit(expected, static_argnames=("dtype", "narrow"))
    plain = compiled(*operands, dtype=jnp.float32, narrow=narrow)
    with jax.enable_x64(True):
        truth = compiled(*operands, dtype=jnp.float64, narrow=jnp.float64)
        truth = jax.tree.map(np.asarray, truth)
    assert actual.keys() == truth.keys()
    for name, result in actual.items():
        assert_accurate(name, result, plain[name].astype(result.dtype), truth[name])
