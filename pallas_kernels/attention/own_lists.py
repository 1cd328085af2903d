"""Lists of a tile's blocks in which each consumer has its own range, and mask bits of its own 64 rows.

A tile of 128 rows, 64 for each consumer, visits a block if any row attends to it, though often only rows
of one consumer do, as at the edge of a window. In these lists, blocks that only the first consumer needs
come first, and blocks that only the last consumer needs come last: each consumer visits one range of the
list, and skips the rest. A block may be full for one consumer and partial for another.

The mask bits of a row are in the order in which threads hold columns: in WGMMA's layout, thread l of the
four that share a row has columns 2 l, 2 l + 1, 2 l + 8, 2 l + 9, ..., so bit i of word j is column
8 i + j. A thread needs two words of a row, and the index of each bit is known at compile time.
"""

import functools
from dataclasses import dataclass

import numpy as np

from pallas_kernels.attention.block_lists import Pattern, Tables
from pallas_kernels.attention.mask import BlockMask
from pallas_kernels.attention.memory import WGMMA_ROWS

_STEP = 8
"""Distance in columns of a thread's pairs of columns in WGMMA's layout; also the words of a row."""


@dataclass(frozen=True, eq=False)
class OwnLists:
    """Lists of a `Pattern` for tiles of several consumers, each with 64 rows.

    A long tile's list may be divided into shares, which are listed tiles of their own.
    """

    tables: Tables
    """`ranges` [1, masks, listed tiles, 2 + 2 * parts + 2] has the range of a tile's entries, then that
    of each consumer, then the tile's index, and the number of its share, counted from 1 over all divided
    tiles, or 0 for an undivided tile.
    `entries` [masks, tiles, entries, 1 + parts] has a block, and each consumer's index of mask bits."""
    split: tuple[int, ...]
    """Tiles that are divided into shares."""
    shares: int
    """Shares of each tile of `split`."""
    costs: tuple[int, ...]
    """Number of blocks that each listed tile (or share) visits, averaged over the masks."""


@functools.lru_cache(maxsize=64)
def own_lists(
    pattern: Pattern,
    query_block: int,
    key_block: int,
    parts: int,
    transposed: bool = False,
    shares: int = 1,
    least: int = 0,
) -> OwnLists:
    """Returns the lists for tiles of queries (of keys if `transposed`) that `parts` consumers share.

    Args:
      pattern: the masks.
      query_block: queries of a tile, or of a block if `transposed`.
      key_block: keys of a block, or of a tile if `transposed`.
      parts: consumers of a tile.
      transposed: whether tiles have keys as rows.
      shares: number of shares into which a list longer than twice the median is divided.
      least: fewest visits of a consumer; with 1, a consumer without blocks visits a masked one.
    """
    of_rows = (query_block, WGMMA_ROWS) if transposed else (WGMMA_ROWS, key_block)
    tiles = pattern.tiles(*of_rows)
    kinds, partial = tiles.kinds, tiles.partial
    if transposed:
        kinds, partial = kinds.swapaxes(1, 2), partial.swapaxes(1, 2)
    masks, rows, blocks = kinds.shape
    kinds = np.pad(kinds, ((0, 0), (0, -rows % parts), (0, 0)), constant_values=-1)
    kinds = kinds.reshape(masks, -1, parts, blocks)
    forbidden = len(partial)
    orders = [[_order(of_tile) for of_tile in of_mask] for of_mask in kinds]
    most = max(1, *(len(order) for of_mask in orders for order in of_mask))
    entries = np.zeros((*kinds.shape[:2], most, 1 + parts), np.int32)
    entries[..., 1:] = forbidden
    for m, of_mask in enumerate(orders):
        for t, order in enumerate(of_mask):
            own = kinds[m, t][:, order].T
            entries[m, t, : len(order), 0] = order
            entries[m, t, : len(order), 1:] = np.where(own < 0, forbidden, own)
    counts = np.array([[len(order) for order in of_mask] for of_mask in orders])
    mean = counts.mean(axis=0)
    is_split = (shares > 1) & (mean > 2 * np.median(mean)) & (counts.min(axis=0) >= shares)
    listed = [(t, 0) for t in np.flatnonzero(~is_split)]
    listed += [(t, 1 + share) for t in np.flatnonzero(is_split) for share in range(shares)]
    ranges = np.zeros((1, masks, len(listed), 4 + 2 * parts), np.int32)
    for m in range(masks):
        for i, (t, share) in enumerate(listed):
            start, stop = _share(max(int(counts[m, t]), least), share, shares)
            own = [_own(entries[m, t, start:stop, 1 + p] != forbidden, least) for p in range(parts)]
            number = 0 if share == 0 else i + 1 - np.count_nonzero(~is_split)
            ranges[0, m, i] = [start, stop, *(start + x for r in own for x in r), t, number]
    costs = ranges[0, :, :, 1] - ranges[0, :, :, 0]
    return OwnLists(
        Tables(None, ranges, entries, _words(np.concatenate([partial, 0 * partial[:1]]))),
        tuple(map(int, np.flatnonzero(is_split))),
        shares,
        tuple(round(float(n)) for n in costs.mean(axis=0)),
    )


_TILE = 128
"""Queries and keys of the blocks that `helps` counts: a usual tile, of two consumers, and key block."""
_SHARES = (1, 2, 4, 8)
HEADS_TOGETHER = 16
"""Heads whose tiles are scheduled together, longest lists first."""


def helps(mask: BlockMask) -> bool:
    """Returns whether `OwnLists` are expected to save time: most of the visited blocks are partial."""
    if mask.pattern is None or mask.limits_pattern:
        return False
    kinds = mask.pattern.tiles(_TILE, _TILE).kinds
    return bool(2 * np.count_nonzero(kinds > 0) > np.count_nonzero(kinds >= 0))


def shares_for(
    mask: BlockMask,
    query_block: int,
    key_block: int,
    parts: int,
    *,
    heads: int,
    multiprocessors: int,
    transposed: bool = False,
) -> int:
    """Returns the least number of shares such that no share has over a quarter of an SM's mean work.

    `heads` is the number of query heads of all batch entries, or of key heads if `transposed`. The other
    parameters are those of `own_lists`.
    """
    assert mask.pattern is not None
    costs = own_lists(mask.pattern, query_block, key_block, parts, transposed).costs
    mean = heads * sum(costs) / max(1, multiprocessors)
    return next((n for n in _SHARES if 4 * max(costs) <= n * mean), _SHARES[-1])


def _order(kinds: np.ndarray) -> np.ndarray:
    """Returns the blocks that a tile visits, in the order of its list, from kinds [parts, blocks].

    Consumers visit a list from its end on, and mask the first visited block even if it is full. So,
    among the blocks that the same consumers need, partial blocks come last.
    """
    needs = kinds >= 0
    visited = np.flatnonzero(needs.any(axis=0))
    first = needs.argmax(axis=0)[visited]
    last = len(kinds) - 1 - needs[::-1].argmax(axis=0)[visited]
    is_partial = (kinds > 0).any(axis=0)[visited]
    return visited[np.lexsort((visited, is_partial, last, first))]


def _share(count: int, share: int, shares: int) -> tuple[int, int]:
    """Returns the range [start, stop) of share `share` (from 1) of `count` entries; all if it is 0."""
    if share == 0:
        return 0, count
    return (share - 1) * count // shares, share * count // shares


def _own(needed: np.ndarray, least: int) -> tuple[int, int]:
    """Returns the range [start, stop) from the first to the last entry that a consumer needs.

    `needed` is bool [entries]. Without such an entry the range is [0, least).
    """
    found = np.flatnonzero(needed)
    return (int(found[0]), int(found[-1]) + 1) if found.size else (0, least)


def _words(partial: np.ndarray) -> np.ndarray:
    """Packs bool [blocks, rows, columns] to uint32 [blocks, rows, 8]; bit i of word j: column 8i + j."""
    blocks, rows, columns = partial.shape
    bits = partial.reshape(blocks, rows, columns // _STEP, _STEP).astype(np.uint32)
    places = np.arange(columns // _STEP, dtype=np.uint32)[:, None]
    return np.bitwise_or.reduce(bits << places, axis=2)
