"""Regimes of a norm, by its bytes, rows and alignment: which implementation comes first.

A kernel of this package starts later than XLA's, and moves the bytes of wide aligned rows faster. The
thresholds come from the recorded sweeps of an H200 and an H100 (`python -m benchmarks.choice.replay`
judges a change of them); `jaxfused.tune` measures what they leave open.
"""

from collections.abc import Collection
from dataclasses import dataclass

from jaxfused.runtime.estimate import Rule

_FEW_VALUES = 300_000
"""Values of misaligned rows up to which XLA's norm without a mean ends before a kernel has started."""
_LITTLE, _LITTLE_WITHOUT_PALLAS = 0.3, 8.0
"""Megabytes up to which XLA's forward ends sooner: where a Pallas kernel can run, and where only CUDA C
can."""
_XLA_BACKWARD, _MANY_ROWS = 15.0, 2000
"""Limits of XLA's faster backward of rms_norm in 16 bits: at most so many megabytes, at least so many
rows."""
_NARROW, _WIDE, _WIDEST = 32, 2048, 4096
"""Features of misaligned rows for which XLA's forward is faster: up to the first; from the second
without a residual, from the third with one, where CUDA C has no registers left."""
_FEW_ROWS, _LONG_ROW = 128, 8192
"""Limits of XLA's faster backward compared with CUDA C: at most so many rows, more than so many
features."""
_WARP_FEATURES, _LONG_BYTES = 1024, 8000
"""Features up to which one warp has a row, and bytes of a longer row from which the warps of a row stay
busy."""
_RING = {True: 30.0, False: 60.0}
"""Megabytes from which CUDA C's forward is faster than Pallas's, by whether one warp has a row."""
_RING_WITH_MEAN, _NARROW_RING = 100.0, 512
"""Limits of `_RING` for a norm with a mean whose rows have one warp each: megabytes, and features."""
_SHORT_BACKWARD, _SHORT_WIDE_BACKWARD, _SHORT_ROWS = 2.2, 7.0, 1024
"""Limits of CUDA C's faster backward compared with Pallas: megabytes, megabytes of wide rows with a
mean, and rows."""


@dataclass(frozen=True)
class Norm:
    """Traits of a norm's stage over [rows, features] that decide the choice of implementation."""

    rows: int
    features: int
    itemsize: int
    residual: bool
    subtract_mean: bool
    is_plain: bool = True
    """True if the CUDA kernels are compiled for the activation, and read at most two vectors."""

    def megabytes(self, matrices: int) -> float:
        """Returns the megabytes of `matrices` matrices; with a residual, always those of four."""
        return (matrices if not self.residual else 4) * self._elements * self.itemsize / 1e6

    @property
    def _elements(self) -> int:
        return self.rows * self.features

    @property
    def aligned(self) -> bool:
        """True if each row starts at a multiple of 16 bytes."""
        return self.features * self.itemsize % 16 == 0

    @property
    def is_small(self) -> bool:
        """True for a norm without a mean whose XLA program ends sooner than a kernel starts."""
        few = self.rows == 1 or (not self.aligned and self._elements <= _FEW_VALUES)
        return few and not self.subtract_mean


def forward(norm: Norm, able: Collection[str], *, saves_statistics: bool) -> Rule:
    """Returns the order of the implementations `able` to run a norm's forward."""
    megabytes = norm.megabytes(2)
    if norm.is_small:
        return _xla("XLA's norm without a mean ends before a kernel has started")
    if saves_statistics and backward_shares(norm, has_pallas="pallas" in able):
        return _xla("XLA's backward, which is faster, shares what its forward reads")
    by_value = not norm.aligned and norm.itemsize < 4 and not norm.subtract_mean
    little = _LITTLE if by_value or "pallas" in able else _LITTLE_WITHOUT_PALLAS
    if not saves_statistics and megabytes <= little and norm.rows > 1 and not norm.residual:
        return _xla(f"XLA starts sooner, and {megabytes:.2f} MB are at most {little}")
    if not norm.aligned and norm.rows > 1 and (why := _why_misaligned(norm, saves_statistics)):
        return _xla(why)
    by_warp = norm.features <= _WARP_FEATURES
    least = _RING[by_warp]
    is_long = by_warp or norm.megabytes(2) * 1e6 > norm.rows * _LONG_BYTES
    if by_warp and norm.subtract_mean:
        is_long = norm.features <= _NARROW_RING and megabytes <= _RING_WITH_MEAN
    if norm.is_plain and is_long and megabytes > least:
        return Rule(("cuda",), f"CUDA C is faster from {least:.0f} MB, here {megabytes:.0f}")
    return _kernels(megabytes)


def _why_misaligned(norm: Norm, saves_statistics: bool) -> str | None:
    """Returns why XLA's forward of misaligned rows is faster, or None."""
    least = 0 if saves_statistics else _NARROW
    most = _WIDEST if norm.residual or saves_statistics else _WIDE
    if not least < norm.features <= most:
        return f"XLA is faster at misaligned rows not of {least + 1} to {most} features"
    if saves_statistics:
        return None
    if norm.megabytes(2) <= _LITTLE:
        return f"XLA starts sooner with misaligned rows of {_LITTLE} MB or less"
    if norm.itemsize == 4 and not norm.subtract_mean and not norm.residual:
        return "XLA reads misaligned rows of 32 bits as fast, and starts sooner"
    return None


def backward(norm: Norm, able: Collection[str]) -> Rule:
    """Returns the order of the implementations `able` to run a norm's backward."""
    megabytes = norm.megabytes(3)
    if _backward_is_xla(norm, has_pallas="pallas" in able):
        return _xla("XLA's backward of few or misaligned rows without a mean is faster")
    if "pallas" not in able and norm.features > _LONG_ROW and norm.rows <= _FEW_ROWS:
        return _xla(f"XLA's backward of rows of more than {_LONG_ROW} values is faster")
    wide = norm.subtract_mean and norm.features >= _WARP_FEATURES
    most = _SHORT_WIDE_BACKWARD if wide else _SHORT_BACKWARD
    few = 1 < norm.rows <= _SHORT_ROWS and norm.features <= _LONG_ROW // 2
    if few and megabytes <= most:
        return Rule(("cuda",), f"CUDA C starts sooner, and {megabytes:.2f} MB are at most {most}")
    return _kernels(megabytes)


def of_images(norm: Norm, able: Collection[str], *, alone: bool = False) -> Rule | None:
    """Returns the order for a stage of a norm of images with parameters of their own.

    XLA then reads one more array for each image, and is faster only for very few bytes. With `alone` the
    stage is a forward that saves nothing.
    """
    if "pallas" not in able:
        return None
    megabytes = norm.megabytes(2)
    if norm.is_small or (alone and norm.rows > 1 and megabytes <= _LITTLE):
        return _xla("XLA's norm ends before a kernel has started")
    return Rule(("pallas",), f"the kernel is faster than XLA at {megabytes:.2f} MB")


def backward_shares(norm: Norm, *, has_pallas: bool) -> bool:
    """Returns whether XLA runs the backward too, in kernels that it shares with its forward."""
    return not norm.subtract_mean and _backward_is_xla(norm, has_pallas=has_pallas)


def _backward_is_xla(norm: Norm, *, has_pallas: bool) -> bool:
    is_rms_of_16_bits = not norm.subtract_mean and norm.aligned and norm.itemsize == 2
    is_cheap = norm.rows >= _MANY_ROWS and norm.megabytes(3) <= _XLA_BACKWARD
    return norm.is_small or (is_rms_of_16_bits and is_cheap and not has_pallas)


def _xla(why: str) -> Rule:
    return Rule(("xla",), why)


def _kernels(megabytes: float) -> Rule:
    return Rule(("pallas", "cuda"), f"kernels are faster than XLA at {megabytes:.2f} MB")
