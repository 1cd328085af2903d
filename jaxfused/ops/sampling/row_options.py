"""Options of each row of logits: its temperature, filters and seeds."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfused.runtime.checks import as_array, as_int32, readable_values
from jaxfused.runtime.dropout import murmur

_SLACK = 2.0**-21
"""Relative error by which a sum of probabilities may miss top_p and still count as top_p, because
float32 logarithms of round probabilities are not exact."""


def of_rows(
    op: str, name: str, value: Any, rows: tuple[int, ...], least: float, most: float
) -> jax.Array:
    """Returns an option as one number for each row, after a check of values that are not traced."""
    whole = name in ("top_k", "position")
    array = as_int32(value) if whole else as_array(value)
    kind = jnp.integer if whole else jnp.number
    if not jnp.issubdtype(array.dtype, kind) or jnp.issubdtype(array.dtype, jnp.complexfloating):
        raise ValueError(
            f"{op}: {name} has dtype {array.dtype}; pass {'integers' if whole else 'real numbers'}."
        )
    if array.shape != rows[: array.ndim]:
        raise ValueError(
            f"{op}: {name} has shape {array.shape}, but it is one number, or an array over the first"
            f" axes of rows of shape {rows}; pass it in one of these shapes."
        )
    values = readable_values(array)
    if values is not None:
        inside = (values >= least) & (values <= most) & (whole | np.isfinite(values.astype(float)))
        if not inside.all():
            upper = "" if most == math.inf else f" to {most:g}"
            lower = "any" if least == -math.inf else f"{least:g}{upper or ' or more'}"
            raise ValueError(
                f"{op}: {name} is {values[~inside].flat[0]}; pass a finite number, {lower}."
            )
    return _over_rows(array.astype(jnp.int32 if whole else jnp.float32), rows)


def _over_rows(array: jax.Array, rows: tuple[int, ...]) -> jax.Array:
    """Returns an array, whose axes are the first ones of the shape `rows`, broadcast to `rows`."""
    return jnp.broadcast_to(array.reshape(array.shape + (1,) * (len(rows) - array.ndim)), rows)


def _is_off(value: Any, off: float) -> bool:
    """Returns whether a filter is known to keep every word."""
    return value is None or (isinstance(value, (int, float, np.generic)) and bool(value == off))


def filters_of(
    op: str, logits: jax.Array, temperature: jax.Array, top_k: Any, top_p: Any, min_p: Any
) -> tuple[jax.Array, bool]:
    """Returns `sample_xla.Filters` as float32 [..., 4], and whether any filter may exclude a word."""
    *rows, words = logits.shape
    k = of_rows(op, "top_k", 0 if top_k is None else top_k, tuple(rows), 0, math.inf)
    p = of_rows(op, "top_p", 1.0 if top_p is None else top_p, tuple(rows), 0.0, 1.0)
    m = of_rows(op, "min_p", 0.0 if min_p is None else min_p, tuple(rows), 0.0, 1.0)
    # The clip excludes factors of infinity and of 0, whose product with 0 or with infinity is NaN.
    inverse = jnp.where(temperature > 0.0, 1.0 / jnp.clip(temperature, 1e-30, 1e30), 0.0)
    share = jnp.where(p >= 1.0, 2.0, jnp.where(p > 0.0, p, 0.0) * (1.0 - _SLACK))
    smallest = jnp.finfo(jnp.float32).tiny
    least = jnp.where(m > 0.0, jnp.log(jnp.clip(m, smallest, 1.0)) - 2.0 * _SLACK, -1.0 / smallest)
    k = jnp.where((k <= 0) | (k > words), words, k)
    is_filtered = not (_is_off(top_k, 0) and _is_off(top_p, 1) and _is_off(min_p, 0))
    columns = inverse, share, least, k.astype(jnp.float32)
    # Adding 0 times the sum of all columns gives each column the batch axes and the sharding of
    # all.
    zero = 0.0 * sum(columns[1:], columns[0])
    return jnp.stack([column + zero for column in columns], axis=-1), is_filtered


def seeds_of(
    op: str, key: Any, position: Any, temperature: jax.Array, rows: tuple[int, ...]
) -> jax.Array:
    """Returns the seeds uint32 [..., 2] of each row's noise, from its key, position and index."""
    of_rows(op, "position", position, rows, -math.inf, math.inf)
    if key is None:
        values = readable_values(temperature)
        if values is None or values.any():
            raise ValueError(
                f"{op}: key is None, but it is what a draw depends on; pass jax.random.key(seed), or"
                " temperature=0.0 for the largest logits."
            )
        return jnp.zeros((*rows, 2), jnp.uint32)
    words = _words_of(op, key)
    shared = words.shape[:-1]
    # The two words of one key of `jax.random.PRNGKey` would be the seeds of two rows.
    if shared and jnp.asarray(key).dtype == jnp.uint32:
        raise ValueError(
            f"{op}: key has shape {shared} and dtype uint32, as the data of keys; pass"
            " jax.random.wrap_key_data(key), or seeds of int32."
        )
    if shared != rows[: len(shared)]:
        raise ValueError(
            f"{op}: key has shape {shared}, but it is one key, or an array of keys over the first axes"
            f" of rows of shape {rows}; pass jax.random.split(key, {rows})."
        )
    inner = rows[len(shared) :]
    number = jnp.arange(math.prod(inner), dtype=jnp.uint32).reshape(inner)
    entering = [
        *(words[..., i].reshape(*shared, *(1,) * len(inner)) for i in range(words.shape[-1])),
        _over_rows(_position_word(position), rows),
        number.reshape((1,) * len(shared) + inner),
    ]
    first = second = jnp.zeros(rows, jnp.uint32)
    for word in entering:
        first = murmur(first ^ jnp.broadcast_to(word, rows)) + jnp.uint32(0x9E3779B9)
        second = murmur(second ^ jnp.broadcast_to(word, rows), first)
    return jnp.stack([first, second], axis=-1)


def _position_word(position: Any) -> jax.Array:
    """Returns a uint32 for each position; positions of more than 32 bits are hashed."""
    if isinstance(position, int):
        position = np.uint64(position % 2**64)
    if not isinstance(position, np.ndarray | np.generic):
        position = jnp.asarray(position)
    if position.dtype.itemsize < 4:
        position = position.astype(np.int32)
    # The high word is 0 for every number that fits into int32, whatever its dtype.
    high = ((position >> 31) + 1) >> 1
    low = position & 0xFFFFFFFF if position.dtype.itemsize == 8 else position
    return jnp.asarray(low.astype(np.uint32)) ^ murmur(jnp.asarray(high.astype(np.uint32)))


def _words_of(op: str, key: Any) -> jax.Array:
    """Returns the words uint32 [..., n] of keys or integer seeds."""
    if isinstance(key, int) and not isinstance(key, bool):
        key = np.int64(key)  # As in jax.random.key, the lower 32 bits count without x64.
    key = jnp.asarray(key)
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(key)
    if not jnp.issubdtype(key.dtype, jnp.integer):
        raise ValueError(
            f"{op}: key has dtype {key.dtype}; pass keys of jax.random.key, or integer seeds."
        )
    words = key.astype(jnp.uint32)
    # `words & 0` has the batch and the sharding of the seeds, unlike new zeros.
    high = (key >> 32).astype(jnp.uint32) if key.dtype.itemsize == 8 else words & 0
    return jnp.stack([high, words], axis=-1)
