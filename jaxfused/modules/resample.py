"""Code of DeformConv and CARAFE of nnx and linen, whose windows or kernels depend on their input."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxfused.ops.conv import deform_conv
from jaxfused.ops.pool import carafe, pixel_shuffle
from jaxfused.runtime.promotion import accumulator_dtype, common_dtype


def predicted_channels(kernel_size: Sequence[int], offset_groups: int) -> int:
    """Returns the number of channels of a deformable convolution's offsets and masks."""
    return 3 * offset_groups * math.prod(kernel_size)


def deformed(
    x: jax.Array,
    kernel: Any,
    bias: Any,
    predicted: jax.Array,
    *,
    dtype: Any,
    **options: Any,
) -> jax.Array:
    """Runs a deformable convolution; `predicted` has the offsets and then the logits of the masks."""
    dtype = common_dtype(x.dtype, kernel.dtype) if dtype is None else dtype
    count = predicted.shape[-1] // 3 * 2
    mask = jax.nn.sigmoid(predicted[..., count:].astype(accumulator_dtype(predicted.dtype)))
    return deform_conv.deform_conv(
        x.astype(dtype), jnp.asarray(kernel), predicted[..., :count], mask, bias, **options
    )


def encoder_channels(kernel_size: int, groups: int, factor: int) -> int:
    """Returns the number of channels that hold the kernels of all factor^2 pixels made from one."""
    return groups * (kernel_size * factor) ** 2


def reassembled(
    x: jax.Array,
    encoded: jax.Array,
    *,
    factor: int,
    kernel_size: int,
    groups: int,
    implementation: Any,
) -> jax.Array:
    """Enlarges x [B, H, W, C] by kernels whose logits are the channels of `encoded` [B, H, W, ...]."""
    if x.ndim != 4:
        raise ValueError(
            f"CARAFE: x has shape {x.shape}, but it is of images; pass x of shape [batch, height, width,"
            " channels]."
        )
    logits = pixel_shuffle.pixel_shuffle(encoded, factor)
    shape = logits.shape
    logits = logits.reshape(*shape[:-1], groups, kernel_size**2)
    kernels = jax.nn.softmax(logits.astype(accumulator_dtype(logits.dtype)), axis=-1)
    return carafe.carafe(
        x,
        kernels.reshape(shape),
        kernel_size=kernel_size,
        groups=groups,
        implementation=implementation,
    )
