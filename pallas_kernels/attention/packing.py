"""The queries of all heads that share a key head, as the rows of one matrix.

If queries are few, a tile of 64 rows has room for those of several query heads, and the keys and values
that these heads share are read once for all of them. Row g * T + t of a key head is query t of its g-th
query head.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.logits import Operands, Tile, TransposedTile
from pallas_kernels.attention.mask import Index
from pallas_kernels.attention.memory import WGMMA_ROWS
from pallas_kernels.attention.shape import Shape


@dataclass(frozen=True)
class Packing:
    """Conversion of arrays over queries [B, T, N, ...] to arrays over rows, for the sizes of a call."""

    key_heads: int
    group: int
    query_count: int

    @classmethod
    def of(cls, shape: Shape) -> "Packing":
        return cls(shape.key_heads, shape.group, shape.query_count)

    @property
    def rows(self) -> int:
        """Rows of a key head: the queries of all query heads that share the key head."""
        return self.group * self.query_count

    @property
    def tiles(self) -> int:
        """Tiles of 64 rows of a key head."""
        return -(-self.rows // WGMMA_ROWS)

    def queries(self, array: jax.Array) -> jax.Array:
        """Returns an array [B, T, N, H] as [B * K, rows, 1, H], unchanged if `group` is 1.

        `place` returns indices into the result. If T is 1, the reshape needs no copy.
        """
        if self.group == 1:
            return array
        batch, _, _, size = array.shape
        heads = array.reshape(batch, self.query_count, self.key_heads, self.group, size)
        return heads.transpose(0, 2, 3, 1, 4).reshape(-1, self.rows, 1, size)

    def unpacked(self, rows: jax.Array) -> jax.Array:
        """Returns the array [B, T, N, H] of packed rows [B, K, rows, H]."""
        batch, _, _, size = rows.shape
        heads = rows.reshape(batch, self.key_heads, self.group, self.query_count, size)
        return heads.transpose(0, 3, 1, 2, 4).reshape(batch, self.query_count, -1, size)

    def place(self, batch_idx: jax.Array, key_head: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the indices, on axes 0 and 2 of the result of `queries`, of a key head's rows."""
        if self.group == 1:
            return batch_idx, key_head
        return batch_idx * self.key_heads + key_head, batch_idx * 0

    def of_queries(self, array: jax.Array) -> jax.Array:
        """Returns an array [.., N, T] as [.., K, rows]."""
        return array.reshape(*array.shape[:-2], self.key_heads, self.rows)

    def padded(self, rows: jax.Array, fill: float = 0) -> jax.Array:
        """Returns an array [.., rows], padded with `fill` to whole tiles."""
        missing = -rows.shape[-1] % WGMMA_ROWS
        return jnp.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, missing)], constant_values=fill)

    def operands(self, operands: Operands) -> Operands:
        """Returns the operands for `PackedTile`: [.., K, rows, ..] in place of [.., N, T, ..].

        Sinks and query lengths stay as they are: kernels apply them to a row's result, not to logits.
        """

        def pack(array):
            return None if array is None else self._matrix(array)

        segments, seeds = operands.query_segments, operands.dropout_seeds
        if seeds is not None:
            each_query = jnp.broadcast_to(seeds[..., None], (*seeds.shape, self.query_count))
            seeds = self.padded(self.of_queries(each_query))
        return operands._replace(
            bias=pack(operands.bias),
            explicit=pack(operands.explicit),
            lse_rest=pack(operands.lse_rest),
            query_segments=None if segments is None else jnp.tile(segments, (1, self.group)),
            dropout_seeds=seeds,
        )

    def _matrix(self, array: jax.Array) -> jax.Array:
        """Reshapes [B or 1, N or 1, T or 1, S or 1] to [B or 1, K or 1, rows or 1, S or 1]."""
        batch, heads, queries, keys = array.shape
        if self.group == 1 or heads == queries == 1:
            return array
        key_heads = 1 if heads == 1 else self.key_heads
        array = array.reshape(batch, key_heads, heads // key_heads, queries, keys)
        shape = (batch, key_heads, self.group, self.query_count, keys)
        return jnp.broadcast_to(array, shape).reshape(batch, key_heads, self.rows, keys)

    def query_range(self, start: Index, count: int) -> tuple[Index, Index]:
        """Returns a range [start, stop) of queries that contains those of `count` rows from row `start`.

        With several query heads per key head it is all queries, since the rows may be of several heads.
        """
        if self.group == 1:
            return start, start + count
        return 0, self.query_count

    def query(self, row: jax.Array) -> jax.Array:
        """Returns the query index of each of the rows `row` of a key head."""
        if self.query_count == 1:
            # A traced 0: Mosaic finds no register layout for a constant index in dropout.
            return jnp.minimum(row, 0)
        return row if self.group == 1 else lax.rem(row, jnp.int32(self.query_count))


@dataclass(frozen=True)
class PackedTile(Tile):
    """A tile of logits of a key head: row g * T + t is query t of its g-th query head.

    `head` is the key head, and `query_start` the index of the tile's first row.
    """

    packing: Packing | None = None

    def index(self, axis: int) -> jax.Array:
        """Returns the query index (axis 0) or key index (axis 1) of each element, as an int32 tile."""
        if axis == 1:
            return super().index(1)
        return lax.broadcast_in_dim(self._query(), self.shape, [0])

    def _query(self) -> jax.Array:
        assert self.packing is not None
        layout = self.layout.reduce(1)
        row = plgpu.broadcasted_iota(jnp.int32, self.shape[:1], 0, layout=layout)
        return self.packing.query(self.query_start + row)

    def seed(self, ref, word: int) -> jax.Array:
        """Returns word `word` (0 or 1) of dropout's seed for each element, the same along a row."""
        rows = pl.ds(self.query_start, self.shape[0])
        seeds = plgpu.load(
            ref.at[word, self.batch, self.head, rows],
            layout=self.layout.reduce(1),
            optimized=False,
        )
        return lax.broadcast_in_dim(seeds, self.shape, [0])


@dataclass(frozen=True)
class TransposedPackedTile(TransposedTile):
    """A tile of logits with keys as rows and, as columns, the rows of a key head as in `PackedTile`.

    `head` is the key head, and `query_start` the index of the tile's first column.
    """

    packing: Packing | None = None

    def index(self, axis: int) -> jax.Array:
        """Returns the query index (axis 0) or key index (axis 1) of each element, as an int32 tile."""
        if axis == 1:
            return super().index(1)
        assert self.packing is not None
        layout = self.layout.reduce(0)
        row = plgpu.broadcasted_iota(jnp.int32, self.shape[1:], 0, layout=layout)
        return lax.broadcast_in_dim(self.packing.query(self.query_start + row), self.shape, [1])

    def seed(self, ref, word: int) -> jax.Array:
        """Returns word `word` (0 or 1) of dropout's seed for each element, the same along a column."""
        rows = pl.ds(self.query_start, self.shape[1])
        seeds = plgpu.load(
            ref.at[word, self.batch, self.head, rows],
            layout=self.layout.reduce(0),
            optimized=False,
        )
        return lax.broadcast_in_dim(seeds, self.shape, [1])
