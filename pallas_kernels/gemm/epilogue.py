"""The epilogue of a product, in chunks of a tile's columns.

An epilogue is a traced Python function of the float32 accumulators and of named operands. Its operands
are copied to shared memory while the tile is multiplied; its results are stored through shared memory.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import store
from pallas_kernels.gemm import column_sums
from pallas_kernels.gemm.mainloop import Product, TileEpilogue
from pallas_kernels.gemm.matmul_config import CONSUMERS, MatmulConfig
from pallas_kernels.gemm.tiled_product import TilePlace
from pallas_kernels.hopper import row_of_copies

Function = Callable[..., Mapping[str, jax.Array]]
Maximised = Callable[[jax.Array], jax.Array]
"""Function that increases with its argument or with the argument's magnitude, so that the maximum of
rounded values equals the rounded maximum."""


@dataclass(frozen=True)
class Epilogue:
    """The epilogue of a launch: its static parameters and its shared memory."""

    product: Product
    function: Function
    vectors: Mapping[str, Any]
    matrices: Mapping[str, Any]
    outputs: Mapping[str, Any]
    column_sums: tuple[str, ...]
    column_moments: tuple[str, ...] = ()
    """Names of the outputs whose mean and variance over each column are returned, computed from the
    rounded values."""
    row_vectors: Mapping[str, Any] = MappingProxyType({})
    """Dtypes of the vectors with one number per row."""
    row_maxima: Mapping[str, Maximised] = MappingProxyType({})
    """Functions of the outputs, keyed by output, whose maximum over each row of a tile is returned."""
    scalars: tuple[str, ...] = ()
    """Names of scalar operands, float32 [1]."""

    @classmethod
    def of_sums(cls, product: Product, **output: Any) -> "Epilogue":
        """Returns the epilogue that stores the accumulators as one output, given as name=dtype."""
        [name] = output
        return cls(
            product=product,
            function=lambda sums: {name: sums},
            vectors={},
            matrices={},
            outputs=output,
            column_sums=(),
        )

    @property
    def config(self) -> MatmulConfig:
        return self.product.config

    @property
    def chunks(self) -> int:
        """Number of chunks of columns in a tile; fewer if the output is narrower than a tile."""
        columns = min(self.product.n, self.product.part_n)
        return pl.cdiv(columns, self.config.epilogue_columns)

    @property
    def sums_shape(self) -> tuple[int, int]:
        """Shape of the partial column sums: a row for each warpgroup's tile."""
        down, across = self.product.tile_grid
        height = self.config.cta_tile_m * self.config.cluster
        return down * (height // self.config.tile_m), across * self.product.part_n

    @property
    def maxima_shape(self) -> tuple[int, int]:
        """Shape of the partial row maxima: for each column of tiles, one maximum per row."""
        down, across = self.product.tile_grid
        return across, down * self.config.cta_tile_m * self.config.cluster

    def scratch(self) -> dict[str, Any]:
        c = self.config
        scratch: dict[str, Any] = dict(
            out_smem={
                name: self._stream(dtype, c.write_slots) for name, dtype in self.outputs.items()
            }
        )
        if self.vectors:
            scratch["vector_smem"] = {
                name: plgpu.SMEM((CONSUMERS, row_of_copies(self.product.part_n, dtype)), dtype)
                for name, dtype in self.vectors.items()
            }
            scratch["vector_full"] = plgpu.Barrier(
                num_arrivals=len(self.vectors), num_barriers=CONSUMERS
            )
        if self.row_vectors:
            scratch["row_smem"] = {
                name: plgpu.SMEM((CONSUMERS, c.tile_m), dtype)
                for name, dtype in self.row_vectors.items()
            }
            scratch["row_full"] = plgpu.Barrier(
                num_arrivals=len(self.row_vectors), num_barriers=CONSUMERS
            )
        if self.column_sums:
            # The buffers of sums are reused in the same order as those of the outputs, so the waits
            # for the outputs' copies protect the sums too.
            shape = (CONSUMERS, c.write_slots, column_sums.WARPS, c.epilogue_columns)
            scratch["sum_smem"] = {
                name: plgpu.SMEM(shape, jnp.float32) for name in self.column_sums
            }
        if self.matrices:
            scratch["matrix_smem"] = {
                name: self._stream(dtype, c.read_slots) for name, dtype in self.matrices.items()
            }
            scratch["matrix_full"] = plgpu.Barrier(
                num_arrivals=len(self.matrices), num_barriers=CONSUMERS * c.read_slots
            )
        return scratch

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory per CTA."""
        reduces = bool(self.row_maxima or self.column_moments)
        return self.product.shared_bytes(self.scratch(), sums=reduces)

    @property
    def moments_types(self) -> list[jax.ShapeDtypeStruct]:
        """Types of all tiles' moments: for each name, column means and sums of squared deviations."""
        partial = jax.ShapeDtypeStruct(self.sums_shape, jnp.float32)
        return [partial] * (2 * len(self.column_moments))

    def merged_moments(self, partial: Iterator[jax.Array]) -> dict[str, jax.Array]:
        """Merges all tiles' moments into the means "mean_" + name and variances "variance_" + name, [N].

        A variance adds the squared deviations from each tile's mean, and those of the tiles' means from
        the mean of all rows: no large numbers cancel. The order is fixed.
        """
        if not self.column_moments:
            return {}
        tile_m, n = self.config.tile_m, self.product.n
        starts = jnp.arange(self.sums_shape[0], dtype=jnp.int32) * tile_m
        rows = jnp.maximum(jax.vmap(self.product.rows_of_tile)(starts), 0)
        rows = rows.astype(jnp.float32)[:, None]
        count = self.product.rows
        merged = {}
        for name in self.column_moments:
            means, deviations = next(partial)[:, :n], next(partial)[:, :n]
            mean = jnp.sum(means * rows, 0) / count
            between = rows * jnp.square(means - mean)
            merged[f"mean_{name}"] = mean
            merged[f"variance_{name}"] = jnp.sum(deviations + between, 0) / count
        return merged

    def _stream(self, dtype: Any, slots: int) -> Any:
        """Returns shared memory of `slots` buffers a warpgroup, each for a chunk of a matrix [M, N]."""
        c = self.config
        return self.product.stream_memory((CONSUMERS, slots), c.epilogue_columns, dtype)

    def of_tile(
        self, refs: Sequence[Any], smem: Mapping[str, Any], place: TilePlace
    ) -> TileEpilogue:
        return _EpilogueOfTile(self, _Refs(self, refs), smem, place)


@dataclass(frozen=True)
class _Results:
    """The results of an epilogue for one chunk."""

    tiles: Mapping[str, jax.Array]
    """Chunks of the outputs."""
    sums: Mapping[str, jax.Array]
    """Sums [4, columns] of some outputs over the rows of each of the four warps."""


class _Refs:
    """The arrays of an epilogue in global memory: operands and results, keyed by name."""

    def __init__(self, epilogue: Epilogue, refs: Sequence[Any]):
        remaining = iter(refs)
        self.vectors = {name: next(remaining) for name in epilogue.vectors}
        self.row_vectors = {name: next(remaining) for name in epilogue.row_vectors}
        self.scalars = {name: next(remaining) for name in epilogue.scalars}
        self.matrices = {name: next(remaining) for name in epilogue.matrices}
        self.outputs = {name: next(remaining) for name in epilogue.outputs}
        self.sums = {name: next(remaining) for name in epilogue.column_sums}
        self.moments = {
            name: (next(remaining), next(remaining)) for name in epilogue.column_moments
        }
        self.maxima = {name: next(remaining) for name in epilogue.row_maxima}


@dataclass(frozen=True)
class _EpilogueOfTile:
    """Epilogue of one tile, which processes the tile in chunks of columns."""

    epilogue: Epilogue
    gmem: _Refs
    smem: Mapping[str, Any]
    place: TilePlace

    @property
    def n_start(self) -> jax.Array:
        return self.place.n_idx * self.epilogue.product.part_n

    def prefetch(self) -> None:
        """Starts to copy the epilogue's operands of the first chunks, while the tile is multiplied."""
        for name, ref in self.gmem.vectors.items():
            row = self.smem["vector_smem"][name].at[self.place.wg_idx]
            plgpu.copy_gmem_to_smem(
                ref.at[pl.ds(self.n_start, row.shape[0])],
                row,
                self.smem["vector_full"].at[self.place.wg_idx],
            )
        for name, ref in self.gmem.row_vectors.items():
            plgpu.copy_gmem_to_smem(
                ref.at[pl.ds(self.place.m_start, self.epilogue.config.tile_m)],
                self.smem["row_smem"][name].at[self.place.wg_idx],
                self.smem["row_full"].at[self.place.wg_idx],
            )
        for chunk in range(min(self.epilogue.chunks, self.epilogue.config.read_slots)):
            self._copy_matrices(chunk)

    def run(self, acc: jax.Array) -> None:
        epilogue = self.epilogue
        if epilogue.vectors:
            plgpu.barrier_wait(self.smem["vector_full"].at[self.place.wg_idx])
        if epilogue.row_vectors:
            plgpu.barrier_wait(self.smem["row_full"].at[self.place.wg_idx])
        maxima: dict[str, jax.Array] = {}
        store.store_in_turn(
            self._results(acc, maxima),
            count=epilogue.chunks,
            slots=epilogue.config.write_slots,
            store=self._store,
            send=self._send,
        )
        self._store_maxima(maxima)

    def store_zeros(self) -> None:
        """Stores zeros in place of the tile's results; all chunks are copied from one buffer."""
        zeros = plgpu.layout_cast(jnp.zeros(self._shape, jnp.float32), plgpu.Layout.WGMMA)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for name, dtype in self.epilogue.outputs.items():
            store.store_piece(self._written(name, 0)[0], zeros.astype(dtype))
        store.commit_stores()
        for chunk in range(self.epilogue.chunks):
            self._send_outputs(chunk, 0)

    def _results(self, acc: jax.Array, maxima: dict[str, jax.Array]) -> Iterator[_Results]:
        """Yields the results of each chunk, and collects the maxima of their rows in `maxima`."""
        epilogue = self.epilogue
        scalars = {name: ref[0] for name, ref in self.gmem.scalars.items()}
        for chunk in range(epilogue.chunks):
            tiles, vectors = self._products(acc, chunk), self._vectors(chunk)
            matrices = self._load_matrices(chunk)
            results = epilogue.function(*tiles, **scalars, **vectors, **matrices)
            for name, maximised in epilogue.row_maxima.items():
                largest = jnp.max(maximised(results[name]), axis=1)
                found = maxima.get(name)
                maxima[name] = largest if found is None else jnp.maximum(found, largest)
            sums = {name: self._sums_of_warps(results[name]) for name in epilogue.column_sums}
            yield _Results({n: results[n].astype(d) for n, d in epilogue.outputs.items()}, sums)

    def _sums_of_warps(self, values: jax.Array) -> jax.Array:
        """Returns the sums [4, columns] of a chunk over the valid rows of each of the four warps."""
        exist = self.epilogue.product.which_rows(
            self.place.m_start, values.shape, plgpu.Layout.WGMMA
        )
        return column_sums.of_warps(values if exist is None else jnp.where(exist, values, 0.0))

    def _products(self, acc: jax.Array, chunk: int) -> list[jax.Array]:
        part_n, width = self.epilogue.product.part_n, self.epilogue.config.epilogue_columns
        starts = [
            product * part_n + chunk * width for product in range(self.epilogue.product.products)
        ]
        return [acc[:, start : start + width].astype(jnp.float32) for start in starts]

    def _load_matrices(self, chunk: int) -> dict[str, jax.Array]:
        """Loads a chunk of each matrix, and starts the copies of a later chunk into its buffers."""
        if not self.epilogue.matrices:
            return {}
        slots = self.epilogue.config.read_slots
        slot = chunk % slots
        plgpu.barrier_wait(self._matrix_full(slot))
        loaded = {
            name: plgpu.load(
                self._stream("matrix_smem", name, slot)[0], layout=plgpu.Layout.WGMMA
            ).astype(jnp.float32)
            for name in self.epilogue.matrices
        }
        if chunk + slots < self.epilogue.chunks:
            # The commit waits until all four warps have read the buffer. Without its fence, a copy from
            # beyond the array's end, which fetches nothing, may overwrite the buffer while the warps'
            # loads are in flight.
            plgpu.commit_smem()
            self._copy_matrices(chunk + slots)
        return loaded

    def _stream(self, kind: str, name: str, slot: int) -> tuple[Any, Any]:
        """Returns buffer `slot` of a matrix as two views, for registers and for copies."""
        registers, copies = self.smem[kind][name]
        return registers.at[self.place.wg_idx, slot], copies.at[self.place.wg_idx, slot]

    @property
    def _shape(self) -> tuple[int, int]:
        return self.epilogue.config.tile_m, self.epilogue.config.epilogue_columns

    def _columns(self, chunk: int):
        """Returns a chunk's columns of the output."""
        width = self.epilogue.config.epilogue_columns
        return pl.ds(self.n_start + chunk * width, width)

    def _block(self, ref, chunk: int):
        return self.epilogue.product.rows_at(ref, self.place.m_start, self._columns(chunk))

    def _matrix_full(self, slot: int):
        return self.smem["matrix_full"].at[
            self.place.wg_idx * self.epilogue.config.read_slots + slot
        ]

    def _copy_matrices(self, chunk: int) -> None:
        slot = chunk % self.epilogue.config.read_slots
        for name, ref in self.gmem.matrices.items():
            _, destination = self._stream("matrix_smem", name, slot)
            plgpu.copy_gmem_to_smem(self._block(ref, chunk), destination, self._matrix_full(slot))

    def _vectors(self, chunk: int) -> dict[str, jax.Array]:
        width = self.epilogue.config.epilogue_columns

        def over_tile(smem) -> jax.Array:
            row = plgpu.load(
                smem.at[self.place.wg_idx, pl.ds(chunk * width, width)],
                layout=plgpu.Layout.WGMMA.reduce(0),
            )
            return lax.broadcast_in_dim(row.astype(jnp.float32), self._shape, (1,))

        def over_columns(smem) -> jax.Array:
            column = plgpu.load(smem.at[self.place.wg_idx], layout=plgpu.Layout.WGMMA.reduce(1))
            return lax.broadcast_in_dim(column.astype(jnp.float32), self._shape, (0,))

        vectors = {
            name: over_tile(self.smem["vector_smem"][name]) for name in self.epilogue.vectors
        }
        rows = {
            name: over_columns(self.smem["row_smem"][name]) for name in self.epilogue.row_vectors
        }
        return vectors | rows

    def _store(self, chunk: int, results: _Results) -> None:
        """Writes a chunk's outputs and its warps' column sums to buffers in shared memory."""
        for name, tile in results.tiles.items():
            store.store_piece(self._written(name, chunk)[0], tile)
        for name, sums in results.sums.items():
            column_sums.keep(self._summed(name, chunk), sums)

    def _summed(self, name: str, chunk: int):
        slot = chunk % self.epilogue.config.write_slots
        return self.smem["sum_smem"][name].at[self.place.wg_idx, slot]

    def _written(self, name: str, chunk: int) -> tuple[Any, Any]:
        """Returns the buffer of an output's chunk as two views, for registers and for copies."""
        return self._stream("out_smem", name, chunk % self.epilogue.config.write_slots)

    def _send(self, chunk: int) -> None:
        """Starts the copy of a chunk to global memory, and stores its column sums and moments."""
        epilogue = self.epilogue
        self._send_outputs(chunk, chunk)
        for name in epilogue.column_sums:
            self._store_sum(name, chunk)
        for name in epilogue.column_moments:
            self._store_moments(name, chunk)

    def _send_outputs(self, chunk: int, written: int) -> None:
        """Starts a chunk's copies to global memory, from the buffers of the chunk `written`."""
        for name, ref in self.gmem.outputs.items():
            _, source = self._written(name, written)
            product = self.epilogue.product
            product.store_rows(source, ref, self.place, self._columns(chunk))
        plgpu.commit_smem_to_gmem_group()

    def _store_sum(self, name: str, chunk: int) -> None:
        """Adds up the column sums of a tile's warps in shared memory, and stores them."""
        row = lax.div(self.place.m_start, jnp.int32(self.epilogue.config.tile_m))
        destination = self.gmem.sums[name].at[row, self._columns(chunk)]
        column_sums.finish(self._summed(name, chunk), destination)

    def _store_moments(self, name: str, chunk: int) -> None:
        """Stores the means of a tile's columns, and the sums of squared deviations from these means."""
        epilogue, c = self.epilogue, self.epilogue.config
        layout = _column_layout(c.epilogue_columns, epilogue.outputs[name])
        tile, _ = self._written(name, chunk)
        values = plgpu.load(tile, layout=layout, optimized=False).astype(jnp.float32)
        exist = epilogue.product.which_rows(self.place.m_start, values.shape, layout)
        count = epilogue.product.rows_of_tile(self.place.m_start)
        weight = 1.0 / jnp.maximum(count, 1).astype(jnp.float32)
        values = values if exist is None else jnp.where(exist, values, 0.0)
        mean = jnp.sum(values, axis=0) * weight
        deviations = values - lax.broadcast_in_dim(mean, values.shape, (1,))
        deviations = deviations if exist is None else jnp.where(exist, deviations, 0.0)
        squares = jnp.sum(deviations * deviations, axis=0)
        row = lax.div(self.place.m_start, jnp.int32(c.tile_m))
        for ref, value in zip(self.gmem.moments[name], (mean, squares), strict=True):
            store.store_registers(ref.at[row, self._columns(chunk)], value, layout.reduce(0))

    def _store_maxima(self, maxima: Mapping[str, jax.Array]) -> None:
        """Stores the largest value of each row of the tile, rounded like the output."""
        rows = pl.ds(self.place.m_start, self.epilogue.config.tile_m)
        for name, largest in maxima.items():
            largest = largest.astype(self.epilogue.outputs[name]).astype(jnp.float32)
            store.store_unoptimized(self.gmem.maxima[name].at[self.place.n_idx, rows], largest)


def _column_layout(columns: int, dtype: Any) -> plgpu.Layout:
    """Returns a register layout of a chunk [rows, `columns`]: a quarter of its columns in each warp.

    A thread's vectors have 16 bytes, the units that swizzling permutes: longer ones would not be
    contiguous.
    """
    vec = 16 // jnp.dtype(dtype).itemsize
    quarter = columns // 4
    rows = 32 * vec // quarter
    if quarter == vec:
        tiling, warp_dims, lane_dims = ((rows, columns), (vec,)), (-2,), (-3,)
    else:
        tiling, warp_dims, lane_dims = ((rows, columns), (quarter,), (vec,)), (-3,), (-4, -2)
    return plgpu.Layout.TILED(
        plgpu.Tiling(tiling), warp_dims=warp_dims, lane_dims=lane_dims, vector_dim=-1
    )
