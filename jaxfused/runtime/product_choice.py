"""The order of a product's implementations, by the times of `cost` and `xla_cost` (pallas_kernels.gemm).

Where the times are within the model's error, XLA comes first: its program is what a user would have
without this package.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from jaxfused import dispatch
from jaxfused.runtime.estimate import Rule, Times
from pallas_kernels.gemm import cost, small_m, xla_cost

_DOUBT = 1.06
"""Factor on a kernel's predicted time (the model's error) when it is compared with XLA's."""
_START = 0.5
"""Microseconds added to a kernel's time: XLA has many tiles and epilogues for small products."""
_CONVERTED_ANEW = 0.3
"""Fraction of the weights' conversion that a small-M gradient pays again; the forward did the rest."""
_HOPPER = 9
UNMODELLED = Rule(("xla",), "the cost model of products covers only Hopper GPUs")
"""Rule for a device that the cost model does not cover."""


@dataclass(frozen=True)
class Passes:
    """The elementwise kernels that XLA's program runs over the result of its product."""

    bytes_of_element: int = 0
    """Bytes per element that these kernels read and write; 0 if XLA's product includes everything."""
    evaluations: int = 0
    """Functions that these kernels evaluate per element: an activation, its derivative, a sum."""
    slow: bool = False
    """True if the activation is gelu_erf, which takes XLA many instructions."""
    bytes_in_product: int = 0
    """Bytes per element of a residual that XLA's product adds itself."""

    def time(self, elements: int) -> float:
        in_product = cost.memory_time(elements * self.bytes_in_product)
        if not self.bytes_of_element:
            return in_product
        return in_product + xla_cost.xla_pass(
            elements, self.bytes_of_element, self.evaluations, slow_activation=self.slow
        )


def xla_time(device: dispatch.Device, work: cost.Work, passes: Passes) -> float:
    """Returns the predicted microseconds of XLA's product and of the kernels after it.

    Several products of one x run as one at small M, and one after the other at large M. At small M,
    weights [k, n] of another dtype are converted as the product reads them, and for a gradient [n, k]
    the program's forward has converted most. Copies that XLA makes first are included.
    """
    few = work.m <= small_m.MAX_ROWS
    side_by_side = work.products if few else 1
    fused_conversion = work.m <= cost.CONVERTED_ROWS and not work.k_last
    n = side_by_side * work.n
    if work.m == 1 and fused_conversion and work.b_bytes != work.itemsize:
        product = xla_cost.xla_single_row(n, work.k, work.itemsize, work.b_bytes)
    else:
        product = xla_cost.xla_product(
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
    copied = xla_cost.xla_copies(work)
    products = work.products // side_by_side * product
    return products + passes.time(work.m * work.n) + converted + copied


def is_modelled(device: dispatch.Device) -> bool:
    """Returns whether the cost model covers the device: Hopper GPUs only."""
    capability = device.compute_capability
    return capability is not None and capability[0] == _HOPPER and device.multiprocessors > 0


def product_times(microseconds: Mapping[str, float]) -> Times:
    """Returns predicted `Times`, with the model's error added to all but XLA's."""
    return Times(
        {
            name: time if name == "xla" else time * _DOUBT + _START
            for name, time in microseconds.items()
        },
        f"all but XLA's include the model's error, {_DOUBT - 1:.0%} and {_START} us",
    )
