"""Products with sparse matrices by the kernels of ffi/sparse/csr_matmul.cu and sampled_matmul.cu."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfused.ops.sparse.coordinates import Coordinates
from jaxfused.runtime import cuda_library

_MOST = 2**31 - 2**11
"""Largest number of rows, columns and entries, because the kernels' indices have 32 bits."""
_MOST_COLUMNS = 2**20
"""Largest number of columns of b, limited by the kernel's grid."""


def why_unsupported(
    *,
    compute_capability: tuple[int, int] | None,
    dtypes: Mapping[str, Any],
    out_dtype: Any,
    sizes: Mapping[str, int],
    columns: int,
) -> str | None:
    """Returns None if the kernels can run, else the reason.

    Args:
      compute_capability: of the GPU, or None where there is none.
      dtypes: dtypes of the operands, by name.
      out_dtype: of the result.
      sizes: rows, columns and entries, by name.
      columns: of the result; 1 for single numbers.
    """
    if reason := cuda_library.why_unfit(compute_capability):
        return reason
    for name, dtype in dtypes.items():
        if reason := cuda_library.why_dtype_unfit(dtype, f"{name} has"):
            return reason
    if len({*map(jnp.dtype, dtypes.values()), jnp.dtype(out_dtype)}) > 1:
        return "it takes operands and a result of one dtype"
    for name, size in sizes.items():
        if size > _MOST:
            return f"its indices have 32 bits, and there are {size} {name}"
    if columns > _MOST_COLUMNS:
        return f"it takes at most {_MOST_COLUMNS} columns, and the result has {columns}"
    return cuda_library.why_unavailable()


def sparse_product(data: jax.Array, places: Coordinates, b: jax.Array, *, rows: int) -> jax.Array:
    """Returns the sparse matrix of `rows` rows and these entries times b [K, N], in b's dtype."""
    cuda_library.register()
    if not places.in_order:
        order = jnp.argsort(places.rows, stable=True)
        data, places = data[order], places.at(order)
    out = jax.ShapeDtypeStruct((rows, b.shape[1]), b.dtype)
    return jax.ffi.ffi_call("jaxfused_csr_matmul", out)(
        *_by_rows(places, (rows, b.shape[0])), data, b
    )


def dense_copy(data: jax.Array, places: Coordinates, shape: tuple[int, int]) -> jax.Array:
    """Returns the matrix with its zeros, in the dtype of `data`, of unique entries in order."""
    cuda_library.register()
    out = jax.ShapeDtypeStruct(shape, data.dtype)
    return jax.ffi.ffi_call("jaxfused_csr_dense", out)(*_by_rows(places, shape), data)


def _by_rows(places: Coordinates, shape: tuple[int, int]) -> tuple[jax.Array, jax.Array]:
    """Returns the first entry of each row, [rows + 1], and the columns of the ordered entries."""
    if places.starts is not None:
        return places.starts, places.columns
    given = places.rows if places.indices is None else places.indices
    count = 0 if places.indices is None else given.shape[0]
    out = [jax.ShapeDtypeStruct((n,), jnp.int32) for n in (shape[0] + 1, count)]
    # The kernel also copies the columns out of JAX's indices [entries, 2]: the product reads them once
    # for each slice of b's columns, and beside the rows they would be twice the bytes.
    starts, columns = jax.ffi.ffi_call("jaxfused_csr_starts", out)(given, depth=np.int64(shape[1]))
    return starts, places.columns if places.indices is None else columns


def sampled_product(places: Coordinates, x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns x [M, D] @ y^T [D, N] at these rows and columns, [entries], in x's dtype."""
    cuda_library.register()
    out = jax.ShapeDtypeStruct(places.rows.shape, x.dtype)
    return jax.ffi.ffi_call("jaxfused_sampled_matmul", out)(places.rows, places.columns, x, y)
