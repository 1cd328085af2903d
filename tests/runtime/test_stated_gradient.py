"""Stated gradients in both modes, to the second order, and under JAX's transformations."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from jaxfused.runtime.product_xla import product
from jaxfused.runtime.stated_gradient import stated_gradient
from tests.support.arrays import put


@stated_gradient
def _times(x, w):
    """Returns a product whose stated gradient to x is twice the true one, so that its use shows."""
    return x * w["scale"]


def _times_bwd(saved, dy):
    x, scale = saved
    return 2 * dy * scale, {"scale": dy * x}


_times.defvjp(lambda x, w: (_times(x, w), (x, w["scale"])), _times_bwd)

X, SCALE = (put(np.random.default_rng(i).normal(size=(3, 4)), "float32") for i in (0, 1))


def test_reverse_mode_takes_what_is_stated_and_forward_mode_the_derivative():
    w = {"scale": SCALE}
    y, vjp = jax.vjp(_times, X, w)
    dx, dw = vjp(jnp.ones_like(y))
    chex.assert_trees_all_close((dx, dw), (2 * SCALE, {"scale": X}))
    _, tangent = jax.jvp(_times, (X, w), (SCALE, {"scale": X}))
    chex.assert_trees_all_close(tangent, SCALE * SCALE + X * X, rtol=1e-6)
    _, linear = jax.linearize(lambda x: _times(x, w), X)
    chex.assert_trees_all_close(linear(SCALE), SCALE * SCALE, rtol=1e-6)


def test_under_transformations():
    def gradients(x, scale):
        return jax.grad(lambda x, s: jnp.sum(_times(x, {"scale": s}) ** 2), (0, 1))(x, scale)

    expected = jax.jit(gradients)(X, SCALE)
    by_rows = jax.vmap(gradients)(X, SCALE)
    chex.assert_trees_all_close(by_rows, expected, rtol=1e-6)
    # A scale that the batch shares gets the sum of gradients over it.
    _, vjp = jax.vjp(jax.vmap(lambda x, s: _times(x, {"scale": s}), (0, None)), X, SCALE[0])
    chex.assert_trees_all_close(vjp(jnp.ones_like(X))[1], X.sum(0), rtol=1e-6)
    remat = jax.checkpoint(lambda x, s: _times(x, {"scale": s}))
    chex.assert_trees_all_close(
        jax.jit(jax.grad(lambda x, s: jnp.sum(remat(x, s) ** 2), (0, 1)))(X, SCALE), expected
    )

    def loop(x, s):
        return jax.lax.scan(lambda c, s: (_times(c, {"scale": s}), None), x[0], s)[0].sum()

    tangent = jax.jit(lambda: jax.jvp(loop, (X, SCALE), (X, SCALE))[1])()
    np.testing.assert_allclose(tangent, 4 * loop(X, SCALE), rtol=1e-5)


@pytest.mark.parametrize("subscripts", ["md,df->mf", "btd,dbf->btf"])
def test_derivatives_of_a_product_of_rounded_operands(subscripts):
    """Checks both modes to the second order; rounded operands are rounded to float32."""
    sizes = dict(m=3, d=4, f=5, b=2, t=3)
    axes = subscripts.split("->")[0].split(",")
    with jax.enable_x64(True):
        a, b = (
            np.random.default_rng(i).normal(size=[sizes[x] for x in letters])
            for i, letters in enumerate(axes)
        )
        f = jax.jit(
            lambda a, b: product(subscripts, a, b, dtype=jnp.float32, out_dtype=jnp.float64)
        )
        check_grads(f, (a, b), order=2, modes=["fwd", "rev"], rtol=1e-2, atol=1e-2, eps=1e-2)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_forward_mode_is_the_transpose_of_reverse_mode(dtype):
    rng = np.random.default_rng(0)
    x, dx = (put(rng.normal(size=(8, 16)), dtype) for _ in range(2))
    w, dw = (put(rng.normal(size=(16, 4)), "float32") for _ in range(2))
    dy = put(rng.normal(size=(8, 4)), "float32")

    @jax.jit
    def pairings(*tangents):
        def f(x, w):
            return product("md,df->mf", x, w, dtype=dtype, of_weights=True)

        _, t = jax.jvp(f, (x, w), tangents)
        _, vjp = jax.vjp(f, x, w)
        pulled = vjp(dy)
        both = zip(tangents, pulled, strict=True)
        wide = (jnp.sum(a.astype(jnp.float32) * b.astype(jnp.float32)) for a, b in both)
        return jnp.sum(t * dy), sum(wide)

    np.testing.assert_allclose(*pairings(dx, dw), rtol=0.02)


@functools.partial(stated_gradient, nondiff_argnums=(0,), linear=(1, 3))
def _affine(factor, x, scale, bias):
    return factor * x * scale + bias


_affine.defvjp(
    lambda factor, x, scale, bias: (_affine(factor, x, scale, bias), scale),
    lambda factor, scale, dy: (factor * dy * scale, None, dy),
)


def test_values_are_not_kept_for_what_is_linear():
    y, vjp = jax.vjp(lambda x: _affine(3.0, x, SCALE[0], X), X)
    chex.assert_trees_all_close(vjp(y), (3 * y * SCALE[0],), rtol=1e-6)
    assert all(a.shape != X.shape for a in jax.tree.leaves(vjp))
    for transform in (lambda f: f, jax.jit, lambda f: jax.vmap(f, (0, None))):
        _, tangent = transform(
            lambda x, scale: jax.jvp(lambda x: _affine(3.0, x, scale, x), (x,), (x * x,))
        )(X, SCALE[0])
        np.testing.assert_allclose(tangent, 3 * X * X * SCALE[0] + X * X, rtol=1e-5)
    _, tangent = jax.jvp(lambda s: _affine(3.0, X, s, X), (SCALE,), (X,))
    np.testing.assert_allclose(tangent, 3 * X * X, rtol=1e-6)
