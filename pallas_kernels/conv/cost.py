"""What a convolution costs, predicted: here with a config, and in XLA's program.

As in `pallas_kernels.product.cost`: few terms, each with a reason, and constants for one device.
"""

import math
from dataclasses import dataclass

from pallas_kernels.product.cost import H200, xla_pass
from pallas_kernels.product.mainloop import CONSUMERS


@dataclass(frozen=True)
class Speeds:
    """Of a device, in microseconds. Fitted to an H200 in bfloat16."""

    launch: float = 2.7
    multiplication: float = 2.4e-7
    """Of one in a multiprocessor."""
    narrow: float = 1.14
    """Factor of those of tiles of 64 columns, whose instructions read their rows as often as these."""
    narrowest: float = 1.45
    """Likewise of 32 columns and fewer."""
    few_channels: float = 1.3
    """Factor of a step with fewer channels than a slot has room for, the rest of which is zeros."""
    in_pieces: float = 2.0
    """Factor of a step whose weights arrive in pieces of 8 features."""
    strided: float = 1.5
    """Factor of a step whose pixels are not neighbours."""
    cached_byte: float = 5.8e-8
    """Of what all multiprocessors copy from the cache."""
    starved: tuple[float, float, float] = (1.6, 1.3, 1.03)
    """Factors of a step where the ring has one slot, two or three."""
    element: float = 9.4e-5
    """Of an epilogue, for each element of a warpgroup's tile."""
    read_byte: float = 6.7e-5
    """Likewise for each byte that the epilogue reads of it."""
    written_byte: float = 2.3e-5
    """Likewise for each byte that it writes, beyond the first two."""
    activation: float = 1.8e-4
    """Likewise for an activation."""
    both_store: float = 1.45
    """Factor of an epilogue that both warpgroups run at once."""
    memory_byte: float = 1.54e-7
    """Of memory traffic. Some of it stays in the cache, for whoever reads it next."""
    overlap: float = 2.4
    """Exponent of the norm that two things take which run at once: large where one hides the other."""
    weights_multiplication: float = 3.05e-7
    """Of one of the gradient of the weights, whose operands are read across their rows."""
    weights_wide: float = 1.16
    """Factor of those of tiles with more than 64 features, whose instructions take a block each."""
    weights_ends: float = 0.8
    """For the first operands to arrive, and the last sums to leave."""
    weights_sum: float = 6 / 3.6e6
    """Of a sum in each part of it, which are added by XLA, in the order of the weights' axes."""
    weights_pixels: int = 384
    """Of all slots of the ring, so that none is waited for."""
    cudnn_launch: float = 3.4
    cudnn_step: float = 0.12
    """Of a step of 64 numbers along the sums of a tile of 128 pixels, however few tiles there are."""
    cudnn_crowded_step: float = 0.3
    """What it takes more with a tile of 128 features on each multiprocessor."""
    cudnn_crowded_narrow_step: float = 0.2
    """Likewise for tiles of 64 features."""
    cudnn_few_channels: float = 2.4
    """Factor of fewer than 64 channels, for which it has kernels of an older GPU alone."""
    cudnn_large_window: float = 1.8
    """Factor of windows of more than 3 x 3, likewise."""
    cudnn_large_window_of_input: float = 1.2
    cudnn_longest: int = 128
    """Where tiles are few and have more steps, the steps are cut into two parts."""
    cudnn_of_input: float = 1.4
    """What the gradient of the picture takes more to start and to end."""
    cudnn_weights: float = 1.15
    """Factor of the gradient of the weights, with the sum of its parts."""
    cudnn_weights_launch: float = 8.0
    cudnn_turn: float = 1.4
    """To turn the axes of the weights, or of their gradient, in a kernel of XLA's."""
    cudnn_turned_weight: float = 1.3e-6
    """Likewise, of each."""
    cudnn_volume: float = 11.0
    """Kernels around pictures with three axes, whose channels are moved ahead and back."""
    cudnn_volume_byte: float = 2e-6
    """Likewise, of what is read and written."""
    cudnn_volume_weight: float = 4.5e-6
    """Likewise, of a weight."""
    cudnn_dilated: float = 16.0
    """Factor of the gradients of a dilated window, both of which took 30 times as long as ours."""
    cudnn_residual: float = 0.5
    """Part of the traffic of a residual that its convolution does not hide."""


SPEEDS = Speeds()


@dataclass(frozen=True)
class CudnnWork:
    """A convolution, or a gradient of one, as XLA's program has cuDNN compute it."""

    pixels: int
    """Of the result."""
    channels: int
    features: int
    taps: int
    """Weights of the window."""
    itemsize: int
    traffic: int
    """Bytes of both pictures."""
    axes: int
    """Of a picture."""
    padded_bytes: int = 0
    """Of a picture that XLA pads before, as cuDNN pads alike on both sides."""
    of_weights: bool = False
    """Whether this is the gradient of the weights."""
    of_input: bool = False
    """Whether this is the gradient of the picture, whose weights are turned for the forward."""
    dilated: bool = False


def cudnn(work: CudnnWork, multiprocessors: int) -> float:
    """Microseconds of cuDNN's convolution with XLA's kernels around it."""
    speeds = SPEEDS
    weights = work.taps * work.channels * work.features
    columns = _cudnn_columns(work.features)
    if work.of_weights:
        tiles = math.ceil(work.taps * work.channels / _CUDNN_TILE) * columns / _CUDNN_TILE
        # The sums are cut into parts for all multiprocessors.
        active, rounds = 1.0, tiles / multiprocessors
        steps = work.pixels * work.itemsize / _STEP_BYTES * speeds.cudnn_weights
    else:
        tiles = math.ceil(work.pixels / _CUDNN_TILE) * max(1.0, columns / _CUDNN_TILE)
        active = min(1.0, tiles / multiprocessors)
        rounds = tiles / multiprocessors
        rounds = math.ceil(rounds) if rounds <= 2 else rounds
        steps = work.taps * work.channels * work.itemsize / _STEP_BYTES
        if 2 * tiles <= multiprocessors and steps > speeds.cudnn_longest:
            steps = steps / 2 + _STEPS_OF_SUM
    crowded = speeds.cudnn_crowded_step if columns > 64 else speeds.cudnn_crowded_narrow_step
    if work.axes < 3 and work.taps > 9:
        of_input = work.of_input
        crowded *= speeds.cudnn_large_window_of_input if of_input else speeds.cudnn_large_window
    compute = rounds * steps * (speeds.cudnn_step + active * crowded)
    compute *= speeds.cudnn_few_channels if work.channels < 64 and work.channels % 32 else 1.0
    if work.dilated and (work.of_weights or work.of_input):
        compute *= speeds.cudnn_dilated
    launch = speeds.cudnn_weights_launch if work.of_weights else speeds.cudnn_launch
    launch += speeds.cudnn_of_input if work.of_input else 0.0
    total = launch + _at_once(compute, work.traffic * H200.memory_byte)
    if work.axes > 2:
        total += speeds.cudnn_volume + work.traffic * speeds.cudnn_volume_byte
        total += weights * speeds.cudnn_volume_weight
    elif not work.of_input:
        total += speeds.cudnn_turn + weights * speeds.cudnn_turned_weight
    if work.padded_bytes:
        total += H200.xla_pass + 2 * work.padded_bytes * H200.xla_pass_byte
    return total


_CUDNN_TILE = 128
"""Pixels of cuDNN's tiles, and features where there are many."""
_STEP_BYTES = 128
"""Of the sums that a step adds up."""
_STEPS_OF_SUM = 8
"""To add up the parts of a sum takes as long."""


def _cudnn_columns(features: int) -> int:
    """The features that cuDNN's tiles have in all: those of 64, or of 128, in whole tiles."""
    grain = 64 if features <= 64 or features % 64 == 0 else _CUDNN_TILE
    return math.ceil(features / grain) * grain


def cudnn_epilogue(
    elements: int, itemsize: int, activation: str | None, *, residual: bool
) -> float:
    """Microseconds that XLA's program takes for what follows a convolution."""
    if activation in (None, "relu"):
        moved = elements * itemsize * SPEEDS.cudnn_residual if residual else 0.0
        return moved * H200.xla_pass_byte
    streams = 3 if residual else 2
    slow = activation == "gelu_erf"
    evaluations = int(activation not in ("relu2", "quick_gelu", "silu"))
    return xla_pass(elements, streams * itemsize, evaluations, slow_activation=slow)


@dataclass(frozen=True)
class Work:
    """A convolution as this package's kernel cuts it."""

    tiles: int
    """Of all CTAs."""
    rows: int
    """Of a tile: pixels of the result."""
    columns: int
    """Of a tile: features of the result."""
    slots: int
    """Of the ring that a tile takes."""
    slot_bytes: float
    """That are copied for a slot."""
    multiplications_of_slot: int
    stages: int
    """Slots of the ring."""
    shared_tile: bool
    """Both warpgroups have a part of a tile, and store it at once."""
    read_bytes: int
    """Of an element of what the epilogue reads."""
    written_bytes: int
    activations: int
    memory_bytes: int
    """What has to be read and written once."""
    few_channels: bool = False
    """A slot is not full of channels."""
    in_pieces: bool = False
    """The features are no multiple of 16."""
    strided: bool = False


def kernel(work: Work, multiprocessors: int) -> float:
    """Microseconds of the convolution in this package's kernel."""
    speeds = SPEEDS
    multiplied = work.multiplications_of_slot * speeds.multiplication
    if work.columns <= _NARROW:
        multiplied *= speeds.narrow if work.columns > _NARROW // 2 else speeds.narrowest
    readers = min(work.tiles, multiprocessors)
    slot = _at_once(multiplied, work.slot_bytes * readers * speeds.cached_byte)
    if work.stages <= len(speeds.starved):
        slot *= speeds.starved[work.stages - 1]
    slot *= speeds.few_channels if work.few_channels else 1.0
    slot *= speeds.in_pieces if work.in_pieces else 1.0
    slot *= speeds.strided if work.strided else 1.0
    of_element = (
        speeds.element
        + work.read_bytes * speeds.read_byte
        + max(0, work.written_bytes - 2) * speeds.written_byte
        + work.activations * speeds.activation
    )
    product = work.slots * slot
    stored = work.rows * work.columns * of_element / (CONSUMERS if work.shared_tile else 1)
    # What few tiles store meets nothing else on its way.
    stored *= (1 + readers / multiprocessors) / 2
    rounds = math.ceil(work.tiles / multiprocessors)
    if work.shared_tile:
        compute = rounds * (product + speeds.both_store * stored)
    else:
        # A warpgroup multiplies while the other one stores, and each does both in turn.
        compute = rounds * _at_once(product, (product + stored) / CONSUMERS) + stored
    return speeds.launch + _at_once(compute, work.memory_bytes * speeds.memory_byte)


_NARROW = 64


def weight_gradient(
    *,
    multiplications: int,
    wide: bool,
    pixels_in_ring: int,
    steps: int,
    rounds: int,
    parts: int,
    sums: int,
) -> float:
    """Microseconds of the gradient of the weights.

    Args:
      multiplications: of a step of the sums.
      wide: whether a tile has more than 64 features.
      pixels_in_ring: those of all its slots.
      steps: of a tile.
      rounds: tiles that a CTA computes one after the other.
      parts: of each tile.
      sums: the weights of the window, for all channels and features.
    """
    speeds = SPEEDS
    step = multiplications * speeds.weights_multiplication * (speeds.weights_wide if wide else 1.0)
    step *= max(1.0, speeds.weights_pixels / pixels_in_ring)
    product = rounds * steps * step + speeds.weights_ends
    return speeds.launch + product + H200.xla_pass + parts * sums * speeds.weights_sum


def _at_once(a: float, b: float) -> float:
    """Microseconds of two things of which one hides most of the other."""
    return (a**SPEEDS.overlap + b**SPEEDS.overlap) ** (1 / SPEEDS.overlap)
