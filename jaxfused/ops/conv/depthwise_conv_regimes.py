"""Rules for where XLA's depthwise convolution is faster than the kernels, by window and idle lanes.

The thresholds come from the recorded sweeps of an H200 and an H100 (`python -m benchmarks.choice.replay`
judges a change of them); `jaxfused.tune` measures what they leave open.
"""

from typing import Any

from jaxfused import dispatch
from jaxfused.ops.conv import dense_conv_regimes
from jaxfused.ops.conv.depthwise_conv_cuda import Tile, Window

_SMALL, _LARGE = 3, 7
"""Width of the 3 x 3 window, and width from which strips are faster than XLA at stride 1. Tensor-core
kernels are faster at all of their windows."""
_LEAST_USEFUL, _LEAST_USEFUL_OF_FLOAT32 = 0.7, 0.9
"""Least fraction of a 3 x 3 kernel's results inside the output at which it is faster than XLA, in 16 and
32 bits. If all are inside, XLA takes 1.45 and 1.05 times as long without an activation."""
_NARROWEST_BLOCK, _WIDEST_BLOCK, _STRIP_COLUMNS = 16, 64, 8
"""Fewest and most channels of a 3 x 3 kernel's block, and columns of a warp's strip at stride 1."""


def why_xla(device: dispatch.Device, x: Any, window: Window) -> str | None:
    """Returns why XLA is expected to be faster for x [B, H, W, C] and its gradients, or None."""
    *_, width, channels = x.shape
    if set(window.kernel) == {_SMALL}:
        useful = useful_strips(channels, width, window)
        least = _LEAST_USEFUL_OF_FLOAT32 if x.dtype.itemsize > 2 else _LEAST_USEFUL
        if useful >= least:
            return None
        return (
            f"kernels of 3 x 3 are faster where at most {1 - least:.0%} of their lanes idle, and with"
            f" {channels} channels and {width} columns {1 - useful:.0%} would"
        )
    if window.stride == 1 and min(window.kernel) >= _LARGE:
        return None
    if Tile.why_unfit(device.compute_capability, channels, window, x.dtype) is None:
        if 2 * x.size >= dense_conv_regimes.FEW_VALUES:
            return None
        return f"cuDNN starts sooner than the kernels, and x has only {x.size} values"
    rows, columns = window.kernel
    return (
        "depthwise kernels are known to be faster of few taps along one axis, of 3 x 3, on tensor cores"
        f" of 5 x 5, and from {_LARGE} x {_LARGE} at stride 1, and this one is {rows} x {columns} at"
        f" stride {window.stride}"
    )


def useful_strips(channels: int, width: int, window: Window) -> float:
    """Returns the fraction of a 3 x 3 kernel's results, per row of y, that lie inside y."""
    block = min(_WIDEST_BLOCK, max(_NARROWEST_BLOCK, 1 << (channels - 1).bit_length()))
    columns = _STRIP_COLUMNS // window.stride
    _, out_width = window.result(window.kernel[0], width)
    computed = -(-channels // block) * block * -(-out_width // columns) * columns
    return channels * out_width / computed if computed else 0.0
