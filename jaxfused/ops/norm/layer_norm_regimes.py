"""Rules for which implementation of a norm over rows is faster, by bytes, rows and alignment.

A kernel of this package starts later than XLA's, and moves the bytes of wide rows faster if they start
at multiples of 16 bytes ("aligned"). The
thresholds come from the recorded sweeps of an H200 and an H100 (`python -m benchmarks.choice.replay`
judges a change of them); `jaxfused.tune` measures what they leave open.
"""

from collections.abc import Collection
from dataclasses import dataclass

from jaxfused.runtime import cuda_library
from jaxfused.runtime.estimate import MEGABYTE, Rule

_LITTLE, _LITTLE_WITHOUT_PALLAS = 0.3, 8.0
"""Megabytes up to which XLA's forward is faster than a Pallas kernel, and than CUDA C if Pallas cannot
run. The second also limits x and y together where XLA's backward is faster."""
_LITTLE_MISALIGNED = 1.0
"""Megabytes of misaligned rows up to which XLA's RMSNorm is faster, forward and backward."""
_NARROW, _WIDE = 32, 2048
"""Features of misaligned rows at which XLA's forward is faster: up to the first number if no statistics
are saved, and above the second (above twice the second with a residual or saved statistics)."""
_WARP_FEATURES = 1024
"""Features up to which one warp computes a row."""
_RING, _MOST_OF_NARROW = 30.0, 100.0
"""Megabytes above which CUDA C's ring buffer of rows is faster than Pallas: for an RMSNorm of at most
_WARP_FEATURES features; up to _MOST_OF_NARROW, for any norm of half as many. Wide rows need twice _RING.
"""
_FEW_ROWS = 1024
"""Rows up to which CUDA C's backward may be faster than Pallas's. From twice as many on, XLA computes
dx and the sums over rows in one kernel."""
_SHORT_BACKWARD, _SHORT_WIDE_BACKWARD = 2.2, 7.0
"""Megabytes up to which CUDA C's backward is faster; the second for layer_norm from _WARP_FEATURES on.
"""


@dataclass(frozen=True)
class Norm:
    """Sizes and options of a norm of x [rows, features] that decide which implementation is faster."""

    rows: int
    features: int
    itemsize: int
    residual: bool
    subtract_mean: bool
    is_plain: bool = True
    """True if the CUDA kernels are compiled for the activation, and read at most two vectors [D]."""

    @property
    def megabytes(self) -> float:
        """Megabytes of x and y."""
        return 2 * self.rows * self._row_bytes / MEGABYTE

    @property
    def forward_megabytes(self) -> float:
        """Megabytes of x and y, and of residual and next_residual if there are."""
        return (1 + self.residual) * self.megabytes

    @property
    def backward_megabytes(self) -> float:
        """Megabytes of dy, h, dx and the cotangent of the next residual."""
        return (2 + self.residual + 1) / 2 * self.megabytes

    @property
    def _row_bytes(self) -> int:
        return self.features * self.itemsize

    @property
    def aligned(self) -> bool:
        """True if each row starts at a multiple of a 16-byte vector."""
        return self._row_bytes % cuda_library.VECTOR_BYTES == 0

    @property
    def is_wide(self) -> bool:
        """True if a row and its residual have over 4,096 bytes, enough for all warps of a block."""
        return (1 + self.residual) * self._row_bytes > 2 * _WIDE

    @property
    def is_small(self) -> bool:
        """True for an RMSNorm so small that XLA's kernel ends before one of this package has started."""
        few = self.rows == 1 or (not self.aligned and self.megabytes <= _LITTLE_MISALIGNED)
        return few and not self.subtract_mean


def forward(norm: Norm, able: Collection[str], *, saves_statistics: bool) -> Rule:
    """Returns the order of the implementations `able` to run a norm's forward."""
    megabytes = norm.forward_megabytes
    # After a residual XLA computes the sum and its squares in one kernel, the result in a second.
    in_two_kernels = norm.residual and norm.aligned
    if norm.is_small and not in_two_kernels:
        return _xla("XLA's norm without a mean ends before a kernel has started")
    if saves_statistics and backward_shares(norm, has_pallas="pallas" in able):
        return _xla("XLA's backward, which is faster, shares what its forward reads")
    little = _LITTLE if "pallas" in able else _LITTLE_WITHOUT_PALLAS
    is_alone = not saves_statistics and not norm.residual
    if is_alone and norm.rows > 1 and megabytes <= little:
        return _xla(f"XLA starts sooner, and {megabytes:.2f} MB are at most {little}")
    if not norm.aligned and norm.rows > 1:
        if not saves_statistics and megabytes <= _LITTLE:
            return _xla(f"XLA starts sooner with misaligned rows of {_LITTLE} MB or less")
        least = 0 if saves_statistics else _NARROW
        most = _WIDE if is_alone else 2 * _WIDE
        if not least < norm.features <= most:
            return _xla(f"XLA is faster at misaligned rows not of {least + 1} to {most} features")
    by_warp = norm.features <= _WARP_FEATURES and not norm.subtract_mean
    is_long = (norm.is_wide and megabytes > 2 * _RING) or (by_warp and megabytes > _RING)
    is_narrow = 2 * norm.features <= _WARP_FEATURES and _RING < megabytes <= _MOST_OF_NARROW
    if "pallas" in able and norm.is_plain and (is_long or is_narrow):
        return Rule(("cuda",), f"CUDA C's ring of rows is faster at {megabytes:.0f} MB")
    return _kernels(megabytes)


def backward(norm: Norm, able: Collection[str]) -> Rule:
    """Returns the order of the implementations `able` to run a norm's backward."""
    has_pallas, megabytes = "pallas" in able, norm.backward_megabytes
    if _backward_is_xla(norm, has_pallas=has_pallas):
        return _xla("XLA's backward of few, misaligned or narrow rows without a mean is faster")
    if not has_pallas and norm.features > 2 * _WIDE and norm.megabytes <= _LITTLE_WITHOUT_PALLAS:
        return _xla(f"XLA's backward of rows of more than {2 * _WIDE} values is faster")
    is_shared = norm.subtract_mean and norm.features >= _WARP_FEATURES
    most = _SHORT_WIDE_BACKWARD if is_shared else _SHORT_BACKWARD
    few = 1 < norm.rows <= _FEW_ROWS and norm.features <= 2 * _WIDE
    if has_pallas and few and megabytes <= most:
        return Rule(("cuda",), f"CUDA C starts sooner, and {megabytes:.2f} MB are at most {most}")
    return _kernels(megabytes)


def of_images(norm: Norm, able: Collection[str], *, alone: bool = False) -> Rule | None:
    """Returns which implementation to prefer for a norm with a scale and shift for each image, or None.

    XLA then reads one more array for each image, and is faster only for very few bytes. `alone` is
    True for a forward that saves nothing for a backward.
    """
    if "pallas" not in able:
        return None
    if norm.is_small or (alone and norm.rows > 1 and norm.forward_megabytes <= _LITTLE):
        return _xla("XLA's norm ends before a kernel has started")
    return Rule(("pallas",), f"the kernel is faster than XLA at {norm.forward_megabytes:.2f} MB")


def backward_shares(norm: Norm, *, has_pallas: bool) -> bool:
    """Returns whether XLA will also run the backward, reading statistics that XLA's forward computes."""
    return not norm.subtract_mean and _backward_is_xla(norm, has_pallas=has_pallas)


def _backward_is_xla(norm: Norm, *, has_pallas: bool) -> bool:
    is_rms_of_16_bits = norm.itemsize == 2 and norm.aligned and not norm.subtract_mean
    is_cheap = is_rms_of_16_bits and norm.rows >= 2 * _FEW_ROWS
    few_bytes = norm.megabytes <= _LITTLE_WITHOUT_PALLAS
    return norm.is_small or (is_cheap and few_bytes and not has_pallas)


def _xla(why: str) -> Rule:
    return Rule(("xla",), why)


def _kernels(megabytes: float) -> Rule:
    return Rule(("pallas", "cuda"), f"kernels are faster than XLA at {megabytes:.2f} MB")
