"""Depthwise convolution along one axis by the CUDA kernels of ffi/conv/depthwise_conv1d.cu.

A thread computes a range of steps of one sequence. The gradient's kernel recomputes the activation's
input from x, which it reads anyway.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfused.runtime import cuda_library

TAPS = (2, 3, 4, 5, 7)
"""Window lengths of the kernels, all of stride 1."""
MAX_STEPS = 2**28
"""Steps of all sequences together, and channels, are fewer than this."""

_FORWARD_THREADS, _GRADIENT_THREADS = 512, 384
"""Threads that an SM's registers allow to run at a time, in the forward and in the gradient."""
_CHANNELS_OF_THREAD = 4
_LEAST_STEPS = 32
"""Fewest steps of a thread's piece of a sequence; a piece also reads taps - 1 inputs before it."""


def why_unsupported(
    *,
    compute_capability: tuple[int, int] | None,
    images: int,
    length: int,
    channels: int,
    taps: int,
    padding: tuple[int, int],
    dtype: Any,
    residual_dtype: Any = None,
) -> str | None:
    """Returns None if the convolution and its gradient can run, else the reason."""
    if reason := cuda_library.why_unfit(compute_capability, dtype, residual_dtype):
        return reason
    if taps not in TAPS:
        return f"there is no kernel of {taps} taps"
    # dgrad pads with taps - 1 - zeros, which must not be negative.
    if any(not 0 <= zeros < taps for zeros in padding):
        return f"it pads with 0 to {taps - 1} zeros on a side, and padding is {padding}"
    if length + sum(padding) < taps:
        return f"the result has {length + sum(padding) - taps + 1} steps"
    if max(images * (length + sum(padding)), channels) >= MAX_STEPS:
        return f"it takes less than {MAX_STEPS} steps and channels, and x has more"
    return cuda_library.why_unavailable()


def conv(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    padding: tuple[int, int],
    activation: str | None,
    multiprocessors: int,
) -> jax.Array:
    """Returns the activation of x [B, T, C] convolved with w [taps, C], plus bias and residual."""
    cuda_library.register()
    images, length, channels = x.shape
    steps = length + sum(padding) - w.shape[0] + 1
    call = jax.ffi.ffi_call(
        "jaxfused_depthwise_conv1d", jax.ShapeDtypeStruct((images, steps, channels), x.dtype)
    )
    return call(
        x,
        w,
        _or_absent(bias),
        _or_absent(residual),
        left=np.int64(padding[0]),
        pieces=np.int64(_pieces(images, steps, channels, _FORWARD_THREADS * multiprocessors)),
        activation=activation or "none",
    )


def gradient(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    dy: jax.Array,
    other: jax.Array | None,
    *,
    padding: tuple[int, int],
    activation: str | None,
    multiprocessors: int,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Returns (dx, dw [taps, C], dbias [C], dresidual or None); dw and dbias are float32.

    `other`, another gradient of x, is added to dx. dresidual is None without a residual.
    """
    cuda_library.register()
    images, length, channels = x.shape
    taps = w.shape[0]
    resident = _GRADIENT_THREADS * multiprocessors
    pieces = _pieces(images, length + padding[0], channels, resident)
    call = jax.ffi.ffi_call(
        "jaxfused_depthwise_conv1d_backward",
        (
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct((0,) if residual is None else dy.shape, x.dtype),
            jax.ShapeDtypeStruct((images * pieces, taps + 1, channels), jnp.float32),
        ),
    )
    dx, dz, parts = call(
        x,
        w,
        _or_absent(bias),
        _or_absent(residual),
        dy,
        _or_absent(other),
        left=np.int64(padding[0]),
        pieces=np.int64(pieces),
        activation=activation or "none",
    )
    # XLA fuses each slice with its sum. One sum of all partial sums, sliced afterwards, would take more
    # kernels.
    dw, dbias = jnp.sum(parts[:, :taps], axis=0), jnp.sum(parts[:, taps], axis=0)
    return dx, dw, dbias, None if residual is None else dz


def _or_absent(operand: jax.Array | None) -> jax.Array:
    return jnp.zeros((0,), jnp.float32) if operand is None else operand


def _pieces(images: int, steps: int, channels: int, resident: int) -> int:
    """Returns the pieces into which each sequence is cut, so that all fill `resident` threads once."""
    of_image = math.ceil(channels / _CHANNELS_OF_THREAD)
    return max(1, min(resident // (images * of_image), steps // _LEAST_STEPS))
