"""Grouped products in XLA: a loop over tiles, each of rows of one group.

Each tile reads its group's matrix, so that no row is multiplied by another group's matrix and nothing
larger than the operands is held. XLA's own program for `jax.lax.ragged_dot` multiplies every row by
every group's matrix, on a CPU and on a GPU: its time and memory grow with the number of groups.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxfused.runtime import sharding
from jaxfused.runtime.activation import activate
from jaxfused.runtime.product_xla import product
from jaxfused.runtime.promotion import accumulator_dtype
from jaxfused.runtime.quantized_array import QuantizedArray
from jaxfused.runtime.shapes import is_symbolic
from jaxfused.runtime.stated_gradient import stated_gradient

_FEWEST_ROWS, _MOST_ROWS = 16, 512
"""Limits of a tile's number of rows, otherwise about the mean number of rows of a group."""
_SYMBOLIC_ROWS = 128
"""Rows of a tile if lhs has a symbolic number of rows."""


@dataclass(frozen=True)
class Options:
    """Static arguments of a grouped product."""

    transpose_rhs: bool
    """True if rhs is [E, N, K]."""
    dtype: Any
    """Dtype in which lhs and rhs are multiplied."""
    out_dtype: Any
    precision: Any


@functools.partial(stated_gradient, nondiff_argnums=(0,))
def ragged_dot(
    options: Options,
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array,
) -> jax.Array:
    """Returns each group of lhs's rows [M, K] times its matrix of rhs: [M, N]."""
    return rows_product(options, lhs, rhs, group_sizes, group_offset)


def _fwd(options: Options, *operands: jax.Array):
    return ragged_dot(options, *operands), operands


def _bwd(options: Options, operands, dy):
    lhs, rhs, *sizes = operands
    dlhs, drhs = gradients(options, lhs, rhs, dy, *sizes)
    return dlhs, drhs, None, None


ragged_dot.defvjp(_fwd, _bwd)


def activated(options: Options, activation: str | None, lhs, rhs, sizes, offset) -> jax.Array:
    """Returns the activation of `ragged_dot`, rounded once."""
    if activation is None:
        return ragged_dot(options, lhs, rhs, sizes, offset)
    wide = replace(options, out_dtype=accumulator_dtype(options.out_dtype))
    y = activate(activation, ragged_dot(wide, lhs, rhs, sizes, offset))
    return cleared(y, rhs.shape[0], sizes, offset).astype(options.out_dtype)


def cleared(y: jax.Array, groups: int, sizes: jax.Array, offset: jax.Array) -> jax.Array:
    """Returns y [M, N], an activation of products, with zeros in the rows of no group.

    The products of these rows are 0, but softplus(0) and sigmoid(0) are not.
    """
    bounds = row_bounds(y.shape[0], groups, sizes, offset)
    row = jnp.arange(y.shape[0], dtype=jnp.int32)[:, None]
    return jnp.where((row >= bounds[0]) & (row < bounds[-1]), y, jnp.zeros((), y.dtype))


def gradients(
    options: Options, lhs: jax.Array, rhs: jax.Array, dy: jax.Array, *sizes: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the gradients of lhs and rhs, in their dtypes."""
    dy = dy.astype(options.dtype)
    back = Options(not options.transpose_rhs, options.dtype, lhs.dtype, options.precision)
    dlhs = ragged_dot(back, dy, rhs, *sizes)
    factors = (dy, lhs) if options.transpose_rhs else (lhs, dy)
    of_weights = Options(False, options.dtype, rhs.dtype, options.precision)
    return dlhs, weight_product(of_weights, rhs.shape[0], *factors, *sizes)


class _Tile(NamedTuple):
    """A tile of rows of one group, or several tiles if the fields have an axis."""

    group: jax.Array
    """Index of the tile's matrix."""
    first: jax.Array
    """Index of the first row that is loaded, clipped so that the tile does not pass the last row."""
    start: jax.Array
    """Index of the first row that the tile computes; loaded rows before it belong to another tile."""
    end: jax.Array
    """Index after the last row that the tile computes."""

    def own_rows(self, height: int) -> jax.Array:
        """Returns a mask [height, 1] of the loaded rows, True for those that the tile computes."""
        row = self.first + jnp.arange(height, dtype=jnp.int32)[:, None]
        return (row >= self.start) & (row < self.end)


def _over_tiles(
    add: Callable[[jax.Array, _Tile, int], jax.Array],
    total: jax.Array,
    rows: int,
    groups: int,
    sizes: jax.Array,
    offset: jax.Array,
) -> jax.Array:
    """Returns `total` after `add(total, tile, height)` for each tile, in the order of their rows."""
    height = tile_height(rows, groups)
    bounds = row_bounds(rows, groups, sizes, offset)
    counts = (jnp.diff(bounds) + (height - 1)) // height
    last = jnp.cumsum(counts, dtype=jnp.int32)

    def tile_at(index: jax.Array) -> _Tile:
        group = sharding.searchsorted(last, index, side="right", method="compare_all")
        group = jnp.minimum(group, groups - 1)
        start = bounds[group] + (index - (last - counts)[group]) * height
        first = jnp.clip(start, 0, rows - height).astype(jnp.int32)
        return _Tile(group, first, start, jnp.minimum(start + height, bounds[group + 1]))

    if is_symbolic(jax.ShapeDtypeStruct((rows,), jnp.int32)):
        return lax.fori_loop(0, last[-1], lambda i, t: add(t, tile_at(i), height), total)
    # A known number of tiles runs as a scan, so that a GPU need not wait for the host after each.
    # Tiles beyond the last one have no rows.
    tiles = tile_at(jnp.arange(rows // height + min(groups, rows), dtype=jnp.int32))
    return lax.scan(lambda t, tile: (add(t, tile, height), None), total, tiles)[0]


def row_bounds(rows: int, groups: int, sizes: jax.Array, offset: jax.Array) -> jax.Array:
    """Returns the first row of each group that has a matrix, and the end of the last: [groups + 1]."""
    sizes = jnp.clip(sizes, 0, rows).astype(jnp.int32)
    ends = jnp.minimum(jnp.cumsum(sizes, dtype=jnp.int32), rows).astype(jnp.int32)
    ends = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
    index = offset.reshape(()).astype(jnp.int32) + jnp.arange(groups + 1, dtype=jnp.int32)
    return ends[jnp.clip(index, 0, sizes.shape[0])]


def tile_height(rows: int, groups: int) -> int:
    """Returns the number of rows of a tile, about as many as a group has on average."""
    if is_symbolic(jax.ShapeDtypeStruct((rows,), jnp.int32)):
        return _SYMBOLIC_ROWS
    mean = max(1, rows // max(groups, 1))
    return min(rows, max(_FEWEST_ROWS, min(_MOST_ROWS, 1 << (mean - 1).bit_length())))


def _padded(x: jax.Array, groups: int) -> jax.Array:
    """Returns x; if its number of rows is symbolic, with a tile of zeros appended."""
    if not is_symbolic(x):
        return x
    return jnp.pad(x, ((0, tile_height(x.shape[0], groups)), (0, 0)))


def _matrix_of(rhs: jax.Array | QuantizedArray, group: jax.Array, dtype: Any) -> jax.Array:
    """Returns a group's matrix, dequantised if it is quantised."""
    matrix = jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, group, keepdims=False), rhs)
    return matrix.dequantize(dtype) if isinstance(matrix, QuantizedArray) else matrix


@functools.partial(jax.jit, static_argnums=0, inline=True)
def rows_product(
    options: Options,
    lhs: jax.Array,
    rhs: jax.Array | QuantizedArray,
    sizes: jax.Array,
    offset: jax.Array,
) -> jax.Array:
    """Computes `ragged_dot` without its custom gradient, for callers that define one."""
    rows, groups = lhs.shape[0], rhs.shape[0]
    width = rhs.shape[1 if options.transpose_rhs else 2]
    if 0 in (*lhs.shape[1:], *rhs.shape) or (not is_symbolic(lhs) and rows == 0):
        return jnp.zeros((rows, width), options.out_dtype)
    lhs = _padded(lhs, groups)
    subscripts = "mk,nk->mn" if options.transpose_rhs else "mk,kn->mn"

    def add(y: jax.Array, tile: _Tile, height: int) -> jax.Array:
        part = product(
            subscripts,
            lax.dynamic_slice_in_dim(lhs, tile.first, height),
            _matrix_of(rhs, tile.group, options.dtype),
            dtype=options.dtype,
            out_dtype=options.out_dtype,
            precision=options.precision,
        )
        before = lax.dynamic_slice_in_dim(y, tile.first, height)
        part = jnp.where(tile.own_rows(height), part, before)
        return lax.dynamic_update_slice_in_dim(y, part, tile.first, 0)

    y = jnp.zeros((lhs.shape[0], width), options.out_dtype)
    [y] = sharding.vary([y], sharding.varying(lhs, *jax.tree.leaves(rhs), sizes, offset))
    return _over_tiles(add, y, lhs.shape[0], groups, sizes, offset)[:rows]


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def weight_product(
    options: Options,
    groups: int,
    x: jax.Array,
    dy: jax.Array,
    sizes: jax.Array,
    offset: jax.Array,
) -> jax.Array:
    """Returns the transpose of x [M, K] times dy [M, N] over the rows of each group: [E, K, N].

    The sums of a group's tiles are added in their order, and rounded once.
    """
    wide = accumulator_dtype(options.dtype)
    dw = jnp.zeros((groups, x.shape[1], dy.shape[1]), wide)
    if 0 in dw.shape or (not is_symbolic(x) and x.shape[0] == 0):
        return dw.astype(options.out_dtype)
    x, dy = _padded(x, groups), _padded(dy, groups)
    [dw] = sharding.vary([dw], sharding.varying(x, dy, sizes, offset))

    def add(dw: jax.Array, tile: _Tile, height: int) -> jax.Array:
        own = tile.own_rows(height)
        factors = (
            jnp.where(own, lax.dynamic_slice_in_dim(array, tile.first, height), 0)
            for array in (x, dy)
        )
        part = product(
            "mk,mn->kn",
            *factors,
            dtype=options.dtype,
            out_dtype=wide,
            precision=options.precision,
        )
        total = lax.dynamic_index_in_dim(dw, tile.group, keepdims=False) + part
        return lax.dynamic_update_index_in_dim(dw, total, tile.group, 0)

    return _over_tiles(add, dw, x.shape[0], groups, sizes, offset).astype(options.out_dtype)
