"""Missing derivatives of kernels raise an error that names the remedy, in every transformation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfused
from jaxfused.runtime.kernel_gradient import kernel_gradient
from tests.every_operator.test_strict_modes import FUNCTIONS
from tests.support.arrays import put
from tests.support.grids import parametrize

FORWARD = r" on a GPU has no forward mode of differentiation; pass implementation='xla'\."
SECOND = r" on a GPU has no second derivative; pass implementation='xla'\."

OF_KERNELS = [
    "dot_product_attention-bias",
    "rms_norm-scale_offset",
    "linear",
    "gated_mlp-inputs",
    "qkv_projection",
    "rope",
    "linear_softmax_cross_entropy",
]


@parametrize("name", OF_KERNELS, quick=(0, 1, 2, 5))
def test_sentences_of_operators(hopper, name):
    op, make = FUNCTIONS[name]
    f, args = make(jnp.dtype("bfloat16"))

    def loss(*args):
        return sum(jnp.sum(jnp.square(y.astype(jnp.float32))) for y in jax.tree.leaves(f(*args)))

    gradients = jax.grad(loss, argnums=tuple(range(len(args))))

    def norm_of_gradients(*args):
        return sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(gradients(*args)))

    jax.eval_shape(gradients, *args)
    with pytest.raises(TypeError, match=op + FORWARD):
        jax.jvp(f, args, args)
    if op == "rope":
        jax.eval_shape(jax.grad(norm_of_gradients), *args)  # Its gradient is rope again.
        return
    with pytest.raises(TypeError, match=op + SECOND):
        jax.eval_shape(lambda *args: jax.jvp(gradients, args, args), *args)
    with pytest.raises(TypeError, match=op + SECOND):
        jax.eval_shape(jax.grad(norm_of_gradients), *args)


def test_float8_has_reverse_mode_alone():
    x, w = jnp.ones((8, 16), jnp.bfloat16), jnp.ones((16, 16), jnp.bfloat16)

    def f(x):
        return jnp.sum(jnp.sin(jaxfused.linear(x, w, precision="fp8").astype(jnp.float32)))

    with pytest.raises(TypeError, match=r"linear in float8 has no forward mode.*than 'fp8'"):
        jax.jvp(f, (x,), (x,))
    for second in (
        lambda x: jax.jvp(jax.grad(f), (x,), (x,)),
        jax.grad(lambda x: jnp.sum(jax.grad(f)(x))),
    ):
        with pytest.raises(TypeError, match=r"linear in float8 has no second deriv.*than 'fp8'"):
            second(x)


# --- the decorator by itself ----------------------------------------------------------------------


def _times(factor, x, w):
    return factor * x * w


times = kernel_gradient(_times, nondiff_argnums=(0,), op="times")
times.defvjp(
    lambda factor, x, w: (times(factor, x, w), (x, w)),
    lambda factor, saved, dy: (factor * dy * saved[1], factor * dy * saved[0]),
)
X, W = (put(np.random.default_rng(i).normal(size=(3, 4)), "float32") for i in (0, 1))


def test_reverse_mode_is_untouched():
    def loss(f):
        return lambda x, w: jnp.sum(jnp.sin(f(2.0, x, w)))

    def gradients(f):
        return jax.grad(loss(f), argnums=(0, 1))

    expected = gradients(_times)(X, W)
    for transform in (
        lambda f: f,
        jax.jit,
        jax.vmap,
        lambda f: lambda *args: jax.lax.map(lambda args: f(*args), args),
    ):
        for ours, theirs in zip(transform(gradients(times))(X, W), expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    kept = jax.grad(jax.checkpoint(loss(times)))(X, W)
    np.testing.assert_allclose(kept, expected[0], rtol=1e-6)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, jax.vmap, jax.checkpoint])
def test_forward_mode_is_refused_under_transformations(transform):
    def derivative(x):
        return jax.jvp(transform(lambda x: times(2.0, x, x)), (x,), (x,))

    for f in (derivative, jax.jit(derivative)):
        with pytest.raises(TypeError, match="times" + FORWARD):
            f(X)
