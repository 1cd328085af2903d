"""Products in plain jax.numpy, with operands rounded as by this machine's tensor cores."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

_KEPT_BY_TF32 = np.uint32(0xFFFFE000)


@jax.custom_vjp
def product(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns the product a [..., K] @ b [K, N]; the products of its gradient are rounded alike.

    On a GPU, float32 operands are cut to the 10 bits of tf32, as WGMMA does. XLA's small products round
    them instead, so their error is half as large and no fair reference.
    """
    return _cut(a) @ _cut(b)


def _forward(a, b):
    return product(a, b), (a, b)


def _backward(saved, dy):
    a, b = saved
    rows = a.reshape(-1, a.shape[-1]), dy.reshape(-1, dy.shape[-1])
    return product(dy, b.T), product(rows[0].T, rows[1])


product.defvjp(_forward, _backward)


def _cut(x: jax.Array) -> jax.Array:
    if x.dtype != jnp.float32 or jax.default_backend() != "gpu":
        return x
    return jax.lax.bitcast_convert_type(
        jax.lax.bitcast_convert_type(x, jnp.uint32) & _KEPT_BY_TF32, jnp.float32
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def rounded_einsum(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns `jnp.einsum` of float32 operands rounded to the nearest tf32, in its gradient too.

    The result is the same on any machine, because the rounded operands are multiplied with all their
    bits.
    """
    return jnp.einsum(subscripts, _rounded(a), _rounded(b), precision="highest")


def _rounded_einsum_forward(subscripts, a, b):
    return rounded_einsum(subscripts, a, b), (a, b)


def _rounded_einsum_backward(subscripts, saved, dy):
    a, b = saved
    operands, y_axes = subscripts.split("->")
    a_axes, b_axes = operands.split(",")
    da = rounded_einsum(f"{y_axes},{b_axes}->{a_axes}", dy, b)
    return da, rounded_einsum(f"{a_axes},{y_axes}->{b_axes}", a, dy)


rounded_einsum.defvjp(_rounded_einsum_forward, _rounded_einsum_backward)


def _rounded(x: jax.Array) -> jax.Array:
    """Keeps the 8 bits of the exponent and 10 of the fraction."""
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=10)
