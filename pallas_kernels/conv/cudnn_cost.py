"""The predicted time of a convolution in XLA's program: cuDNN's kernel, and XLA's around it.

As in `pallas_kernels.conv.cost`. Fitted to 106 times of 46 convolutions (benchmarks/LAB.md, 2026-11-26).
"""

import math
from dataclasses import dataclass

from pallas_kernels.activation import ARITHMETIC
from pallas_kernels.conv.cost import at_once
from pallas_kernels.gemm.speeds import H200
from pallas_kernels.gemm.xla_cost import xla_pass


@dataclass(frozen=True)
class _Speeds:
    """Times of cuDNN on a Hopper GPU in microseconds, and factors."""

    launch: float = 3.4
    step: float = 0.12
    """Time of a step of 64 numbers along the sums of a tile of 128 pixels, however few tiles there
    are."""
    crowded_step: float = 0.3
    """Time that a tile of 128 features on each SM adds to a step."""
    crowded_narrow_step: float = 0.2
    """Time that a tile of 64 features on each SM adds to a step."""
    few_channels: float = 2.4
    """Factor of fewer than 64 channels, no multiple of 32, for which cuDNN has kernels of an older GPU
    alone."""
    large_window: float = 1.8
    """Factor of windows of more than 3 x 3, for which it has older kernels too."""
    large_window_of_input: float = 1.2
    longest: int = 128
    """Steps from which on few tiles are cut into two parts."""
    of_input: float = 1.4
    """Time that dgrad adds to start and to end."""
    weights: float = 1.15
    """Factor of wgrad, with the sum of its parts."""
    weights_launch: float = 8.0
    turn: float = 1.4
    """Time of XLA's kernel that transposes the weights, or their gradient."""
    turned_weight: float = 1.3e-6
    """Time that each weight adds to `turn`."""
    volume: float = 11.0
    """Time of the kernels around images with three axes, whose channels are moved ahead and back."""
    volume_byte: float = 2e-6
    """Time of each byte that these kernels read or write."""
    volume_weight: float = 4.5e-6
    """Time of each weight that these kernels move."""
    dilated: float = 16.0
    """Factor of the gradients of a dilated window, both of which took 30 times as long as ours."""
    strided_launch: float = 8.0
    """Time to start and to end dgrad of a window with strides, whose weights XLA transposes before."""
    strided_multiplication: float = 3.2e-9
    """Time of a multiply-add of dgrad of a window with strides."""
    strided_narrow_multiplication: float = 7e-9
    """`strided_multiplication` where the image has 64 channels or fewer."""
    residual: float = 0.5
    """Share of a residual's traffic that its convolution does not hide."""


_SPEEDS = _Speeds()


@dataclass(frozen=True)
class Work:
    """A convolution, or a gradient of one, as XLA's program has cuDNN compute it."""

    pixels: int
    """Pixels of the result."""
    channels: int
    features: int
    taps: int
    """Weights of the window."""
    itemsize: int
    traffic: int
    """Bytes of both images."""
    axes: int
    """Spatial axes of an image."""
    padded_bytes: int = 0
    """Bytes of an image that XLA pads beforehand, as cuDNN pads alike on both sides."""
    of_weights: bool = False
    """True for wgrad."""
    of_input: bool = False
    """True for dgrad, whose weights are transposed for the forward."""
    dilated: bool = False


def convolution(work: Work, multiprocessors: int) -> float:
    """Microseconds of cuDNN's convolution with XLA's kernels around it."""
    columns = _columns(work.features)
    rounds, active, steps = _tiles(work, columns, multiprocessors)
    crowded = _SPEEDS.crowded_step if columns > 64 else _SPEEDS.crowded_narrow_step
    if work.axes < 3 and work.taps > 9:
        of_input = work.of_input
        crowded *= _SPEEDS.large_window_of_input if of_input else _SPEEDS.large_window
    compute = rounds * steps * (_SPEEDS.step + active * crowded)
    compute *= _SPEEDS.few_channels if work.channels < 64 and work.channels % 32 else 1.0
    if work.dilated and (work.of_weights or work.of_input):
        compute *= _SPEEDS.dilated
    launch = _SPEEDS.weights_launch if work.of_weights else _SPEEDS.launch
    launch += _SPEEDS.of_input if work.of_input else 0.0
    return launch + at_once(compute, work.traffic * H200.memory_byte) + _around(work)


def strided_input_gradient(multiplications: int, channels: int) -> float:
    """Microseconds of the gradient of the picture where the window has strides.

    Args:
      multiplications: of numbers.
      channels: of the picture.
    """
    narrow = channels <= 64
    rate = _SPEEDS.strided_narrow_multiplication if narrow else _SPEEDS.strided_multiplication
    return _SPEEDS.strided_launch + multiplications * rate


def _tiles(work: Work, columns: int, multiprocessors: int) -> tuple[float, float, float]:
    """Rounds of tiles, the part of the multiprocessors that has one, and the steps of a tile."""
    if work.of_weights:
        tiles = math.ceil(work.taps * work.channels / _TILE) * columns / _TILE
        # The sums are cut into parts for all multiprocessors.
        return (
            tiles / multiprocessors,
            1.0,
            work.pixels * work.itemsize / _STEP_BYTES * _SPEEDS.weights,
        )
    tiles = math.ceil(work.pixels / _TILE) * max(1.0, columns / _TILE)
    rounds = tiles / multiprocessors
    steps = work.taps * work.channels * work.itemsize / _STEP_BYTES
    if 2 * tiles <= multiprocessors and steps > _SPEEDS.longest:
        steps = steps / 2 + _STEPS_OF_SUM
    return math.ceil(rounds) if rounds <= 2 else rounds, min(1.0, rounds), steps


def _around(work: Work) -> float:
    """XLA's kernels that move the pictures and the weights into cuDNN's order, and pad."""
    total, weights = 0.0, work.taps * work.channels * work.features
    if work.axes > 2:
        total += _SPEEDS.volume + work.traffic * _SPEEDS.volume_byte
        total += weights * _SPEEDS.volume_weight
    elif not work.of_input:
        total += _SPEEDS.turn + weights * _SPEEDS.turned_weight
    if work.padded_bytes:
        total += H200.xla_pass + 2 * work.padded_bytes * H200.xla_pass_byte
    return total


_TILE = 128
"""Pixels of cuDNN's tiles, and features where there are many."""
_STEP_BYTES = 128
"""Bytes of the sums' operands that a step takes."""
_STEPS_OF_SUM = 8
"""Steps that take as long as adding up the parts of a sum."""


def _columns(features: int) -> int:
    """The features that cuDNN's tiles have in all: those of 64, or of 128, in whole tiles."""
    grain = 64 if features <= 64 or features % 64 == 0 else _TILE
    return math.ceil(features / grain) * grain


def epilogue(elements: int, itemsize: int, activation: str | None, *, residual: bool) -> float:
    """Microseconds that XLA's program takes for what follows a convolution."""
    if activation in (None, "relu"):
        moved = elements * itemsize * _SPEEDS.residual if residual else 0.0
        return moved * H200.xla_pass_byte
    streams = 3 if residual else 2
    slow = activation == "gelu_erf"
    evaluations = int(activation not in (*ARITHMETIC, "quick_gelu", "silu", "sigmoid"))
    return xla_pass(elements, streams * itemsize, evaluations, slow_activation=slow)
