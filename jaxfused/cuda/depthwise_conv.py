"""Depthwise convolution by the CUDA kernels of ffi/depthwise_conv.cu.

A block has 64 channels of a tile of the output, with the halo of its input in shared memory, and sums in
registers. A convolution along one axis has the images as its rows.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfused.cuda import library

KERNELS = {
    (3, 3): (1, 2),
    (5, 5): (1, 2),
    (7, 7): (1,),
    (1, 3): (1,),
    (1, 4): (1,),
    (1, 7): (1,),
}
"""The sizes (height, width) that there are kernels for, and their strides."""
MAX_SIZE = 2**28
"""Of the pixels of all images, and of the channels."""

_BLOCK_CHANNELS = 64
_PATCH = (4, 8)
_WARPS = 4
_SHARED_KILOBYTES = {(7, 5): 64, (8, 0): 163, (8, 6): 99, (8, 7): 163, (8, 9): 99, (12, 0): 99}
"""Of a block, by compute capability; 227 for those that are not listed."""


@dataclass(frozen=True)
class Window:
    """What a convolution does to rows and columns."""

    kernel: tuple[int, int]
    stride: int
    padding: tuple[tuple[int, int], tuple[int, int]]
    """Zeros (before, after) the rows and the columns."""

    def result(self, height: int, width: int) -> tuple[int, int]:
        """The rows and columns of the result."""
        sizes = [
            (size + sum(padding) - kernel) // self.stride + 1
            for size, padding, kernel in zip(
                (height, width), self.padding, self.kernel, strict=True
            )
        ]
        return sizes[0], sizes[1]

    def transposed(self) -> "Window":
        """The window of the input's gradient, which a window of stride 1 has."""
        assert self.stride == 1
        rows, columns = (
            (kernel - 1 - before, kernel - 1 - after)
            for kernel, (before, after) in zip(self.kernel, self.padding, strict=True)
        )
        return Window(self.kernel, 1, (rows, columns))


def why_unsupported(
    *,
    compute_capability: tuple[int, int] | None,
    images: int,
    height: int,
    width: int,
    channels: int,
    window: Window,
    dtype: Any,
    residual_dtype: Any = None,
) -> str | None:
    """None where the convolution and its gradients can run, else the reason."""
    reason = library.why_unfit(compute_capability)
    if reason is not None:
        return reason
    assert compute_capability is not None
    if reason := library.why_dtype_unfit(dtype):
        return reason
    if reason := library.why_residual_unfit(dtype, residual_dtype):
        return reason
    if window.stride not in KERNELS.get(window.kernel, ()):
        rows, columns = window.kernel
        return f"there is no kernel of {rows} x {columns} with stride {window.stride}"
    if channels % 2:
        return f"it takes an even number of channels, and x has {channels}"
    # Zeros beyond the kernel's reach would make the gradient's padding negative.
    reach = [k - 1 for k in window.kernel]
    if any(not 0 <= p <= r for pair, r in zip(window.padding, reach, strict=True) for p in pair):
        return f"it pads with 0 to {reach} zeros on a side, and padding is {window.padding}"
    out = window.result(height, width)
    if min(out) < 1:
        return f"the result has {out[0]} rows and {out[1]} columns"
    if max(images * math.prod(out), images * height * width, channels) >= MAX_SIZE:
        return f"it takes less than {MAX_SIZE} pixels and channels, and x has more"
    shared = _SHARED_KILOBYTES.get(compute_capability, 227) * 1024
    if _tile_bytes(window, jnp.dtype(dtype).itemsize) > shared:
        return "a tile does not fit into the shared memory of this GPU"
    return library.why_unavailable()


def _tile_bytes(window: Window, itemsize: int) -> int:
    """What the largest tile of x and dy takes, whichever way the warps are arranged."""
    pixels = max(
        math.prod(
            (patch * warps - 1) * window.stride + kernel
            for patch, warps, kernel in zip(_PATCH, (_WARPS // n, n), window.kernel, strict=True)
        )
        for n in (1, 2, 4)
    )
    return (pixels + _WARPS * math.prod(_PATCH)) * _BLOCK_CHANNELS * itemsize


def conv(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    window: Window,
    activation: str | None,
    save_preactivation: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """(y, z) of x [B, H, W, C] and w [kh, kw, C]; y is the activation of z, which may be None."""
    library.register()
    shape = (x.shape[0], *window.result(*x.shape[1:3]), x.shape[3])
    absent = jnp.zeros_like(x, shape=(0,), dtype=jnp.float32)
    call = jax.ffi.ffi_call(
        "jaxfused_depthwise_conv",
        (
            jax.ShapeDtypeStruct(shape, x.dtype),
            jax.ShapeDtypeStruct(shape if save_preactivation else (0,), x.dtype),
        ),
    )
    y, z = call(
        x,
        w.astype(jnp.float32).reshape(-1, x.shape[3]),
        absent if bias is None else bias,
        absent if residual is None else residual,
        **_attributes(window),
        activation=activation or "none",
    )
    return y, z if save_preactivation else None


def weight_gradient(
    x: jax.Array, dy: jax.Array, *, window: Window, multiprocessors: int
) -> tuple[jax.Array, jax.Array]:
    """(dw [kh, kw, C], dbias [C]) in float32, from x and the gradient of z."""
    library.register()
    channels = x.shape[3]
    blocks = max(1, 2 * multiprocessors // math.ceil(channels / _BLOCK_CHANNELS))
    tiles = math.ceil(math.prod(dy.shape[:3]) / (_WARPS * math.prod(_PATCH)))
    taps = math.prod(window.kernel)
    shape = (min(blocks, tiles), taps + 1, channels)
    call = jax.ffi.ffi_call(
        "jaxfused_depthwise_conv_weights", jax.ShapeDtypeStruct(shape, jnp.float32)
    )
    sums = call(x, dy, **_attributes(window)).sum(0)
    return sums[:taps].reshape(*window.kernel, channels), sums[taps]


def _attributes(window: Window) -> dict[str, Any]:
    (top, _), (left, _) = window.padding
    return dict(
        height=np.int64(window.kernel[0]),
        width=np.int64(window.kernel[1]),
        stride=np.int64(window.stride),
        top=np.int64(top),
        left=np.int64(left),
    )
