"""Transformations that every operator must support: jit, vmap, checkpoint, scan and donation."""

import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np

from tests.support.arrays import put


def assert_transforms(f, *args):
    """Asserts that `f`, of trees of float arrays, has the same results and gradients when transformed.

    The first argument is an array, which is donated and is the carry of scan.
    """

    def assert_same(actual, expected):
        chex.assert_trees_all_close(actual, expected, rtol=2e-5, atol=2e-5)

    def loss(*args):
        return sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(f(*args)))

    def both(*args):
        return f(*args), jax.grad(loss, argnums=tuple(range(len(args))))(*args)

    one = jax.jit(both)
    expected = one(*args)
    other = jax.tree.map(lambda a: put(0.5 * np.asarray(a)[::-1], a.dtype), args)
    batch = jax.tree.map(lambda *a: put(np.stack(a)), args, other)
    each = jax.tree.map(lambda *a: put(np.stack(a)), expected, one(*other))
    assert_same(jax.jit(jax.vmap(both))(*batch), each)

    remade = jax.jit(jax.grad(jax.checkpoint(loss), argnums=tuple(range(len(args)))))(*args)
    assert_same(remade, expected[1])

    def step(total, x):
        value, gradient = jax.value_and_grad(loss)(x, *args[1:])
        return total + value, gradient

    total, gradients = jax.jit(lambda xs: jax.lax.scan(step, 0.0, xs))(batch[0])
    assert_same(gradients[0], expected[1][0])
    assert_same(total, sum(jax.jit(loss)(x, *args[1:]) for x in batch[0]))

    donated = jnp.array(args[0])
    with warnings.catch_warnings():
        # JAX warns if no result has the shape to reuse the buffer.
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        assert_same(jax.jit(f, donate_argnums=0)(donated, *args[1:]), expected[0])
