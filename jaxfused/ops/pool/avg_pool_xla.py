"""avg_pool and global_avg_pool in plain JAX."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxfused.ops.pool.max_pool_xla import Pairs, each_place
from jaxfused.runtime.promotion import accumulator_dtype

_IN_ONE_PASS = 16
"""Largest number of values of a window that are summed in one pass over x; larger windows are summed
axis by axis."""


def pool(
    x: jax.Array,
    weights: jax.Array | None = None,
    *,
    window: Sequence[int],
    strides: Sequence[int],
    padding: Pairs,
    counted: Pairs,
) -> jax.Array:
    """Returns the mean of each window of [B, *spatial, C], weighted or not.

    `counted` has, for each spatial axis, the first position that counts in the divisor and the one after
    the last; x starts at position 0. Sums are linear in x, so that JAX's gradient consists of sums and
    padding too, in a fixed order.
    """
    dtype = accumulator_dtype(x.dtype)
    wide = x.astype(dtype)
    if weights is not None:
        weights = weights.astype(dtype)
        total = _weighted_sums(_padded(wide, padding), weights, strides)
        ones = _ones_where_counted(dtype, x.shape[1:-1], padding, counted)
        return (total / _weighted_sums(ones, weights, strides)).astype(x.dtype)
    total = _sums(wide, window, strides, padding)
    divisor = jnp.ones((1,) * x.ndim, dtype)
    for axis, (size, step, (low, _), (begin, end)) in enumerate(
        zip(window, strides, padding, counted, strict=True), 1
    ):
        starts = step * np.arange(total.shape[axis]) - low
        counts = np.clip(np.minimum(starts + size, end) - np.maximum(starts, begin), 0, None)
        divisor = divisor * _along(axis, x.ndim, counts, dtype)
    return (total / divisor).astype(x.dtype)


def _along(axis, ndim, numbers, dtype):
    """Returns `numbers` along `axis` of an array of `ndim` axes; only one of them if all are equal."""
    if (numbers == numbers[0]).all():
        numbers = numbers[:1]
    return jnp.asarray(numbers.reshape([-1 if a == axis else 1 for a in range(ndim)]), dtype)


def _sums(x, window, strides, padding):
    """Returns the sum of x [B, *spatial, C] over each window."""
    if tuple(window) == tuple(strides) and all(pair == (0, 0) for pair in padding):
        # Adjacent windows become axes of their own, so that the gradient of their sum is a broadcast.
        # The axes are split one by one, because JAX can derive the sharding after such a reshape.
        for axis in reversed(range(1, x.ndim - 1)):
            size = window[axis - 1]
            count = x.shape[axis] // size
            x = jax.lax.slice_in_dim(x, 0, count * size, axis=axis)
            x = x.reshape(*x.shape[:axis], count, size, *x.shape[axis + 1 :])
        return x.sum(tuple(range(2, x.ndim - 1, 2)))
    if math.prod(window) <= _IN_ONE_PASS:
        return _window_sums(x, (1, *window, 1), (1, *strides, 1), ((0, 0), *padding, (0, 0)))
    for axis in range(1, x.ndim - 1):
        size, step = [1] * x.ndim, [1] * x.ndim
        pairs = [(0, 0)] * x.ndim
        size[axis], step[axis], pairs[axis] = window[axis - 1], strides[axis - 1], padding[axis - 1]
        x = _window_sums(x, size, step, pairs)
    return x


def _window_sums(x, window, strides, padding):
    # The initial value is a NumPy zero, so that JAX sees a window sum, which it can differentiate.
    return jax.lax.reduce_window(x, np.array(0, x.dtype), jax.lax.add, window, strides, padding)


def _weighted_sums(padded, weights, strides):
    """Returns the weighted sum of each window of a padded x, one weight of the window at a time."""
    spatial = zip(padded.shape[1:-1], weights.shape, strides, strict=True)
    shape = (1, *((n - size) // step + 1 for n, size, step in spatial), 1)
    flat = weights.reshape(-1)
    total: jax.Array | float = 0.0
    for place, taken in each_place(weights.shape, strides, shape):
        total += jax.lax.index_in_dim(flat, place, keepdims=False) * padded[taken]
    return total


def _padded(x, padding):
    return jnp.pad(x, ((0, 0), *padding, (0, 0)))


def _ones_where_counted(dtype, spatial, padding, counted):
    """Returns [1, *padded, 1]: 1 at the positions that count in the mean's divisor, else 0."""
    ones = jnp.ones((1,) * (len(spatial) + 2), dtype)
    for axis, (n, (low, high), (begin, end)) in enumerate(
        zip(spatial, padding, counted, strict=True), 1
    ):
        positions = np.arange(-low, n + high)
        inside = (positions >= begin) & (positions < end)
        ones = ones * _along(axis, ones.ndim, inside, dtype)
    shape = [n + low + high for n, (low, high) in zip(spatial, padding, strict=True)]
    return jnp.broadcast_to(ones, (1, *shape, 1))


def global_pool(x: jax.Array) -> jax.Array:
    """Returns the mean of [B, *spatial, C] over its spatial axes, [B, C]."""
    wide = x.astype(accumulator_dtype(x.dtype))
    return wide.mean(tuple(range(1, x.ndim - 1))).astype(x.dtype)
