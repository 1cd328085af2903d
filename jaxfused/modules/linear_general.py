"""Linear layers over several axes for nnx and linen: one product of matrices."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxfused.dispatch import Implementation
from jaxfused.modules.linear import linear, promoted
from jaxfused.runtime.shapes import reshaped, split_axis


def why_not_a_matrix(x: jax.Array, axis: tuple[int, ...], batch_axes: int) -> str | None:
    """Returns why the product over these axes of x is not one of two matrices, or None."""
    if batch_axes:
        return "each entry of a batch has a kernel of its own"
    axes = tuple(a % x.ndim for a in axis)
    if axes != tuple(range(x.ndim - len(axes), x.ndim)):
        return f"axis={axis} are not the last axes of {x.ndim}"
    return _why_explicit(x, len(axes))


def _why_explicit(x: jax.Array, merged: int) -> str | None:
    """Returns why JAX refuses to merge the last axes of an array with Explicit sharding, or None."""
    spec = jax.typeof(x).sharding.spec
    inner = spec[x.ndim - merged + 1 : x.ndim] if merged else ()
    if any(names is not None for names in inner):
        return "an axis that is merged with the one before it is split over Explicit mesh axes"
    return None


def linear_general(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
    *,
    contracted: int,
    dtype: Any,
    activation: str | None = None,
    residual: jax.Array | None = None,
    precision: jax.lax.PrecisionLike = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Multiplies the last `contracted` axes of x by the first ones of the kernel.

    Args:
      x: [..., *inputs].
      kernel: [*inputs, *features].
      bias: [*features] or None.
      contracted: the number of inputs' axes.
      dtype: dtype of the product; None for the one to which x and the parameters promote.
      activation: activation of the sum with the bias.
      residual: [..., *features], is added last.
      precision: precision of the product.
      implementation: as in `jaxfused.linear`.
    """
    x = promoted(x, kernel, bias, dtype=dtype)
    rows, features = x.shape[: x.ndim - contracted], kernel.shape[contracted:]
    inputs, width = math.prod(kernel.shape[:contracted]), math.prod(features)
    y = linear(
        reshaped(x, *rows, inputs),
        reshaped(kernel, inputs, width),
        None if bias is None else reshaped(bias, width),
        activation=activation,
        residual=None if residual is None else reshaped(jnp.asarray(residual), *rows, width),
        precision=precision,
        implementation=implementation,
    )
    return split_axis(y, len(rows), *features)
