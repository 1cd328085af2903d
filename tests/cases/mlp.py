"""Shapes of mlp and gated_mlp, for the references and for every kernel."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from tests.support.arrays import put


@dataclass(frozen=True)
class Case:
    rows: tuple[int, ...]
    features: int
    hidden: int
    out_features: int
    activation: str | None
    bias: bool = False
    residual: bool = False
    w_dtype: str | None = None
    """Dtype of the weights; None for x's."""

    def mlp_arguments(self, dtype, seed=0):
        """Returns (x, w1, b1, w2, b2, residual); weights are scaled to keep the result of order 1."""
        rng = np.random.default_rng(seed)
        parameter_dtype = dtype if self.w_dtype is None else jnp.dtype(self.w_dtype)

        def weight(inputs, outputs):
            w = rng.normal(size=(inputs, outputs)) * inputs**-0.5
            return put(w, parameter_dtype)

        x = put(rng.normal(size=(*self.rows, self.features)), dtype)
        w1, w2 = weight(self.features, self.hidden), weight(self.hidden, self.out_features)
        b1, b2 = (weight(1, n)[0] if self.bias else None for n in (self.hidden, self.out_features))
        residual = put(rng.normal(size=(*self.rows, self.out_features)), dtype)
        return x, w1, b1, w2, b2, residual if self.residual else None

    def gated_arguments(self, dtype, seed=0):
        """Returns (x, w_gate, b_gate, w_up, b_up, w_down, b_down, residual)."""
        x, w_gate, b_gate, w_down, b_down, residual = self.mlp_arguments(dtype, seed)
        _, w_up, b_up, *_ = self.mlp_arguments(dtype, seed + 1)
        return x, w_gate, b_gate, w_up, b_up, w_down, b_down, residual


CASES = (
    Case((2, 5), 16, 32, 16, "gelu_tanh", bias=True, residual=True),
    Case((7,), 13, 17, 3, "silu", residual=True, w_dtype="float32"),
    Case((3,), 4, 6, 5, "relu"),
)

KERNEL_CASES = (
    Case((2, 5), 16, 32, 16, "gelu_tanh", bias=True, residual=True),
    Case((130,), 64, 208, 32, "silu", bias=True, w_dtype="float32"),
    Case((7, 3), 48, 96, 16, None),
)
"""Cases with sizes that tensor cores support."""
