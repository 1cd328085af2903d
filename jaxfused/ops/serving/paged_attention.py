"""Attention of new tokens to keys and values in pages, for a batch or a ragged batch."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxfused import dispatch
from jaxfused.ops.serving import new_tokens
from jaxfused.ops.serving.paged_stages import More, Options, attend, reads_in_place
from jaxfused.ops.serving.pages import (
    Layout,
    Pages,
    Pools,
    check_table,
    pools_of,
    sequences_of,
    with_whole_rows,
)
from jaxfused.ops.serving.ragged_stages import attend_ragged
from jaxfused.ops.serving.shared_prefix import attend_in_parts, first_pages, is_shared
from jaxfused.runtime.checks import (
    check_count,
    check_finite,
    check_floating,
    check_shape,
    check_soft_cap,
    python_numbers,
)


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
    prefix_pages: int = 0,
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
      prefix_pages: how many pages at the beginning of all sequences may be the same, such as those of a
        system prompt. Where they are, which is tested on the device, their keys are read once for all
        sequences together (a cascade); else as without. The output may differ by a rounding. It has no
        effect beside `sliding_window`, `tree_mask`, `alibi_slopes` and `batch_invariant`, nor where
        the types of arrays split them over devices.
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
    most = page_indices.shape[1] - 1
    if not 0 <= prefix_pages <= max(0, most):
        raise ValueError(
            f"{op}: prefix_pages is {prefix_pages}, but sequences have {most + 1} pages, the last of"
            f" which are their own; pass an int from 0 to {max(0, most)}."
        )
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

    def whole() -> jax.Array:
        (output,) = attend(queries, None, pools, lengths, page_indices, *call)
        return output

    def in_parts() -> jax.Array:
        of_parts = (options, more, implementation, prefix)
        return attend_in_parts(queries, pools, lengths, page_indices, *of_parts)

    if _may_share(prefix_pages, options, more, (queries, *pools[:2], lengths, page_indices)):
        prefix = first_pages(prefix_pages, lengths, page_indices)
        shared = is_shared(prefix, queries.shape[1], pools, lengths, page_indices)
        output = jax.lax.cond(shared, in_parts, whole)
    else:
        output = whole()
    return output if has_tokens else output[:, 0]


def _may_share(pages: int, options: Options, more: More, arrays: Any) -> bool:
    """Returns whether the first pages of all sequences can be attended to on their own."""
    is_whole = options.window is not None or options.batch_invariant
    if pages == 0 or is_whole or more.tree is not None or more.slopes is not None:
        return False
    return not any(any(jax.typeof(x).sharding.spec) for x in jax.tree.leaves(arrays))


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
      implementation: as for `paged_attention`. Where there are many more rows than sequences, None and
        "pallas" run two kernels on Hopper: one for sequences with one new token, and one for the others.
        They need pages in q's 16 bits, heads of 64 or 128 features, and 1, 2, 4, ... or 64 query heads
        a key head.

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
    if rows == 0 or batch == 0:
        return jnp.zeros((*q.shape[:-1], pools.value_size), q.dtype)

    sequences = sequences_of(op, rows, kv_lens, cu_q_lens, num_seqs)
    output = attend_ragged(q, pools, page_indices, sequences, options, sinks, implementation)
    return output if v_scale is None else (output * v_scale).astype(q.dtype)


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
