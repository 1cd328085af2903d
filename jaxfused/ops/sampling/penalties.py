"""Penalties on tokens that a sequence already has, applied to its logits before the temperature."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfused.ops.sampling.row_options import of_rows
from jaxfused.runtime import sharding
from jaxfused.runtime.checks import as_int32
from jaxfused.runtime.promotion import accumulator_dtype


def penalized(
    op: str,
    logits: jax.Array,
    tokens: Any,
    prompt: Any,
    repetition: Any,
    presence: Any,
    frequency: Any,
) -> jax.Array:
    """Returns the logits less the penalties, or the logits themselves without penalties."""
    rows = logits.shape[:-1]
    named = {
        "repetition_penalty": repetition,
        "presence_penalty": presence,
        "frequency_penalty": frequency,
    }
    given = [name for name, value in named.items() if value is not None]
    histories = dict(tokens=tokens, prompt=prompt)
    if not given or all(history is None for history in histories.values()):
        for name in given:
            of_rows(op, name, named[name], rows, *_penalty_limits(name))
            raise ValueError(
                f"{op}: {name} was passed without tokens, which it is for; pass tokens=, the tokens of"
                " each sequence so far, or leave the penalty out."
            )
        return logits
    tokens, prompt = (_history(op, name, history, rows) for name, history in histories.items())
    penalties = [
        of_rows(op, name, _neutral(name) if value is None else value, rows, *_penalty_limits(name))
        for name, value in named.items()
    ]
    letters = sharding.leading_axes(len(rows), "vhq")
    axes = (letters + "v", letters + "h", letters + "q", *[letters] * len(penalties))
    operands: Any = sharding.align(
        (logits, tokens, prompt, *penalties), operand_axes=axes, whole="vhq"
    )
    return _less_penalties(*operands)


def _neutral(name: str) -> float:
    return 1.0 if name == "repetition_penalty" else 0.0


def _penalty_limits(name: str) -> tuple[float, float]:
    smallest = float(np.finfo(np.float32).tiny)
    return (smallest, math.inf) if name == "repetition_penalty" else (-math.inf, math.inf)


def _history(op: str, name: str, tokens: Any, rows: tuple[int, ...]) -> jax.Array | None:
    """Returns the tokens of each row, after a check of their shape and dtype."""
    if tokens is None:
        return None
    tokens = as_int32(tokens)
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(f"{op}: {name} has dtype {tokens.dtype}; pass integers.")
    if tokens.ndim != len(rows) + 1 or tokens.shape[:-1] != rows:
        raise ValueError(
            f"{op}: {name} has shape {tokens.shape}, but there are rows of shape {rows}; pass"
            f" {name} of shape {(*rows, 'length')}, filled up with -1."
        )
    return tokens


def _less_penalties(
    logits: jax.Array,
    tokens: jax.Array | None,
    prompt: jax.Array | None,
    repetition: jax.Array,
    presence: jax.Array,
    frequency: jax.Array,
) -> jax.Array:
    """Returns logits [..., V] in float32 (float64 for float64 logits) less their penalties.

    Args:
      tokens: integers [..., L] with all three penalties; those outside 0 to V - 1 are skipped.
      prompt: integers [..., P] with the repetition penalty alone.
      repetition: [...], divides positive logits and multiplies negative ones, once for each token that
        occurs.
      presence: [...], is subtracted once for each token that occurs.
      frequency: [...], is subtracted once for each time that the token occurs.
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
    """Returns the number of times that each token occurs, int32 [..., V]."""
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
