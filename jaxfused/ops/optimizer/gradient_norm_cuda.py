"""The sum of the squares of all gradients of a tree, by the kernels of gradient_norm.cu."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxfused.runtime import cuda_library

_MAX_LEAVES = 256
"""Largest number of gradients in one launch."""
_MOST_BLOCKS = 2048


def sum_of_squares(factor: jax.Array, gradients: Sequence[jax.Array]) -> jax.Array:
    """Returns float32 [2]: the sum of (factor g)^2, and how many launches saw a non-finite value.

    Args:
      factor: a float32 scalar.
      gradients: arrays of one dtype and any shapes.
    """
    cuda_library.register()
    call = jax.ffi.ffi_call(
        "jaxfused_gradient_norm",
        (
            jax.ShapeDtypeStruct((2,), jnp.float32),
            jax.ShapeDtypeStruct((_MOST_BLOCKS, 2), jnp.float32),
        ),
    )
    total = jnp.zeros(2, jnp.float32)
    for first in range(0, len(gradients), _MAX_LEAVES):
        stats, _ = call(factor.reshape(1), *gradients[first : first + _MAX_LEAVES])
        total = stats if first == 0 else total + stats
    return total
