"""max_pool in plain JAX, and the references of its two kernels, forward and gradient."""

import functools
import itertools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxfused.runtime.promotion import accumulator_dtype

Pairs = Sequence[tuple[int, int]]

_AT_ONCE = 4
"""Largest number of values that are compared at once; larger windows are reduced block by block."""


def pool(
    x: jax.Array, *, window: Sequence[int], strides: Sequence[int], padding: Pairs
) -> jax.Array:
    """Returns the largest value of each window of [B, *spatial, C].

    XLA's own gradient, select-and-scatter, adds with atomics on a GPU if windows overlap. The gradient
    here adds in a fixed order, in float32 or wider.
    """
    pairs = tuple((low, high) for low, high in padding)
    return _pool(x, tuple(window), tuple(strides), pairs)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
def _pool(x, window, strides, padding):
    return jax.lax.reduce_window(
        x,
        np.array(-np.inf, x.dtype),
        jax.lax.max,
        (1, *window, 1),
        (1, *strides, 1),
        ((0, 0), *padding, (0, 0)),
    )


@_pool.defjvp
def _pool_jvp(window, strides, padding, primals, tangents):
    # The gradient finds the largest values again, so only x is saved.
    at_the_largest = jax.checkpoint(_at_the_largest, prevent_cse=False, static_argnums=(2, 3, 4))
    y = _pool(*primals, window, strides, padding)
    return y, at_the_largest(*primals, *tangents, window, strides, padding)


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _at_the_largest(x, values, window, strides, padding):
    """Returns, for each window, the entry of `values` at the first largest entry of x.

    The first in row order is in the first row that has the largest value, and is the first in that row.
    So the last axis can be pooled alone, then the one before it.
    """
    dtype = values.dtype
    # The gradient, which is the transpose of the steps below, adds in this dtype.
    values = values.astype(accumulator_dtype(dtype))
    for axis in reversed(range(1, x.ndim - 1)):
        low, high = padding[axis - 1]
        if low or high:
            sides = [(low, high, 0) if a == axis else (0, 0, 0) for a in range(x.ndim)]
            x = jax.lax.pad(x, np.array(-np.inf, x.dtype), sides)
            values = jax.lax.pad(values, np.array(0, values.dtype), sides)
        size, block = window[axis - 1], 1
        # Windows are built from blocks of 1, 4, 16, ... values, the last of which may overlap.
        while size > _AT_ONCE * block:
            starts = tuple(range(0, _AT_ONCE * block, block))
            x, values = _first_largest(x, values, axis, starts, block, 1, low)
            block *= _AT_ONCE
        starts = (*range(0, size - block, block), size - block)
        x, values = _first_largest(x, values, axis, starts, block, strides[axis - 1], low)
    return values.astype(dtype)


def _first_largest(x, values, axis, starts, block, stride, low):
    """Returns the maxima, and `values` at the maxima, of windows that consist of blocks at `starts`.

    An entry of x is the maximum of `block` entries of the padded x, whose first `low` are padding.
    """
    count = (x.shape[axis] - starts[-1] - 1) // stride + 1

    def blocks(array, start):
        return jax.lax.slice_in_dim(array, start, start + (count - 1) * stride + 1, stride, axis)

    best, chosen = blocks(x, starts[0]), blocks(values, starts[0])
    for before, start in itertools.pairwise(starts):
        following = blocks(x, start)
        stays = (best >= following) | jnp.isnan(best)
        padding_alone = stride * np.arange(count) + before + block <= low
        if padding_alone.any():
            stays &= ~padding_alone.reshape([-1 if a == axis else 1 for a in range(x.ndim)])
        best = jnp.where(stays, best, following)
        chosen = jnp.where(stays, chosen, blocks(values, start))
    return best, chosen


def pool_and_places(
    x: jax.Array, *, window: Sequence[int], strides: Sequence[int], padding: Pairs
) -> tuple[jax.Array, jax.Array]:
    """Returns (y, places); a place is the index of the first largest value in its window, in uint8."""
    y = pool(x, window=window, strides=strides, padding=padding)
    padded = jnp.pad(x, ((0, 0), *padding, (0, 0)), constant_values=-jnp.inf)
    places = jnp.zeros(y.shape, jnp.uint8)
    best = jnp.full(y.shape, -jnp.inf, x.dtype)
    found = jnp.zeros(y.shape, bool)
    for place, taken in each_place(window, strides, y.shape):
        values = padded[taken]
        inside = _inside(x.shape, padding)[taken]
        larger = (values > best) | (jnp.isnan(values) & ~jnp.isnan(best)) | ~found
        larger = larger & inside
        best = jnp.where(larger, values, best)
        places = jnp.where(larger, jnp.uint8(place), places)
        found = found | inside
    return y, places


def gradient(
    dy: jax.Array,
    places: jax.Array,
    *,
    size: Sequence[int],
    window: Sequence[int],
    strides: Sequence[int],
    padding: Pairs,
) -> jax.Array:
    """Returns the gradient of x [B, *size, C]: each dy is added where its window's maximum is."""
    padded = (
        dy.shape[0],
        *(n + low + high for n, (low, high) in zip(size, padding, strict=True)),
        dy.shape[-1],
    )
    dx = jnp.zeros(padded, accumulator_dtype(dy.dtype))
    for place, taken in each_place(window, strides, dy.shape):
        sides = [
            (part.start, n - part.stop, part.step - 1)
            for part, n in zip(taken[1:], padded[1:-1], strict=True)
        ]
        chosen = jnp.where(places == place, dy, 0).astype(dx.dtype)
        dx = dx + jax.lax.pad(chosen, np.array(0, dx.dtype), [(0, 0, 0), *sides, (0, 0, 0)])
    inner = (slice(low, low + n) for n, (low, _) in zip(size, padding, strict=True))
    return dx[:, *inner].astype(dy.dtype)


def _inside(shape: Sequence[int], padding: Pairs) -> jax.Array:
    return jnp.pad(jnp.ones(shape, bool), ((0, 0), *padding, (0, 0)))


def each_place(
    window: Sequence[int], strides: Sequence[int], out: Sequence[int]
) -> Iterator[tuple[int, tuple[slice, ...]]]:
    """Yields each index of a window, and slices that select that entry of all windows of a padded x."""
    for number, offsets in enumerate(itertools.product(*map(range, window))):
        yield (
            number,
            (
                slice(None),
                *(
                    slice(o, o + (n - 1) * s + 1, s)
                    for o, s, n in zip(offsets, strides, out[1:-1], strict=True)
                ),
            ),
        )
