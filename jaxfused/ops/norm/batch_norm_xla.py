"""batch_norm in plain jax.numpy, and its folding into the weights of the layer before it."""

import math
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxfused.ops.norm.group_norm_xla import STATISTICS, saving_statistics
from jaxfused.ops.norm.moments import normalised_pairs, parts_of, settled, shifted_moments
from jaxfused.runtime import resharding
from jaxfused.runtime.activation import activate
from jaxfused.runtime.promotion import accumulator_dtype, along_last_axis


def batch_statistics(
    x: jax.Array,
    *,
    axis_name: Hashable | tuple[Hashable, ...] | None,
    axis_index_groups: Sequence[Sequence[int]] | None,
    mask: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns mean and variance [C] of [..., C], over all devices along `axis_name`.

    The variance is the mean of squared deviations from the mean over all devices. The two means take two
    collectives of C numbers. mean(x^2) - mean(x)^2 would take one, but would lose accuracy by
    cancellation.

    A mask, broadcastable to x, selects the values to average: their sum over all devices is divided by
    their number over all devices.
    """
    axes = tuple(range(x.ndim - 1))

    def summed(values: jax.Array) -> jax.Array:
        total = jnp.sum(values, axes)
        if axis_name is None:
            return total
        return jax.lax.psum(total, axis_name, axis_index_groups=axis_index_groups)

    kept = None if mask is None else jnp.broadcast_to(jnp.asarray(mask, bool), x.shape)
    count = 1 if kept is None else summed(kept.astype(jnp.float32))

    def mean_of(values: jax.Array) -> jax.Array:
        if kept is not None:
            mean = summed(jnp.where(kept, values, 0)) / count
        else:
            mean = jnp.mean(values, axes)
            if axis_name is not None:
                mean = jax.lax.pmean(mean, axis_name, axis_index_groups=axis_index_groups)
        return checkpoint_name(mean, STATISTICS)

    @saving_statistics(values_of_a_channel(x))
    def statistics(x):
        x = x.astype(accumulator_dtype(x.dtype))
        mean = mean_of(x)
        return mean, mean_of(jnp.square(x - along_last_axis(mean, x)))

    return statistics(x)


def values_of_a_channel(x: Any) -> int:
    """Returns the number of values of x [..., C] that a channel has."""
    return math.prod(x.shape[:-1])


def of_batch(
    x: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    epsilon: float,
    activation: str | None,
    axis_name: Hashable | tuple[Hashable, ...] | None,
    axis_index_groups: Sequence[Sequence[int]] | None,
    mask: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (y, mean, variance) of [..., C], normalised by its own statistics."""
    mean, var = batch_statistics(
        x, axis_name=axis_name, axis_index_groups=axis_index_groups, mask=mask
    )
    if values_of_a_channel(x) == 2 and axis_name is None and mask is None:
        pairs = x.astype(accumulator_dtype(x.dtype)).reshape(2, x.shape[-1])
        y = normalised_pairs(pairs, 0, epsilon).reshape(x.shape)
        y = y if scale is None else y * along_last_axis(scale, y)
        return _finish(y, bias, residual, activation).astype(x.dtype), mean, var
    y = norm(x, scale, bias, residual, mean, var, epsilon=epsilon, activation=activation)
    return y, mean, var


def norm_and_statistics(
    x: jax.Array,
    residual: jax.Array | None,
    scale: jax.Array | None,
    bias: jax.Array | None,
    *,
    epsilon: float,
    activation: str | None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns (y, mean, rstd, variance) of x [rows, C]; the statistics are [C]."""
    mean, variance = row_moments(x)
    statistics = mean, variance, jax.lax.rsqrt(variance + epsilon)
    mean, variance, rstd = settled(statistics, parts_of(*x.shape))
    y = norm(x, scale, bias, residual, mean, variance, epsilon=epsilon, activation=activation)
    return y, mean, rstd, variance


def row_moments(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns mean and variance [C] of x [rows, C], in one pass over x."""
    wide = x.astype(accumulator_dtype(x.dtype))
    return shifted_moments(wide, wide[len(x) // 2], _mean_of_rows)


def _mean_of_rows(values: jax.Array) -> jax.Array:
    """Returns the mean [C] of values [rows, C].

    512 to 4,096 rows are split into parts (`parts_of`), which are summed separately: XLA's single sum
    would use only a few SMs.
    """
    rows, columns = values.shape
    parts = parts_of(rows, columns)
    if parts == 1:
        return jnp.mean(values, 0)
    return jnp.mean(jnp.mean(values.reshape(parts, rows // parts, columns), 1), 0)


def norm(
    x: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    residual: jax.Array | None,
    mean: jax.Array,
    var: jax.Array,
    *,
    epsilon: float,
    activation: str | None,
) -> jax.Array:
    """Normalises [..., C] by the statistics [C]."""
    compute_dtype = accumulator_dtype(x.dtype)

    @saving_statistics(values_of_a_channel(x))
    def apply(x, scale, bias, residual, mean, var):
        factor = channel_factor(scale, var.astype(compute_dtype), epsilon)
        y = x.astype(compute_dtype)
        y = (y - along_last_axis(mean, y)) * along_last_axis(factor, y)
        return _finish(y, bias, residual, activation).astype(x.dtype)

    return apply(x, scale, bias, residual, mean, var)


def _finish(
    y: jax.Array, bias: jax.Array | None, residual: jax.Array | None, activation: str | None
) -> jax.Array:
    """Returns activation(y + bias + residual) for y, residual [..., C] and bias [C]."""
    y = y if bias is None else y + along_last_axis(bias, y)
    y = y if residual is None else y + resharding.split_with(residual, y).astype(y.dtype)
    return activate(activation, y)


def channel_factor(scale: jax.Array | None, var: jax.Array, epsilon: float) -> jax.Array:
    """Returns scale / sqrt(var + epsilon) [C] in var's dtype, batch_norm's factor of x - mean."""
    factor = jax.lax.rsqrt(var + epsilon)
    return (
        factor if scale is None else factor * resharding.split_with(scale, factor).astype(var.dtype)
    )


def fold(
    w: jax.Array,
    bias: jax.Array | None,
    mean: jax.Array,
    var: jax.Array,
    norm_scale: jax.Array | None,
    norm_bias: jax.Array | None,
    *,
    epsilon: float,
) -> tuple[jax.Array, jax.Array]:
    """Returns weights [..., C] and bias [C] that include the batch_norm after `w` and `bias`."""
    compute_dtype = accumulator_dtype(w.dtype)
    factor = channel_factor(norm_scale, var.astype(compute_dtype), epsilon)
    shift = -mean.astype(compute_dtype)
    if bias is not None:
        shift = shift + resharding.split_with(bias, shift).astype(compute_dtype)
    shift = shift * resharding.split_with(factor, shift)
    if norm_bias is not None:
        shift = shift + resharding.split_with(norm_bias, shift).astype(compute_dtype)
    folded_bias_dtype = w.dtype if bias is None else bias.dtype
    folded = w.astype(compute_dtype)
    folded = folded * along_last_axis(factor, folded)
    return folded.astype(w.dtype), shift.astype(folded_bias_dtype)
