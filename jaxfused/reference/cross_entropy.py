"""The cross-entropy of one token and its gradient, and both over the logits of a linear layer.

The formula is stated here once; softmax_cross_entropy, linear_softmax_cross_entropy and
segmentation_loss are built from it.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxfused.reference.linear import affine
from jaxfused.reference.product import product
from jaxfused.reference.promotion import accumulator_dtype


@dataclass(frozen=True)
class Options:
    """The constants of a cross-entropy."""

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    ignore_index: int | None = None


class Normalizer(NamedTuple):
    """The two numbers [...] that turn logits into log-probabilities.

    They are kept apart instead of added, because subtracting a sum with a large maximum from a large
    logit would leave few correct digits.
    """

    maximum: jax.Array
    log_sum: jax.Array
    """The logarithm of the sum of exp(logits - maximum)."""

    def log_probabilities(self, logits: jax.Array) -> jax.Array:
        return logits - self.maximum[..., None] - self.log_sum[..., None]

    def lse(self) -> jax.Array:
        return self.maximum + self.log_sum


def is_soft(labels: jax.Array) -> bool:
    """Whether labels are distributions over the classes, rather than one class for each token."""
    return jnp.issubdtype(labels.dtype, jnp.floating)


def counted(labels: jax.Array, options: Options) -> jax.Array:
    """Returns which tokens count, [...]: all but those whose label is `ignore_index`."""
    if options.ignore_index is None or is_soft(labels):
        return jnp.ones(labels.shape[: labels.ndim - is_soft(labels)], bool)
    return labels != options.ignore_index


def _classes(labels: jax.Array, options: Options) -> jax.Array:
    """Returns the labels as classes, with the first class for tokens that do not count.

    The losses of such tokens are replaced by 0 later. They must not be NaN before that, because
    `jax_debug_nans` would report them.
    """
    return jnp.where(counted(labels, options), labels, 0)


def token_losses(
    logits: jax.Array, labels: jax.Array, options: Options
) -> tuple[jax.Array, Normalizer]:
    """Returns the losses [...] of logits [..., V], and the normalizer of the logits.

    The loss of a token that does not count is 0, and the loss for a class that does not exist is NaN.
    """
    logits = logits.astype(accumulator_dtype(logits.dtype))
    maximum = jax.lax.stop_gradient(jnp.max(logits, axis=-1))
    log_sum = jnp.log(jnp.sum(jnp.exp(logits - maximum[..., None]), axis=-1))
    normalizer = Normalizer(maximum, log_sum)
    log_probabilities = normalizer.log_probabilities(logits)
    if is_soft(labels):
        losses = -_weighted_sum(labels.astype(logits.dtype), log_probabilities)
    else:
        # A class that does not exist gives NaN, including negative ones, which would index from the end.
        classes = _classes(labels, options)
        classes = jnp.where(classes < 0, logits.shape[-1], classes)[..., None]
        losses = -jnp.take_along_axis(log_probabilities, classes, -1, mode="fill")[..., 0]
    if options.label_smoothing:
        smoothing = options.label_smoothing
        losses = (1.0 - smoothing) * losses - smoothing * jnp.mean(log_probabilities, axis=-1)
    if options.z_loss:
        losses = losses + options.z_loss * jnp.square(normalizer.lse())
    return jnp.where(counted(labels, options), losses, 0.0), normalizer


def token_gradients(
    logits: jax.Array,
    labels: jax.Array,
    normalizer: Normalizer,
    dlosses: jax.Array,
    options: Options,
) -> jax.Array:
    """Returns the gradient of `sum(dlosses * losses)` to logits, in float32."""
    logits = logits.astype(accumulator_dtype(logits.dtype))
    features, smoothing = logits.shape[-1], options.label_smoothing
    if is_soft(labels):
        targets = labels.astype(logits.dtype)
        total = jnp.sum(targets, axis=-1)
    else:
        classes = _classes(labels, options)
        targets = jax.nn.one_hot(classes, features, dtype=logits.dtype)
        missing = (classes < 0) | (classes >= features)
        # A literal NaN would be reported by `jax_debug_nans` even where no class is missing.
        total = jnp.sqrt(jnp.where(missing, -1.0, 1.0).astype(logits.dtype))
    if smoothing:
        targets = (1.0 - smoothing) * targets + smoothing / features
        total = (1.0 - smoothing) * total + smoothing
    pull = (total + 2.0 * options.z_loss * normalizer.lse())[..., None]
    dlogits = pull * jnp.exp(normalizer.log_probabilities(logits)) - targets
    return jnp.where(counted(labels, options)[..., None], dlosses[..., None] * dlogits, 0.0)


def label_gradients(
    logits: jax.Array,
    labels: jax.Array,
    normalizer: Normalizer,
    dlosses: jax.Array,
    options: Options,
) -> jax.Array:
    """Returns the gradient of `sum(dlosses * losses)` to soft labels, in their dtype."""
    log_probabilities = normalizer.log_probabilities(logits.astype(accumulator_dtype(logits.dtype)))
    dlabels = -(1.0 - options.label_smoothing) * dlosses[..., None] * log_probabilities
    return dlabels.astype(labels.dtype)


def linear_token_losses(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    labels: jax.Array,
    options: Options,
    chunk_size: int,
) -> tuple[jax.Array, Normalizer]:
    """Returns `token_losses` [N] of x @ w + bias, of which `chunk_size` rows exist at a time."""

    def losses_of_chunk(_, chunk):
        x, labels = chunk
        return None, token_losses(affine(x, w, bias, precision=None), labels, options)

    _, results = jax.lax.scan(losses_of_chunk, None, _split((x, labels), chunk_size))
    return _join(results, len(x))


def linear_token_gradients(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    labels: jax.Array,
    normalizer: Normalizer,
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
        x, labels, normalizer, dlosses = chunk
        logits = affine(x, w, bias, precision=None)
        dlogits = token_gradients(logits, labels, normalizer, dlosses, options)
        dw, dbias = sums
        dx = product("nv,dv->nd", dlogits, w, dtype=x.dtype).astype(x.dtype)
        dw = dw + product("nd,nv->dv", x, dlogits, dtype=x.dtype)
        dbias = None if dbias is None else dbias + jnp.sum(dlogits, axis=0)
        soft = is_soft(labels)
        dlabels = label_gradients(logits, labels, normalizer, dlosses, options) if soft else None
        return (dw, dbias), (dx, dlabels)

    sums = jax.tree.map(lambda a: jnp.zeros(a.shape, compute_dtype), (w, bias))
    chunks = _split((x, labels, normalizer, dlosses), chunk_size)
    (dw, dbias), rows = jax.lax.scan(gradients_of_chunk, sums, chunks)
    dx, dlabels = _join(rows, len(x))
    return dx, dw.astype(w.dtype), None if bias is None else dbias.astype(bias.dtype), dlabels


def _split(rows, chunk_size: int):
    """Reshapes [N, ...] to [chunks, chunk_size, ...]; rows of zeros fill the last chunk."""

    def split(a):
        filling = -len(a) % chunk_size
        a = jnp.pad(a, [(0, filling)] + [(0, 0)] * (a.ndim - 1))
        return a.reshape(len(a) // chunk_size, chunk_size, *a.shape[1:])

    return jax.tree.map(split, rows)


def _join(chunks, rows: int):
    """Reshapes [chunks, chunk_size, ...] to [N, ...], without the rows that filled the last chunk."""
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:])[:rows], chunks)


def _weighted_sum(weights: jax.Array, values: jax.Array) -> jax.Array:
    """Returns the weighted sum over the last axis; a weight of 0 cancels even an infinite value."""
    return jnp.sum(jnp.where(weights == 0, 0.0, weights * values), axis=-1)


def binary_token_losses(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Returns the cross-entropy of classes with logits 0 and `logits`, the latter's share `targets`."""
    return jax.nn.softplus(logits) - targets * logits
