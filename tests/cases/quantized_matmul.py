"""Shapes of quantized_matmul, for the reference and for every kernel."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxfused
from jaxfused.runtime.activation import activate
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


@dataclass(frozen=True)
class Layer:
    """A kernel's call of activation(x @ w + bias) + residual, with quantised weights."""

    m: int
    k: int
    n: int
    dtype: str = "int8"
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of `quantize`."""
    x_dtype: str = "bfloat16"
    """Dtype of x, which is quantised as the weights are if it has their dtype."""
    activation: str | None = "gelu_tanh"
    plain: bool = False
    """True if bias and residual are absent."""

    def __str__(self):
        options = " ".join(f"{name}={value}" for name, value in self.options.items())
        return f"{self.dtype} {options} {self.m}x{self.k}x{self.n} {self.x_dtype}"

    @property
    def residual_dtype(self) -> str:
        return self.x_dtype

    def operands(self, seed=0):
        """Returns x, the quantised weights in columns, the bias and the residual."""
        rng = np.random.default_rng(seed)
        w = put(rng.normal(size=(self.k, self.n)) * self.k**-0.5 + 0.01, jnp.float32)
        q = jaxfused.quantize(w, self.dtype, layout="columns", **self.options)
        x = put(rng.normal(size=(self.m, self.k)), jnp.float32)
        if self.x_dtype == self.dtype:
            x = jaxfused.quantize(x, self.dtype, axis=-1, group_size=self.options.get("group_size"))
        else:
            x = x.astype(self.x_dtype)
        if self.plain:
            return x, q, None, None
        bias = put(rng.normal(size=self.n), jnp.float32)
        return x, q, bias, put(rng.normal(size=(self.m, self.n)), self.residual_dtype)

    def expected(self, x, w, bias, residual, dtype):
        """Computes the result and its preactivations of dequantised operands, in `dtype`."""
        z = jnp.matmul(x.astype(dtype), w.astype(dtype), preferred_element_type=dtype)
        z = z if bias is None else z + bias.astype(dtype)
        y = activate(self.activation, z)
        return {"y": y if residual is None else y + residual.astype(dtype), "z": z}


CASES = (
    Case((5,), 17, 3, "int8"),
    Case((2, 3), 64, 5, "int8", {"group_size": 32, "layout": "rows"}, "silu", True, True),
    Case((2, 7), 128, 9, "int4", {"group_size": 64}, "gelu_tanh", bias=True),
    Case((4,), 6, 5, "int4", {"symmetric": False}, residual=True),
    Case((3,), 9, 7, "float8_e4m3fn", {"per_tensor": True, "layout": "rows"}, "relu", True),
    Case((), 5, 4, "float8_e5m2"),
    Case((6,), 64, 12, "float8_e4m3fn", {"group_size": (32, 4)}, bias=True),
    Case((6,), 24, 12, "int8", {"group_size": (24, 3), "symmetric": False}),
    Case((0,), 6, 4, "int8", activation="relu", bias=True),
)
