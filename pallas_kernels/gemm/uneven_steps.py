"""The main loop of a product whose output tiles have different numbers of steps along K.

A CTA's tiles use one pipeline without a gap, so that the stage of a tile's first step depends on all
tiles before it, and is part of the warpgroups' loop state. The two consumers share each tile.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gemm.mainloop import Consumer, Producer, Product
from pallas_kernels.gemm.tiled_product import Ring, TilePlace

FEWEST_STEPS = 2
"""Least number of K steps of a tile, so that the loop over steps needs no branch for shorter tiles. A
step beyond the tile's own steps adds zeros."""


@dataclass(frozen=True, kw_only=True)
class UnevenProduct(Product):
    """A product whose tiles have different numbers of K steps, which depend on the tile's group."""

    def steps_of(self, group: Any) -> jax.Array:
        """Returns the number of K steps of each of the group's tiles, at least `FEWEST_STEPS`."""
        raise NotImplementedError

    def first_row_of_warpgroup(self, m_start: Any, wg_idx: Any) -> Any:
        """Returns the first row of a consumer's part of a tile, given the tile's first row."""
        return m_start + wg_idx * self.config.tile_m

    def producer(
        self, ring: Ring, a_gmem: Sequence[Any], b_gmem: Sequence[Any], step_scales: Sequence[Any]
    ) -> Producer:
        return UnevenProducer(self, ring, a_gmem, b_gmem, step_scales)

    def consumer(
        self,
        ring: Ring,
        wg_idx: Any,
        epilogue_of: Callable[[TilePlace], Any],
        step_scales: Sequence[Any],
    ) -> Consumer:
        return UnevenConsumer(self, ring, wg_idx, epilogue_of, step_scales)


class UnevenProducer(Producer):
    """The producer warpgroup, which copies as many K steps as each tile has."""

    product: UnevenProduct

    def _fill_tile(self, sequence_idx, carry):
        place = self.product.position(sequence_idx)
        fill = functools.partial(self._fill_slot, sequence_idx, place, 0)
        return lax.fori_loop(0, self.product.steps_of(place[-1]), fill, carry)


class UnevenConsumer(Consumer):
    """A consumer warpgroup, which multiplies as many K steps as each tile has."""

    product: UnevenProduct

    def run(self) -> None:
        plgpu.set_max_registers(232, action="increase")
        tiles = self.product.tiles_of_cluster()
        lax.fori_loop(0, tiles, self._sum_tile, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)

    def _sum_tile(self, sequence_idx: Any, slot: Any) -> jax.Array:
        """Computes a tile that starts in stage `slot`; returns the next tile's first stage."""
        product = self.product
        m_start, n_idx, group = product.position(sequence_idx)
        m_start = product.first_row_of_warpgroup(m_start, self.wg_idx)
        accumulate = functools.partial(self._sum_steps, group, slot)
        acc, last = pl.run_scoped(accumulate, self._accumulator)
        plgpu.barrier_arrive(self.ring.free.at[last])
        self.epilogue_of(TilePlace(self.wg_idx, m_start, n_idx, group)).run(acc)
        return product.next_slot(last)

    def _sum_steps(self, group: Any, slot: Any, acc_ref: Any) -> tuple[jax.Array, jax.Array]:
        """Runs all K steps of a tile; returns the accumulators and the last stage, not yet free."""

        def step(k_idx: Any, previous: Any) -> jax.Array:
            slot = self.product.next_slot(previous)
            plgpu.wgmma_wait(self._multiply_step(acc_ref, group, k_idx, slot))
            plgpu.barrier_arrive(self.ring.free.at[previous])
            return slot

        self._multiply_step(acc_ref, group, jnp.int32(0), slot)
        slot = lax.fori_loop(1, self.product.steps_of(group), step, slot)
        return acc_ref[...], slot

    def _multiply_step(self, acc_ref: Any, group: Any, k_idx: Any, slot: Any) -> int:
        """Issues the WGMMAs of a stage once it is filled, and returns their number."""
        del group
        self._await_slot(0, slot)
        return self._issue(acc_ref, k_idx, slot)
