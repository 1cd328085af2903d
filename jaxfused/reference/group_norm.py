"""group_norm in plain jax.numpy: the truth against which the kernels are tested."""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxfused.reference.promotion import accumulator_dtype, along_last_axis
from jaxfused.semantics.activation import activate

STATISTICS = "jaxfused_statistics"
"""The name under which a norm marks its statistics for the policies of `jax.checkpoint`."""

save_statistics = functools.partial(
    jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(STATISTICS)
)
"""Wraps a norm so that its backward keeps the inputs and statistics, not the normalised x in float32."""


def norm(
    x: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    num_groups: int,
    epsilon: float,
    activation: str | None,
) -> jax.Array:
    """Normalises [B, ..., C] over everything but the batch and the groups of channels."""
    compute_dtype = accumulator_dtype(x.dtype)
    axes = (*range(1, x.ndim - 1), x.ndim)

    @save_statistics
    def apply(x, scale, bias, residual):
        groups = x.astype(compute_dtype).reshape(
            *x.shape[:-1], num_groups, x.shape[-1] // num_groups
        )
        mean = checkpoint_name(jnp.mean(groups, axes, keepdims=True), STATISTICS)
        centered = groups - mean
        variance = checkpoint_name(jnp.mean(centered * centered, axes, keepdims=True), STATISTICS)
        y = (centered * jax.lax.rsqrt(variance + epsilon)).reshape(x.shape)
        if scale is not None:
            y = y * along_last_axis(scale, y)
        if bias is not None:
            y = y + along_last_axis(bias, y)
        if residual is not None:
            y = y + residual.astype(compute_dtype)
        return activate(activation, y).astype(x.dtype)

    return apply(x, scale, bias, residual)
