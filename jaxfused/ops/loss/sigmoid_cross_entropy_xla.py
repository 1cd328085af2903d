"""sigmoid_cross_entropy in plain jax.numpy: the binary cross-entropy, and its focal form."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxfused.ops.loss.cross_entropy_xla import binary_token_losses
from jaxfused.ops.loss.segmentation_loss_xla import shares
from jaxfused.runtime.promotion import accumulator_dtype


@dataclass(frozen=True)
class Options:
    """Constants of the loss."""

    label_smoothing: float = 0.0
    focal_gamma: float = 0.0
    focal_alpha: float | None = None


def losses(logits: jax.Array, labels: jax.Array, options: Options) -> jax.Array:
    """Returns the losses [...] of logits and labels [...], in float32.

    The gradient saves only logits and labels, and recomputes the rest.
    """

    def remade(logits: jax.Array, labels: jax.Array) -> jax.Array:
        logits = logits.astype(accumulator_dtype(logits.dtype))
        targets = shares(labels, logits.dtype)
        if options.label_smoothing:
            targets = (1.0 - options.label_smoothing) * targets + 0.5 * options.label_smoothing
        result = binary_token_losses(logits, targets)
        if options.focal_gamma:
            hits = jax.nn.sigmoid(logits)
            misses = hits + targets - 2.0 * hits * targets
            # The derivative of the power is undefined at base 0, so that 1 replaces the base there.
            hits_wholly = misses <= 0.0
            factors = jnp.where(hits_wholly, 1.0, misses) ** options.focal_gamma
            result = jnp.where(hits_wholly, 0.0, factors * result)
        if options.focal_alpha is not None:
            alpha = options.focal_alpha
            result = (alpha * targets + (1.0 - alpha) * (1.0 - targets)) * result
        return result

    return jax.checkpoint(remade)(logits, labels)
