"""Products with sparse matrices in XLA: by JAX's sparse product in float32, or by a dense matrix."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import sparse

from jaxfused.ops.sparse.coordinates import Coordinates
from jaxfused.runtime.product_xla import product
from jaxfused.runtime.promotion import accumulator_dtype


def sparse_product(
    data: jax.Array, places: Coordinates, b: jax.Array, *, rows: int, out_dtype: Any
) -> jax.Array:
    """Returns the sparse matrix of `rows` rows and these entries times b [K, N]."""
    wide = accumulator_dtype(b.dtype)
    # Operands are converted to float32 first, because JAX rounds partial sums to their dtype.
    indices = jnp.stack(_without_negative(places, (rows, b.shape[0])), axis=1)
    matrix = sparse.BCOO((data.astype(wide), indices), shape=(rows, b.shape[0]))
    numbers = (((1,), (0,)), ((), ()))
    y: Any = sparse.bcoo_dot_general(matrix, b.astype(wide), dimension_numbers=numbers)
    return y.astype(out_dtype)


def dense_product(
    data: jax.Array,
    places: Coordinates,
    b: jax.Array,
    *,
    rows: int,
    out_dtype: Any,
    precision: Any,
) -> jax.Array:
    """Returns the product of `sparse_product` by a dense copy of the matrix."""
    a = jnp.zeros((rows, b.shape[0]), data.dtype)
    a = a.at[_without_negative(places, a.shape)].add(data, mode="drop")
    return product("mk,kn->mn", a, b, dtype=b.dtype, out_dtype=out_dtype, precision=precision)


def _without_negative(places: Coordinates, shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Returns places with negative ones moved beyond the end, as JAX would count them from there."""
    rows, columns = places.rows, places.columns
    return jnp.where(rows < 0, shape[0], rows), jnp.where(columns < 0, shape[1], columns)


@functools.partial(jax.jit, static_argnames="out_dtype", inline=True)
def sampled_product(
    places: Coordinates, x: jax.Array, y: jax.Array, *, out_dtype: Any
) -> jax.Array:
    """Returns x [M, D] @ y^T [D, N] at these places, [entries]."""
    wide = accumulator_dtype(x.dtype)

    def numbers(rows: jax.Array, columns: jax.Array) -> jax.Array:
        of_x = x.at[rows].get(mode="fill", fill_value=0).astype(wide)
        of_y = y.at[columns].get(mode="fill", fill_value=0).astype(wide)
        return jnp.sum(of_x * of_y, axis=1)

    # A loop over groups of entries bounds the gathered rows of x and y in memory.
    count = places.rows.shape[0]
    together = min(count, max(1, _HELD // x.shape[1]))
    whole = count // together * together
    parts = [p[:whole].reshape(-1, together) for p in (places.rows, places.columns)]
    found = jax.lax.map(lambda part: numbers(*part), tuple(parts)).reshape(-1)
    rest = numbers(places.rows[whole:], places.columns[whole:])
    exists = (places.rows >= 0) & (places.rows < x.shape[0])
    exists &= (places.columns >= 0) & (places.columns < y.shape[0])
    return jnp.where(exists, jnp.concatenate([found, rest]), 0).astype(out_dtype)


_HELD = 2**22
"""Largest number of values of x that are gathered at a time."""
