"""Tiles: which of them a persistent CTA computes, and which blocks of the other side they visit.

Tiles of queries, past which keys stream, in the forward and the kernel of dQ; and tiles of keys, past
which queries stream, in the kernel of dK and dV.
"""

import functools
import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.attention.logits import Operands
from pallas_kernels.attention.mask import BlockMask, Blocks, Index


class Place(NamedTuple):
    """Where a tile lies and what it visits."""

    batch_idx: jax.Array
    head_idx: jax.Array
    start: jax.Array
    """The first query."""
    query_length: Index
    key_length: Index
    key_blocks: Callable[[Index, Index], Blocks]
    """Of a range of its queries."""
    first: jax.Array
    """Blocks of keys [first, stop) are visited, from the last to the first."""
    stop: jax.Array


class Visits(NamedTuple):
    """The blocks of keys that a consumer's rows of a tile visit: visit i is to block last - i.

    Where the tile's rows reach different keys, the first blocks of the tile are for others alone.
    """

    skipped: jax.Array
    """Blocks of the tile before the first visit."""
    count: jax.Array
    last: jax.Array
    full_first: jax.Array
    """Visits [full_first, full_stop) are to blocks that need no masking."""
    full_stop: jax.Array

    def is_partial(self, visit: Index) -> jax.Array:
        return (visit < self.full_first) | (visit >= self.full_stop)


@dataclass(frozen=True)
class QueryTiles:
    """How queries are cut into tiles, and keys into blocks."""

    mask: BlockMask
    heads: int
    rows: int
    """Queries of a tile."""
    key_block: int

    @property
    def count(self) -> int:
        """Tiles of one head."""
        return -(-self.mask.query_count // self.rows)

    def schedule(self, batch: int, heads_together: int, multiprocessors: int) -> np.ndarray:
        """[CTA, 1 + rounds], see `schedule`, where tiles with more blocks take longer."""
        costs = []
        for i in range(self.count):
            blocks = self.mask.key_blocks(
                (i * self.rows, (i + 1) * self.rows),
                self.key_block,
                self.mask.query_count,
                self.mask.key_count,
            )
            # The ends of a tile take about as long as one block of 128 keys.
            costs.append((blocks.stop - blocks.start) * self.key_block + 128)
        return schedule(tuple(costs), batch * self.heads, heads_together, multiprocessors)

    def place(self, number: jax.Array, operands: Operands, bounds_gmem) -> Place:
        """Of a tile by its number, (batch * heads + head) * count + tile, in a kernel.

        bounds_gmem is the table of `segment_blocks`, or None.
        """
        mask, block = self.mask, self.key_block
        batch_head = lax.div(number, jnp.int32(self.count))
        batch_idx = lax.div(batch_head, jnp.int32(self.heads))
        head_idx = lax.rem(batch_head, jnp.int32(self.heads))
        tile_idx = lax.rem(number, jnp.int32(self.count))
        query_length, key_length = operands.lengths(mask, batch_idx)
        within = None
        if bounds_gmem is not None:
            within = Blocks(*(bounds_gmem[batch_idx, tile_idx, i] for i in range(4)))

        def key_blocks(start, stop):
            return mask.key_blocks((start, stop), block, query_length, key_length, within)

        start = tile_idx * self.rows
        blocks = key_blocks(start, start + self.rows)
        # A tile without keys passes through a kernel like others, over one block of none.
        key_blocks_count = -(-mask.key_count // block)
        first = lax.min(jnp.int32(blocks.start), jnp.int32(key_blocks_count - 1))
        stop = lax.clamp(first + 1, jnp.int32(blocks.stop), jnp.int32(key_blocks_count))
        return Place(batch_idx, head_idx, start, query_length, key_length, key_blocks, first, stop)

    def visits(self, at: Place, start: jax.Array, rows: int) -> Visits:
        """Of the `rows` queries from `start` on, which are some of the tile at `at`."""
        own = at.key_blocks(start, start + rows)
        stop = at.stop
        if self.mask.reach()[1] is not None:
            stop = lax.clamp(at.first + 1, jnp.int32(own.stop), at.stop)
        return Visits(
            skipped=at.stop - stop,
            count=stop - at.first,
            last=stop - 1,
            full_first=stop - own.full_stop,
            full_stop=stop - own.full_start,
        )


class KeyPlace(NamedTuple):
    """Where a tile of keys lies and what it visits."""

    batch_idx: jax.Array
    key_head_idx: jax.Array
    start: jax.Array
    """The first key."""
    key_length: Index
    blocks: Blocks
    """Of queries, visited in order, those of one query head after those of another."""


@dataclass(frozen=True)
class KeyTiles:
    """How keys are cut into tiles, and queries into blocks: `QueryTiles` transposed."""

    mask: BlockMask
    key_heads: int
    group: int
    """Query heads that share a key head."""
    rows: int
    """Keys of a tile."""
    query_block: int

    @property
    def count(self) -> int:
        """Tiles of one key head."""
        return -(-self.mask.key_count // self.rows)

    def schedule(self, batch: int, heads_together: int, multiprocessors: int) -> np.ndarray:
        """[CTA, 1 + rounds], see `schedule`, where tiles with more visits take longer."""
        costs = []
        for j in range(self.count):
            blocks = self.mask.query_blocks(
                (j * self.rows, (j + 1) * self.rows),
                self.query_block,
                self.mask.query_count,
                self.mask.key_count,
            )
            # The ends of a tile take about as long as a visit to 128 queries.
            costs.append((blocks.stop - blocks.start) * self.group * self.query_block + 128)
        return schedule(tuple(costs), batch * self.key_heads, heads_together, multiprocessors)

    def place(self, number: jax.Array, operands: Operands, bounds_gmem) -> KeyPlace:
        """Of a tile by its number, (batch * key heads + key head) * count + tile, in a kernel.

        bounds_gmem is the table of `segment_blocks` with its arguments swapped, or None.
        """
        batch_head = lax.div(number, jnp.int32(self.count))
        batch_idx = lax.div(batch_head, jnp.int32(self.key_heads))
        key_head_idx = lax.rem(batch_head, jnp.int32(self.key_heads))
        tile_idx = lax.rem(number, jnp.int32(self.count))
        query_length, key_length = operands.lengths(self.mask, batch_idx)
        within = None
        if bounds_gmem is not None:
            within = Blocks(*(bounds_gmem[batch_idx, tile_idx, i] for i in range(4)))
        start = tile_idx * self.rows
        blocks = self.mask.query_blocks(
            (start, start + self.rows), self.query_block, query_length, key_length, within
        )
        blocks = Blocks(*(jnp.asarray(x, jnp.int32) for x in blocks))
        return KeyPlace(batch_idx, key_head_idx, start, key_length, blocks)


@functools.lru_cache(maxsize=64)
def schedule(
    costs: tuple[int, ...], heads: int, heads_together: int, multiprocessors: int
) -> np.ndarray:
    """[CTA, 1 + rounds] int32: how many tiles each CTA computes, and which in which order.

    Groups of heads in turn, in each the tiles that cost most first, each for the CTA that has least
    to do so far: what a queue would do, but the same in every run. A tile's number is
    head * len(costs) + tile.
    """
    order = sorted(range(len(costs)), key=lambda i: -costs[i])
    ctas = min(multiprocessors, heads * len(costs))
    loads = [(0, cta) for cta in range(ctas)]
    tiles: list[list[int]] = [[] for _ in range(ctas)]
    for group in range(0, heads, heads_together):
        for i in order:
            for head in range(group, min(group + heads_together, heads)):
                load, cta = loads[0]
                heapq.heapreplace(loads, (load + costs[i], cta))
                tiles[cta].append(head * len(costs) + i)
    table = np.zeros((ctas, 1 + max(map(len, tiles))), np.int32)
    for cta, numbers in enumerate(tiles):
        table[cta, 0] = len(numbers)
        table[cta, 1 : 1 + len(numbers)] = numbers
    return table
