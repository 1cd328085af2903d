"""layer_norm and rms_norm in plain jax.numpy: the truth that the kernels are judged by.

It is also `implementation="xla"`: differentiable to any order and in either mode, because nothing but
jax.numpy is in it.
"""

import jax
import jax.numpy as jnp

from jaxfused.reference.activation import activate


def norm(
    x: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    residual: jax.Array | None,
    pre_bias: jax.Array | None,
    *,
    subtract_mean: bool,
    epsilon: float,
    scale_offset: float,
    pre_activation: str | None,
    activation: str | None,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns (y, next_residual) over the last axis; next_residual is None without `residual`.

    Arithmetic is in float32 (float64 for float64 inputs). The normalisation reads the next residual as
    it was rounded to its dtype, so that a backward that saved it sees the very numbers of the forward.
    """
    compute_dtype = jnp.promote_types(x.dtype, jnp.float32)
    total = x.astype(compute_dtype)
    if pre_bias is not None:
        total = total + pre_bias.astype(compute_dtype)
    next_residual = None
    if residual is not None:
        next_residual = (total + residual.astype(compute_dtype)).astype(residual.dtype)
        total = next_residual.astype(compute_dtype)

    u = activate(pre_activation, total)
    if subtract_mean:
        u = u - jnp.mean(u, axis=-1, keepdims=True)
    y = u * jax.lax.rsqrt(jnp.mean(u * u, axis=-1, keepdims=True) + epsilon)
    if scale is not None:
        y = y * (scale.astype(compute_dtype) + scale_offset)
    if bias is not None:
        y = y + bias.astype(compute_dtype)
    return activate(activation, y).astype(x.dtype), next_residual
