"""One decode step's attention to a contiguous cache of 16 or 8 bits, and to pages in any order.

All peers but FlashAttention 3 and JAX's own kernel for pages read the contiguous cache. Before these
cases come the calls of benchmarks/cases/serving_calls.py.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jaxfused
from benchmarks.cases import serving_calls
from benchmarks.cases.attention import in_torch
from benchmarks.run.case import (
    BEST_PEER,
    BULK_READ,
    CONTIGUOUS,
    FLOAT_CACHE,
    Arrays,
    Bar,
    Case,
    functions,
)


class Sizes(NamedTuple):
    """Sizes of a decode step."""

    batch: int
    length: int
    """Tokens of each sequence."""
    heads: int
    key_heads: int
    head_size: int
    page_size: int
    """Tokens of a page; 0 for a contiguous cache."""
    value_size: int = 0
    """Columns of a value; 0 for the head size."""
    kept: str = "bfloat16"
    """dtype of keys and values; those of 8 bits have a scale of each token and head."""
    tokens: int = 1
    """New tokens of each sequence, the last ones of its length."""


_LLAMA = (32, 8, 128)
_WIDE = (Sizes(16, 8192, 128, 1, 576, 0, 512), Sizes(16, 8192, 16, 4, 512, 0))
_EIGHT_BITS = tuple(
    Sizes(batch, length, *_LLAMA, 0, 0, kept)
    for batch, length in ((16, 8192), (64, 8192), (1, 32768))
    for kept in ("int8", "float8_e4m3fn")
)
_CHUNK = Sizes(1, 32768, *_LLAMA, 0, tokens=512)
_SMALL_CACHES = tuple(
    Sizes(batch, length, *_LLAMA, 0, tokens=tokens)
    for tokens, pairs in (
        (1, ((1, 4096), (4, 1024), (8, 512), (32, 128))),
        (4, ((1, 1024), (4, 1024))),
    )
    for batch, length in pairs
)
SHAPES: tuple[Sizes, ...] = (
    _CHUNK,
    Sizes(64, 8192, *_LLAMA, 0),
    *_SMALL_CACHES,
    *(
        Sizes(batch, length, *_LLAMA, page)
        for batch, length in ((16, 8192), (64, 1024), (1, 32768), (1, 1024))
        for page in (0, 64, 16)
    ),
    *_EIGHT_BITS,
    *_WIDE,
)
_LARGEST_HEAD = 256
"""Head size beyond which the kernel is one of its own, which XLA may beat."""
QUICK_SHAPES = tuple(Sizes(16, 8192, *_LLAMA, page) for page in (0, 64, 16))
_MOST_SPLITS = 32
_QUERY_ROWS = 128
"""Rows of a tile of flash_attn3: queries of all heads that share a key head."""
_DECODED = 16
"""Most new tokens of a decode step; more are a chunk of a prompt."""
_LARGE, _SMALL = 128e6, 32e6
"""Bytes that a case reads and writes: its bars differ from `_LARGE` on, and below `_SMALL`."""


def cases(quick: bool = False, shapes: Sequence[Sequence[int]] | None = None) -> list[Case]:
    chosen = shapes or (QUICK_SHAPES if quick else SHAPES)
    sizes = [Sizes(*shape) for shape in chosen]
    calls = [] if quick or shapes else serving_calls.calls()
    return calls + [_case(s) if s.kept == "bfloat16" else _eight_bit_case(s) for s in sizes]


def _case(sizes: Sizes) -> Case:
    columns = sizes.head_size + (sizes.value_size or sizes.head_size)
    rows = sizes.length * sizes.key_heads + sizes.tokens * sizes.heads
    size = 2 * sizes.batch * rows * columns
    name, flops = "decode over pages" if sizes.page_size else "decode", 0
    if sizes.tokens > 1:
        name = f"{'chunk' if sizes.tokens > _DECODED else 'decode'} of {sizes.tokens} tokens"
    if sizes.tokens > _DECODED:
        seen = sizes.tokens * sizes.length - sizes.tokens * (sizes.tokens - 1) // 2
        flops = 2 * sizes.batch * sizes.heads * seen * columns
    backends = {"torch_cudnn": "CUDNN_ATTENTION", "torch_flash": "FLASH_ATTENTION"}
    if sizes.tokens > 1:  # torch's causal mask is that of the first queries.
        backends = {}
    return Case(
        name=name,
        shape=sizes[:7] if sizes.value_size else sizes[:6],
        make_inputs=partial(_make_inputs, sizes),
        bytes=size,
        flops=flops,
        bars=_bars(sizes, size),
        **functions(
            _ours_in_pages if sizes.page_size else _ours,
            _peers(sizes),
            {name: partial(partial, _torch, backend) for name, backend in backends.items()},
            differentiable=0,
            cotangents=0,
        ),
    )


def _peers(sizes: Sizes) -> dict[str, Any]:
    peers: dict[str, Any] = {}
    if sizes.head_size <= _LARGEST_HEAD:
        peers["flash_attn3"] = _flash_attn3
    if not sizes.value_size:  # jax.nn's attention refuses values of another size.
        peers |= {name: partial(_jax_nn, name) for name in ("xla", "cudnn")}
    if sizes.page_size:
        peers |= {"jax_pages": _jax_pages, CONTIGUOUS: _contiguous}
    return peers


def _bars(sizes: Sizes, size: int) -> tuple[Bar, ...]:
    if sizes.head_size > _LARGEST_HEAD:
        return (Bar("reference", must=1.0, ours="pallas"),)
    if sizes.tokens > _DECODED:
        return Bar("flash_attn3", must=1.03), Bar("cudnn", must=1.2)
    if sizes.page_size:
        contiguous = Bar(CONTIGUOUS, must=1 / (1.03 if sizes.page_size >= 64 else 1.12))
        return contiguous, Bar("flash_attn3", must=1.0)
    bars = [Bar(BEST_PEER, must=0.98 if size >= _LARGE and sizes.batch > 1 else 1.0)]
    if size < _SMALL:  # 1.3 is for the geometric mean of these.
        bars.append(Bar(BEST_PEER, aim=1.3))
    if sizes.length >= 8192:
        bars.append(Bar(BULK_READ, must=0.96 if sizes.batch >= 16 else 0.85))
    return tuple(bars)


def _eight_bit_case(sizes: Sizes) -> Case:
    """Returns decode over keys and values of 8 bits, beside the same over bfloat16."""
    rows = sizes.batch * sizes.length * sizes.key_heads
    share = 0.58 if sizes.batch >= 16 else 0.8
    return Case(
        name=f"decode, {sizes.kept} cache",
        shape=sizes[:6],
        make_inputs=partial(_make_eight_bit_inputs, sizes),
        bytes=2 * rows * (sizes.head_size + 4) + 4 * sizes.batch * sizes.heads * sizes.head_size,
        bars=(Bar(FLOAT_CACHE, must=1 / share),),
        **functions(
            _ours_of_eight_bits,
            {FLOAT_CACHE: _of_float_cache},
            {},
            differentiable=0,
            cotangents=0,
        ),
    )


def _make_inputs(sizes: Sizes, key: jax.Array) -> Arrays:
    """Returns (query, key, value, lengths, held), and with pages (keys, values, table, keys, values).

    `held` are the lengths without the new tokens, as a cache has them before a step. The first pages
    are [K, P, S, H], and the last are the same as [P, S, K, H].
    """
    batch, length, heads, key_heads, head_size, page, value_size, _, tokens = sizes
    keys = jax.random.split(key, 4)
    columns = (head_size, value_size or head_size)
    query = jax.random.normal(keys[0], (batch, tokens, heads, head_size), jnp.bfloat16)
    key, value = (
        jax.random.normal(k, (batch, length, key_heads, size), jnp.bfloat16)
        for k, size in zip(keys[1:3], columns, strict=True)
    )
    lengths = jnp.full(batch, length, jnp.int32)
    held = lengths - tokens
    if not page:
        return query, key, value, lengths, held
    number = -(-length // page)
    place = jax.random.permutation(keys[3], batch * number).astype(jnp.int32)
    order = jnp.argsort(place)

    pages = [a.reshape(batch * number, page, key_heads, -1)[order] for a in (key, value)]
    pools = [a.transpose(2, 0, 1, 3) for a in pages]
    return query, key, value, lengths, held, *pools, place.reshape(batch, number), *pages


def _make_eight_bit_inputs(sizes: Sizes, key: jax.Array) -> Arrays:
    """Returns (query, held, key, value, their scales), and another key and value in bfloat16.

    Float8 numbers are their bits, uint8, as in the cache.
    """
    draws = jax.random.split(key, 5)
    query, wide_key, wide_value, _, held = _make_inputs(sizes, draws[0])

    def kept(key: jax.Array) -> jax.Array:
        numbers = (32 * jax.random.normal(key, wide_key.shape)).clip(-127, 127).astype(sizes.kept)
        is_int = sizes.kept == "int8"
        return numbers if is_int else jax.lax.bitcast_convert_type(numbers, jnp.uint8)

    scales = [
        jax.random.uniform(k, wide_key.shape[:-1], minval=1 / 64, maxval=1 / 32) for k in draws[3:]
    ]
    return query, held, kept(draws[1]), kept(draws[2]), *scales, wide_key, wide_value


# --- ours and the peers ---------------------------------------------------------------------------


def _ours(query, key, value, lengths, held, *, implementation):
    del lengths
    batch, length, key_heads, head_size = key.shape
    empty = jax.eval_shape(
        lambda: jaxfused.KVCache.zeros(
            batch=batch,
            length=length,
            key_heads=key_heads,
            head_size=head_size,
            value_size=value.shape[-1],
            dtype=key.dtype,
        )
    )
    cache = replace(empty, key=key, value=value, lengths=held)
    return cache.attend(query, implementation=implementation)


def _contiguous(query, key, value, lengths, held, *pages):
    return _ours(query, key, value, lengths, held, implementation=None)


def _ours_of_eight_bits(query, held, key, value, *arrays, implementation):
    float8 = None if key.dtype == jnp.int8 else "float8_e4m3fn"
    cache = jaxfused.KVCache(key, value, held, None, *arrays[:2], float8=float8)
    return cache.attend(query, implementation=implementation)


def _of_float_cache(query, held, *arrays):
    return _ours(query, *arrays[-2:], None, held, implementation=None)


def _ours_in_pages(query, key, value, lengths, held, *pages, implementation):
    del key, value, held
    key_pages, value_pages, table, *_ = pages
    scale = query.shape[-1] ** -0.5
    return jaxfused.paged_attention(
        query, key_pages, value_pages, lengths, table, scale=scale, implementation=implementation
    )


def _jax_nn(implementation, query, key, value, lengths, held, *pages):
    options: dict[str, Any] = dict(key_value_seq_lengths=lengths)
    if (tokens := query.shape[1]) > 1:
        # jax.nn's causal mask counts from the first key.
        last = lengths[:, None] - tokens + jnp.arange(tokens)
        options = dict(mask=(jnp.arange(key.shape[1]) <= last[..., None])[:, None])
    return jax.nn.dot_product_attention(query, key, value, **options, implementation=implementation)


def _jax_pages(query, key, value, lengths, held, *pages):
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    key_pages, value_pages, table, *_ = pages
    query = query[:, 0] * query.shape[-1] ** -0.5
    return paged_attention(query, key_pages, value_pages, table, lengths)[:, None]


def _flash_attn3(query, key, value, lengths, held, *pages):
    from flash_attn3_jax import flash_mha_with_kvcache

    # flash_attn3 does not split a head's keys by default; with this many splits CTAs fill 132 SMs.
    batch, tokens, heads, _ = query.shape
    tiles = batch * key.shape[2] * -(-tokens * heads // (key.shape[2] * _QUERY_ROWS))
    parts = max(1, min(_MOST_SPLITS, 132 // tiles))
    options = dict(cache_seqlens=lengths, num_splits=parts, is_causal=query.shape[1] > 1)
    if pages:
        *_, table, key, value = pages
        options["page_table"] = table
    return flash_mha_with_kvcache(query, key, value, **options)


def _torch(backend, query, key, value, lengths, held, *pages):
    # All sequences have their full length, so no mask is needed.
    return in_torch(query, key, value, backend=backend, is_causal=False)
