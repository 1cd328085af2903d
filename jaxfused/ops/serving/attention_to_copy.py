"""Attention to a copy of cached keys and values, which runs where no kernel reads the cache."""

from typing import Any

import jax

from jaxfused.ops.attention.attention import dot_product_attention


def attend(
    arrays: Any, options: Any, key: jax.Array, value: jax.Array, implementation: Any
) -> jax.Array:
    """Returns the output [B, T, K, G, V] for keys [B, S, K, H] and values [B, S, K, V] in floats.

    Args:
      arrays: `Arrays` of cache_stages or paged_stages, of which the queries, the lengths, the position
        of the first query, the counts of queries and the sinks are read.
      options: `Options` of the same file, of which scale, soft cap and window are read.
      key: the copy of the keys, and `value` that of the values.
      implementation: of `dot_product_attention`.
    """
    batch, tokens, key_heads, group, size = arrays.query.shape
    output = dot_product_attention(
        arrays.query.reshape(batch, tokens, key_heads * group, size),
        key,
        value,
        scale=options.scale,
        is_causal=tokens > 1,
        local_window_size=None if options.window is None else (options.window - 1, 0),
        logits_soft_cap=options.soft_cap,
        query_offset=arrays.offset,
        query_seq_lengths=arrays.counts,
        key_value_seq_lengths=arrays.lengths,
        sinks=None if arrays.sinks is None else arrays.sinks.reshape(-1),
        implementation=implementation,
    )
    assert isinstance(output, jax.Array)
    return output.reshape(batch, tokens, key_heads, group, value.shape[-1])
