"""CUDA C kernels beside Pallas kernels of the same operator: where they are taken unless they are named.

That is on GPUs that the Pallas kernels do not serve, once `dispatch.UNMEASURED` does not have
"<operator> cuda" any more.
"""

from collections.abc import Mapping

from jaxfused import dispatch
from pallas_kernels import hopper


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
