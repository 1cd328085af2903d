"""Sums over devices of rows in parts: one part is summed while the next is multiplied."""

import jax
import jax.numpy as jnp
from jax import lax

_PARTS, _LEAST_ROWS = 4, 256
"""In how many parts rows are multiplied at most, and the fewest tokens of a part, since a product of few
rows is bound by its weights."""


def of_rows(x: jax.Array) -> list[jax.Array]:
    """Returns rows [..., T, D] in the parts in which they are multiplied."""
    tokens = x.shape[-2]
    counts = [n for n in range(1, _PARTS + 1) if tokens % n == 0 and tokens >= n * _LEAST_ROWS]
    return jnp.split(x, counts[-1] if counts else 1, axis=-2)


def added_up(axis_name: str, parts: tuple[jax.Array, ...]) -> jax.Array:
    """Returns the sum over devices of rows in parts, one part after the other.

    XLA would join the sums of several parts, which then wait for the last product.
    """
    sums: list[jax.Array] = []
    for part in parts:
        if sums:
            sums[-1], part = lax.optimization_barrier((sums[-1], part))
        sums.append(lax.psum(part, axis_name))
    return jnp.concatenate(sums, axis=-2)
