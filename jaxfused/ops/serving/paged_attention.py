"""Attention of new tokens to keys and values in pages, for a batch or a ragged batch."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxfused import dispatch
from jaxfused.ops.serving import new_tokens
from jaxfused.ops.serving.paged_stages import More, Options, attend, reads_in_place
from jaxfused.ops.serving.pages import (
    Layout,
    Pages,
    Pools,
    Tokens,
    check_table,
    pools_of,
    tokens_of,
    with_whole_rows,
)
from jaxfused.runtime import sharding
from jaxfused.runtime.checks import (
    check_count,
    check_finite,
    check_floating,
    check_shape,
    check_soft_cap,
    python_numbers,
)

_MOST_GATHERED = 2**28
"""Largest number of bytes of keys that a ragged batch gathers at a time."""
_MOST_ROWS = 64
"""Largest number of rows of a tile: queries of one sequence that attend together."""


@python_numbers
def paged_attention(
    q: jax.Array,
    k_pages: Pages,
    v_pages: Pages,
    lengths: jax.Array,
    page_indices: jax.Array,
    *,
    attn_logits_soft_cap: float | None = None,
    pages_per_compute_block: int | None = None,
    scale: float = 1.0,
    sliding_window: int | None = None,
    sinks: jax.Array | None = None,
    tree_mask: jax.Array | None = None,
    alibi_slopes: jax.Array | None = None,
    layout: Layout = "KPSH",
    batch_invariant: bool = False,
    implementation: dispatch.Implementation | None = None,
) -> jax.Array:
    """Attention of each sequence's last tokens to all of its tokens, which lie in pages.

    Names, order and layout are those of `jax.experimental.pallas.ops.tpu.paged_attention`, and so is
    the default scale of 1, for queries that are scaled before. The arguments from `scale` on are added.

    Args:
      q: [B, N, H], the last token of each sequence; or [B, T, N, H], the last T.
      k_pages: [K, P, S, H], or [P, S, K, H] in the layout "PSKH": P pages of S tokens, of any float
        dtype; or such a `QuantizedArray` with a scale of each token and head.
      v_pages: likewise.
      lengths: [B] integers, the tokens of each sequence with those of q. A length of 0 gives an output
        of 0. Values in the pages beyond a length are never used, not even NaN.
      page_indices: [B, n] integers, the pages of each sequence in order; sequences may share pages.
      attn_logits_soft_cap: keeps the logits within (-cap, cap).
      pages_per_compute_block: has no effect. JAX's function asks for it.
      scale: of the logits; pass 1 / sqrt(H) for queries that are not scaled before.
      sliding_window: how many tokens each token sees, with itself; None for all.
      sinks: [N], one learned logit a head, which adds to the softmax's denominator only.
      tree_mask: [B, T, T] bool, which of the last T tokens each of them sees, itself and its ancestors
        where several continuations are tried at once; all see the tokens before them. Positions, for
        `sliding_window` and ALiBi, count the new tokens that a token sees.
      alibi_slopes: [N]: a key's logit is less by its head's slope times its distance.
      layout: the axes of the pages.
      batch_invariant: whether a sequence's output has the same bits whatever the lengths and tokens of
        the other sequences. "pallas" then has one CTA read all of a head's keys, which is slower for
        few long sequences, and "cuda" cannot run.
      implementation: as for `jaxfused.dot_product_attention`, which attends to a copy of the pages.
        In place, "cuda" reads pages of multiples of 8 tokens, in 16 or 8 bits, with heads of 64 or 128
        features, on GPUs from Ampere on; "pallas" reads pages of 8, 16, 32 or a multiple of 64 tokens on
        Hopper GPUs; None takes the faster of both that can.

    Returns:
      The output, of q's shape and dtype. Ids outside the pool are never read: a sequence
      ends before its first page with such an id. Pages past a sequence's length may have any id.

    Raises:
      ValueError: shapes or dtypes do not fit.

    Example:
      >>> import jax.numpy as jnp, jaxfused
      >>> q, pages = jnp.ones((2, 4, 8)), jnp.ones((2, 10, 16, 8))
      >>> table = jnp.array([[7, 3], [1, -1]])
      >>> jaxfused.paged_attention(q, pages, pages, jnp.array([20, 5]), table, scale=8**-0.5).shape
      (2, 4, 8)

    Source: Kwon et al., "PagedAttention", 2023, https://arxiv.org/abs/2309.06180
    """
    del pages_per_compute_block
    op = "paged_attention"
    q, pools = jnp.asarray(q), pools_of(op, (k_pages, v_pages), layout)
    lengths, page_indices, _ = check_table(op, lengths, page_indices)
    has_tokens = q.ndim == 4
    queries = q[:, None] if q.ndim == 3 else q
    _check_queries(op, queries, lengths.shape[0], pools)
    check_finite(op, "scale", scale)
    check_soft_cap(op, attn_logits_soft_cap, "attn_logits_soft_cap")
    options = _options(
        op,
        Options(layout, scale, attn_logits_soft_cap, sliding_window, batch_invariant),
        sinks,
        queries,
        implementation,
    )
    more = More(sinks, *new_tokens.check(op, queries, tree_mask, alibi_slopes))
    in_place = reads_in_place(queries, pools, page_indices, options, implementation, more)
    call = (options, more, implementation, in_place)
    output = attend(queries, None, pools, lengths, page_indices, *call)
    return output if has_tokens else output[:, 0]


@python_numbers
def ragged_paged_attention(
    q: jax.Array,
    kv_pages: jax.Array | tuple[Pages, Pages],
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array | None = None,
    *,
    sm_scale: float = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    sinks: jax.Array | None = None,
    layout: Layout = "PSKH",
    batch_invariant: bool = False,
    implementation: dispatch.Implementation | None = None,
) -> jax.Array:
    """Attention of any number of new tokens of each sequence: chunks of prompts, or single tokens.

    Names, order and layout are those of `jax.experimental.pallas.ops.tpu.ragged_paged_attention`;
    `sinks`, pages as a pair and their `layout` are added. `append_to_pages` takes the same
    arguments.

    Args:
      q: [tokens, N, H], the new tokens of all sequences, one after the other: each sequence's last ones.
      kv_pages: [P, S, 2 K, H] with keys at even heads and values at odd ones, or (k_pages, v_pages) as
        for `paged_attention`.
      kv_lens: [B] integers, the tokens of each sequence with the new ones.
      page_indices: [B, n] integers, the pages of each sequence in order; sequences may share pages.
      cu_q_lens: [B + 1] integers; sequence b has rows cu_q_lens[b] to cu_q_lens[b + 1]. Those that q
        does not have are left out.
      num_seqs: [1] integers, how many sequences there are; None for B.
      sm_scale: of the logits; by default queries come scaled.
      sliding_window: how many tokens each token sees, with itself; None for all.
      soft_cap: keeps the logits within (-cap, cap).
      k_scale: by which the pages' keys are multiplied.
      v_scale: by which the values are.
      sinks: [N], one learned logit a head, which adds to the softmax's denominator only.
      layout: the axes of a pair of pools.
      batch_invariant: as for `paged_attention`.
      implementation: as for `paged_attention`.

    Returns:
      [tokens, N, V], of q's dtype; rows of no sequence are 0. Ids outside the pool are as for
      `paged_attention`.

    Raises:
      ValueError: shapes or dtypes do not fit.

    Example:
      >>> import jax.numpy as jnp, jaxfused
      >>> q, pages = jnp.ones((6, 4, 8)), jnp.ones((10, 16, 4, 8))
      >>> table = jnp.array([[7, 3], [1, -1]])
      >>> jaxfused.ragged_paged_attention(
      ...     q, pages, jnp.array([20, 5]), table, jnp.array([0, 1, 6]), sm_scale=8**-0.5).shape
      (6, 4, 8)

    Source: Kwon et al., "PagedAttention", 2023, https://arxiv.org/abs/2309.06180; JAX's
    ragged_paged_attention for TPUs
    """
    op = "ragged_paged_attention"
    q, pools = jnp.asarray(q), pools_of(op, kv_pages, layout)
    kv_lens, page_indices, cu_q_lens = check_table(op, kv_lens, page_indices, cu_q_lens)
    _check_queries(op, q[None] if q.ndim == 3 else q, 1, pools)
    # Devices cannot split the rows: the sequence of a row is known only at run time.
    q, *table = with_whole_rows(q, kv_lens, page_indices, cu_q_lens)
    kv_lens, page_indices, cu_q_lens = table
    batch, rows = kv_lens.shape[0], q.shape[0]
    check_soft_cap(op, soft_cap, "soft_cap")
    for name, factor in {"sm_scale": sm_scale, "k_scale": k_scale, "v_scale": v_scale}.items():
        if factor is not None or name == "sm_scale":
            check_finite(op, name, factor)
    scale = sm_scale if k_scale is None else sm_scale * k_scale
    given = Options(layout, scale, soft_cap, sliding_window, batch_invariant)
    options = _options(op, given, sinks, q[None], implementation)
    places = page_indices.shape[1] * pools.page_size * pools.heads
    tile_bytes = places * (pools.key.shape[-1] + pools.value_size) * q.dtype.itemsize
    if rows == 0 or batch == 0:
        return jnp.zeros((*q.shape[:-1], pools.value_size), q.dtype)

    tokens = tokens_of(op, rows, kv_lens, cu_q_lens, num_seqs)
    in_place = reads_in_place(q[None, :1], pools, page_indices[:1], options, implementation)
    # In a kernel, each token of a tile has one row for every query head that shares a key head.
    most = max(1, _MOST_ROWS * pools.heads // q.shape[1]) if in_place else _MOST_ROWS
    tiles = _tiles(tokens, min(most, -(-rows // batch)), kv_lens, cu_q_lens)
    row = tiles.first[:, None] + jnp.arange(tiles.rows, dtype=jnp.int32)[None]
    queries = jnp.take(q, row, axis=0, mode="clip")

    def of(queries: jax.Array, owner: jax.Array, count: jax.Array, length: jax.Array) -> Any:
        call = (options, More(sinks), implementation, in_place)
        return attend(queries, count, pools, length, page_indices[owner], *call)

    # The tiles are processed in groups, because a copy of the pages of all tiles takes too much memory.
    arrays = (queries, tiles.owner, tiles.valid, tiles.length)
    output = of(*arrays) if in_place else _in_groups(of, arrays, tile_bytes)
    output = jnp.take(output.reshape(-1, *output.shape[2:]), tiles.place, axis=0, mode="clip")
    output = output if v_scale is None else (output * v_scale).astype(q.dtype)
    return jnp.where(tokens.is_token[:, None, None], output, 0)


class _Tiles(NamedTuple):
    """Tiles of a ragged batch: up to `rows` consecutive rows of one sequence, which attend together."""

    rows: int
    owner: jax.Array
    """Sequence of each tile, [tiles]."""
    first: jax.Array
    """First row of each tile, [tiles]."""
    valid: jax.Array
    """Number of rows of each tile, [tiles]; 0 for unused tiles."""
    length: jax.Array
    """Tokens of the sequence up to the tile's last row, [tiles]."""
    place: jax.Array
    """Position of each row of the batch among the rows of all tiles, [rows of the batch]."""


def _tiles(tokens: Tokens, size: int, kv_lens: jax.Array, cu_q_lens: jax.Array) -> _Tiles:
    """Divides rows into tiles, each of up to `size` rows of one sequence.

    The number of tiles depends on shapes alone and suffices for any lengths; unused tiles have 0
    rows.
    """
    batch, rows = kv_lens.shape[0], tokens.position.shape[0]
    tile = jnp.arange((rows + batch * (size - 1)) // size, dtype=jnp.int32)
    counts = jnp.zeros(batch, jnp.int32)
    counts = counts.at[tokens.sequence].add(tokens.is_token.astype(jnp.int32))
    ends = jnp.cumsum(-(-counts // size))
    starts = ends - -(-counts // size)
    owner = jnp.minimum(sharding.searchsorted(ends, tile, side="right"), batch - 1)
    within = (tile - starts[owner]) * size
    count = jnp.where(tile < ends[-1], jnp.clip(counts[owner] - within, 0, size), 0)
    # Rows that `cu_q_lens` has beyond the batch's are the last ones of their sequences.
    missing = jnp.maximum(cu_q_lens[1:] - rows, 0)
    first_rows = cu_q_lens[1:] - missing - counts
    number = jnp.arange(rows, dtype=jnp.int32) - first_rows[tokens.sequence]
    return _Tiles(
        size,
        owner,
        first_rows[owner] + within,
        count,
        (kv_lens - missing - counts)[owner] + within + count,
        starts[tokens.sequence] * size + number,
    )


def _in_groups(
    function: Callable[..., jax.Array], arrays: tuple[jax.Array, ...], entry_bytes: int
) -> jax.Array:
    """Returns `function(*arrays)`, computed for a few entries of the arrays' first axis at a time.

    Each entry takes `entry_bytes`; those computed together take about `_MOST_GATHERED` bytes at
    most.
    """
    count = arrays[0].shape[0]
    groups = min(count, -(-count * entry_bytes // _MOST_GATHERED))
    if groups <= 1:
        return function(*arrays)
    size = -(-count // groups)
    groups = -(-count // size)

    def grouped(array: jax.Array) -> jax.Array:
        padding = [(0, groups * size - count)] + [(0, 0)] * (array.ndim - 1)
        return jnp.pad(array, padding).reshape(groups, size, *array.shape[1:])

    output = jax.lax.map(lambda group: function(*group), tuple(map(grouped, arrays)))
    return output.reshape(groups * size, *output.shape[2:])[:count]


def _options(
    op: str, given: Options, sinks: Any, queries: jax.Array, implementation: Any
) -> Options:
    """Returns the options of the attention after their checks."""
    # This checks the name only; whether the implementation can run depends on shapes, checked later.
    dispatch.choose(op, implementation, dict.fromkeys(("pallas", "cuda", "xla")))
    if given.window is not None:
        check_count(op, "sliding_window", given.window)
    if sinks is not None:
        heads = queries.shape[2]
        check_shape(op, "sinks", jnp.asarray(sinks), (heads,), f"there are {heads} query heads")
    cap = None if given.soft_cap is None else float(given.soft_cap)
    return replace(given, scale=float(given.scale), soft_cap=cap)


def _check_queries(op: str, queries: jax.Array, batch: int, pools: Pools) -> None:
    check_floating(op, {"q": queries})
    heads, head_size = pools.heads, pools.key.shape[-1]
    if (
        queries.ndim != 4
        or queries.shape[0] != batch
        or queries.shape[-1] != head_size
        or heads == 0
        or queries.shape[2] % heads
    ):
        raise ValueError(
            f"{op}: q has shape {queries.shape} with all axes, but there are {batch} sequences, and"
            f" pages in the layout {pools.layout} with {heads} heads of {head_size}, which query heads"
            " share evenly; pass q of that batch and head size, or name the pages' layout."
        )
