"""layer_norm and rms_norm in plain jax.numpy: the reference that the kernels are tested against.

It is also `implementation="xla"`, and being plain jax.numpy it is differentiable to any order, in both
modes.
"""

import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxfused.ops.norm.moments import shifted_moments
from jaxfused.runtime import resharding
from jaxfused.runtime.activation import activate, value_and_slope
from jaxfused.runtime.promotion import accumulator_dtype, along_last_axis


def norm(
    x: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    residual: jax.Array | None,
    pre_bias: jax.Array | None,
    *,
    subtract_mean: bool,
    epsilon: float,
    scale_offset: float,
    pre_activation: str | None,
    activation: str | None,
    round_before_scale: bool = False,
    gate: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns (y, next_residual) over the last axis; next_residual is None without `residual`.

    The vectors are [D], or [*leading, D] with one for each entry of the first axes of x, where axes of
    size 1 are broadcast.

    Arithmetic is in float32 (float64 for float64 inputs). The norm reads the next residual after its
    rounding, so that a backward that reads the saved next residual sees the same numbers.
    """
    return norm_and_statistics(
        x,
        scale,
        bias,
        residual,
        pre_bias,
        subtract_mean=subtract_mean,
        epsilon=epsilon,
        scale_offset=scale_offset,
        pre_activation=pre_activation,
        activation=activation,
        round_before_scale=round_before_scale,
        gate=gate,
    )[:2]


def norm_and_statistics(
    x: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    residual: jax.Array | None,
    pre_bias: jax.Array | None,
    *,
    subtract_mean: bool,
    epsilon: float,
    scale_offset: float,
    pre_activation: str | None,
    activation: str | None,
    round_before_scale: bool = False,
    gate: jax.Array | None = None,
    names: Sequence[str] = (),
) -> tuple[jax.Array, jax.Array | None, jax.Array | None, jax.Array]:
    """Returns the results of `norm`, and each row's mean (None for an RMSNorm) and rstd.

    In a `jax.shard_map`, devices along the mesh axes `names` may each hold a part of the features.
    """
    compute_dtype = accumulator_dtype(x.dtype)
    total = x
    if pre_bias is not None:
        total = total.astype(compute_dtype)
        total = total + along_last_axis(pre_bias, total)
    if gate is not None:
        total = total.astype(compute_dtype)
        total = total * along_last_axis(gate, total)
    next_residual = None
    if residual is not None:
        next_residual = _sum(total, residual, compute_dtype)
        total = next_residual

    u, statistics_of, mean_of = (
        activate(pre_activation, wide) for wide in _converted(total, compute_dtype)
    )
    mean = None
    if subtract_mean:
        mean = _mean(mean_of, names)
        u, statistics_of = u - mean, statistics_of - mean
    rstd = jax.lax.rsqrt(_mean(statistics_of * statistics_of, names) + epsilon)
    gain = None if scale is None else along_last_axis(scale, u) + scale_offset
    if round_before_scale:
        y = _rounded(u * rstd, x.dtype)
        y = y if gain is None else y * gain
    else:
        y = u * (rstd if gain is None else rstd * gain)
    if bias is not None:
        y = y + along_last_axis(bias, y)
    y = activate(activation, y).astype(x.dtype)
    return y, next_residual, None if mean is None else mean[..., 0], rstd[..., 0]


def statistics(
    total: jax.Array,
    pre_bias: jax.Array | None,
    *,
    subtract_mean: bool,
    epsilon: float,
    pre_activation: str | None,
) -> tuple[jax.Array | None, jax.Array]:
    """Returns each row's mean and rstd, in one pass that cannot be differentiated.

    `total` is x, to which pre_bias is added, or the next residual, which already includes pre_bias.
    """
    u = total.astype(accumulator_dtype(total.dtype))
    if pre_bias is not None:
        u = u + along_last_axis(pre_bias, u)
    u = activate(pre_activation, u)
    if not subtract_mean:
        return None, jax.lax.rsqrt(jnp.mean(u * u, axis=-1) + epsilon)
    middle = u.shape[-1] // 2
    near = u[..., middle : middle + 1]
    mean, variance = shifted_moments(u, near, lambda values: _mean(values, ()))
    return mean[..., 0], jax.lax.rsqrt(variance[..., 0] + epsilon)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _converted(total: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns three copies of `total` [..., D] in `dtype`: for the values, the mean and the variance.

    With separate conversions XLA fuses the norm. The gradients of the three nearly cancel, so they are
    added in `dtype`, and their sum is rounded to the dtype of `total` once.
    """
    return total.astype(dtype), total.astype(dtype), total.astype(dtype)


@_converted.defjvp
def _converted_jvp(dtype, primals, tangents):
    tangent = tangents[0].astype(dtype)
    return _converted(primals[0], dtype), (tangent, tangent, tangent)


@functools.partial(jax.jit, static_argnums=2, inline=True)
def _sum(total: jax.Array, residual: jax.Array, compute_dtype: Any) -> jax.Array:
    """Returns total + residual, rounded once to the residual's dtype.

    On a GPU the sum is computed in that dtype, so that XLA's norm reads rounded numbers. Elsewhere the
    rounding is an operation of its own, because XLA drops a conversion to fewer bits and back: the
    statistics would then be of unrounded numbers, but the backward reads rounded ones.
    """

    def rounded(total: jax.Array, residual: jax.Array) -> jax.Array:
        wide = total.astype(compute_dtype) + residual.astype(compute_dtype)
        return _rounded(wide, residual.dtype).astype(residual.dtype)

    residual = resharding.split_with(residual, total)
    if total.dtype != residual.dtype:
        return rounded(total, residual)
    return jax.lax.platform_dependent(total, residual, cuda=operator.add, default=rounded)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _rounded(wide: jax.Array, dtype: Any) -> jax.Array:
    """Rounds to `dtype` and returns the wide dtype; XLA would drop a conversion to `dtype` and back."""
    bits, widest = jnp.finfo(dtype), jnp.finfo(wide.dtype)
    if bits.nmant >= widest.nmant:
        return wide
    rounded = jax.lax.reduce_precision(wide, bits.nexp, bits.nmant)
    if bits.nexp == widest.nexp:
        return rounded
    # reduce_precision replaces subnormal numbers by 0, which would also cut small gradients.
    step = bits.smallest_subnormal.astype(wide.dtype)
    small = jnp.round(wide / step) * step
    return jnp.where(jnp.abs(wide) < bits.smallest_normal.astype(wide.dtype), small, rounded)


@_rounded.defjvp
def _rounded_jvp(dtype, primals, tangents):
    return _rounded(primals[0], dtype), tangents[0]


def _mean(values: jax.Array, names: Sequence[str]) -> jax.Array:
    """Returns the mean [..., 1] over features that the mesh axes `names` split into equal parts."""
    mean = jnp.mean(values, axis=-1, keepdims=True)
    return jax.lax.pmean(mean, tuple(names)) if names else mean


class Gradients(NamedTuple):
    """Results of `gradients`; None for those of absent operands."""

    x: jax.Array
    residual: jax.Array | None
    """Gradient of the residual; None if it equals the gradient of x."""
    scale: jax.Array | None
    bias: jax.Array | None
    pre_bias: jax.Array | None
    gate: jax.Array | None


def gradient(
    dy: jax.Array,
    dnext_residual: jax.Array | None,
    h: jax.Array,
    mean: jax.Array | None,
    rstd: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    pre_bias: jax.Array | None,
    **keywords: Any,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None, jax.Array | None]:
    """Returns (dx, dscale, dbias, dpre_bias) of `gradients` for a norm without a gate."""
    vectors = (scale, bias, pre_bias, None)
    found = gradients(dy, dnext_residual, h, mean, rstd, None, *vectors, **keywords)
    return found.x, found.scale, found.bias, found.pre_bias


def gradients(
    dy: jax.Array,
    dnext_residual: jax.Array | None,
    h: jax.Array,
    mean: jax.Array | None,
    rstd: jax.Array,
    x: jax.Array | None,
    scale: jax.Array | None,
    bias: jax.Array | None,
    pre_bias: jax.Array | None,
    gate: jax.Array | None,
    *,
    segments: int,
    subtract_mean: bool,
    epsilon: float,
    scale_offset: float,
    pre_activation: str | None,
    activation: str | None,
    round_before_scale: bool = False,
    names: Sequence[str] = (),
) -> Gradients:
    """Returns the gradients of x [rows, D] and of the vectors from the arrays that the forward saved.

    With `dnext_residual`, h is the next residual; without it, h is x, to which pre_bias is still to be
    added. The vectors are [D], or [segments, D] for equal runs of rows; their gradients are float32
    [segments, D]. Only a gate needs `x`. `names` are those of `norm_and_statistics`.
    """
    del epsilon
    wide = accumulator_dtype(h.dtype)
    runs = (segments, len(h) // max(1, segments))

    def in_runs(array):
        return None if array is None else array.reshape(*runs, *array.shape[1:]).astype(wide)

    total, rstd, mean, dz = in_runs(h), in_runs(rstd), in_runs(mean), in_runs(dy)
    if pre_bias is not None and dnext_residual is None:
        total = total + along_last_axis(pre_bias, total)
    u, slope_of_pre_activation = value_and_slope(pre_activation, total)
    if mean is not None:
        u = u - mean[..., None]
    normalised = u * rstd[..., None]
    scaled = _rounded(normalised, dy.dtype) if round_before_scale else normalised
    gain = None if scale is None else along_last_axis(scale, total) + scale_offset
    if activation is not None:
        z = scaled if gain is None else scaled * gain
        if bias is not None:
            z = z + along_last_axis(bias, z)
        dz = dz * value_and_slope(activation, z)[1]
    dnormalised = dz if gain is None else dz * gain
    if subtract_mean:
        projection = _mean(dnormalised * normalised, names)
        dh = dnormalised - normalised * projection - _mean(dnormalised, names)
    else:
        # The mean is taken before the factor rstd. So this sum over features does not wait for the sum
        # that gives rstd, and XLA can compute both in one kernel.
        projection = _mean(dnormalised * u, names) * rstd[..., None]
        dh = dnormalised - normalised * projection
    dh = dh * rstd[..., None] * slope_of_pre_activation
    if dnext_residual is not None:
        dh = dh + in_runs(dnext_residual)

    dx, dgate = dh, None
    if gate is not None:
        branch = in_runs(x)
        if pre_bias is not None:
            branch = branch + along_last_axis(pre_bias, branch)
        dgate = jnp.sum(dh * branch, axis=1)
        dx = dh * along_last_axis(gate, dh)

    def sum_over_rows(values, parameter):
        return None if parameter is None else jnp.sum(values, axis=1)

    return Gradients(
        dx.reshape(h.shape).astype(h.dtype),
        None if gate is None else dh.reshape(h.shape).astype(h.dtype),
        sum_over_rows(dz * scaled, scale),
        sum_over_rows(dz, bias),
        sum_over_rows(dx, pre_bias),
        dgate,
    )
