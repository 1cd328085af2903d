"""Depthwise conv of long windows by Fourier transforms, where these are faster."""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxfused import dispatch
from jaxfused.ops.conv import conv_xla, fft_conv_xla
from jaxfused.ops.conv.depthwise_conv1d_cuda import TAPS
from jaxfused.ops.conv.depthwise_conv_cuda import KERNELS, Window
from jaxfused.runtime import sharding
from jaxfused.runtime.gate import choose_without_stages
from jaxfused.runtime.runner import Axes, Results, Runner
from jaxfused.runtime.shapes import why_symbolic

Padding = fft_conv_xla.Padding


def padding_of(x: Any, window: Window) -> Padding:
    """Returns the zeros around each spatial axis of x [B, *spatial, C]; `window` always has two axes."""
    return window.padding[-(x.ndim - 2) :]


@dataclass(frozen=True)
class Sums:
    """Config of a convolution in XLA: by Fourier transforms, or by direct sums."""

    transformed: bool


def choice(run: Runner, x: jax.Array, w: jax.Array, window: Window) -> dispatch.Choice | None:
    """Returns the decision for transforms or direct sums, or None if only direct sums can run."""
    if run.implementation is not None or _why_not(run.device, x, w, window) is not None:
        return None
    return run.choice(_Forward(window), x, w)


def is_transformed(choice: dispatch.Choice) -> bool:
    """Returns whether the decision is for Fourier transforms."""
    config = choice.config or choice.kernel.configs("xla", None, *choice.operands)[0]
    return bool(config.transformed)


def _why_not(device: dispatch.Device, x: jax.Array, w: jax.Array, window: Window) -> str | None:
    """Returns why Fourier transforms cannot run the convolution of x with w, or None if they can."""
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
    if _directly(x.size, window.kernel) == 0.0:
        return "the window has a kernel of its own"
    return None


@dataclass(frozen=True)
class _Forward:
    """Convolves in XLA by transforms or by direct sums, so that `jaxfused.tune` can time both."""

    window: Window

    @property
    def name(self) -> str:
        return "conv by Fourier transforms"

    def axes(self, x, w) -> Axes:
        spatial = x.ndim - 2
        images = f"b{'hwd'[:spatial]}c"
        result = f"b{'nop'[:spatial]}c"
        return Axes((images, f"{'klm'[:spatial]}ic"), (result,), whole="hwdklmic")

    def why_not(self, device, x, w) -> Mapping[str, str | None]:
        return {"xla": None}

    def configs(self, implementation, device, x, w) -> Sequence[Hashable]:
        transforms, direct = _times(x, w, self.window)
        first = transforms < direct
        return Sums(first), Sums(not first)

    def run(self, implementation, device, x, w, config=None) -> Results:
        config = config or self.configs(implementation, device, x, w)[0]
        padding = padding_of(x, self.window)
        if config.transformed:
            return (fft_conv_xla.conv(x, w[..., 0, :].astype(x.dtype), padding),)
        strides = (self.window.stride,) * (x.ndim - 2)
        ones = (1,) * (x.ndim - 2)
        options: dict[str, Any] = dict(input_dilation=ones, kernel_dilation=ones)
        y = conv_xla.conv(
            x, w, None, None, strides=strides, padding=padding, activation=None, precision=None,
            feature_group_count=x.shape[-1], **options,
        )  # fmt: skip
        return (y,)

    def batched(self, call, axis_size, in_batched, x, w) -> None:
        return None


def fourier_conv(
    choice: dispatch.Choice,
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    window: Window,
    activation: str | None,
) -> jax.Array:
    """Convolves x [B, *spatial, C] with w [*kernel, 1, C] by Fourier transforms, with the epilogue."""
    transforms, direct = _times(x, w, window)
    why = f"transforms are XLA's, expected to take {transforms:.0f} us, and its sums {direct:.0f}"
    if choice.measured is not None:
        times = ", ".join(f"{r.microseconds:.0f} us" for r in choice.measured.ranking)
        why = f"transforms are XLA's, and were measured to be faster than its sums: {times}"
    reasons = dict.fromkeys(("pallas", "cuda"), why) | {"xla": None}
    choose_without_stages("conv by Fourier transforms", None, reasons, x, w, stages=(choice,))
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
"""Microseconds measured on an H100 at 35 shapes. Transforms: _START for ten launches, plus _OF_VALUE for
each value. Direct sums: at least _LEAST; for each value _OF_RESULT, plus _OF_WEIGHT for each weight; the
last two constants are those of short windows along one axis. XLA's direct wgrad takes a millisecond even
for few values."""
_MOST_VALUES = 2**28
"""Most values that are transformed, zeros of the padding included; their transforms take 4 GB."""
