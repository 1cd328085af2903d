"""Shapes of qkv_projection, for the reference and for every kernel."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from tests.support.arrays import put


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
    interleaved: bool = False
    w_dtype: str | None = None
    """Dtype of w; None for x's."""

    def arguments(self, dtype, seed=0):
        """Returns (x, w, bias, q_scale, k_scale)."""
        rng = np.random.default_rng(seed)
        parameter_dtype = dtype if self.w_dtype is None else jnp.dtype(self.w_dtype)
        columns = (self.heads + 2 * self.key_heads) * self.head_size
        x = put(rng.normal(size=(*self.rows, self.features)), dtype)
        w = rng.normal(size=(self.features, columns)) * self.features**-0.5
        bias = rng.normal(size=columns) if self.bias else None
        scales = 1.0 + 0.1 * rng.normal(size=(2, self.head_size))
        parameters = (w, bias, *(scales if self.norm else (None, None)))
        return x, *jax.tree.map(lambda a: put(a, parameter_dtype), parameters)


CASES = (
    Case((2, 5), 12, 4, 2, 8, bias=True, norm=True, rotary_dim=8),
    Case((7,), 9, 3, 1, 6, rotary_dim=4, w_dtype="float32"),
    Case((2, 3), 8, 2, 2, 5, bias=True),
    Case((2, 4), 10, 4, 1, 10, norm=True, rotary_dim=6, interleaved=True),
)

KERNEL_CASES = (
    Case((2, 37), 48, 4, 2, 32, bias=True, norm=True, rotary_dim=32),
    Case((3, 8), 32, 2, 2, 64, rotary_dim=32, w_dtype="float32"),
    Case((70,), 64, 3, 1, 16, bias=True),
    Case((70,), 32, 4, 4, 64, bias=True),
    Case((2, 20), 32, 2, 1, 48, norm=True),
)
"""Cases with sizes that tensor cores support; heads without norm and rotation may have any size."""
