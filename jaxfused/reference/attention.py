"""dot_product_attention in plain jax.numpy: the truth for the kernels, and `implementation="xla"`.

Two things here hold for every implementation: `Mask`, which says who attends to whom, and `keep`,
which says what dropout keeps.
"""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from jaxfused.reference.product import product

EMPTY_LSE = -0.7 * float(jnp.finfo(jnp.float32).max)
"""The log-sum-exp of a row that attends to nothing: finite, so that two have a difference."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mask:
    """Which query t attends to which key s: all of the following must hold.

    Position and lengths allow each query one interval of keys, whose ends do not decrease with t
    among the queries within their length. So two rows tell a kernel about a block of them: keys
    before the first row's start or from the last row's stop on are masked for all of the block,
    keys from the last row's start to the first row's stop for none of it.
    """

    is_causal: bool = field(default=False, metadata={"static": True})
    """s <= t. Both count from the first position, also where T and S differ."""
    window: tuple[int, int] | None = field(default=None, metadata={"static": True})
    """t - left <= s <= t + right."""
    query_lengths: jax.Array | None = None
    """[B]: t < length; a query beyond attends to nothing."""
    key_lengths: jax.Array | None = None
    """[B]: s < length."""
    query_segments: jax.Array | None = None
    """[B, T], with key_segments: both must be equal."""
    key_segments: jax.Array | None = None
    """[B, S]."""
    explicit: jax.Array | None = None
    """bool, broadcasts to [B, N, T, S]."""

    def key_interval(self, query: jax.Array, key_count: int) -> tuple[jax.Array, jax.Array]:
        """(start, stop), [B or 1, T], of the keys that position and lengths allow queries [T]."""
        start = jnp.zeros_like(query)
        stop = jnp.full_like(query, key_count)
        if self.is_causal:
            stop = jnp.minimum(stop, query + 1)
        if self.window is not None:
            left, right = self.window
            start = jnp.maximum(start, query - left)
            stop = jnp.minimum(stop, query + right + 1)
        start, stop = start[None], stop[None]
        if self.key_lengths is not None:
            stop = jnp.minimum(stop, self.key_lengths[:, None])
        if self.query_lengths is not None:
            stop = jnp.where(query[None] < self.query_lengths[:, None], stop, 0)
        return start, stop

    def allowed(self, query_count: int, key_count: int) -> jax.Array:
        """The mask as booleans that broadcast to [B, N, T, S]."""
        key = jnp.arange(key_count, dtype=jnp.int32)[None, None]
        start, stop = self.key_interval(jnp.arange(query_count, dtype=jnp.int32), key_count)
        allowed = (key >= start[..., None]) & (key < stop[..., None])
        if self.query_segments is not None and self.key_segments is not None:
            allowed = allowed & (self.query_segments[:, :, None] == self.key_segments[:, None, :])
        allowed = allowed[:, None]
        return allowed if self.explicit is None else allowed & self.explicit


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None,
    sinks: jax.Array | None,
    mask: Mask,
    dropout_words: jax.Array | None,
    *,
    scale: float | jax.Array,
    logits_soft_cap: float | None,
    dropout_rate: float,
) -> tuple[jax.Array, jax.Array]:
    """Returns the output [B, T, N, V] in the query's dtype, and its log-sum-exp [B, T, N].

    The gradient keeps the arguments alone and takes the probabilities, [B, N, T, S], once more.
    """
    seeds = None
    if dropout_words is not None:
        seeds = dropout_seeds(dropout_words, query.shape[0], query.shape[2])

    def f(query, key, value, bias, sinks, mask, seeds, scale):
        return attention_by_seeds(
            query,
            key,
            value,
            bias,
            sinks,
            mask,
            seeds,
            scale=scale,
            logits_soft_cap=logits_soft_cap,
            dropout_rate=dropout_rate,
        )

    return jax.checkpoint(f)(query, key, value, bias, sinks, mask, seeds, scale)


def attention_by_seeds(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None,
    sinks: jax.Array | None,
    mask: Mask,
    seeds: jax.Array | None,
    *,
    scale: float | jax.Array,
    logits_soft_cap: float | None,
    dropout_rate: float,
) -> tuple[jax.Array, jax.Array]:
    """The same from the seeds of dropout [2, B, N], for a shard does not know its place in B and N."""
    batch, query_count, heads, _ = query.shape
    key_count, key_heads = key.shape[1:3]
    groups = heads // key_heads
    probabilities, lse = weights(
        query, key, bias, sinks, mask, scale=scale, logits_soft_cap=logits_soft_cap
    )
    if seeds is not None:
        kept = keep_by_seeds(seeds, query_count, key_count, dropout_rate)
        probabilities = jnp.where(kept, probabilities, 0.0) / keep_probability(dropout_rate)

    grouped = probabilities.reshape(batch, key_heads, groups, query_count, key_count)
    if jnp.issubdtype(value.dtype, jnp.integer):
        # As in JAX: of probabilities in the integers' dtype only a 1 is left.
        output = jnp.einsum("bkgts,bskv->btkgv", grouped.astype(value.dtype), value)
    else:
        output = product("bkgts,bskv->btkgv", grouped, value, dtype=value.dtype)
    output = output.reshape(batch, query_count, heads, value.shape[-1])
    return output.astype(query.dtype), lse.transpose(0, 2, 1)


def weights(
    query: jax.Array,
    key: jax.Array,
    bias: jax.Array | None,
    sinks: jax.Array | None,
    mask: Mask,
    *,
    scale: float | jax.Array,
    logits_soft_cap: float | None,
) -> tuple[jax.Array, jax.Array]:
    """Returns the probabilities before dropout [B, N, T, S], and their log-sum-exp [B, N, T]."""
    batch, query_count, heads, head_size = query.shape
    key_count, key_heads = key.shape[1:3]
    if jnp.issubdtype(query.dtype, jnp.integer):
        query, key = query.astype(jnp.float32), key.astype(jnp.float32)
    grouped = query.reshape(batch, query_count, key_heads, heads // key_heads, head_size)
    logits = product("btkgh,bskh->bkgts", grouped, key)
    logits = logits * (scale.astype(logits.dtype) if isinstance(scale, jax.Array) else scale)
    logits = logits.reshape(batch, heads, query_count, key_count)
    if logits_soft_cap is not None:
        logits = logits_soft_cap * jnp.tanh(logits / logits_soft_cap)
    if bias is not None:
        logits = logits + bias.astype(logits.dtype)
    sinks = None if sinks is None else sinks.astype(logits.dtype)
    return _softmax(logits, mask.allowed(query_count, key_count), sinks)


@jax.custom_jvp
def _softmax(
    logits: jax.Array, allowed: jax.Array, sinks: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """(probabilities, log-sum-exp) of [B, N, T, S]; a row without any weight has probabilities 0.

    A sink [N] is one more logit of every row of its head, whose probability goes nowhere. Nothing on
    the way is infinite where the arguments are not: `jax_debug_infs` looks for it.
    """
    lowest = float(jnp.finfo(logits.dtype).min)
    logits = jnp.where(allowed, logits, lowest)
    maximum = jnp.max(logits, axis=-1, keepdims=True, initial=lowest)
    if sinks is not None:
        sinks = sinks[None, :, None, None]
        maximum = jnp.maximum(maximum, sinks)
    # Of a row that is masked altogether the exponentials are 1.
    exponentials = jnp.where(allowed, jnp.exp(logits - maximum), 0.0)
    total = jnp.sum(exponentials, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks - maximum)
    empty = total == 0.0
    total = jnp.where(empty, 1.0, total)
    lse = jnp.where(empty, EMPTY_LSE, maximum + jnp.log(total))
    return exponentials / total, lse[..., 0]


@_softmax.defjvp
def _softmax_jvp(primals, tangents):
    """The derivative in terms of the results, for JAX's own of the steps above loses digits."""
    sinks = primals[2]
    dlogits, _, dsinks = tangents
    probabilities, lse = _softmax(*primals)

    def derivative_of_lse():
        dlse = jnp.sum(probabilities * dlogits, axis=-1)
        if sinks is None:
            return dlse
        return dlse + jnp.exp(sinks[None, :, None] - lse) * dsinks[None, :, None]

    # Once for each result: their cotangents, added up first, would not cancel where they should.
    dprobabilities = probabilities * (dlogits - derivative_of_lse()[..., None])
    return (probabilities, lse), (dprobabilities, derivative_of_lse())


# --- dropout --------------------------------------------------------------------------------------


def keep(words: jax.Array, shape: tuple[int, ...], rate: float) -> jax.Array:
    """Which of the probabilities [B, N, T, S] dropout keeps: the same bits in every implementation.

    With 32-bit unsigned arithmetic, `mix(h, i) = murmur(h ^ i)` and
    `murmur(x)`: x ^= x >> 16; x *= 0x85EBCA6B; x ^= x >> 13; x *= 0xC2B2AE35; x ^= x >> 16::

        row = b * N + n
        u = mix(mix(words[0], row) + 0x9E3779B9, t)
        v = mix(mix(words[1], row) + 0x9E3779B9, t)
        x = u ^ (s // 2)
        x ^= x >> 16;  x *= 0x85EBCA6B
        x ^= (x >> 13) ^ v;  x *= 0xC2B2AE35
        x ^= x >> 16
        keep where (s even ? x & 0xFFFF : x >> 16) >= min(round(rate * 65536), 65535)

    u and v belong to a row and a pair of neighbours costs one murmur finalizer, because a kernel
    pays for every element, beside an exponential. v enters before the second product so that two
    rows that meet in u still differ.

    Source of the constants: Appleby, MurmurHash3, the finalizer of 32 bits.
    """
    batch, heads, query_count, key_count = shape
    return keep_by_seeds(dropout_seeds(words, batch, heads), query_count, key_count, rate)


def dropout_seeds(words: jax.Array, batch: int, heads: int) -> jax.Array:
    """[2, B, N]: what in `keep` depends on the words and on a row's b and n."""
    row = jnp.arange(batch * heads, dtype=jnp.uint32).reshape(1, batch, heads)
    return _murmur(words[:, None, None] ^ row) + jnp.uint32(0x9E3779B9)


def keep_by_seeds(seeds: jax.Array, query_count: int, key_count: int, rate: float) -> jax.Array:
    """`keep` from `dropout_seeds` [2, B, N]."""
    t = jnp.arange(query_count, dtype=jnp.uint32)[None, None, :, None]
    pair = jnp.arange((key_count + 1) // 2, dtype=jnp.uint32)[None, None, None]
    u, v = (_murmur(seed[:, :, None, None] ^ t) for seed in seeds)
    x = _murmur(u ^ pair, v)
    halves = jnp.stack([x & 0xFFFF, x >> 16], axis=-1).reshape(*x.shape[:-1], 2 * x.shape[-1])
    return halves[..., :key_count] >= jnp.uint32(_threshold(rate))


def keep_probability(rate: float) -> float:
    """The probability with which `keep` keeps: 1 - rate to the nearest 1/65536, but not 0."""
    return 1.0 - _threshold(rate) / 65536


def _threshold(rate: float) -> int:
    return min(round(rate * 65536), 65535)


def _murmur(x: jax.Array, tweak: jax.Array | int = 0) -> jax.Array:
    x = x ^ (x >> 16)
    x = x * jnp.uint32(0x85EBCA6B)
    x = x ^ (x >> 13) ^ tweak
    x = x * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
