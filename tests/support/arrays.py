"""Puts arrays on the device without a compiled program."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def put(array: Any, dtype: Any = None) -> jax.Array:
    """Converts a NumPy array or a list to a JAX array.

    To change the dtype, `jnp.asarray` would have XLA compile a program for each shape, which takes
    longer than many tests.
    """
    return jax.device_put(np.asarray(array, None if dtype is None else jnp.dtype(dtype)))
