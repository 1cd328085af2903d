"""Shapes of linear, for the reference and for every kernel."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from tests.support.arrays import put


@dataclass(frozen=True)
class Case:
    rows: tuple[int, ...]
    features: int
    out_features: int
    activation: str | None = None
    bias: bool = False
    residual: bool = False
    w_dtype: str | None = None
    """Dtype of w; None for x's."""

    def arguments(self, dtype, seed=0):
        """Returns (x, w, bias, residual); weights are scaled to keep the result of order 1."""
        rng = np.random.default_rng(seed)
        parameter_dtype = dtype if self.w_dtype is None else jnp.dtype(self.w_dtype)
        w = rng.normal(size=(self.features, self.out_features)) * self.features**-0.5
        bias = rng.normal(size=self.out_features)
        residual = rng.normal(size=(*self.rows, self.out_features))
        return (
            put(rng.normal(size=(*self.rows, self.features)), dtype),
            put(w, parameter_dtype),
            put(bias, parameter_dtype) if self.bias else None,
            put(residual, dtype) if self.residual else None,
        )


CASES = (
    Case((8,), 16, 24),
    Case((3, 5), 16, 24, bias=True),
    Case((2, 3, 5), 17, 1, activation="gelu_tanh", bias=True, residual=True),
    Case((7,), 1, 13, activation="silu", residual=True),
    Case((6,), 33, 9, activation="relu2", bias=True, w_dtype="float32"),
    Case((6,), 33, 9, activation="gelu_erf", w_dtype="float32"),
    Case((), 5, 3, activation="relu", bias=True),
    Case((0,), 5, 3, activation="relu", bias=True),
    Case((5,), 6, 3, activation="tanh", bias=True),
    Case((5,), 6, 3, activation="hard_sigmoid", bias=True),
)

KERNEL_CASES = (
    Case((2, 5), 16, 32, activation="gelu_tanh", bias=True, residual=True),
    Case((130,), 64, 208, activation="gelu_erf", bias=True, w_dtype="float32"),
    Case((7, 3), 48, 16, residual=True),
    Case((1,), 96, 64, activation="silu"),
    Case((130,), 64, 64, activation="mish", bias=True),
    Case((130,), 64, 64, activation="sigmoid", bias=True),
)
"""Cases with sizes that tensor cores support."""
