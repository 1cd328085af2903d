"""Times on Hopper GPUs by the roofline: the larger of operations' and bytes' times, plus launches.

XLA's products reach the roofline, except in a last wave that is not full. A kernel's gain is the time of
the passes over a product's result that it saves, relative to the product's time.
"""

from dataclasses import dataclass

from jaxfused import dispatch
from jaxfused.runtime.estimate import Rule
from pallas_kernels import hopper

_OPERATIONS, _BYTES, _LAUNCH = 7e8, 3.8e6, 1.5
"""16-bit operations per microsecond, bytes per microsecond, microseconds of one launch (on an H200)."""
_EVALUATION = 1.5e-6
"""Microseconds per element in which XLA evaluates gelu_tanh, the derivative of an activation, or one
addition of a sum over rows; gelu_erf takes twice as long."""
UNMODELLED = Rule(("xla",), "kernels of products are timed on Hopper GPUs only")
"""The rule for devices whose times are not modelled: XLA first."""


def is_modelled(device: dispatch.Device) -> bool:
    """Returns whether the roofline's figures hold for the device, as they do for Hopper GPUs only."""
    return hopper.why_unfit(device.compute_capability) is None and device.multiprocessors > 0


@dataclass(frozen=True)
class Passes:
    """The elementwise kernels that XLA runs before and after a product, over matrices of one size."""

    bytes_of_element: float = 0
    """Bytes per element that these kernels read and write; 0 if XLA's product does all of the work."""
    evaluations: int = 0
    """Functions that these kernels evaluate per element: an activation, its derivative, a sum."""
    slow: bool = False
    """True if the activation is gelu_erf."""
    launches: int = 1

    def time(self, elements: int) -> float:
        """Microseconds that these kernels take for a matrix of `elements` elements."""
        if not self.bytes_of_element:
            return 0.0
        evaluated = self.evaluations * (1 + self.slow) * _EVALUATION
        return self.launches * _LAUNCH + elements * (self.bytes_of_element / _BYTES + evaluated)


def product(m: int, n: int, k: int, itemsize: int = 2) -> float:
    """Microseconds of XLA's product of [m, k] and [k, n]."""
    operations = m * n * k * itemsize / _OPERATIONS
    return _LAUNCH + max(operations, itemsize * (m * k + k * n + m * n) / _BYTES)
