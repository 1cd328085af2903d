"""conv of images with few channels, such as the first layer's three, by space-to-depth.

A product over three channels leaves the tensor cores mostly idle. So each block of stride x stride
pixels becomes one pixel, and the blocks of a row of the window are concatenated along the channels. The
window then has one column, and enough channels for the tensor cores. The cost is to write and read the
new image, which is smaller than the result.
"""

import math

import jax
import jax.numpy as jnp

from pallas_kernels.conv.window import GROUP, Window

MOST_JOINED = 64
"""Largest number of channels of the rewritten image: those that one step of the kernel multiplies."""


def can_join(window: Window, channels: int) -> bool:
    """Returns whether a row of the window, as stride x stride blocks, fits `MOST_JOINED` channels."""
    if channels % GROUP == 0 or window.taps == 1 or set(window.dilation) != {1}:
        return False
    columns = _blocks(window)[1]
    return columns * math.prod(window.strides) * channels <= MOST_JOINED


def _blocks(window: Window) -> tuple[int, ...]:
    """Returns the window's rows and columns, counted in blocks of stride x stride pixels."""
    return tuple(-(-k // step) for k, step in zip(window.kernel, window.strides, strict=True))


def joined(window: Window) -> Window:
    """Returns the window of the rewritten convolution, which has no padding and stride 1."""
    ones = (1, 1)
    return Window((_blocks(window)[0], 1), ((0, 0), (0, 0)), ones, ones)


def join(window: Window, x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rewrites the convolution of x [B, H, W, C] with w [kh, kw, C, F] by space-to-depth.

    Returns:
      x [B, H', W', C'] and w [rows, 1, C', F], for a window of `rows` x `columns` blocks of
        stride_h x stride_w pixels. A pixel of the new x holds `columns` adjacent blocks: C' is
        columns * stride_h * stride_w * C, zero-padded to a multiple of GROUP; H' is the result's height
        + rows - 1, and W' the result's width.
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
    # Zeros fill up the channels to a multiple that TMA can copy.
    fill = (0, -x.shape[-1] % GROUP)
    none = (0, 0)
    x, w = jnp.pad(x, [none, none, none, fill]), jnp.pad(w, [none, none, fill, none])
    return x, w
