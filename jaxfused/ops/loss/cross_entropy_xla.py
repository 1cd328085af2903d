"""Cross-entropy of one token and its gradient, and both over the logits of a linear layer.

Each row of logits is reduced to five numbers (`Statistics`), from which its loss follows. Loss and
gradient are defined only here: softmax_cross_entropy, linear_softmax_cross_entropy and segmentation_loss
use them with XLA, and around kernels too.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxfused.ops.linear.linear_xla import affine
from jaxfused.runtime.product_xla import product
from jaxfused.runtime.promotion import accumulator_dtype

IGNORED = -1
ELSEWHERE = -2
"""Values in place of a class index: for a token that does not count, and for a class whose logits are on
another device."""


@dataclass(frozen=True)
class Options:
    """Constants of a cross-entropy."""

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    ignore_index: int | None = None
    logits_soft_cap: float | None = None


class Statistics(NamedTuple):
    """Statistics of rows of (capped) logits, [...] each, from which the rows' losses follow.

    `log_sum`, `picked` and `mean` are of logits - maximum, because the difference of a large logit and a
    large sum would cancel. The maximum has no gradient: the loss does not depend on it.
    """

    maximum: jax.Array
    log_sum: jax.Array
    """Logarithm of the sum of exp(logits - maximum)."""
    picked: jax.Array
    """Sum of labels * (logits - maximum): for integer labels, the label's logit - maximum."""
    mean: jax.Array
    """Mean of logits - maximum over the classes; 0 without label smoothing, its only use."""
    total: jax.Array
    """Sum of the labels: 1 for a class; 0 for a class on another device."""

    def log_probabilities(self, logits: jax.Array) -> jax.Array:
        """Returns the logarithms of the softmax of logits that are already capped."""
        return logits - self.maximum[..., None] - self.log_sum[..., None]

    def lse(self) -> jax.Array:
        """Returns the logarithm of the sum of exp(logits)."""
        return self.maximum + self.log_sum


class Pulls(NamedTuple):
    """Coefficients of the gradients of rows of logits, [...] each: cotangents of `Statistics`."""

    pull: jax.Array
    """Cotangent of `log_sum`, which multiplies the softmax."""
    push: jax.Array
    """Negative cotangent of `picked`, which multiplies the labels."""
    spread: jax.Array
    """Negative cotangent of `mean`, divided by the number of classes."""


def is_soft(labels: jax.Array) -> bool:
    """Returns whether labels are distributions over the classes, and not one class for each token."""
    return jnp.issubdtype(labels.dtype, jnp.floating)


def counted(labels: jax.Array, options: Options) -> jax.Array:
    """Returns a mask [...] of the tokens that count: all but those whose label is `ignore_index`."""
    if options.ignore_index is None or is_soft(labels):
        return jnp.ones(labels.shape[: labels.ndim - is_soft(labels)], bool)
    return labels != options.ignore_index


def classes_of(labels: jax.Array, features: int, options: Options) -> jax.Array:
    """Returns integer labels as classes from 0, `IGNORED`, or `features` for labels out of range."""
    missing = (labels < 0) | (labels >= features)
    classes = jnp.where(missing, features, labels).astype(jnp.int32)
    return jnp.where(counted(labels, options), classes, IGNORED)


def capped(logits: jax.Array, cap: float | None) -> jax.Array:
    """Returns logits in float32 (float64), within (-cap, cap) by tanh if there is a cap."""
    logits = logits.astype(accumulator_dtype(logits.dtype))
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def row_statistics(logits: jax.Array, labels: jax.Array, options: Options) -> Statistics:
    """Returns the statistics of logits [..., V] for soft labels or classes (`classes_of` labels)."""
    logits = capped(logits, options.logits_soft_cap)
    lowest = jnp.finfo(logits.dtype).min
    # The maximum is at least the finite `lowest`: if all logits are -inf, logits - maximum is -inf,
    # not NaN.
    maximum = jax.lax.stop_gradient(jnp.maximum(jnp.max(logits, axis=-1), lowest))
    distances = logits - maximum[..., None]
    log_sum = jnp.log(jnp.sum(jnp.exp(distances), axis=-1))
    if is_soft(labels):
        shares = labels.astype(logits.dtype)
        picked, total = _weighted_sum(shares, distances), jnp.sum(shares, axis=-1)
    else:
        # A missing class gives NaN. A token that does not count must give none, because
        # `jax_debug_nans` would report a NaN although 0 replaces the token's loss later.
        is_here = labels >= 0
        place = jnp.where(is_here, labels, 0)[..., None]
        picked = jnp.take_along_axis(distances, place, -1, mode="fill")[..., 0]
        picked, total = jnp.where(is_here, picked, 0.0), is_here.astype(logits.dtype)
    mean = jnp.mean(distances, axis=-1) if options.label_smoothing else jnp.zeros_like(picked)
    return Statistics(maximum, log_sum, picked, mean, total)


def losses_of(statistics: Statistics, counts: jax.Array, options: Options) -> jax.Array:
    """Returns the losses [...] of rows with these statistics; those of rows that do not count are 0."""
    losses = statistics.total * statistics.log_sum - statistics.picked
    if options.label_smoothing:
        smoothing = options.label_smoothing
        uniform = statistics.log_sum - statistics.mean
        losses = (1.0 - smoothing) * losses + smoothing * uniform
    if options.z_loss:
        losses = losses + options.z_loss * jnp.square(statistics.lse())
    return jnp.where(counts, losses, 0.0)


def pulls_of(statistics: Statistics, dlosses: jax.Array, features: int, options: Options) -> Pulls:
    """Returns the coefficients for the gradient of `sum(dlosses * losses_of(statistics))`."""
    smoothing = options.label_smoothing
    total = (1.0 - smoothing) * statistics.total + smoothing
    return Pulls(
        dlosses * (total + 2.0 * options.z_loss * statistics.lse()),
        dlosses * (1.0 - smoothing),
        dlosses * (smoothing / features),
    )


def row_gradients(
    logits: jax.Array, labels: jax.Array, statistics: Statistics, pulls: Pulls, cap: float | None
) -> jax.Array:
    """Returns the gradient to logits [..., V] in float32, from the coefficients of each row."""
    values = capped(logits, cap)
    features = logits.shape[-1]
    pull = pulls.pull[..., None]
    # If a device's logits of a row are all -inf, pull is 0 and log_sum -inf: their product would be
    # NaN.
    gradients = jnp.where(pull == 0.0, 0.0, pull * jnp.exp(statistics.log_probabilities(values)))
    if is_soft(labels):
        targets = labels.astype(values.dtype)
    else:
        targets = jax.nn.one_hot(labels, features, dtype=values.dtype)
    gradients = gradients - pulls.push[..., None] * targets - pulls.spread[..., None]
    if cap is not None:
        gradients = gradients * (1.0 - jnp.square(values / cap))
    if is_soft(labels):
        return gradients
    # The square root of -1 is NaN only where a class is missing; `jax_debug_nans` would report a
    # literal NaN anywhere.
    missing = labels >= features
    gradients = gradients * jnp.sqrt(jnp.where(missing, -1.0, 1.0).astype(values.dtype))[..., None]
    return jnp.where((labels == IGNORED)[..., None], 0.0, gradients)


def token_losses(
    logits: jax.Array, labels: jax.Array, options: Options
) -> tuple[jax.Array, Statistics]:
    """Returns the losses [...] of logits [..., V], and the statistics of the logits.

    The loss of a token that does not count is 0, and the loss for a class that does not exist is NaN.
    """
    counts = counted(labels, options)
    statistics = row_statistics(logits, _as_classes(labels, logits.shape[-1], options), options)
    return losses_of(statistics, counts, options), statistics


def token_gradients(
    logits: jax.Array,
    labels: jax.Array,
    statistics: Statistics,
    dlosses: jax.Array,
    options: Options,
) -> jax.Array:
    """Returns the gradient of `sum(dlosses * losses)` to logits, in float32."""
    features = logits.shape[-1]
    pulls = pulls_of(statistics, dlosses, features, options)
    classes = _as_classes(labels, features, options)
    return row_gradients(logits, classes, statistics, pulls, options.logits_soft_cap)


def label_gradients(
    logits: jax.Array,
    labels: jax.Array,
    statistics: Statistics,
    dlosses: jax.Array,
    options: Options,
) -> jax.Array:
    """Returns the gradient of `sum(dlosses * losses)` to soft labels, in their dtype."""
    log_probabilities = statistics.log_probabilities(capped(logits, options.logits_soft_cap))
    dlabels = -(1.0 - options.label_smoothing) * dlosses[..., None] * log_probabilities
    return dlabels.astype(labels.dtype)


def _as_classes(labels: jax.Array, features: int, options: Options) -> jax.Array:
    return labels if is_soft(labels) else classes_of(labels, features, options)


# This `jax.jit` compiles the loop's body once for each set of options; without it, at every call.


@functools.partial(jax.jit, static_argnums=(4, 5), inline=True)
def linear_token_losses(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    labels: jax.Array,
    options: Options,
    chunk_size: int,
) -> tuple[jax.Array, Statistics]:
    """Returns `token_losses` [N] of x @ w + bias, with logits for `chunk_size` rows at a time."""

    def losses_of_chunk(_, chunk):
        x, labels = chunk
        return None, token_losses(affine(x, w, bias, precision=None), labels, options)

    _, results = jax.lax.scan(losses_of_chunk, None, split_rows((x, labels), chunk_size))
    return _join(results, x.shape[0])


@functools.partial(jax.jit, static_argnums=(6, 7), inline=True)
def linear_token_gradients(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    labels: jax.Array,
    statistics: Statistics,
    dlosses: jax.Array,
    options: Options,
    chunk_size: int,
) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
    """Returns (dx, dw, dbias, dlabels); the logits are recomputed, `chunk_size` rows at a time.

    dw and dbias are summed over the chunks in float32. The gradient of the logits is rounded to x's
    dtype for the two products in which it is used, as in the gradient of any linear layer.
    """
    compute_dtype = accumulator_dtype(x.dtype)

    def gradients_of_chunk(sums, chunk):
        x, labels, statistics, dlosses = chunk
        logits = affine(x, w, bias, precision=None)
        dlogits = token_gradients(logits, labels, statistics, dlosses, options)
        dw, dbias = sums
        dx = product("nv,dv->nd", dlogits, w, dtype=x.dtype).astype(x.dtype)
        dw = dw + product("nd,nv->dv", x, dlogits, dtype=x.dtype)
        dbias = None if dbias is None else dbias + jnp.sum(dlogits, axis=0)
        soft = is_soft(labels)
        dlabels = label_gradients(logits, labels, statistics, dlosses, options) if soft else None
        return (dw, dbias), (dx, dlabels)

    sums = jax.tree.map(lambda a: jnp.zeros_like(a, compute_dtype), (w, bias))
    chunks = split_rows((x, labels, statistics, dlosses), chunk_size)
    (dw, dbias), rows = jax.lax.scan(gradients_of_chunk, sums, chunks)
    dx, dlabels = _join(rows, x.shape[0])
    return dx, dw.astype(w.dtype), None if bias is None else dbias.astype(bias.dtype), dlabels


def split_rows(rows, chunk_size: int):
    """Reshapes [N, ...] to [chunks, chunk_size, ...]; rows of zeros fill the last chunk."""

    def split(a):
        filling = -a.shape[0] % chunk_size
        a = jnp.pad(a, [(0, filling)] + [(0, 0)] * (a.ndim - 1))
        return a.reshape(a.shape[0] // chunk_size, chunk_size, *a.shape[1:])

    return jax.tree.map(split, rows)


def _join(chunks, rows: int):
    """Reshapes [chunks, chunk_size, ...] to [N, ...], without the rows that filled the last chunk."""
    return jax.tree.map(lambda a: jax.lax.collapse(a, 0, 2)[:rows], chunks)


def _weighted_sum(weights: jax.Array, values: jax.Array) -> jax.Array:
    """Returns the weighted sum over the last axis; a weight of 0 cancels even an infinite value."""
    return jnp.sum(jnp.where(weights == 0, 0.0, weights * values), axis=-1)


def binary_token_losses(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Returns the binary cross-entropy of logits and targets (0 to 1), element by element."""
    # For a confident correct prediction only the last term is left, without cancellation.
    return (jnp.maximum(logits, 0.0) - targets * logits) + jax.nn.softplus(-jnp.abs(logits))
