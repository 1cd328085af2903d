"""Shapes of mlp and gated_mlp, for the references and for every kernel."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp


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
    """None for the dtype of x."""

    def _weight(self, key, inputs, outputs, dtype):
        w = jax.random.normal(key, (inputs, outputs)) * inputs**-0.5
        return w.astype(dtype if self.w_dtype is None else jnp.dtype(self.w_dtype))

    def mlp_arguments(self, dtype, seed=0):
        """(x, w1, b1, w2, b2, residual); weights are scaled to keep the result of order 1."""
        keys = jax.random.split(jax.random.key(seed), 6)
        x = jax.random.normal(keys[0], (*self.rows, self.features), dtype)
        w1 = self._weight(keys[1], self.features, self.hidden, dtype)
        w2 = self._weight(keys[2], self.hidden, self.out_features, dtype)
        b1 = self._weight(keys[3], 1, self.hidden, dtype)[0] if self.bias else None
        b2 = self._weight(keys[4], 1, self.out_features, dtype)[0] if self.bias else None
        residual = jax.random.normal(keys[5], (*self.rows, self.out_features), dtype)
        return x, w1, b1, w2, b2, residual if self.residual else None

    def gated_arguments(self, dtype, seed=0):
        """(x, w_gate, b_gate, w_up, b_up, w_down, b_down, residual)."""
        x, w_gate, b_gate, w_down, b_down, residual = self.mlp_arguments(dtype, seed)
        _, w_up, b_up, *_ = self.mlp_arguments(dtype, seed + 1)
        return x, w_gate, b_gate, w_up, b_up, w_down, b_down, residual


CASES = (
    Case((2, 5), 16, 32, 16, "gelu_tanh", bias=True, residual=True),
    Case((7,), 13, 17, 3, "silu", residual=True, w_dtype="float32"),
    Case((3,), 4, 6, 5, "relu"),
)
