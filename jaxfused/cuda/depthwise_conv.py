"""Depthwise convolution by the CUDA kernels of ffi/depthwise_conv.cu.

A warp has 64 channels of a strip, which is a few columns of the output, and walks down its rows with all
sums in registers. A convolution along one axis has the images as its rows.
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
MAX_PIXELS = 2**28
"""Of all images together."""
MAX_CHANNELS = 64 * 65535

_BLOCK_CHANNELS = 64
_WARPS = 4
_BLOCKS_OF_MULTIPROCESSOR = 2
"""Those of the weights' gradient that run at a time."""
_PIXELS_OF_WARP = 32
"""That a warp of it has at least, so that it has more to do than to write its sums."""


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
    if max(images * math.prod(out), images * height * width) >= MAX_PIXELS:
        return f"it takes less than {MAX_PIXELS} pixels, and x has more"
    if channels > MAX_CHANNELS:
        return f"it takes at most {MAX_CHANNELS} channels, and x has {channels}"
    return library.why_unavailable()


def conv(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    window: Window,
    activation: str | None,
    save_preactivation: bool,
    turned: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """(y, z) of x [B, H, W, C] and w [kh, kw, C]; y is the activation of z, which may be None.

    Turned by 180 degrees, a kernel gives the input's gradient.
    """
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
        w.reshape(-1, x.shape[3]),
        absent if bias is None else bias,
        absent if residual is None else residual,
        **_attributes(window),
        turned=np.bool_(turned),
        activation=activation or "none",
    )
    return y, z if save_preactivation else None


def weight_gradient(
    x: jax.Array, dy: jax.Array, *, window: Window, multiprocessors: int
) -> tuple[jax.Array, jax.Array]:
    """(dw [kh, kw, C], dbias [C]) in float32, from x and the gradient of z."""
    library.register()
    channels = x.shape[3]
    resident = _BLOCKS_OF_MULTIPROCESSOR * multiprocessors
    blocks = max(1, resident // math.ceil(channels / _BLOCK_CHANNELS))
    most = math.ceil(math.prod(dy.shape[:3]) / (_WARPS * _PIXELS_OF_WARP))
    taps = math.prod(window.kernel)
    shape = (min(blocks, most), taps + 1, channels)
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
