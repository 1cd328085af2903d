"""Shapes of qkv_projection, for the reference and for every kernel."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Case:
    rows: tuple[int, ...]
    features: int
    heads: int
    key_heads: int
    head_size: int
    bias: bool = False
    norm: bool = False
    rotary_dim: int = 0
    w_dtype: str | None = None
    """None for the dtype of x."""

    def arguments(self, dtype, seed=0):
        """(x, w, bias, q_scale, k_scale)."""
        keys = jax.random.split(jax.random.key(seed), 5)
        columns = (self.heads + 2 * self.key_heads) * self.head_size
        x = jax.random.normal(keys[0], (*self.rows, self.features), dtype)
        w = jax.random.normal(keys[1], (self.features, columns)) * self.features**-0.5
        bias = jax.random.normal(keys[2], (columns,)) if self.bias else None
        q_scale, k_scale = (
            1.0 + 0.1 * jax.random.normal(key, (self.head_size,)) if self.norm else None
            for key in keys[3:]
        )
        parameter_dtype = dtype if self.w_dtype is None else jnp.dtype(self.w_dtype)
        parameters = (w, bias, q_scale, k_scale)
        return x, *jax.tree.map(lambda a: a.astype(parameter_dtype), parameters)


CASES = (
    Case((2, 5), 12, 4, 2, 8, bias=True, norm=True, rotary_dim=8),
    Case((7,), 9, 3, 1, 6, rotary_dim=4, w_dtype="float32"),
    Case((2, 3), 8, 2, 2, 5, bias=True),
)
