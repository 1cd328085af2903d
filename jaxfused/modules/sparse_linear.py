"""The sparse linear layer of both Flax APIs: its checks, its first weights, its product."""

from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxfused.modules.initial import plain
from jaxfused.ops.sparse.block_sparse import (
    BlockList,
    BlockSparse,
    block_lists,
    grid_of,
    places_of,
)
from jaxfused.ops.sparse.block_sparse_matmul import block_sparse_matmul
from jaxfused.ops.sparse.sparse24_matmul import sparse24_matmul
from jaxfused.runtime.checks import check_word
from jaxfused.runtime.promotion import along_last_axis

Pattern = Literal["blocks", "2:4"]


def check_sparse_linear(module: str, pattern: str, density: float, in_features: int) -> None:
    """Checks the options of the layer."""
    check_word(module, "pattern", pattern, Pattern)
    if pattern == "2:4" and in_features % 4:
        raise ValueError(
            f"{module}: there are {in_features} input features, but '2:4' keeps two of each four;"
            " pass a multiple of 4."
        )
    if not 0 < density <= 1:
        raise ValueError(
            f"{module}: density is {density}, but it is the fraction of blocks that are kept; pass a"
            " number above 0, and 1 at most."
        )


def first_places(
    key: jax.Array, shape: tuple[int, int], block_size: int, density: float
) -> tuple[BlockList, BlockList]:
    """Returns block lists, by columns and by rows, of nonzero blocks at random places of a matrix."""
    down, across = grid_of("SparseLinear", shape, block_size)
    count = max(1, round(density * down * across))
    places = jnp.sort(jax.random.permutation(key, down * across)[:count])
    return block_lists(places // across, places % across, (down, across))


def first_blocks(
    key: jax.Array, kernel_init: Any, shape: tuple[int, int], dtype: Any, lists: Any
) -> jax.Array:
    """Returns random blocks [count, B, B], scaled so that results are as large as a dense matrix's."""
    by_column, by_row = lists
    down, across = len(by_row.starts) - 1, len(by_column.starts) - 1
    wide = jnp.promote_types(dtype, jnp.float32)
    kernel = plain("SparseLinear", kernel_init(key, shape, wide))
    grid = kernel.reshape(down, shape[0] // down, across, shape[1] // across).swapaxes(1, 2)
    scale = (down * across / by_row.entries.shape[1]) ** 0.5
    return (grid[places_of(by_column), places_of(by_row)] * scale).astype(dtype)


def sparse_linear(
    x: Any,
    weight: BlockSparse | jax.Array,
    bias: jax.Array | None,
    *,
    straight_through: bool,
    dtype: Any,
    precision: Any,
    implementation: Any,
) -> jax.Array:
    """Returns x times the weight, plus the bias, in `dtype` or in the promoted dtype of all three."""
    x = jnp.asarray(x)
    parameters = [p.dtype for p in (weight, bias) if p is not None]
    with jax.numpy_dtype_promotion("standard"):
        dtype = jnp.result_type(x.dtype, *parameters) if dtype is None else dtype
    options = dict(precision=precision, implementation=implementation)
    x = x.astype(dtype)
    if isinstance(weight, BlockSparse):
        weight = BlockSparse(
            weight.blocks.astype(dtype), weight.by_column, weight.by_row, weight.shape
        )
        y = block_sparse_matmul(x, weight, **options)
    else:
        y = sparse24_matmul(x, weight.astype(dtype), straight_through=straight_through, **options)
    if bias is None:
        return y
    return y + along_last_axis(bias, y)
