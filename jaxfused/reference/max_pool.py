"""max_pool in plain JAX, and its two stages as the kernels divide it."""

import itertools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

Pairs = Sequence[tuple[int, int]]


def pool(
    x: jax.Array, *, window: Sequence[int], strides: Sequence[int], padding: Pairs
) -> jax.Array:
    """The largest value of each window of [B, *spatial, C]."""
    # JAX knows the gradient of a maximum only where the initial value is a constant.
    return jax.lax.reduce_window(
        x,
        np.array(-np.inf, x.dtype),
        jax.lax.max,
        (1, *window, 1),
        (1, *strides, 1),
        ((0, 0), *padding, (0, 0)),
    )


def pool_and_places(
    x: jax.Array, *, window: Sequence[int], strides: Sequence[int], padding: Pairs
) -> tuple[jax.Array, jax.Array]:
    """(y, places): a place is that of the first largest value in its window, in uint8."""
    y = pool(x, window=window, strides=strides, padding=padding)
    padded = jnp.pad(x, ((0, 0), *padding, (0, 0)), constant_values=-jnp.inf)
    places = jnp.zeros(y.shape, jnp.uint8)
    best = jnp.full(y.shape, -jnp.inf, x.dtype)
    found = jnp.zeros(y.shape, bool)
    for place, taken in _each_place(window, strides, y.shape):
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
    """The gradient of x [B, *size, C]: each dy goes to its place."""
    padded = (
        dy.shape[0],
        *(n + low + high for n, (low, high) in zip(size, padding, strict=True)),
        dy.shape[-1],
    )
    dx = jnp.zeros(padded, jnp.promote_types(dy.dtype, jnp.float32))
    for place, taken in _each_place(window, strides, dy.shape):
        dx = dx.at[taken].add(jnp.where(places == place, dy, 0).astype(dx.dtype))
    inner = (slice(low, low + n) for n, (low, _) in zip(size, padding, strict=True))
    return dx[:, *inner].astype(dy.dtype)


def _inside(shape: Sequence[int], padding: Pairs) -> jax.Array:
    return jnp.pad(jnp.ones(shape, bool), ((0, 0), *padding, (0, 0)))


def _each_place(
    window: Sequence[int], strides: Sequence[int], out: Sequence[int]
) -> Iterator[tuple[int, tuple[slice, ...]]]:
    """For each place of a window: its number, and the values of the padded x that have it."""
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
