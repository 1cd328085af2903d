"""The kernels of products in float8, in Mosaic's interpreter and lowered for a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfused

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


def arrays(seed, *shapes, dtype=jnp.bfloat16):
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return [jax.random.normal(k, s, dtype) for k, s in zip(keys, shapes, strict=True)]


def both_gradients(f, *operands):
    """(value, gradients) of f(implementation, *operands) by the kernels and by XLA."""
    results = []
    for implementation in ("pallas", "xla"):

        def loss(*operands, implementation=implementation):
            return jnp.sum(jnp.sin(f(implementation, *operands).astype(jnp.float32)))

        everything = tuple(range(len(operands)))
        results.append(jax.value_and_grad(loss, everything)(*operands))
    return results


def assert_alike(ours, xla):
    """The same sums in another order, of float8 some of which are rounded to a neighbour."""
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(xla), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert np.linalg.norm(a - b) <= 2e-2 * np.linalg.norm(b) + 1e-6


@pytest.mark.parametrize("rows", [80, 144])
def test_mlp_in_the_interpreter(rows, interpreted_hopper):
    x, w1, w2 = arrays(0, (rows, 64), (64, 96), (96, 48))
    b1, b2, residual = arrays(1, (96,), (48,), (rows, 48))

    def f(implementation, x, w1, b1, w2, b2, residual):
        return jaxfused.mlp(
            x,
            w1,
            b1,
            w2 / 8,
            b2,
            residual=residual,
            save="hidden",
            precision="fp8",
            implementation=implementation,
        )

    assert_alike(*both_gradients(f, x, w1 / 8, b1, w2, b2, residual))


def test_gated_mlp_in_the_interpreter(interpreted_hopper):
    x, w_gate, w_up, w_down = arrays(2, (80, 64), (64, 96), (64, 96), (96, 48))

    def f(implementation, x, w_gate, w_up, w_down):
        return jaxfused.gated_mlp(
            x, w_gate, w_up, w_down, precision="fp8", implementation=implementation
        )

    assert_alike(*both_gradients(f, x, w_gate / 8, w_up / 8, w_down / 8))


@pytest.mark.parametrize("activation", [None, "gelu_tanh"])
def test_linear_in_the_interpreter(activation, interpreted_hopper):
    x, w, bias, residual = arrays(3, (2, 72, 64), (64, 48), (48,), (2, 72, 48))

    def f(implementation, x, w, bias, residual):
        return jaxfused.linear(
            x,
            w,
            bias,
            activation=activation,
            residual=residual,
            precision="fp8",
            implementation=implementation,
        )

    assert_alike(*both_gradients(f, x, w / 8, bias, residual))


def test_qkv_projection_in_the_interpreter(interpreted_hopper):
    x, w, bias = arrays(4, (2, 40, 64), (64, 64), (64,))

    def f(implementation, x, w, bias):
        q, k, v = jaxfused.qkv_projection(
            x, w, bias, heads=2, key_heads=1, precision="fp8", implementation=implementation
        )
        return jnp.concatenate([q, k, v], axis=-2)

    assert_alike(*both_gradients(f, x, w / 8, bias))
