"""What a Hopper GPU offers a kernel, stated once for all kernels of this package."""

from typing import Any

import jax.numpy as jnp

SHARED_MEMORY_BYTES = 227 * 1024
"""Shared memory that one CTA may use."""
BARRIER_BYTES = 1024
"""What a kernel leaves of it for the barriers that Mosaic adds."""
MBARRIER_BYTES = 8
"""Shared memory of a barrier."""
ALLOCATION_BYTES = 1024
"""What Mosaic rounds the size of each array in shared memory up to."""
COPY_BYTES = 128
"""At multiples of so many bytes a copy into shared memory has to begin."""
REDUCTION_BYTES = 2048
"""What Mosaic takes besides in a kernel that sums along an axis of a tile."""
REGISTERS = 64 * 1024
"""Registers of a multiprocessor, which its CTAs share."""
THREAD_REGISTERS = 255
"""Of them the most that a thread may have."""
WARPS = 4
"""Warps in a warpgroup."""
LANES = 32
"""Threads in a warp."""


def row_of_copies(count: int, dtype: Any) -> int:
    """The numbers of a row in shared memory that a copy fills with `count`, where rows follow it."""
    itemsize = jnp.dtype(dtype).itemsize
    return -(-count * itemsize // COPY_BYTES) * COPY_BYTES // itemsize


def why_unfit(compute_capability: tuple[int, int] | None) -> str | None:
    """None for a Hopper GPU, else the sentence that says what the kernels need."""
    if compute_capability is not None and compute_capability[0] == 9:
        return None
    return "it needs a Hopper GPU (compute capability 9.0)"
