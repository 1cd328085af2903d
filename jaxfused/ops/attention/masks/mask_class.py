"""AttentionMask: an object, known at tracing, that says which queries attend to which keys.

A mask states its rule twice: `allowed` for every query and key, and `bounds` for whole tiles, so that a
mask of a long sequence is prepared without visiting all of its elements.
"""

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfused.runtime.checks import check_count

Index = Any
"""Indices of queries or keys: integers of NumPy or JAX, of any shape."""


class Spans(NamedTuple):
    """Tiles of queries and keys by their first and last indices, arrays that broadcast to each other."""

    first_query: np.ndarray
    last_query: np.ndarray
    first_key: np.ndarray
    last_key: np.ndarray


class Bounds(NamedTuple):
    """Bounds of what tiles allow, known without looking at their elements."""

    some: Any
    """False if a tile certainly allows nothing."""
    every: Any
    """True if a tile certainly allows everything."""


# Without `eq` masks of a class that is no dataclass are compared by identity, not by their shape.
@dataclass(frozen=True, eq=False)
class AttentionMask:
    """Which of T queries attend to which of S keys; the base of all masks of `jaxfused.masks`.

    Masks of one shape are combined by `&`, `|` and `~`. They are hashable and equal where their contents
    are, so that they may be static arguments of `jax.jit`. `mask[queries, keys]` gives an array of bool,
    and `print(mask)` a picture with the fraction of blocks that attention visits.

    A mask of one's own is a frozen dataclass with a method `allowed` for indices of NumPy or JAX.

    Example:
      >>> import dataclasses
      >>> from jaxfused import masks
      >>> @dataclasses.dataclass(frozen=True)
      ... class Diagonals(masks.AttentionMask):
      ...     distance: int
      ...     def allowed(self, query, key):
      ...         return (query - key) % self.distance == 0
      >>> Diagonals((3, 4), 2)[:, :].astype(int)
      array([[1, 0, 1, 0],
             [0, 1, 0, 1],
             [1, 0, 1, 0]])
    """

    shape: tuple[int, ...]
    """Shape (T, S), or (N, T, S) of a `MultiHeadMask`."""

    def __post_init__(self) -> None:
        set_shape(self, self.shape)

    def allowed(self, query: Index, key: Index) -> Any:
        """Returns whether queries attend to keys, for arrays of indices that broadcast to each other."""
        raise NotImplementedError(
            f"{type(self).__name__} has no method allowed(query, key), which says whether queries attend"
            " to keys; pass a mask of jaxfused.masks, or define the method."
        )

    def bounds(self, spans: Spans) -> Bounds:
        """Returns the bounds of whole tiles."""
        del spans
        return Bounds(True, False)

    @property
    def of_heads(self) -> tuple["AttentionMask", ...]:
        """The mask of each head, or the only one if all heads share it."""
        return (self,)

    def visited_share(self, query_block: int = 128, key_block: int = 128) -> float:
        """Returns the fraction of blocks of queries and keys in which some query attends to some key."""
        from jaxfused.ops.attention.masks.blocks import prepare

        for name, block in {"query_block": query_block, "key_block": key_block}.items():
            check_count("visited_share", name, block)
        kinds = [prepare((mask,), query_block, key_block).kinds for mask in self.of_heads]
        visited = np.stack(kinds) >= 0
        return float(np.mean(visited)) if visited.size else 0.0

    def __and__(self, other: "AttentionMask") -> "AttentionMask":
        return combined(LogicalAnd, self, other)

    def __or__(self, other: "AttentionMask") -> "AttentionMask":
        return combined(LogicalOr, self, other)

    def __invert__(self) -> "AttentionMask":
        return LogicalNot(self.shape, self)

    def __bool__(self) -> bool:
        raise TypeError(
            f"{type(self).__name__} is neither true nor false, as it has a value for each query and"
            " key; combine masks by &, | and ~ rather than by and, or and not."
        )

    def __getitem__(self, index: Any) -> np.ndarray:
        """Returns the elements of (queries, keys), each an integer, a slice or a list of integers."""
        index = index if isinstance(index, tuple) else (index,)
        if len(index) > len(self.shape):
            raise IndexError(f"{index} has more than the {len(self.shape)} axes of {self.shape}")
        index += (slice(None),) * (len(self.shape) - len(index))
        query, key = (_chosen(size, i) for size, i in zip(self.shape[-2:], index[-2:], strict=True))
        result = self._elements(np.atleast_1d(query), np.atleast_1d(key))
        return result.reshape(query.shape + key.shape)

    def _elements(self, query: np.ndarray, key: np.ndarray) -> np.ndarray:
        allowed = self.allowed(query[:, None], key[None])
        return np.broadcast_to(allowed, (query.size, key.size))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError(
                f"{type(self).__name__} holds no array, so it is computed; pass copy=None"
            )
        return self[:, :].astype(dtype or np.bool_)

    def __str__(self) -> str:
        from jaxfused.ops.attention.masks.picture import picture

        return picture(self)


def set_shape(mask: AttentionMask, shape: Any) -> None:
    """Checks a shape (T, S) and sets it as the mask's."""
    name = type(mask).__name__
    sizes: tuple[Any, ...] = tuple(shape) if isinstance(shape, Sequence) else (shape,)
    if len(sizes) != 2 or not all(is_count(size) for size in sizes):
        raise ValueError(
            f"{name}: shape is {shape!r}, but a mask has a number of queries and a number of keys;"
            " pass (T, S)."
        )
    object.__setattr__(mask, "shape", tuple(map(operator.index, sizes)))


def is_count(value: Any, least: int = 0) -> bool:
    """Returns whether a value is a whole number from `least` up."""
    return is_whole(value) and value >= least


def is_whole(value: Any) -> bool:
    """Returns whether a value is an integer of Python or NumPy."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def looked_up(table: np.ndarray, *index: Index) -> Any:
    """Returns table[index], as a JAX array if an index is one."""
    if any(isinstance(i, jax.Array) for i in index):
        return jnp.asarray(table)[index]
    return table[index]


def combined(kind: type["_Logical"], left: AttentionMask, right: Any) -> AttentionMask:
    """Returns the `kind` of two masks, applied head by head if either is a `MultiHeadMask`."""
    name = kind._sign
    if not isinstance(right, AttentionMask):
        raise TypeError(
            f"{type(left).__name__} {name} {type(right).__name__}: both sides must be masks; wrap an"
            " array as jaxfused.masks.NumpyMask(array)."
        )
    many = {len(mask.of_heads) for mask in (left, right) if len(mask.shape) == 3}
    if left.shape[-2:] != right.shape[-2:] or len(many) > 1:
        raise ValueError(
            f"{type(left).__name__} {name} {type(right).__name__}: the masks have shapes {left.shape}"
            f" and {right.shape}, but they are combined element by element; pass masks of one shape."
        )
    if not many:
        return kind(left.shape, (left, right))
    (heads,) = many
    lefts, rights = (mask.of_heads * (heads // len(mask.of_heads)) for mask in (left, right))
    return MultiHeadMask(tuple(kind(a.shape, (a, b)) for a, b in zip(lefts, rights, strict=True)))


@dataclass(frozen=True, repr=False)
class _Logical(AttentionMask):
    masks: tuple[AttentionMask, ...]
    _sign: ClassVar[str]
    _operation: ClassVar[Any]

    def __repr__(self) -> str:
        return f"({f' {self._sign} '.join(map(repr, self.masks))})"

    def allowed(self, query: Index, key: Index) -> Any:
        return functools.reduce(self._operation, (m.allowed(query, key) for m in self.masks))

    def bounds(self, spans: Spans) -> Bounds:
        some, every = zip(*(mask.bounds(spans) for mask in self.masks), strict=True)
        return Bounds(*(functools.reduce(self._operation, known) for known in (some, every)))


class LogicalAnd(_Logical):
    """The intersection of masks, which `a & b` returns."""

    _sign = "&"
    _operation = staticmethod(operator.and_)


class LogicalOr(_Logical):
    """The union of masks, which `a | b` returns."""

    _sign = "|"
    _operation = staticmethod(operator.or_)


@dataclass(frozen=True, repr=False)
class LogicalNot(AttentionMask):
    """The complement of a mask, which `~mask` returns."""

    mask: AttentionMask

    def __repr__(self) -> str:
        return f"~{self.mask!r}"

    def allowed(self, query: Index, key: Index) -> Any:
        return ~self.mask.allowed(query, key)

    def bounds(self, spans: Spans) -> Bounds:
        some, every = self.mask.bounds(spans)
        return Bounds(np.logical_not(every), np.logical_not(some))


@dataclass(frozen=True, init=False)
class MultiHeadMask(AttentionMask):
    """A mask for each head.

    Args:
      masks: one for each of the N query heads, all of one shape (T, S).

    Example:
      >>> from jaxfused import masks
      >>> near, far = (masks.LocalMask((8, 8), (n, 0)) for n in (1, 4))
      >>> masks.MultiHeadMask([near, near, far, far]).shape
      (4, 8, 8)

    Source: `jax.experimental.pallas.ops.tpu.splash_attention.MultiHeadMask`.
    """

    masks: tuple[AttentionMask, ...]

    def __init__(self, masks: Sequence[AttentionMask]) -> None:
        given: Any = masks
        heads = () if isinstance(given, AttentionMask) else tuple(masks)
        if not heads or not all(isinstance(mask, AttentionMask) for mask in heads):
            raise ValueError(
                f"MultiHeadMask: masks is {masks!r}, but it has a mask of jaxfused.masks for each head;"
                " pass a list of them."
            )
        shapes = sorted({mask.shape for mask in heads})
        if len(shapes) > 1 or len(shapes[0]) != 2:
            raise ValueError(
                f"MultiHeadMask: the masks have shapes {shapes}, but all heads have as many queries and"
                " keys; pass masks of one shape (T, S)."
            )
        object.__setattr__(self, "masks", heads)
        object.__setattr__(self, "shape", (len(heads), *shapes[0]))

    def __post_init__(self) -> None:
        raise AssertionError("__init__ replaces it")

    @property
    def of_heads(self) -> tuple[AttentionMask, ...]:
        return self.masks

    def __invert__(self) -> AttentionMask:
        return MultiHeadMask([~mask for mask in self.masks])

    def __getitem__(self, index: Any) -> np.ndarray:
        """Returns the elements of (heads, queries, keys), indexed as those of a mask of one head."""
        first, *rest = index if isinstance(index, tuple) else (index,)
        heads = _chosen(len(self.masks), first)
        found = [self.masks[head][tuple(rest)] for head in heads.ravel()]
        if not found:
            return np.zeros((0, *self.masks[0][tuple(rest)].shape), bool)
        return np.stack(found) if heads.ndim else found[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.stack([mask.__array__(dtype, copy) for mask in self.masks])


def _chosen(size: int, index: Any) -> np.ndarray:
    """Returns the indices below `size` that an int, a slice or a list selects; 0-d for an int."""
    if isinstance(index, jax.core.Tracer):
        raise IndexError(
            "masks are indexed while a program is traced, by numbers that are known then; pass an int,"
            " or index jnp.asarray(mask)."
        )
    chosen = np.arange(size)[index]
    if chosen.ndim > 1:
        raise IndexError(f"{index} adds axes; pass an int, a slice or a list of ints.")
    return chosen
