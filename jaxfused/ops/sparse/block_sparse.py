"""BlockSparse: a matrix of which only some blocks are stored, with lists of them by column and row."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Self, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jaxfused.runtime import resharding, sharding
from jaxfused.runtime.checks import as_arrays, check_floating, python_numbers, readable_values
from jaxfused.runtime.serialization import exportable, serializable
from jaxfused.runtime.shapes import merge_axes, split_axis

BlockSize = Literal[32, 64, 128]
"""Rows and columns of a block."""


@exportable
class BlockList(NamedTuple):
    """The stored blocks sorted by line: by column of blocks in one list, by row in the other."""

    starts: jax.Array
    """Index of the first entry of each line, then the number of entries, int32 [lines + 1]."""
    entries: jax.Array
    """Index of each entry in `blocks`, and its position in the line, int32 [2, stored blocks]."""


@serializable
@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class BlockSparse:
    """A matrix [D, F] that is zero outside some square blocks, for `jaxfused.block_sparse_matmul`.

    It is a pytree. Only `blocks` has a gradient: differentiate by it, as
    `jax.grad(lambda blocks: loss(dataclasses.replace(weight, blocks=blocks)))(weight.blocks)`, or let
    `SparseLinear` do so. Under `jax.jit` the positions of the blocks may change without a new
    compilation, their number may not.

    Attributes:
      blocks: [kept, B, B], the blocks that are kept, in any order.
      by_column: the blocks in the order of columns of blocks.
      by_row: the blocks in the order of rows of blocks.
      shape: (D, F), multiples of B.

    Example:
      >>> import jax.numpy as jnp, jaxfused
      >>> dense = jnp.zeros((64, 96)).at[:32, 32:64].set(1.0)
      >>> weight = jaxfused.BlockSparse.from_dense(dense, 32)
      >>> weight.blocks.shape, weight.density
      ((1, 32, 32), 0.16666666666666666)
      >>> bool((weight.to_dense() == dense).all())
      True

    Source: Gray et al., "GPU Kernels for Block-Sparse Weights", 2017,
    https://cdn.openai.com/blocksparse/blocksparsepaper.pdf
    """

    blocks: jax.Array
    by_column: BlockList
    by_row: BlockList
    shape: tuple[int, int] = field(metadata={"static": True})

    @classmethod
    @python_numbers
    def from_dense(
        cls,
        weight: jax.Array,
        block_size: int = 128,
        *,
        count: int | None = None,
        mask: jax.Array | None = None,
    ) -> Self:
        """Returns a dense matrix as a `BlockSparse` that keeps some of its blocks.

        Args:
          weight: [D, F], floating-point.
          block_size: B, 32, 64 or 128, which divides D and F.
          count: how many blocks are kept: those with the greatest sums of squares, among equal ones the
            first. None for all blocks that are not all 0, or those of the mask.
          mask: [D / B, F / B], bool: the blocks that are kept; needs known values.

        Raises:
          ValueError: shapes or options do not fit, or the number of blocks is not known under
            `jax.jit`.
        """
        op = "BlockSparse"
        weight, mask = as_arrays(weight, mask)
        check_floating(op, dict(weight=weight))
        grid = grid_of(op, weight.shape, block_size)
        down, across = grid
        weight, mask = resharding.split_by_batch((), (weight, mask))
        in_rows = split_axis(weight, 0, down, block_size)
        blocks = merge_axes(split_axis(in_rows, 2, across, block_size).swapaxes(1, 2), 0)
        if mask is not None and (mask.shape != grid or mask.dtype != jnp.bool_):
            raise ValueError(
                f"{op}: mask has shape {mask.shape} and dtype {mask.dtype}, but the matrix has"
                f" {down} x {across} blocks; pass bools of shape {grid}."
            )
        if mask is not None and count is not None:
            raise ValueError(f"{op}: count and mask were passed; pass one of them.")
        if count is not None:
            if not 0 <= count <= down * across:
                raise ValueError(
                    f"{op}: count is {count}, but the matrix has {down * across} blocks; pass at most as"
                    " many."
                )
            squares = jnp.sum(jnp.square(blocks.astype(jnp.float32)), axis=(1, 2))
            _, chosen = jax.lax.top_k(squares, count)
            chosen = jnp.sort(chosen).astype(jnp.int32)
        else:
            kept = jnp.any(blocks != 0, axis=(1, 2)) if mask is None else mask.reshape(-1)
            known = readable_values(kept)
            if known is None and not isinstance(kept, jax.core.Tracer):
                known = np.asarray(kept)
            if known is None:
                raise ValueError(
                    f"{op}: how many blocks are kept depends on values that are not known while tracing;"
                    " pass count, or call it outside of jax.jit."
                )
            chosen = jnp.asarray(np.flatnonzero(known), jnp.int32)
        return cls._of_places(
            blocks[chosen], chosen // max(across, 1), chosen % max(across, 1), weight.shape
        )

    @classmethod
    def from_blocks(
        cls, blocks: jax.Array, rows: jax.Array, columns: jax.Array, shape: tuple[int, int]
    ) -> Self:
        """Returns a matrix from blocks and their positions.

        Args:
          blocks: [kept, B, B], floating-point, B 32, 64 or 128, no two at one position.
          rows: int [kept], each block's row of blocks.
          columns: int [kept], each block's column of blocks. A block beyond the matrix adds nothing,
            and its gradient is zero.
          shape: (D, F), multiples of B.

        Raises:
          ValueError: shapes or dtypes do not fit, or a place is negative or given twice.
        """
        op = "BlockSparse"
        blocks, rows, columns = as_arrays(blocks, rows, columns)
        check_floating(op, dict(blocks=blocks))
        if blocks.ndim != 3 or blocks.shape[1] != blocks.shape[2]:
            raise ValueError(
                f"{op}: blocks have shape {blocks.shape}; pass square ones, of shape [kept, B, B]."
            )
        grid_of(op, tuple(shape), blocks.shape[1])
        for name, places in dict(rows=rows, columns=columns).items():
            if places.shape != blocks.shape[:1] or not jnp.issubdtype(places.dtype, jnp.integer):
                raise ValueError(
                    f"{op}: {name} have shape {places.shape} and dtype {places.dtype}, but there are"
                    f" {len(blocks)} blocks; pass one integer for each."
                )
            known = readable_values(places)
            if known is not None and (known < 0).any():
                raise ValueError(
                    f"{op}: {name} has {known.min()}, but places are counted from 0; pass 0 or more."
                )
        known_rows, known_columns = readable_values(rows), readable_values(columns)
        if known_rows is not None and known_columns is not None:
            pairs = np.stack([known_rows, known_columns], axis=1)
            inside = pairs[(pairs < np.array(shape) // blocks.shape[1]).all(1)]
            if len(np.unique(inside, axis=0)) < len(inside):
                raise ValueError(
                    f"{op}: two blocks have one place; add them, and pass one block for each place."
                )
        return cls._of_places(blocks, rows, columns, (int(shape[0]), int(shape[1])))

    @classmethod
    def _of_places(cls, blocks: Any, rows: Any, columns: Any, shape: Any) -> Self:
        down, across = (size // blocks.shape[1] for size in shape)
        return cls(blocks, *block_lists(rows, columns, (down, across)), tuple(shape))

    @property
    def block_size(self) -> int:
        """Rows and columns of a block, B."""
        return self.blocks.shape[-1]

    @property
    def dtype(self) -> Any:
        """Dtype of the blocks."""
        return self.blocks.dtype

    @property
    def density(self) -> float:
        """Fraction of the blocks that are kept."""
        return self.blocks.shape[-3] * self.block_size**2 / max(math.prod(self.shape), 1)

    @property
    def places(self) -> tuple[jax.Array, jax.Array]:
        """Row of blocks and column of blocks of each stored block, both int32 [kept]."""
        return places_of(self.by_column), places_of(self.by_row)

    def to_dense(self) -> jax.Array:
        """Returns the matrix [D, F]."""
        down, across = (size // self.block_size for size in self.shape)
        count = self.blocks.shape[0]
        # The blocks are gathered, because XLA's scatter on a GPU writes numbers one by one.
        table = jnp.full((down, across), count, jnp.int32)
        table = table.at[self.places].set(jnp.arange(count, dtype=jnp.int32), mode="drop")
        grid = jnp.asarray(self.blocks).at[table].get(mode="fill", fill_value=0)
        return merge_axes(merge_axes(grid.swapaxes(1, 2), 2), 0)


def grid_of(op: str, shape: tuple[int, ...], block_size: int) -> tuple[int, int]:
    """Returns the number of rows and of columns of blocks."""
    sizes = get_args(BlockSize)
    if block_size not in sizes:
        raise ValueError(
            f"{op}: blocks have {block_size} rows and columns; pass {', '.join(map(str, sizes[:-1]))}"
            f" or {sizes[-1]}."
        )
    if len(shape) != 2 or any(size % block_size for size in shape):
        raise ValueError(
            f"{op}: the matrix has shape {tuple(shape)}, which blocks of {block_size} do not divide;"
            f" pass a matrix of two multiples of {block_size}."
        )
    return shape[0] // block_size, shape[1] // block_size


def block_lists(
    rows: jax.Array, columns: jax.Array, grid: tuple[int, int]
) -> tuple[BlockList, BlockList]:
    """Returns the lists of blocks at these rows and columns of blocks: by column, and by row."""
    down, across = grid
    beyond = (rows < 0) | (rows >= down) | (columns < 0) | (columns >= across)
    rows = jnp.where(beyond, down, rows).astype(jnp.int32)
    columns = jnp.where(beyond, across, columns).astype(jnp.int32)
    return _lines(columns, rows, across), _lines(rows, columns, down)


def _lines(lines: jax.Array, places: jax.Array, count: int) -> BlockList:
    """Returns the list of blocks sorted by line (column or row of blocks), then by position in the line.

    Blocks beyond the matrix are in the last line's list, at a position beyond its end.
    """
    order = jnp.lexsort((places, lines)).astype(jnp.int32)
    starts = sharding.searchsorted(lines[order], jnp.arange(count, dtype=jnp.int32))
    end = jnp.full(1, len(order), jnp.int32)
    return BlockList(jnp.concatenate([starts, end]), jnp.stack([order, places[order]]))


def places_of(listed: BlockList) -> jax.Array:
    """Returns each block's row of blocks, given the list by column; its column, given that by row."""
    indices, places = listed.entries
    return jnp.zeros_like(places).at[indices].set(places)
