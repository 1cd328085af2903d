"""Masks by the positions of queries and keys in their sequences."""

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxfused.ops.attention.masks.mask_class import (
    AttentionMask,
    Bounds,
    Index,
    Spans,
    is_count,
    is_whole,
    looked_up,
    set_shape,
)


@dataclass(frozen=True)
class FullMask(AttentionMask):
    """Every query attends to every key.

    Args:
      shape: (T, S).

    Source: `jax.experimental.pallas.ops.tpu.splash_attention.FullMask`.
    """

    def allowed(self, query: Index, key: Index) -> Any:
        return (query >= 0) & (key >= 0)

    def bounds(self, spans: Spans) -> Bounds:
        return Bounds(True, True)


@dataclass(frozen=True)
class CausalMask(AttentionMask):
    """Query t attends to keys s <= t + offset.

    Args:
      shape: (T, S).
      offset: position of the first query among the keys, of any sign; S - T puts the last query at the
        last key.

    Example:
      >>> from jaxfused import masks
      >>> masks.CausalMask((3, 4), offset=1)[:, :].astype(int)
      array([[1, 1, 0, 0],
             [1, 1, 1, 0],
             [1, 1, 1, 1]])

    Source: `jax.experimental.pallas.ops.tpu.splash_attention.CausalMask`.
    """

    offset: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole(self, "offset", "stands for the key at which the first query stands")

    def allowed(self, query: Index, key: Index) -> Any:
        return query + self._last >= key

    def bounds(self, spans: Spans) -> Bounds:
        last = self._last
        return Bounds(
            spans.last_query + last >= spans.first_key, spans.first_query + last >= spans.last_key
        )

    @property
    def _last(self) -> int:
        return _limited(self, self.offset)


@dataclass(frozen=True)
class LocalMask(AttentionMask):
    """Query t, which stands at p = t + offset, attends to keys p - left <= s <= p + right.

    Args:
      shape: (T, S).
      window_size: (left, right), or one number for both; None on a side for no limit.
      offset: as in `CausalMask`.

    Source: `jax.experimental.pallas.ops.tpu.splash_attention.LocalMask`.
    """

    window_size: tuple[int | None, int | None]
    offset: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_window(self)
        check_whole(self, "offset", "stands for the key at which the first query stands")

    def allowed(self, query: Index, key: Index) -> Any:
        first, last = self._ends
        return (query + first <= key) & (query + last >= key)

    def bounds(self, spans: Spans) -> Bounds:
        first, last = self._ends
        some = spans.first_query + first <= spans.last_key
        every = spans.last_query + first <= spans.first_key
        some = some & (spans.last_query + last >= spans.first_key)
        return Bounds(some, every & (spans.first_query + last >= spans.last_key))

    @property
    def _ends(self) -> tuple[int, int]:
        """First and last key that query 0 attends to, also if they lie outside the keys."""
        left, right = self.window_size
        first = -self.shape[0] if left is None else self.offset - left
        last = self.shape[1] if right is None else self.offset + right
        return _limited(self, first), _limited(self, last)


@dataclass(frozen=True)
class ChunkedCausalMask(AttentionMask):
    """Query t attends to keys s <= t of its own chunk: t // chunk_size == s // chunk_size.

    Args:
      shape: (T, S).
      chunk_size: tokens of a chunk.

    Source: `jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask.ChunkedCausalMask`;
    Llama 4's local layers.
    """

    chunk_size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(self, "chunk_size", "counts the tokens of a chunk")

    def allowed(self, query: Index, key: Index) -> Any:
        size = self._size
        return (query // size == key // size) & (query >= key)

    @property
    def _size(self) -> int:
        """Tokens of a chunk, limited to a number that JAX can divide by in 32 bits."""
        return min(self.chunk_size, _FARTHEST)

    def bounds(self, spans: Spans) -> Bounds:
        first_query, last_query, first_key, last_key = (x // self._size for x in spans)
        some = (spans.last_query >= spans.first_key) & (last_query >= first_key)
        some &= last_key >= first_query
        every = (spans.first_query >= spans.last_key) & (first_query == last_query)
        return Bounds(some, every & (first_key == last_key) & (first_key == first_query))


@dataclass(frozen=True)
class DilatedMask(AttentionMask):
    """Query t, at p = t + offset, attends to every `dilation`-th key: s = p + j dilation.

    Here j goes from -left to right, so that a query has left + 1 + right keys, as in Longformer's
    dilated windows.

    Args:
      shape: (T, S).
      window_size: (left, right) in steps of `dilation`, or one number for both; None for no limit.
      dilation: distance of two keys.
      offset: as in `CausalMask`.

    Source: Beltagy et al., "Longformer", 2020, https://arxiv.org/abs/2004.05150; without limits the
    strided pattern of Child et al., "Sparse Transformers", 2019, https://arxiv.org/abs/1904.10509
    """

    window_size: tuple[int | None, int | None]
    dilation: int
    offset: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_window(self)
        check_count(self, "dilation", "is the distance of two keys")
        check_whole(self, "offset", "stands for the key at which the first query stands")

    @property
    def _window(self) -> LocalMask:
        left, right = (n if n is None else n * self.dilation for n in self.window_size)
        return LocalMask(self.shape, (left, right), self.offset)

    def allowed(self, query: Index, key: Index) -> Any:
        # The distance to the nearest key of a query's grid, limited so that JAX adds it in 32 bits.
        half = self.dilation // 2
        nearest = (self.offset + half) % self.dilation - half
        nearest = min(max(nearest, -_FARTHEST // 2), _FARTHEST // 2)
        on_grid = (query + nearest - key) % min(self.dilation, _FARTHEST) == 0
        return on_grid & self._window.allowed(query, key)

    def bounds(self, spans: Spans) -> Bounds:
        some, every = self._window.bounds(spans)
        return Bounds(some, every if self.dilation == 1 else False)


@dataclass(frozen=True)
class GlobalMask(AttentionMask):
    """Global tokens: they attend to every key, and every query attends to them.

    Query t and key s are the same token where t + offset = s.

    Args:
      shape: (T, S).
      tokens: how many tokens at the start of the sequence are global, or the positions of global ones.
      offset: as in `CausalMask`.

    Example:
      >>> from jaxfused import masks
      >>> (masks.LocalMask((5, 5), 1) | masks.GlobalMask((5, 5), 1))[:, :].astype(int)
      array([[1, 1, 1, 1, 1],
             [1, 1, 1, 0, 0],
             [1, 1, 1, 1, 0],
             [1, 0, 1, 1, 1],
             [1, 0, 0, 1, 1]])

    Source: Beltagy et al., "Longformer", 2020, https://arxiv.org/abs/2004.05150
    """

    tokens: int | tuple[int, ...]
    offset: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        tokens: Any = self.tokens
        if isinstance(tokens, Sequence | np.ndarray):
            tokens = tuple(int(t) if is_count(t) else t for t in tokens)
            if tokens == tuple(range(len(tokens))):
                tokens = len(tokens)
            else:
                tokens = tuple(sorted(set(tokens))) if all(map(is_count, tokens)) else tokens
            object.__setattr__(self, "tokens", tokens)
        places = (tokens,) if not isinstance(tokens, tuple) else tokens
        if not all(is_count(place) for place in places):
            raise ValueError(
                f"GlobalMask: tokens is {self.tokens!r}, but it counts the first tokens or lists places;"
                " pass a whole number from 0 up, or a list of them."
            )
        check_whole(self, "offset", "stands for the key at which the first query stands")
        count = max(self.shape[1], self.shape[0] + self.offset)
        if isinstance(tokens, tuple) and tokens and tokens[-1] >= count:
            raise ValueError(
                f"GlobalMask: tokens has {tokens[-1]}, but there are {count} places; pass numbers below."
            )

    def _is_global(self, place: Index) -> Any:
        if not isinstance(self.tokens, tuple):
            return (place >= 0) & (place < min(self.tokens, _FARTHEST))
        table = np.zeros(max(self.tokens) + 2, np.bool_)
        table[list(self.tokens)] = True
        return looked_up(table, place.clip(-1, len(table) - 1))

    def allowed(self, query: Index, key: Index) -> Any:
        return self._is_global(query + self._offset) | self._is_global(key)

    @property
    def _offset(self) -> int:
        """Offset, clipped to the range outside of which the mask does not change."""
        return min(max(self.offset, -self.shape[0]), _FARTHEST)

    def bounds(self, spans: Spans) -> Bounds:
        def before(place):
            """Returns how many global tokens are before a position."""
            if not isinstance(self.tokens, tuple):
                return np.clip(place, 0, min(self.tokens, _FARTHEST))
            return np.searchsorted(self.tokens, place)

        def between(first, last):
            return before(last + 1) - before(first)

        first, last = spans.first_query + self._offset, spans.last_query + self._offset
        queries, keys = between(first, last), between(spans.first_key, spans.last_key)
        every = (queries == last - first + 1) | (keys == spans.last_key - spans.first_key + 1)
        return Bounds((queries > 0) | (keys > 0), every)


@dataclass(frozen=True)
class RandomBlocksMask(AttentionMask):
    """Each block of queries attends to some blocks of keys that are drawn at random.

    Args:
      shape: (T, S).
      blocks: how many blocks of keys a block of queries attends to; all if there are fewer.
      block_size: tokens of a block; 64 in BigBird; with multiples of 128, kernels have no partly
        masked blocks.
      seed: of the drawing; the same in every process.

    Source: Zaheer et al., "Big Bird", 2020, https://arxiv.org/abs/2007.14062
    """

    blocks: int
    block_size: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(self, "blocks", "counts the blocks of keys of a block of queries", least=0)
        check_count(self, "block_size", "counts the tokens of a block")
        check_count(self, "seed", "chooses the blocks", least=0)

    @property
    def _table(self) -> np.ndarray:
        """Array of bool, True where a block of queries attends to a block of keys."""
        rows, columns = (-(-size // self.block_size) for size in self.shape)
        return _drawn_blocks(rows, columns, self.blocks, self.seed)

    def allowed(self, query: Index, key: Index) -> Any:
        size = min(self.block_size, _FARTHEST)
        return looked_up(self._table, query // size, key // size)

    def bounds(self, spans: Spans) -> Bounds:
        sums = np.pad(np.cumsum(np.cumsum(self._table, axis=0), axis=1), ((1, 0), (1, 0)))
        r0, r1, c0, c1 = (x // self.block_size for x in spans)
        count = sums[r1 + 1, c1 + 1] - sums[r0, c1 + 1] - sums[r1 + 1, c0] + sums[r0, c0]
        return Bounds(count > 0, count == (r1 + 1 - r0) * (c1 + 1 - c0))


@functools.lru_cache(maxsize=16)
def _drawn_blocks(rows: int, columns: int, blocks: int, seed: int) -> np.ndarray:
    """Returns bool [rows, columns], True for `blocks` random columns of each row.

    The array is cached because a mask is evaluated once for each row of tiles.
    """
    # Sorting random numbers draws without replacement, with the same result on every platform.
    drawn = np.random.default_rng(seed).random((rows, columns))
    order = np.argsort(drawn, axis=1, kind="stable")
    table = np.zeros((rows, columns), np.bool_)
    np.put_along_axis(table, order[:, :blocks], True, axis=1)
    table.setflags(write=False)
    return table


@dataclass(frozen=True, init=False)
class NumpyMask(AttentionMask):
    """A mask given as an array, which is copied.

    Args:
      array: bool [T, S], True where a query may attend to a key. It must be known when the program is
        traced; pass `mask=` a JAX array otherwise.

    Source: `jax.experimental.pallas.ops.tpu.splash_attention.NumpyMask`.
    """

    digest: str
    """Hash of the elements, by which masks are compared."""

    def __init__(self, array: Any) -> None:
        if isinstance(array, jax.core.Tracer):
            raise ValueError(
                "NumpyMask: array is not known while the program is traced; pass it to attention as"
                " mask=, which takes JAX's arrays, or make the mask outside of jax.jit."
            )
        array = np.array(array)
        if array.ndim != 2 or array.dtype != np.bool_:
            raise ValueError(
                f"NumpyMask: array has shape {array.shape} and dtype {array.dtype}, but it says True or"
                " False for each query and key; pass bool [T, S]."
            )
        array.setflags(write=False)
        object.__setattr__(self, "array", array)
        object.__setattr__(self, "digest", hashlib.sha256(np.packbits(array)).hexdigest()[:32])
        set_shape(self, array.shape)

    def allowed(self, query: Index, key: Index) -> Any:
        return looked_up(self.array, query, key)  # type: ignore[attr-defined]


_FARTHEST = 2**30
"""A number beyond all positions of a sequence; the sum with a position still fits into int32."""


def _limited(mask: AttentionMask, key: int) -> int:
    """Returns a key's position, limited to a range in which JAX can add it in 32 bits."""
    return min(max(key, -mask.shape[0]), mask.shape[1])


def check_whole(mask: AttentionMask, name: str, meaning: str) -> None:
    """Checks that a field is a whole number, and converts it to Python's int."""
    value = getattr(mask, name)
    if not is_whole(value):
        raise ValueError(
            f"{type(mask).__name__}: {name} is {value!r}, but it {meaning}; pass a whole number."
        )
    object.__setattr__(mask, name, int(value))


def check_count(mask: AttentionMask, name: str, meaning: str, least: int = 1) -> None:
    """Checks that a field is a whole number of at least `least`, and converts it to Python's int."""
    value = getattr(mask, name)
    if not is_count(value, least):
        raise ValueError(
            f"{type(mask).__name__}: {name} is {value!r}, but it {meaning}; pass a whole number from"
            f" {least} up."
        )
    object.__setattr__(mask, name, int(value))


def check_window(mask: Any) -> None:
    """Checks `window_size`, and converts it to a pair of Python's ints or None."""
    size = mask.window_size
    sides = tuple(size) if isinstance(size, Sequence) else (size, size)
    if len(sides) != 2 or not all(side is None or is_count(side) for side in sides):
        raise ValueError(
            f"{type(mask).__name__}: window_size is {size!r}, but it counts the keys to the left and to"
            " the right of a query; pass a whole number from 0 up, or two, with None for no limit."
        )
    pair = tuple(None if side is None else int(side) for side in sides)
    object.__setattr__(mask, "window_size", pair)
