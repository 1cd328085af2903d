"""What ConvNeXtBlock of nnx and linen share: the perceptron with a scale, a dropped path and a sum."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxfused.modules.linear import QuantizedKernel
from jaxfused.modules.mlp import Layer, mlp


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
    """Residual + drop(scale * mlp(y)), in one operator where nothing is dropped.

    The scale is then a part of the last layer's parameters: their product is a small array, where that
    with the result is a large one.
    """
    kernel, bias = down
    if drop is None and not isinstance(kernel, QuantizedKernel):
        if scale is not None:
            wide = jnp.promote_types(kernel.dtype, scale.dtype)
            kernel = kernel.astype(wide) * scale.astype(wide)
            bias = None if bias is None else bias.astype(wide) * scale.astype(wide)
        total = mlp(y, up, (kernel, bias), residual=residual, **options)
        return total.astype(residual.dtype)
    branch = mlp(y, up, down, residual=None, **options)
    branch = branch if scale is None else branch * scale.astype(branch.dtype)
    branch = branch if drop is None else drop(branch)
    return (residual + branch).astype(residual.dtype)
