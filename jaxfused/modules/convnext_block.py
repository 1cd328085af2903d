"""The MLP of ConvNeXtBlock with layer scale, drop path and residual, which nnx and linen share."""

from collections.abc import Callable
from typing import Any

import jax

from jaxfused.modules.linear import KernelStandIn
from jaxfused.modules.mlp import Layer, mlp
from jaxfused.runtime.promotion import along_last_axis, common_dtype


def scaled_mlp(
    y: Any,
    up: Layer,
    down: Layer,
    scale: jax.Array | None,
    residual: jax.Array,
    *,
    drop: Callable[[jax.Array], jax.Array] | None,
    **options: Any,
) -> jax.Array:
    """Returns residual + drop(scale * mlp(y)), by one operator if nothing is dropped.

    The operator's last kernel and bias are then multiplied by the scale, since they are smaller than the
    result.
    """
    kernel, bias = down
    if drop is None and not isinstance(kernel, KernelStandIn):
        if scale is not None:
            kernel = kernel.astype(common_dtype(kernel.dtype, scale.dtype))
            kernel = kernel * along_last_axis(scale, kernel)
            bias = None if bias is None else bias.astype(kernel.dtype) * scale.astype(kernel.dtype)
        total = mlp(y, up, (kernel, bias), residual=residual, **options)
        return total.astype(residual.dtype)
    return scaled_sum(mlp(y, up, down, residual=None, **options), scale, residual, drop)


def scaled_sum(
    branch: jax.Array,
    scale: jax.Array | None,
    residual: jax.Array,
    drop: Callable[[jax.Array], jax.Array] | None,
) -> jax.Array:
    """Returns residual + drop(scale * branch)."""
    branch = branch if scale is None else branch * along_last_axis(scale, branch)
    branch = branch if drop is None else drop(branch)
    return residual + branch.astype(residual.dtype)
