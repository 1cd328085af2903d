"""The draw of a token from each row of logits, in jax.numpy and without a sort of the vocabulary.

A word is an entry of the vocabulary. The words are ordered by falling logits, and equal ones by rising
id; every filter keeps the first words of this order. So no threshold is needed, only the test whether a
word is kept, by the number and the weight of the words before it. With Gumbel noise g, and the distance
of a word's logit from the row's largest one, the draw is

    token = argmax over the kept words of distance * inverse_temperature + g.

The argmax over all words is the token if it is kept, as it is with probability top_p. If it is not, no
word after it is kept either, and the argmax over the words before it is tested next. On average that
takes 1 + ln(1 / top_p) tests, each a pass over the logits, and yields the token that a sort would yield.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxfused.runtime.dropout import murmur
from jaxfused.runtime.promotion import accumulator_dtype

NONE = -1
"""The token of a row without a distribution: one with a NaN, or with -inf alone."""

_BLOCK = 256
"""Number of weights in a partial sum, which keeps the error of float32 sums near one rounding."""


class Filters(NamedTuple):
    """Limits by which words of each row [...] are kept."""

    inverse_temperature: jax.Array
    """1 / temperature, or 0 for the largest logit without a draw."""
    share: jax.Array
    """Fraction of the weight of top-k's words: a word is kept if the words before it weigh less."""
    least: jax.Array
    """Least exponent of a kept word: its logit less the largest, times the inverse temperature."""
    top_k: jax.Array
    """Number of words that top-k keeps, int32."""


class Row(NamedTuple):
    """Logits of each row [..., V], with the exponents and weights of their softmax."""

    logits: jax.Array
    exponents: jax.Array
    """Logits less the row's largest one, times the inverse temperature, or times 1 if that is 0."""
    weights: jax.Array
    """exp(exponents), at most 1."""
    total: jax.Array
    """Sum of the weights [...]; not above 0 for a row without a distribution."""


def unpacked(filters: jax.Array) -> Filters:
    """Returns the filters of rows from their matrix float32 [..., 4], which holds them in this order."""
    inverse_temperature, share, least, top_k = (filters[..., i] for i in range(4))
    return Filters(inverse_temperature, share, least, top_k.astype(jnp.int32))


def gumbel(seeds: jax.Array, words: int) -> jax.Array:
    """Returns float32 noise [..., words] for seeds uint32 [..., 2], the same in every implementation.

    Word i has `bits = murmur(seeds[0] ^ i, tweak=seeds[1])` as in `dropout.keep`, and with
    v = (bits + 1/2) / 2^32, at most 1 - 2^-24, the noise -log(-log(1 - v)). A float32 holds small v,
    which make noise large, with all their bits.
    """
    shape = (*seeds.shape[:-1], words)
    index = lax.broadcasted_iota(jnp.uint32, shape, len(shape) - 1)
    bits = murmur(seeds[..., :1] ^ index, seeds[..., 1:])
    v = (bits.astype(jnp.float32) + jnp.float32(0.5)) * jnp.float32(2.0**-32)
    return -jnp.log(-jnp.log1p(-jnp.minimum(v, jnp.float32(1.0 - 2.0**-24))))


def row_of(logits: jax.Array, inverse_temperature: jax.Array) -> Row:
    """Returns the `Row` of logits [..., V]; a logit of infinity counts as the largest number."""
    dtype = accumulator_dtype(logits.dtype)
    largest = jnp.finfo(dtype).max
    z = logits.astype(dtype)
    z = jnp.where(z > largest, largest, z)  # XLA's minimum may lose a NaN on a CPU.
    factor = jnp.where(inverse_temperature == 0.0, 1.0, inverse_temperature).astype(dtype)
    exponents = (z - jnp.max(z, axis=-1, keepdims=True)) * factor[..., None]
    weights = jnp.exp(exponents)
    return Row(z, exponents, weights, _sum(weights))


@functools.partial(jax.jit, static_argnames="is_filtered")
def sample(
    logits: jax.Array, seeds: jax.Array, filters: jax.Array, *, is_filtered: bool
) -> jax.Array:
    """Returns tokens int32 [...] from logits [..., V], seeds uint32 [..., 2] and filters [..., 4].

    Without `is_filtered`, top_k, top_p and min_p keep all words.
    """
    of_row = unpacked(filters)
    row = row_of(logits, of_row.inverse_temperature)
    is_greedy = of_row.inverse_temperature == 0.0
    noise = jnp.where(is_greedy[..., None], 0.0, gumbel(seeds, logits.shape[-1]))
    scores = row.exponents + noise.astype(row.exponents.dtype)
    exists = row.total > 0.0
    token = jnp.argmax(scores, axis=-1).astype(jnp.int32)
    if is_filtered:
        token = _first_kept(row, scores, of_row, token, exists)
    return jnp.where(exists, token, NONE)


def is_kept(row: Row, filters: Filters, kept_weight: jax.Array, token: jax.Array) -> Any:
    """Returns whether the filters keep word `token` of each row, and the words before it [..., V].

    Words are in the order of falling logits, equal logits by index.
    """
    at = token[..., None]
    logit = jnp.take_along_axis(row.logits, at, axis=-1)
    index = lax.broadcasted_iota(jnp.int32, row.logits.shape, row.logits.ndim - 1)
    before = (row.logits > logit) | ((row.logits == logit) & (index < at))
    count = jnp.sum(before, axis=-1, dtype=jnp.int32)
    weight = _sum(jnp.where(before, row.weights, 0.0))
    exponent = jnp.take_along_axis(row.exponents, at, axis=-1)[..., 0]
    in_share = weight < filters.share.astype(weight.dtype) * kept_weight
    kept = in_share & (count < filters.top_k) & (exponent >= filters.least.astype(exponent.dtype))
    return kept | (count == 0), before


def weight_of_top_k(row: Row, filters: Filters) -> jax.Array:
    """Returns the weight of the `top_k` first words of each row, by bisection on the logits' bits."""
    words = row.logits.shape[-1]
    keys = _ordered(row.logits)
    # At least `top_k` words have a key of at least `low`, and fewer have a key of at least `high`.
    low = jnp.min(keys, axis=-1)
    high = jnp.max(keys, axis=-1) + 1
    nothing = jnp.zeros_like(row.total)
    done = (filters.top_k >= words) | ~(row.total > 0.0)
    start = (low, high, jnp.zeros_like(filters.top_k), nothing, done, row.total)

    def narrowed(state: Any) -> Any:
        low, high, count_high, weight_high, done, kept = state
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        above = keys >= middle[..., None]
        count = jnp.sum(above, axis=-1, dtype=jnp.int32)
        weight = _sum(jnp.where(above, row.weights, 0.0))
        enough = count >= filters.top_k
        low, high = jnp.where(enough, middle, low), jnp.where(enough, high, middle)
        count_high = jnp.where(enough, count_high, count)
        weight_high = jnp.where(enough, weight_high, weight)
        # Words with equal logits have equal weights.
        at_low = jnp.max(jnp.where(keys == low[..., None], row.weights, 0.0), axis=-1)
        missing = (filters.top_k - count_high).astype(weight.dtype)
        found = jnp.where(count == filters.top_k, weight, weight_high + missing * at_low)
        is_last = (count == filters.top_k) | (low + 1 == high)
        kept = jnp.where(done | ~is_last, kept, found)
        return low, high, count_high, weight_high, done | is_last, kept

    return lax.while_loop(lambda state: ~jnp.all(state[4]), narrowed, start)[5]


def _first_kept(
    row: Row, scores: jax.Array, filters: Filters, token: jax.Array, exists: jax.Array
) -> jax.Array:
    """Returns the kept word [...] with the highest of `scores` [..., V].

    `token` [...] has the highest score of all words, kept or not. Rows without a distribution,
    whose `exists` [...] is False, are not searched.
    """
    both = jnp.any((filters.top_k < row.logits.shape[-1]) & (filters.share < 1.0))
    kept_weight = lax.cond(both, lambda: weight_of_top_k(row, filters), lambda: row.total)

    def tested(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        token, done = state
        kept, before = is_kept(row, filters, kept_weight, token)
        done = done | kept
        next_one = jnp.argmax(jnp.where(before, scores, -jnp.inf), axis=-1).astype(jnp.int32)
        return jnp.where(done, token, next_one), done

    return lax.while_loop(lambda state: ~jnp.all(state[1]), tested, (token, ~exists))[0]


def _ordered(x: jax.Array) -> jax.Array:
    """Returns integers that have the same order as the numbers."""
    bits = jnp.finfo(x.dtype).bits
    integers = jnp.dtype(f"int{bits}")
    signed = lax.bitcast_convert_type(x + 0.0, integers)  # -0 + 0 is 0
    return signed ^ ((signed >> (bits - 1)) & jnp.iinfo(integers).max)


def _sum(x: jax.Array) -> jax.Array:
    """Returns the sum over the last axis, block by block."""
    padding = [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % _BLOCK)]
    blocks = jnp.pad(x, padding).reshape(*x.shape[:-1], -(-x.shape[-1] // _BLOCK), _BLOCK)
    # Without the barrier, XLA merges both sums into one, which has a larger rounding error.
    return jnp.sum(lax.optimization_barrier(jnp.sum(blocks, axis=-1)), axis=-1)
