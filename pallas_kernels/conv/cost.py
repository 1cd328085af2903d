"""A cost model: the predicted time of a convolution's kernel with a config.

Like `pallas_kernels.gemm.cost`, the model has few terms, each with a reason, and constants fitted to one
device.
"""

import math
from dataclasses import dataclass

from pallas_kernels.gemm.matmul_config import CONSUMERS
from pallas_kernels.gemm.speeds import H200


@dataclass(frozen=True)
class Speeds:
    """Times of a device in microseconds, and factors; fitted to an H200 in bfloat16."""

    launch: float = 2.7
    multiplication: float = 2.4e-7
    """Time of a multiply-add on one SM."""
    narrow: float = 1.14
    """Factor of `multiplication` with tiles of 64 columns (features): a WGMMA reads the same pixels from
    shared memory for fewer results than with wider tiles."""
    narrowest: float = 1.45
    """Factor of `multiplication` with tiles of 32 columns and fewer."""
    few_channels: float = 1.3
    """Factor of a K step if x has fewer channels than a pipeline stage holds; zeros fill the rest."""
    in_pieces: float = 2.0
    """Factor of a K step if features are no multiple of 16: weights are copied 8 columns at a time."""
    strided: float = 1.5
    """Factor of a K step of a strided convolution, whose pixels are not adjacent in memory."""
    cached_byte: float = 5.8e-8
    """Time of a byte that the SMs copy from the L2 cache."""
    starved: tuple[float, float, float] = (1.6, 1.3, 1.03)
    """Factors of a K step with one, two or three pipeline stages: tensor cores then wait for copies."""
    element: float = 9.4e-5
    """Time of an epilogue for each element of a warpgroup's tile."""
    read_byte: float = 6.7e-5
    """Time of an epilogue for each byte that it reads, such as a residual's."""
    written_byte: float = 2.3e-5
    """Time of an epilogue for each byte that it writes beyond 2 bytes an element (see `element`)."""
    activation: float = 1.3e-4
    """Time of an epilogue for each activation of each element."""
    both_store: float = 1.45
    """Factor of an epilogue's time if both consumer warpgroups run theirs at the same time."""
    memory_byte: float = 1.54e-7
    """Time of a byte of the arrays, each counted once; the L2 cache serves some of them."""
    overlap: float = 2.4
    """Exponent p of the norm (a^p + b^p)^(1/p) that two overlapping times a and b take together."""
    weights_multiplication: float = 3.05e-7
    """Time of a multiply-add of wgrad on one SM; its left operand, x, is transposed."""
    weights_wide: float = 1.16
    """Factor of `weights_multiplication` with tiles of more than 64 features, since a WGMMA reads only
    64 of them."""
    weights_ends: float = 0.8
    """Time for the first operands to arrive and the last results to be stored."""
    weights_sum: float = 6 / 3.6e6
    """Time for XLA to add one element of one CTA's partial gradient, in the layout of the weights."""
    weights_pixels: int = 384
    """Pixels that the pipeline stages of wgrad must hold together so that no K step waits for copies."""


SPEEDS = Speeds()


@dataclass(frozen=True)
class Work:
    """Sizes of a convolution in this package's kernel: tiles, pipeline steps and bytes."""

    tiles: int
    """Number of tiles of the result, over all CTAs."""
    rows: int
    """Pixels of a tile of the result."""
    columns: int
    """Features of a tile of the result."""
    slots: int
    """K steps of a tile, each of which fills a pipeline stage."""
    slot_bytes: float
    """Bytes that are copied for a pipeline stage."""
    multiplications_of_slot: int
    stages: int
    """Number of pipeline stages."""
    shared_tile: bool
    """True if both warpgroups compute one tile and store it at the same time."""
    read_bytes: int
    """Bytes that the epilogue reads for each element."""
    written_bytes: int
    activations: int
    memory_bytes: int
    """Bytes of all arrays, each read or written once."""
    few_channels: bool = False
    """True if channels do not fill a pipeline stage."""
    in_pieces: bool = False
    """True if the features are no multiple of 16."""
    strided: bool = False


def kernel(work: Work, multiprocessors: int) -> float:
    """Returns the predicted microseconds of the convolution's kernel."""
    speeds = SPEEDS
    multiplied = work.multiplications_of_slot * speeds.multiplication
    if work.columns <= _NARROW:
        multiplied *= speeds.narrow if work.columns > _NARROW // 2 else speeds.narrowest
    readers = min(work.tiles, multiprocessors)
    slot = at_once(multiplied, work.slot_bytes * readers * speeds.cached_byte)
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
    # With fewer tiles than SMs, fewer SMs share the bandwidth of stores, which take down to half as long
    # as with all SMs.
    stored *= (1 + readers / multiprocessors) / 2
    rounds = math.ceil(work.tiles / multiprocessors)
    if work.shared_tile:
        compute = rounds * (product + speeds.both_store * stored)
    else:
        # One warpgroup multiplies while the other runs its epilogue, in alternation (ping-pong).
        compute = rounds * at_once(product, (product + stored) / CONSUMERS) + stored
    return speeds.launch + at_once(compute, work.memory_bytes * speeds.memory_byte)


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
    """Returns the predicted microseconds of wgrad.

    Args:
      multiplications: multiply-adds of a K step.
      wide: True if a tile has more than 64 features.
      pixels_in_ring: number of pixels that all pipeline stages hold.
      steps: number of K steps of a tile.
      rounds: number of tiles that a CTA computes one after the other.
      parts: number of CTAs that share a tile, each with some of the pixels (split-K).
      sums: number of the gradient's elements.
    """
    speeds = SPEEDS
    step = multiplications * speeds.weights_multiplication * (speeds.weights_wide if wide else 1.0)
    step *= max(1.0, speeds.weights_pixels / pixels_in_ring)
    product = rounds * steps * step + speeds.weights_ends
    return speeds.launch + product + H200.xla_pass + parts * sums * speeds.weights_sum


def at_once(a: float, b: float) -> float:
    """Returns the microseconds of two overlapping times; the longer one hides most of the other."""
    return (a**SPEEDS.overlap + b**SPEEDS.overlap) ** (1 / SPEEDS.overlap)
