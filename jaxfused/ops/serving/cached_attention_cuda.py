"""Attention to a paged or contiguous cache, by the kernel of ffi/serving/cached_attention.cu."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfused import dispatch
from jaxfused.ops.serving.append_cuda import KINDS
from jaxfused.runtime import cuda_library

HEAD_SIZES = (64, 128)
MOST_ROWS = 64
"""Largest number of queries of a key head, over its query heads, that the kernel takes."""
ROWS_OF_A_READ = 16
"""Largest number of queries of a key head for which a warp reads the keys once."""
_TILE_KEYS = 16
"""Keys of a warp's tile."""
_MOST_BLOCKS = 8
"""Largest number of blocks of a cluster."""
_MOST_BLOCK_WARPS, _MOST_BLOCK_WARPS_OF_16_ROWS = 12, 8
"""Largest numbers of warps of a cluster's block, for up to 8 and 16 queries of a key head."""
_WARPS_OF_SEVERAL_BLOCKS = 4
"""Warps of a cluster's block where an SM has several of them."""
_MOST_WARP_TILES = 8
"""Largest number of tiles that a warp of a cluster attends to."""
_WARPS = 16
"""Largest number of the kernel's warps on an SM at a time."""


class Clusters(NamedTuple):
    """How one kernel attends to short sequences, without a second one that merges partial outputs."""

    blocks: int
    """Thread blocks of a cluster, which share a sequence's keys of a head."""
    warps: int
    """Warps of a block."""


class Cache(NamedTuple):
    """Arrays of a cache; all but `key` may be None."""

    key: Any
    """Keys in P pages of S tokens: [P, S, K, H] or [K, P, S, H]; or [P, S, 2 K, H] with values at
    the odd heads."""
    value: Any
    key_scale: Any
    """Scales of an 8-bit cache, float32, shaped like `key` without H; an axis may have length 1."""
    value_scale: Any
    table: Any
    """Page table, int32 [B, n]; None if sequence b has page b alone."""
    layer: Any = None
    """Index of the layer, int32 []. Its pages start at page `layer * layer_pages`; None for layer 0."""


def why_unsupported(
    *,
    compute_capability: tuple[int, int] | None,
    dtype: Any,
    kept: Any,
    rows: int,
    head_size: int,
    value_size: int,
    page_size: int,
    most_pages: int,
    is_combined: bool,
) -> str | None:
    """Returns None if the kernel can run, else the rule that rejects the call.

    Args:
      compute_capability: of the GPU.
      dtype: of the queries.
      kept: dtype of the cached keys and values.
      rows: queries of a key head: new tokens times the query heads that share it.
      head_size: H.
      value_size: V.
      page_size: tokens of a page.
      most_pages: largest number of pages of a sequence.
      is_combined: whether keys and values lie in one array.
    """
    if reason := cuda_library.why_unfit(compute_capability):
        return reason
    assert compute_capability is not None
    if compute_capability < (8, 0):
        return "it needs compute capability 8.0 or later"
    kept = jnp.dtype(kept)
    if dtype not in (jnp.bfloat16, jnp.float16) or (kept != dtype and kept.name not in KINDS):
        return (
            f"queries must have 16 bits, and the cache their dtype or 8 bits, got {dtype}, {kept}"
        )
    if is_combined and kept != dtype:
        return "keys and values of 8 bits must lie in two arrays"
    if head_size != value_size or head_size not in HEAD_SIZES:
        return f"heads must have 64 or 128 columns, got {head_size} and {value_size}"
    if not 1 <= rows <= MOST_ROWS:
        return f"a key head must have from 1 to {MOST_ROWS} queries, got {rows}"
    if most_pages > 1 and page_size % 8:
        return f"pages must hold a multiple of 8 tokens, got {page_size}"
    if most_pages * page_size >= 2**30:
        return "a sequence has too many places"
    return cuda_library.why_not_built_from((8, 0), compute_capability)


def clusters(
    shape: tuple[int, ...], places: int, window: int | None, device: dispatch.Device
) -> Clusters | None:
    """Returns clusters for queries of shape [B, T, K, G, H], or None if sequences are too long for them.

    Clusters of several blocks fill half of the SMs at most: a group of SMs that share a cluster has some
    that no whole cluster fits, and a second wave would take as long as the first.

    Args:
      shape: of the queries.
      places: largest number of keys of a sequence.
      window: keys that a query sees, or None for all.
      device: the GPU.
    """
    if device.compute_capability is None or device.compute_capability < (9, 0):
        return None
    batch, tokens, key_heads, group, _ = shape
    rows = tokens * group
    tiles = -(-min(places, places if window is None else window + tokens) // _TILE_KEYS)
    units = batch * key_heads * -(-rows // ROWS_OF_A_READ)
    warps = _MOST_BLOCK_WARPS if rows <= ROWS_OF_A_READ // 2 else _MOST_BLOCK_WARPS_OF_16_ROWS
    blocks = 1
    while (
        blocks < _MOST_BLOCKS
        and 4 * blocks * units <= device.multiprocessors
        and blocks * warps < tiles
    ):
        blocks *= 2
    if blocks * units > device.multiprocessors:
        warps = _WARPS_OF_SEVERAL_BLOCKS
    return Clusters(blocks, warps) if tiles <= _MOST_WARP_TILES * blocks * warps else None


def clusters_win(
    shape: tuple[int, ...], places: int, window: int | None, device: dispatch.Device
) -> bool:
    """Returns whether one kernel of `clusters` is faster than `split_keys` and the merge after it.

    Measured on an H200, it is for up to 8 rows, where the clusters are on SMs of their own and on a
    quarter of all SMs or more; elsewhere a merge takes less than the barriers of a cluster.
    """
    batch, tokens, key_heads, group, _ = shape
    shared = clusters(shape, places, window, device)
    if shared is None or tokens * group > ROWS_OF_A_READ // 2:
        return False
    blocks = batch * key_heads * shared.blocks
    return device.multiprocessors / 4 < blocks <= device.multiprocessors


def forward(
    query: jax.Array,
    cache: Cache,
    *,
    lengths: jax.Array | None,
    offsets: jax.Array,
    counts: jax.Array | None,
    sinks: jax.Array | None,
    heads_first: bool,
    kept: Any,
    layer_pages: int | None,
    window: int | None,
    scale: float,
    soft_cap: float | None,
    device: dispatch.Device,
) -> tuple[jax.Array, jax.Array]:
    """Returns the attention output, like the queries [B, T, K, G, H], and the log-sum-exp [B, T, K, G].

    `Arrays` of paged_stages describes the operands. `kept` is the dtype of the cached numbers, even if
    the cache holds their bits in another one. A layer has `layer_pages` pages; None for all.
    """
    cuda_library.register()
    batch, tokens, key_heads, group, size = query.shape
    rows = tokens * group
    units, unit_rows = key_heads * -(-rows // ROWS_OF_A_READ), min(rows, ROWS_OF_A_READ)
    pages = cache.key.shape[1 if heads_first else 0]
    places = cache.key.shape[-2 if heads_first else -3]
    places *= 1 if cache.table is None else cache.table.shape[1]
    shared = clusters(query.shape, places, window, device) or Clusters(0, 0)
    slots = 1 if shared.blocks else max(1, device.multiprocessors * _WARPS // units)
    results = (
        jax.ShapeDtypeStruct(query.shape, query.dtype),
        jax.ShapeDtypeStruct(query.shape[:-1], jnp.float32),
        jax.ShapeDtypeStruct((slots + batch, units, unit_rows, size), jnp.float32),
        jax.ShapeDtypeStruct((slots + batch, units, unit_rows, 2), jnp.float32),
    )

    def operand(array: jax.Array | None, dtype: Any) -> jax.Array:
        # Derived from the query: in a `jax.shard_map` all operands must vary over the same axes.
        return jnp.zeros_like(query, shape=(0,), dtype=dtype) if array is None else array

    layer = None if cache.layer is None else cache.layer.reshape(1)
    output, lse, _, _ = jax.ffi.ffi_call("jaxfused_cached_attention", results)(
        query,
        cache.key,
        operand(cache.value, cache.key.dtype),
        operand(cache.key_scale, jnp.float32),
        operand(cache.value_scale, jnp.float32),
        operand(cache.table, jnp.int32),
        operand(lengths, jnp.int32),
        offsets,
        operand(counts, jnp.int32),
        operand(sinks, jnp.float32),
        operand(layer, jnp.int32),
        heads_first=np.bool_(heads_first),
        kind=np.int32(KINDS.get(jnp.dtype(kept).name, 0)),
        layer_pages=np.int32(pages if layer_pages is None else layer_pages),
        window=np.int32(0 if window is None else window),
        cluster=np.int32(shared.blocks),
        cluster_warps=np.int32(shared.warps),
        scale=np.float32(scale),
        cap=np.float32(0.0 if soft_cap is None else soft_cap),
    )
    return output, lse
