"""Keys and values of many texts in pages of one pool; texts with equal beginnings share pages."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

import jaxfused


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """Tokens that a model reads in one step: rows of any number of texts, one text after another."""

    table: jax.Array
    """Page table: the pages of each text, [texts, n]; see `jaxfused.PageAllocator.table`."""
    lengths: jax.Array
    """Number of tokens of each text, these rows included, [texts]; 0 for a text that has no row."""
    starts: jax.Array
    """First row of each text, and the end of the last, [texts + 1]."""
    positions: jax.Array
    """Position of each row's token in its text, [rows]."""
    batch_invariant: bool = field(default=False, metadata={"static": True})
    """True if no text's result may depend on the other texts."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pages:
    """Keys and values of a layer, in pages that texts share."""

    key: jax.Array
    """Pool of the keys' pages, [pages, page size, key heads, head size]; `value` is the values' pool."""
    value: jax.Array

    @classmethod
    def zeros(
        cls,
        *,
        pages: int,
        page_size: int,
        key_heads: int,
        head_size: int,
        dtype: jax.typing.DTypeLike,
    ) -> "Pages":
        # Keys and values are two arrays, because both are donated: one buffer cannot be donated twice.
        shape = (pages, page_size, key_heads, head_size)
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    def attend(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        rows: Rows,
        *,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        sinks: jax.Array | None,
    ) -> tuple[jax.Array, "Pages"]:
        """Appends keys and values to the pages, and attends; arrays are [rows, heads, head size].

        Returns:
          The output of attention, and the new pages.
        """
        of_rows = (rows.lengths, rows.table, rows.starts)
        pools = jaxfused.append_to_pages((self.key, self.value), key, value, *of_rows)
        attended = jaxfused.ragged_paged_attention(
            query,
            pools,
            *of_rows,
            sm_scale=scale,
            sliding_window=window,
            soft_cap=soft_cap,
            sinks=sinks,
            batch_invariant=rows.batch_invariant,
        )
        return attended, Pages(*pools)
