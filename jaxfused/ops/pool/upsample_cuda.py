"""Bilinear upsampling by 2 and its gradient by the CUDA kernels of ffi/pool/resample.cu."""

import math
from typing import Any

import jax
import numpy as np

from jaxfused.runtime import cuda_library

MAX_ELEMENTS = 2**31 - 2**10
"""Largest number of elements of the smaller image, because the kernels index threads in 31 bits."""


def why_unsupported(
    *,
    compute_capability: tuple[int, int] | None,
    shape: tuple[int, int, int, int],
    dtype: Any,
) -> str | None:
    """Returns None if the kernels can upsample x [B, H, W, C], forward and backward, else the reason."""
    if reason := cuda_library.why_unfit(compute_capability, dtype):
        return reason
    if math.prod(shape) > MAX_ELEMENTS:
        return f"it takes at most {MAX_ELEMENTS} values, and x of shape {shape} has more"
    return cuda_library.why_unavailable()


def upsample(x: jax.Array) -> jax.Array:
    """Returns y [B, 2 H, 2 W, C] of x [B, H, W, C]."""
    images, height, width, channels = x.shape
    return _call(x, (images, 2 * height, 2 * width, channels), backward=False)


def gradient(dy: jax.Array) -> jax.Array:
    """Returns the gradient of x [B, H, W, C] from dy [B, 2 H, 2 W, C]."""
    images, height, width, channels = dy.shape
    return _call(dy, (images, height // 2, width // 2, channels), backward=True)


def _call(x: jax.Array, shape: tuple[int, ...], *, backward: bool) -> jax.Array:
    cuda_library.register()
    call = jax.ffi.ffi_call("jaxfused_upsample", jax.ShapeDtypeStruct(shape, x.dtype))
    return call(x, backward=np.bool_(backward))
