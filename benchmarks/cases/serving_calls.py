"""Calls of a server beside the same work in another form, and appends: part of `serving`.

Query positions, one long sequence among short ones, decodes and a chunk of a prompt in one call, and
new tokens written into a KVCache.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jaxfused
from benchmarks.cases.attention import GRADIENT_ERROR_LIMIT
from benchmarks.run.case import (
    EVEN_LENGTHS,
    GIGABYTES,
    TWO_CALLS,
    WHOLE_SEQUENCES,
    WITHOUT_OFFSET,
    Arrays,
    Bar,
    Case,
    functions,
)


class Sizes(NamedTuple):
    """Sizes of all calls."""

    heads: int = 32
    key_heads: int = 8
    head_size: int = 128
    page: int = 64
    """Tokens of a page."""
    causal: tuple[int, int] = (2, 4096)
    """Sequences and tokens of causal attention with an offset for its queries."""
    many: int = 64
    """Sequences of decode and of append."""
    long: int = 32768
    """Tokens of the first sequence where the others have `short`."""
    short: int = 512
    cached: int = 1024
    """Tokens of each sequence that decodes beside a chunk, and places of the cache appended to."""
    chunk: int = 2048
    """New tokens of a prompt, of which as many have been read."""
    prefix: int = 8192
    """Tokens that all sequences share, before `short` tokens of their own."""


_DTYPES = {"bfloat16": jnp.bfloat16, "int8": jnp.int8, "float8_e4m3fn": jnp.float8_e4m3fn}
_APPEND_MICROSECONDS = 4.0
_OTHERS = {"pallas": "the default may take it", "cuda": "the default may take it"}
_COPIES = {"reference": "it copies the keys of all sequences at the longest one's length"}


def calls(sizes: Sizes | None = None) -> list[Case]:
    sizes = sizes or Sizes()
    return [
        _ragged(sizes),
        _uneven_in_pages(sizes),
        _uneven(sizes),
        _prefix(sizes),
        *(_append(sizes, kept) for kept in _DTYPES),
        *(_positions(sizes, with_gradients) for with_gradients in (False, True)),
    ]


def _normal(key: jax.Array, *shape: int) -> jax.Array:
    return jax.random.normal(key, shape, jnp.bfloat16)


# --- query positions ------------------------------------------------------------------------------


def _positions(s: Sizes, with_gradients: bool) -> Case:
    batch, tokens = s.causal
    rows = 2 * batch * tokens * (s.heads + s.key_heads)

    def make_inputs(key: jax.Array) -> Arrays:
        heads = (s.heads, s.key_heads, s.key_heads, s.heads)
        keys = jax.random.split(key, 4)
        *operands, dy = (
            _normal(k, batch, tokens, n, s.head_size) for k, n in zip(keys, heads, strict=True)
        )
        offset = jnp.zeros(batch, jnp.int32)
        return (*operands, offset, dy) if with_gradients else (*operands, offset)

    def attend(query, key, value, offset, *, implementation=None):
        return jaxfused.dot_product_attention(
            query, key, value, is_causal=True, query_offset=offset, implementation=implementation
        )

    def without(query, key, value, offset):
        return attend(query, key, value, None)

    return Case(
        name="query positions" + " forward+backward" * with_gradients,
        shape=(batch, tokens, s.heads, s.key_heads, s.head_size),
        make_inputs=make_inputs,
        bytes=2 * s.head_size * rows * (3 if with_gradients else 1),
        flops=batch * tokens**2 * s.heads * s.head_size * (7 if with_gradients else 2),
        bars=(Bar(WITHOUT_OFFSET, must=1 / 1.03),),
        skipped=_OTHERS | {"reference": "`attention` times it"},
        error_limit=GRADIENT_ERROR_LIMIT if with_gradients else 1e-2,
        **functions(
            attend,
            {WITHOUT_OFFSET: without},
            {},
            differentiable=3,
            cotangents=int(with_gradients),
        ),
    )


# --- one long sequence among short ones -----------------------------------------------------------


def _lengths(s: Sizes) -> tuple[jax.Array, int]:
    """Returns the lengths of a long sequence and short ones [B], and their mean."""
    lengths = jnp.full(s.many, s.short, jnp.int32).at[0].set(s.long)
    return lengths, (s.long + (s.many - 1) * s.short) // s.many


def _uneven(s: Sizes) -> Case:
    lengths, mean = _lengths(s)

    def make_inputs(key: jax.Array) -> Arrays:
        """Returns query, key, value and lengths, and key and value of the mean length."""
        keys = jax.random.split(key, 7)
        row = s.key_heads, s.head_size

        def cache(first: jax.Array, others: jax.Array) -> jax.Array:
            # Places that hold no token stay 0.
            kept = jnp.zeros((s.many, s.long, *row), jnp.bfloat16)
            kept = kept.at[:, : s.short].set(_normal(others, s.many, s.short, *row))
            return kept.at[0].set(_normal(first, s.long, *row))

        query = _normal(keys[0], s.many, 1, s.heads, s.head_size)
        even = (_normal(k, s.many, mean, *row) for k in keys[5:])
        return query, cache(*keys[1:3]), cache(*keys[3:5]), lengths, *even

    def attend(query, key, value, lengths, *even, implementation):
        cache = jaxfused.KVCache(key, value, lengths - 1)
        return cache.attend(query, implementation=implementation)

    def evenly(query, key, value, lengths, *even):
        return attend(query, *even, jnp.full_like(lengths, mean), implementation=None)

    def truth(query, *arrays):
        key, value, lengths = arrays[:3]
        first = attend(query[:1], key[:1], value[:1], lengths[:1], implementation="xla")
        short = (a[1:, : s.short] for a in (key, value))
        return jnp.concatenate(
            [first, attend(query[1:], *short, lengths[1:], implementation="xla")]
        )

    return _uneven_case("decode, one long sequence", s, 0, make_inputs, attend, evenly, truth)


def _uneven_in_pages(s: Sizes) -> Case:
    lengths, mean = _lengths(s)
    of_long, of_short, of_mean = (-(-tokens // s.page) for tokens in (s.long, s.short, mean))

    def make_inputs(key: jax.Array) -> Arrays:
        """Returns query, pages of keys and of values, lengths, and the tables of both forms."""
        pages = s.many * max(of_mean, -(-(of_long + (s.many - 1) * of_short) // s.many))
        keys = jax.random.split(key, 4)
        place = jax.random.permutation(keys[0], pages).astype(jnp.int32)
        short = place[of_long : of_long + (s.many - 1) * of_short].reshape(s.many - 1, of_short)
        table = jnp.zeros((s.many, of_long), jnp.int32).at[0].set(place[:of_long])
        table = table.at[1:, :of_short].set(short)
        query = _normal(keys[1], s.many, s.heads, s.head_size)
        pools = (_normal(k, s.key_heads, pages, s.page, s.head_size) for k in keys[2:])
        return query, *pools, lengths, table, place[: s.many * of_mean].reshape(s.many, of_mean)

    def attend(query, key, value, lengths, table, *even, implementation):
        return jaxfused.paged_attention(
            *(query, key, value, lengths, table),
            scale=s.head_size**-0.5,
            implementation=implementation,
        )

    def evenly(query, key, value, lengths, table, even):
        return attend(query, key, value, jnp.full_like(lengths, mean), even, implementation=None)

    def truth(query, key, value, lengths, table, even):
        of = partial(attend, implementation="xla")
        first = of(query[:1], key, value, lengths[:1], table[:1])
        short = of(query[1:], key, value, lengths[1:], table[1:, :of_short])
        return jnp.concatenate([first, short])

    name = "decode over pages, one long sequence"
    return _uneven_case(name, s, s.page, make_inputs, attend, evenly, truth)


def _uneven_case(
    name: str, s: Sizes, page: int, make_inputs: Any, attend: Any, evenly: Any, truth: Any
) -> Case:
    rows = (s.long + (s.many - 1) * s.short) * s.key_heads + s.many * s.heads
    return Case(
        name=name,
        shape=(s.many, s.long, s.heads, s.key_heads, s.head_size, page),
        make_inputs=make_inputs,
        bytes=4 * rows * s.head_size,
        bars=(Bar(EVEN_LENGTHS, must=1 / 1.25),),
        skipped=_COPIES,
        **functions(
            attend, {EVEN_LENGTHS: evenly}, {}, differentiable=0, cotangents=0, truth=truth
        ),
    )


def _prefix(s: Sizes) -> Case:
    shared, own = s.prefix // s.page, s.short // s.page
    tokens = s.prefix + s.many * s.short

    def make_inputs(key: jax.Array) -> Arrays:
        """Returns query, pages of keys and of values, lengths, and the table."""
        pages = shared + s.many * own
        keys = jax.random.split(key, 4)
        place = jax.random.permutation(keys[0], pages).astype(jnp.int32)
        first = jnp.broadcast_to(place[:shared], (s.many, shared))
        table = jnp.concatenate([first, place[shared:].reshape(s.many, own)], 1)
        query = _normal(keys[1], s.many, s.heads, s.head_size)
        pools = (_normal(k, s.key_heads, pages, s.page, s.head_size) for k in keys[2:])
        return query, *pools, jnp.full(s.many, s.prefix + s.short, jnp.int32), table

    def attend(*arrays, implementation, prefix_pages=shared):
        return jaxfused.paged_attention(
            *arrays,
            scale=s.head_size**-0.5,
            prefix_pages=prefix_pages,
            implementation=implementation,
        )

    def truth(query, key, value, lengths, table):
        def of(row):
            query, *rest = (a[None] for a in row)
            return attend(query, key, value, *rest, implementation="xla", prefix_pages=0)[0]

        return jax.lax.map(of, (query, lengths, table))

    return Case(
        name="decode over pages, a shared prefix",
        shape=(s.many, s.prefix, s.heads, s.key_heads, s.head_size, s.page),
        make_inputs=make_inputs,
        bytes=4 * (tokens * s.key_heads + s.many * s.heads) * s.head_size,
        skipped=_COPIES,
        **functions(
            attend,
            {WHOLE_SEQUENCES: partial(attend, implementation=None, prefix_pages=0)},
            {},
            differentiable=0,
            cotangents=0,
            truth=truth,
        ),
    )


# --- decodes and a chunk --------------------------------------------------------------------------


def _ragged(s: Sizes) -> Case:
    of_decode, of_chunk = s.cached // s.page, 2 * s.chunk // s.page
    scale = s.head_size**-0.5

    def make_inputs(key: jax.Array) -> Arrays:
        """Returns queries, pages of keys and of values, lengths, table and the queries' ends."""
        keys = jax.random.split(key, 4)
        pages = s.many * of_decode + of_chunk
        place = jax.random.permutation(keys[0], pages).astype(jnp.int32)
        table = jnp.zeros((s.many + 1, max(of_decode, of_chunk)), jnp.int32)
        decodes = place[:-of_chunk].reshape(s.many, of_decode)
        table = table.at[:-1, :of_decode].set(decodes).at[-1, :of_chunk].set(place[-of_chunk:])
        query = _normal(keys[1], s.many + s.chunk, s.heads, s.head_size)
        pools = (_normal(k, s.key_heads, pages, s.page, s.head_size) for k in keys[2:])
        lengths = jnp.full(s.many + 1, s.cached, jnp.int32).at[-1].set(2 * s.chunk)
        ends = jnp.arange(s.many + 2, dtype=jnp.int32).at[-1].set(s.many + s.chunk)
        return query, *pools, lengths, table, ends

    def attend(query, key, value, lengths, table, ends, *, implementation):
        return jaxfused.ragged_paged_attention(
            *(query, (key, value), lengths, table, ends),
            sm_scale=scale,
            layout="KPSH",
            implementation=implementation,
        )

    def in_two_calls(query, key, value, lengths, table, ends):
        call = partial(jaxfused.paged_attention, scale=scale)
        decodes = call(query[: s.many], key, value, lengths[:-1], table[:-1, :of_decode])
        return decodes, call(query[None, s.many :], key, value, lengths[-1:], table[-1:, :of_chunk])

    rows = (s.many * s.cached + 2 * s.chunk) * s.key_heads + (s.many + s.chunk) * s.heads
    seen = s.many * s.cached + s.chunk * 2 * s.chunk - s.chunk * (s.chunk - 1) // 2
    return Case(
        name="decodes and a chunk",
        shape=(s.many, s.cached, s.chunk, s.heads, s.key_heads, s.head_size, s.page),
        make_inputs=make_inputs,
        bytes=4 * rows * s.head_size,
        flops=4 * s.heads * s.head_size * seen,
        bars=(Bar(TWO_CALLS, must=1 / 1.05),),
        skipped={"reference": "it copies the keys of each tile of queries"},
        **functions(attend, {TWO_CALLS: in_two_calls}, {}, differentiable=0, cotangents=0),
    )


# --- append ---------------------------------------------------------------------------------------


def _append(s: Sizes, kept: str) -> Case:
    """Returns the case of one new token of each sequence, rotated and rounded or quantised."""
    dtype = _DTYPES[kept]
    empty = partial(
        jaxfused.KVCache.zeros,
        batch=s.many,
        length=s.cached,
        key_heads=s.key_heads,
        head_size=s.head_size,
        dtype=dtype,
    )
    names = ("key", "value") + ("key_scale", "value_scale") * (kept != "bfloat16")
    float8 = kept if kept.startswith("float8") else None

    def make_inputs(key: jax.Array) -> Arrays:
        """Returns the cache's arrays, then key, value, lengths, cos and sin."""
        cache, keys = empty(), jax.random.split(key, 4)
        new = (_normal(k, s.many, 1, s.key_heads, s.head_size) for k in keys[:2])
        lengths = jax.random.randint(keys[2], (s.many,), 0, s.cached)
        angles = jax.random.uniform(keys[3], (s.many, 1, s.head_size // 2), maxval=6.0)
        arrays = (getattr(cache, name) for name in names)
        return *arrays, *new, lengths, jnp.cos(angles), jnp.sin(angles)

    def append(*arrays, implementation):
        *cache, key, value, lengths, cos, sin = arrays
        before = jaxfused.KVCache(*cache[:2], lengths, None, *cache[2:], float8=float8)
        after = before.append(key, value, cos=cos, sin=sin, implementation=implementation)
        return tuple(getattr(after, name) for name in names)

    rows = 2 * s.many * s.key_heads
    scale = 0 if kept == "bfloat16" else 4
    size = rows * (s.head_size * (2 + dtype.dtype.itemsize) + scale)
    size += 4 * s.many * (s.head_size + 1)
    return Case(
        name=f"append, {kept} cache",
        shape=(s.many, s.cached, s.key_heads, s.head_size),
        make_inputs=make_inputs,
        bytes=size,
        bars=(Bar(GIGABYTES, must=size / _APPEND_MICROSECONDS / 1e3),),
        skipped={"pallas": "there is no Pallas kernel that appends"},
        in_place=len(names),
        **functions(append, {}, {}, differentiable=0, cotangents=0),
    )
