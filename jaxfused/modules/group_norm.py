"""The call of group_norm that GroupNorm and InstanceNorm of nnx and linen share."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxfused.dispatch import Implementation
from jaxfused.modules.fallback import why_given
from jaxfused.modules.promotion import floating
from jaxfused.ops.norm import group_norm


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
    image_scale: jax.Array | None = None,
    image_shift: jax.Array | None = None,
    mask_gradient: bool = True,
    implementation: Implementation | None,
) -> jax.Array:
    """Runs `jaxfused.group_norm`; a vector of channels, which Flax accepts too, gets a batch axis."""
    has_batch = x.ndim != 1
    if not has_batch:
        residual, image_scale, image_shift = (
            None if a is None else jnp.asarray(a)[None]
            for a in (residual, image_scale, image_shift)
        )
        x = x[None]
    y = group_norm.run(
        x,
        floating(scale, x.dtype),
        floating(bias, x.dtype),
        num_groups=num_groups,
        group_size=group_size,
        epsilon=epsilon,
        activation=activation,
        residual=residual,
        image_scale=floating(image_scale, x.dtype),
        image_shift=floating(image_shift, x.dtype),
        mask_gradient=mask_gradient,
        implementation=implementation,
    )
    return y if has_batch else y[0]


def why_flax_normalises_instances(
    x: jax.Array, mask: jax.Array | None, axis_name: str | None, feature_axes: Any
) -> str | None:
    """Returns why a call of InstanceNorm runs Flax's code, or None; Flax's code rejects vectors."""
    axes = tuple(feature_axes) if isinstance(feature_axes, tuple | list) else (feature_axes,)
    if x.ndim < 2:
        return "x has no batch axis"
    return why_given(
        mask=mask is not None,
        axis_name=axis_name is not None,
        feature_axes=axes not in ((-1,), (x.ndim - 1,)),
    )
