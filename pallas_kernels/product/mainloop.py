"""The product under a kernel's epilogue: operands through shared memory, tiles in a good order.

A CTA has one warpgroup that copies tiles of the operands into a ring in shared memory, and two that
multiply. In ping-pong these two hold different output tiles: one runs its epilogue and stores while
the other one multiplies, so that an epilogue costs nothing as long as it is shorter than the product
of a tile. Otherwise they share an output tile of twice the height, whose operands are read less often.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

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
    tile_k: int = 64
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
        tiles = (self.cta_tile_m + self.tile_n) * self.tile_k
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
    n_start: int
    k_start: int


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
        return sum(pl.cdiv(k, self.config.tile_k) for k in self.ks)

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
        # Rows of an array, not only of its tiles, have to be whole swizzle patterns, and so has what
        # lies before a block.
        along_k = (*self.ks, c.tile_k, *(block.k_start for block in self.blocks))
        along_n = (self.n, self.part_n, *(block.n_start for block in self.blocks))
        swizzle = min(
            widest_swizzle(self.dtype, *((self.m, c.tile_m) if self.a_transposed else along_k)),
            widest_swizzle(self.dtype, *(along_k if self.b_transposed else along_n)),
        )
        a_tile, b_tile = (c.cta_tile_m, c.tile_k), (c.tile_k, self.part_n)
        if self.a_transposed:
            a_tile = a_tile[::-1]
        if self.b_transposed:
            b_tile = b_tile[::-1]
        takers = 1 if c.ping_pong else CONSUMERS
        ring = dict(
            a_smem=tiled((c.stages, *a_tile), self.dtype, swizzle),
            b_smem=[tiled((c.stages, *b_tile), self.dtype, swizzle) for _ in range(self.products)],
            # A warpgroup has to see every phase of a barrier that it waits on: in ping-pong each has
            # its own.
            full=plgpu.Barrier(
                num_arrivals=1 + self.products,
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

        def along(ref, transposed, start, size, k_start):
            span, k_span = pl.ds(start, size), pl.ds(k_start, c.tile_k)
            return ref.at[k_span, span] if transposed else ref.at[span, k_span]

        def fill(sequence_idx, m_start, n_idx, term, k_idx, carry):
            slot, filled = carry

            @pl.when(filled >= c.stages)
            def _():
                plgpu.barrier_wait(free.at[slot])

            landed = full.at[self._full_idx(sequence_idx, slot)]
            k_start = k_idx * c.tile_k
            plgpu.copy_gmem_to_smem(
                along(a_gmem[term], self.a_transposed, m_start, c.cta_tile_m, k_start),
                a_smem.at[slot],
                landed,
            )

            for product in range(self.products):
                block = self.blocks[term * self.products + product]
                plgpu.copy_gmem_to_smem(
                    along(
                        b_gmem[block.array],
                        not self.b_transposed,
                        block.n_start + n_idx * self.part_n,
                        self.part_n,
                        block.k_start + k_start,
                    ),
                    b_smem[product].at[slot],
                    landed,
                    collective_axes="cta" if c.cluster > 1 else None,
                )
            return self._next_slot(slot), filled + 1

        def tile(sequence_idx, carry):
            m_start, n_idx = self._place(sequence_idx)
            for term, k in enumerate(self.ks):
                step = functools.partial(fill, sequence_idx, m_start, n_idx, term)
                carry = lax.fori_loop(0, pl.cdiv(k, c.tile_k), step, carry)
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

        def operands(slot):
            a = a_smem.at[slot]
            if not c.ping_pong:
                mine = pl.ds(wg_idx * c.tile_m, c.tile_m)
                a = a.at[:, mine] if self.a_transposed else a.at[mine]
            if self.a_transposed:
                a = a.transpose((1, 0))
            for product in range(self.products):
                b = b_smem[product].at[slot]
                yield a, b.transpose((1, 0)) if self.b_transposed else b

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
                    for product, (a, b) in enumerate(operands(slot)):
                        part = slice(product * self.part_n, (product + 1) * self.part_n)
                        plgpu.wgmma(acc_ref.at[:, part] if self.products > 1 else acc_ref, a, b)

                def step(_, previous):
                    slot = self._next_slot(previous)
                    multiply(slot)
                    plgpu.wgmma_wait(self.products)
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


def tile_cost(n: int, tile_n: int) -> float:
    """What tiles of `tile_n` columns cost of an output so wide: what lies beyond is computed too.

    A narrower tile reads its operands more often: 128 x 128 takes 6% longer than 128 x 192.
    """
    columns = pl.cdiv(n, tile_n) * tile_n
    return columns * (1.06 if tile_n <= 128 else 1.0)


def wastes_wide_tiles(n: int) -> bool:
    """Whether so much of tiles of 192 columns lies beyond the end that those of 128 are faster."""
    return tile_cost(n, 128) < tile_cost(n, 192)


def tiled(shape: tuple[int, ...], dtype: Any, swizzle: int) -> Any:
    """Shared memory as the copy engine and wgmma both want it."""
    tiling = plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))


def widest_swizzle(dtype: Any, *widths: int) -> int:
    """In bytes, of which rows of each of these widths are a multiple."""
    width = math.gcd(*widths)
    return plgpu.find_swizzle(width * jnp.dtype(dtype).itemsize * 8)
