"""Masks in blocks: which tiles of queries and keys are empty, full or partial, and their bits.

Preparation evaluates the bounds of every tile once, and the elements of a tile only if its bounds do
not decide its kind. Equal tiles are stored once: a causal mask has one partial tile, however long it is.
"""

import functools
from dataclasses import dataclass

import numpy as np

from jaxfused.ops.attention.masks.mask_class import AttentionMask, Spans

EMPTY = -1
FULL = 0


@dataclass(frozen=True, eq=False)
class BlockedMasks:
    """Tiles of queries and keys of several masks of one shape."""

    kinds: np.ndarray
    """Kind of each tile, int32 [masks, tiles of queries, tiles of keys]: EMPTY, FULL, or a partial
    tile's index."""
    partial: np.ndarray
    """Elements of the partial tiles, bool [partial tiles + 1, queries of a tile, keys of a tile]; the
    one at index FULL is all True.

    Keys from S on are forbidden; queries from T on are like the last one.
    """


@functools.lru_cache(maxsize=64)
def prepare(masks: tuple[AttentionMask, ...], query_block: int, key_block: int) -> BlockedMasks:
    """Returns masks in tiles, cached by the contents of the masks."""
    indices: dict[bytes, int] = {}
    kinds = np.stack([_kinds(mask, query_block, key_block, indices) for mask in masks])
    partial = np.ones((1 + len(indices), query_block, key_block), np.bool_)
    for packed, index in indices.items():
        bits = np.unpackbits(np.frombuffer(packed, np.uint8), count=query_block * key_block)
        partial[index] = bits.reshape(query_block, key_block)
    return BlockedMasks(kinds, partial)


def _kinds(
    mask: AttentionMask, query_block: int, key_block: int, indices: dict[bytes, int]
) -> np.ndarray:
    """Returns the kind of each tile; bits of new partial tiles are added to `indices`."""
    queries, keys = mask.shape
    rows, columns = -(-queries // query_block), -(-keys // key_block)
    first_query = np.arange(rows)[:, None] * query_block
    first_key = np.arange(columns)[None] * key_block
    last_query = np.minimum(first_query + query_block, queries) - 1
    last_key = np.minimum(first_key + key_block, keys) - 1
    some, every = mask.bounds(Spans(first_query, last_query, first_key, last_key))
    # A last tile that extends beyond the keys is partial.
    every = np.broadcast_to(every, (rows, columns)) & (first_key + key_block <= keys)
    kinds = np.where(some, np.where(every, FULL, FULL + 1), EMPTY).astype(np.int32)
    for i, row in enumerate(kinds):
        unknown = np.flatnonzero(row == FULL + 1)
        if unknown.size:
            row[unknown] = _looked_at(
                mask, i * query_block, query_block, unknown, key_block, indices
            )
    return kinds


def _looked_at(
    mask: AttentionMask,
    first_query: int,
    query_block: int,
    columns: np.ndarray,
    key_block: int,
    indices: dict[bytes, int],
) -> np.ndarray:
    """Returns the kinds of tiles of one row of tiles, by evaluating their elements."""
    queries, keys = mask.shape
    query = np.minimum(first_query + np.arange(query_block), queries - 1)
    key = columns[:, None] * key_block + np.arange(key_block)
    allowed = mask.allowed(query[:, None], np.minimum(key, keys - 1).reshape(1, -1))
    allowed = np.broadcast_to(allowed, (query_block, key.size)) & (key < keys).reshape(1, -1)
    tiles = allowed.reshape(query_block, columns.size, key_block).swapaxes(0, 1)
    some, every = tiles.any(axis=(1, 2)), tiles.all(axis=(1, 2))
    packed = np.packbits(tiles.reshape(columns.size, -1), axis=1)
    kinds = np.where(every, FULL, EMPTY)
    for n in np.flatnonzero(some & ~every):
        kinds[n] = indices.setdefault(packed[n].tobytes(), 1 + len(indices))
    return kinds
