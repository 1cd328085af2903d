"""Dropout masks of attention's probabilities and of rows, the same in every implementation."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp


def keep(words: jax.Array, shape: tuple[int, ...], rate: float) -> jax.Array:
    """Returns which probabilities [B, N, T, S] dropout keeps: the same bits in every implementation.

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

    u and v are computed once a row, and keys 2i and 2i + 1 share one murmur finalizer, because a kernel
    computes it for every probability, next to an exponential. v enters before the second product so that
    two rows with equal u still differ.

    Source of the constants: Appleby, MurmurHash3, the finalizer of 32 bits.
    """
    batch, heads, query_count, key_count = shape
    return keep_by_seeds(Bits.of(words, batch, heads), query_count, key_count, rate)


def keep_rows(words: jax.Array, shape: tuple[int, ...], rate: float) -> jax.Array:
    """Returns which elements of rows [..., F] dropout keeps: `keep` for one batch entry and one head."""
    rows = math.prod(shape[:-1])
    return keep(words, (1, 1, rows, shape[-1]), rate).reshape(shape)


def dropout_seeds(words: jax.Array, batch: int, heads: int) -> jax.Array:
    """Hashes the two seed words with batch entry and head, for `keep_by_seeds`: uint32 [2, B, N]."""
    row = jnp.arange(batch * heads, dtype=jnp.uint32).reshape(1, batch, heads)
    return murmur(words[:, None, None] ^ row) + jnp.uint32(0x9E3779B9)


class Bits(NamedTuple):
    """Seeds and places of a part of a sequence, whose queries and keys get the whole sequence's bits."""

    seeds: jax.Array
    """The `dropout_seeds` [2, B, N]."""
    first_query: jax.Array | None = None
    """Index in the sequence, uint32, of the first query; None for 0. Likewise `first_key`."""
    first_key: jax.Array | None = None

    @classmethod
    def of(cls, words: "jax.Array | Bits", batch: int, heads: int) -> "Bits":
        """Returns the bits of all queries and keys by two seed words, and given Bits as they are."""
        return words if isinstance(words, Bits) else cls(dropout_seeds(words, batch, heads))

    @classmethod
    def of_queries(cls, seeds: jax.Array, first: jax.Array, count: int) -> "Bits":
        """Returns those of `count` queries from `first` on, a multiple of `count`, and all keys."""
        first = first.astype(jnp.uint32)
        if count & (count - 1):
            return cls(seeds, first)
        # Indices below a power of two have none of `first`'s bits: first + t is first ^ t, and
        # `keep` hashes seed ^ t.
        return cls(seeds ^ first)

    def is_moved(self) -> bool:
        """Returns whether the seeds, which are all that kernels take, do not suffice."""
        return self.first_query is not None or self.first_key is not None


def keep_by_seeds(bits: Bits, query_count: int, key_count: int, rate: float) -> jax.Array:
    """Returns which probabilities [B, N, T, S] of a part of a sequence dropout keeps."""
    t = jnp.arange(query_count, dtype=jnp.uint32)[None, None, :, None]
    if bits.first_query is not None:
        t = t + bits.first_query
    u, v = (murmur(seed[:, :, None, None] ^ t) for seed in bits.seeds)
    if bits.first_key is not None:
        s = jnp.arange(key_count, dtype=jnp.uint32)[None, None, None] + bits.first_key
        x = murmur(u ^ (s >> 1), v)
        half = jnp.where(s % 2 == 0, x & 0xFFFF, x >> 16)
        return half >= jnp.uint32(_threshold(rate))
    pair = jnp.arange((key_count + 1) // 2, dtype=jnp.uint32)[None, None, None]
    x = murmur(u ^ pair, v)
    halves = jnp.stack([x & 0xFFFF, x >> 16], axis=-1).reshape(*x.shape[:-1], 2 * x.shape[-1])
    return halves[..., :key_count] >= jnp.uint32(_threshold(rate))


def keep_probability(rate: float) -> float:
    """Returns the probability that `keep` keeps a value: 1 - rate to the nearest 1/65536, but not 0."""
    return 1.0 - _threshold(rate) / 65536


def _threshold(rate: float) -> int:
    return min(round(rate * 65536), 65535)


def murmur(x: jax.Array, tweak: jax.Array | int = 0) -> jax.Array:
    """Returns MurmurHash3's 32-bit finalizer of words, xored with `tweak` after the first product."""
    x = x ^ (x >> 16)
    x = x * jnp.uint32(0x85EBCA6B)
    x = x ^ (x >> 13) ^ tweak
    x = x * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
