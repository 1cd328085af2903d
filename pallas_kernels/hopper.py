"""What a Hopper GPU offers a kernel, stated once for all kernels of this package."""

SHARED_MEMORY_BYTES = 227 * 1024
"""Shared memory that one CTA may use."""
BARRIER_BYTES = 1024
"""What a kernel leaves of it for the barriers that Mosaic adds."""
MBARRIER_BYTES = 8
"""Shared memory of a barrier."""
ALLOCATION_BYTES = 1024
"""What Mosaic rounds the size of each array in shared memory up to."""
REDUCTION_BYTES = 2048
"""What Mosaic takes besides in a kernel that sums along an axis of a tile."""
REGISTERS = 64 * 1024
"""Registers of a multiprocessor, which its CTAs share."""
WARPS = 4
"""Warps in a warpgroup."""
LANES = 32
"""Threads in a warp."""


def why_unfit(compute_capability: tuple[int, int] | None) -> str | None:
    """None for a Hopper GPU, else the sentence that says what the kernels need."""
    if compute_capability is not None and compute_capability[0] == 9:
        return None
    return "it needs a Hopper GPU (compute capability 9.0)"
