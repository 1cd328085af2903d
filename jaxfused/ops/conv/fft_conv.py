"""conv where each channel has a long window of its own, if Fourier transforms are faster."""

import math
from typing import Any

import jax

from jaxfused import dispatch
from jaxfused.ops.conv import conv_xla, fft_conv_xla
from jaxfused.ops.conv.depthwise_conv1d_cuda import TAPS
from jaxfused.ops.conv.depthwise_conv_cuda import KERNELS, Window
from jaxfused.runtime import sharding
from jaxfused.runtime.estimate import Times
from jaxfused.runtime.gate import choose_without_stages
from jaxfused.runtime.shapes import why_symbolic

Padding = fft_conv_xla.Padding


def padding_of(x: Any, window: Window) -> Padding:
    """Returns the zeros around each spatial axis of x. The window has two axes, x may have only one."""
    return window.padding[-(x.ndim - 2) :]


def why_not(device: dispatch.Device, x: jax.Array, w: jax.Array, window: Window) -> str | None:
    """Returns None if transforms are faster for x [B, *spatial, C], w [*kernel, 1, C], else why not."""
    if device.compute_capability is None:
        return "there is no GPU"
    if window.stride > 1:
        return f"transforms give every value, and the stride is {window.stride}"
    padding = padding_of(x, window)
    sizes = zip(padding, w.shape[:-2], strict=True)
    if any(not 0 <= p < k for pair, k in sizes for p in pair):
        return f"zeros go beyond the window, and padding is {padding}"
    if (unknown := why_symbolic(x)) is not None:
        return unknown
    if x.size == 0 or min(window.result(*(1, *x.shape[1:-1])[-2:])) < 1:
        return "the result has no values"
    if not sharding.is_in_one_piece(x, w):
        return "XLA's partitioner gathers what is transformed"
    size = _transformed(x, w, window)
    if size >= _MOST_VALUES:
        return f"less than {_MOST_VALUES} values are transformed, and this takes {size}"
    transforms, direct = _times(x, w, window)
    if transforms < direct:
        return None
    return f"transforms are expected to take {transforms:.0f} us, and XLA's sums {direct:.0f}"


def fourier_conv(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    window: Window,
    activation: str | None,
) -> jax.Array:
    """Returns the convolution of x [B, *spatial, C] with w [*kernel, 1, C], with its epilogue."""
    reasons = dict.fromkeys(("pallas", "cuda"), "transforms are XLA's") | {"xla": None}
    transforms, direct = _times(x, w, window)
    note = f"without transforms XLA would take {direct:.0f} us"
    estimate = Times({"xla": transforms}, note)
    choose_without_stages("conv by Fourier transforms", None, reasons, x, w, estimate=estimate)
    y = fft_conv_xla.conv(x, w[..., 0, :].astype(x.dtype), padding_of(x, window))
    return conv_xla.finish(y, bias, residual, activation=activation)


def _transformed(x: jax.Array, w: jax.Array, window: Window) -> int:
    return fft_conv_xla.transformed_size(x, w.shape[:-2], padding_of(x, window))


def _times(x: jax.Array, w: jax.Array, window: Window) -> tuple[float, float]:
    """Returns the expected microseconds of transforms, and of XLA's direct sums."""
    return _START + _transformed(x, w, window) * _OF_VALUE, _directly(x.size, window.kernel)


def _directly(size: int, kernel: tuple[int, int]) -> float:
    """Returns the microseconds of direct sums for `size` values; 0 if the window has a fast kernel."""
    along_one_axis = kernel[0] == 1 and kernel[1] in TAPS
    if kernel in KERNELS or along_one_axis or (min(kernel) > 1 and max(kernel) <= _SMALL):
        return 0.0
    weights = math.prod(kernel)
    of_rows = _OF_RESULT + weights * _OF_WEIGHT
    if min(kernel) > 1:
        return max(_LEAST, size * of_rows)
    return size * min(of_rows, _OF_LINE + weights * _OF_WEIGHT_OF_LINE)


_SMALL = 7
_START, _OF_VALUE = 15.0, 31e-6
_LEAST, _OF_RESULT, _OF_WEIGHT = 60.0, 54e-6, 0.95e-6
_OF_LINE, _OF_WEIGHT_OF_LINE = 31e-6, 2.6e-6
"""Microseconds, measured on an H100 at 35 shapes. Transforms: the start of ten kernels, and each value.
XLA's own convolution: at least, each value, and each value per weight; the latter two for short windows
along one axis. Its gradient of the weights takes a millisecond even of few values."""
_MOST_VALUES = 2**28
"""Largest number of values, whose transforms take 4 GB."""
