"""max_pool and its gradient by the CUDA kernels of ffi/pool/resample.cu."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfused.runtime import cuda_library

MAX_ELEMENTS = 2**31 - 2**10
"""Largest number of elements of x, and of the result, because kernels index threads in 31 bits."""


@dataclass(frozen=True)
class Window:
    """Size, strides and padding (low, high) of pooling windows over rows and columns."""

    size: tuple[int, int]
    strides: tuple[int, int]
    padding: tuple[tuple[int, int], tuple[int, int]]

    def result(self, height: int, width: int) -> tuple[int, int]:
        """Returns the rows and columns of the result."""
        sizes = [
            (size + sum(padding) - window) // stride + 1
            for size, padding, window, stride in zip(
                (height, width), self.padding, self.size, self.strides, strict=True
            )
        ]
        return sizes[0], sizes[1]


def why_window_unfit(size: Sequence[int]) -> str | None:
    """Returns None if an index into a window of this size fits into one byte, else the reason."""
    if math.prod(size) > 255:
        return f"it takes windows of at most 255 values, and the window is {tuple(size)}"
    return None


def why_unsupported(
    *,
    compute_capability: tuple[int, int] | None,
    shape: tuple[int, int, int, int],
    window: Window,
    dtype: Any,
) -> str | None:
    """Returns None if the kernels can run on x [B, H, W, C], forward and backward, else the reason."""
    if reason := cuda_library.why_unfit(compute_capability, dtype):
        return reason
    if reason := why_window_unfit(window.size):
        return reason
    images, height, width, channels = shape
    out = window.result(height, width)
    if min(out) < 1:
        return f"the result has {out[0]} rows and {out[1]} columns"
    for size, (before, _), length, stride, count in zip(
        window.size, window.padding, (height, width), window.strides, out, strict=True
    ):
        if before >= size or (count - 1) * stride - before >= length:
            return f"a window lies in the padding {window.padding} alone"
    if images * channels * max(height * width, math.prod(out)) > MAX_ELEMENTS:
        return f"it takes at most {MAX_ELEMENTS} values, and x of shape {shape} has more"
    return cuda_library.why_unavailable()


def forward(
    x: jax.Array, *, window: Window, save_places: bool
) -> tuple[jax.Array, jax.Array | None]:
    """Returns (y, places) of x [B, H, W, C]; a place is the index of y in its window, in uint8."""
    cuda_library.register()
    shape = (x.shape[0], *window.result(*x.shape[1:3]), x.shape[3])
    call = jax.ffi.ffi_call(
        "jaxfused_max_pool",
        (
            jax.ShapeDtypeStruct(shape, x.dtype),
            jax.ShapeDtypeStruct(shape if save_places else (0,), jnp.uint8),
        ),
    )
    y, places = call(x, **_attributes(window))
    return y, places if save_places else None


def backward(
    dy: jax.Array, places: jax.Array, *, size: tuple[int, int], window: Window
) -> jax.Array:
    """Returns the gradient of x [B, *size, C]."""
    cuda_library.register()
    shape = (dy.shape[0], *size, dy.shape[3])
    call = jax.ffi.ffi_call("jaxfused_max_pool_gradient", jax.ShapeDtypeStruct(shape, dy.dtype))
    return call(dy, places, **_attributes(window))


def _attributes(window: Window) -> dict[str, Any]:
    (top, _), (left, _) = window.padding
    return dict(
        height=np.int64(window.size[0]),
        width=np.int64(window.size[1]),
        row_stride=np.int64(window.strides[0]),
        column_stride=np.int64(window.strides[1]),
        top=np.int64(top),
        left=np.int64(left),
    )
