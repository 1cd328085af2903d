"""The reductions of Adafactor over the leaves of a tree, by the kernels of adafactor.cu."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfused.runtime import cuda_library

_MAX_LEAVES = 256
"""Largest number of leaves in one launch."""
_MAX_IN_PLACE = 48
"""Largest number of leaves in a launch that writes in place; XLA compiles larger ones too slowly."""
_TILE_ROWS, _TILE_COLUMNS = 64, 512


class Sizes(NamedTuple):
    """Sizes of a leaf [..., rows, columns]."""

    batch: int
    rows: int
    columns: int

    @classmethod
    def of(cls, shape: Sequence[int]) -> "Sizes":
        *leading, rows, columns = shape
        return cls(int(np.prod(leading, dtype=np.int64)), rows, columns)

    @property
    def strips(self) -> int:
        return -(-self.columns // _TILE_COLUMNS)

    @property
    def blocks(self) -> int:
        return -(-self.rows // _TILE_ROWS)

    @property
    def lines(self) -> int:
        return self.batch * (self.rows + self.columns)


def _spans(count: int, most: int = _MAX_LEAVES) -> Iterator[slice]:
    for first in range(0, count, most):
        yield slice(first, first + most)


def _attributes(sizes: Sequence[Sizes]) -> dict[str, Any]:
    columns = zip(*sizes, strict=True)
    names = ("batches", "rows", "columns")
    return {n: np.array(c, np.int64) for n, c in zip(names, columns, strict=True)}


def _float32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def sums_of_squares(
    gradients: Sequence[jax.Array], parameters: Sequence[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Returns the sums of squares of each row and column of the gradients, and of whole leaves.

    Args:
      gradients: non-empty arrays [..., rows, columns] of one dtype.
      parameters: as many of the same shapes and one dtype, or none.

    Returns:
      (lines, totals): one vector in which the sums of a leaf's rows [..., rows] are followed by those of
      its columns [..., columns], and [leaves, 2], the totals of gradients and parameters.
    """
    cuda_library.register()
    lines, totals = [], []
    for span in _spans(len(gradients)):
        sizes = [Sizes.of(g.shape) for g in gradients[span]]
        tiles = sum(s.batch * s.strips * s.blocks for s in sizes)
        partial = sum(s.batch * (s.strips * s.rows + s.blocks * s.columns) for s in sizes)
        call = jax.ffi.ffi_call(
            "jaxfused_factored_sums",
            (
                _float32(sum(s.lines for s in sizes)),
                _float32(len(sizes), 2),
                _float32(partial),
                _float32(tiles, 2),
            ),
        )
        of_lines, of_leaves, *_ = call(*gradients[span], *parameters[span], **_attributes(sizes))
        lines.append(of_lines)
        totals.append(of_leaves)
    return _joined(lines), _joined(totals)


def new_moments(
    scalars: jax.Array,
    lines: jax.Array,
    rows: Sequence[jax.Array],
    columns: Sequence[jax.Array],
    counts: Sequence[tuple[int, int]],
    normalizes_columns: Sequence[bool],
) -> tuple[list[jax.Array], list[jax.Array], jax.Array]:
    """Returns the new second moments of rows and columns, in the buffers of the old ones.

    Args:
      scalars: decay, one minus it, the factor of the squares, and eps, which is added to them; float32.
      lines: from `sums_of_squares`.
      rows: the moments [..., rows] of each leaf, of one dtype.
      columns: the moments [..., columns], of the same dtype.
      counts: the numbers of values in a row and in a column of each leaf.
      normalizes_columns: whether a leaf's sums are those of its column moments, not of its row moments.

    Returns:
      (rows, columns, sums): float32 sums of the chosen moments, for all matrices of the first leaf, of
      the second, and so on.
    """
    cuda_library.register()
    new_rows: list[jax.Array] = []
    new_columns: list[jax.Array] = []
    sums, first = [], 0
    for span in _spans(len(rows), _MAX_IN_PLACE):
        sizes = [
            Sizes(int(np.prod(r.shape[:-1], dtype=np.int64)), r.shape[-1], c.shape[-1])
            for r, c in zip(rows[span], columns[span], strict=True)
        ]
        moments = [m for pair in zip(rows[span], columns[span], strict=True) for m in pair]
        call = jax.ffi.ffi_call(
            "jaxfused_factored_moments",
            (
                _float32(sum(s.batch for s in sizes)),
                *(jax.ShapeDtypeStruct(m.shape, m.dtype) for m in moments),
            ),
            input_output_aliases={2 + i: 1 + i for i in range(len(moments))},
        )
        last = first + sum(s.lines for s in sizes)
        of_rows, of_columns = zip(*counts[span], strict=True)
        of_matrices, *new = call(
            scalars,
            lines[first:last],
            *moments,
            **_attributes(sizes),
            row_counts=np.array(of_rows, np.int64),
            column_counts=np.array(of_columns, np.int64),
            normalizes_columns=np.array(normalizes_columns[span], np.int64),
        )
        new_rows += new[::2]
        new_columns += new[1::2]
        sums.append(of_matrices)
        first = last
    return new_rows, new_columns, _joined(sums)


def updates_squared(
    gradients: Sequence[jax.Array], rows: Sequence[jax.Array], columns: Sequence[jax.Array]
) -> jax.Array:
    """Returns the float32 sum of g^2 / (r c) over each matrix, leaf after leaf.

    Args:
      gradients: arrays [..., rows, columns] of one dtype.
      rows: the moments r [..., rows] of each leaf, of one dtype.
      columns: the moments c [..., columns], of the same dtype.
    """
    cuda_library.register()
    totals = []
    for span in _spans(len(gradients)):
        sizes = [Sizes.of(g.shape) for g in gradients[span]]
        call = jax.ffi.ffi_call(
            "jaxfused_factored_updates",
            (
                _float32(sum(s.batch for s in sizes), 2),
                _float32(sum(s.batch * s.strips * s.blocks for s in sizes), 2),
            ),
        )
        leaves = zip(gradients[span], rows[span], columns[span], strict=True)
        of_matrices, _ = call(*(array for leaf in leaves for array in leaf), **_attributes(sizes))
        totals.append(of_matrices[:, 0])
    return _joined(totals)


def _joined(parts: Sequence[jax.Array]) -> jax.Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)
