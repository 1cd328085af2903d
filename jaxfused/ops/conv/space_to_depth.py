"""conv of pictures with few channels, such as the first layer's three: several pixels become one.

A product whose rows are pixels of three channels is mostly empty. So the squares that a window steps
over are made pixels, and what the weights of a row of the window meet is put side by side into the
channels. What is left is a window of one column over as many channels as the tensor cores like, at the
cost of writing and reading that picture, which is smaller than the result.
"""

import math

import jax
import jax.numpy as jnp

from pallas_kernels.conv.window import GROUP, Window

MOST_JOINED = 64
"""Channels that a step of the kernel multiplies."""


def can_join(window: Window, channels: int) -> bool:
    """Whether what the weights of a row meet fits into the channels of one step."""
    if channels % GROUP == 0 or window.taps == 1 or set(window.dilation) != {1}:
        return False
    columns = _blocks(window)[1]
    return columns * math.prod(window.strides) * channels <= MOST_JOINED


def _blocks(window: Window) -> tuple[int, ...]:
    """Rows and columns of the window, counted in squares that it steps over."""
    return tuple(-(-k // step) for k, step in zip(window.kernel, window.strides, strict=True))


def joined(window: Window) -> Window:
    """The window of what `join` returns, which neither pads nor steps."""
    ones = (1, 1)
    return Window((_blocks(window)[0], 1), ((0, 0), (0, 0)), ones, ones)


def join(window: Window, x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The same convolution of x [B, H, W, C] with w [kh, kw, C, F], with fewer pixels a window.

    Returns:
      x [B, H', W', C'] and w [rows, 1, C', F].
    """
    images, *sizes, channels = x.shape
    out = window.result(tuple(sizes))
    steps, blocks = window.strides, _blocks(window)
    zeros = [(0, 0, 0)]
    needed = [(o - 1 + block) * step for o, block, step in zip(out, blocks, steps, strict=True)]
    for (low, _), size, length in zip(window.padding, sizes, needed, strict=True):
        zeros.append((low, length - size - low, 0))
    x = jax.lax.pad(x, jnp.zeros((), x.dtype), [*zeros, (0, 0, 0)])
    (rows, columns), (step_h, step_w) = blocks, steps
    down, across = needed[0] // step_h, needed[1] // step_w
    square = step_h * step_w * channels
    x = x.reshape(images, down, step_h, across, step_w, channels)
    x = x.transpose(0, 1, 3, 2, 4, 5).reshape(images, down, across, square)
    x = jnp.concatenate([x[:, :, column : column + out[1]] for column in range(columns)], -1)

    beyond = [rows * step_h - w.shape[0], columns * step_w - w.shape[1]]
    w = jnp.pad(w, [*((0, more) for more in beyond), (0, 0), (0, 0)])
    w = w.reshape(rows, step_h, columns, step_w, channels, w.shape[-1])
    w = w.transpose(0, 2, 1, 3, 4, 5).reshape(rows, 1, columns * square, w.shape[-1])
    # Zeros fill the channels up to what the copy engine takes.
    fill = (0, -x.shape[-1] % GROUP)
    none = (0, 0)
    x, w = jnp.pad(x, [none, none, none, fill]), jnp.pad(w, [none, none, fill, none])
    return x, w
