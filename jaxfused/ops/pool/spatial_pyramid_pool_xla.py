"""spatial_pyramid_pool in plain JAX."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxfused.ops.pool import avg_pool_xla, max_pool_xla
from jaxfused.runtime.promotion import accumulator_dtype


def pool(x: jax.Array, *, levels: Sequence[int], method: str) -> jax.Array:
    """Returns the largest or mean values of each level's cells, [B, sum(levels ** spatial) * C].

    A cell is a box, so that the axes can be pooled one by one. The last axis comes first: the gradient
    goes to the first of equal values in row order, as in max_pool.
    """
    wide = x.astype(accumulator_dtype(x.dtype))
    parts = []
    for level in levels:
        cells = x if method == "max" else wide
        for axis in reversed(range(1, x.ndim - 1)):
            cells = _over_cells(cells, axis, level, method)
        parts.append(cells.reshape(x.shape[0], math.prod(cells.shape[1:])))
    return jnp.concatenate(parts, 1).astype(x.dtype)


def _over_cells(x: jax.Array, axis: int, level: int, method: str) -> jax.Array:
    """Pools an axis over `level` cells, which overlap by a value if they do not divide it."""
    n = x.shape[axis]
    if n % level == 0:
        return _pooled(x, axis, n // level, method)
    edges = [(i * n // level, -(-(i + 1) * n // level)) for i in range(level)]
    cells = [
        _pooled(jax.lax.slice_in_dim(x, begin, end, axis=axis), axis, end - begin, method)
        for begin, end in edges
    ]
    return jnp.concatenate(cells, axis)


def _pooled(x: jax.Array, axis: int, size: int, method: str) -> jax.Array:
    """Pools an axis over adjacent windows of `size` values."""
    window = [size if a == axis else 1 for a in range(1, x.ndim - 1)]
    nowhere = ((0, 0),) * len(window)
    if method == "max":
        return max_pool_xla.pool(x, window=window, strides=window, padding=nowhere)
    counted = tuple((0, n) for n in x.shape[1:-1])
    return avg_pool_xla.pool(x, window=window, strides=window, padding=nowhere, counted=counted)
