"""New tokens written into a cache in place, by the kernel of ffi/serving/append.cu."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfused.runtime import cuda_library

_MOST_COLUMNS = 512
KINDS = {"int8": 1, "float8_e4m3fn": 2, "float8_e5m2": 3}
"""Code of each 8-bit format, as in ffi/serving/pages.h; 0 is for plain floats."""


class Tokens(NamedTuple):
    """New tokens, [B, T] or the rows of a ragged batch, and where in the cache they are written."""

    key: Any
    """New keys [tokens, K, H]."""
    value: Any
    """New values [tokens, K, V], of the keys' dtype."""
    lengths: Any
    """Number of tokens of each sequence, int32 [B]: those before the new ones, or in a ragged batch
    all, with the new ones."""
    counts: Any = None
    """New tokens of each sequence, int32 [B], or None for all; a ragged batch's row bounds [B + 1]."""
    sequences: Any = None
    """Number of sequences of a ragged batch, int32 [1]; None for B."""
    table: Any = None
    """Page table, int32 [B, n]; None if sequence b has the single page b."""
    layer: Any = None
    """Index of the layer, int32 []; None for one layer."""
    cos: Any = None
    """Cosines of the keys' rotation, float32 [angles, R/2]; token t uses row t % angles. None
    without rotation."""
    sin: Any = None


class Pages(NamedTuple):
    """Cached arrays that are written in place; all but `key` may be None.

    Keys and values are [pages, tokens of a page, K, features] or [K, pages, tokens of a page,
    features].
    """

    key: Any
    value: Any
    key_scale: Any
    """Scales of 8-bit keys, float32: one per token and head, which the kernel writes, or one per
    head, [K], which it only reads."""
    value_scale: Any


def why_unsupported(
    *,
    compute_capability: tuple[int, int] | None,
    dtype: Any,
    value_dtype: Any,
    kept: Any,
    columns: int,
    places: int,
) -> str | None:
    """Returns None if the kernel can run, else the rule that rejects the call.

    Args:
      compute_capability: of the GPU.
      dtype: of the new keys; `value_dtype` is that of the new values.
      value_dtype: see above.
      kept: dtype of the cached numbers.
      columns: the larger one of the head sizes of keys and values.
      places: tokens of a page; of a sequence, S, without pages.
    """
    if reason := cuda_library.why_unfit(compute_capability, dtype, whose="keys have"):
        return reason
    if value_dtype != dtype:
        return f"it takes keys and values of one dtype, got {dtype} and {value_dtype}"
    kept = jnp.dtype(kept)
    if kept not in cuda_library.DTYPES and kept.name not in KINDS:
        return f"it writes float32, bfloat16, float16 and 8 bits, not {kept}"
    if columns > _MOST_COLUMNS:
        return f"it takes heads of at most {_MOST_COLUMNS} columns, got {columns}"
    if places >= 2**30:
        return "the cache has too many places"
    return cuda_library.why_unavailable()


def forward(
    tokens: Tokens,
    pages: Pages,
    *,
    kept: Any,
    sequence_tokens: int | None,
    layer_pages: int | None = None,
    heads_first: bool = False,
    is_ring: bool = False,
    interleaved: bool = False,
) -> Pages:
    """Returns the pages with the tokens in them, in the memory of the given ones.

    Args:
      tokens: the new keys and values, and their positions.
      pages: the arrays that they are written into.
      kept: dtype of the cached numbers, whose bits the pages hold.
      sequence_tokens: T, the tokens of each sequence; None for a ragged batch.
      layer_pages: pages of a layer, which follow each other; None for all.
      heads_first: whether the heads are the first axis of pages.
      is_ring: whether token p lies at place p % S of its page.
      interleaved: as in `jaxfused.rope`.
    """
    cuda_library.register()

    def operand(array: jax.Array | None, dtype: Any) -> jax.Array:
        # Derived from the keys: in a `jax.shard_map` all operands must vary over the same axes.
        return jnp.zeros_like(tokens.key, shape=(0,), dtype=dtype) if array is None else array

    dtypes = (pages.key.dtype, pages.key.dtype, jnp.float32, jnp.float32)
    written = [operand(a, d) for a, d in zip(pages, dtypes, strict=True)]
    layer = None if tokens.layer is None else tokens.layer.reshape(1)
    integers = (tokens.lengths, tokens.counts, tokens.sequences, tokens.table, layer)
    inputs = [
        tokens.key,
        tokens.value,
        *(operand(a, jnp.float32) for a in (tokens.cos, tokens.sin)),
        *(operand(a, jnp.int32) for a in integers),
    ]
    count = pages.key.shape[1 if heads_first else 0]
    call = jax.ffi.ffi_call(
        "jaxfused_append",
        tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in written),
        input_output_aliases={
            len(inputs) + i: i for i, page in enumerate(pages) if page is not None
        },
    )
    results = call(
        *inputs,
        *written,
        heads_first=np.bool_(heads_first),
        is_ring=np.bool_(is_ring),
        interleaved=np.bool_(interleaved),
        sequence_tokens=np.int32(0 if sequence_tokens is None else sequence_tokens),
        layer_pages=np.int32(count if layer_pages is None else layer_pages),
        kind=np.int32(KINDS.get(jnp.dtype(kept).name, 0)),
    )
    return Pages(*(None if a is None else new for a, new in zip(pages, results, strict=True)))
