"""What Flax's promotion of dtypes asks of parameters that operators take in a dtype of their own."""

from typing import Any

import jax.numpy as jnp


def floating(parameter: Any, dtype: Any) -> Any:
    """A parameter of integers in the dtype of the computation, to which Flax promotes it.

    Every other parameter is returned as it is, None too: operators take any float dtype, and sum up
    the parameter's gradient in float32.
    """
    if not jnp.issubdtype(getattr(parameter, "dtype", jnp.float32), jnp.integer):
        return parameter
    return parameter.astype(dtype)
