"""The mask of attention in blocks: which blocks of keys a block of queries visits.

For a block of queries, one compile-time description says which blocks of keys are empty (skipped), full
(not masked at all) and partial (masked element by element); for dK and dV it says the same of the blocks
of queries for a block of keys.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

Index = int | jax.Array


class Blocks(NamedTuple):
    """Ranges of blocks: [start, stop) are visited, and [full_start, full_stop) need no masking.

    Since start <= full_start <= full_stop <= stop, three loops visit all of the blocks in order.
    """

    start: Index
    full_start: Index
    full_stop: Index
    stop: Index


class Extent(NamedTuple):
    """Lengths of a batch entry, and the position of its queries among its keys."""

    query_length: Index
    key_length: Index
    query_offset: Index = 0
    """Position of the first query: query t has the position of key t + query_offset."""


@dataclass(frozen=True)
class BlockMask:
    """Static part of the mask, known when a kernel is compiled.

    Position and lengths allow each query one interval of keys, whose ends do not decrease from one query
    to the next. Segments and an explicit mask remove further elements. The blocks that segments empty
    are known only at run time, and reach the kernel as the bounds `within`; see `segment_blocks`.
    """

    query_count: int
    key_count: int
    is_causal: bool = False
    window: tuple[int, int] | None = None
    """Bounds (left, right): a query at p attends to keys p - left <= s <= p + right."""
    has_query_offset: bool = False
    """True if query t has position p = t + offset, with an offset of each batch entry; else p = t."""
    has_query_lengths: bool = False
    has_key_lengths: bool = False
    has_segments: bool = False
    has_explicit: bool = False
    has_function: bool = False
    """True if a function of query and key index forbids elements; see `Logits.allows`."""
    pattern: Any = None
    """Pattern that says what mask objects allow; positions and lengths limit it further."""

    @property
    def forbids_anywhere(self) -> bool:
        """True if any block may have forbidden elements, by an explicit mask or by a function."""
        return self.has_explicit or self.has_function

    @property
    def limits_pattern(self) -> bool:
        """True if position, lengths, segments, explicit mask or function forbid elements too."""
        return (
            self.reach() != (None, None)
            or self.has_query_lengths
            or self.has_key_lengths
            or self.has_segments
            or self.forbids_anywhere
        )

    @property
    def visited_share(self) -> float:
        """Fraction of the blocks of 128 queries x 128 keys of which the pattern allows some element."""
        if self.pattern is None:
            return 1.0
        return float((self.pattern.tiles(128, 128).kinds >= 0).mean())

    @property
    def extent(self) -> Extent:
        """Extent that schedules assume at compile time: full lengths.

        If batch entries have query offsets, the last query is assumed at the position of the last key.
        """
        offset = max(0, self.key_count - self.query_count) if self.has_query_offset else 0
        return Extent(self.query_count, self.key_count, offset)

    @property
    def has_left_edge(self) -> bool:
        """True if the first visited blocks of keys may be partial; if False, full_start equals start."""
        is_listed = self.pattern is not None
        return is_listed or self.window is not None or self.has_segments or self.forbids_anywhere

    def is_always_full(self, query_block: int, key_block: int) -> bool:
        """Whether every visited block is full, so that kernels need no code that masks a block."""
        del (
            query_block
        )  # Rows beyond the last query need no mask: they are clipped when they are written.
        return not (
            self.is_causal
            or self.has_left_edge
            or self.has_key_lengths
            or self.key_count % key_block
        )

    def right_partial_blocks(self, rows: int, key_block: int) -> int:
        """Returns how many of the last blocks of keys that `rows` queries visit may be partial, at most.

        Under a causal mask these are the blocks on the diagonal. The first query's index is a multiple
        of `rows`.
        """
        if self.pattern is not None or self.has_segments or self.forbids_anywhere:
            return -(-self.key_count // key_block)
        _, right = self.reach()
        if right is None:
            return 1
        return (
            max(1, rows // key_block)
            if right == 0 and _divides(rows, key_block) and not self.has_query_offset
            else rows // key_block + 2
        )

    def reach(self) -> tuple[int | None, int | None]:
        """Returns (left, right): a query at p attends to p - left <= s <= p + right; None: no limit."""
        left, right = (None, None) if self.window is None else self.window
        if self.is_causal:
            right = 0
        return left, right

    def key_blocks(
        self,
        queries: tuple[Index, Index],
        block: int,
        extent: Extent,
        within: Blocks | None = None,
    ) -> Blocks:
        """Returns the blocks of `block` keys for the queries [queries[0], queries[1]).

        Queries from query_length on attend to nothing but are not masked element by element, because it
        costs less to overwrite their results at the end. A block is therefore full if the queries within
        the length may attend to all of its keys.
        """
        query_length, key_length, offset = extent
        left, right = self.reach()
        is_within = queries[0] < query_length
        first, last = queries[0] + offset, _min(queries[1], query_length) - 1 + offset
        start, full_start = 0, 0
        stop, full_stop = key_length, key_length
        if left is not None:
            start, full_start = _max(0, first - left), _max(0, last - left)
        if right is not None:
            stop, full_stop = _clip(last + 1 + right, stop), _clip(first + 1 + right, full_stop)
        stop = _where(is_within, stop, 0)
        return self._blocks(start, full_start, full_stop, stop, block, within)

    def query_blocks(
        self,
        keys: tuple[Index, Index],
        block: int,
        extent: Extent,
        within: Blocks | None = None,
    ) -> Blocks:
        """Returns the blocks of `block` queries for the keys [keys[0], keys[1]): the transposed case.

        Queries from query_length on are either not visited or in blocks that count as full, since their
        log-sum-exp and their cotangents make their contribution to dK and dV 0. Keys from key_length on
        make a block partial.
        """
        query_length, key_length, offset = extent
        left, right = self.reach()
        # Key s has the position of query s - offset.
        first, last = keys[0] - offset, _min(keys[1], key_length) - 1 - offset
        start, full_start = 0, 0
        # A last block of queries with rows beyond the length counts as full if the other rows allow it.
        stop, full_stop = query_length, _up(query_length, block) * block
        if right is not None:
            start, full_start = _max(0, first - right), _max(0, keys[1] - 1 - offset - right)
        if left is not None:
            stop, full_stop = _clip(last + 1 + left, stop), _clip(first + 1 + left, full_stop)
        stop = _where(keys[0] < key_length, stop, 0)
        full_stop = _where(keys[1] <= key_length, full_stop, 0)
        return self._blocks(start, full_start, full_stop, stop, block, within)

    def _blocks(
        self,
        start: Index,
        full_start: Index,
        full_stop: Index,
        stop: Index,
        block: int,
        within: Blocks | None,
    ) -> Blocks:
        """Converts bounds in elements to bounds in blocks, cut to those of the segments, `within`."""
        bounds = Blocks(
            _down(start, block), _up(full_start, block), _down(full_stop, block), _up(stop, block)
        )
        if within is not None:
            bounds = Blocks(
                _max(bounds.start, within.start),
                _max(bounds.full_start, within.full_start),
                _min(bounds.full_stop, within.full_stop),
                _min(bounds.stop, within.stop),
            )
        first = bounds.start
        last = _max(first, bounds.stop)
        if self.forbids_anywhere or (self.has_segments and within is None):
            return Blocks(first, first, first, last)
        full_first = _max(first, _min(bounds.full_start, last))
        full_last = _max(full_first, _min(bounds.full_stop, last))
        return Blocks(first, full_first, full_last, last)

    def allowed(self, index: Callable[[int], jax.Array], extent: Extent) -> jax.Array | None:
        """Whether position and length allow each element of a tile; None if neither limits anything.

        index(0) returns the query and index(1) the key of each element; each is called only if a
        comparison needs it, as Mosaic searches for minutes for the layout of an unused tile. Segments
        and the explicit mask are left to the caller, who can load them.
        """
        left, right = self.reach()
        conditions = []
        key = functools.cache(lambda: index(1))

        def stands_at(shift):
            shift = extent.query_offset + shift
            return index(0) if isinstance(shift, int) and shift == 0 else index(0) + shift

        if right is not None:
            conditions.append(key() <= stands_at(right))
        if left is not None:
            conditions.append(key() >= stands_at(-left))
        # With a causal mask and T <= S, key <= query implies key < S: no test for the last key.
        ends_with_queries = right == 0 and self.query_count <= self.key_count
        # A pattern forbids keys beyond the last one, so no test is needed.
        ends_with_queries = ends_with_queries or self.pattern is not None
        if self.has_key_lengths or self.has_query_offset or not ends_with_queries:
            conditions.append(key() < extent.key_length)
        result = None
        for condition in conditions:
            result = condition if result is None else result & condition
        return result


def segment_blocks(
    query_segments: jax.Array, key_segments: jax.Array, query_block: int, key_block: int
) -> jax.Array:
    """Returns the `Blocks` of keys of each block of queries, int32 [B, blocks of queries, 4].

    They come from the least and the greatest segment id of each block, in query_segments [B, T] and
    key_segments [B, S]. They are exact if ids are in ascending order, as in packed sequences; otherwise
    more blocks are visited than necessary. Swapped arguments give the blocks of queries of keys.
    """

    def extremes(segments, block):
        padding = ((0, 0), (0, -segments.shape[1] % block))
        blocks = jnp.pad(segments, padding, mode="edge").reshape(segments.shape[0], -1, block)
        return blocks.min(axis=2), blocks.max(axis=2)

    q_least, q_greatest = (x[:, :, None] for x in extremes(query_segments, query_block))
    k_least, k_greatest = (x[:, None, :] for x in extremes(key_segments, key_block))
    meets = (k_least <= q_greatest) & (k_greatest >= q_least)
    same = (q_least == q_greatest) & (k_least == q_least) & (k_greatest == q_least)
    block = jnp.arange(meets.shape[2], dtype=jnp.int32)
    count = block.size
    start = jnp.min(jnp.where(meets, block, count - 1), axis=2)
    stop = jnp.max(jnp.where(meets, block + 1, 0), axis=2)
    full_start = jnp.min(jnp.where(same, block, count), axis=2)
    # full_stop is the first block from full_start on that contains another segment.
    after = ~same & (block >= full_start[..., None])
    full_stop = jnp.min(jnp.where(after, block, count), axis=2)
    return jnp.stack([start, full_start, full_stop, stop], axis=2).astype(jnp.int32)


def _divides(x: int, y: int) -> bool:
    """Returns whether one of the numbers is a multiple of the other."""
    return x % y == 0 or y % x == 0


# A bound is a Python number if all of its inputs are, else a traced number.


def _min(x: Index, y: Index) -> Index:
    return min(x, y) if isinstance(x, int) and isinstance(y, int) else lax.min(_i32(x), _i32(y))


def _max(x: Index, y: Index) -> Index:
    return max(x, y) if isinstance(x, int) and isinstance(y, int) else lax.max(_i32(x), _i32(y))


def _clip(x: Index, most: Index) -> Index:
    """Returns x clipped to [0, most]; an offset may make x negative."""
    return _max(0, _min(x, most))


def _where(condition: bool | jax.Array, x: Index, y: Index) -> Index:
    if isinstance(condition, bool):
        return x if condition else y
    return jnp.where(condition, _i32(x), _i32(y))


def _down(x: Index, block: int) -> Index:
    return x // block if isinstance(x, int) else lax.div(x, _i32(block))


def _up(x: Index, block: int) -> Index:
    return -(-x // block) if isinstance(x, int) else lax.div(x + (block - 1), _i32(block))


def _i32(x: Index) -> jax.Array:
    return jnp.asarray(x, jnp.int32)
