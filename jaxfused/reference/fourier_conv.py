"""conv where each channel has a long window of its own, as a product of Fourier transforms.

A value of the result is a sum over its window, and a product of transforms is all of these sums at once:
how long it takes hardly depends on the window.
"""

import functools

import jax
import jax.numpy as jnp

from jaxfused.reference.promotion import accumulator_dtype

Padding = tuple[tuple[int, int], ...]
"""The zeros (before, after) each spatial axis."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def conv(x: jax.Array, w: jax.Array, padding: Padding) -> jax.Array:
    """Convolves x [B, *spatial, C] with w [*kernel, C], each channel by itself, in x's dtype.

    As in `reference.conv` the window is not flipped, and the sums are float32 (float64 for float64).

    Source: Cooley and Tukey, "An Algorithm for the Machine Calculation of Complex Fourier Series", 1965.
    """
    lengths = _lengths(x.shape[1:-1], w.shape[:-1], padding)
    product = _transformed(x, lengths) * _of_window(w, padding, lengths)
    sizes = (
        size + sum(zeros) - kernel + 1
        for size, kernel, zeros in zip(x.shape[1:-1], w.shape[:-1], padding, strict=True)
    )
    return _restored(product, lengths, tuple(sizes)).astype(x.dtype)


def _conv_fwd(x, w, padding):
    return conv(x, w, padding), (x, w)


def _conv_bwd(padding, saved, dy):
    x, w = saved
    lengths = _lengths(x.shape[1:-1], w.shape[:-1], padding)
    of_dy = _transformed(dy, lengths)
    dx = _restored(of_dy * _of_window(w, padding, lengths).conj(), lengths, x.shape[1:-1])
    of_x = _transformed(x, lengths)
    # Of the images of a channel: the sum of products is the transform of the sum of the windows.
    summed = jnp.sum(of_dy * of_x.conj(), axis=0, keepdims=True)
    around = jnp.fft.irfftn(summed, s=lengths, axes=_axes(lengths))[0]
    turned = jnp.roll(jnp.moveaxis(around, 0, -1), _reach(w, padding), range(w.ndim - 1))
    dw = jnp.flip(jax.lax.slice(turned, (0,) * w.ndim, w.shape), range(w.ndim - 1))
    return dx.astype(x.dtype), dw.astype(w.dtype)


conv.defvjp(_conv_fwd, _conv_bwd)


def _lengths(
    sizes: tuple[int, ...], kernel: tuple[int, ...], padding: Padding
) -> tuple[int, ...]:
    """How many values of each axis are transformed, zeros behind those of x included.

    The transform is of an axis that goes on with its first value after its last. What a window meets
    before the first value and after the last has to be zero.
    """
    return tuple(
        _fast_length(max(size + low, size + high, k))
        for size, k, (low, high) in zip(sizes, kernel, padding, strict=True)
    )


def _fast_length(least: int) -> int:
    """The smallest even number from `least` on without prime factors above 7, which are slow."""
    length = least + least % 2
    while True:
        rest = length
        for factor in (2, 3, 5, 7):
            while rest % factor == 0:
                rest //= factor
        if rest == 1:
            return length
        length += 2


def _axes(lengths: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(range(2, 2 + len(lengths)))


def _transformed(x: jax.Array, lengths: tuple[int, ...]) -> jax.Array:
    """The transform [B, C, *lengths] of x [B, *spatial, C]; of the last axis half and one more."""
    x = jnp.moveaxis(x, -1, 1).astype(accumulator_dtype(x.dtype))
    return jnp.fft.rfftn(x, s=lengths, axes=_axes(lengths))


def _of_window(w: jax.Array, padding: Padding, lengths: tuple[int, ...]) -> jax.Array:
    """The transform [1, C, *lengths] of the window w [*kernel, C]."""
    reach = _reach(w, padding)
    w = jnp.flip(w, range(w.ndim - 1)).astype(accumulator_dtype(w.dtype))
    zeros = [length - kernel for length, kernel in zip(lengths, w.shape, strict=False)]
    w = jnp.pad(w, [*((0, count) for count in zeros), (0, 0)])
    w = jnp.roll(w, [-step for step in reach], range(w.ndim - 1))
    return _transformed(w[None], lengths)


def _reach(w: jax.Array, padding: Padding) -> list[int]:
    """How many values after its own place a window begins at, once it is turned around."""
    return [kernel - 1 - low for kernel, (low, _) in zip(w.shape, padding, strict=False)]


def _restored(
    product: jax.Array, lengths: tuple[int, ...], sizes: tuple[int, ...]
) -> jax.Array:
    """The first values [B, *sizes, C] of what the product is the transform of."""
    y = jnp.fft.irfftn(product, s=lengths, axes=_axes(lengths))
    y = jax.lax.slice(y, (0,) * y.ndim, (*y.shape[:2], *sizes))
    return jnp.moveaxis(y, 1, -1)
