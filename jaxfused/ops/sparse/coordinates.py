"""The entries of JAX's sparse matrices by their rows and columns."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.sparse import BCOO, BCSR

from jaxfused.runtime.checks import as_int32

SparseMatrix = BCOO | BCSR


class Coordinates(NamedTuple):
    """Where each entry of a sparse matrix is. Those beyond the matrix count for nothing."""

    rows: jax.Array
    """int32 [entries]; one of the padding is the number of rows or more."""
    columns: jax.Array
    """int32 [entries]; likewise."""
    in_order: bool
    """True if rows do not fall from entry to entry."""

    @property
    def transposed(self) -> "Coordinates":
        return Coordinates(self.columns, self.rows, False)


@dataclass(frozen=True)
class Container:
    """How a sparse matrix holds its entries, to make one with other values."""

    like: Any

    def with_data(self, data: jax.Array) -> Any:
        flags = dict(
            shape=self.like.shape,
            indices_sorted=self.like.indices_sorted,
            unique_indices=self.like.unique_indices,
        )
        if isinstance(self.like, BCSR):
            return BCSR((data, self.like.indices, self.like.indptr), **flags)
        return BCOO((data, self.like.indices), **flags)


def check_sparse(op: str, name: str, matrix: Any) -> None:
    """Checks that `matrix` is one sparse matrix of JAX's without batches or dense axes."""
    if not isinstance(matrix, SparseMatrix):
        raise ValueError(
            f"{op}: {name} is a {type(matrix).__name__}; pass a BCOO or BCSR of jax.experimental.sparse,"
            f" as BCOO.fromdense({name})."
        )
    if matrix.ndim != 2 or matrix.n_batch or matrix.n_dense:
        raise ValueError(
            f"{op}: {name} has shape {matrix.shape} with {matrix.n_batch} batch and {matrix.n_dense}"
            " dense axes; pass a matrix of two sparse axes, and use jax.vmap for several."
        )


def coordinates(matrix: SparseMatrix) -> Coordinates:
    """Returns the rows and columns of a matrix's entries.

    Negative indices count from the end, as in JAX. Where indices are said to be sorted, those of rows
    are before the first row and count for nothing.
    """
    if isinstance(matrix, BCSR):
        places = jnp.arange(matrix.indices.shape[0], dtype=matrix.indptr.dtype)
        # Entries before the first row's start are in row -1, and count for nothing.
        rows = jnp.searchsorted(matrix.indptr, places, side="right").astype(jnp.int32) - 1
        return Coordinates(rows, _from_the_end(matrix.indices, matrix.shape[1]), True)
    rows, columns = matrix.indices[:, 0], matrix.indices[:, 1]
    in_order = bool(matrix.indices_sorted)
    rows = as_int32(rows) if in_order else _from_the_end(rows, matrix.shape[0])
    return Coordinates(rows, _from_the_end(columns, matrix.shape[1]), in_order)


def _from_the_end(indices: jax.Array, size: int) -> jax.Array:
    """Returns int32 indices; one beyond either end is negative, or `size` or more."""
    indices = as_int32(indices)
    return jnp.where(indices < 0, indices + size, indices)
