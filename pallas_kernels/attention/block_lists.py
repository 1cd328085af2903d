"""Lists of the blocks that each tile visits, for masks given by a pattern and not by position alone.

A pattern states, before a kernel is compiled, which queries attend to which keys. For each tile of
queries a list has the blocks of keys that are not empty, in ascending order, each with the index of its
mask bits: 0 for a full block, which is not masked. Equal partial blocks share their bits. In the kernel
of dK and dV tiles have keys, and lists have blocks of queries. Lengths, segments and positions that are
known only at run time cut a list to a range of its entries.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention.logits import Logits, Operands
from pallas_kernels.attention.mask import BlockMask, Blocks, Extent

_WORD = 32
"""Bits in a word of the packed masks, `Tables.bits`."""


class Tiles(Protocol):
    """Interface of masks [masks, T, S], cut into tiles of queries and keys."""

    @property
    def kinds(self) -> np.ndarray:
        """Kinds, int32 [masks, query tiles, key tiles]: -1 empty, 0 full, else index in `partial`."""

    @property
    def partial(self) -> np.ndarray:
        """Allowed pairs, bool [partial tiles + 1, queries, keys of a tile]; entry 0 allows all."""


class Pattern(Protocol):
    """Interface of hashable masks that are known when a kernel is compiled."""

    def tiles(self, query_block: int, key_block: int) -> Tiles:
        """Returns the masks cut into tiles; a tile's keys beyond the last one are forbidden."""

    def allowed(self, heads: jax.Array | None) -> jax.Array:
        """Returns the allowed pairs, bool [1, N or 1, T, S]; `heads` [N] says which mask a head has."""


class Tables(NamedTuple):
    """Arrays that a kernel reads to find a tile's blocks; in a kernel, references in global memory."""

    bounds: Any = None
    """Ranges of blocks with elements of a tile's segments, int32 [B, tiles, 4], from
    `mask.segment_blocks`; None without segments."""
    ranges: Any = None
    """Entries [start, stop) of each tile's list, int32 [B or 1, masks, tiles, 2]. `ranges`, `entries`
    and `bits` are None without lists. Lists of `OwnLists` have more columns."""
    entries: Any = None
    """Block of each entry, and the index of its mask bits, int32 [masks, tiles, entries, 2]."""
    bits: Any = None
    """Masks of partial blocks, uint32 [blocks, words of a row, rows]: column c is bit c % 32 of word
    c // 32, 1 where attention is allowed. With `OwnLists` they are uint32 [blocks, rows, 8]."""


@dataclass(frozen=True, eq=False)
class BlockLists:
    """Lists of a `Pattern`, known at compile time; `tables` limits them by the arrays of a call."""

    counts: np.ndarray
    """Number of entries in each tile's list, int32 [masks, tiles]."""
    entries: np.ndarray
    """As `Tables.entries`, padded to lists of equal length with entries whose bits forbid all pairs."""
    bits: np.ndarray

    def costs(self, columns: int) -> list[int]:
        """Returns how many keys (or queries) each tile visits, the mean of all masks."""
        return [round(float(n) * columns) for n in self.counts.mean(axis=0)]

    def tables(
        self, mask: BlockMask, blocks: Any, operands: Operands, bounds: jax.Array | None, least: int
    ) -> Tables:
        """Returns the lists for a call, cut to the blocks that its lengths, offsets and segments allow.

        Args:
          mask: the mask whose positions and lengths limit the lists further.
          blocks: function (tile, extent, within) of the mask, which returns the blocks of a tile.
          operands: with lengths and offsets.
          bounds: what `segment_blocks` returns, or None.
          least: fewest visits of a tile; with 1, a tile without blocks visits one fully masked block.
        """
        most = self.entries.shape[2]
        if not mask.limits_pattern:
            stop = np.maximum(self.counts, least)
            return Tables(bounds, np.stack([0 * stop, stop], 2)[None], self.entries, self.bits)
        start, stop = reached(mask, blocks, self.counts.shape[1], operands, bounds)
        is_entry = np.arange(most) < self.counts[..., None]
        block = np.where(is_entry, self.entries[..., 0], np.iinfo(np.int32).max)
        first, end = (
            jnp.sum(block < x[:, None, :, None], axis=3, dtype=jnp.int32) for x in (start, stop)
        )
        if least:
            first = jnp.where(first < end, first, most - 1)
            end = jnp.where(first < most - 1, end, most)
        return Tables(bounds, jnp.stack([first, end], axis=3), self.entries, self.bits)


def reached(
    mask: BlockMask, blocks: Any, tiles: int, operands: Operands, bounds: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Returns each tile's first visited block, and the one after its last: int32 [B, tiles] each.

    Args:
      mask: the mask of the tiles.
      blocks: function (tile, extent, within) of the mask, which returns the blocks of a tile.
      tiles: tiles of each batch entry.
      operands: with lengths and offsets.
      bounds: what `segment_blocks` returns, or None.
    """
    full = Extent(mask.query_count, mask.key_count)
    given = (operands.query_lengths, operands.key_lengths, operands.query_offset)
    batches = [array.shape[0] for array in (*given, bounds) if array is not None]
    batch = batches[0] if batches else 1
    extents = [
        jnp.full((batch,), number, jnp.int32) if array is None else array
        for number, array in zip(full, given, strict=True)
    ]

    def of_tile(tile, extent, within):
        found = blocks(tile, extent, None if within is None else Blocks(*within))
        return jnp.int32(found.start), jnp.int32(found.stop)

    mapped = None if bounds is None else 0
    within = None if bounds is None else list(jnp.moveaxis(bounds, 2, 0))
    numbers = jnp.arange(tiles, dtype=jnp.int32)
    of_batch = jax.vmap(of_tile, (0, None, mapped))
    return jax.vmap(of_batch, (None, 0, mapped))(numbers, Extent(*extents), within)


@functools.lru_cache(maxsize=64)
def block_lists(
    pattern: Pattern, query_block: int, key_block: int, transposed: bool = False
) -> BlockLists:
    """Returns the lists of blocks that tiles of queries visit, or tiles of keys if `transposed`."""
    tiles = pattern.tiles(query_block, key_block)
    kinds, partial = tiles.kinds, tiles.partial
    if transposed:
        kinds, partial = kinds.swapaxes(1, 2), partial.swapaxes(1, 2)
    visited = kinds >= 0
    counts = visited.sum(axis=2).astype(np.int32)
    forbidden = partial.shape[0]
    entries = np.zeros((*counts.shape, 1 + int(counts.max(initial=0)), 2), np.int32)
    entries[..., 1] = forbidden
    mask, tile, block = np.nonzero(visited)
    place = (np.cumsum(visited, axis=2) - 1)[mask, tile, block]
    entries[mask, tile, place, 0] = block
    entries[mask, tile, place, 1] = kinds[mask, tile, block]
    partial = np.concatenate([partial, np.zeros_like(partial[:1])])
    return BlockLists(counts, entries, _packed(partial))


def _packed(partial: np.ndarray) -> np.ndarray:
    """Packs bool [blocks, rows, columns] into uint32 [blocks, words, rows], 32 columns a word."""
    blocks, rows, columns = partial.shape
    words = -(-columns // _WORD)
    padded = np.zeros((blocks, rows, words * _WORD), np.bool_)
    padded[..., :columns] = partial
    packed = np.packbits(padded, axis=2, bitorder="little")
    return np.ascontiguousarray(packed.view("<u4").swapaxes(1, 2)).astype(np.uint32)


def as_explicit(logits: Logits, operands: Operands) -> tuple[Logits, Operands]:
    """Returns logits and operands with the pattern as an explicit mask, for kernels without lists."""
    pattern = logits.mask.pattern
    if pattern is None:
        return logits, operands
    explicit = pattern.allowed(operands.pattern_heads).astype(jnp.int8)
    if operands.explicit is not None:
        explicit = explicit * operands.explicit
    mask = replace(logits.mask, pattern=None, has_explicit=True)
    operands = operands._replace(explicit=explicit, pattern_heads=None)
    return replace(logits, mask=mask), operands
