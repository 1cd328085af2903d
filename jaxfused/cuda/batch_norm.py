"""batch_norm by the CUDA kernel of ffi/batch_norm.cu, which reads its batch once.

What a block has of the batch stays in the shared memory of its multiprocessor until the statistics of
all rows are known. A larger batch is an image of group_norm with a group for each channel, and so is any
batch in the gradient.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxfused.cuda import library
from jaxfused.cuda.group_norm import reads_once

THREADS = 512
"""Of a block."""
_VECTOR_BYTES = 16
_SHARED_BYTES = 227 * 1024
"""Of a block, on a Hopper GPU."""
_FEWEST_ROWS = 32
"""Of a part, so that its mean lies near that of all."""
_SMALL_BYTES = 4e6
"""Of x, which the L2 holds, and whose loads may be short; larger ones are read in whole lines."""
_VECTORS = {True: (2, 4, 8, 16, 1), False: (8, 4, 16, 32, 2, 1)}
"""Of a row of a slab, by whether x is small, the best first."""
_BUSY = 0.95
"""The share of the blocks of the busiest config that a better slab may have."""


@dataclass(frozen=True)
class Config:
    """How the kernel is launched."""

    vectors: int
    """Of 16 bytes, of a row of a block's slab of channels."""
    parts: int
    """Of the rows, each of which a block of every slab takes."""


def config_for(
    rows: int,
    channels: int,
    itemsize: int,
    *,
    compute_capability: tuple[int, int] | None,
    multiprocessors: int,
) -> Config | None:
    """How the kernel keeps x [rows, channels] on chip, or None where it does not fit."""
    if not reads_once(compute_capability) or channels * itemsize % _VECTOR_BYTES:
        return None
    of_row = channels * itemsize // _VECTOR_BYTES
    found = []
    for vectors in _VECTORS[rows * channels * itemsize < _SMALL_BYTES]:
        slabs, rest = divmod(of_row, vectors)
        parts = min(multiprocessors // max(1, slabs), rows // _FEWEST_ROWS)
        if rest or parts < 1:
            continue
        config = Config(vectors, parts)
        if _shared_bytes(config, rows, itemsize) <= _SHARED_BYTES:
            found.append((slabs * parts, config))
    most = max((blocks for blocks, _ in found), default=0)
    return next((config for blocks, config in found if blocks >= _BUSY * most), None)


def _shared_bytes(config: Config, rows: int, itemsize: int) -> int:
    """Of a block: the sums of its warps and of all, its merged parts, and what it has of x."""
    columns = config.vectors * _VECTOR_BYTES // itemsize
    steps = math.ceil(math.ceil(rows / config.parts) / (THREADS // config.vectors))
    return (
        (THREADS // 32 + 1) * columns * 4
        + (columns + THREADS) * 8
        + steps * THREADS * _VECTOR_BYTES
    )


_START = 6.5
"""Microseconds: the launch, the first loads, and the wait for the sums of the other blocks."""
_TERABYTES_A_SECOND = 2.6
_BLOCK_TERABYTES_A_SECOND = 0.03


def microseconds(
    config: Config, rows: int, channels: int, itemsize: int, *, residual: bool
) -> float:
    """The expected time."""
    slabs = channels * itemsize // (_VECTOR_BYTES * config.vectors)
    rate = min(_TERABYTES_A_SECOND, slabs * config.parts * _BLOCK_TERABYTES_A_SECOND)
    return _START + (2 + residual) * rows * channels * itemsize / rate / 1e6


def forward(
    x: jax.Array,
    residual: jax.Array | None,
    scale: jax.Array | None,
    bias: jax.Array | None,
    *,
    epsilon: float,
    activation: str | None,
    config: Config,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """(y, mean, rstd, variance) of x [M, C] and scale, bias [C]; the statistics are float32 [C]."""
    library.register()
    _, channels = x.shape
    columns = config.vectors * _VECTOR_BYTES // x.dtype.itemsize
    slabs = channels // columns
    statistics = jax.ShapeDtypeStruct((channels,), jnp.float32)
    call = jax.ffi.ffi_call(
        "jaxfused_batch_norm_forward",
        (
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            *(statistics,) * 3,
            jax.ShapeDtypeStruct((slabs, config.parts, columns, 2), jnp.float32),
            jax.ShapeDtypeStruct((slabs,), jnp.int32),
        ),
    )
    # Made like `x`, because in a `jax.shard_map` all operands must vary over the same axes.
    absent = jnp.zeros_like(x, shape=(0,), dtype=jnp.float32)
    y, mean, rstd, variance, *_ = call(
        x,
        *(absent if a is None else a for a in (residual, scale, bias)),
        epsilon=np.float32(epsilon),
        activation=activation or "none",
        vectors=np.int64(config.vectors),
        parts=np.int64(config.parts),
    )
    return y, mean, rstd, variance
