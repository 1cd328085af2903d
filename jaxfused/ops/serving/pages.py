"""Pools of pages: keys and values of many sequences in blocks of equal size, in any order."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfused.runtime.checks import as_arrays, as_int32, check_shape, python_numbers
from jaxfused.runtime.quantized_array import QuantizedArray

Layout = Literal["KPSH", "PSKH"]
"""Axes of a pool: K key heads, P pages, S places of a page, H head size."""

type Pages = jax.Array | QuantizedArray


class Pools(NamedTuple):
    """The pools of keys and of values, each in its layout; or one pool of both."""

    key: Pages
    value: Pages | None
    """The pool of values; None where `key` is [P, S, 2 K, H], with keys at even heads and values at
    odd."""
    layout: Layout

    @property
    def pages(self) -> int:
        return self.key.shape[1 if self.layout == "KPSH" else 0]

    @property
    def page_size(self) -> int:
        """Places of a page."""
        return self.key.shape[2 if self.layout == "KPSH" else 1]

    @property
    def heads(self) -> int:
        """Key heads."""
        heads = self.key.shape[0 if self.layout == "KPSH" else 2]
        return heads if self.value is not None else heads // 2

    @property
    def value_size(self) -> int:
        return (self.key if self.value is None else self.value).shape[-1]

    def read(self, page_indices: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
        """Returns keys and values [B, n * S, K, H] of pages [B, n] in a dtype; see `gathered`."""
        key = gathered(self.key, page_indices, self.layout, dtype)
        if self.value is None:
            return key[:, :, 0::2], key[:, :, 1::2]
        return key, gathered(self.value, page_indices, self.layout, dtype)


def pools_of(op: str, pages: Any, layout: Layout) -> Pools:
    """Returns the pools of `pages`: a pair, or one array [P, S, 2 K, H] with keys at even heads.

    Raises:
      ValueError: they do not belong to each other.
    """
    if layout not in ("KPSH", "PSKH"):
        raise ValueError(
            f"{op}: layout is {layout!r}; pass 'KPSH' or 'PSKH', the axes of the pages."
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
    key, value = (_as_pages(op, p) for p in pages)
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


def _as_pages(op: str, pages: Any) -> Pages:
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
    return jnp.asarray(pages)


def is_in_pool(page_indices: jax.Array, pages: int) -> jax.Array:
    """Returns which ids are those of pages; others are never read or written."""
    return (page_indices >= 0) & (page_indices < pages)


def gathered(pages: Pages, page_indices: jax.Array, layout: Layout, dtype: Any) -> jax.Array:
    """Returns [B, n * S, K, H] of the pages [B, n]. An id outside the pool gives any page of it."""
    axis = 1 if layout == "KPSH" else 0

    def take(pool: jax.Array) -> jax.Array:
        if pool.shape[axis] == 0:  # No id is in the pool, and none is read.
            pool = jnp.zeros((*pool.shape[:axis], 1, *pool.shape[axis + 1 :]), pool.dtype)
        taken = jnp.take(pool, page_indices, axis=axis, mode="clip")
        # [K, B, n, S, H] or [B, n, S, K, H]
        taken = jnp.moveaxis(taken, 0, 3) if layout == "KPSH" else taken
        batch, count, size, *rest = taken.shape
        return taken.reshape(batch, count * size, *rest)

    if not isinstance(pages, QuantizedArray):
        return take(pages).astype(dtype)
    values, scale = take(pages.values), take(pages.scale)
    return QuantizedArray(values, scale, None, axis=-1).dequantize(dtype)


class Tokens(NamedTuple):
    """Places of the tokens of a ragged batch, whose rows are those of all sequences in turn."""

    sequence: jax.Array
    """[tokens]: the sequence of each row; for rows of none, any."""
    position: jax.Array
    """[tokens]: where the row stands in its sequence."""
    is_token: jax.Array
    """[tokens]: whether the row is one of a sequence's."""


def tokens_of(
    rows: int, kv_lens: jax.Array, cu_q_lens: jax.Array, num_seqs: jax.Array | None
) -> Tokens:
    """Returns the tokens of a ragged batch of which each sequence's rows are its last tokens."""
    row = jnp.arange(rows, dtype=jnp.int32)
    sequences = kv_lens.shape[0]
    used = jnp.int32(sequences)
    if num_seqs is not None:
        used = jnp.asarray(num_seqs).reshape(()).astype(jnp.int32)
    is_used = jnp.arange(sequences, dtype=jnp.int32) < used
    ends = jnp.where(is_used, cu_q_lens[1:], jnp.iinfo(jnp.int32).max)
    sequence = jnp.searchsorted(ends, row, side="right").astype(jnp.int32)
    sequence = jnp.minimum(sequence, sequences - 1)
    position = row - cu_q_lens[sequence + 1] + kv_lens[sequence]
    last = cu_q_lens[jnp.clip(used, 0, sequences)]
    return Tokens(sequence, position, (row < last) & (row >= cu_q_lens[0]) & (position >= 0))


@python_numbers
def append_to_pages(
    kv_pages: jax.Array | tuple[jax.Array, jax.Array],
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
        the layout.
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
    is_pair = isinstance(kv_pages, tuple | list)
    if is_pair and any(isinstance(pool, QuantizedArray) for pool in kv_pages):
        raise ValueError(
            f"{op}: kv_pages are quantised, but tokens are written into plain arrays; pass pages of a"
            " float dtype, or the pairs of values and of scales in two calls, for quantised tokens."
        )
    given = as_arrays(*kv_pages) if isinstance(kv_pages, tuple | list) else as_arrays(kv_pages)
    key, value = as_arrays(key, value)
    pools = pools_of(op, given if is_pair else given[0], layout)
    pages, size, heads = pools.pages, pools.page_size, pools.heads
    kv_lens, page_indices, cu_q_lens = check_table(op, kv_lens, page_indices, cu_q_lens)
    for name, new, width in (("key", key, pools.key.shape[-1]), ("value", value, pools.value_size)):
        expected = (key.shape[0], heads, width)
        check_shape(op, name, new, expected, f"the pages have {heads} heads of {width}")
    if 0 in (*page_indices.shape, key.shape[0], pages, size):
        return tuple(given) if is_pair else given[0]
    tokens = tokens_of(key.shape[0], kv_lens, cu_q_lens, num_seqs)
    slot = lax.div(tokens.position, jnp.int32(size))
    page = page_indices[tokens.sequence, jnp.clip(slot, 0, page_indices.shape[1] - 1)]
    fits = tokens.is_token & (slot < page_indices.shape[1]) & is_in_pool(page, pages)
    # Ids beyond the pool are dropped, also negative ones, which JAX counts from the end.
    page, place = jnp.where(fits, page, pages), lax.rem(tokens.position, jnp.int32(size))
    if not is_pair:
        both = jnp.stack([key, value], axis=2).reshape(key.shape[0], 2 * heads, -1)
        return given[0].at[page, place].set(both.astype(given[0].dtype), mode="drop")
    index = (slice(None), page, place) if layout == "KPSH" else (page, place)
    written = []
    for pool, new in zip(given, (key, value), strict=True):
        new = new.swapaxes(0, 1) if layout == "KPSH" else new
        written.append(pool.at[index].set(new.astype(pool.dtype), mode="drop"))
    return tuple(written)


def check_table(
    op: str, lengths: Any, page_indices: Any, cu_q_lens: Any = None
) -> tuple[jax.Array, jax.Array, Any]:
    """Returns lengths [B], ids of pages [B, n] and [B + 1] as int32, of which the last may be None."""
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
    """Returns lists as NumPy's arrays, the empty one as one of integers."""
    if not isinstance(values, list | tuple):
        return values
    return np.asarray(values) if len(values) else np.zeros(0, np.int32)
