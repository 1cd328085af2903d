"""Which implementation a product with an epilogue runs in first: the one that is predicted fastest.

The times come from `pallas_kernels.gemm.cost`. Where they are near each other the model does not
know, and XLA's program is what a user would have without this package.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jaxfused import dispatch
from pallas_kernels.gemm import cost, small_m

_DOUBT = 1.06
"""By how much another implementation must be predicted faster than XLA: about the model's error."""
_START = 0.5
"""And by how many microseconds: XLA has many tiles and epilogues for the smallest products."""
_CONVERTED_ANEW = 0.3
"""The part of a gradient's weights that no forward of the same program has converted before."""
_HOPPER = 9


@dataclass(frozen=True)
class Passes:
    """What XLA's program does after its product: kernels of its own over the result."""

    bytes_of_element: int = 0
    """That they read and write; none where the product takes all."""
    evaluations: int = 0
    """What they evaluate of an element: an activation, its derivative, a sum."""
    slow: bool = False
    """The activation is gelu_erf, which XLA evaluates at length."""
    bytes_in_product: int = 0
    """Of an element of a residual that the product adds itself."""

    def time(self, elements: int) -> float:
        in_product = cost.memory_time(elements * self.bytes_in_product)
        if not self.bytes_of_element:
            return in_product
        return in_product + cost.xla_pass(
            elements, self.bytes_of_element, self.evaluations, slow_activation=self.slow
        )


def xla_time(device: dispatch.Device, work: cost.Work, passes: Passes) -> float:
    """Predicted microseconds of XLA's product and what comes after it.

    Several products of one x are one of few rows, and one after the other of many. Weights of another
    dtype [k, n] are converted as a product of few rows reads them; a gradient [n, k] of few rows finds
    most of them converted by the forward of its program. What XLA copies first is counted, too.
    """
    few = work.m <= small_m.MAX_ROWS
    side_by_side = work.products if few else 1
    fused_conversion = work.m <= cost.CONVERTED_ROWS and not work.k_last
    n = side_by_side * work.n
    if work.m == 1 and fused_conversion and work.b_bytes != work.itemsize:
        product = cost.xla_single_row(n, work.k, work.itemsize, work.b_bytes)
    else:
        product = cost.xla_product(
            work.m,
            n,
            work.k,
            work.itemsize,
            device.multiprocessors,
            work.b_bytes if fused_conversion else 0,
        )
    converted = 0.0 if fused_conversion else cost.conversion(work)
    if few and work.k_last:
        converted *= _CONVERTED_ANEW
    copied = cost.xla_copies(work)
    products = work.products // side_by_side * product
    return products + passes.time(work.m * work.n) + converted + copied


def is_modelled(device: dispatch.Device) -> bool:
    """Whether the times are those of such a device."""
    capability = device.compute_capability
    return capability is not None and capability[0] == _HOPPER and device.multiprocessors > 0


def fastest_first(
    reasons: Mapping[str, str | None], microseconds: Mapping[str, float]
) -> dict[str, str | None]:
    """The reasons in the order of predicted times, with XLA's ahead where it is about as fast."""

    def time(name: str) -> float:
        predicted = microseconds.get(name, math.inf)
        return predicted if name == "xla" else predicted * _DOUBT + _START

    return {name: reasons[name] for name in sorted(reasons, key=time)}


def pallas_or_xla(
    device: dispatch.Device, reason: str | None, microseconds: Callable[[], Mapping[str, float]]
) -> dict[str, str | None]:
    """The reasons of a kernel in Pallas and of XLA, the one that is predicted faster first.

    Args:
      device: where it would run; XLA is first where the times are of other devices.
      reason: why the kernel cannot run, or None.
      microseconds: predicts both times; called only where they decide.
    """
    reasons = {"pallas": reason, "xla": None}
    if reason is not None or not is_modelled(device):
        return dispatch.preferring("xla", reasons)
    return fastest_first(reasons, microseconds())
