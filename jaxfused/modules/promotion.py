"""Flax's promotion of parameters, for those whose dtypes operators do not accept."""

from typing import Any

import jax.numpy as jnp


def floating(parameter: Any, dtype: Any) -> Any:
    """Returns an integer parameter in the dtype of the computation, to which Flax promotes it.

    Every other parameter, including None, is returned as it is: operators accept any float dtype, and
    sum the parameter's gradient in float32.
    """
    if not jnp.issubdtype(getattr(parameter, "dtype", jnp.float32), jnp.integer):
        return parameter
    return parameter.astype(dtype)
