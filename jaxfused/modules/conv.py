"""What Conv and ConvNormAct of nnx and linen share: one call of the operator in Flax's terms."""

import math
from collections.abc import Sequence
from typing import Any, Literal

import jax

from jaxfused import ops
from jaxfused.dispatch import Implementation
from jaxfused.modules.promotion import floating

Norm = Literal["batch_norm", "group_norm"]


def check_norm(norm: str) -> None:
    """Checks that `norm` names one of the norms that may follow a convolution."""
    if norm not in ("batch_norm", "group_norm"):
        raise ValueError(
            f"ConvNormAct: norm={norm!r} is not known; pass 'batch_norm' or 'group_norm'."
        )


def convolve(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
    *,
    strides: int | Sequence[int] | None,
    padding: Any,
    input_dilation: int | Sequence[int] | None,
    kernel_dilation: int | Sequence[int] | None,
    feature_group_count: int,
    activation: str | None,
    residual: jax.Array | None,
    implementation: Implementation | None,
    precision: jax.lax.PrecisionLike = None,
) -> jax.Array:
    """Runs the operator with any number of batch axes; None stands for 1, as in Flax's `Conv`."""
    batch = x.shape[: x.ndim - kernel.ndim + 1]

    def fold(array: jax.Array) -> jax.Array:
        return array.reshape(math.prod(batch), *array.shape[len(batch) :])

    y = ops.conv.conv(
        fold(x),
        floating(kernel, x.dtype),
        floating(bias, x.dtype),
        strides=1 if strides is None else strides,
        padding=padding,
        input_dilation=1 if input_dilation is None else input_dilation,
        kernel_dilation=1 if kernel_dilation is None else kernel_dilation,
        feature_group_count=feature_group_count,
        activation=activation,
        precision=precision,
        residual=None if residual is None else fold(residual),
        implementation=implementation,
    )
    return y.reshape(*batch, *y.shape[1:])
