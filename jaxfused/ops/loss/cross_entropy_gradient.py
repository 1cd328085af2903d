"""Gradients of softmax_cross_entropy: by kernels in the backward or in the forward, and by XLA."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxfused.ops.loss import cross_entropy_xla
from jaxfused.ops.loss.cross_entropy_stages import Backward, Forward, Scale, joined, unpacked
from jaxfused.ops.loss.cross_entropy_xla import (
    IGNORED,
    Options,
    Pulls,
    Statistics,
    is_soft,
    losses_of,
)
from jaxfused.runtime import sharding
from jaxfused.runtime.kernel_gradient import kernel_gradient
from jaxfused.runtime.runner import Runner
from jaxfused.runtime.stated_gradient import stated_gradient


def aligned(logits, classes, soft, coefficients=None):
    """Reshards logits [..., V], classes [...], soft labels [..., V] and coefficients [...] alike.

    Under Explicit mesh axes a custom_vjp needs the same sharding of their leading axes. V is not
    split.
    """
    rows = sharding.leading_axes(logits.ndim - 1)
    return sharding.align(
        (logits, classes, soft, coefficients),
        operand_axes=(rows + "v", rows, rows + "v", rows),
        whole="v",
    )


def aligned_statistics(run: Runner | None, options, logits, classes, soft) -> Statistics:
    """Returns the `Statistics` of logits [..., V], with a gradient; by XLA if `run` is None."""
    logits, classes, soft, _ = aligned(logits, classes, soft)
    if run is None:
        return _reference_statistics(options, logits, classes, soft)
    return _statistics(run, options, logits, classes, soft)


class _StatisticsResiduals(NamedTuple):
    logits: jax.Array
    classes: jax.Array | None
    soft: jax.Array | None
    statistics: Statistics


@functools.partial(kernel_gradient, nondiff_argnums=(0, 1), op="softmax_cross_entropy")
def _statistics(run: Runner, options: Options, logits, classes, soft) -> Statistics:
    _, statistics = run(Forward(options), logits, classes, soft, None)
    return unpacked(statistics)


def _statistics_fwd(run: Runner, options: Options, logits, classes, soft):
    statistics = _statistics(run, options, logits, classes, soft)
    return statistics, _StatisticsResiduals(logits, classes, soft, statistics)


def pulls_on_rows(cotangents: Statistics, statistics: Statistics, columns: int) -> Pulls:
    """Returns `Pulls`, coefficients of the logits' gradient, from the cotangents of `Statistics`.

    `columns` is the number of classes. JAX's zeros for an unused statistic are replicated on all
    devices, but `jnp.stack` takes arrays of one sharding. So a zero that is sharded like the rows
    is added to each.
    """
    zero = (jnp.isnan(statistics.maximum) & False).astype(statistics.maximum.dtype)
    pulls = cotangents.log_sum, -cotangents.picked, -cotangents.mean / columns
    return Pulls(*(pull + zero for pull in pulls))


def _statistics_bwd(
    run: Runner, options: Options, saved: _StatisticsResiduals, cotangents: Statistics
):
    logits, classes, soft, statistics = saved
    pulls = pulls_on_rows(cotangents, statistics, logits.shape[-1])
    packed = (jnp.stack(statistics, axis=-1), jnp.stack(pulls, axis=-1))
    (dlogits,) = run(Backward(options.logits_soft_cap), logits, classes, soft, *packed)
    return dlogits.astype(logits.dtype), None, _gradient_of_labels(options, saved, cotangents)


def _gradient_of_labels(
    options: Options, saved: _StatisticsResiduals, cotangents: Statistics
) -> jax.Array | None:
    if saved.soft is None:
        return None
    values = cross_entropy_xla.capped(saved.logits, options.logits_soft_cap)
    distances = values - saved.statistics.maximum[..., None]
    dsoft = cotangents.picked[..., None] * distances + cotangents.total[..., None]
    return dsoft.astype(saved.soft.dtype)


_statistics.defvjp(_statistics_fwd, _statistics_bwd)


class _AheadResiduals(NamedTuple):
    dlogits: jax.Array
    coefficients: jax.Array
    of_labels: tuple[jax.Array, jax.Array, Statistics] | None
    """(logits, soft labels, statistics) for the soft labels' gradient; None for integer labels."""


@functools.partial(kernel_gradient, nondiff_argnums=(0, 1), op="softmax_cross_entropy")
def losses_ahead(run: Runner, options: Options, logits, classes, soft, coefficients):
    """Returns the losses [...]; under differentiation, the forward also computes dlogits."""
    del coefficients
    _, statistics = run(Forward(options), logits, classes, soft, None)
    return losses_of_rows(statistics, classes, options)


def _losses_ahead_fwd(run: Runner, options: Options, logits, classes, soft, coefficients):
    dlogits, statistics = run(Forward(options), logits, classes, soft, coefficients)
    of_labels = None if soft is None else (logits, soft, unpacked(statistics))
    losses = losses_of_rows(statistics, classes, options)
    return losses, _AheadResiduals(dlogits, coefficients, of_labels)


def _losses_ahead_bwd(run: Runner, options: Options, saved: _AheadResiduals, dlosses):
    (dlogits,) = run(Scale(), saved.dlogits, corrections(dlosses, saved.coefficients))
    dsoft = None
    if saved.of_labels is not None:
        dsoft = cross_entropy_xla.label_gradients(*saved.of_labels, dlosses, options)
    return dlogits, None, dsoft, None


losses_ahead.defvjp(_losses_ahead_fwd, _losses_ahead_bwd)


def corrections(cotangents: jax.Array, expected: jax.Array) -> jax.Array:
    """Returns cotangents / expected; 1 where only rounding differs or the expected one is 0."""
    expects_none = expected == 0.0
    factors = jnp.where(expects_none, 1.0, cotangents / jnp.where(expects_none, 1.0, expected))
    return jnp.where(jnp.abs(factors - 1.0) < 2.0**-21, 1.0, factors)


def losses_of_rows(statistics: jax.Array, classes: jax.Array | None, options: Options) -> jax.Array:
    """Returns the losses of rows from their statistics [..., 5], the array that kernels write."""
    counts = jnp.ones(statistics.shape[:-1], bool) if classes is None else classes != IGNORED
    return losses_of(unpacked(statistics), counts, options)


# --- gradient of the reference --------------------------------------------------------------------


@functools.partial(stated_gradient, nondiff_argnums=(0,))
def _reference_statistics(options: Options, logits, classes, soft) -> Statistics:
    return cross_entropy_xla.row_statistics(logits, joined(classes, soft), options)


def _reference_statistics_fwd(options: Options, logits, classes, soft):
    statistics = cross_entropy_xla.row_statistics(logits, joined(classes, soft), options)
    return statistics, _StatisticsResiduals(logits, classes, soft, statistics)


def _reference_statistics_bwd(
    options: Options, saved: _StatisticsResiduals, cotangents: Statistics
):
    logits, statistics = saved.logits, saved.statistics
    dlogits = cross_entropy_xla.row_gradients(
        logits,
        joined(saved.classes, saved.soft),
        statistics,
        pulls_on_rows(cotangents, statistics, logits.shape[-1]),
        options.logits_soft_cap,
    )
    return dlogits.astype(logits.dtype), None, _gradient_of_labels(options, saved, cotangents)


_reference_statistics.defvjp(_reference_statistics_fwd, _reference_statistics_bwd)


class _Residuals(NamedTuple):
    logits: jax.Array
    labels: jax.Array
    statistics: Statistics


@functools.partial(stated_gradient, nondiff_argnums=(0,))
def reference_losses(options: Options, logits, labels):
    """Returns the losses [...] by XLA."""
    return cross_entropy_xla.token_losses(logits, labels, options)[0]


def _reference_losses_fwd(options: Options, logits, labels):
    losses, statistics = cross_entropy_xla.token_losses(logits, labels, options)
    return losses, _Residuals(logits, labels, statistics)


def _reference_losses_bwd(options: Options, saved: _Residuals, dlosses):
    args = (*saved, dlosses, options)
    dlogits = cross_entropy_xla.token_gradients(*args).astype(saved.logits.dtype)
    soft = is_soft(saved.labels)
    return dlogits, cross_entropy_xla.label_gradients(*args) if soft else None


reference_losses.defvjp(_reference_losses_fwd, _reference_losses_bwd)
