"""The call of `jaxfused.upsample` that Upsample of nnx and linen share."""

import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxfused.dispatch import Implementation
from jaxfused.ops.pool import upsample

Method = Literal["nearest", "bilinear", "learned"]


def check_method(method: str, out_features: int | None) -> None:
    """Checks that the method exists, and that a method without parameters keeps the channels."""
    if method not in ("nearest", "bilinear", "learned"):
        raise ValueError(
            f"Upsample: method={method!r} is not known; pass 'nearest', 'bilinear' or 'learned'."
        )
    if method != "learned" and out_features is not None:
        raise ValueError(
            f"Upsample: {out_features} channels were asked for, but method {method!r} keeps those of x;"
            " leave them out, or pass method='learned'."
        )


def of_learned(factor: int | Sequence[int], implementation: Implementation | None) -> Any:
    """Returns a transposed convolution's arguments to upsample by `factor`; one int is for two axes."""
    factors = (factor, factor) if isinstance(factor, int) else tuple(factor)
    named = {} if implementation is None else {"implementation": implementation}
    return dict(kernel_size=factors, strides=factors, padding="VALID", **named)


def check_axes_of_learned(x: jax.Array, factor: int | Sequence[int]) -> None:
    """Checks that x has two spatial axes if the factor is one int."""
    if isinstance(factor, int) and x.ndim != 4:
        raise ValueError(
            f"Upsample: factor is {factor}, which is for two spatial axes where it is learned, but x has"
            f" shape {x.shape}; pass one factor for each spatial axis, such as ({factor},) for one."
        )


def enlarge(
    x: jax.Array,
    factor: int | Sequence[int],
    *,
    method: str,
    dtype: Any,
    implementation: Implementation | None,
) -> jax.Array:
    """Runs `jaxfused.upsample`, with any number of batch axes if each spatial axis has a factor."""
    x = jnp.asarray(x, dtype)
    batch: tuple[int, ...] = x.shape[:1]
    if not isinstance(factor, int) and x.ndim > len(factor):
        batch = x.shape[: x.ndim - len(factor) - 1]
    images = x.reshape(math.prod(batch), *x.shape[len(batch) :])
    y = upsample.upsample(images, factor, method=method, implementation=implementation)
    return y.reshape(*batch, *y.shape[1:])
