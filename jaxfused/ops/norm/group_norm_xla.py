"""group_norm in plain jax.numpy: the reference that the kernels are tested against."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxfused.ops.norm.moments import is_few, normalised_pairs, parts_of, settled, shifted_moments
from jaxfused.runtime import resharding
from jaxfused.runtime.activation import activate, value_and_slope
from jaxfused.runtime.product_xla import parts_of_rows
from jaxfused.runtime.promotion import accumulator_dtype, along_last_axis
from jaxfused.runtime.shapes import split_axis

STATISTICS = "jaxfused_statistics"
"""Name that `checkpoint_name` gives a norm's statistics, for policies of `jax.checkpoint`."""

save_statistics = functools.partial(
    jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(STATISTICS)
)
"""Wraps a norm so that its forward saves the inputs and statistics, not the normalised x in float32."""


def saving_statistics(values: Any) -> Callable[..., Any]:
    """Returns `save_statistics`, or the identity for a norm over at most `FEW_VALUES` values."""
    return (lambda norm: norm) if is_few(values) else save_statistics


def values_of_a_group(x: Any, num_groups: int) -> int:
    """Returns the number of values over which each norm of x [B, ..., C] is taken."""
    return math.prod(x.shape[1:]) // num_groups


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
    """Normalises [B, ..., C] over all axes but the batch and the groups of channels.

    Scale and bias are [C], or [B, C] for each image.
    """
    values = values_of_a_group(x, num_groups)

    @saving_statistics(values)
    def apply(x, scale, bias, residual):
        if values == 2:
            groups = _groups(x, num_groups)
            by_pixel = groups.reshape(len(x), -1, *groups.shape[-2:])
            y = normalised_pairs(by_pixel, 1 if by_pixel.shape[1] == 2 else 3, epsilon)
            y = _affine(y.reshape(x.shape), residual, scale, bias)
            return activate(activation, y).astype(x.dtype)
        return norm_and_statistics(
            x,
            residual,
            scale,
            bias,
            num_groups=num_groups,
            epsilon=epsilon,
            activation=activation,
        )[0]

    return apply(x, scale, bias, residual)


Statistics = tuple[jax.Array, jax.Array, jax.Array]
"""Statistics of a norm: mean, variance and rstd."""


def centered_statistics(groups: jax.Array, epsilon: float) -> Statistics:
    """Returns the statistics of groups [B, ..., groups, S], in two passes over their values."""
    axes = (*range(1, groups.ndim - 2), groups.ndim - 1)
    mean = checkpoint_name(jnp.mean(groups, axes, keepdims=True), STATISTICS)
    centered = groups - mean
    variance = checkpoint_name(jnp.mean(centered * centered, axes, keepdims=True), STATISTICS)
    return mean, variance, jax.lax.rsqrt(variance + epsilon)


def statistics_in_one_pass(groups: jax.Array, epsilon: float) -> Statistics:
    """Returns the statistics of [B, pixels, groups, channels] in one pass, which has no gradient."""
    images, pixels, num_groups, size = groups.shape
    # Up to _FEW_IMAGES images have too few groups to fill a GPU with one sum each, so the pixels of each
    # group are summed in parts.
    parts = parts_of(pixels, images * num_groups) if images <= _FEW_IMAGES else 1
    near = groups[:, pixels // 2, :, size // 2]
    mean, variance = shifted_moments(
        groups.reshape(images, parts, -1, num_groups, size),
        near.reshape(images, 1, 1, num_groups, 1),
        lambda values: jnp.mean(jnp.mean(values, (2, 4), keepdims=True), 1, keepdims=True),
    )
    mean, variance = mean[:, 0], variance[:, 0]
    mean, variance, rstd = settled((mean, variance, jax.lax.rsqrt(variance + epsilon)), parts)
    return mean, variance, rstd


_FEW_IMAGES = 8


def norm_and_statistics(
    x: jax.Array,
    residual: jax.Array | None,
    scale: jax.Array | None,
    bias: jax.Array | None,
    *,
    num_groups: int,
    epsilon: float,
    activation: str | None,
    statistics_of: Callable[[jax.Array, float], Statistics] = centered_statistics,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns (y, mean, rstd, variance), with the statistics [B, num_groups] of `statistics_of`."""
    groups = _groups(x, num_groups)
    mean, variance, rstd = statistics_of(groups, epsilon)
    y = _affine(((groups - mean) * rstd).reshape(x.shape), residual, scale, bias)
    statistics = (x.shape[0], num_groups)
    return (
        activate(activation, y).astype(x.dtype),
        mean.reshape(statistics),
        rstd.reshape(statistics),
        variance.reshape(statistics),
    )


def gradient(
    dy: jax.Array,
    x: jax.Array,
    residual: jax.Array | None,
    mean: jax.Array,
    rstd: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    dmean: jax.Array | None = None,
    dvariance: jax.Array | None = None,
    *,
    num_groups: int,
    activation: str | None,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None, jax.Array | None]:
    """Returns (dx, dresidual, dscale, dbias) from what the forward has saved; the last two are [B, C].

    `dmean` and `dvariance` [B, num_groups] are the gradients of the statistics, or None. dscale and
    dbias have an entry for each image, even if the images share the parameter, and are None for an
    absent parameter.
    """
    spatial = tuple(range(1, x.ndim - 1))
    along_groups = (x.shape[0], *(1 for _ in spatial), num_groups, 1)
    rstd = rstd.reshape(along_groups)
    centered = _groups(x, num_groups) - mean.reshape(along_groups)
    normalised = centered * rstd
    flat = normalised.reshape(x.shape)
    _, slope = value_and_slope(activation, _affine(flat, residual, scale, bias))
    dz = dy.astype(slope.dtype) * slope
    # These sums [B, C] give both dscale and dbias, and the sums over groups that dx needs.
    dscale, dbias = _sums_over_pixels(dz * flat, dz)
    size = centered[0].size // num_groups

    def mean_of_group(sums: jax.Array) -> jax.Array:
        """Returns a group's mean of a gradient times scale, from its sums over pixels [B, C]."""
        scaled = sums if scale is None else sums * scale.astype(sums.dtype)
        return jnp.sum(_groups(scaled, num_groups), -1).reshape(along_groups) / size

    scaled = dz if scale is None else dz * along_last_axis(scale, dz)
    dx = rstd * (
        _groups(scaled, num_groups) - mean_of_group(dbias) - normalised * mean_of_group(dscale)
    )
    if dmean is not None:
        dx = dx + dmean.reshape(along_groups) / size
    if dvariance is not None:
        dx = dx + centered * (2.0 * dvariance.reshape(along_groups) / size)
    return (
        dx.reshape(x.shape).astype(x.dtype),
        None if residual is None else dz.astype(residual.dtype),
        None if scale is None else dscale,
        None if bias is None else dbias,
    )


def _sums_over_pixels(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the sums [B, C] over the pixels of each array [B, ..., C].

    The barrier keeps XLA from fusing later sums over images or groups into these sums: fewer results
    would get fewer thread blocks. For the same reason few images and channels are summed in parts.
    """
    images, *sides, channels = arrays[0].shape
    pixels = math.prod(sides)
    parts = (
        parts_of_rows(pixels, images * channels) if images * channels <= _FEW_SUMS else None
    ) or 1
    shape = (images, parts, pixels // parts, channels)
    of_parts = jax.lax.optimization_barrier([jnp.sum(a.reshape(shape), 2) for a in arrays])
    return tuple(jax.lax.optimization_barrier([jnp.sum(sums, 1) for sums in of_parts]))


_FEW_SUMS = 2**13
"""Largest number of sums that are split into parts. XLA gives each block 64 sums: fewer blocks than a
large GPU has SMs."""


def _groups(x: jax.Array, num_groups: int) -> jax.Array:
    """Returns x [B, ..., C] as [B, ..., groups, channels of a group] in the accumulator's dtype."""
    wide = x.astype(accumulator_dtype(x.dtype))
    return split_axis(wide, x.ndim - 1, num_groups, x.shape[-1] // num_groups)


def _affine(
    y: jax.Array,
    residual: jax.Array | None,
    scale: jax.Array | None,
    bias: jax.Array | None,
) -> jax.Array:
    """Returns y * scale + bias + residual for y, residual [B, ..., C], scale and bias [C] or [B, C]."""
    if scale is not None:
        y = y * along_last_axis(scale, y)
    if bias is not None:
        y = y + along_last_axis(bias, y)
    if residual is not None:
        y = y + resharding.split_with(residual, y).astype(y.dtype)
    return y
