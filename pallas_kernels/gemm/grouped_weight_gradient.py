"""The gradient of grouped weights for Hopper: x^T @ dy over the rows of each group.

The sums are over a group's rows, of any number and from any first row on. The tiles of x and dy in the
pipeline begin at multiples of 8 rows, as copies into WGMMA's layout require. If a K step also has rows
of other groups, the consumers set these rows of x and dy to zero in shared memory before they multiply,
so that no value of another group, not even NaN, reaches the sums. A group without rows gets zeros.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import store
from pallas_kernels.gemm import cost
from pallas_kernels.gemm import groups as groups_of_rows
from pallas_kernels.gemm.cost import WeightWork
from pallas_kernels.gemm.epilogue import Epilogue
from pallas_kernels.gemm.groups import Group, Groups
from pallas_kernels.gemm.mainloop import Consumer
from pallas_kernels.gemm.matmul_config import CONSUMERS, MatmulConfig
from pallas_kernels.gemm.operands import matrix_of, swizzled_columns
from pallas_kernels.gemm.tiled_product import Ring, Step, TilePlace
from pallas_kernels.gemm.uneven_steps import FEWEST_STEPS, UnevenConsumer, UnevenProduct
from pallas_kernels.gemm.weight_gradient import PIECE_LAYOUT, PIECE_ROWS
from pallas_kernels.hopper import SHARED_MEMORY_BYTES


def candidates(
    work: WeightWork, groups: int, out_dtype: Any, multiprocessors: int
) -> list[MatmulConfig]:
    """Returns the configs that fit into shared memory, predicted fastest first."""
    configs = [
        MatmulConfig(
            tile_m,
            tile_n,
            stages,
            ping_pong=False,
            epilogue_columns=swizzled_columns(out_dtype),
            write_slots=slots,
        )
        for tile_m, tile_n in _TILES
        for stages, slots in _STAGES
    ]
    fitting = [
        config
        for config in configs
        if _tiles(work, groups, jnp.bfloat16, config, 1, out_dtype).shared_bytes
        <= SHARED_MEMORY_BYTES
    ]
    predicted = functools.partial(predicted_time, work, groups, multiprocessors=multiprocessors)
    return sorted(fitting, key=predicted)


_TILES = ((64, 256), (64, 192), (128, 192), (128, 128), (64, 128))
"""Rows and columns of a warpgroup's tile; those of a CTA's two warpgroups are one below the other."""
_STAGES = ((3, 4), (4, 2), (3, 2), (5, 2), (4, 1), (3, 1))
"""Pipeline stages, and epilogue buffers for results; earlier pairs win ties of predicted time."""


def predicted_time(
    work: WeightWork, groups: int, config: MatmulConfig, *, multiprocessors: int
) -> float:
    """Returns the predicted microseconds for groups of equal size."""
    return cost.grouped_weight_gradient(
        work, groups, (config.cta_tile_m, config.tile_n), multiprocessors
    )


def grouped_weight_gradient(
    x: jax.Array,
    dy: jax.Array,
    group_sizes: jax.Array,
    offset: jax.Array,
    *,
    groups: int,
    out_dtype: Any,
    multiprocessors: int,
    config: MatmulConfig | None = None,
    name: str = "grouped_weight_gradient",
) -> jax.Array:
    """Returns x^T @ dy for the rows of each group: [E, K, N].

    Args:
      x: [M, K], bfloat16 or float16.
      dy: [M, N] of the same dtype.
      group_sizes: int [G], rows of each group.
      offset: int [], the index of the first group in the result.
      groups: E, the groups in the result.
      out_dtype: of the result; sums are in float32, and rounded once.
      multiprocessors: SMs of the device.
      config: one of `candidates`; None for the first.
      name: the kernel's name in a profile.
    """
    # TMA writes the layout that WGMMA reads only if the number of rows is a multiple of 8.
    missing = -x.shape[0] % PIECE_ROWS
    if missing:
        x, dy = (jnp.pad(array, ((0, missing), (0, 0))) for array in (x, dy))
    rows, features = x.shape
    work = WeightWork(rows, features, (dy.shape[1],), out_bytes=jnp.dtype(out_dtype).itemsize)
    if config is None:
        config = candidates(work, groups, out_dtype, multiprocessors)[0]
    tiles = _tiles(work, groups, x.dtype, config, multiprocessors, out_dtype)
    product = tiles.product
    product.check_shared_bytes(tiles.shared_bytes)
    of_groups = groups_of_rows.operands(
        group_sizes, offset, groups=groups, rows=rows, tile_m=config.cta_tile_m
    )
    [dw] = product.launch(
        (x,),
        (dy,),
        of_groups,
        out_type=[jax.ShapeDtypeStruct((groups, features, dy.shape[1]), out_dtype)],
        scratch=tiles.scratch(),
        epilogue=tiles.of_tile,
        name=name,
    )
    return dw


def _tiles(
    work: WeightWork,
    groups: int,
    dtype: Any,
    config: MatmulConfig,
    multiprocessors: int,
    out_dtype: Any,
) -> Epilogue:
    """Returns the product with an epilogue that rounds the sums and stores them."""
    [width] = work.widths
    product = _GroupedWeightProduct(
        m=work.features,
        n=width,
        ks=(work.rows,),
        dtype=jnp.dtype(dtype),
        blocks=(),
        config=config,
        multiprocessors=multiprocessors,
        a_transposed=True,
        b_columns=width,
        group_count=groups,
    )
    return Epilogue.of_sums(product, dw=out_dtype)


@dataclass(frozen=True, kw_only=True)
class _GroupedWeightProduct(UnevenProduct):
    """Static parameters of a launch, and the rows of x and dy that are multiplied for each tile."""

    group_count: int
    groups: Groups | None = None
    """Rows and tiles of each group, which only the device knows; None outside of a kernel."""

    @property
    def tile_count(self) -> int:
        down, across = self.tile_grid
        return self.group_count * down * across

    def operand_memory(self) -> dict[str, Any]:
        return super().operand_memory() | dict(masked=plgpu.Barrier(num_arrivals=CONSUMERS))

    # --- on the device ----------------------------------------------------------------------------

    def on_device(self, others: Sequence[Any]) -> tuple["_GroupedWeightProduct", Sequence[Any]]:
        found, others = groups_of_rows.on_device(
            others, groups=self.group_count, rows=self.ks[0], tile_m=self.config.cta_tile_m
        )
        return replace(self, groups=found), others

    def consumer(self, *args: Any) -> Consumer:
        return _GroupConsumer(self, *args)

    def position(self, sequence_idx: Any) -> tuple[jax.Array, ...]:
        c, (down, across) = self.config, self.tile_grid
        item = lax.axis_index("cluster") + sequence_idx * self.clusters
        of_group = jnp.int32(down * across)
        m_idx, n_idx = plgpu.planar_snake(lax.rem(item, of_group), (down, across), 0, c.band)
        group = self.groups.at(lax.div(item, of_group))
        return m_idx * c.cta_tile_m, n_idx, group

    def first_row(self, group: Group, k_idx: Any) -> jax.Array:
        """Returns the first row of x and dy in step `k_idx` of a group."""
        aligned = lax.div(group.start, jnp.int32(PIECE_ROWS)) * PIECE_ROWS
        return pl.multiple_of(aligned + k_idx * self.tile_k, PIECE_ROWS)

    def steps_of(self, group: Group) -> jax.Array:
        """Returns the number of K steps of each of the group's tiles."""
        rows = group.end - self.first_row(group, 0)
        return jnp.maximum(lax.div(rows + (self.tile_k - 1), jnp.int32(self.tile_k)), FEWEST_STEPS)

    def copy_step(
        self,
        ring: Ring,
        a_gmem: Sequence[Any],
        b_gmem: Sequence[Any],
        slot: Any,
        step: Step,
        full: Any,
    ) -> None:
        k_start = self.first_row(step.group, step.k_idx)
        [x], [dy] = a_gmem, b_gmem
        self.a_tile.copy(matrix_of(x), ring.a_smem, slot, step.m_start, k_start, full)
        n_start = step.n_idx * self.part_n
        self.b_tile.copy(matrix_of(dy), ring.b_smem[0], slot, n_start, k_start, full)

    def store_rows(self, source: Any, ref: Any, place: TilePlace, columns: Any) -> None:
        rows = pl.ds(place.m_start, self.config.tile_m)
        destination = ref.at[place.group.index, rows, columns]
        plgpu.copy_smem_to_gmem(source, destination, commit_group=False)


class _GroupConsumer(UnevenConsumer):
    """A consumer warpgroup, which clears the rows of other groups before it multiplies."""

    product: _GroupedWeightProduct

    def _multiply_step(self, acc_ref: Any, group: Group, k_idx: Any, slot: Any) -> int:
        """Issues the WGMMAs of a stage once it is filled and has no rows of other groups."""
        product = self.product
        first = product.first_row(group, k_idx)
        self._await_slot(0, slot)

        @pl.when((first < group.start) | (first + product.tile_k > group.end))
        def _():
            self._clear(slot, group.start - first, group.end - first)
            plgpu.commit_smem()
            plgpu.barrier_arrive(self.ring.masked)
            plgpu.barrier_wait(self.ring.masked)

        return self._issue(acc_ref, k_idx, slot)

    def _clear(self, slot: Any, start: Any, end: Any) -> None:
        """Sets a stage's rows of x and dy before `start` and from `end` on to zero.

        This warpgroup clears the columns of x that it multiplies, and every other 8 rows of dy.
        """
        product, ring, wg_idx = self.product, self.ring, self.wg_idx
        x = [memory for _, memory in product.a_tile.operands(ring.a_smem, slot, wg_idx, CONSUMERS)]
        dy = [memory for _, memory in product.b_tile.operands(ring.b_smem[0], slot)]

        def clear(piece: Any, _: None) -> None:
            row = pl.multiple_of(piece * PIECE_ROWS, PIECE_ROWS)

            @pl.when((start > row) | (end < row + PIECE_ROWS))
            def _():
                for memory in x:
                    _clear_piece(memory, row, start, end)

                # Both warpgroups multiply all of dy, and each clears every other 8 rows of it.
                @pl.when(lax.rem(piece, jnp.int32(CONSUMERS)) == wg_idx)
                def _():
                    for memory in dy:
                        _clear_piece(memory, row, start, end)

        lax.fori_loop(0, product.tile_k // PIECE_ROWS, clear, None)


def _clear_piece(memory: Any, row: Any, start: Any, end: Any) -> None:
    """Sets to zero those of 8 rows from `row` on that are before `start`, or at `end` and after."""
    piece = memory.at[pl.ds(row, PIECE_ROWS)]
    values = plgpu.load(piece, layout=PIECE_LAYOUT, optimized=False)
    rows = row + plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=PIECE_LAYOUT)
    kept = (rows >= start) & (rows < end)
    store.store_swizzled(piece, jnp.where(kept, values, jnp.zeros_like(values)), PIECE_LAYOUT)
