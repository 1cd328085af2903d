"""Filters of images [H, W, C], whose borders are mirrored without repeating the outermost pixel."""

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def gaussian(sigma: jax.Array, radius: int) -> jax.Array:
    """Returns 2 radius + 1 samples of a Gaussian, which sum to 1."""
    places = jnp.arange(-radius, radius + 1, dtype=sigma.dtype)
    weights = jnp.exp(-0.5 * (places / sigma) ** 2)
    return weights / weights.sum()


def separable(
    x: jax.Array, down: jax.Array, across: jax.Array, size: jax.Array | None
) -> jax.Array:
    """Returns x filtered along its rows and columns by odd numbers of weights.

    `size` is the image's [height, width] if it may be smaller than its array, else None.
    """
    for axis, weights in enumerate((down, across)):
        radius = len(weights) // 2
        terms = [
            weight * shifted(x, axis, offset, size)
            for weight, offset in zip(weights, range(-radius, radius + 1), strict=True)
        ]
        x = functools.reduce(operator.add, terms)
    return x


def smoothed(x: jax.Array, sigma: float) -> jax.Array:
    """Returns x after a Gaussian of 4 sigma on each side, as products with two matrices.

    Their time does not depend on the blur's width.
    """
    radius = math.ceil(4 * sigma)
    offsets = np.arange(-radius, radius + 1)
    weights = np.exp(-0.5 * (offsets / sigma) ** 2)

    def matrix(n: int) -> jax.Array:
        blur = np.zeros((n, n))
        places = mirrored_places(np.arange(n)[:, None] + offsets, n)
        np.add.at(blur, (np.arange(n)[:, None], places), weights / weights.sum())
        return jnp.asarray(blur, x.dtype)

    highest = jax.lax.Precision.HIGHEST
    x = jnp.einsum("ij,jwc->iwc", matrix(x.shape[0]), x, precision=highest)
    return jnp.einsum("ij,hjc->hic", matrix(x.shape[1]), x, precision=highest)


def shifted(x: jax.Array, axis: int, offset: int, size: jax.Array | None) -> jax.Array:
    """Returns each pixel's neighbour at `offset` along an axis, with mirrored borders."""
    n = x.shape[axis]
    if size is None and abs(offset) < n:
        inner = jax.lax.slice_in_dim(x, max(offset, 0), n + min(offset, 0), axis=axis)
        if offset == 0:
            return inner
        edge = (n - 1 - offset, n - 1) if offset > 0 else (1, 1 - offset)
        mirrored = jax.lax.rev(jax.lax.slice_in_dim(x, *edge, axis=axis), (axis,))
        return jnp.concatenate([inner, mirrored] if offset > 0 else [mirrored, inner], axis)
    if size is None:
        places = mirrored_places(np.arange(n) + offset, n)
        return x.take(jnp.asarray(places), axis, mode="clip")
    count = size[axis].astype(jnp.int32)
    places = mirrored_places(jnp.arange(n, dtype=jnp.int32) + offset, count)
    return x.take(jnp.clip(places, 0, n - 1), axis, mode="clip")


def mirrored_places(places, count):
    """Returns positions mirrored at both ends into 0 .. count - 1."""
    numbers = np if isinstance(places, np.ndarray) else jnp
    period = numbers.maximum(2 * (count - 1), 1)
    within = places % period
    return numbers.minimum(within, period - within)


def sharpened(x: jax.Array, factor: jax.Array, size: jax.Array | None) -> jax.Array:
    """Returns x blended with its blur by 3 x 3; outermost pixels and a fourth channel are unchanged.

    Source: Pillow's `ImageEnhance.Sharpness`, and `ImageFilter.SMOOTH`.
    """
    height, width, channels = x.shape
    if min(height, width) < 3:
        return x
    if channels == 4:
        return jnp.concatenate([sharpened(x[..., :3], factor, size), x[..., 3:]], -1)
    rows = [jax.lax.slice_in_dim(x, i, height - 2 + i, axis=0) for i in range(3)]
    total = sum(
        jax.lax.slice_in_dim(row, j, width - 2 + j, axis=1) for row in rows for j in range(3)
    )
    blurred = (total + 4 * x[1:-1, 1:-1]) / 13
    blurred = jnp.pad(blurred, ((1, 1), (1, 1), (0, 0)))
    inner = _inner(x.shape[:2], size)
    return jnp.where(inner[..., None], jnp.clip(factor * x + (1 - factor) * blurred, 0, 1), x)


def _inner(shape: Sequence[int], size: jax.Array | None) -> jax.Array:
    """Returns a mask [H, W], True where a pixel of the image has neighbours on all sides."""
    ends: Any = shape if size is None else size
    sides = [
        (place > 0) & (place < end - 1)
        for place, end in zip(map(_places, shape), ends, strict=True)
    ]
    return sides[0][:, None] & sides[1][None]


def _places(n: int) -> jax.Array:
    return jnp.arange(n, dtype=jnp.float32)
