"""Groups of rows whose sizes are known on the device only, as the kernels of grouped products see them.

A kernel needs the group of a tile and the rows of a group. With up to `MOST_IN_KERNEL` groups it adds up
their sizes each time. With more, XLA first makes a table of the number of tiles and rows before each
group, in a kernel of its own.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gemm.tiled_product import run_of

MOST_IN_KERNEL = 16
"""Largest number of group sizes that a kernel adds up itself, without a table."""


class Group(NamedTuple):
    """A group of rows, inside a kernel."""

    index: Any
    """Index of the matrix that the group is multiplied by."""
    start: Any
    """Index of the first row."""
    end: Any
    """Index of the row after the last."""


class Groups(Protocol):
    """The groups that are multiplied, inside a kernel."""

    def tiles(self) -> Any:
        """Returns the number of tiles of all groups."""

    def bounds(self) -> tuple[Any, Any]:
        """Returns the first row of the first group, and the row after the last group's last row."""

    def at(self, index: Any) -> Group:
        """Returns a group by the index of its matrix."""

    def of_tile(self, tile: Any) -> tuple[Group, Any]:
        """Returns the group of a tile, and the tile's index among that group's tiles."""


def operands(
    group_sizes: jax.Array, offset: jax.Array, *, groups: int, rows: int, tile_m: int
) -> tuple[jax.Array, ...]:
    """Returns the arrays from which `on_device` makes the groups in a kernel.

    Args:
      group_sizes: int [G], of all groups. Sizes below 0 count as 0; rows beyond the last are cut off.
      offset: int [], the index of the first group that is multiplied.
      groups: how many groups are multiplied.
      rows: number of rows, including those of no group.
      tile_m: rows of a tile.
    """
    offset = offset.astype(jnp.int32)
    if group_sizes.shape[0] > MOST_IN_KERNEL:
        return (group_table(group_sizes, offset, groups=groups, rows=rows, tile_m=tile_m),)
    if group_sizes.dtype != jnp.int32:
        group_sizes = jnp.clip(group_sizes, 0, rows).astype(jnp.int32)
    return group_sizes, offset.reshape(1)


def on_device(
    refs: Sequence[Any], *, groups: int, rows: int, tile_m: int
) -> tuple[Groups, Sequence[Any]]:
    """Returns the groups, and the rest of `refs`, which begin with the arrays of `operands`."""
    if len(refs[0].shape) == 2:
        return _Table(refs[0], groups), refs[1:]
    return _Sizes(refs[0], refs[1], groups, rows, tile_m), refs[2:]


def group_table(
    group_sizes: jax.Array, offset: jax.Array, *, groups: int, rows: int, tile_m: int
) -> jax.Array:
    """Returns the tiles and rows before each group, and before the end: int32 [2, groups + 1].

    Each of its numbers is a sum over all G groups; XLA computes them in one kernel.
    """
    sizes = jnp.clip(group_sizes, 0, rows).astype(jnp.int32)
    index = jnp.arange(group_sizes.shape[0], dtype=jnp.int32)
    before = index < offset + jnp.arange(groups + 1, dtype=jnp.int32)[:, None]
    tiles = jnp.where(index >= offset, (sizes + (tile_m - 1)) // tile_m, 0)
    counts = jnp.stack([tiles, sizes])[:, None]
    found = jnp.sum(jnp.where(before, counts, 0), axis=-1, dtype=jnp.int32)
    return jnp.minimum(found, jnp.array([[2**31 - 1], [rows]], jnp.int32))


@dataclass(frozen=True)
class _Table:
    """Groups whose tiles and rows are read from a `group_table` in global memory."""

    table: Any
    groups: int

    def tiles(self) -> Any:
        return self.table[0, self.groups]

    def bounds(self) -> tuple[Any, Any]:
        return self.table[1, 0], self.table[1, self.groups]

    def at(self, index: Any) -> Group:
        return Group(index, self.table[1, index], self.table[1, index + 1])

    def of_tile(self, tile: Any) -> tuple[Group, Any]:
        index = run_of(lambda run: self.table[0, run], self.groups, tile)
        return self.at(index), tile - self.table[0, index]


@dataclass(frozen=True)
class _Sizes:
    """Groups computed from their sizes in global memory, which each method adds up."""

    sizes: Any
    offset: Any
    """The index of the first group that is multiplied, [1]."""
    groups: int
    rows: int
    tile_m: int

    def _all(self) -> Iterator[tuple[Any, Group, Any, Any]]:
        """Yields for each group whether it is multiplied, the group, its first tile and tile count."""
        offset, start, before = self.offset[0], jnp.int32(0), jnp.int32(0)
        for position in range(self.sizes.shape[0]):
            size = jnp.maximum(jnp.minimum(self.sizes[position], self.rows - start), 0)
            index = position - offset
            is_own = (index >= 0) & (index < self.groups)
            tiles = lax.div(size + (self.tile_m - 1), jnp.int32(self.tile_m))
            tiles = jnp.where(is_own, tiles, 0)
            yield is_own, Group(index, start, start + size), before, tiles
            start, before = start + size, before + tiles

    def tiles(self) -> Any:
        for *_, before, tiles in self._all():
            total = before + tiles
        return total

    def bounds(self) -> tuple[Any, Any]:
        first = last = jnp.int32(0)
        for is_own, group, *_ in self._all():
            first = jnp.where(group.index == 0, group.start, first)
            last = jnp.where(is_own, group.end, last)
        return first, last

    def at(self, index: Any) -> Group:
        found = Group(index, jnp.int32(0), jnp.int32(0))
        for _, group, *_ in self._all():
            found = _chosen(group.index == index, group._replace(index=index), found)
        return found

    def of_tile(self, tile: Any) -> tuple[Group, Any]:
        found, within = Group(jnp.int32(0), jnp.int32(0), jnp.int32(0)), jnp.int32(0)
        for _, group, before, tiles in self._all():
            is_here = (tile >= before) & (tile < before + tiles)
            found = _chosen(is_here, group, found)
            within = jnp.where(is_here, tile - before, within)
        return found, within


def _chosen(is_first: Any, first: Group, second: Group) -> Group:
    return Group(*(jnp.where(is_first, a, b) for a, b in zip(first, second, strict=True)))
