"""Shapes of group_norm, for the reference and for every kernel."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from tests.cases.normal import normal


@dataclass(frozen=True)
class Case:
    shape: tuple[int, ...]
    num_groups: int
    scale: bool = True
    bias: bool = True
    residual: bool = False
    activation: str | None = None
    parameter_dtype: str | None = None
    """None for the dtype of x."""

    def arguments(self, dtype, seed=0):
        """(x, scale, bias, residual); x has a mean that is not zero."""
        rng = np.random.default_rng(seed)
        parameter_dtype = dtype if self.parameter_dtype is None else self.parameter_dtype
        return (
            jnp.asarray(rng.normal(0.5, size=self.shape), dtype),
            normal(rng, parameter_dtype, self.shape[-1]) if self.scale else None,
            normal(rng, parameter_dtype, self.shape[-1]) if self.bias else None,
            normal(rng, dtype, *self.shape) if self.residual else None,
        )


CASES = (
    Case((2, 5, 3, 12), 4, activation="silu"),
    Case((3, 7, 6), 2, residual=True, activation="relu"),
    Case((2, 3, 2, 3, 10), 5, bias=False, residual=True, activation="gelu_tanh"),
    Case((2, 5, 5, 6), 1, scale=False, bias=False),
    Case((2, 9, 6), 6, activation="gelu_erf", parameter_dtype="float32"),
    Case((3, 9), 3),
    Case((0, 4, 6), 2, residual=True),
)
