"""The product under a kernel's epilogue: operands through shared memory, tiles in a good order.

A CTA has one warpgroup that copies tiles of the operands into a ring in shared memory, and two that
multiply. In ping-pong these two hold different output tiles: one runs its epilogue and stores while
the other one multiplies, so that an epilogue costs nothing as long as it is shorter than the product
of a tile. Otherwise they share an output tile of twice the height, whose operands are read less often.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.product.operands import OperandTile, swizzled_columns

CONSUMERS = 2
"""Warpgroups of a CTA that multiply; the one after them copies."""
ACCUMULATOR_ELEMENTS = 128 * 192
"""Of a warpgroup's tile: 192 of a thread's 232 registers. With 256 they spill."""


@dataclass(frozen=True)
class MatmulConfig:
    """How a product is cut into tiles."""

    tile_m: int = 128
    """Rows of a warpgroup's accumulators."""
    tile_n: int = 192
    """Columns of them; several products in one pass over a divide them among themselves."""
    stages: int = 4
    """Slots of the ring: tiles of the operands in flight or in use."""
    ping_pong: bool = True
    """The warpgroups hold different output tiles; otherwise the halves of one twice as high."""
    cluster: int = 1
    """CTAs one below the other that share the tiles of b: each copies a part of them to all."""
    epilogue_columns: int = 64
    """Columns of a tile that the epilogue takes at a time."""
    read_slots: int = 1
    """Slots for such columns of each matrix that the epilogue reads; all are filled ahead of it."""
    write_slots: int = 1
    """Slots for such columns of each matrix that the epilogue writes."""
    band: int = 8
    """Output tiles are taken in bands of so many rows of tiles, for the sake of the cache."""
    pads_columns: bool = False
    """XLA copies a b of ragged width to whole blocks of columns first, so that an instruction takes all
    of a tile's columns and not one block of them. That pays where there are many rows."""

    def __post_init__(self) -> None:
        if self.tile_m % 64 or self.tile_n % 8 or self.tile_n > 256:
            raise ValueError(
                "MatmulConfig: wgmma takes tiles of a multiple of 64 rows and of 8 columns up to 256,"
                f" got {self.tile_m} x {self.tile_n}"
            )
        if self.tile_m * self.tile_n > ACCUMULATOR_ELEMENTS:
            raise ValueError(
                f"MatmulConfig: a tile may have {ACCUMULATOR_ELEMENTS} elements,"
                f" got {self.tile_m} x {self.tile_n}"
            )
        for name in ("stages", "cluster", "read_slots", "write_slots", "band"):
            if getattr(self, name) < 1:
                raise ValueError(f"MatmulConfig: {name} must be at least 1")

    @property
    def cta_tile_m(self) -> int:
        return self.tile_m if self.ping_pong else CONSUMERS * self.tile_m

    def ring_bytes(self, dtype: Any) -> int:
        """Shared memory for operands of `dtype`."""
        tiles = (self.cta_tile_m + self.tile_n) * swizzled_columns(dtype)
        return self.stages * tiles * jnp.dtype(dtype).itemsize


def fills(multiprocessors: int, rows: int, columns: int) -> bool:
    """Whether a product has an output tile for each multiprocessor.

    With fewer, XLA's split along K is faster than an epilogue saves.
    """
    config = MatmulConfig()
    return pl.cdiv(rows, config.tile_m) * pl.cdiv(columns, config.tile_n) >= multiprocessors


class TileEpilogue(Protocol):
    """What becomes of a tile of accumulators."""

    def prefetch(self) -> None:
        """Has copied what will be needed, while the tile is multiplied."""

    def run(self, acc: jax.Array) -> None:
        """Stores what comes of the accumulators."""


@dataclass(frozen=True)
class TilePlace:
    """The tile that a warpgroup computes."""

    wg_idx: jax.Array
    m_start: jax.Array
    n_idx: jax.Array
    """Of its column of tiles."""


@dataclass(frozen=True)
class Block:
    """Where the b of one product lies."""

    array: int
    k_part: int | None = None
    """Of an array with the b of several terms: its index along the axis of the terms."""
    n_part: int | None = None
    """Of an array with the b of several products: its index along the axis of the products."""

    def view(self, refs: Sequence[Any], transposed: bool) -> Callable[[Any, Any], Any]:
        """Takes a span of each of b's two axes as they lie in the array, and returns that part."""

        def index(part, span):
            return (span,) if part is None else (part, span)

        def part(first, second):
            parts = (self.n_part, self.k_part) if transposed else (self.k_part, self.n_part)
            return refs[self.array].at[(*index(parts[0], first), *index(parts[1], second))]

        return part


@dataclass(frozen=True)
class Product:
    """The static facts of a launch, epilogue aside, and the code of its warpgroups.

    There may be several terms, a_i @ b_i, that are added, and several products of a tile of a, with
    as many b.
    """

    m: int
    """Rows that count; the arrays may have a few more."""
    n: int
    """Columns of each product."""
    ks: tuple[int, ...]
    """Length of the sums of each term."""
    dtype: Any
    blocks: tuple[Block, ...]
    """For each term, and in it each product."""
    config: MatmulConfig
    multiprocessors: int
    products: int = 1
    a_transposed: bool = False
    b_transposed: bool = False
    b_columns: int | None = None
    """Columns of each product's b in memory where they are more than `n`."""

    @property
    def tile_k(self) -> int:
        return swizzled_columns(self.dtype)

    @property
    def a_tile(self) -> OperandTile:
        return OperandTile(
            span=self.config.cta_tile_m,
            k_last=not self.a_transposed,
            # An instruction takes 64 rows, which is a block.
            whole_blocks=False,
            dtype=self.dtype,
        )

    @property
    def b_tile(self) -> OperandTile:
        columns = self.n if self.b_columns is None else self.b_columns
        return OperandTile(
            span=self.part_n,
            k_last=self.b_transposed,
            whole_blocks=columns % swizzled_columns(self.dtype) == 0,
            dtype=self.dtype,
        )

    @property
    def part_n(self) -> int:
        """Columns of the output that a tile covers."""
        return self.config.tile_n // self.products

    @property
    def tile_grid(self) -> tuple[int, int]:
        """Output tiles of a cluster, down and across."""
        height = self.config.cta_tile_m * self.config.cluster
        return pl.cdiv(self.m, height), pl.cdiv(self.n, self.part_n)

    @property
    def tile_count(self) -> int:
        down, across = self.tile_grid
        return down * across

    @property
    def clusters(self) -> int:
        return min(self.multiprocessors // self.config.cluster, self.tile_count)

    @property
    def k_steps(self) -> int:
        return sum(pl.cdiv(k, self.tile_k) for k in self.ks)

    def launch(
        self,
        terms: Sequence[jax.Array],
        bs: Sequence[jax.Array],
        others: Sequence[jax.Array],
        *,
        out_type: Sequence[jax.ShapeDtypeStruct],
        scratch: Mapping[str, Any],
        epilogue: Callable[[Sequence[Any], Mapping[str, Any], TilePlace], TileEpilogue],
        name: str,
    ) -> Sequence[jax.Array]:
        """Runs the kernel.

        Args:
          others: further operands, for the epilogue.
          scratch: shared memory of the epilogue.
          epilogue: that of a tile, from `others` and the outputs in global memory, and `scratch`.
          name: of the kernel, in a profile.
        """

        def kernel(*refs, ring, own):
            a_gmem, b_gmem = refs[: len(terms)], refs[len(terms) : len(terms) + len(bs)]
            rest = refs[len(terms) + len(bs) :]
            wg_idx = lax.axis_index("wg")
            lax.cond(
                wg_idx == CONSUMERS,
                lambda: self._copy_operands(a_gmem, b_gmem, **ring),
                lambda: self._multiply(wg_idx, functools.partial(epilogue, rest, own), **ring),
            )

        return plgpu.kernel(
            kernel,
            out_type=tuple(out_type),
            scratch_types={"ring": self._ring(), "own": dict(scratch)},
            grid=(self.clusters,),
            grid_names=("cluster",),
            cluster=(self.config.cluster,),
            cluster_names=("cta",),
            num_threads=CONSUMERS + 1,
            thread_name="wg",
            kernel_name=name,
            compiler_params=plgpu.CompilerParams(approx_math=True),
        )(*terms, *bs, *others)

    def _ring(self) -> dict[str, Any]:
        c = self.config
        takers = 1 if c.ping_pong else CONSUMERS
        ring = dict(
            a_smem=self.a_tile.memory(c.stages),
            b_smem=[self.b_tile.memory(c.stages) for _ in range(self.products)],
            # A warpgroup has to see every phase of a barrier that it waits on: in ping-pong each has
            # its own.
            full=plgpu.Barrier(
                num_arrivals=self.a_tile.blocks + self.products * self.b_tile.blocks,
                num_barriers=c.stages * (CONSUMERS if c.ping_pong else 1),
            ),
            free=plgpu.Barrier(num_arrivals=takers, num_barriers=c.stages)
            if c.cluster == 1
            else plgpu.ClusterBarrier(
                collective_axes=("cta",), num_arrivals=takers, num_barriers=c.stages
            ),
        )
        if c.ping_pong:
            ring["turn"] = plgpu.Barrier(num_barriers=CONSUMERS)
        return ring

    # --- device side ------------------------------------------------------------------------------

    def _tiles_of_cluster(self) -> jax.Array:
        first = lax.axis_index("cluster")
        return lax.div(jnp.int32(self.tile_count - 1) - first, jnp.int32(self.clusters)) + 1

    def _place(self, sequence_idx) -> tuple[jax.Array, jax.Array]:
        """First row and column index of the tile that this CTA takes as number `sequence_idx`."""
        c = self.config
        m_idx, n_idx = plgpu.planar_snake(
            lax.axis_index("cluster") + sequence_idx * self.clusters, self.tile_grid, 0, c.band
        )
        return (m_idx * c.cluster + lax.axis_index("cta")) * c.cta_tile_m, n_idx

    def _full_idx(self, sequence_idx, slot):
        """The barrier of a slot that is being filled for a tile."""
        if not self.config.ping_pong:
            return slot
        return lax.rem(sequence_idx, jnp.int32(CONSUMERS)) * self.config.stages + slot

    def _next_slot(self, slot):
        return lax.select(slot == self.config.stages - 1, jnp.int32(0), slot + 1)

    def _copy_operands(self, a_gmem, b_gmem, *, a_smem, b_smem, full, free, **_) -> None:
        """The warpgroup that fills the ring, tile by tile of the output and step by step along K."""
        c = self.config
        plgpu.set_max_registers(40, action="decrease")

        def fill(sequence_idx, m_start, n_idx, term, k_idx, carry):
            slot, filled = carry

            @pl.when(filled >= c.stages)
            def _():
                plgpu.barrier_wait(free.at[slot])

            landed = full.at[self._full_idx(sequence_idx, slot)]
            k_start = k_idx * self.tile_k

            def a_matrix(first, second):
                return a_gmem[term].at[first, second]

            self.a_tile.copy(a_matrix, a_smem, slot, m_start, k_start, landed)
            for product in range(self.products):
                self.b_tile.copy(
                    self.blocks[term * self.products + product].view(b_gmem, self.b_transposed),
                    b_smem[product],
                    slot,
                    n_idx * self.part_n,
                    k_start,
                    landed,
                    collective_axes="cta" if c.cluster > 1 else None,
                )
            return self._next_slot(slot), filled + 1

        def tile(sequence_idx, carry):
            m_start, n_idx = self._place(sequence_idx)
            for term, k in enumerate(self.ks):
                step = functools.partial(fill, sequence_idx, m_start, n_idx, term)
                carry = lax.fori_loop(0, pl.cdiv(k, self.tile_k), step, carry)
            return carry

        nothing = (jnp.int32(0), jnp.int32(0))
        slot, filled = lax.fori_loop(0, self._tiles_of_cluster(), tile, nothing)
        # Nobody may still be about to arrive here when this CTA ends.
        for back in range(1, c.stages + 1):

            @pl.when(filled >= back)
            def _(back=back):
                last_filled = lax.rem(slot + (c.stages - back), jnp.int32(c.stages))
                plgpu.barrier_wait(free.at[last_filled])

    def _multiply(self, wg_idx, epilogue_of, *, a_smem, b_smem, full, free, turn=None) -> None:
        """A warpgroup that multiplies, and runs the epilogue of its tiles."""
        c = self.config
        plgpu.set_max_registers(232, action="increase")
        tiles = self._tiles_of_cluster()
        stride = CONSUMERS if c.ping_pong else 1
        first = wg_idx if c.ping_pong else jnp.int32(0)
        if c.ping_pong:
            pl.when(wg_idx == CONSUMERS - 1)(lambda: plgpu.barrier_arrive(turn.at[0]))

        sharers = 1 if c.ping_pong else CONSUMERS
        my_share = jnp.int32(0) if c.ping_pong else wg_idx

        def instructions(acc_ref, slot):
            """What is to be multiplied in a slot, with the part of the accumulators it is added to."""
            for product in range(self.products):
                for columns, b in self.b_tile.operands(b_smem[product], slot):
                    for rows, a in self.a_tile.operands(a_smem, slot, my_share, sharers):
                        first = product * self.part_n
                        columns_of_all = slice(first + columns.start, first + columns.stop)
                        part = _part(acc_ref, rows, columns_of_all)
                        yield (
                            part,
                            a.transpose((1, 0)) if self.a_transposed else a,
                            b.transpose((1, 0)) if self.b_transposed else b,
                        )

        def tile(tile_idx, _):
            sequence_idx = first + tile_idx * stride
            m_start, n_idx = self._place(sequence_idx)
            if not c.ping_pong:
                m_start += wg_idx * c.tile_m
            epilogue = epilogue_of(TilePlace(wg_idx, m_start, n_idx))
            epilogue.prefetch()

            def accumulate(acc_ref):
                def multiply(slot):
                    plgpu.barrier_wait(full.at[self._full_idx(sequence_idx, slot)])
                    count = 0
                    for part, a, b in instructions(acc_ref, slot):
                        plgpu.wgmma(part, a, b)
                        count += 1
                    return count

                def step(_, previous):
                    slot = self._next_slot(previous)
                    plgpu.wgmma_wait(multiply(slot))
                    plgpu.barrier_arrive(free.at[previous])
                    return slot

                if c.ping_pong:
                    plgpu.barrier_wait(turn.at[wg_idx])
                slot = lax.rem(sequence_idx * self.k_steps, jnp.int32(c.stages))
                multiply(slot)
                slot = lax.fori_loop(1, self.k_steps, step, slot)
                if c.ping_pong:
                    other = turn.at[CONSUMERS - 1 - wg_idx]
                    pl.when(sequence_idx < tiles - 1)(lambda: plgpu.barrier_arrive(other))
                return acc_ref[...], slot

            acc, slot = pl.run_scoped(accumulate, plgpu.ACC((c.tile_m, c.tile_n), jnp.float32))
            plgpu.barrier_arrive(free.at[slot])
            epilogue.run(acc)

        count = lax.div(tiles - first + (stride - 1), jnp.int32(stride))
        lax.fori_loop(0, count, tile, None)
        plgpu.wait_smem_to_gmem(0)


def _part(ref: Any, rows: slice, columns: slice) -> Any:
    """A part of the accumulators, which is not sliced where it is all of them."""
    if (rows.start, rows.stop, columns.start, columns.stop) == (0, ref.shape[0], 0, ref.shape[1]):
        return ref
    if (rows.start, rows.stop) == (0, ref.shape[0]):
        return ref.at[:, columns]
    return ref.at[rows, columns]


def tile_cost(n: int, tile_n: int) -> float:
    """What tiles of `tile_n` columns cost of an output so wide: what lies beyond is computed too.

    A narrower tile reads its operands more often: 128 x 128 takes 6% longer than 128 x 192.
    """
    columns = pl.cdiv(n, tile_n) * tile_n
    return columns * (1.06 if tile_n <= 128 else 1.0)


def wastes_wide_tiles(n: int) -> bool:
    """Whether so much of tiles of 192 columns lies beyond the end that those of 128 are faster."""
    return tile_cost(n, 128) < tile_cost(n, 192)
