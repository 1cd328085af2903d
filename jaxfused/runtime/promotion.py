"""Explicit promotion of dtypes and ranks.

Users can make JAX refuse implicit promotion (`jax_numpy_dtype_promotion="strict"`,
`jax_numpy_rank_promotion="raise"`): every operator has to work with these settings.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxfused.runtime import resharding


def common_dtype(*dtypes: Any) -> Any:
    """Returns the dtype to which JAX promotes these arrays' dtypes by default."""
    given = [jnp.dtype(dtype) for dtype in dtypes]
    narrow = {
        dtype for dtype in given if dtype.itemsize == 1 and jnp.issubdtype(dtype, jnp.floating)
    }
    if narrow and len({*given}) > 1:
        raise ValueError(
            f"arrays have dtypes {', '.join(map(str, given))}, but JAX promotes no float of 8 bits; pass"
            f" the arrays of {', '.join(map(str, narrow))} converted, as by .astype(jnp.bfloat16)."
        )
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*given)


def accumulator_dtype(dtype: Any) -> Any:
    """Returns the dtype of sums and elementwise arithmetic: float32, or float64 for float64."""
    return common_dtype(dtype, jnp.float32)


def along_last_axis(vector: jax.Array, like: jax.Array) -> jax.Array:
    """Returns a vector [D] in the dtype of `like` [..., D], with axes of length 1 to match its rank.

    Leading axes of a vector [*leading, D] are the first axes of `like`.
    """
    *leading, size = vector.shape
    inner = (1,) * (like.ndim - vector.ndim)
    vector = resharding.split_with(vector, like, (*range(len(leading)), -1))
    return vector.astype(like.dtype).reshape(*leading, *inner, size)
