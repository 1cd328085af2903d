"""Arrays on the device that no program makes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def put(array: Any, dtype: Any = None) -> jax.Array:
    """Returns an array of NumPy, or a list, as one of JAX.

    `jnp.asarray` has XLA compile a program for each shape and dtype, which takes longer than most tests.
    """
    return jax.device_put(np.asarray(array, None if dtype is None else jnp.dtype(dtype)))
