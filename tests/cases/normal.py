"""Random arrays of the cases."""

import jax
import jax.numpy as jnp
import numpy as np


def normal(rng: np.random.Generator, dtype, *shape: int) -> jax.Array:
    """Standard normal numbers, drawn in float64 and rounded to `dtype`."""
    return jnp.asarray(rng.normal(size=shape), dtype)
