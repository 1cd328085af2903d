"""Products with sparse matrices in XLA: by JAX's sparse product in float32, and a dense copy."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import sparse

from jaxfused.ops.sparse.coordinates import Coordinates
from jaxfused.runtime import sharding
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


def dense_copy(data: jax.Array, places: Coordinates, shape: tuple[int, int]) -> jax.Array:
    """Returns the matrix with its zeros, in the dtype of `data`."""
    dtype = data.dtype
    if places.is_unique:
        at = _without_negative(places, shape)
    else:
        at, data = _with_sums(data, places, shape)
    # Duplicate entries were added before: a scatter-add on a GPU has no fixed order.
    return jnp.zeros(shape, dtype).at[at].set(data.astype(dtype), mode="drop")


def repeatable_product(
    data: jax.Array, places: Coordinates, b: jax.Array, *, rows: int, out_dtype: Any
) -> jax.Array:
    """Computes `sparse_product` with sums in a fixed order, which a scatter on a GPU does not have."""
    wide = accumulator_dtype(b.dtype)
    # Negative rows stay negative, so that sorted entries stay sorted.
    at, (_, columns) = places.rows, _without_negative(places, (rows, b.shape[0]))
    data = data.astype(wide)
    if not places.in_order:
        at, columns, data = jax.lax.sort((at, columns, data), num_keys=1)
    bounds = sharding.searchsorted(at, jnp.arange(rows + 1, dtype=at.dtype))
    has_entries, ends = bounds[1:] > bounds[:-1], bounds[1:]

    def times(column: jax.Array) -> jax.Array:
        terms = data * column.astype(wide).at[columns].get(mode="fill", fill_value=0)
        return jnp.where(has_entries, _sums(terms, at)[ends - 1], 0)

    together = max(1, _HELD // data.shape[0])
    return jax.lax.map(times, b.T, batch_size=min(together, b.shape[1])).T.astype(out_dtype)


def _with_sums(
    data: jax.Array, places: Coordinates, shape: tuple[int, ...]
) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    """Adds up duplicate entries; the last of each gets the sum, the others a row beyond the matrix."""
    at = _without_negative(places, shape)
    rows, columns, data = jax.lax.sort(
        (*at, data.astype(accumulator_dtype(data.dtype))), num_keys=2
    )
    is_first = jnp.diff(rows, prepend=-1).astype(bool) | jnp.diff(columns, prepend=-1).astype(bool)
    is_last = jnp.append(is_first[1:], True)
    sums = _sums(data, jnp.cumsum(is_first))
    return (jnp.where(is_last, rows, shape[0]), columns), sums


def _sums(values: jax.Array, groups: jax.Array) -> jax.Array:
    """Returns running sums [entries] of values within each group, added up in a fixed order."""

    def joined(left, right):
        (of_left, sum_left), (of_right, sum_right) = left, right
        return of_right, jnp.where(of_left == of_right, sum_left + sum_right, sum_right)

    return jax.lax.associative_scan(joined, (groups, values))[1]


def _without_negative(places: Coordinates, shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Returns rows and columns, negative ones moved beyond the end; JAX counts them from the end."""
    rows, columns = places.rows, places.columns
    return jnp.where(rows < 0, shape[0], rows), jnp.where(columns < 0, shape[1], columns)


@functools.partial(jax.jit, static_argnames="out_dtype", inline=True)
def sampled_product(
    places: Coordinates, x: jax.Array, y: jax.Array, *, out_dtype: Any
) -> jax.Array:
    """Returns x [M, D] @ y^T [D, N] at these rows and columns, [entries]."""
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
