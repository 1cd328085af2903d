"""Constants of the attention kernels' cost model, fitted to an H200; times are in microseconds."""

from pallas_kernels.attention.shape import Shape

LAUNCH = 3.0
"""Microseconds of a kernel's start and end."""
BYTES = 3.8e6
"""Bytes that memory moves in a microsecond."""
CACHED_BYTES = 5.5e6
"""Bytes that the L2 cache delivers in a microsecond."""


def per_row(shape: Shape) -> float:
    """Returns the microseconds that a tile of 128 queries takes for one key in the backward.

    A tile of 128 keys takes as long for one query.
    """
    return 0.008 + 1.2e-4 * max(shape.head_size, shape.value_size)
