"""Arguments of dot_product_attention: checks, and the forms in which its implementations take them."""

import math
from collections.abc import Sequence
from numbers import Integral
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfused.ops.attention.index_function import FunctionMask, IndexFunction, Places
from jaxfused.ops.attention.mask import Mask
from jaxfused.ops.attention.mask_conditions import Conditions, conditions
from jaxfused.ops.attention.masks.mask_class import AttentionMask, is_whole
from jaxfused.ops.attention.masks.pattern import Pattern
from jaxfused.runtime.checks import as_array, check_floating, check_shape


def validate(query, key, value, bias, sinks, op: str = "dot_product_attention") -> None:
    """Checks the shapes and dtypes of the arrays."""
    check_floating(op, {"bias": bias, "sinks": sinks})
    if not jnp.issubdtype(query.dtype, jnp.integer):
        check_floating(op, {"query": query})
    for name, array in {"query": query, "key": key, "value": value}.items():
        if array.ndim != 4:
            raise ValueError(
                f"{op}: {name} has shape {array.shape}, but query, key and value have 4 axes each,"
                " or 3 without the batch; pass (batch, length, heads, head size)."
            )
        if array.dtype != query.dtype:
            raise ValueError(
                f"{op}: {name} has dtype {array.dtype}, but the query's is {query.dtype};"
                f" pass {name}.astype(query.dtype)."
            )
    batch, _, heads, head_size = query.shape
    key_heads = key.shape[2]
    if key_heads == 0 or heads % key_heads:
        raise ValueError(
            f"{op}: query has {heads} heads and key {key_heads}, but the number of query heads must be"
            " a multiple of the number of key heads, which they share evenly; pass such numbers."
        )
    check_shape(
        op,
        "key",
        key,
        (batch, key.shape[1], key_heads, head_size),
        f"query has shape {query.shape}, and both have one batch and head size",
    )
    check_shape(op, "value", value, (*key.shape[:3], value.shape[3]), f"key has shape {key.shape}")
    check_shape(op, "sinks", sinks, (heads,), f"query has {heads} heads")


def mask_of(
    query,
    key,
    mask,
    is_causal,
    local_window_size,
    query_offset,
    query_lengths,
    key_lengths,
    query_segments,
    key_segments,
    mask_mod: IndexFunction | None = None,
    divides: bool = False,
) -> tuple[Mask, IndexFunction | None]:
    """Returns all limits of attention as one Mask, and the rest of mask_mod that it lacks, or None.

    A mask_mod of constants that is the same for all batch entries becomes a part of the Mask. If
    `divides`, so do the conditions of any mask_mod by which kernels can skip blocks of keys.
    """
    op = "dot_product_attention"
    batch, query_length, heads, _ = query.shape
    key_length = key.shape[1]
    pattern_mask = None
    if isinstance(mask, AttentionMask):
        _check_mask_object(mask, (heads, query_length, key_length))
        pattern_mask, mask = mask, None
    elif mask is not None:
        mask = _array_mask(mask, (batch, heads, query_length, key_length))
    if (query_segments is None) != (key_segments is None):
        raise ValueError(
            f"{op}: one of query_segment_ids and key_value_segment_ids was passed, but they are"
            " compared with each other; pass both or none."
        )
    limits = Limits(
        bool(is_causal),
        window_of(op, local_window_size),
        _lengths("key_value_seq_lengths", key_lengths, batch, key_length),
        *_segments(query_segments, key_segments, batch, query_length, key_length),
    )
    query_lengths = _lengths("query_seq_lengths", query_lengths, batch, query_length)
    is_known = query_offset is None or is_whole(query_offset)
    sizes = (query_length, key_length)
    is_object = is_known and not any(map(jax.export.is_symbolic_dim, (heads, *sizes)))
    if mask_mod is not None and is_object and mask_mod.is_constant and not mask_mod.used[0]:
        own = FunctionMask.of_heads_of(mask_mod, sizes, heads, int(query_offset or 0))
        pattern_mask = own if pattern_mask is None else own & pattern_mask
        mask_mod = None
    if mask_mod is not None and divides and not mask_mod.varies:
        at = places(query_offset, batch, heads, query_length, key_length)
        limits, mask_mod = limits.with_conditions(conditions(mask_mod), at)
    sides = limits.sides
    pattern = pattern_heads = None
    if pattern_mask is not None:
        pattern, pattern_heads = Pattern.of(pattern_mask)
        if is_known:
            # With an offset known at tracing, causal mask and window become a part of the pattern, so
            # that the list of its empty blocks is complete.
            pattern = pattern.limited(limits.is_causal, sides, int(query_offset or 0))
            limits = limits._replace(is_causal=False, sides=None)
            query_offset = None
    offset = query_offsets(query_offset, batch, query_length, key_length, sides or (0, 0))
    who = Mask(
        pattern=pattern,
        pattern_heads=pattern_heads,
        is_causal=limits.is_causal,
        window=None if limits.sides is None else _shortened(limits.sides),
        # The offset changes nothing unless the mask is causal or has a window.
        query_offset=offset if limits.is_causal or limits.sides is not None else None,
        query_lengths=query_lengths,
        key_lengths=limits.key_lengths,
        query_segments=limits.query_segments,
        key_segments=limits.key_segments,
        explicit=mask,
    )
    return who, mask_mod


class Limits(NamedTuple):
    """Options that limit attention, other than masks that are arrays or objects."""

    is_causal: bool
    sides: tuple[int, int] | None
    """Keys before and after a query's position that it attends to; None without a window."""
    key_lengths: jax.Array | None
    query_segments: jax.Array | None
    """Segment ids [B, T] of queries; those of keys are [B, S]. None without segments."""
    key_segments: jax.Array | None

    def with_conditions(
        self, found: Conditions, at: Places
    ) -> tuple["Limits", IndexFunction | None]:
        """Returns the limits tightened by a mask_mod, and the rest of the mask_mod, or None.

        Args:
          found: the conditions that the mask_mod was divided into.
          at: the indices b, h, q and k of all elements, as `places` returns them.
        """
        (batch,), queries, (keys,) = at[0].shape, at[2].shape[1], at[3].shape
        limits = self._replace(is_causal=self.is_causal or found.right == 0)
        if (window := found.window) is not None:
            left, right = window if self.sides is None else map(min, self.sides, window)
            limits = limits._replace(sides=(left, right))
        for length in found.lengths:
            own = jnp.broadcast_to(length.over(at).reshape(-1), (batch,))
            own = jnp.clip(own, 0, keys)
            least = own if limits.key_lengths is None else jnp.minimum(limits.key_lengths, own)
            limits = limits._replace(key_lengths=least)
        if found.segments is None:
            return limits, found.rest
        if limits.query_segments is not None:
            return limits, found.with_segments()
        of_queries, of_keys = (ids.over(at) for ids in found.segments)
        return limits._replace(
            query_segments=_of_rows(of_queries, (batch, queries)),
            key_segments=_of_rows(of_keys, (batch, keys)),
        ), found.rest


def _of_rows(ids: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """Broadcasts segment ids [B or 1, 1, T or 1, S or 1] to `shape`, [B, T] or [B, S]."""
    return jnp.broadcast_to(ids.reshape(ids.shape[0], -1), shape).astype(jnp.int32)


def _array_mask(mask: Any, shape: tuple[int, ...]) -> jax.Array:
    """Checks an array of bool and returns it with four axes that broadcast to the logits' `shape`."""
    op = "dot_product_attention"
    try:
        mask = jnp.asarray(mask)
    except TypeError as error:
        raise ValueError(
            f"{op}: mask is {mask!r}, but it is an array of bool or a mask of jaxfused.masks; pass"
            " one of them, such as masks.NumpyMask(array), or a function as mask_mod."
        ) from error
    if mask.dtype != jnp.bool_:
        raise ValueError(
            f"{op}: mask has dtype {mask.dtype}, but it says True or False for each query and"
            " key; pass an array of bool, or pass what is added to the logits as bias."
        )
    return broadcastable("mask", mask, shape)


def _check_mask_object(mask: AttentionMask, shape: tuple[int, int, int]) -> None:
    """Checks that a mask object has the shape (N, T, S) of logits, or (T, S)."""
    if mask.shape not in (shape, shape[1:]):
        raise ValueError(
            f"dot_product_attention: mask has shape {mask.shape}, but there are {shape[0]} heads,"
            f" {shape[1]} queries and {shape[2]} keys; make it of shape {shape[1:]}, or a MultiHeadMask"
            f" of {shape[0]} such masks."
        )


def check_kinds(bias: Any, return_residual: bool, return_lse: bool) -> None:
    """Checks that the bias is no mask, and that the log-sum-exp is asked for once."""
    if isinstance(bias, AttentionMask):
        raise ValueError(
            f"dot_product_attention: bias is {bias!r}, but it is an array that is added to the logits;"
            " pass mask=, which takes masks."
        )
    if return_residual and return_lse:
        raise ValueError(
            "dot_product_attention: return_residual and return_lse were passed, and both return the"
            " log-sum-exp, the first without a gradient; pass one of them."
        )


def first_place(query_offset: Any, query, key, query_lengths: Any, key_lengths: Any) -> Any:
    """Returns the offset, a number or [B]; "bottom_right" becomes the keys' count minus the queries'."""
    if not isinstance(query_offset, str) or query_offset != "bottom_right":
        return query_offset
    (batch, queries), keys = query.shape[:2], key.shape[1]
    query_lengths = _lengths("query_seq_lengths", query_lengths, batch, queries)
    key_lengths = _lengths("key_value_seq_lengths", key_lengths, batch, keys)
    # The lengths are arrays [B]; the counts that replace missing lengths are numbers.
    last = keys if key_lengths is None else key_lengths
    return last - (queries if query_lengths is None else query_lengths)


def check_places(query_offset: Any, queries: int) -> None:
    """Checks that queries' positions, which score_mod and mask_mod get, fit into 32 bits."""
    _check_offset_is_whole(query_offset)
    if query_offset is None or isinstance(query_offset, jax.Array):
        return
    if any(map(jax.export.is_symbolic_dim, (query_offset, queries))):
        return
    most = 2**31 - 1 - queries
    if any(abs(int(one)) > most for one in np.asarray(query_offset, object).flat):
        raise ValueError(
            f"dot_product_attention: query_offset is {query_offset!r}, but score_mod and mask_mod get"
            f" places of 32 bits; pass offsets from {-most} to {most}."
        )


def places(query_offset: Any, batch: int, heads: int, queries: int, keys: int) -> Places:
    """Returns the arguments of `IndexFunction.over`: b [B], h [N], q [B or 1, T] and k [S].

    A query's position q is its index plus the offset, which is not clipped, as functions may use it.
    """
    offset = jnp.asarray(0 if query_offset is None else query_offset).astype(jnp.int32)
    b, h, q, k = (jnp.arange(size, dtype=jnp.int32) for size in (batch, heads, queries, keys))
    return b, h, offset.reshape(-1, 1) + q[None], k


def scale_of(scale: Any, head_size: int, logits_shape: tuple[int, ...]) -> float | jax.Array:
    """Returns the scale as a number, for kernels, or as an array of shape () or of four axes."""
    if scale is None:
        return head_size**-0.5 if head_size else 1.0
    if hasattr(scale, "shape") and (scale.shape or not isinstance(scale, np.ndarray | np.generic)):
        array = jnp.asarray(scale)
        if jnp.issubdtype(array.dtype, jnp.integer):
            array = array.astype(jnp.float32)
        check_floating("dot_product_attention", {"scale": array})
        return broadcastable("scale", array, logits_shape) if array.ndim else array
    is_number = isinstance(scale, int | float | np.ndarray | np.generic)
    if not is_number or isinstance(scale, bool) or not math.isfinite(scale):
        raise ValueError(
            f"dot_product_attention: scale is {scale!r}, but the logits are multiplied by it; pass a"
            " finite number, or None for 1 / sqrt(head size)."
        )
    return float(scale)


def window_of(op: str, size: Any) -> tuple[int, int] | None:
    """Checks a `local_window_size` and returns its two sides, or None without a window."""
    if size is None:
        return None
    sides = size if isinstance(size, Sequence) else (size, size)
    if len(sides) != 2 or any(not isinstance(side, Integral) or side < 0 for side in sides):
        raise ValueError(
            f"{op}: local_window_size is {size!r}, but it counts the keys to the left and to the right"
            " of a query; pass a whole number from 0 up, or two."
        )
    left, right = sides
    return int(left), int(right)


_LONGEST = 2**29
"""Longest window, in tokens, with which positions fit into 32 bits; more than any call's keys."""


def _shortened(window: tuple[int, int]) -> tuple[int, int]:
    left, right = window
    return min(left, _LONGEST), min(right, _LONGEST)


def _check_offset_is_whole(offset: Any) -> None:
    if isinstance(offset, str | bool | float):
        raise ValueError(
            f"dot_product_attention: query_offset is {offset!r}, but it says at which key the first"
            ' query stands; pass a whole number, an integer for each sequence, or "bottom_right".'
        )


def query_offsets(
    offset: Any, batch: int, queries: int, keys: int, window: tuple[int, int] = (0, 0)
) -> jax.Array | None:
    """Returns int32 offsets [B], clipped so that kernels can add positions to them; None for 0."""
    if offset is None:
        return None
    if isinstance(offset, str) and offset == "bottom_right":
        offset = keys - queries
    if jax.export.is_symbolic_dim(offset):
        offset = jnp.asarray(offset)
    # Symbolic counts are not compared; no call has more queries or keys than _LONGEST.
    queries, keys = (_LONGEST if jax.export.is_symbolic_dim(n) else n for n in (queries, keys))
    _check_offset_is_whole(offset)
    if isinstance(offset, Integral):
        offset = int(_limited(_in_64_bits(offset), queries, keys, window))
        return jnp.full((batch,), offset, jnp.int32) if offset else None
    if isinstance(offset, Sequence):
        offset = np.asarray(offset)
    if isinstance(offset, np.ndarray) and np.issubdtype(offset.dtype, np.integer):
        # The integers are clipped in 64 bits, because JAX would keep their lower 32.
        wide = np.array([_in_64_bits(o) for o in offset.flat], np.int64).reshape(offset.shape)
        offset = _limited(wide, queries, keys, window).astype(np.int32)
    is_limited = isinstance(offset, np.ndarray)
    if not jnp.shape(offset):
        offset = jnp.broadcast_to(offset, (batch,))
    array = _integers("query_offset", offset, (batch,))
    assert array is not None
    if is_limited:
        return array
    if array.dtype.itemsize < 4:
        array = array.astype(jnp.int32)
    return _limited(array, queries, keys, window).astype(jnp.int32)


def _in_64_bits(number: Any) -> np.int64:
    info = np.iinfo(np.int64)
    return np.int64(min(max(int(number), info.min), info.max))


def _limited(offset: Any, queries: int, keys: int, window: tuple[int, int]) -> Any:
    """Returns offsets clipped to a range near the keys; with `_shortened` windows masks are the same.

    A query beyond the keys moves towards them by as much as its window is shortened.
    """
    xp = jnp if isinstance(offset, jax.Array) else np
    info = np.iinfo(offset.dtype)

    def held(number: int) -> np.ndarray:
        return np.asarray(min(max(number, info.min), info.max), offset.dtype)

    left, right = _shortened(window)
    above = xp.maximum(offset, held(keys)) - held(keys)
    offset = offset - xp.minimum(above, held(window[0] - left))
    if info.min < 0:
        below = xp.minimum(offset, held(-queries)) + held(queries)
        offset = offset - xp.maximum(below, held(right - window[1]))
        offset = xp.maximum(offset, held(-queries - right))
    return xp.minimum(offset, held(keys + left))


def _lengths(name: str, lengths: Any, batch: int, full: int) -> jax.Array | None:
    """Returns the lengths [B], clipped to [0, full], as kernels do not check them; None without any."""
    array = _integers(name, lengths, (batch,))
    if array is None:
        return None
    if array.dtype.itemsize < 4:
        array = array.astype(jnp.int32)
    return jnp.clip(array, 0, full).astype(jnp.int32)


def _segments(
    query_segments: Any, key_segments: Any, batch: int, query_length: int, key_length: int
) -> tuple[jax.Array | None, jax.Array | None]:
    """Returns the ids of queries and keys as int32; 64-bit ids are replaced by their ranks."""
    query_segments, key_segments = ranked(query_segments, key_segments)
    queries = _integers("query_segment_ids", query_segments, (batch, query_length))
    keys = _integers("key_value_segment_ids", key_segments, (batch, key_length))
    if queries is None or keys is None:
        return None, None
    if max(queries.dtype.itemsize, keys.dtype.itemsize) > 4:
        both = jnp.concatenate([queries, keys], axis=1)
        _, ranks = jnp.unique(both, return_inverse=True, size=both.size)
        queries, keys = jnp.split(ranks.reshape(both.shape), [query_length], axis=1)
    return queries.astype(jnp.int32), keys.astype(jnp.int32)


def ranked(*ids: Any) -> tuple[Any, ...]:
    """Returns segment ids; if all are NumPy's and some have 64 bits, their ranks among all of them.

    JAX would keep the lower 32 bits, or `as_array` the nearest numbers of 32.
    """
    if not all(isinstance(a, np.ndarray) and a.dtype.kind in "iu" for a in ids):
        return ids
    if all(a.dtype.itemsize <= 4 for a in ids):
        return ids
    # Python's integers, because NumPy's int64 and uint64 together become floats.
    _, ranks = np.unique([n for a in ids for n in a.ravel().tolist()], return_inverse=True)
    parts = np.split(ranks.astype(np.int32), np.cumsum([a.size for a in ids])[:-1])
    return tuple(part.reshape(a.shape) for part, a in zip(parts, ids, strict=True))


def _integers(name: str, array: Any, shape: tuple[int, ...]) -> jax.Array | None:
    """Returns integers of `shape`; a leading axis of 1 may be missing, as with 3-D queries."""
    if array is None:
        return None
    array = as_array(array)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(
            f"dot_product_attention: {name} has dtype {array.dtype}, but it holds integers;"
            f" pass {name}.astype(jnp.int32)."
        )
    if shape[0] == 1 and array.shape == shape[1:]:
        array = array[None]
    check_shape("dot_product_attention", name, array, shape, f"query and key imply {shape}")
    return array


def broadcastable(name: str, array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns the array with 4 axes, each of which has length 1 or that of `shape`."""
    fits = array.ndim <= 4 and all(
        size in (1, full) for size, full in zip(array.shape[::-1], shape[::-1], strict=False)
    )
    if not fits:
        raise ValueError(
            f"dot_product_attention: {name} has shape {array.shape}, but the logits have shape"
            f" {shape}; pass an array that broadcasts to them."
        )
    return array.reshape((1,) * (4 - array.ndim) + array.shape)
