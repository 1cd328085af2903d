"""Products in plain jax.numpy whose operands are rounded as this machine's tensor cores round them."""

import jax
import jax.numpy as jnp
import numpy as np

_KEPT_BY_TF32 = np.uint32(0xFFFFE000)


@jax.custom_vjp
def product(a: jax.Array, b: jax.Array) -> jax.Array:
    """The product a [..., K] @ b [K, N], with products alike in its gradient.

    On a GPU, float32 operands are cut to the 10 bits of tf32, as wgmma does. What XLA calls for a
    small product rounds them instead, so its error is half as large and no yardstick.
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
