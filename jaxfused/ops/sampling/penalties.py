"""Penalties on tokens that a sequence already has, applied to its logits before anything else."""

import jax
import jax.numpy as jnp

from jaxfused.runtime.promotion import accumulator_dtype


def penalize(
    logits: jax.Array,
    tokens: jax.Array | None,
    prompt: jax.Array | None,
    repetition: jax.Array,
    presence: jax.Array,
    frequency: jax.Array,
) -> jax.Array:
    """Returns logits [..., V] in float32 (float64 for float64 logits) less their penalties.

    Args:
      tokens: integers [..., L], to which all three penalties apply; others than 0 to V - 1 are skipped.
      prompt: integers [..., P], to which only the repetition penalty applies.
      repetition: [...], divides positive logits and multiplies negative ones, once a token.
      presence: [...], is subtracted once a token.
      frequency: [...], is subtracted as often as the token came.
    """
    z = logits.astype(accumulator_dtype(logits.dtype))
    counts = _counts(tokens, z)
    seen = (counts > 0) | (_counts(prompt, z) > 0)
    repetition, presence, frequency = (
        p[..., None].astype(z.dtype) for p in (repetition, presence, frequency)
    )
    z = jnp.where(seen, jnp.where(z > 0.0, z / repetition, z * repetition), z)
    z = jnp.where(counts > 0, z - presence, z)
    return z - frequency * counts.astype(z.dtype)


def _counts(tokens: jax.Array | None, logits: jax.Array) -> jax.Array:
    """Returns how often each token came, int32 [..., V]."""
    counts = jnp.zeros_like(logits, jnp.int32)
    if tokens is None:
        return counts
    words = logits.shape[-1]
    tokens = jnp.where((tokens < 0) | (tokens >= words), words, tokens)

    def of_row(counts: jax.Array, tokens: jax.Array) -> jax.Array:
        return counts.at[tokens].add(1, mode="drop")

    for _ in logits.shape[:-1]:
        of_row = jax.vmap(of_row)
    return of_row(counts, tokens)
