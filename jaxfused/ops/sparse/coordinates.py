"""Entries of JAX's sparse matrices by row and column."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.sparse import BCOO, BCSR, JAXSparse

from jaxfused.runtime import sharding
from jaxfused.runtime.checks import as_int32

SparseMatrix = BCOO | BCSR


class Coordinates(NamedTuple):
    """Rows and columns of a sparse matrix's entries; entries beyond the matrix are ignored."""

    rows: jax.Array
    """Row of each entry, int32 [entries]; padding has the number of rows or more."""
    columns: jax.Array
    """Column of each entry, int32 [entries]; padding has the number of columns or more."""
    in_order: bool
    """True if the rows never decrease from entry to entry."""
    is_unique: bool
    """True if no two entries have the same row and column."""
    starts: jax.Array | None = None
    """First entry of each row, and where the last row ends, int32 [rows + 1]; None except for a BCSR."""
    indices: jax.Array | None = None
    """Rows and columns as a BCOO in order has them, int32 [entries, 2]; else None. Negative rows are
    ignored, negative columns count from the end."""

    @property
    def transposed(self) -> "Coordinates":
        return Coordinates(self.columns, self.rows, False, self.is_unique)

    def at(self, order: jax.Array) -> "Coordinates":
        """Returns the entries in an order, int32 [entries], in which their rows never decrease."""
        return Coordinates(self.rows[order], self.columns[order], True, self.is_unique)


@dataclass(frozen=True)
class Container:
    """Makes sparse matrices with the class and indices of `like` and other values."""

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


def check_dense(op: str, name: str, matrix: Any) -> None:
    """Checks that `matrix` is not one of JAX's sparse matrices."""
    if isinstance(matrix, JAXSparse):
        raise ValueError(
            f"{op}: {name} is a {type(matrix).__name__}, but one factor of the product is sparse and the"
            f" other dense; pass {name}.todense(), or multiply two sparse ones by JAX's operator @."
        )


def check_sparse(op: str, name: str, matrix: Any) -> None:
    """Checks that `matrix` is one sparse matrix of JAX's without batches or dense axes."""
    if not isinstance(matrix, SparseMatrix):
        if isinstance(matrix, jax.core.Tracer):
            raise ValueError(
                f"{op}: {name} is a traced dense array; pass a BCOO or BCSR of jax.experimental.sparse,"
                " outside of its `sparsify`, which shows dense arrays to functions."
            )
        dense = f"{name}.todense()" if hasattr(matrix, "todense") else name
        raise ValueError(
            f"{op}: {name} is a {type(matrix).__name__}; pass a BCOO or BCSR of jax.experimental.sparse,"
            f" as BCOO.fromdense({dense})."
        )
    if matrix.ndim != 2 or matrix.n_batch or matrix.n_dense:
        raise ValueError(
            f"{op}: {name} has shape {matrix.shape} with {matrix.n_batch} batch and {matrix.n_dense}"
            " dense axes; pass a matrix of two sparse axes, and use jax.vmap for several."
        )


def coordinates(matrix: SparseMatrix) -> Coordinates:
    """Returns the rows and columns of a matrix's entries.

    Negative indices count from the end, as in JAX. With `indices_sorted`, negative rows are before the
    first row and are ignored.
    """
    if isinstance(matrix, BCSR):
        places = jnp.arange(matrix.indices.shape[0], dtype=matrix.indptr.dtype)
        # Entries before the first row's start get row -1, and are ignored.
        rows = sharding.searchsorted(matrix.indptr, places, side="right") - 1
        columns, starts = _from_the_end(matrix.indices, matrix.shape[1]), as_int32(matrix.indptr)
        return Coordinates(rows, columns, True, bool(matrix.unique_indices), starts)
    rows, columns = matrix.indices[:, 0], matrix.indices[:, 1]
    in_order = bool(matrix.indices_sorted)
    indices = matrix.indices if in_order and rows.dtype == jnp.int32 else None
    rows = as_int32(rows) if in_order else _from_the_end(rows, matrix.shape[0])
    columns = _from_the_end(columns, matrix.shape[1])
    return Coordinates(rows, columns, in_order, bool(matrix.unique_indices), indices=indices)


def _from_the_end(indices: jax.Array, size: int) -> jax.Array:
    """Returns int32 indices counted from 0; those beyond either end are negative, or `size` or more."""
    indices = as_int32(indices)
    return jnp.where(indices < 0, indices + size, indices)
