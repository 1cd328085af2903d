"""Depthwise conv of long windows as a product of Fourier transforms.

A value of the result is a sum over its window. A product of transforms gives all of these sums at once,
in a time that hardly depends on the window.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxfused.runtime.promotion import accumulator_dtype
from jaxfused.runtime.stated_gradient import stated_gradient

Padding = tuple[tuple[int, int], ...]
"""Numbers of zeros (before, after) each spatial axis, less than the window's size there."""


@functools.partial(stated_gradient, nondiff_argnums=(2,))
def conv(x: jax.Array, w: jax.Array, padding: Padding) -> jax.Array:
    """Convolves x [B, *spatial, C] with w [*kernel, C], each channel by itself, in x's dtype.

    As in `conv_xla.conv` the window is not flipped, and the sums are float32 (float64 for float64).
    A NaN or an infinity in x reaches all values of its image and channel.

    Source: Cooley and Tukey, "An Algorithm for the Machine Calculation of Complex Fourier Series", 1965.
    """
    transform = _transform(x.shape[1:-1], w.shape[:-1], padding)
    sizes = [
        size + sum(zeros) - kernel + 1
        for size, kernel, zeros in zip(x.shape[1:-1], w.shape[:-1], padding, strict=True)
    ]
    product = transform.of(x) * transform.of_window(w, padding)
    return transform.restored(product, sizes).astype(x.dtype)


def _conv_fwd(x, w, padding):
    return conv(x, w, padding), (x, w)


def _conv_bwd(padding, saved, dy):
    x, w = saved
    transform = _transform(x.shape[1:-1], w.shape[:-1], padding)
    of_dy = transform.of(dy)
    dx = transform.restored(of_dy * transform.of_window(w, padding).conj(), x.shape[1:-1])
    spread = transform.lengths_of_window(w)
    # Axes where the window has one weight are not transformed; their products are summed here.
    once = [0, *(2 + axis for axis, length in enumerate(spread) if length == 1)]
    summed = jnp.sum(of_dy * transform.of(x).conj(), axis=once, keepdims=True)
    (around,) = transform.restored(summed, spread)
    turned = jnp.roll(around, _reach(w, padding), range(w.ndim - 1))
    dw = jnp.flip(jax.lax.slice(turned, (0,) * w.ndim, w.shape), range(w.ndim - 1))
    return dx.astype(x.dtype), dw.astype(w.dtype)


conv.defvjp(_conv_fwd, _conv_bwd)


def transformed_size(x: Any, kernel: Sequence[int], padding: Padding) -> int:
    """Returns the number of transformed values, zeros included, for x [B, *spatial, C] and a window."""
    lengths = _transform(x.shape[1:-1], kernel, padding).lengths
    return x.shape[0] * math.prod(lengths) * x.shape[-1]


class _Transform(NamedTuple):
    """Fourier transform of images, along the axes in which a window has more than one weight."""

    lengths: tuple[int, ...]
    """Length of each spatial axis of the transform, zeros included."""
    axes: tuple[int, ...]
    """Transformed axes, after the channels have moved to axis 1 for contiguous reads."""

    def of(self, x: jax.Array) -> jax.Array:
        """Returns the transform [B, C, *lengths] of real x; the last axis has half its length plus 1."""
        x = jnp.moveaxis(x, -1, 1).astype(accumulator_dtype(x.dtype))
        return jnp.fft.rfftn(x, s=self._transformed, axes=self.axes)

    def of_window(self, w: jax.Array, padding: Padding) -> jax.Array:
        """Returns the transform [1, C, *lengths] of w [*kernel, C], flipped and padded with zeros."""
        return self.of(_around(w, padding, self.lengths_of_window(w))[None])

    def restored(self, product: jax.Array, sizes: Sequence[int]) -> jax.Array:
        """Returns the first values [B, *sizes, C] of the inverse transform of `product`."""
        y = jnp.fft.irfftn(product, s=self._transformed, axes=self.axes)
        return jnp.moveaxis(jax.lax.slice(y, (0,) * y.ndim, (*y.shape[:2], *sizes)), 1, -1)

    def lengths_of_window(self, w: Any) -> tuple[int, ...]:
        """Returns the length to which each spatial axis of w [*kernel, C] is padded with zeros."""
        return tuple(1 if k == 1 else n for n, k in zip(self.lengths, w.shape, strict=False))

    @property
    def _transformed(self) -> tuple[int, ...]:
        return tuple(self.lengths[axis - 2] for axis in self.axes)


def _transform(sizes: Sequence[int], kernel: Sequence[int], padding: Padding) -> _Transform:
    """Returns the transform for images of these spatial sizes and a window.

    A transform is cyclic: after the last value of an axis follows its first. So the axis is lengthened
    by zeros, as many as a window reaches beyond its first and last values.
    """
    lengths = tuple(
        size if k == 1 else _fast_length(max(size + low, size + high, k))
        for size, k, (low, high) in zip(sizes, kernel, padding, strict=True)
    )
    return _Transform(lengths, tuple(2 + axis for axis, k in enumerate(kernel) if k > 1))


def _fast_length(least: int) -> int:
    """Returns the least even number from `least` on without prime factors above 7, which are slow."""
    length = least + least % 2
    while not _is_fast(length):
        length += 2
    return length


def _is_fast(length: int) -> bool:
    for factor in (2, 3, 5, 7):
        while length % factor == 0:
            length //= factor
    return length == 1


def _around(w: jax.Array, padding: Padding, lengths: Sequence[int]) -> jax.Array:
    """Returns w flipped, padded with zeros to [*lengths, C] and rolled by `_reach`.

    Without the roll, a cyclic convolution would return each value `_reach` positions later.
    """
    w, reach = jnp.flip(w, range(w.ndim - 1)), _reach(w, padding)
    zeros = [length - kernel for length, kernel in zip(lengths, w.shape, strict=False)]
    w = jnp.pad(w, [*((0, count) for count in zeros), (0, 0)])
    return jnp.roll(w, [-steps for steps in reach], range(w.ndim - 1))


def _reach(w: jax.Array, padding: Padding) -> list[int]:
    """Returns, for each axis, the shift in positions of a cyclic convolution with the flipped w."""
    return [kernel - 1 - low for kernel, (low, _) in zip(w.shape, padding, strict=False)]
