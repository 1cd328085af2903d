"""segmentation_loss in plain jax.numpy: cross-entropy and Dice of each image, from one softmax."""

import jax
import jax.numpy as jnp

from jaxfused.reference.cross_entropy import (
    Options,
    binary_token_losses,
    counted,
    token_losses,
)
from jaxfused.reference.promotion import accumulator_dtype


def image_losses(
    logits: jax.Array,
    labels: jax.Array,
    weights: jax.Array | None,
    *,
    cross_entropy_weight: float,
    dice_weight: float,
    smooth: float,
    ignore_index: int | None,
) -> jax.Array:
    """Returns one loss for each image, [B], from logits [B, ...] (binary) or [B, ..., C]."""
    logits = logits.astype(accumulator_dtype(logits.dtype))
    if logits.ndim == labels.ndim:
        counts = jnp.ones(labels.shape, bool) if ignore_index is None else labels != ignore_index
        targets = jnp.where(counts, labels.astype(logits.dtype), 0.0)
        losses = binary_token_losses(logits, targets)
        probabilities, targets = jax.nn.sigmoid(logits)[..., None], targets[..., None]
    else:
        options = Options(ignore_index=ignore_index)
        counts = counted(labels, options)
        losses, statistics = token_losses(logits, labels, options)
        probabilities = jnp.exp(statistics.log_probabilities(logits))
        targets = jax.nn.one_hot(labels, logits.shape[-1], dtype=logits.dtype)

    pixel_weights = counts.astype(logits.dtype)
    if weights is not None:
        pixel_weights = pixel_weights * weights.astype(logits.dtype)
    pixels = tuple(range(1, labels.ndim))
    total = jnp.sum(pixel_weights, pixels)
    cross_entropy = jnp.sum(pixel_weights * losses, pixels) / jnp.where(total == 0.0, 1.0, total)

    def over_pixels(values: jax.Array) -> jax.Array:
        return jnp.sum(pixel_weights[..., None] * values, pixels)

    overlap = 2.0 * over_pixels(probabilities * targets) + smooth
    dice = jnp.mean(overlap / (over_pixels(probabilities + targets) + smooth), axis=-1)
    return cross_entropy_weight * cross_entropy + dice_weight * (1.0 - dice)
