"""Pools of pages: keys and values of many sequences in blocks of equal size, in any order."""

from dataclasses import replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfused.ops.quantize.quantize import quantize
from jaxfused.runtime import sharding
from jaxfused.runtime.checks import (
    as_arrays,
    as_int32,
    check_floating,
    check_shape,
    python_numbers,
)
from jaxfused.runtime.quantized_array import FORMATS, QuantizedArray

Layout = Literal["KPSH", "PSKH"]
"""Axes of a pool: K key heads, P pages, S places of a page, H head size."""

type Pages = jax.Array | QuantizedArray


class Pools(NamedTuple):
    """The pools of keys and of values, each in its layout; or one pool of both."""

    key: Pages
    value: Pages | None
    """Pool of values; None if `key` is [P, S, 2 K, H], with keys at even heads and values at odd
    ones."""
    layout: Layout

    @property
    def pages(self) -> int:
        return self.key.shape[1 if self.layout == "KPSH" else 0]

    @property
    def page_size(self) -> int:
        """Places of a page, S."""
        return self.key.shape[2 if self.layout == "KPSH" else 1]

    @property
    def heads(self) -> int:
        """Number of key heads, K."""
        heads = self.key.shape[0 if self.layout == "KPSH" else 2]
        return heads if self.value is not None else heads // 2

    @property
    def value_size(self) -> int:
        return (self.key if self.value is None else self.value).shape[-1]

    def are_split_by_heads(self) -> bool:
        """Whether types split no other axis of the pools than that of their heads."""
        heads = 0 if self.layout == "KPSH" else 2
        specs = [jax.typeof(x).sharding.spec for x in jax.tree.leaves((self.key, self.value))]
        return not any(name and i != heads for spec in specs for i, name in enumerate(spec))

    def read(
        self, page_indices: jax.Array, lengths: jax.Array, dtype: Any
    ) -> tuple[jax.Array, jax.Array]:
        """Returns keys and values [B, n * S, K, H] of pages [B, n] in a dtype, 0 beyond the lengths [B].

        Ids outside the pool are beyond them.
        """
        place = jnp.arange(page_indices.shape[1] * self.page_size, dtype=jnp.int32)
        is_token = (place < lengths[:, None])[:, :, None, None]

        def read(pages: Pages) -> jax.Array:
            # Other sequences may have left NaN in the last page, and 0 times NaN is NaN.
            return jnp.where(is_token, gathered(pages, page_indices, self.layout, dtype), 0)

        key = read(self.key)
        if self.value is None:
            return key[:, :, 0::2], key[:, :, 1::2]
        return key, read(self.value)


def pools_of(op: str, pages: Any, layout: Layout) -> Pools:
    """Returns the pools of `pages`: a pair, or one array [P, S, 2 K, H] with keys at even heads.

    Raises:
      ValueError: the pools do not fit each other.
    """
    if layout not in ("KPSH", "PSKH"):
        raise ValueError(
            f"{op}: layout is {layout!r}; pass 'KPSH' or 'PSKH', the axes of the pages."
        )
    if isinstance(pages, QuantizedArray):
        raise ValueError(
            f"{op}: kv_pages is one QuantizedArray, but quantised keys and values are apart; pass a pair"
            " (k_pages, v_pages)."
        )
    if not isinstance(pages, tuple | list):
        both = jnp.asarray(pages)
        if both.ndim != 4 or both.shape[2] % 2 or layout != "PSKH":
            raise ValueError(
                f"{op}: kv_pages has shape {both.shape} and layout {layout}, but pages with keys and"
                " values together have the axes P, S, 2 K, H; pass such an array with layout='PSKH', or"
                " a pair (k_pages, v_pages)."
            )
        return Pools(both, None, layout)
    if len(pages) != 2:
        raise ValueError(
            f"{op}: kv_pages is a sequence of {len(pages)}, but there is a pool of keys and one of"
            " values; pass a pair (k_pages, v_pages)."
        )
    key, value = (
        _as_pages(op, *named) for named in zip(("k_pages", "v_pages"), pages, strict=True)
    )
    for name, pool in (("k_pages", key), ("v_pages", value)):
        if len(pool.shape) != 4:
            raise ValueError(
                f"{op}: {name} has shape {pool.shape}, but it has 4 axes; pass pages in the layout"
                f" {layout}."
            )
    if key.shape[:3] != value.shape[:3]:
        raise ValueError(
            f"{op}: v_pages has shape {value.shape}, but k_pages has {key.shape}, and both have the"
            " same pages and heads; pass such a v_pages."
        )
    return Pools(key, value, layout)


def _as_pages(op: str, name: str, pages: Any) -> Pages:
    if pages is None:
        raise ValueError(f"{op}: {name} is None, but it is an array of pages; pass one.")
    if isinstance(pages, QuantizedArray):
        if pages.axis != -1:
            raise ValueError(
                f"{op}: quantised pages have scales along axis {pages.axis}, but each token and head has"
                " one; pass jaxfused.quantize(pages, axis=-1)."
            )
        if any(x is not None for x in (pages.zero_point, pages.offset, pages.codebook)):
            raise ValueError(
                f"{op}: quantised pages have a zero point, an offset or a codebook, but they are values"
                " times a scale; pass jaxfused.quantize(pages, axis=-1)."
            )
        return pages
    array = jnp.asarray(pages)
    if not jnp.issubdtype(array.dtype, jnp.number) or jnp.iscomplexobj(array):
        raise ValueError(
            f"{op}: {name} has dtype {array.dtype}, but pages hold floats, or integers of 8 bits; pass"
            f" {name}.astype(jnp.float32)."
        )
    return array


def is_in_pool(page_indices: jax.Array, pages: int) -> jax.Array:
    """Returns which ids are pages of the pool; others are never read or written."""
    return (page_indices >= 0) & (page_indices < pages)


def gathered(pages: Pages, page_indices: jax.Array, layout: Layout, dtype: Any) -> jax.Array:
    """Returns [B, n * S, K, H] of the pages [B, n]. An id outside the pool gives any page."""
    axis = 1 if layout == "KPSH" else 0

    def take(pool: jax.Array) -> jax.Array:
        if pool.shape[axis] == 0:  # An empty pool has no page to read.
            pool = jnp.zeros((*pool.shape[:axis], 1, *pool.shape[axis + 1 :]), pool.dtype)
        taken = jnp.take(pool, page_indices, axis=axis, mode="clip")
        # Axes of the pages: [K, B, n, S, H] or [B, n, S, K, H].
        taken = jnp.moveaxis(taken, 0, 3) if layout == "KPSH" else taken
        batch, count, size, *rest = taken.shape
        return taken.reshape(batch, count * size, *rest)

    if not isinstance(pages, QuantizedArray):
        return take(pages).astype(dtype)
    # Pages may share scales, with axes of 1.
    scale = jnp.broadcast_to(pages.scale, (*pages.values.shape[:-1], pages.scale.shape[-1]))
    values, scale = take(pages.values), take(scale)
    return QuantizedArray(values, scale, None, axis=-1).dequantize(dtype)


class Tokens(NamedTuple):
    """Places of the tokens of a ragged batch, whose rows are one sequence's tokens after another's."""

    sequence: jax.Array
    """Sequence of each row, [tokens]; any number for rows without a sequence."""
    position: jax.Array
    """Position of each row in its sequence, [tokens]."""
    is_token: jax.Array
    """True for each row that belongs to a sequence, [tokens]."""


def tokens_of(
    op: str, rows: int, kv_lens: jax.Array, cu_q_lens: jax.Array, num_seqs: jax.Array | None
) -> Tokens:
    """Returns the tokens of a ragged batch, in which a sequence's rows are its last tokens."""
    row = jnp.arange(rows, dtype=jnp.int32)
    sequences = kv_lens.shape[0]
    used = jnp.int32(sequences)
    if num_seqs is not None:
        used = as_int32(num_seqs)
        if used.size != 1 or not jnp.issubdtype(used.dtype, jnp.integer):
            raise ValueError(
                f"{op}: num_seqs has dtype {used.dtype} and shape {used.shape}, but it counts sequences;"
                " pass one integer."
            )
        used = used.reshape(())
    is_used = jnp.arange(sequences, dtype=jnp.int32) < used
    ends = jnp.where(is_used, cu_q_lens[1:], jnp.iinfo(jnp.int32).max)
    sequence = jnp.searchsorted(ends, row, side="right").astype(jnp.int32)
    sequence = jnp.minimum(sequence, sequences - 1)
    position = row - cu_q_lens[sequence + 1] + kv_lens[sequence]
    last = cu_q_lens[jnp.clip(used, 0, sequences)]
    return Tokens(sequence, position, (row < last) & (row >= cu_q_lens[0]) & (position >= 0))


def with_whole_rows(*arrays: jax.Array) -> Any:
    """Returns rows [tokens, K, H], lengths [B], ids of pages [B, n] and [B + 1], not split by rows.

    Which rows are of one sequence is known at run time only. Devices may split the heads.
    """
    *rows, _, _, _ = arrays
    axes = [*("rkh" for _ in rows), "b", "bn", "c"]
    return sharding.align(arrays, operand_axes=axes, whole="rhbnc")


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
) -> Any:
    """Writes the keys and values of new tokens into pages, in place where those are donated.

    The arguments are those of `ragged_paged_attention`, which reads what is written: each sequence's
    rows are its last tokens, and `kv_lens` counts them. For one new token of each sequence,
    `cu_q_lens` is 0, 1, 2, ...

    Args:
      kv_pages: [P, S, 2 K, H] with keys at even heads and values at odd ones, or (k_pages, v_pages) in
        the layout, which may be `QuantizedArray`s with a scale of each token and head: new tokens are
        then quantised, and by scales that all tokens share (one, or one a head) where pages have such.
        In plain float8 numbers beyond the largest become the largest.
      key: [tokens, K, H], rotated already.
      value: [tokens, K, V].
      kv_lens: [B] integers, the tokens of each sequence with the new ones.
      page_indices: [B, n] integers, the pages of each sequence in order.
      cu_q_lens: [B + 1] integers; sequence b has rows cu_q_lens[b] to cu_q_lens[b + 1].
      num_seqs: [1] integers, how many sequences there are; None for B.
      layout: "PSKH" or "KPSH", the axes of a pair of pools.

    Returns:
      The pages, as they were given. Tokens whose page is outside the pool, or that have none, are
      dropped.

    Raises:
      ValueError: shapes or dtypes do not fit; floats for pages of plain integers.

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
        expected = (key.shape[0], heads, pool.shape[-1])
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
    key, value, *table = with_whole_rows(key, value, kv_lens, page_indices, cu_q_lens)
    kv_lens, page_indices, cu_q_lens = table
    tokens = tokens_of(op, key.shape[0], kv_lens, cu_q_lens, num_seqs)
    slot = lax.div(tokens.position, jnp.int32(size))
    page = page_indices[tokens.sequence, jnp.clip(slot, 0, page_indices.shape[1] - 1)]
    fits = tokens.is_token & (slot < page_indices.shape[1]) & is_in_pool(page, pages)
    # Ids outside the pool are dropped; negative ones too, which JAX would count from the end.
    page, place = jnp.where(fits, page, pages), lax.rem(tokens.position, jnp.int32(size))
    index: Any = (slice(None), page, place) if layout == "KPSH" else (page, place)

    def written(pool: Pages, new: jax.Array) -> Pages:
        new = new.swapaxes(0, 1) if layout == "KPSH" else new
        if not isinstance(pool, QuantizedArray):
            return pool.at[index].set(_as_kept(new, pool.dtype), mode="drop")
        given = None
        if _are_shared(pool, layout):
            given = pool.scale[:, 0] if layout == "KPSH" else pool.scale[0]
        kept = quantize(new, pool.dtype, axis=-1, scale=given)
        values = pool.values.at[index].set(kept.values, mode="drop")
        if given is not None:
            return replace(pool, values=values)
        scale = pool.scale.at[index].set(kept.scale.astype(pool.scale.dtype), mode="drop")
        return replace(pool, values=values, scale=scale)

    if pools.value is None:
        both = jnp.stack([key, value], axis=2).reshape(key.shape[0], 2 * heads, -1)
        return written(pools.key, both)
    return written(pools.key, key), written(pools.value, value)


def _are_shared(pool: QuantizedArray, layout: Layout) -> bool:
    """Whether all tokens have one scale, or one for each head."""
    kinds = pool.scale.shape[1:3] if layout == "KPSH" else pool.scale.shape[:2]
    return kinds == (1, 1) and pool.scale.shape[-1] == 1 and not _are_own(pool)


def _are_own(pool: QuantizedArray) -> bool:
    """Whether each token and head has a scale."""
    return pool.scale.shape == (*pool.values.shape[:-1], 1)


def _check_kept(op: str, name: str, new: jax.Array, pool: Pages, layout: Layout) -> None:
    """Checks that pages can keep new tokens: integers no fractions, quantised ones a scale a token."""
    if isinstance(pool, QuantizedArray):
        check_floating(op, {name: new})
        if pool.dtype not in FORMATS or not (_are_own(pool) or _are_shared(pool, layout)):
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


def _as_kept(new: jax.Array, dtype: Any) -> jax.Array:
    """Returns numbers in the pages' dtype; those beyond float8 become its largest, as XLA's are NaN."""
    if jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize == 1:
        largest = float(jnp.finfo(dtype).max)
        new = jnp.clip(new, -largest, largest)
    return new.astype(dtype)


def check_table(
    op: str, lengths: Any, page_indices: Any, cu_q_lens: Any = None
) -> tuple[jax.Array, jax.Array, Any]:
    """Returns lengths [B], page ids [B, n] and `cu_q_lens` [B + 1] (or None), as int32."""
    given = {"lengths": lengths, "page_indices": page_indices, "cu_q_lens": cu_q_lens}
    arrays = {name: None if a is None else as_int32(_listed(a)) for name, a in given.items()}
    for name, array in arrays.items():
        if array is not None and not jnp.issubdtype(array.dtype, jnp.integer):
            raise ValueError(
                f"{op}: {name} has dtype {array.dtype}, but it holds integers; pass"
                f" {name}.astype(jnp.int32)."
            )
    lengths, page_indices, cu_q_lens = arrays.values()
    batch = lengths.shape[0] if lengths.ndim == 1 else None
    if batch is None or page_indices.ndim != 2 or page_indices.shape[0] != batch:
        raise ValueError(
            f"{op}: lengths has shape {lengths.shape} and page_indices {page_indices.shape}, but there"
            " is a length and a row of pages for each sequence; pass [B] and [B, pages]."
        )
    if cu_q_lens is not None and cu_q_lens.shape != (batch + 1,):
        raise ValueError(
            f"{op}: cu_q_lens has shape {cu_q_lens.shape}, but there are {batch} sequences, each of"
            f" which ends where the next begins; pass shape ({batch + 1},)."
        )
    return lengths, page_indices, cu_q_lens


def _listed(values: Any) -> Any:
    """Returns lists as NumPy arrays; an empty list becomes an array of integers."""
    if not isinstance(values, list | tuple):
        return values
    return np.asarray(values) if len(values) else np.zeros(0, np.int32)
