"""Resources of a Hopper GPU, stated once for all kernels of this package."""

from typing import Any

import jax.numpy as jnp

SHARED_MEMORY_BYTES = 227 * 1024
"""Bytes of shared memory that one CTA may use."""
BARRIER_BYTES = 1024
"""Bytes of shared memory that configs leave free for a kernel's mbarriers, which Mosaic allocates."""
MBARRIER_BYTES = 8
"""Bytes of shared memory of one mbarrier."""
ALLOCATION_BYTES = 1024
"""Multiple of bytes to which Mosaic rounds up the size of each array in shared memory."""
COPY_BYTES = 128
"""Alignment in bytes of a copy's destination in shared memory."""
REDUCTION_BYTES = 2048
"""Bytes of shared memory that Mosaic adds to a kernel that sums along an axis of a tile."""
REGISTERS = 64 * 1024
"""32-bit registers of an SM, divided among its resident CTAs."""
THREAD_REGISTERS = 255
"""Largest number of 32-bit registers of a thread."""
WARPS = 4
"""Warps in a warpgroup."""
LANES = 32
"""Threads in a warp."""


def row_of_copies(count: int, dtype: Any) -> int:
    """Returns the elements of `dtype` from one row to the next in shared memory, for rows of `count`.

    They are a multiple of `COPY_BYTES`, so that each row can be the destination of a copy.
    """
    itemsize = jnp.dtype(dtype).itemsize
    return -(-count * itemsize // COPY_BYTES) * COPY_BYTES // itemsize


def why_unfit(compute_capability: tuple[int, int] | None) -> str | None:
    """Returns None for a Hopper GPU, else a sentence that says what the kernels need."""
    if compute_capability is not None and compute_capability[0] == 9:
        return None
    return "it needs a Hopper GPU (compute capability 9.0)"
