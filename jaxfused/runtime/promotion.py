"""Promotion of dtypes and of ranks, written out where it is meant.

JAX refuses both where its user asks it to (`jax_numpy_dtype_promotion="strict"`,
`jax_numpy_rank_promotion="raise"`), and every operator has to work there too.
"""

from typing import Any

import jax
import jax.numpy as jnp


def common_dtype(*dtypes: Any) -> Any:
    """The dtype that JAX promotes these to by default."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*(jnp.dtype(dtype) for dtype in dtypes))


def accumulator_dtype(dtype: Any) -> Any:
    """float32, or float64 for float64: what sums and elementwise arithmetic are carried in."""
    return common_dtype(dtype, jnp.float32)


def along_last_axis(vector: jax.Array, like: jax.Array) -> jax.Array:
    """A vector [D] in the dtype of `like` [..., D], and with as many axes.

    Of vectors [*leading, D] there is one for each entry of the first axes of `like`.
    """
    *leading, size = vector.shape
    inner = (1,) * (like.ndim - vector.ndim)
    return vector.astype(like.dtype).reshape(*leading, *inner, size)
