"""Products with a block-sparse matrix in XLA, which multiplies a dense copy of the matrix."""

from typing import Any

import jax

from jaxfused.ops.sparse.block_sparse import BlockSparse
from jaxfused.runtime.product_xla import product


def block_sparse_matmul(
    x: jax.Array,
    weight: BlockSparse,
    *,
    dtype: Any,
    out_dtype: Any,
    precision: Any,
    transposed: bool,
) -> jax.Array:
    """Returns x times the matrix, or its transpose, multiplied in `dtype` and summed in float32."""
    rows = "abcdefghij"[: x.ndim - 1]
    axes = "fk" if transposed else "kf"
    return product(
        f"{rows}k,{axes}->{rows}f",
        x,
        weight.to_dense(),
        dtype=dtype,
        out_dtype=out_dtype,
        precision=precision,
    )


def kept_blocks(
    x: jax.Array, dy: jax.Array, weight: BlockSparse, *, out_dtype: Any, precision: Any
) -> jax.Array:
    """Returns x^T @ dy of rows [M, D] and [M, F], computed at the blocks of `weight` only."""
    size = weight.block_size
    dw = product("md,mf->df", x, dy, dtype=x.dtype, out_dtype=out_dtype, precision=precision)
    grid = dw.reshape(weight.shape[0] // size, size, weight.shape[1] // size, size).swapaxes(1, 2)
    return grid.at[weight.places].get(mode="fill", fill_value=0)
