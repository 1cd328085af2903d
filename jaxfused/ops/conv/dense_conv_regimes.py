"""Rules for where cuDNN's dense convolution is faster than this package's kernels, by sizes.

The thresholds come from the recorded sweeps of an H200 and an H100 (`python -m benchmarks.choice.replay`
judges a change of them); `jaxfused.tune` measures what they leave open.
"""

import math

from jaxfused.runtime.estimate import Rule
from pallas_kernels.conv.conv import ConvCall

_FEW_CHANNELS = 48
"""Channels of x below which cuDNN is faster than Pallas with two spatial axes (not with three)."""
FEW_VALUES, _LONG_SUM = 2**16, 4096
"""Values of a result up to which cuDNN, which splits sums among CTAs, is faster, if each value sums more
than _LONG_SUM products (taps * channels) in a dgrad of images, or twice as many in a forward.
"""
_STRIDED_CHANNELS, _STRIDED_PRODUCTS = 64, 6e8
"""Channels of x, and multiplications, above which cuDNN's dgrad of a strided window is faster."""


def rule(call: ConvCall, *, of_weights: bool = False) -> Rule:
    """Returns which of Pallas and XLA is expected to be faster for a window of several weights.

    Args:
      call: shapes of the convolution, or of its dgrad if flipped.
      of_weights: True for the wgrad of `call`.
    """
    why = why_cudnn(call, of_weights=of_weights)
    if why is not None:
        return Rule(("xla",), why)
    sizes = f"{call.channels} channels, {call.features} features, {math.prod(call.result)} pixels"
    return Rule(("pallas",), f"the kernel is faster than cuDNN at {sizes}")


def why_strided_cudnn(products: int, channels: int) -> str | None:
    """Returns why cuDNN's dgrad of a strided window is faster, or None."""
    if channels <= _STRIDED_CHANNELS or products < _STRIDED_PRODUCTS:
        return None
    return (
        f"cuDNN's dgrad of a strided window is faster with more than {_STRIDED_CHANNELS} channels and"
        f" {_STRIDED_PRODUCTS:.0e} multiplications, and there are {channels} and {products:.0e}"
    )


def why_cudnn(call: ConvCall, *, of_weights: bool = False) -> str | None:
    """Returns why cuDNN is faster (in dgrad if `call.flipped`, in wgrad if `of_weights`), or None."""
    is_dilated = max(call.window.dilation) > 1
    if of_weights or (call.flipped and is_dilated):
        return None
    channels, values = call.channels, math.prod(call.result) * call.features
    is_volume, length = len(call.window.kernel) > 2, call.window.taps * channels
    if channels < _FEW_CHANNELS and not is_volume:
        return f"cuDNN is faster with fewer than {_FEW_CHANNELS} channels, and there are {channels}"
    longest = _LONG_SUM if call.flipped else 2 * _LONG_SUM
    if values <= FEW_VALUES and length > longest and not (call.flipped and is_volume):
        return (
            f"cuDNN is faster at {FEW_VALUES} values or fewer that are sums of more than {longest},"
            f" and there are {values} sums of {length}"
        )
    return None
