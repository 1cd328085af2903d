"""Decides before an operator's custom_vjp whether a call runs in plain jax.numpy.

It does where no kernel can run, or where the operator expects XLA to be faster. Plain jax.numpy has all
of JAX's derivatives: forward mode, and gradients of gradients. Other calls go to a `Runner`, which
chooses an implementation for each kernel.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jaxfused import dispatch
from jaxfused.runtime import cuda_library
from jaxfused.runtime.estimate import Estimate
from jaxfused.runtime.shapes import shapes_of, why_symbolic
from pallas_kernels import hopper


class LeftToXla(NamedTuple):
    """An operator's expectation that XLA is faster, for a call that names no implementation."""

    why: str | None
    stages: Sequence[dispatch.Choice] = ()
    """Choices for the kernels that would run otherwise, which `jaxfused.tune` measures."""


def takes_reference(
    op: str,
    implementation: str | None,
    device: dispatch.Device,
    x: jax.Array,
    *others: jax.Array | None,
    why_xla: str | Callable[[], LeftToXla | None] | None = None,
    missing: Mapping[str, str] | None = None,
) -> bool:
    """Returns whether a call runs in plain jax.numpy: no kernel can run, or the operator prefers XLA.

    This is decided before the operator's custom_vjp, so that forward-mode differentiation works wherever
    no kernel can run: on this platform, for the dtype of `x`, for symbolic sizes of `x` or `others`, for
    an empty `x`, or where the operator leaves the call to XLA for the reason `why_xla`. A function
    `why_xla` is called only where a kernel could run. `missing` maps each implementation that the
    operator does not have to the reason.
    """
    if x.dtype not in cuda_library.DTYPES:
        why = f"kernels take float32, bfloat16 and float16, not {x.dtype}"
        reasons: dict[str, str | None] = {"pallas": why, "cuda": why}
    elif unknown := why_symbolic(x, *others):
        reasons = {"pallas": unknown, "cuda": unknown}
    else:
        capability = device.compute_capability
        reasons = {
            "pallas": hopper.why_unfit(capability),
            "cuda": cuda_library.why_unfit(capability) or cuda_library.why_unavailable(),
        }
    reasons |= missing or {}
    stages: Sequence[dispatch.Choice] = ()
    if implementation is None and None in reasons.values() and 0 not in x.shape:
        left = why_xla() if callable(why_xla) else why_xla
        if not isinstance(left, LeftToXla):
            left = LeftToXla(left)
        reasons = {name: reason or left.why for name, reason in reasons.items()}
        stages = left.stages
    reasons["xla"] = None
    chosen = dispatch.choose(op, implementation, reasons)
    if 0 in x.shape:
        return True  # An empty array has nothing to compute, and CUDA rejects an empty launch.
    if chosen == "xla":
        source: Any = None if implementation is None else "named"
        shapes = shapes_of([x])
        dispatch.record(dispatch.Choice(op, shapes, chosen, reasons, source=source, stages=stages))
    return chosen == "xla"


def reference_only(op: str, implementation: str | None, x: jax.Array) -> None:
    """Checks the implementation named for an operator that has no kernels yet."""
    reasons = {
        "pallas": f"there is no Pallas kernel of {op} yet",
        "cuda": f"there is no CUDA kernel of {op} yet",
        "xla": None,
    }
    choose_without_stages(op, implementation, reasons, x)


def choose_without_stages(
    op: str,
    implementation: str | None,
    reasons: Mapping[str, str | None],
    *operands: jax.Array | None,
    estimate: Estimate = None,
    stages: Sequence[dispatch.Choice] = (),
) -> None:
    """Chooses and records the implementation of a call that does not go through a `Runner`.

    Raises:
      ValueError: the named implementation does not exist or cannot run.
    """
    chosen = dispatch.choose(op, implementation, reasons)
    source: Any = None if implementation is None else "named"
    dispatch.record(
        dispatch.Choice(
            op,
            shapes_of(operands),
            chosen,
            reasons,
            source=source,
            estimate=estimate,
            stages=stages,
        )
    )
