"""BatchNorm's two modes and its running averages, for nnx and linen."""

from typing import Any

import jax

from jaxfused.dispatch import Implementation
from jaxfused.modules.promotion import floating
from jaxfused.ops.norm import batch_norm
from jaxfused.runtime.promotion import common_dtype


def infer(
    x: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    mean: jax.Array,
    var: jax.Array,
    *,
    epsilon: float,
    activation: str | None,
    residual: jax.Array | None,
    implementation: Implementation | None,
) -> jax.Array:
    """Runs `jaxfused.batch_norm` with the running averages as mean and variance."""
    y = batch_norm.batch_norm(
        x,
        floating(scale, x.dtype),
        floating(bias, x.dtype),
        mean=mean,
        var=var,
        epsilon=epsilon,
        activation=activation,
        residual=residual,
        implementation=implementation,
    )
    assert isinstance(y, jax.Array)
    return y


def train(
    x: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    mean: jax.Array,
    var: jax.Array,
    *,
    momentum: float,
    epsilon: float,
    axis_name: str | None,
    axis_index_groups: Any,
    mask: jax.Array | None,
    activation: str | None,
    residual: jax.Array | None,
    mask_gradient: bool,
    statistics: tuple[jax.Array, jax.Array] | None,
    implementation: Implementation | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Normalises by the batch's statistics; returns (y, new running mean, new running variance)."""
    y, batch_mean, batch_var = batch_norm.run(
        x,
        floating(scale, x.dtype),
        floating(bias, x.dtype),
        epsilon=epsilon,
        axis_name=axis_name,
        axis_index_groups=axis_index_groups,
        mask=mask,
        activation=activation,
        residual=residual,
        mask_gradient=mask_gradient,
        statistics=statistics,
        implementation=implementation,
    )

    def moved(average: jax.Array, value: jax.Array) -> jax.Array:
        dtype = common_dtype(average.dtype, value.dtype)
        value = jax.lax.stop_gradient(value).astype(dtype)
        return momentum * average.astype(dtype) + (1 - momentum) * value

    return y, moved(mean, batch_mean), moved(var, batch_var)
