"""Products whose rows are cut into parts: devices sum one part while they multiply the next."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxfused.parallel import ring
from jaxfused.runtime.sharding import AxisName

_PARTS, _LEAST_ROWS = 4, 256
"""Largest number of parts, and fewest tokens of a part: a product of fewer tokens is no faster, since it
has to read all weights."""


def of_rows(x: jax.Array) -> list[jax.Array]:
    """Returns rows [..., T, D], cut along the tokens T into parts that are multiplied one by one."""
    tokens = x.shape[-2]
    counts = [n for n in range(1, _PARTS + 1) if tokens % n == 0 and tokens >= n * _LEAST_ROWS]
    return jnp.split(x, counts[-1] if counts else 1, axis=-2)


def multiplied(
    multiply: Callable[[jax.Array], jax.Array], rows: jax.Array
) -> tuple[jax.Array, ...]:
    """Returns `multiply(part)` of each part of rows [..., T, D], one after the other."""
    [products] = ring.each([of_rows(rows)], multiply)
    return tuple(products)


def added_up(axis_name: AxisName, parts: tuple[jax.Array, ...]) -> jax.Array:
    """Returns the concatenated parts of rows, each summed over devices after the part before it.

    Without that order, XLA would merge the sums into one, which could start only after the last product.
    """
    [sums] = ring.each([[*parts]], lambda part: lax.psum(part, axis_name))
    return jnp.concatenate(sums, axis=-2)
