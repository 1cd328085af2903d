"""Attention in two parts (a cascade): to the pages that all sequences share, and to each one's own.

The keys of the shared pages are read once for the queries of all sequences together, as if these were
queries of one sequence; each sequence's own pages are read as always. With the outputs o and the
log-sum-exps l of all parts p, the output is `sum_p exp(l_p - m) o_p / sum_p exp(l_p - m)`, where m is
the largest l.

Source: Ye et al., "FlashInfer", 2025, https://arxiv.org/abs/2501.01005
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxfused.ops.attention.attention import dot_product_attention
from jaxfused.ops.serving.paged_stages import More, Options, attend, reads_in_place
from jaxfused.ops.serving.pages import Pools, is_in_pool

_PART_KEYS = 512
"""Fewest keys of a part of the shared pages; parts keep more SMs busy."""
_MOST_PARTS = 16


def first_pages(pages: int, lengths: jax.Array, page_indices: jax.Array) -> jax.Array:
    """Returns the first `pages` pages of the first sequence that has tokens."""
    return page_indices[jnp.argmax(lengths > 0), :pages]


def is_shared(
    prefix: jax.Array, tokens: int, pools: Pools, lengths: jax.Array, page_indices: jax.Array
) -> jax.Array:
    """Returns whether all sequences begin with the pages `prefix`, before the last `tokens` tokens.

    Sequences of length 0 do not count.
    """
    pages = prefix.size
    is_alike = (page_indices[:, :pages] == prefix) & is_in_pool(prefix, pools.pages)
    has_all = jnp.all(is_alike, 1) & (lengths >= pages * pools.page_size + tokens)
    return jnp.all(has_all | (lengths <= 0))


def attend_in_parts(
    queries: jax.Array,
    pools: Pools,
    lengths: jax.Array,
    page_indices: jax.Array,
    options: Options,
    more: More,
    implementation: Any,
    prefix: jax.Array,
) -> jax.Array:
    """Returns the output [B, T, N, V] where `is_shared`; it is 0 for sequences of length 0."""
    batch, tokens, heads, size = queries.shape
    pages = prefix.size
    keys = pages * pools.page_size
    key, value = pools.read(prefix[None], jnp.full(1, keys, jnp.int32), queries.dtype)
    parts = _parts_of(pages, pools.page_size)
    key, value = (a.reshape(parts, keys // parts, *a.shape[2:]) for a in (key, value))
    rows = queries.reshape(1, batch * tokens, heads, size)
    outputs, lses = dot_product_attention(
        jnp.broadcast_to(rows, (parts, *rows.shape[1:])),
        key,
        value,
        scale=options.scale,
        logits_soft_cap=options.soft_cap,
        return_lse=True,
        implementation=implementation,
    )
    options = replace(options, returns_lse=True)
    table = page_indices[:, pages:]
    in_place = reads_in_place(queries, pools, table, options, implementation, more)
    rest = (options, more, implementation, in_place)
    own, own_lse = attend(queries, None, pools, lengths - keys, table, *rest)
    outputs = jnp.concatenate([outputs.reshape(parts, *own.shape), own[None]]).astype(jnp.float32)
    lses = jnp.concatenate([lses.reshape(parts, *own_lse.shape), own_lse[None]])
    # The first parts have keys, so that the maximum is finite.
    weights = jnp.exp(lses - lses.max(0))
    output = (weights[..., None] * outputs).sum(0) / weights.sum(0)[..., None]
    return jnp.where((lengths > 0)[:, None, None, None], output, 0).astype(own.dtype)


def _parts_of(pages: int, page_size: int) -> int:
    """Returns into how many equal parts of whole pages the shared pages are divided."""
    most = max(1, min(_MOST_PARTS, pages * page_size // _PART_KEYS))
    return next(n for n in range(most, 0, -1) if pages % n == 0)
