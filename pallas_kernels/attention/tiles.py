"""Tiles of persistent CTAs: their schedule, and the blocks of the other side that each visits.

The forward and the kernel of dQ have tiles of queries, past which keys stream. The kernel of dK and dV
has tiles of keys, past which queries stream.
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
from pallas_kernels.attention.mask import BlockMask, Blocks, Extent, Index


class Place(NamedTuple):
    """Place of a tile of queries, and the blocks that it visits."""

    batch_idx: jax.Array
    head_idx: jax.Array
    start: jax.Array
    """Index of the first query."""
    extent: Extent
    key_blocks: Callable[[Index, Index], Blocks]
    """Function from a range of the tile's queries to the blocks of keys that they visit."""
    first: jax.Array
    """First visited block of keys; [first, stop) are visited, from the last to the first."""
    stop: jax.Array


class Visits(NamedTuple):
    """Blocks of keys that a consumer's rows of a tile visit; visit i is to block last - i.

    If the tile's rows reach different keys, its first blocks may belong to other consumers' rows only.
    """

    skipped: jax.Array
    """Blocks of the tile that come before the first visit."""
    count: jax.Array
    last: jax.Array
    full_first: jax.Array
    """First visit without masking; the visits [full_first, full_stop) need none."""
    full_stop: jax.Array

    def is_partial(self, visit: Index) -> jax.Array:
        return (visit < self.full_first) | (visit >= self.full_stop)


@dataclass(frozen=True)
class QueryTiles:
    """The cut of queries into tiles, and of keys into blocks."""

    mask: BlockMask
    heads: int
    rows: int
    """Queries in a tile."""
    key_block: int

    @property
    def count(self) -> int:
        """Tiles of one head."""
        return -(-self.mask.query_count // self.rows)

    def schedule(self, batch: int, heads_together: int, multiprocessors: int) -> np.ndarray:
        """Returns [CTA, 1 + rounds], see `schedule`; tiles with more blocks are taken to cost more."""
        costs = []
        for i in range(self.count):
            blocks = self.mask.key_blocks(
                (i * self.rows, (i + 1) * self.rows), self.key_block, self.mask.extent
            )
            # Starting and ending a tile takes about as long as one block of 128 keys.
            costs.append((blocks.stop - blocks.start) * self.key_block + 128)
        return schedule(tuple(costs), batch * self.heads, heads_together, multiprocessors)

    def place(self, number: jax.Array, operands: Operands, bounds_gmem) -> Place:
        """Returns the place of the tile with number (batch * heads + head) * count + tile, in a kernel.

        bounds_gmem is the table of `segment_blocks`, or None.
        """
        mask, block = self.mask, self.key_block
        batch_head = lax.div(number, jnp.int32(self.count))
        batch_idx = lax.div(batch_head, jnp.int32(self.heads))
        head_idx = lax.rem(batch_head, jnp.int32(self.heads))
        tile_idx = lax.rem(number, jnp.int32(self.count))
        extent = operands.extent(mask, batch_idx)
        within = None
        if bounds_gmem is not None:
            within = Blocks(*(bounds_gmem[batch_idx, tile_idx, i] for i in range(4)))

        def key_blocks(start, stop):
            return mask.key_blocks((start, stop), block, extent, within)

        start = tile_idx * self.rows
        blocks = key_blocks(start, start + self.rows)
        # A tile that visits no keys still runs the kernel's loop once, over a fully masked block.
        key_blocks_count = -(-mask.key_count // block)
        first = lax.min(jnp.int32(blocks.start), jnp.int32(key_blocks_count - 1))
        stop = lax.clamp(first + 1, jnp.int32(blocks.stop), jnp.int32(key_blocks_count))
        return Place(batch_idx, head_idx, start, extent, key_blocks, first, stop)

    def visits(self, at: Place, start: jax.Array, rows: int) -> Visits:
        """Returns the visits of the `rows` queries from `start` on, which belong to the tile at `at`."""
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
    """Place of a tile of keys, and the blocks that it visits."""

    batch_idx: jax.Array
    key_head_idx: jax.Array
    first_head_idx: jax.Array
    """First of the visited query heads."""
    shared_head_idx: jax.Array
    """Head of the results, in which each share of a key head counts as a head."""
    start: jax.Array
    """Index of the first key."""
    extent: Extent
    blocks: Blocks
    """Blocks of queries, visited in order for one query head after the other."""


_EVEN = 16
"""Tiles per SM above which they are assumed to be spread evenly, without computing a schedule."""


@dataclass(frozen=True)
class KeyTiles:
    """The cut of keys into tiles, and of queries into blocks: `QueryTiles` transposed.

    Shares divide a tile's visits among CTAs, and each share of a key head has gradients of its own, as
    if it were a head.
    """

    mask: BlockMask
    key_heads: int
    group: int
    """Query heads that a share visits."""
    rows: int
    """Keys in a tile."""
    query_block: int
    group_shares: int = 1
    """Shares into which the query heads of a key head are divided."""
    query_shares: int = 1
    """Shares into which the blocks of queries are divided, for each share of the query heads."""

    @property
    def count(self) -> int:
        """Tiles of one key head."""
        return -(-self.mask.key_count // self.rows)

    @property
    def shares(self) -> int:
        return self.group_shares * self.query_shares

    @functools.cached_property
    def costs(self) -> tuple[int, ...]:
        """Work of a share of each tile of a head, in visited queries."""
        result = []
        for j in range(self.count):
            blocks = self.mask.query_blocks(
                (j * self.rows, (j + 1) * self.rows), self.query_block, self.mask.extent
            )
            visits = -(-(blocks.stop - blocks.start) // self.query_shares) * self.group
            # Starting and ending a tile takes about as long as a visit to 128 queries.
            result.append(visits * self.query_block + 128)
        return tuple(result)

    def schedule(self, batch: int, heads_together: int, multiprocessors: int) -> np.ndarray:
        """Returns [CTA, 1 + rounds], see `schedule`; tiles with more visits are taken to cost more."""
        heads = batch * self.key_heads * self.shares
        return schedule(self.costs, heads, heads_together, multiprocessors)

    def longest(self, batch: int, heads_together: int, multiprocessors: int) -> int:
        """Returns the work of the busiest CTA, in visited queries."""
        heads = batch * self.key_heads * self.shares
        if heads * self.count > _EVEN * multiprocessors:
            return heads * sum(self.costs) // multiprocessors + max(self.costs) // 2
        table = self.schedule(batch, heads_together, multiprocessors)
        costs = np.asarray(self.costs)[table[:, 1:] % self.count]
        is_tile = np.arange(costs.shape[1]) < table[:, :1]
        return int(np.sum(costs * is_tile, axis=1).max())

    def place(self, number: jax.Array, operands: Operands, bounds_gmem) -> KeyPlace:
        """Returns the place of tile number (batch * shared heads + shared head) * count + tile.

        Shared head number key head * shares + share is a share of a key head. A kernel calls this;
        bounds_gmem is the table of `segment_blocks` with its arguments swapped, or None.
        """
        batch_head = lax.div(number, jnp.int32(self.count))
        shared_heads = jnp.int32(self.key_heads * self.shares)
        batch_idx = lax.div(batch_head, shared_heads)
        shared_head_idx = lax.rem(batch_head, shared_heads)
        tile_idx = lax.rem(number, jnp.int32(self.count))
        extent = operands.extent(self.mask, batch_idx)
        within = None
        if bounds_gmem is not None:
            within = Blocks(*(bounds_gmem[batch_idx, tile_idx, i] for i in range(4)))
        start = tile_idx * self.rows
        blocks = self.mask.query_blocks(
            (start, start + self.rows), self.query_block, extent, within
        )
        blocks = Blocks(*(jnp.asarray(x, jnp.int32) for x in blocks))
        return KeyPlace(
            batch_idx,
            lax.div(shared_head_idx, jnp.int32(self.shares)),
            lax.div(shared_head_idx, jnp.int32(self.query_shares)) * self.group,
            shared_head_idx,
            start,
            extent,
            self.shared_blocks(blocks, lax.rem(shared_head_idx, jnp.int32(self.query_shares))),
        )

    def shared_blocks(self, blocks: Blocks, share: jax.Array) -> Blocks:
        """Returns the blocks that a share of the queries visits."""
        if self.query_shares == 1:
            return blocks
        visits = lax.max(blocks.stop - blocks.start, jnp.int32(0))
        most = lax.div(visits + (self.query_shares - 1), jnp.int32(self.query_shares))
        first = lax.min(blocks.start + share * most, blocks.start + visits)
        return blocks._replace(start=first, stop=lax.min(first + most, blocks.start + visits))


@functools.lru_cache(maxsize=64)
def schedule(
    costs: tuple[int, ...], heads: int, heads_together: int, multiprocessors: int
) -> np.ndarray:
    """Returns [CTA, 1 + rounds] int32: the number of tiles of each CTA, and then the tiles in order.

    Groups of heads follow each other. Within a group, the tiles that cost most come first, and each goes
    to the CTA with the least work so far. A dynamic queue would do the same, but its order would vary
    between runs. A tile's number is head * len(costs) + tile.
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
