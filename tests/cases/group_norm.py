"""Shapes of group_norm, for the reference and for every kernel."""

from dataclasses import dataclass

import numpy as np

from tests.cases.normal import normal
from tests.support.arrays import put


@dataclass(frozen=True)
class Case:
    shape: tuple[int, ...]
    num_groups: int
    scale: bool = True
    bias: bool = True
    residual: bool = False
    activation: str | None = None
    parameter_dtype: str | None = None
    """Dtype of the parameters; None for x's."""
    modulated: bool = False
    """True if each image has its own scale and shift."""

    def arguments(self, dtype, seed=0):
        """Returns (x, scale, bias, residual, image_scale, image_shift); x's mean is not zero."""
        rng = np.random.default_rng(seed)
        parameter_dtype = dtype if self.parameter_dtype is None else self.parameter_dtype
        return (
            put(rng.normal(0.5, size=self.shape), dtype),
            normal(rng, parameter_dtype, self.shape[-1]) if self.scale else None,
            normal(rng, parameter_dtype, self.shape[-1]) if self.bias else None,
            normal(rng, dtype, *self.shape) if self.residual else None,
            normal(rng, dtype, self.shape[0], self.shape[-1]) if self.modulated else None,
            normal(rng, dtype, self.shape[0], self.shape[-1]) if self.modulated else None,
        )


CASES = (
    Case((2, 5, 3, 12), 4, activation="silu"),
    Case((3, 7, 6), 2, residual=True, activation="relu"),
    Case((2, 3, 2, 3, 10), 5, bias=False, residual=True, activation="gelu_tanh"),
    Case((2, 5, 5, 6), 1, scale=False, bias=False),
    Case((2, 9, 6), 6, activation="gelu_erf", parameter_dtype="float32"),
    Case((3, 9), 3),
    Case((3, 4, 5, 8), 2, activation="silu", modulated=True),
    Case((2, 6, 8), 4, scale=False, bias=False, residual=True, modulated=True),
    Case((0, 4, 6), 2, residual=True),
    Case((2, 5, 4, 8), 4, activation="mish", residual=True),
)

KERNEL_CASES = (
    Case((4, 64, 64, 128), 32, activation="silu"),
    Case((2, 33, 31, 24), 3, residual=True, activation="gelu_tanh", modulated=True),
    Case((3, 17, 40), 40, activation="relu"),
    Case((64, 7, 7, 512), 32, residual=True),
    Case((2, 1, 12), 3, activation="gelu_erf"),
    Case((1, 200, 150, 320), 32, activation="silu", parameter_dtype="float32"),
    Case((2, 300, 300, 64), 1, activation="relu2", modulated=True),
    Case((4, 33, 31, 64), 8, activation="mish"),
    Case((4, 33, 31, 64), 8, activation="hard_swish", residual=True),
)
"""Cases that differ only for a kernel: one slice or several, vectors or pairs, sums merged in a separate
kernel or not."""
