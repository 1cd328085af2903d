"""Arrays on the device that no program makes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def put(array: Any, dtype: Any = None) -> jax.Array:
    """Returns an array of NumPy, or a list, as one of JAX.

    Where it changes the dtype, `jnp.asarray` has XLA compile a program for each shape, which takes
    longer than many a test.
    """
    return jax.device_put(np.asarray(array, None if dtype is None else jnp.dtype(dtype)))
