"""Operators give the same numbers compiled or not, on arrays of the host or of the device."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

import jaxfused


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


X, W, BACK = normal(0, 5, 16), 0.2 * normal(1, 16, 24), 0.2 * normal(2, 24, 16)
HEADS = normal(3, 2, 5, 4, 8)
OPERATORS = {
    "layer_norm": (jaxfused.layer_norm, (X, X[0], X[1])),
    "rms_norm": (jaxfused.rms_norm, (X, X[0])),
    "linear": (functools.partial(jaxfused.linear, activation="silu"), (X, W, W[0])),
    "mlp": (jaxfused.mlp, (X, W, W[0], BACK)),
    "gated_mlp": (jaxfused.gated_mlp, (X, W, W + 1, BACK)),
    "rope": (jaxfused.rope, (HEADS, HEADS[:, :, :2])),
    "qkv_projection": (functools.partial(jaxfused.qkv_projection, heads=1), (X, W)),
    "dot_product_attention": (
        functools.partial(jaxfused.dot_product_attention, is_causal=True),
        (HEADS, HEADS[::-1], HEADS + 1),
    ),
}


def values_and_gradients(name, *args):
    def loss(*args):
        y = OPERATORS[name][0](*args)
        return sum(jnp.sum(jnp.sin(a)) for a in jax.tree.leaves(y)), y

    return jax.value_and_grad(loss, tuple(range(len(args))), has_aux=True)(*args)


@functools.cache
def expected(name):
    return jax.jit(functools.partial(values_and_gradients, name))(*OPERATORS[name][1])


each_variant = chex.variants(without_jit=True, with_device=True, without_device=True)


class Variants(chex.TestCase):
    def check(self, name):
        actual = self.variant(functools.partial(values_and_gradients, name))(*OPERATORS[name][1])
        chex.assert_trees_all_close(actual, expected(name), rtol=1e-5, atol=1e-5)
        chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected(name))


class TestOneOfEachKind(Variants):
    @each_variant
    @parameterized.parameters("rms_norm", "linear")
    def test_same_numbers(self, name):
        self.check(name)


@pytest.mark.exhaustive
class TestTheOthers(Variants):
    @each_variant
    @parameterized.parameters(*sorted(OPERATORS.keys() - {"rms_norm", "linear"}))
    def test_same_numbers(self, name):
        self.check(name)
