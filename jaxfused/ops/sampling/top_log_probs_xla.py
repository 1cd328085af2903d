"""Log-probabilities of one token and of the most likely ones of each row, in jax.numpy."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jaxfused.ops.sampling.sample_xla import NONE, row_of


@functools.partial(jax.jit, static_argnames="count")
def top_log_probs(
    logits: jax.Array, tokens: jax.Array, *, count: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns log-probabilities of tokens int32 [...] and of the `count` likeliest, and these tokens.

    Invalid tokens, and rows without a distribution, have NaN; the tokens of such rows are `NONE`.
    """
    row = row_of(logits, jnp.ones_like(logits[..., 0], jnp.float32))
    exists = row.total > 0.0
    log_total = jnp.where(exists, jnp.log(row.total), jnp.nan)
    is_token = (tokens >= 0) & (tokens < logits.shape[-1])
    at = jnp.where(is_token, tokens, 0)[..., None]
    chosen = jnp.take_along_axis(row.exponents, at, axis=-1)[..., 0] - log_total
    _, top_tokens = lax.top_k(row.logits, count)
    top = jnp.take_along_axis(row.exponents, top_tokens, axis=-1) - log_total[..., None]
    return (
        jnp.where(is_token, chosen, jnp.nan),
        top,
        jnp.where(exists[..., None], top_tokens.astype(jnp.int32), NONE),
    )
