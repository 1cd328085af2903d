"""Pools of pages in global memory, as kernels read them through a page table."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.mask import Index
from pallas_kernels.attention.memory import Matrix
from pallas_kernels.attention.shape import Shape

Layout = Literal["KPSH", "PSKH"]


class Pages(NamedTuple):
    """Pools of P pages of S tokens in global memory, and the page table; K key heads of H columns."""

    key: Any
    """Pool of keys [P, S, K, H] or [K, P, S, H]; or [P, S, 2 K, H] with keys at even heads and values at
    odd ones."""
    value: Any
    """Pool of values, with V columns; None if `key` holds both."""
    table: Any
    """Pages of each sequence in order, int32 [B, n]; ids outside of 0 to P - 1 read zeros."""
    key_scale: Any = None
    """Scales of 8-bit keys, float32 [K, P, S] in every layout; else None."""
    value_scale: Any = None

    def sizes(self, layout: Layout) -> "Sizes":
        value = self.key if self.value is None else self.value
        heads = self.key.shape[0 if layout == "KPSH" else 2]
        return Sizes(
            layout,
            pages=self.key.shape[1 if layout == "KPSH" else 0],
            page_size=self.key.shape[2 if layout == "KPSH" else 1],
            key_heads=heads if self.value is not None else heads // 2,
            head_size=self.key.shape[-1],
            value_size=value.shape[-1],
            most_pages=self.table.shape[1],
            is_combined=self.value is None,
            kept_dtype=jnp.dtype(self.key.dtype),
            has_scales=self.key_scale is not None,
        )


class Sizes(NamedTuple):
    """Sizes of `Pages` and their layout."""

    layout: Layout
    pages: int
    page_size: int
    key_heads: int
    head_size: int
    value_size: int
    most_pages: int
    """Largest number of pages of a sequence."""
    is_combined: bool
    """True if one pool holds keys and values, at even and odd heads."""
    kept_dtype: Any
    """Dtype of the pools: that of the queries, or one of 8 bits."""
    has_scales: bool

    def shape(self, query: Any) -> Shape:
        batch, query_count, heads, _ = query.shape
        keys = self.most_pages * self.page_size
        return Shape(
            batch, query_count, keys, heads, self.key_heads, self.head_size, self.value_size
        )

    def pieces(self, key_block: int) -> int:
        """Returns how many TMA copies bring a block of keys; each copies rows of one page."""
        return 1 if self.most_pages == 1 else max(1, key_block // self.page_size)

    def fits(self, key_block: int) -> bool:
        """Returns True if a block of keys is some whole pages, or a page some whole blocks."""
        size = self.page_size
        return self.most_pages == 1 or size % key_block == 0 or key_block % size == 0

    def page(
        self, table: Any, key_length: Index, sequence: jax.Array, token: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the page that holds a token, and the token's index in the page, in a kernel.

        A token past the sequence's end gets a page beyond the pool, from which copies read zeros.
        """
        if self.most_pages == 1:
            return table[sequence, 0], token
        size = jnp.int32(self.page_size)
        number = jnp.minimum(lax.div(token, size), jnp.int32(self.most_pages - 1))
        page = jnp.where(token < key_length, table[sequence, number], self.pages)
        return page, lax.rem(token, size)

    def copy(
        self,
        pools: tuple[Any, ...],
        is_value: bool,
        matrix: Matrix,
        page: jax.Array,
        row: jax.Array,
        key_head: jax.Array,
        barrier: Any,
    ) -> None:
        """Starts the copies to `matrix` from row `row` of a page on; each arrives at `barrier`.

        `pools` are those of keys and of values, or one pool of both.
        """
        pool, head = pools[int(is_value and not self.is_combined)], key_head
        if self.is_combined:
            head = 2 * key_head + int(is_value)
        first = 0
        for copied in matrix.copied:
            count, width = copied.shape
            # JAX refuses static indices beyond the end of an array, but not traced ones.
            rows, columns = pl.ds(row, count), pl.ds(row * 0 + first, width)
            index = (page, rows, head, columns)
            if self.layout == "KPSH":
                index = (head, page, rows, columns)
            plgpu.copy_gmem_to_smem(pool.at[index], copied, barrier)
            first += width
