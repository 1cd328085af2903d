"""Shapes of quantized_matmul, for the reference and for every kernel."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxfused
from tests.cases.normal import normal
from tests.support.arrays import put


@dataclass(frozen=True)
class Case:
    rows: tuple[int, ...]
    features: int
    out_features: int
    w_dtype: str
    w_options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of quantize."""
    activation: str | None = None
    bias: bool = False
    residual: bool = False

    def arguments(self, dtype, seed=0):
        """Returns (x, bias, residual) and the quantised w, scaled to keep the result of order 1."""
        rng = np.random.default_rng(seed)
        x = normal(rng, dtype, *self.rows, self.features)
        w = rng.normal(size=(self.features, self.out_features)) * self.features**-0.5 + 0.01
        bias = normal(rng, dtype, self.out_features) if self.bias else None
        residual = normal(rng, dtype, *self.rows, self.out_features) if self.residual else None
        quantize = jax.jit(lambda w: jaxfused.quantize(w, self.w_dtype, **self.w_options))
        return (x, bias, residual), quantize(put(w, jnp.float32))


CASES = (
    Case((5,), 17, 3, "int8"),
    Case((2, 3), 64, 5, "int8", {"group_size": 32, "symmetric": False}, "silu", True, True),
    Case((2, 7), 128, 9, "int4", {"group_size": 64}, "gelu_tanh", bias=True),
    Case((4,), 6, 5, "int4", {"symmetric": False}, residual=True),
    Case((3,), 9, 7, "float8_e4m3fn", {"per_tensor": True}, "relu", True),
    Case((), 5, 4, "float8_e5m2"),
    Case((6,), 64, 12, "float8_e4m3fn", {"group_size": (32, 4)}, bias=True),
    Case((6,), 24, 12, "int8", {"group_size": (24, 3), "symmetric": False}),
    Case((0,), 6, 4, "int8", activation="relu", bias=True),
)
