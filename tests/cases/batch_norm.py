"""Shapes of batch_norm, for the reference and for every kernel."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Case:
    shape: tuple[int, ...]
    scale: bool = True
    bias: bool = True
    residual: bool = False
    activation: str | None = None
    parameter_dtype: str | None = None
    """None for the dtype of x."""

    def arguments(self, dtype, seed=0):
        """(x, scale, bias, residual); x has a mean that is not zero."""
        keys = jax.random.split(jax.random.key(seed), 4)
        parameter_dtype = dtype if self.parameter_dtype is None else self.parameter_dtype
        x = jax.random.normal(keys[0], self.shape, dtype) + jnp.asarray(0.5, dtype)
        scale = jax.random.normal(keys[1], self.shape[-1:], parameter_dtype)
        bias = jax.random.normal(keys[2], self.shape[-1:], parameter_dtype)
        residual = jax.random.normal(keys[3], self.shape, dtype)
        return (
            x,
            scale if self.scale else None,
            bias if self.bias else None,
            residual if self.residual else None,
        )

    def statistics(self, dtype, seed=1):
        """(mean, var) to normalise by in inference."""
        keys = jax.random.split(jax.random.key(seed))
        mean = jax.random.normal(keys[0], self.shape[-1:], dtype)
        return mean, jax.random.uniform(keys[1], self.shape[-1:], dtype, 0.5, 2.0)


CASES = (
    Case((3, 5, 7), activation="silu", residual=True),
    Case((4, 3, 3, 5), activation="relu", bias=False),
    Case((5, 2, 2, 3, 3), scale=False, bias=False, residual=True),
    Case((9, 6), activation="gelu_tanh", parameter_dtype="float32"),
    Case((31, 6), activation="gelu_erf"),
)
