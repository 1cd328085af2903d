"""segmentation_loss in plain jax.numpy: sums over an image's pixels, and the loss from them."""

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxfused.ops.loss.cross_entropy_xla import Options, binary_token_losses, token_losses
from jaxfused.runtime.promotion import accumulator_dtype


@dataclass(frozen=True)
class PixelOptions:
    """Constants of the sums over pixels."""

    ignore_index: int | None = None
    focal_gamma: float = 0.0


@dataclass(frozen=True)
class LossOptions:
    """Constants with which an image's loss follows from its `Sums`."""

    cross_entropy_weight: float = 1.0
    dice_weight: float = 1.0
    smooth: float = 1.0
    tversky_alpha: float = 0.5
    tversky_beta: float = 0.5

    @property
    def tversky_rest(self) -> float:
        """Returns 1 - alpha - beta, which is exactly 0 for Dice."""
        both = self.tversky_alpha + self.tversky_beta
        return 0.0 if both == 1.0 else 1.0 - self.tversky_alpha - self.tversky_beta

    @property
    def constants(self) -> dict[str, float]:
        """Returns all constants by their names, and tversky_rest, which follows from them."""
        return asdict(self) | {"tversky_rest": self.tversky_rest}


class Sums(NamedTuple):
    """Sums over the counted pixels of each image, times the pixels' weights."""

    total: jax.Array
    """Sums [B] of the weights."""
    losses: jax.Array
    """Sums [B] of the cross-entropies, or focal losses."""
    overlap: jax.Array
    """Sums [B, C] of the class's probability over the pixels whose label is the class."""
    predicted: jax.Array
    """Sums [B, C] of each class's probability over all counted pixels."""
    present: jax.Array
    """Sums [B, C] of 1 for each pixel whose label is the class."""


SHARE_TOLERANCE = 1e-3
"""Distance by which a float label may lie below 0 or above 1, because its producer rounded it."""


def shares(labels: jax.Array, dtype: Any) -> jax.Array:
    """Returns labels as floats from 0 to 1, and NaN for other values, such as a mask's 255."""
    if labels.dtype == jnp.bool_:
        return labels.astype(dtype)
    # Integers are compared as integers, because a float of few bits would round them.
    if jnp.issubdtype(labels.dtype, jnp.integer):
        is_share = (labels == 0) | (labels == 1)
    else:
        is_share = (labels >= -SHARE_TOLERANCE) & (labels <= 1.0 + SHARE_TOLERANCE)
    return jnp.where(is_share, labels.astype(dtype), jnp.nan)


def image_sums(
    logits: jax.Array, labels: jax.Array, weights: jax.Array | None, options: PixelOptions
) -> Sums:
    """Returns the sums of logits [B, ...] (binary, C = 1) or [B, ..., C]."""
    logits = logits.astype(accumulator_dtype(logits.dtype))
    binary = logits.ndim == labels.ndim
    ignored = options.ignore_index
    counts = jnp.ones(labels.shape, bool) if ignored is None else labels != ignored
    # Pixels that do not count add 0, even where their logits are NaN.
    logits = jnp.where(counts if binary else counts[..., None], logits, 0.0)
    if binary:
        targets = jnp.where(counts, shares(labels, logits.dtype), 0.0)
        losses = binary_token_losses(logits, targets)
        probabilities = jax.nn.sigmoid(logits)[..., None]
        hits = probabilities[..., 0]
        misses = hits + targets - 2.0 * hits * targets
        targets = targets[..., None]
    else:
        losses, statistics = token_losses(logits, labels, Options(ignore_index=ignored))
        probabilities = jnp.exp(statistics.log_probabilities(logits))
        targets = jax.nn.one_hot(labels, logits.shape[-1], dtype=logits.dtype)
        misses = 1.0 - jnp.exp(-losses)
    if options.focal_gamma:
        # The derivative of the power is undefined at base 0, so that 1 replaces the base there.
        hits_wholly = misses <= 0.0
        factors = jnp.where(hits_wholly, 1.0, misses) ** options.focal_gamma
        losses = jnp.where(hits_wholly, 0.0, factors * losses)

    pixel_weights = counts.astype(logits.dtype)
    if weights is not None:
        pixel_weights = pixel_weights * weights.astype(logits.dtype)
    pixels = tuple(range(1, labels.ndim))

    def over_pixels(values: jax.Array) -> jax.Array:
        return jnp.sum(pixel_weights[..., None] * values, pixels)

    return Sums(
        jnp.sum(pixel_weights, pixels),
        jnp.sum(pixel_weights * losses, pixels),
        over_pixels(probabilities * targets),
        over_pixels(probabilities),
        over_pixels(targets),
    )


def losses_of(sums: Sums, options: LossOptions) -> jax.Array:
    """Returns one loss for each image, [B]."""
    cross_entropy = sums.losses / jnp.where(sums.total == 0.0, 1.0, sums.total)
    overlap = 2.0 * sums.overlap
    # The false alarms are predicted - overlap and the misses present - overlap.
    below = 2.0 * (options.tversky_alpha * sums.predicted + options.tversky_beta * sums.present)
    if options.tversky_rest:
        below = below + options.tversky_rest * overlap
    index = jnp.mean((overlap + options.smooth) / (below + options.smooth), axis=-1)
    return options.cross_entropy_weight * cross_entropy + options.dice_weight * (1.0 - index)
