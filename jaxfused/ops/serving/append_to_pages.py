"""append_to_pages: keys and values of new tokens written into pages."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxfused import dispatch
from jaxfused.ops.serving import page_append_stages
from jaxfused.ops.serving.pages import (
    Layout,
    Pages,
    are_own,
    are_shared,
    check_table,
    pools_of,
    with_whole_rows,
)
from jaxfused.runtime.checks import as_arrays, check_floating, check_shape, python_numbers
from jaxfused.runtime.quantized_array import FORMATS, QuantizedArray


@python_numbers
def append_to_pages(
    kv_pages: jax.Array | tuple[Pages, Pages],
    key: jax.Array,
    value: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array | None = None,
    *,
    layout: Layout = "PSKH",
    implementation: dispatch.Implementation | None = None,
) -> Any:
    """Writes the keys and values of new tokens into pages, in place where those are donated.

    The arguments are those of `ragged_paged_attention`, which reads these pages: each sequence's
    rows are its last tokens, and `kv_lens` includes them. For one new token of each sequence,
    `cu_q_lens` is 0, 1, 2, ...

    Args:
      kv_pages: [P, S, 2 K, H] with keys at even heads and values at odd ones, or (k_pages, v_pages) in
        the layout, which may be `QuantizedArray`s: new tokens are then quantised, with a scale of
        each token and head, or by the pages' scales if all tokens share them (one, or one a head).
        Values beyond the range of plain float8 saturate.
      key: [tokens, K, H], rotated already.
      value: [tokens, K, V].
      kv_lens: [B] integers, the tokens of each sequence with the new ones.
      page_indices: [B, n] integers, the pages of each sequence in order.
      cu_q_lens: [B + 1] integers; sequence b has rows cu_q_lens[b] to cu_q_lens[b + 1].
      num_seqs: [1] integers, how many sequences there are; None for B.
      layout: "PSKH" or "KPSH", the axes of a pair of pools.
      implementation: None for the fastest that can run, or "xla", or "cuda", which is one kernel.

    Returns:
      The pages, as they were given. Tokens whose page id is outside the pool, or missing in the
      table, are dropped.

    Raises:
      ValueError: shapes or dtypes do not fit; floats for pages of plain integers; the named
        implementation cannot run.

    Example:
      >>> import jax.numpy as jnp, jaxfused
      >>> pages, key = jnp.zeros((4, 2, 2, 8)), jnp.ones((3, 1, 8))
      >>> table = jnp.array([[3, 1], [0, 2]])
      >>> pages = jaxfused.append_to_pages(
      ...     pages, key, 2 * key, jnp.array([2, 3]), table, jnp.array([0, 2, 3]))
      >>> pages[..., 0, 0], pages[2, 0, :, 0]
      (Array([[0., 0.],
             [0., 0.],
             [1., 0.],
             [1., 1.]], dtype=float32), Array([1., 2.], dtype=float32))

    Source: Kwon et al., "PagedAttention", 2023, https://arxiv.org/abs/2309.06180
    """
    op = "append_to_pages"
    key, value = as_arrays(key, value)
    pools = pools_of(op, kv_pages, layout)
    pages, size, heads = pools.pages, pools.page_size, pools.heads
    kv_lens, page_indices, cu_q_lens = check_table(op, kv_lens, page_indices, cu_q_lens)
    of_value = pools.key if pools.value is None else pools.value
    for name, new, pool in (("key", key, pools.key), ("value", value, of_value)):
        expected = (*(key.shape or (1,))[:1], heads, pool.shape[-1])
        check_shape(op, name, new, expected, f"the pages have {heads} heads of {pool.shape[-1]}")
        _check_kept(op, name, new, pool, layout)
    given = pools.key if pools.value is None else (pools.key, pools.value)
    if not pools.are_split_by_heads():
        spec = jax.typeof(jax.tree.leaves(given)[0]).sharding.spec
        raise ValueError(
            f"{op}: kv_pages are split as {spec}, but any device may have to write any page; split their"
            " heads only, or call it in jax.shard_map with each device's own pages and table."
        )
    if 0 in (*page_indices.shape, key.shape[0], pages, size):
        return given
    tokens = with_whole_rows(key, value, kv_lens, page_indices, cu_q_lens)
    written = page_append_stages.append(pools, tokens, num_seqs, implementation)
    return written.key if written.value is None else (written.key, written.value)


def _check_kept(op: str, name: str, new: jax.Array, pool: Pages, layout: Layout) -> None:
    """Checks that pages' dtype can hold new tokens, and that quantised pages' scales are usable.

    `new` is [tokens, K, H]; floats are refused for pages of plain integers.
    """
    if isinstance(pool, QuantizedArray):
        check_floating(op, {name: new})
        if pool.dtype not in FORMATS or not (are_own(pool) or are_shared(pool, layout)):
            raise ValueError(
                f"{op}: the pages of {name} are {pool.dtype} with scales of shape {pool.scale.shape},"
                " but tokens are quantised with a scale of each token and head, or one that all tokens"
                " share; pass pages of"
                " jaxfused.quantize(pages, axis=-1), or the values and the scales in two calls."
            )
    elif jnp.issubdtype(pool.dtype, jnp.integer) and not jnp.issubdtype(new.dtype, jnp.integer):
        raise ValueError(
            f"{op}: {name} has dtype {new.dtype}, but the pages have {pool.dtype}, which would cut off"
            " its fractions; pass pages of jaxfused.quantize(pages, axis=-1), which get a scale of each"
            f" token and head, or {name} divided by a scale of your own and rounded to {pool.dtype}."
        )
