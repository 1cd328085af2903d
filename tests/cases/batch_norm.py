"""Shapes of batch_norm, for the reference and for every kernel."""

from dataclasses import dataclass

import numpy as np

from tests.cases.normal import normal
from tests.support.arrays import put


@dataclass(frozen=True)
class Case:
    shape: tuple[int, ...]
    scale: bool = True
    bias: bool = True
    residual: bool = False
    activation: str | None = None
    parameter_dtype: str | None = None
    """Dtype of the parameters; None for x's."""

    def arguments(self, dtype, seed=0):
        """Returns (x, scale, bias, residual); x has a mean that is not zero."""
        rng = np.random.default_rng(seed)
        parameter_dtype = dtype if self.parameter_dtype is None else self.parameter_dtype
        return (
            put(rng.normal(0.5, size=self.shape), dtype),
            normal(rng, parameter_dtype, self.shape[-1]) if self.scale else None,
            normal(rng, parameter_dtype, self.shape[-1]) if self.bias else None,
            normal(rng, dtype, *self.shape) if self.residual else None,
        )

    def statistics(self, dtype, seed=1):
        """Returns the (mean, var) of inference."""
        rng = np.random.default_rng(seed)
        mean = rng.normal(size=self.shape[-1])
        return put(mean, dtype), put(rng.uniform(0.5, 2.0, mean.shape), dtype)


CASES = (
    Case((3, 5, 7), activation="silu", residual=True),
    Case((4, 3, 3, 5), activation="relu", bias=False),
    Case((5, 2, 2, 3, 3), scale=False, bias=False, residual=True),
    Case((9, 6), activation="gelu_tanh", parameter_dtype="float32"),
    Case((31, 6), activation="gelu_erf"),
    Case((2, 3, 4, 6), activation="relu", residual=True, parameter_dtype="float32"),
    Case((5, 4, 4, 6), activation="hard_swish", parameter_dtype="float32"),
    Case((5, 4, 4, 6), activation="relu6", residual=True),
)
