"""qkv_projection in plain jax.numpy: the kernels' reference, and `implementation="xla"`."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxfused.ops.linear.linear_xla import preactivation, save_preactivation
from jaxfused.ops.norm.layer_norm_xla import norm
from jaxfused.ops.rope.rope_xla import rotate
from jaxfused.runtime import resharding


def qkv_projection(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    q_scale: jax.Array | None,
    k_scale: jax.Array | None,
    cos: jax.Array | None,
    sin: jax.Array | None,
    *,
    heads: int,
    key_heads: int,
    epsilon: float,
    scale_offset: float,
    interleaved: bool,
    precision: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (q, k, v) for x [..., T, D] and w [D, (N + 2 K) H], each [..., T, heads, H] in x's dtype.

    The forward saves the inputs for the gradient, and for norms also x @ w + bias in x's dtype.
    """

    def f(x, w, bias, q_scale, k_scale, cos, sin):
        # Devices that share w's columns would not share the heads of queries, keys and values evenly.
        y = preactivation(x, resharding.unsplit(w, [1]), bias, precision=precision)
        y = y.reshape(*x.shape[:-1], heads + 2 * key_heads, y.shape[-1] // (heads + 2 * key_heads))
        q, k, v = jnp.split(y, (heads, heads + key_heads), axis=-2)
        finished = finish_both(q, k, q_scale, k_scale, cos, sin, epsilon, scale_offset, interleaved)
        return *finished, v

    if q_scale is None and k_scale is None and cos is None:
        return f(x, w, bias, None, None, cos, sin)
    return jax.checkpoint(f, policy=save_preactivation)(x, w, bias, q_scale, k_scale, cos, sin)


def finish_both(
    q, k, q_scale, k_scale, cos, sin, epsilon, scale_offset, interleaved
) -> tuple[jax.Array, jax.Array]:
    """Returns `finish` of the queries q [..., T, N, H] and of the keys k [..., T, K, H]."""
    options = dict(epsilon=epsilon, scale_offset=scale_offset, interleaved=interleaved)
    return finish(q, q_scale, cos, sin, **options), finish(k, k_scale, cos, sin, **options)


def finish(
    y: jax.Array,
    scale: jax.Array | None,
    cos: jax.Array | None,
    sin: jax.Array | None,
    *,
    epsilon: float,
    scale_offset: float,
    interleaved: bool,
) -> jax.Array:
    """Returns heads [..., T, N, H] after norm and rotation, each only if its operands are given."""
    if scale is not None:
        y, _ = norm(
            y,
            scale,
            None,
            None,
            None,
            subtract_mean=False,
            epsilon=epsilon,
            scale_offset=scale_offset,
            pre_activation=None,
            activation=None,
        )
    if cos is not None and sin is not None:
        y = rotate(y, cos, sin, interleaved=interleaved)
    return y
