"""Attention to a copy of cached keys and values, which runs where no kernel reads the cache."""

from typing import Any

import jax

from jaxfused.ops.attention.attention import dot_product_attention
from jaxfused.ops.serving import new_tokens


def attend(
    arrays: Any, options: Any, key: jax.Array, value: jax.Array, implementation: Any
) -> tuple[jax.Array, ...]:
    """Returns (output [B, T, K, G, V],) for keys [B, S, K, H] and values [B, S, K, V] in floats.

    If the options ask for it, the log-sum-exp [B, T, K, G] comes after the output.

    Args:
      arrays: `Arrays` of cache_stages or paged_stages, of which query, lengths, offset, counts and
        sinks are read.
      options: `Options` of the same file, of which scale, soft cap and window are read.
      key: the copy of the keys, and `value` that of the values.
      implementation: of `dot_product_attention`.
    """
    batch, tokens, key_heads, group, size = arrays.query.shape
    mask: dict[str, Any] = dict(
        is_causal=tokens > 1,
        local_window_size=None if options.window is None else (options.window - 1, 0),
    )
    tree, slopes = getattr(arrays, "tree", None), getattr(arrays, "slopes", None)
    if tree is not None:
        left = None if options.window is None else options.window - 1
        mask = new_tokens.tree_options(tree, arrays.offset, key.shape[1], left)
    if slopes is not None:
        mask |= new_tokens.alibi_options(slopes.reshape(-1), tree, arrays.offset)
    returns_lse = getattr(options, "returns_lse", False)
    results: Any = dot_product_attention(
        arrays.query.reshape(batch, tokens, key_heads * group, size),
        key,
        value,
        scale=options.scale,
        logits_soft_cap=options.soft_cap,
        query_offset=arrays.offset,
        query_seq_lengths=arrays.counts,
        key_value_seq_lengths=arrays.lengths,
        sinks=None if arrays.sinks is None else arrays.sinks.reshape(-1),
        implementation=implementation,
        return_lse=returns_lse,
        **mask,
    )
    return tuple(
        array.reshape(batch, tokens, key_heads, group, *array.shape[3:])
        for array in (results if returns_lse else (results,))
    )
