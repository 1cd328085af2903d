"""CUDA C kernels beside Pallas kernels of the same operator: where they are taken unless they are named.

That is on GPUs that the Pallas kernels do not serve, once `dispatch.UNMEASURED` does not have
"<operator> cuda" any more, and where the GPU that has timed both found them faster than XLA.
"""

from collections.abc import Mapping

from jaxfused import dispatch
from pallas_kernels import hopper
from pallas_kernels.gemm.small_m import MAX_ROWS

_LEAST_WEIGHTS = 2**24
"""Of one product: with fewer of them XLA's copy stays in the cache, and is as fast."""
_LEAST_VALUES = 2**21
"""That are quantised: of fewer most of the time is the launch."""


def is_fast_for_weights(rows: int, features: int, columns: int) -> bool:
    """Whether CUDA C multiplies x [rows, features] with quantised weights faster than XLA does."""
    return rows <= MAX_ROWS and features * columns >= _LEAST_WEIGHTS


def is_fast_for_rows(rows: int, features: int) -> bool:
    """Whether CUDA C quantises rows faster than XLA does."""
    return rows * features >= _LEAST_VALUES


def missing(op: str, implementation: str | None) -> dict[str, str]:
    """Returns what `takes_reference` is to take as missing where nothing is named."""
    reason = dispatch.why_unmeasured(_name(op)) if implementation is None else None
    return {} if reason is None else {"cuda": reason}


def among(
    op: str,
    reasons: Mapping[str, str | None],
    device: dispatch.Device,
    reason: str | None,
    *,
    fast: bool = True,
) -> dict[str, str | None]:
    """Returns the reasons with that of the CUDA kernel in its place.

    Args:
      fast: whether the kernel is meant for such shapes, and not only able to compute them.
    """
    pallas_serves = hopper.why_unfit(device.compute_capability) is None
    if pallas_serves or dispatch.why_unmeasured(_name(op)) is not None or not fast:
        return {**reasons, "cuda": reason}
    return {"cuda": reason, **reasons}


def _name(op: str) -> str:
    return f"{op} cuda"
