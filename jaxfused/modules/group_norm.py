"""The call of group_norm that GroupNorm of nnx and linen share."""

import jax

from jaxfused import ops
from jaxfused.dispatch import Implementation
from jaxfused.modules.promotion import floating


def normalise(
    x: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    *,
    num_groups: int | None,
    group_size: int | None = None,
    epsilon: float,
    activation: str | None,
    residual: jax.Array | None,
    implementation: Implementation | None,
) -> jax.Array:
    """Runs the operator, adding a batch axis to a vector of channels, which Flax normalises alone."""
    has_batch = x.ndim != 1
    if not has_batch:
        x, residual = x[None], None if residual is None else residual[None]
    y = ops.group_norm.group_norm(
        x,
        floating(scale, x.dtype),
        floating(bias, x.dtype),
        num_groups=num_groups,
        group_size=group_size,
        epsilon=epsilon,
        activation=activation,
        residual=residual,
        implementation=implementation,
    )
    return y if has_batch else y[0]
