"""One decode step's attention to a contiguous cache, and to pages of a pool in any order.

All peers but JAX's own kernel for pages read the contiguous cache.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jaxfused
from benchmarks.cases.attention import in_torch
from benchmarks.run.case import BEST_PEER, Arrays, Bar, Case, functions


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


_LLAMA = (32, 8, 128)
_WIDE = (Sizes(16, 8192, 128, 1, 576, 0, 512), Sizes(16, 8192, 16, 4, 512, 0))
SHAPES: tuple[Sizes, ...] = (
    *(
        Sizes(batch, length, *_LLAMA, page)
        for batch, length in ((16, 8192), (64, 1024), (1, 32768), (1, 1024))
        for page in (0, 64, 16)
    ),
    *_WIDE,
)
_LARGEST_HEAD = 256
"""Head size beyond which the kernel is one of its own, which XLA may beat."""
QUICK_SHAPES = SHAPES[:3]
_MOST_SPLITS = 32
_LARGE, _SMALL = 128e6, 32e6
"""Bytes that a case reads and writes: its bars differ from `_LARGE` on, and below `_SMALL`."""


def cases(quick: bool = False, shapes: Sequence[Sequence[int]] | None = None) -> list[Case]:
    chosen = shapes or (QUICK_SHAPES if quick else SHAPES)
    return [_case(Sizes(*shape)) for shape in chosen]


def _case(sizes: Sizes) -> Case:
    columns = sizes.head_size + (sizes.value_size or sizes.head_size)
    size = 2 * sizes.batch * (sizes.length * sizes.key_heads + sizes.heads) * columns
    peers: dict[str, Any] = {"flash_attn3": _flash_attn3}
    if not sizes.value_size:  # jax.nn's attention refuses values of another size.
        peers |= {name: partial(_jax_nn, name) for name in ("xla", "cudnn")}
    if sizes.page_size:
        peers["jax_pages"] = _jax_pages
    backends = {"torch_cudnn": "CUDNN_ATTENTION", "torch_flash": "FLASH_ATTENTION"}
    bars = [Bar(BEST_PEER, must=0.98 if size >= _LARGE else 1.0)] if not sizes.page_size else []
    if not sizes.page_size and size < _SMALL:
        bars.append(Bar(BEST_PEER, aim=1.3))
    if sizes.head_size > _LARGEST_HEAD:
        bars = [Bar("reference", must=1.0, ours="pallas")]
    return Case(
        name="decode over pages" if sizes.page_size else "decode",
        shape=tuple(sizes) if sizes.value_size else sizes[:-1],
        make_inputs=partial(_make_inputs, sizes),
        bytes=size,
        bars=tuple(bars),
        **functions(
            _ours_in_pages if sizes.page_size else _ours,
            peers,
            {name: partial(partial, _torch, backend) for name, backend in backends.items()},
            differentiable=0,
            cotangents=0,
        ),
    )


def _make_inputs(sizes: Sizes, key: jax.Array) -> Arrays:
    """Returns (query, key, value, lengths), and with pages (key pages, value pages, page table) too."""
    batch, length, heads, key_heads, head_size, page, value_size = sizes
    keys = jax.random.split(key, 4)
    columns = (head_size, value_size or head_size)
    query = jax.random.normal(keys[0], (batch, 1, heads, head_size), jnp.bfloat16)
    key, value = (
        jax.random.normal(k, (batch, length, key_heads, size), jnp.bfloat16)
        for k, size in zip(keys[1:3], columns, strict=True)
    )
    lengths = jnp.full(batch, length, jnp.int32)
    if not page:
        return query, key, value, lengths
    number = -(-length // page)
    place = jax.random.permutation(keys[3], batch * number).astype(jnp.int32)
    order = jnp.argsort(place)

    def pool(array: jax.Array) -> jax.Array:
        pages = array.reshape(batch * number, page, key_heads, array.shape[-1])[order]
        return pages.transpose(2, 0, 1, 3)

    table = place.reshape(batch, number)
    return query, key, value, lengths, pool(key), pool(value), table


# --- ours and the peers ---------------------------------------------------------------------------


def _ours(query, key, value, lengths, *, implementation):
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
    cache = replace(empty, key=key, value=value, lengths=lengths - 1)
    return cache.attend(query, implementation=implementation)


def _ours_in_pages(query, key, value, lengths, *pages, implementation):
    del key, value
    key_pages, value_pages, table = pages
    scale = query.shape[-1] ** -0.5
    return jaxfused.paged_attention(
        query, key_pages, value_pages, lengths, table, scale=scale, implementation=implementation
    )


def _jax_nn(implementation, query, key, value, lengths, *pages):
    return jax.nn.dot_product_attention(
        query, key, value, key_value_seq_lengths=lengths, implementation=implementation
    )


def _jax_pages(query, key, value, lengths, *pages):
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    key_pages, value_pages, table = pages
    query = query[:, 0] * query.shape[-1] ** -0.5
    return paged_attention(query, key_pages, value_pages, table, lengths)[:, None]


def _flash_attn3(query, key, value, lengths, *pages):
    from flash_attn3_jax import flash_mha_with_kvcache

    # flash_attn3 does not split a head's keys by default; with this many splits CTAs fill 132 SMs.
    parts = max(1, min(_MOST_SPLITS, 132 // (key.shape[0] * key.shape[2])))
    return flash_mha_with_kvcache(query, key, value, cache_seqlens=lengths, num_splits=parts)


def _torch(backend, query, key, value, lengths, *pages):
    # All sequences have their full length, so no mask is needed.
    return in_torch(query, key, value, backend=backend, is_causal=False)
