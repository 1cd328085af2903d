"""Pools of pages: keys and values of many sequences in blocks of equal size, in any order."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfused.runtime import sharding
from jaxfused.runtime.checks import (
    as_int32,
)
from jaxfused.runtime.quantized_array import QuantizedArray

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
        """Number S of tokens that a page holds."""
        return self.key.shape[2 if self.layout == "KPSH" else 1]

    @property
    def heads(self) -> int:
        """Number of key heads, K."""
        heads = self.key.shape[0 if self.layout == "KPSH" else 2]
        return heads if self.value is not None else heads // 2

    @property
    def value_size(self) -> int:
        return (self.key if self.value is None else self.value).shape[-1]

    @property
    def has_floats(self) -> bool:
        """Flag of pools that are not quantised."""
        return not any(isinstance(pool, QuantizedArray) for pool in (self.key, self.value))

    def lengths(self, lengths: jax.Array, page_indices: jax.Array) -> jax.Array:
        """Returns the lengths [B] up to each sequence's first page whose id is not in the pool."""
        first = self.page_size * jnp.arange(page_indices.shape[1], dtype=jnp.int32)
        length = jnp.maximum(lengths, 0)[:, None]
        is_there = is_in_pool(page_indices, self.pages)
        ends = jnp.where(is_there, length, jnp.minimum(length, first[None]))
        # The reduction's initial value limits it to `longest` in one kernel; a minimum would be another.
        longest = jnp.int32(first.size * self.page_size)
        return jax.lax.reduce(ends, longest, jax.lax.min, (1,))

    def are_split_by_heads(self) -> bool:
        """Returns whether the arrays' types split the pools along no axis but the heads."""
        heads = 0 if self.layout == "KPSH" else 2
        specs = [jax.typeof(x).sharding.spec for x in jax.tree.leaves((self.key, self.value))]
        return not any(name and i != heads for spec in specs for i, name in enumerate(spec))

    def read(
        self, page_indices: jax.Array, lengths: jax.Array, dtype: Any
    ) -> tuple[jax.Array, jax.Array]:
        """Returns keys and values [B, n * S, K, H] of pages [B, n] in a dtype, 0 beyond the lengths [B].

        The lengths must end before a sequence's first id outside the pool.
        """
        place = jnp.arange(page_indices.shape[1] * self.page_size, dtype=jnp.int32)
        is_token = (place[None] < lengths[:, None])[:, :, None, None]

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
    """Returns the contents [B, n * S, K, H] of pages [B, n]. Ids outside the pool are clipped."""
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
    # Scales that heads, pages or tokens share have axes of length 1, which are broadcast.
    scale = jnp.broadcast_to(pages.scale, (*pages.values.shape[:-1], pages.scale.shape[-1]))
    values, scale = take(pages.values), take(scale)
    return QuantizedArray(values, scale, None, axis=-1).dequantize(dtype)


class Tokens(NamedTuple):
    """Sequence and position of each row of a ragged batch, where a sequence's rows are consecutive."""

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
    sequences = sequences_of(op, rows, kv_lens, cu_q_lens, num_seqs)
    sequence, is_token = sequences.of_rows(rows)
    position = jnp.arange(rows, dtype=jnp.int32) + sequences.offset[sequence]
    return Tokens(sequence, position, is_token)


class Sequences(NamedTuple):
    """The sequences of a ragged batch, int32 [B] each."""

    begin: jax.Array
    """First row of each sequence, in ascending order."""
    end: jax.Array
    """One past the last row of each sequence; at most `begin` if it has none."""
    offset: jax.Array
    """Position of row 0 among a sequence's keys: row r has the position of key r + offset."""
    keys: jax.Array
    """Number of keys of each sequence, with those of its rows."""

    @property
    def counts(self) -> jax.Array:
        """Number of rows of each sequence."""
        return jnp.maximum(self.end - self.begin, 0)

    def of_rows(self, rows: int) -> tuple[jax.Array, jax.Array]:
        """Returns the sequence of each row, or any one, and whether the row belongs to one, [rows]."""
        row = jnp.arange(rows, dtype=jnp.int32)[:, None]
        is_in = (row >= self.begin[None]) & (row < self.end[None])
        # A comparison with every sequence is one kernel; a binary search is two for each of its steps.
        number = jnp.arange(self.begin.size, dtype=jnp.int32)[None]
        return jnp.max(jnp.where(is_in, number, 0), axis=1), jnp.any(is_in, axis=1)


def sequences_of(
    op: str, rows: int, kv_lens: jax.Array, cu_q_lens: jax.Array, num_seqs: jax.Array | None
) -> Sequences:
    """Returns the sequences of a ragged batch, in which a sequence's rows are its last tokens.

    Rows that the batch does not have, and rows before a sequence's first key, are left out.
    """
    batch = kv_lens.shape[0]
    used = jnp.int32(batch) if num_seqs is None else checked_number(op, num_seqs).reshape(())
    offset = kv_lens - cu_q_lens[1:]
    begin = jnp.maximum(jnp.maximum(cu_q_lens[:-1], -offset), 0)
    is_used = jnp.arange(batch, dtype=jnp.int32) < used
    end = jnp.where(is_used, jnp.minimum(cu_q_lens[1:], rows), 0)
    return Sequences(begin, end, offset, kv_lens)


def checked_number(op: str, num_seqs: Any) -> jax.Array:
    """Returns the number of sequences as int32 [1]."""
    number = as_int32(num_seqs)
    if number.size != 1 or not jnp.issubdtype(number.dtype, jnp.integer):
        raise ValueError(
            f"{op}: num_seqs has dtype {number.dtype} and shape {number.shape}, but it counts sequences;"
            " pass one integer."
        )
    return number.reshape(1)


def with_whole_rows(*arrays: jax.Array) -> Any:
    """Returns rows [tokens, K, H], lengths, page ids and `cu_q_lens` with no rows split over devices.

    The sequence of a row is known at run time only. Heads may be split.
    """
    *rows, _, _, _ = arrays
    axes = [*("rkh" for _ in rows), "b", "bn", "c"]
    return sharding.align(arrays, operand_axes=axes, whole="rhbnc")


def values_and_scale(pool: Any) -> tuple[Any, Any]:
    """Returns a pool's values, and its scales without the axis of features (None for floats)."""
    if not isinstance(pool, QuantizedArray):
        return pool, None
    return pool.values, pool.scale[..., 0]


def are_shared(pool: QuantizedArray, layout: Layout) -> bool:
    """Returns whether a pool has one scale for all its tokens, or one scale per key head."""
    kinds = pool.scale.shape[1:3] if layout == "KPSH" else pool.scale.shape[:2]
    return kinds == (1, 1) and pool.scale.shape[-1] == 1 and not are_own(pool)


def are_own(pool: QuantizedArray) -> bool:
    """Whether a pool has one scale per token and head: its values' shape with 1 in place of H."""
    return pool.scale.shape == (*pool.values.shape[:-1], 1)


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
