"""What a convolution costs, predicted: here with a config, and in XLA's program.

As in `pallas_kernels.product.cost`: few terms, each with a reason, and constants for one device.
"""

import math
from dataclasses import dataclass

from pallas_kernels.product.cost import H200, xla_pass


@dataclass(frozen=True)
class Speeds:
    """Of a device, in microseconds. Those of cuDNN were fitted to an H200 in bfloat16."""

    cudnn_launch: float = 4.0
    cudnn_multiplication: float = 2.0 / 720e6
    """Of a multiplication and a sum where there are many channels."""
    cudnn_channels: float = 24.0
    """How many channels' worth of time a step takes besides: few channels are read over and over."""
    cudnn_residual: float = 0.5
    """Part of the traffic of a residual that its convolution does not hide."""


CUDNN = Speeds()


def cudnn(multiplications: float, channels: int, features: int, traffic: float) -> float:
    """Microseconds of cuDNN's convolution.

    Args:
      multiplications: of a number of x by a weight.
      channels: of x.
      features: of the result.
      traffic: bytes that are read and written once.
    """
    few = 1 + CUDNN.cudnn_channels / min(channels, features)
    compute = multiplications * CUDNN.cudnn_multiplication * few
    return CUDNN.cudnn_launch + max(compute, traffic * H200.memory_byte)


def cudnn_epilogue(
    elements: int, itemsize: int, activation: str | None, *, residual: bool
) -> float:
    """Microseconds that XLA's program takes for what follows a convolution."""
    if activation in (None, "relu"):
        moved = elements * itemsize * CUDNN.cudnn_residual if residual else 0.0
        return moved * H200.xla_pass_byte
    streams = 3 if residual else 2
    slow = activation == "gelu_erf"
    evaluations = int(activation not in ("relu2", "silu"))
    return xla_pass(elements, streams * itemsize, evaluations, slow_activation=slow)


@dataclass(frozen=True)
class Work:
    """A convolution as this package's kernel cuts it."""

    tiles: int
    rows: int
    """Of a tile; pixels of the result."""
    columns: int
    """Of a tile; features of the result."""
    slots: int
    """Of the ring that a tile takes."""
    slot_bytes: int
    """That are copied for a slot."""
    multiplications_of_slot: int
    narrow: bool
    """An instruction takes no more than 64 columns, and reads its rows as often as its columns."""
    read_bytes: int
    """Of an element of what the epilogue reads."""
    written_bytes: int
    activations: int
    memory_bytes: int
    """What has to be read and written once."""


def kernel(work: Work, multiprocessors: int) -> float:
    """Microseconds of the convolution in this package's kernel."""
    speeds = H200
    multiplied = work.multiplications_of_slot * _MULTIPLICATION * (_NARROW if work.narrow else 1.0)
    slot = max(_SLOT + multiplied, work.slot_bytes * multiprocessors * _CACHED_BYTE)
    stored = (
        work.rows
        * work.columns
        * (
            speeds.element
            + work.read_bytes * speeds.read_byte
            + max(0, work.written_bytes - 2) * speeds.written_byte
            + work.activations * speeds.activation
        )
    )
    product = work.slots * slot
    tile = max(product, (product + stored) / 2)
    compute = math.ceil(work.tiles / multiprocessors) * tile + stored
    return speeds.launch + max(compute, work.memory_bytes * speeds.memory_byte)


_SLOT = 0.06
"""Of a step, whatever is multiplied."""
_MULTIPLICATION = 2.1e-7
"""Of one that a multiprocessor carries out."""
_NARROW = 1.25
_CACHED_BYTE = 1 / 5.5e6
"""Of what all multiprocessors copy from the cache."""


def weight_gradient(*, step: float, steps: int, rounds: int, parts: int, part: float) -> float:
    """Microseconds of the gradient of the weights.

    Args:
      step: microseconds of a step of the sums.
      steps: of a tile.
      rounds: tiles that a CTA computes one after the other.
      parts: of each tile.
      part: microseconds to write one more part of all tiles, and to add it.
    """
    return H200.launch + H200.xla_pass + rounds * (steps + _FIRST_STEPS) * step + parts * part


_FIRST_STEPS = 2
"""What the first step of a tile waits for its operands, in steps."""
