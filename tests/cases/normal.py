"""Random arrays of the cases."""

import jax
import numpy as np

from tests.support.arrays import put


def normal(rng: np.random.Generator, dtype, *shape: int) -> jax.Array:
    """Draws standard normal numbers in float64 and rounds them to `dtype`."""
    return put(rng.normal(size=shape), dtype)
