"""resize in plain JAX: axis after axis, by the few values that each result reads.

A product with the matrix of weights, as `jax.image.resize` computes it, multiplies by zeros nearly
everywhere. JAX's derivative of a gather adds in an order that varies on a GPU, so the gradient is
defined here: the same sum, with the taps of the transposed matrix.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxfused.ops.pool.resize_taps import ResizedAxis, Taps, taps
from jaxfused.runtime import sharding
from jaxfused.runtime.promotion import accumulator_dtype
from jaxfused.runtime.stated_gradient import stated_gradient

_MOST_GATHERED = 16
"""Largest number of taps that are read one by one; for more, a result is a product with the matrix of
weights."""


def resize(x: jax.Array, axes: Sequence[ResizedAxis]) -> jax.Array:
    """Resizes the spatial axes of [B, *spatial, C]."""
    letters = sharding.leading_axes(x.ndim)
    changed = "".join(letters[place] for place, axis in enumerate(axes, 1) if axis.changes)
    (x,) = sharding.align((x,), operand_axes=(letters,), whole=changed)  # type: ignore[assignment]
    y = x.astype(accumulator_dtype(x.dtype))
    for place, axis in enumerate(axes, 1):
        if axis.changes:
            y = _along(place, axis, y)
    return y.astype(x.dtype)


def resize_to(
    x: jax.Array, sizes: Sequence[int], *, method: str, align_corners: bool = False
) -> jax.Array:
    """Resizes the spatial axes of [B, *spatial, C] to these sizes."""
    axes = [
        ResizedAxis(n, m, n / m, method, align_corners, False)
        for n, m in zip(x.shape[1:-1], sizes, strict=True)
    ]
    return resize(x, axes)


@functools.partial(stated_gradient, nondiff_argnums=(0, 1), linear=(2,))
def _along(place: int, axis: ResizedAxis, x: jax.Array) -> jax.Array:
    return _read(place, taps(axis), x)


def _along_fwd(place, axis, x):
    return _along(place, axis, x), None


def _along_bwd(place, axis, saved, dy):
    del saved
    return (_read(place, taps(axis).transposed(), dy),)


_along.defvjp(_along_fwd, _along_bwd)


def _read(place: int, read: Taps, x: jax.Array) -> jax.Array:
    """Returns x with axis `place` resized: each result is a weighted sum of its taps."""
    count = read.places.shape[1]
    if count > _MOST_GATHERED:
        matrix = jnp.asarray(read.matrix(), x.dtype)
        y = jax.lax.dot_general(
            x, matrix, (((place,), (1,)), ((), ())), precision=jax.lax.Precision.HIGHEST
        )
        return jnp.moveaxis(y, -1, place)
    total = jnp.zeros((), x.dtype)
    for tap in range(count):
        weights = jnp.asarray(read.weights[:, tap], x.dtype)
        shape = [-1 if axis == place else 1 for axis in range(x.ndim)]
        part = jnp.take(x, read.places[:, tap], axis=place, mode="clip")
        total = total + part * weights.reshape(shape)
    return total
