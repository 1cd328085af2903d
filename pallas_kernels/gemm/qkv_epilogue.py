"""The epilogue of qkv_projection's product: norms and rotations of heads, and stores to three outputs.

An output tile may have columns of two outputs, but each of its units, which are stored one by one, has
columns of one output. With a norm or rope a unit is a head: a thread holds the same features of both
halves, and the mean square is a sum within a warp. A wide head with rope alone is cut into units of as
many features of either half, for which `qkv_projection` reorders the columns of the weights: tiles of
any width then hold whole units. With interleaved pairs a head may be cut between any two pairs, and the
columns keep their order.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import store
from pallas_kernels.gemm import interleaved_rope
from pallas_kernels.gemm.mainloop import Product
from pallas_kernels.gemm.matmul_config import CONSUMERS
from pallas_kernels.gemm.operands import block
from pallas_kernels.gemm.qkv_heads import STRIP, VALUES, Heads
from pallas_kernels.gemm.tiled_product import TilePlace
from pallas_kernels.hopper import row_of_copies

_ANGLES_AHEAD = 128
"""Largest number of 16-bit angles of a row that are read ahead: 64 registers a thread for 128 rows."""
ROUNDS_ANGLES = jnp.bfloat16
"""Dtype of x for which the cosines and sines are rounded to float16."""


@dataclass(frozen=True)
class QkvEpilogue:
    """The epilogue of a launch: its static parameters and its shared memory."""

    product: Product
    heads: Heads
    period: int
    """Rows after which the angles repeat."""
    bias_dtype: Any
    """Dtype of the biases; None where there are none."""
    epsilon: float

    @property
    def piece(self) -> int:
        return self.product.config.epilogue_columns

    @property
    def unit(self) -> int:
        """Columns of a unit, the part of a tile that is normalised, rotated and stored together."""
        return self.heads.unit if self.heads.finishes else self.piece

    @property
    def run(self) -> int:
        """Number of a unit's columns that are adjacent in an output array."""
        return STRIP if self.heads.reorders else self.unit

    @property
    def turning(self) -> int:
        """Number of leading features of a unit that rope rotates."""
        return min(self.heads.rotary_dim, self.unit)

    @property
    def turning_pieces(self) -> list[tuple[int, ...]]:
        """Indices of a unit's pieces that are rotated together: one piece, or a piece of each half."""
        count = self.turning // self.piece
        if self.heads.interleaved:
            return [(index,) for index in range(count)]
        return [(index, count // 2 + index) for index in range(count // 2)]

    @property
    def units(self) -> int:
        """Units in a tile; fewer where the product is narrower than a tile."""
        return pl.cdiv(min(self.product.n, self.product.part_n), self.unit)

    def first_column(self, output: int) -> int:
        """Returns the product's column at which an output array begins."""
        return sum(self.heads.widths[:output])

    def first_pair(self, column: jax.Array) -> jax.Array | int:
        """Returns the index, in its head, of the first pair of the unit that begins at a column."""
        if not self.heads.splits:
            return 0
        within = lax.rem(column, jnp.int32(self.heads.size))
        return pl.multiple_of(lax.div(within, jnp.int32(2)), STRIP)

    def runs(self, column: jax.Array) -> tuple[jax.Array, ...]:
        """Returns the columns of an output at which a unit's runs of `run` adjacent columns begin."""
        if self.run == self.unit:
            return (column,)
        first = column - self.first_pair(column)
        return first, first + self.heads.size // 2

    def scratch(self) -> dict[str, Any]:
        c, dtype = self.product.config, self.product.dtype
        leading = (CONSUMERS, c.write_slots, self.unit // self.piece)
        scratch: dict[str, Any] = {"out_smem": block(leading, c.tile_m, self.piece, dtype)}
        if self.bias_dtype is not None:
            row = row_of_copies(self.product.part_n, self.bias_dtype)
            scratch["bias_smem"] = plgpu.SMEM((CONSUMERS, row), self.bias_dtype)
            scratch["bias_full"] = plgpu.Barrier(num_barriers=CONSUMERS)
        return scratch

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory per CTA."""
        return self.product.shared_bytes(self.scratch(), sums=self.heads.norm)

    def of_tile(
        self, refs: Sequence[Any], smem: Mapping[str, Any], place: TilePlace
    ) -> "_HeadsOfTile":
        return _HeadsOfTile(self, _Refs(self, refs), smem, place)


class _Refs:
    """The arrays of an epilogue in global memory: operands and results."""

    def __init__(self, epilogue: QkvEpilogue, refs: Sequence[Any]):
        remaining = iter(refs)
        self.bias = next(remaining) if epilogue.bias_dtype is not None else None
        self.scales = next(remaining) if epilogue.heads.norm else None
        self.table: Any = next(remaining) if epilogue.heads.rotary_dim else None
        self.outputs = [next(remaining) for _ in epilogue.heads.widths]
        self.projections = list(remaining)


@dataclass(frozen=True)
class _HeadsOfTile:
    """The epilogue of a tile, unit by unit."""

    launch: QkvEpilogue
    gmem: _Refs
    smem: Mapping[str, Any]
    place: TilePlace

    def column(self, unit: int) -> jax.Array:
        """Returns the product's column at which a unit of the tile begins."""
        launch = self.launch
        return self.place.n_idx * launch.product.part_n + unit * launch.unit

    def prefetch(self) -> None:
        if self.gmem.bias is not None:
            row = self.smem["bias_smem"].at[self.place.wg_idx]
            plgpu.copy_gmem_to_smem(
                self.gmem.bias.at[pl.ds(self.column(0), row.shape[0])],
                row,
                self.smem["bias_full"].at[self.place.wg_idx],
            )

    def run(self, acc: jax.Array) -> None:
        launch = self.launch
        starts = range(0, launch.product.part_n, launch.piece)
        pieces = [acc[:, start : start + launch.piece] for start in starts]
        if self.gmem.bias is not None:
            plgpu.barrier_wait(self.smem["bias_full"].at[self.place.wg_idx])
            bias = self.smem["bias_smem"].at[self.place.wg_idx]
            pieces = [
                piece + self._row(bias, start) for piece, start in zip(pieces, starts, strict=True)
            ]
        # Pieces are rounded to 16 bits here, which leaves registers for norm and rotation.
        pieces = lax.optimization_barrier([p.astype(launch.product.dtype) for p in pieces])
        store.store_in_turn(
            self._results(pieces),
            count=launch.units * len(self._stored),
            slots=launch.product.config.write_slots,
            store=self._store,
            send=self._send,
        )

    @property
    def _stored(self) -> tuple[Sequence[Any], ...]:
        """Groups of output arrays: saved projections, if any, and results. Each has all units."""
        return tuple(filter(None, (self.gmem.projections, self.gmem.outputs)))

    def _results(self, pieces: Sequence[jax.Array]) -> Iterator[Sequence[tuple[int, jax.Array]]]:
        """Yields each unit's pieces with indices: of the projection if saved, then of the result."""
        launch = self.launch
        per_unit = launch.unit // launch.piece
        angles: list[Sequence[jax.Array]] = []
        for unit in range(launch.units):
            projected = pieces[unit * per_unit : (unit + 1) * per_unit]
            if self.gmem.projections:
                yield list(enumerate(projected))
            finished: Iterable[tuple[int, jax.Array]] = enumerate(projected)
            if launch.heads.finishes:
                if self._reads_ahead and (launch.heads.splits or not unit):
                    angles = [self._angles(unit, s) for s in range(len(launch.turning_pieces))]
                finished = self._finished(unit, projected, angles)
            yield list(finished)

    @property
    def _reads_ahead(self) -> bool:
        """True if a unit's angles are all read at once, and reused for further units where possible.

        Angles that are read again for each head and piece come from L2, for which a warpgroup waits:
        50432 x 768 to 3 x 12 heads of 64 took 270 us on an H200, 240 read ahead, and 231 without
        rotation.
        """
        launch = self.launch
        if launch.product.dtype != ROUNDS_ANGLES:
            return False
        return launch.turning <= _ANGLES_AHEAD

    def _store(self, number: int, pieces: Sequence[tuple[int, jax.Array]]) -> None:
        """Writes the pieces of a result, each with its index, to the result's buffer."""
        registers, _ = self.smem["out_smem"]
        for index, piece in pieces:
            store.store_piece(registers.at[*self._slot(number), index], piece)

    def _slot(self, number: int) -> tuple[jax.Array, int]:
        """Returns the warpgroup, and the index of its buffer in shared memory for a result."""
        return self.place.wg_idx, number % self.launch.product.config.write_slots

    def _send(self, number: int) -> None:
        """Starts the copy of a result to the output array that has its columns, if any has."""
        launch, config = self.launch, self.launch.product.config
        place = self._slot(number)
        _, copies = self.smem["out_smem"]
        unit, group = divmod(number, len(self._stored))
        arrays, column = self._stored[group], self.column(unit)
        for output, array in enumerate(arrays):
            start = column - launch.first_column(output)

            @pl.when((start >= 0) & (start < launch.heads.widths[output]))
            def _(array=array, start=start):
                rows = pl.ds(self.place.m_start, config.tile_m)
                runs = launch.runs(start)
                for index in range(launch.unit // launch.piece):
                    run, within = divmod(index * launch.piece, launch.run)
                    columns = pl.ds(runs[run] + within, launch.piece)
                    plgpu.copy_smem_to_gmem(
                        copies.at[*place, index], array.at[rows, columns], commit_group=False
                    )

        plgpu.commit_smem_to_gmem_group()

    def _finished(
        self,
        unit: int,
        projected: Sequence[jax.Array],
        angles: Sequence[Sequence[jax.Array]],
    ) -> Iterator[tuple[int, jax.Array]]:
        """Yields the pieces of a unit after norm and rotation, each with its index.

        All heads run the same code; heads of values have a norm factor of 1 and an angle of 0. With a
        branch for values the compiler converts pieces for both branches in advance and spills registers;
        a selection works on single 16-bit numbers, where a product works on pairs.
        """
        launch = self.launch
        column = self.column(unit)
        is_value = column >= launch.first_column(VALUES)
        kind = (column >= launch.first_column(1)).astype(jnp.int32) + is_value.astype(jnp.int32)
        factor = None
        if launch.heads.norm:
            squares = [jnp.sum(jnp.square(p.astype(jnp.float32)), axis=1) for p in projected]
            mean_square = sum(squares[1:], squares[0]) * (1.0 / launch.heads.size)
            factor = lax.rsqrt(mean_square + launch.epsilon)
            for plain in launch.heads.plain:
                factor = jnp.where(jnp.broadcast_to(kind == plain, factor.shape), 1.0, factor)

        def normed(index):
            piece = projected[index].astype(jnp.float32)
            if factor is None:
                return piece
            scale = self._row(self.gmem.scales.at[kind], index * launch.piece)
            return piece * lax.broadcast_in_dim(factor, piece.shape, (0,)) * scale

        dtype = launch.product.dtype
        for step, indices in enumerate(launch.turning_pieces):
            before = [normed(index) for index in indices]
            turns = angles[step] if angles else self._angles(unit, step)
            turned = self._turned(before, turns, is_value)
            for index, piece in zip(indices, turned, strict=True):
                yield index, piece.astype(dtype)
        for index in range(launch.turning // launch.piece, len(projected)):
            yield index, normed(index).astype(dtype)

    def _turned(
        self, pieces: Sequence[jax.Array], angles: Sequence[jax.Array], is_value: jax.Array
    ) -> Iterator[jax.Array]:
        """Yields rotated pieces [tile_m, columns]: one of interleaved pairs, or one of each half.

        Pieces of values stay as they are.
        """
        value = is_value.astype(angles[0].dtype)
        if self.launch.heads.interleaved:
            yield interleaved_rope.turned(pieces[0], angles[0], value)
            return
        first, second = pieces
        cos, sin = angles
        cos, sin = (
            angle.astype(jnp.float32) for angle in (cos * (1 - value) + value, sin * (1 - value))
        )
        yield first * cos - second * sin
        yield second * cos + first * sin

    def _angles(self, unit: int, step: int) -> Sequence[jax.Array]:
        """Loads cosines and sines for the pieces `turning_pieces[step]` of a unit, for the tile's rows.

        For interleaved pairs they are one array in which cosines and sines alternate.
        """
        launch = self.launch
        first_row = lax.rem(self.place.m_start, jnp.int32(launch.period))
        rows = pl.ds(first_row, launch.product.config.tile_m)
        first_pair, within = launch.first_pair(self.column(unit)), step * launch.piece
        if launch.heads.interleaved:
            starts = [2 * first_pair + within]
        else:
            starts = [half + first_pair + within for half in (0, launch.heads.rotary_dim // 2)]
        return [
            plgpu.load(
                self.gmem.table.at[rows, pl.ds(start, launch.piece)],
                layout=plgpu.Layout.WGMMA,
                optimized=False,
            )
            for start in starts
        ]

    def _row(self, ref, start: int) -> jax.Array:
        """Loads `piece` columns of a vector from `start` on, and broadcasts them to tile_m rows."""
        launch = self.launch
        row = plgpu.load(
            ref.at[pl.ds(start, launch.piece)],
            layout=plgpu.Layout.WGMMA.reduce(0),
            optimized=False,
        ).astype(jnp.float32)
        return lax.broadcast_in_dim(row, (launch.product.config.tile_m, launch.piece), (1,))
