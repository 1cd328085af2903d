"""Decides where CUDA C kernels run in operators that have Pallas kernels too.

Unless the caller names them, CUDA C kernels run only on GPUs without Pallas kernels (other than Hopper),
at sizes where they measured faster than XLA.
"""

from jaxfused import dispatch
from jaxfused.runtime.estimate import Rule
from pallas_kernels import hopper
from pallas_kernels.gemm.small_m import MAX_ROWS

_LEAST_WEIGHTS = 2**24
"""Fewest quantised weights at which the CUDA kernel is faster than XLA: XLA's dequantised copy of fewer
weights stays in the L2 cache."""
LEAST_VALUES = 2**21
"""Fewest values of an elementwise CUDA kernel: with fewer, its launch takes most of its time."""


def is_fast_for_weights(rows: int, features: int, columns: int) -> bool:
    """Returns whether CUDA C is faster than XLA at x [rows, features] times [features, columns].

    The second operand is quantised.
    """
    return rows <= MAX_ROWS and features * columns >= _LEAST_WEIGHTS


def is_fast_for_rows(rows: int, features: int) -> bool:
    """Returns whether CUDA C quantises x [rows, features] faster than XLA does."""
    return rows * features >= LEAST_VALUES


def rule(device: dispatch.Device, *, fast: bool) -> Rule | None:
    """Returns the rule that puts the CUDA kernel first, or None if it runs only when named.

    Args:
      fast: whether the kernel is expected to be faster than XLA at these shapes.
    """
    pallas_serves = hopper.why_unfit(device.compute_capability) is None
    if pallas_serves or not fast:
        return None
    return Rule(("cuda",), "CUDA C is faster than XLA at this size")
