"""upsample in plain JAX."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxfused.runtime.promotion import accumulator_dtype


def upsample(x: jax.Array, *, factors: Sequence[int], method: str) -> jax.Array:
    """Resizes the spatial axes of [B, *spatial, C] by whole factors."""
    y = x.astype(accumulator_dtype(x.dtype))
    resize = _between_neighbours if method == "bilinear" else _repeated
    for axis, factor in enumerate(factors, 1):
        if factor > 1:
            y = resize(y, axis, factor)
    return y.astype(x.dtype)


def _repeated(x: jax.Array, axis: int, factor: int) -> jax.Array:
    return jnp.repeat(x, factor, axis)


def _between_neighbours(x: jax.Array, axis: int, factor: int) -> jax.Array:
    """Resizes an axis by linear interpolation between the centres of its pixels.

    `jax.image.resize` multiplies by a matrix of weights, nearly all of them zero. But each of the
    `factor` new pixels within a pixel of x always has the same two weights.
    """
    size = x.shape[axis]
    first, last = (jax.lax.slice_in_dim(x, i, i + 1, axis=axis) for i in (0, size - 1))
    before = jnp.concatenate([first, jax.lax.slice_in_dim(x, 0, size - 1, axis=axis)], axis)
    after = jnp.concatenate([jax.lax.slice_in_dim(x, 1, size, axis=axis), last], axis)
    parts = []
    for part in range(factor):
        # Distance between the centres of a new pixel and of the pixel of x around it, in pixels of x.
        offset = (part + 0.5) / factor - 0.5
        neighbour = before if offset < 0 else after
        parts.append((1 - abs(offset)) * x + abs(offset) * neighbour)
    shape = (*x.shape[:axis], size * factor, *x.shape[axis + 1 :])
    return jnp.stack(parts, axis + 1).reshape(shape)
