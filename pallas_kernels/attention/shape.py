"""Sizes of a call of attention, with the letters that the documentation uses."""

from typing import NamedTuple

import jax


class Shape(NamedTuple):
    """The sizes of a call: in the documentation's letters B, T, S, N, K, H and V, in this order."""

    batch: int
    query_count: int
    key_count: int
    heads: int
    key_heads: int
    head_size: int
    value_size: int

    @classmethod
    def of(cls, query: jax.Array, key: jax.Array, value: jax.Array) -> "Shape":
        """Returns the sizes of query [B, T, N, H], key [B, S, K, H] and value [B, S, K, V]."""
        batch, query_count, heads, head_size = query.shape
        key_count, key_heads, value_size = value.shape[1:]
        return cls(batch, query_count, key_count, heads, key_heads, head_size, value_size)

    @classmethod
    def of_packed(cls, packed: jax.Array, key_heads: int) -> "Shape":
        """Returns the sizes of one array [B, T, N + 2 K, H] that holds query, key and value heads."""
        batch, count, all_heads, size = packed.shape
        return cls(batch, count, count, all_heads - 2 * key_heads, key_heads, size, size)

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.heads // self.key_heads

    @property
    def logits(self) -> tuple[int, int, int, int]:
        """Shape of all logits, [B, N, T, S]."""
        return (self.batch, self.heads, self.query_count, self.key_count)

    def query_tiles(self, rows: int) -> int:
        """Returns the number of tiles of `rows` queries, over all heads."""
        return self.batch * self.heads * -(-self.query_count // rows)
