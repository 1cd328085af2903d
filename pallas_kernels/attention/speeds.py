"""The numbers of which the attention kernels' times are estimated: those of an H200, in microseconds."""

from pallas_kernels.attention.shape import Shape

LAUNCH = 3.0
"""A kernel's start and end."""
BYTES = 3.8e6
"""The bytes that memory moves in a microsecond."""
CACHED_BYTES = 5.5e6
"""The bytes that the L2 cache delivers in a microsecond."""


def per_row(shape: Shape) -> float:
    """Returns the time that 128 rows of one side take for each row of the other, in a backward."""
    return 0.008 + 1.2e-4 * max(shape.head_size, shape.value_size)
