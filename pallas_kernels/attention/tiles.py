"""Tiles of persistent CTAs: their schedule, and the blocks that each tile visits.

A tile of queries, in the forward and the kernel of dQ, visits blocks of keys: it loops over those that
the mask does not leave empty. A tile of keys, in the kernel of dK and dV, visits blocks of queries.
"""

import functools
import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.attention.block_lists import BlockLists, Tables, block_lists, reached
from pallas_kernels.attention.logits import Bits, Operands, OwnBits
from pallas_kernels.attention.mask import BlockMask, Blocks, Extent, Index, segment_blocks
from pallas_kernels.attention.own_lists import OwnLists, own_lists
from pallas_kernels.longest_first import longest_first


class Place(NamedTuple):
    """Position of a tile of queries, and the blocks of keys that it visits."""

    batch_idx: jax.Array
    head_idx: jax.Array
    start: jax.Array
    """Index of the first query."""
    extent: Extent
    key_blocks: Callable[[Index, Index], Blocks]
    """Function from a range of the tile's queries to the blocks of keys that they attend to."""
    first: jax.Array
    """Range [first, stop) of blocks of keys, or of rows of `entries` if the mask has lists. The tile's
    loop goes from block or row stop - 1 down to `first`."""
    stop: jax.Array
    entries: Any = None
    """The tile's list, int32: in each row a block of keys and the index of its mask bits; or None."""
    bits: Any = None
    ranges: Any = None
    """Integers with each consumer's range [start, stop) of the list (see `OwnLists`), or None."""

    def block(self, visit: Index) -> jax.Array:
        """Returns the index of the block of keys in iteration `visit` of the tile's loop."""
        place = self.stop - 1 - visit
        return place if self.entries is None else self.entries[place, 0]


class Visits(NamedTuple):
    """Loop of a consumer over blocks of keys for its 64 queries; iteration i visits block `last` - i.

    Under a causal mask, the blocks that the tile visits first (its last keys) may be empty for all rows
    of this consumer.
    """

    skipped: jax.Array
    """Number of the tile's blocks that come before this consumer's first iteration."""
    count: jax.Array
    last: jax.Array
    full_first: jax.Array
    """First iteration without masking; those of [full_first, full_stop) need none."""
    full_stop: jax.Array

    @property
    def remaining(self) -> int:
        """Number of the tile's blocks that come after this consumer's last iteration."""
        return 0

    def block(self, visit: Index) -> jax.Array:
        return self.last - visit

    def is_partial(self, visit: Index) -> jax.Array:
        return (visit < self.full_first) | (visit >= self.full_stop)

    def bits(self, visit: Index, first_row: Index) -> Bits | None:
        del visit, first_row
        return None


class ListedVisits(NamedTuple):
    """Loop over a tile's list of blocks of keys; every consumer of the tile visits all of them."""

    at: Place
    full: Blocks | None
    """Range [full_start, full_stop) of blocks in which no mask but the pattern forbids elements; None if
    the pattern is the only mask."""

    @property
    def skipped(self) -> int:
        return 0

    @property
    def remaining(self) -> int:
        return 0

    @property
    def count(self) -> jax.Array:
        return self.at.stop - self.at.first

    def block(self, visit: Index) -> jax.Array:
        return self.at.block(visit)

    def _number(self, visit: Index) -> jax.Array:
        return self.at.entries[self.at.stop - 1 - visit, 1]

    def is_partial(self, visit: Index) -> jax.Array:
        is_partial = self._number(visit) > 0
        if self.full is None:
            return is_partial
        block = self.block(visit)
        return is_partial | (block < self.full.full_start) | (block >= self.full.full_stop)

    def bits(self, visit: Index, first_row: Index) -> Bits | None:
        """Returns the block's mask bits for the tile's rows from `first_row` on."""
        return Bits(self.at.bits, self._number(visit), first_row)


class OwnVisits(NamedTuple):
    """Loop of a consumer over its own range of the tile's list, from entry stop - 1 down to `first`."""

    at: Place
    part: jax.Array
    """Index of the consumer in its CTA."""
    first: jax.Array
    stop: jax.Array

    @property
    def skipped(self) -> jax.Array:
        return self.at.stop - self.stop

    @property
    def remaining(self) -> jax.Array:
        return self.first - self.at.first

    @property
    def count(self) -> jax.Array:
        return self.stop - self.first

    def block(self, visit: Index) -> jax.Array:
        return self.at.entries[self.stop - 1 - visit, 0]

    def _number(self, visit: Index) -> jax.Array:
        return self.at.entries[self.stop - 1 - visit, 1 + self.part]

    def is_partial(self, visit: Index) -> jax.Array:
        return self._number(visit) > 0

    def bits(self, visit: Index, first_row: Index) -> OwnBits:
        del first_row
        return OwnBits(self.at.bits, self._number(visit))


_MANY = 4
"""Fewest tiles per SM for which the schedule is computed on the device, from segments and lengths.

With fewer tiles, the better balance saves less time than XLA's kernels take to compute the schedule, so
the schedule of the compile time is used, in which neither is known. Lengths balance the gradient of
keys only: tiles of queries took 2 % longer by such a schedule.
"""


@dataclass(frozen=True)
class QueryTiles:
    """Division of queries into tiles, and of keys into blocks."""

    mask: BlockMask
    heads: int
    rows: int
    """Queries in a tile."""
    key_block: int
    parts: int = 0
    """Consumers in a CTA if each visits a range of its own of the tile's list (`OwnLists`); else 0."""
    shares: int = 1
    """Shares into which the longest lists are divided, for different CTAs; used with `parts`."""

    @property
    def count(self) -> int:
        """Tiles of one head; a tile whose list is divided into shares counts once for each share."""
        if self.own is not None:
            return len(self.own.costs)
        return -(-self.mask.query_count // self.rows)

    @functools.cached_property
    def own(self) -> OwnLists | None:
        """Lists in which each consumer has its own range; None unless a pattern is the only mask."""
        mask = self.mask
        if not self.parts or mask.pattern is None or mask.limits_pattern:
            return None
        blocks = (self.rows, self.key_block, self.parts)
        return own_lists(mask.pattern, *blocks, shares=self.shares, least=1)

    @property
    def starts_of_shared(self) -> list[int]:
        """Index of the first query of each tile whose list of blocks of keys is divided into shares."""
        return [] if self.own is None else [tile * self.rows for tile in self.own.split]

    def share(self, at: Place) -> jax.Array:
        """Returns the share's number, from 1 over all divided tiles; 0 if the tile is undivided."""
        return at.ranges[3 + 2 * self.parts]

    def schedule(
        self,
        batch: int,
        heads_together: int,
        multiprocessors: int,
        operands: Operands,
        tables: Tables,
    ) -> np.ndarray | jax.Array:
        """Returns each CTA's count of tiles, then their numbers in order, int32 [CTAs, 1 + most tiles].

        Work is balanced by the number of blocks of keys that a tile visits.
        """
        count = batch * self.heads * self.count
        if tables.bounds is not None and count >= _MANY * multiprocessors:
            start, stop = reached(self.mask, self._blocks, self.count, operands, tables.bounds)
            return schedule_of(stop - start, self.heads, multiprocessors)
        return self.planned(batch, heads_together, multiprocessors)

    def planned(self, batch: int, heads_together: int, multiprocessors: int) -> np.ndarray:
        """Returns what `schedule` does, at compile time, when lengths and segments are not known."""
        visited = []
        for i in range(-(-self.mask.query_count // self.rows)):
            blocks = self.mask.key_blocks(
                (i * self.rows, (i + 1) * self.rows), self.key_block, self.mask.extent
            )
            visited.append((blocks.stop - blocks.start) * self.key_block)
        if self.own is not None:
            visited = [count * self.key_block for count in self.own.costs]
        elif self.lists is not None:
            visited = self.lists.costs(self.key_block)
        # Starting and ending a tile takes about as long as one block of 128 keys.
        costs = tuple(keys + 128 for keys in visited)
        return schedule(costs, batch * self.heads, heads_together, multiprocessors)

    @functools.cached_property
    def lists(self) -> BlockLists | None:
        """Lists of the blocks of keys that each tile visits; None unless the mask has a pattern."""
        if self.mask.pattern is None:
            return None
        return block_lists(self.mask.pattern, self.rows, self.key_block)

    def tables(self, operands: Operands) -> Tables:
        """Returns the arrays from which a kernel reads which blocks of keys each tile visits."""
        if self.own is not None:
            return self.own.tables
        bounds, mask, rows, block = None, self.mask, self.rows, self.key_block
        if mask.has_segments:
            bounds = segment_blocks(operands.query_segments, operands.key_segments, rows, block)
        if self.lists is None:
            return Tables(bounds)
        return self.lists.tables(mask, self._blocks, operands, bounds, least=1)

    def _blocks(self, tile: Index, extent: Extent, within: Blocks | None) -> Blocks:
        start = tile * self.rows
        return self.mask.key_blocks((start, start + self.rows), self.key_block, extent, within)

    def place(self, number: jax.Array, operands: Operands, tables: Tables) -> Place:
        """Returns the `Place` of tile number (batch * heads + head) * count + tile, in a kernel."""
        mask, block = self.mask, self.key_block
        batch_head = lax.div(number, jnp.int32(self.count))
        batch_idx = lax.div(batch_head, jnp.int32(self.heads))
        head_idx = lax.rem(batch_head, jnp.int32(self.heads))
        tile_idx = lax.rem(number, jnp.int32(self.count))
        extent = operands.extent(mask, batch_idx)
        within = _within(tables, batch_idx, tile_idx)

        def key_blocks(start, stop):
            return mask.key_blocks((start, stop), block, extent, within)

        if self.own is not None:
            mask_idx = _mask_idx(operands, head_idx)
            ranges = tables.ranges.at[0, mask_idx, tile_idx]
            tile = ranges[2 + 2 * self.parts]
            entries = tables.entries.at[mask_idx, tile]
            where = (batch_idx, head_idx, tile * self.rows, extent, key_blocks)
            return Place(*where, ranges[0], ranges[1], entries, tables.bits, ranges)
        start = tile_idx * self.rows
        if tables.ranges is not None:
            first, stop, entries = _listed(tables, operands, batch_idx, head_idx, tile_idx)
            return Place(
                *(batch_idx, head_idx, start, extent, key_blocks, first, stop, entries, tables.bits)
            )
        blocks = key_blocks(start, start + self.rows)
        # A tile without keys to visit still visits one block, which is masked as a whole: the forward
        # processes a tile's first block outside of its loop.
        key_blocks_count = -(-mask.key_count // block)
        first = lax.min(jnp.int32(blocks.start), jnp.int32(key_blocks_count - 1))
        stop = lax.clamp(first + 1, jnp.int32(blocks.stop), jnp.int32(key_blocks_count))
        return Place(batch_idx, head_idx, start, extent, key_blocks, first, stop)

    def visits(self, at: Place, start: jax.Array, rows: int) -> Visits | ListedVisits | OwnVisits:
        """Returns the loop over blocks of keys for `rows` queries of tile `at`, from `start` on."""
        if at.ranges is not None:
            part = lax.div(start - at.start, jnp.int32(rows))
            return OwnVisits(at, part, at.ranges[2 + 2 * part], at.ranges[3 + 2 * part])
        if at.entries is not None and not self.mask.limits_pattern:
            return ListedVisits(at, None)
        own = at.key_blocks(start, start + rows)
        if at.entries is not None:
            return ListedVisits(at, own)
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
    """Position of a tile of keys, and the blocks of queries that it visits."""

    batch_idx: jax.Array
    key_head_idx: jax.Array
    first_head_idx: jax.Array
    """Index of the first visited query head."""
    shared_head_idx: jax.Array
    """Index on the head axis of dK and dV [B, S, K * shares, .], where each share has its own head."""
    start: jax.Array
    """Index of the first key."""
    extent: Extent
    visits: Callable[[Index], "QueryVisits"]
    """Function from a visited head's number, from 0, to the loop over that head's blocks of queries."""
    share: jax.Array | None = None
    """Number of the share of the tile's list, counted from 1 over all divided tiles; 0 if the tile is
    undivided, None without `OwnLists`."""


class QueryVisits(NamedTuple):
    """Loop of a tile of keys over one head's blocks of queries, in iterations `start` to `stop` - 1."""

    start: jax.Array
    stop: jax.Array
    full: Blocks | None
    """Range [full_start, full_stop) of blocks in which no mask but the pattern forbids elements; None if
    the pattern is the only mask."""
    entries: Any = None
    """The tile's list, int32 [entries, 2]: a block of queries, and the index of its mask bits. If it is
    None, iteration i visits block i."""
    bits_gmem: Any = None
    ranges: Any = None
    """Integers with each warpgroup's range [start, stop) of the list (see `OwnLists`), or None."""

    def of_part(self, part: Index) -> "OwnQueryVisits | QueryVisits":
        """Returns the loop of the warpgroup that owns keys 64 * part to 64 * part + 63 of the tile."""
        if self.ranges is None:
            return self
        first, stop = (
            lax.clamp(self.start, self.ranges[2 + 2 * part + i], self.stop) for i in (0, 1)
        )
        return OwnQueryVisits(first, stop, part, self.entries, self.bits_gmem)

    def block(self, visit: Index) -> Index:
        return visit if self.entries is None else self.entries[visit, 0]

    def is_partial(self, visit: Index) -> jax.Array:
        is_partial: Any = False if self.entries is None else self.entries[visit, 1] > 0
        if self.full is None:
            return is_partial
        block = self.block(visit)
        return is_partial | (block < self.full.full_start) | (block >= self.full.full_stop)

    def bits(self, visit: Index, first_row: Index) -> Bits | None:
        """Returns the block's mask bits for the tile's keys from `first_row` on."""
        if self.entries is None:
            return None
        return Bits(self.bits_gmem, self.entries[visit, 1], first_row)


class OwnQueryVisits(NamedTuple):
    """Loop of one warpgroup over its own range [start, stop) of the tile's list of blocks of queries."""

    start: jax.Array
    stop: jax.Array
    part: Index
    entries: Any
    bits_gmem: Any

    def block(self, visit: Index) -> jax.Array:
        return self.entries[visit, 0]

    def _number(self, visit: Index) -> jax.Array:
        return self.entries[visit, 1 + self.part]

    def is_partial(self, visit: Index) -> jax.Array:
        return self._number(visit) > 0

    def bits(self, visit: Index, first_row: Index) -> OwnBits:
        del first_row
        return OwnBits(self.bits_gmem, self._number(visit))


_EVEN = 16
"""Tiles per SM above which `KeyTiles.longest` estimates the largest work of a CTA from the mean, instead
of computing a schedule in a Python loop over all tiles."""


@dataclass(frozen=True)
class KeyTiles:
    """Division of keys into tiles, and of queries into blocks: `QueryTiles` transposed.

    A tile's blocks of queries can be divided into shares for different CTAs. Each share has its own dK
    and dV, at its own index of the head axis; XLA adds up the shares of a key head afterwards.
    """

    mask: BlockMask
    key_heads: int
    group: int
    """Query heads that a tile visits, in one share of its work."""
    rows: int
    """Keys in a tile."""
    query_block: int
    group_shares: int = 1
    """Shares into which the query heads of a key head are divided."""
    query_shares: int = 1
    """Shares into which the blocks of queries are divided, too; a tile has group_shares * query_shares
    shares."""
    parts: int = 0
    """Warpgroups of a CTA if each visits a range of its own of the tile's list (`OwnLists`); else 0."""
    list_shares: int = 1
    """Shares into which only the longest lists are divided, for different CTAs; used with `parts`."""

    @property
    def count(self) -> int:
        """Tiles of one key head; a tile whose list is divided counts once for each share of the list."""
        if self.own is not None:
            return len(self.own.costs)
        return -(-self.mask.key_count // self.rows)

    @property
    def starts_of_shared(self) -> list[int]:
        """Index of the first key of each tile whose list of blocks of queries is divided into shares."""
        return [] if self.own is None else [tile * self.rows for tile in self.own.split]

    @property
    def shares(self) -> int:
        return self.group_shares * self.query_shares

    @functools.cached_property
    def costs(self) -> tuple[int, ...]:
        """Work of a share of each tile of a key head: visited queries, plus 128 for start and end."""
        visited = []
        for j in range(-(-self.mask.key_count // self.rows)):
            blocks = self.mask.query_blocks(
                (j * self.rows, (j + 1) * self.rows), self.query_block, self.mask.extent
            )
            visited.append((blocks.stop - blocks.start) * self.query_block)
        if self.own is not None:
            visited = [count * self.query_block for count in self.own.costs]
        elif self.lists is not None:
            visited = self.lists.costs(self.query_block)
        blocks_of_share = (-(-n // (self.query_shares * self.query_block)) for n in visited)
        # Starting and ending a tile takes about as long as a visit to 128 queries.
        return tuple(n * self.group * self.query_block + 128 for n in blocks_of_share)

    @functools.cached_property
    def own(self) -> OwnLists | None:
        """Lists in which each warpgroup has its own range; None unless a pattern is the only mask."""
        mask = self.mask
        if not self.parts or mask.pattern is None or mask.limits_pattern:
            return None
        blocks = (self.query_block, self.rows, self.parts)
        return own_lists(mask.pattern, *blocks, transposed=True, shares=self.list_shares)

    @functools.cached_property
    def lists(self) -> BlockLists | None:
        """Lists of the blocks of queries that each tile visits; None unless the mask has a pattern."""
        if self.mask.pattern is None:
            return None
        return block_lists(self.mask.pattern, self.query_block, self.rows, transposed=True)

    def tables(self, operands: Operands) -> Tables:
        """Returns the arrays from which a kernel reads which blocks of queries each tile visits."""
        if self.own is not None:
            return self.own.tables
        bounds, mask, rows, block = None, self.mask, self.rows, self.query_block
        if mask.has_segments:
            bounds = segment_blocks(operands.key_segments, operands.query_segments, rows, block)
        if self.lists is None:
            return Tables(bounds)
        return self.lists.tables(mask, self._blocks, operands, bounds, least=0)

    def _blocks(self, tile: Index, extent: Extent, within: Blocks | None) -> Blocks:
        start = tile * self.rows
        return self.mask.query_blocks((start, start + self.rows), self.query_block, extent, within)

    def schedule(
        self,
        batch: int,
        heads_together: int,
        multiprocessors: int,
        operands: Operands,
        tables: Tables,
    ) -> np.ndarray | jax.Array:
        """Returns each CTA's count of tiles, then their numbers in order, int32 [CTAs, 1 + most tiles].

        Work is balanced by the number of blocks of queries that a tile visits.
        """
        heads = self.key_heads * self.shares
        if _is_uneven(self.mask, tables) and batch * heads * self.count >= _MANY * multiprocessors:
            start, stop = reached(self.mask, self._blocks, self.count, operands, tables.bounds)
            return schedule_of(stop - start, heads, multiprocessors)
        return self.planned(batch, heads_together, multiprocessors)

    def planned(self, batch: int, heads_together: int, multiprocessors: int) -> np.ndarray:
        """Returns what `schedule` does, at compile time, when lengths and segments are not known."""
        heads = batch * self.key_heads * self.shares
        return schedule(self.costs, heads, heads_together, multiprocessors)

    def longest(self, batch: int, heads_together: int, multiprocessors: int) -> int:
        """Returns the work of the CTA with the most work, in visited queries."""
        heads = batch * self.key_heads * self.shares
        if heads * self.count > _EVEN * multiprocessors:
            return heads * sum(self.costs) // multiprocessors + max(self.costs) // 2
        table = self.planned(batch, heads_together, multiprocessors)
        costs = np.asarray(self.costs)[table[:, 1:] % self.count]
        is_tile = np.arange(costs.shape[1]) < table[:, :1]
        return int(np.sum(costs * is_tile, axis=1).max())

    def place(self, number: jax.Array, operands: Operands, tables: Tables) -> KeyPlace:
        """Returns the `KeyPlace` of tile number (batch * shared heads + shared head) * count + tile.

        A share of a key head is shared head number (key head * shares + share). Kernels call this.
        """
        batch_head = lax.div(number, jnp.int32(self.count))
        shared_heads = jnp.int32(self.key_heads * self.shares)
        batch_idx = lax.div(batch_head, shared_heads)
        shared_head_idx = lax.rem(batch_head, shared_heads)
        tile_idx = lax.rem(number, jnp.int32(self.count))
        first_head_idx = lax.div(shared_head_idx, jnp.int32(self.query_shares)) * self.group
        share = lax.rem(shared_head_idx, jnp.int32(self.query_shares))
        extent = operands.extent(self.mask, batch_idx)
        number, start = None, tile_idx * self.rows
        if self.own is not None:
            # Columns of the tile's index and of the share's number; they are equal for all masks of the
            # pattern, so those of mask 0 are read.
            tile, number = (tables.ranges[0, 0, tile_idx, 2 + 2 * self.parts + i] for i in (0, 1))
            start = tile * self.rows
        blocks = None
        if tables.ranges is None or self.mask.limits_pattern:
            within = _within(tables, batch_idx, tile_idx)
            blocks = self.mask.query_blocks(
                (start, start + self.rows), self.query_block, extent, within
            )
            blocks = Blocks(*(jnp.asarray(x, jnp.int32) for x in blocks))

        def visits(head: Index) -> QueryVisits:
            if tables.ranges is not None:
                head_idx = first_head_idx + head
                first, stop, entries = _listed(tables, operands, batch_idx, head_idx, tile_idx)
                shared = self.of_share(first, stop, share)
                ranges = None
                if self.own is not None:
                    mask_idx = _mask_idx(operands, head_idx)
                    ranges = tables.ranges.at[0, mask_idx, tile_idx]
                    entries = tables.entries.at[mask_idx, lax.div(start, jnp.int32(self.rows))]
                return QueryVisits(*shared, blocks, entries, tables.bits, ranges)
            assert blocks is not None
            return QueryVisits(*self.of_share(blocks.start, blocks.stop, share), blocks)

        return KeyPlace(
            *(batch_idx, lax.div(shared_head_idx, jnp.int32(self.shares)), first_head_idx),
            *(shared_head_idx, start, extent, visits, number),
        )

    def of_share(
        self, start: jax.Array, stop: jax.Array, share: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the range of share number `share` of a tile's visits [start, stop)."""
        if self.query_shares == 1:
            return start, stop
        visits = lax.max(stop - start, jnp.int32(0))
        most = lax.div(visits + (self.query_shares - 1), jnp.int32(self.query_shares))
        first = lax.min(start + share * most, start + visits)
        return first, lax.min(first + most, start + visits)


def _is_uneven(mask: BlockMask, tables: Tables) -> bool:
    """Returns whether the work of tiles of keys depends on a call's segments or lengths."""
    has_lengths = mask.has_query_lengths or mask.has_key_lengths
    return tables.bounds is not None or (has_lengths and mask.pattern is None)


def _within(tables: Tables, batch_idx: jax.Array, tile_idx: jax.Array) -> Blocks | None:
    """Returns the blocks that hold keys (for `KeyTiles`, queries) of a tile's segments, or None."""
    if tables.bounds is None:
        return None
    return Blocks(*(tables.bounds[batch_idx, tile_idx, i] for i in range(4)))


def _listed(
    tables: Tables, operands: Operands, batch_idx: Any, head_idx: Any, tile_idx: Any
) -> tuple[jax.Array, jax.Array, Any]:
    """Returns the range (first, stop) of entries to visit, and the tile's list, int32 [entries, 2]."""
    mask_idx = _mask_idx(operands, head_idx)
    batch_idx = batch_idx if tables.ranges.shape[0] > 1 else 0
    first, stop = (tables.ranges[batch_idx, mask_idx, tile_idx, i] for i in range(2))
    return first, stop, tables.entries.at[mask_idx, tile_idx]


def _mask_idx(operands: Operands, head_idx: Any) -> Any:
    """Returns which of the pattern's masks query head `head_idx` has."""
    heads = operands.pattern_heads
    return 0 if heads is None else heads[head_idx]


@functools.lru_cache(maxsize=64)
def schedule(
    costs: tuple[int, ...], heads: int, heads_together: int, multiprocessors: int
) -> np.ndarray:
    """Returns each CTA's count of tiles, then their numbers in order, int32 [CTAs, 1 + most tiles].

    `costs` has the work of each tile of a head, and `heads` counts those of all batch entries. Groups of
    `heads_together` heads follow each other. Within a group, the tiles that cost most come first, and
    each goes to the CTA with the least work so far. A dynamic queue would do the same, but its order
    would vary between runs. A tile's number is head * len(costs) + tile.
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


_COUNTED_TILES = 2048
"""Most tiles that `schedule_of` orders by comparing each with each.

XLA's kernel that sorts 128 tiles takes 268 us within a training step on an H200."""


def schedule_of(visits: jax.Array, heads: int, multiprocessors: int) -> jax.Array:
    """Computes on the device what `schedule` returns: each CTA's count of tiles and their numbers.

    Args:
      visits: int32 [B, tiles], the cost of each tile, the same in all heads.
      heads: heads of each batch entry.
      multiprocessors: limit on the CTAs.

    The tiles that cost most come first, each for all heads. In a round each CTA takes one, every
    second time in reverse order: the CTA with a round's largest tile gets the next round's smallest.
    """
    batch, tiles = visits.shape
    count = batch * tiles
    ctas = min(multiprocessors, heads * count)
    costs = visits.reshape(-1)
    if count <= _COUNTED_TILES:
        order = longest_first(costs)
    else:
        # The tile's index is a part of the key, so that tiles of equal cost keep their order.
        keys = (jnp.max(costs) - costs) * count + jnp.arange(count, dtype=jnp.int32)
        order = jnp.sort(keys) % count
    cta = np.arange(ctas, dtype=np.int32)[:, None]
    turn = np.arange(-(-heads * count // ctas), dtype=np.int32)[None]
    item = turn * ctas + np.where(turn % 2 == 0, cta, ctas - 1 - cta)
    is_item = item < heads * count
    rank, head = np.divmod(np.where(is_item, item, np.int32(0)), np.int32(heads))
    place = order[rank]
    number = (place // tiles * heads + head) * tiles + place % tiles
    counts = is_item.sum(axis=1, keepdims=True).astype(np.int32)
    return jnp.concatenate([counts, jnp.where(is_item, number, 0)], axis=1).astype(jnp.int32)
