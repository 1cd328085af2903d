"""sample: validation, penalties, seeds and choice of the draw of tokens from logits."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfused import dispatch
from jaxfused.ops.sampling import sample_xla
from jaxfused.ops.sampling.penalties import penalize
from jaxfused.ops.sampling.sample_xla import Filters
from jaxfused.runtime import sharding
from jaxfused.runtime.checks import as_arrays, check_floating, python_numbers, readable_values
from jaxfused.runtime.dropout import murmur
from jaxfused.runtime.gate import reference_only
from jaxfused.runtime.promotion import accumulator_dtype

_SLACK = 2.0**-21
"""The relative rounding that a sum of probabilities may be short of top_p by and still reaches it: the
logarithms of round probabilities are not exact in float32."""


class LogProbs(NamedTuple):
    """Log-probabilities of tokens, by the logits as they were passed, in float32 (or float64)."""

    chosen: jax.Array
    """Of the tokens drawn, [...]; NaN where there is none."""
    top: jax.Array
    """The largest ones of each row, falling, [..., n]."""
    top_tokens: jax.Array
    """Their tokens, int32 [..., n]; of equal ones the lower token comes first."""


@python_numbers
def sample(
    logits: jax.Array,
    key: jax.Array | int | None = None,
    *,
    position: jax.Array | int = 0,
    temperature: jax.Array | float = 1.0,
    top_k: jax.Array | int | None = None,
    top_p: jax.Array | float | None = None,
    min_p: jax.Array | float | None = None,
    tokens: jax.Array | None = None,
    prompt: jax.Array | None = None,
    repetition_penalty: jax.Array | float | None = None,
    presence_penalty: jax.Array | float | None = None,
    frequency_penalty: jax.Array | float | None = None,
    logprobs: int | None = None,
    implementation: dispatch.Implementation | None = None,
) -> jax.Array | tuple[jax.Array, LogProbs]:
    r"""Draws a token from each row of logits, without sorting the vocabulary.

    .. math::
        z'_v &= \text{penalized}(z_v) / \text{temperature} \\
        p_v &\propto e^{z'_v} \text{ over the words that top\_k, top\_p and min\_p keep} \\
        \text{token} &= \operatorname{argmax}_v z'_v + g_v
            \text{ over these words, with Gumbel noise } g

    The order is that of transformers: penalties, temperature, top_k, top_p of what top_k keeps, min_p.
    Arithmetic and noise are in float32 whatever the logits' dtype is (float64 logits keep theirs).

    Each option is one number for all rows, or an array over the first axes of the rows, known or traced.
    A row's token depends on its own logits, key, position and options, and on nothing else in the batch.

    Args:
      logits: [..., V], any float dtype; V at least 1. -inf excludes a word.
      key: a key of `jax.random.key` or an integer seed, for all rows or an array over their first
        axes. Rows that share a key differ by their number among these rows. None where every
        temperature is known to be 0.
      position: the token's place in its sequence, or the number of the step: with the same key, each
        position has other noise.
      temperature: 0 takes the largest logit, of equal ones the lower token, without noise.
      top_k: keeps the k largest logits, of equal ones the lower tokens. 0 and None keep all; so does
        a k above V. (In transformers None stands for 50.)
      top_p: keeps the fewest words, from the largest on, whose probabilities add up to top_p or more.
        At least one is kept; 1 and None keep all. A sum that is short by a relative 5e-7, as rounding
        makes it, counts as top_p.
      min_p: keeps words with at least min_p times the largest probability. 0 and None keep all.
      tokens: integers [..., L], the tokens so far, for the penalties. What is not a token, such as
        padding by -1, is skipped; so an array of one size can serve a growing sequence.
      prompt: integers [..., P], further tokens, for the repetition penalty alone.
      repetition_penalty: divides the positive and multiplies the negative logits of tokens that came.
      presence_penalty: is subtracted from the logits of tokens that came.
      frequency_penalty: is subtracted from a token's logit as often as it came.
      logprobs: also return the log-probability of the chosen token and the `logprobs` largest ones.
      implementation: None for the fastest that can run, or "xla".

    Returns:
      The tokens, int32 [...]; with `logprobs` also `LogProbs`. They have no gradient. A row with a NaN,
      or with -inf alone, has no distribution: its token is -1. Several logits of infinity are equally
      likely.

    Raises:
      ValueError: shapes, dtypes or options do not fit, or the named implementation cannot run.
        Options that are traced cannot raise: numbers out of range then act as the nearest one within.

    Example:
      >>> import jax, jax.numpy as jnp, jaxfused
      >>> logits = jnp.log(jnp.array([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]]))
      >>> jaxfused.sample(logits, temperature=0.0).tolist()
      [0, 2]
      >>> keys = jax.vmap(jax.random.key)(jnp.array([7, 8]))  # one for each sequence
      >>> tokens = jaxfused.sample(logits, keys, position=5, top_p=jnp.array([0.9, 0.5]))
      >>> tokens.shape, int(tokens[1])
      ((2,), 2)

    Source: Holtzman et al., "The Curious Case of Neural Text Degeneration", 2020 (top-p),
    https://arxiv.org/abs/1904.09751; Nguyen et al., "Turning Up the Heat: Min-p Sampling", 2024,
    https://arxiv.org/abs/2407.01082; Keskar et al., "CTRL", 2019 (repetition penalty),
    https://arxiv.org/abs/1909.05858; Maddison et al., "A* Sampling", 2014 (Gumbel noise),
    https://arxiv.org/abs/1411.0030
    """
    op = "sample"
    (logits,) = as_arrays(logits)
    check_floating(op, dict(logits=logits))
    if logits.ndim == 0 or logits.shape[-1] == 0:
        raise ValueError(
            f"{op}: logits have shape {logits.shape}, but the last axis holds the vocabulary;"
            " pass logits of shape [..., vocabulary]."
        )
    rows = logits.shape[:-1]
    logits = lax.stop_gradient(logits)
    penalized = _penalized(
        op, logits, tokens, prompt, repetition_penalty, presence_penalty, frequency_penalty
    )
    temperature = _option(op, "temperature", temperature, rows, 0.0, math.inf)
    filters, is_filtered = _filters(op, logits, temperature, top_k, top_p, min_p)
    seeds = _seeds(op, key, position, temperature, rows)
    reference_only(op, implementation, logits)
    letters = sharding.leading_axes(len(rows), "vs")
    operands: Any = sharding.align(
        (penalized, seeds, *filters),
        operand_axes=(letters + "v", letters + "s", *(letters for _ in filters)),
        whole="vs",
    )
    penalized, seeds, *aligned = operands
    token = sample_xla.sample(penalized, seeds, Filters(*aligned), is_filtered=is_filtered)
    if logprobs is None:
        return token
    return token, _log_probs(op, logits, token, logprobs)


def _option(
    op: str, name: str, value: Any, rows: tuple[int, ...], least: float, most: float
) -> jax.Array:
    """Returns an option for each row, after a check of the values that can be read."""
    array = jnp.asarray(value)
    whole = name in ("top_k", "position")
    kind = jnp.integer if whole else jnp.number
    if not jnp.issubdtype(array.dtype, kind) or jnp.issubdtype(array.dtype, jnp.complexfloating):
        raise ValueError(
            f"{op}: {name} has dtype {array.dtype}; pass {'integers' if whole else 'real numbers'}."
        )
    if array.shape != rows[: array.ndim]:
        raise ValueError(
            f"{op}: {name} has shape {array.shape}, but it is one number, or an array over the first"
            f" axes of rows of shape {rows}; pass it in one of these shapes."
        )
    values = readable_values(array)
    if values is not None:
        inside = (values >= least) & (values <= most) & (whole | np.isfinite(values.astype(float)))
        if not inside.all():
            upper = "" if most == math.inf else f" to {most:g}"
            lower = "any" if least == -math.inf else f"{least:g}{upper or ' or more'}"
            raise ValueError(
                f"{op}: {name} is {values[~inside].flat[0]}; pass a finite number, {lower}."
            )
    array = array.astype(jnp.int32 if whole else jnp.float32)
    return jnp.broadcast_to(array.reshape(array.shape + (1,) * (len(rows) - array.ndim)), rows)


def _is_off(value: Any, off: float) -> bool:
    """Returns whether a filter is known to keep every word."""
    return value is None or (isinstance(value, (int, float, np.generic)) and bool(value == off))


def _filters(
    op: str, logits: jax.Array, temperature: jax.Array, top_k: Any, top_p: Any, min_p: Any
) -> tuple[Filters, bool]:
    """Returns the filters of each row, and whether any may leave out a word."""
    *rows, words = logits.shape
    k = _option(op, "top_k", 0 if top_k is None else top_k, tuple(rows), 0, math.inf)
    p = _option(op, "top_p", 1.0 if top_p is None else top_p, tuple(rows), 0.0, 1.0)
    m = _option(op, "min_p", 0.0 if min_p is None else min_p, tuple(rows), 0.0, 1.0)
    # The bounds keep the products with distances of 0 and infinity from being NaN.
    inverse = jnp.where(temperature > 0.0, 1.0 / jnp.clip(temperature, 1e-30, 1e30), 0.0)
    share = jnp.where(p >= 1.0, 2.0, jnp.maximum(p, 0.0) * (1.0 - _SLACK))
    smallest = jnp.finfo(jnp.float32).tiny
    least = jnp.where(m > 0.0, jnp.log(jnp.clip(m, smallest, 1.0)) - 2.0 * _SLACK, -1.0 / smallest)
    k = jnp.where((k <= 0) | (k > words), words, k)
    is_filtered = not (_is_off(top_k, 0) and _is_off(top_p, 1) and _is_off(min_p, 0))
    return Filters(inverse, share, least, k), is_filtered


def _penalized(
    op: str,
    logits: jax.Array,
    tokens: Any,
    prompt: Any,
    repetition: Any,
    presence: Any,
    frequency: Any,
) -> jax.Array:
    """Returns the logits less the penalties, or as they are if there are none."""
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
            _option(op, name, named[name], rows, *_penalty_limits(name))
            raise ValueError(
                f"{op}: {name} was passed without tokens, which it is for; pass tokens=, the tokens of"
                " each sequence so far, or leave the penalty out."
            )
        return logits
    tokens, prompt = (_history(op, name, history, rows) for name, history in histories.items())
    penalties = [
        _option(op, name, _neutral(name) if value is None else value, rows, *_penalty_limits(name))
        for name, value in named.items()
    ]
    return penalize(logits, tokens, prompt, *penalties)


def _neutral(name: str) -> float:
    return 1.0 if name == "repetition_penalty" else 0.0


def _penalty_limits(name: str) -> tuple[float, float]:
    smallest = float(np.finfo(np.float32).tiny)
    return (smallest, math.inf) if name == "repetition_penalty" else (-math.inf, math.inf)


def _history(op: str, name: str, tokens: Any, rows: tuple[int, ...]) -> jax.Array | None:
    """Returns the tokens of each row, after a check of their shape and dtype."""
    if tokens is None:
        return None
    tokens = jnp.asarray(tokens)
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(f"{op}: {name} has dtype {tokens.dtype}; pass integers.")
    if tokens.ndim != len(rows) + 1 or tokens.shape[:-1] != rows:
        raise ValueError(
            f"{op}: {name} has shape {tokens.shape}, but there are rows of shape {rows}; pass"
            f" {name} of shape {(*rows, 'length')}, filled up with -1."
        )
    return tokens.astype(jnp.int32)


def _seeds(
    op: str, key: Any, position: Any, temperature: jax.Array, rows: tuple[int, ...]
) -> jax.Array:
    """Returns the seeds uint32 [..., 2] of each row's noise, from its key, position and number."""
    position = _option(op, "position", position, rows, -math.inf, math.inf)
    if key is None:
        values = readable_values(temperature)
        if values is None or values.any():
            raise ValueError(
                f"{op}: key is None, but it is what a draw depends on; pass jax.random.key(seed), or"
                " temperature=0.0 for the largest logits."
            )
        return jnp.zeros((*rows, 2), jnp.uint32)
    words = _words_of(op, key)
    shared = words.shape[:-1]
    if shared == (*rows, 2) and jnp.asarray(key).dtype == jnp.uint32:
        raise ValueError(
            f"{op}: key has shape {shared} and dtype uint32, as the data of keys; pass"
            " jax.random.wrap_key_data(key)."
        )
    if shared != rows[: len(shared)]:
        raise ValueError(
            f"{op}: key has shape {shared}, but it is one key, or an array of keys over the first axes"
            f" of rows of shape {rows}; pass jax.random.split(key, {rows})."
        )
    inner = rows[len(shared) :]
    number = jnp.arange(math.prod(inner), dtype=jnp.uint32).reshape(inner)
    entering = [
        *(words[..., i].reshape(*shared, *(1,) * len(inner)) for i in range(words.shape[-1])),
        position.astype(jnp.uint32),
        number.reshape((1,) * len(shared) + inner),
    ]
    first = second = jnp.zeros(rows, jnp.uint32)
    for word in entering:
        first = murmur(first ^ jnp.broadcast_to(word, rows)) + jnp.uint32(0x9E3779B9)
        second = murmur(second ^ jnp.broadcast_to(word, rows), first)
    return jnp.stack([first, second], axis=-1)


def _words_of(op: str, key: Any) -> jax.Array:
    """Returns the words uint32 [..., n] of keys or integer seeds."""
    key = jnp.asarray(key)
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(key)
    if not jnp.issubdtype(key.dtype, jnp.integer):
        raise ValueError(
            f"{op}: key has dtype {key.dtype}; pass keys of jax.random.key, or integer seeds."
        )
    words = key.astype(jnp.uint32)
    return jnp.stack([jnp.zeros_like(words), words], axis=-1)


def _log_probs(op: str, logits: jax.Array, token: jax.Array, count: int) -> LogProbs:
    """Returns log-probabilities of the tokens and of the `count` most likely ones."""
    words = logits.shape[-1]
    if not 0 <= count <= words:
        raise ValueError(
            f"{op}: logprobs is {count}, but there are {words} words; pass a number from 0 to {words}."
        )
    z = logits.astype(accumulator_dtype(logits.dtype))
    total = jax.nn.logsumexp(z, axis=-1, keepdims=True)
    at = jnp.maximum(token, 0)[..., None]
    chosen = (jnp.take_along_axis(z, at, axis=-1) - total)[..., 0]
    top, top_tokens = lax.top_k(z, count)
    return LogProbs(
        jnp.where(token >= 0, chosen, jnp.nan), top - total, top_tokens.astype(jnp.int32)
    )
