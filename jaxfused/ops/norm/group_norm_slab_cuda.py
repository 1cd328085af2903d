"""group_norm's forward by the CUDA kernel of ffi/norm/group_norm_slab.cu, which reads images once.

A block owns a slab (neighbouring channels of whole groups) of an image, or of a part of its pixels. It
keeps the slab in shared memory until its statistics are known. The blocks of an image's parts exchange
sums through global memory, so that all must run at the same time. For batch_norm, the batch is one image
with a group for each channel.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxfused.ops.norm.group_norm_cuda import call_forward, reads_once
from jaxfused.runtime import cuda_library

THREADS = 512
"""Threads of a block."""
_MOST_VECTORS = 64
_SHARED_BYTES = 227 * 1024
"""Bytes of shared memory of a block on a Hopper GPU."""
_FEWEST_PIXELS = 32
"""Fewest pixels of a part. With fewer, the part's mean may lie far from the image's, and merging the
parts' variances would lose bits by cancellation."""


@dataclass(frozen=True)
class Config:
    """Launch parameters of the kernel."""

    vectors: int
    """Vectors of 16 bytes in a pixel of a slab."""
    parts: int
    """Parts into which an image's pixels are split; a thread block has one part of one slab."""


def config_for(
    images: int,
    pixels: int,
    channels: int,
    itemsize: int,
    *,
    groups: int,
    compute_capability: tuple[int, int] | None,
    multiprocessors: int,
) -> Config | None:
    """Returns the fastest config that keeps x [images, pixels, channels] on chip, or None."""
    if not reads_once(compute_capability) or min(images, pixels) < 1:
        return None
    shape = (images, pixels, channels, itemsize)
    found = candidates(*shape, groups=groups, multiprocessors=multiprocessors)
    if not found:
        return None
    return min(
        found, key=lambda config: microseconds(config, *shape, multiprocessors, groups=groups)
    )


def candidates(
    images: int, pixels: int, channels: int, itemsize: int, *, groups: int, multiprocessors: int
) -> list[Config]:
    """Returns the configs for x [images, pixels, channels] whose slabs fit into shared memory."""
    vector = cuda_library.VECTOR_BYTES // itemsize
    found = []
    for vectors in range(1, _MOST_VECTORS + 1):
        columns = vectors * vector
        if channels % columns or columns % (channels // groups):
            continue
        together = multiprocessors // (images * (channels // columns))
        for parts in {1, min(together, pixels // _FEWEST_PIXELS)}:
            config = Config(vectors, parts)
            if parts >= 1 and _shared_bytes(config, pixels, itemsize) <= _SHARED_BYTES:
                found.append(config)
    return found


def _line_sums(config: Config) -> int:
    """Returns the partial sums per channel in a block's shared memory: one per warp if possible."""
    return THREADS // 32 if 32 % config.vectors == 0 else THREADS // config.vectors


def _shared_bytes(config: Config, pixels: int, itemsize: int) -> int:
    """Returns a block's bytes of shared memory: sums of its threads, statistics, and its slab of x."""
    columns = config.vectors * cuda_library.VECTOR_BYTES // itemsize
    lines = THREADS // config.vectors
    steps = math.ceil(math.ceil(pixels / config.parts) / lines)
    return (
        columns * ((_line_sums(config) | 1) + 3) * 4 + steps * THREADS * cuda_library.VECTOR_BYTES
    )


_BLOCK, _NEXT_BLOCK = 5.0, 2.6
"""Microseconds of a launch with one block per SM, and of each further block on the same SM."""
_WAIT, _WAIT_FOR_PART = 1.0, 0.015
"""Microseconds that a block waits for the other parts of its image: in all, and for each part."""
_MERGED, _SUMMED = 4.5e-4, 0.1
"""Microseconds to merge a sum of another block, and to add up one of the block's own sums."""
_TERABYTES_A_SECOND, _TERABYTES_TOGETHER = 2.8, 2.6
"""TB/s of memory: for blocks with all pixels of an image, and for blocks that wait for others' sums."""
_BLOCK_TERABYTES_A_SECOND = 0.03
_RESIDUAL = 2.2
"""Time of a residual's bytes relative to x's. It is above 1 because they are read after the statistics,
when the result waits for them."""
_SHORT = {True: ((2, 2.0),), False: ((2, 2.8), (4, 1.2))}
"""For x of at most _SMALL_BYTES (True) and larger: (vectors, factor on the transfer time of slabs with
fewer vectors of 16 bytes in a pixel)."""
_SMALL_BYTES = 4e6
"""Bytes of x up to which the L2 delivers runs of two vectors (32 bytes) as fast as longer runs."""


def microseconds(
    config: Config,
    images: int,
    pixels: int,
    channels: int,
    itemsize: int,
    multiprocessors: int,
    *,
    groups: int,
    residual: bool = False,
) -> float:
    """Returns the expected microseconds of the kernel for x [images, pixels, channels]."""
    slabs = channels * itemsize // (cuda_library.VECTOR_BYTES * config.vectors)
    blocks = images * slabs * config.parts
    size = images * pixels * channels * itemsize
    together = config.parts > 1
    rate = _TERABYTES_TOGETHER if together else _TERABYTES_A_SECOND
    rate = min(rate, blocks * _BLOCK_TERABYTES_A_SECOND)
    short = (f for vectors, f in _SHORT[size <= _SMALL_BYTES] if config.vectors < vectors)
    moved = (2 + _RESIDUAL * residual) * size * next(short, 1.0) / rate / 1e6
    slab_groups = groups // slabs
    lanes = min(32, THREADS // slab_groups)
    fixed = _BLOCK + _SUMMED * (channels // groups) * (_line_sums(config) | 1) / lanes
    if together:
        waited = _WAIT + config.parts * (_WAIT_FOR_PART + slab_groups * _MERGED)
        return fixed + waited + moved
    later = (math.ceil(blocks / multiprocessors) - 1) * _NEXT_BLOCK
    return fixed + (moved**4 + later**4) ** 0.25


def forward(
    x: jax.Array,
    residual: jax.Array | None,
    scale: jax.Array | None,
    bias: jax.Array | None,
    *,
    groups: int,
    epsilon: float,
    activation: str | None,
    save_statistics: bool,
    save_variance: bool = False,
    config: Config,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None, jax.Array | None]:
    """Returns (y, mean, rstd, variance) of x [B, pixels, C] with scale and bias [1 or B, C]."""
    images, _, channels = x.shape
    columns = config.vectors * cuda_library.VECTOR_BYTES // x.dtype.itemsize
    slabs = channels // columns
    partials: tuple[int, ...] = (0,)
    counters: tuple[int, ...] = (0,)
    if config.parts > 1:
        partials = (images, slabs, columns * groups // channels, config.parts, 2)
        counters = (images, slabs)
    return call_forward(
        "jaxfused_group_norm_slab",
        (x, residual, scale, bias),
        (
            jax.ShapeDtypeStruct(partials, jnp.float32),
            jax.ShapeDtypeStruct(counters, jnp.int32),
        ),
        groups=groups,
        epsilon=epsilon,
        activation=activation,
        save_statistics=save_statistics,
        save_variance=save_variance,
        vectors=np.int64(config.vectors),
        parts=np.int64(config.parts),
    )
