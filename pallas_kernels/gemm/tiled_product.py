"""A product's division into tiles and K steps: their memory and order, and each step's instructions.

`mainloop` has the loops over tiles and steps.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gemm.matmul_config import CONSUMERS, MatmulConfig
from pallas_kernels.gemm.operands import (
    OperandTile,
    allocated_bytes,
    block,
    matrix_of,
    swizzled_columns,
)
from pallas_kernels.gemm.quantized_weights import Format, QuantizedTile
from pallas_kernels.hopper import REDUCTION_BYTES, SHARED_MEMORY_BYTES

RAW_STEP = 128
"""Elements along K of a quantised [N, K] b that are dequantised at a time."""
RAW_STAGES = 2
"""Pipeline stages of quantised weights: steps in flight or being dequantised."""


def run_of(tiles_before: Callable[[Any], Any], runs: int, tile: Any) -> jax.Array:
    """Returns the index of the run of consecutive tiles that contains a tile, by bisection in a kernel.

    Args:
      tiles_before: function from a run's index to the number of tiles before the run, and from `runs` to
        the number of all tiles. Runs may be empty.
      runs: the number of runs.
      tile: the index of the tile among those of all runs.
    """
    found = jnp.int32(0)
    for bit in reversed(range((runs - 1).bit_length())):
        next_one = jnp.minimum(found + (1 << bit), runs)
        found = jnp.where(tiles_before(next_one) <= tile, next_one, found)
    return found


@dataclass(frozen=True)
class TilePlace:
    """The tile that a warpgroup computes."""

    wg_idx: jax.Array
    m_start: jax.Array
    n_idx: jax.Array
    """Index of the column of tiles."""
    group: Any = None
    """Group of rows that the tile belongs to, in a grouped product."""


@dataclass(frozen=True)
class Block:
    """The position of one product's b in the operand arrays."""

    array: int
    k_part: int | None = None
    """Index along the array's axis over terms a_i @ b_i; None if it has no such axis."""
    n_part: int | None = None
    """Index along the array's axis over products that share a; None if it has no such axis."""

    def view(self, refs: Sequence[Any], transposed: bool) -> Callable[[Any, Any], Any]:
        """Returns a function from spans of b's axes, in the array's order, to that part of the array."""

        def index(part, span):
            return (span,) if part is None else (part, span)

        def part(first, second):
            parts = (self.n_part, self.k_part) if transposed else (self.k_part, self.n_part)
            return refs[self.array].at[(*index(parts[0], first), *index(parts[1], second))]

        return part


@dataclass(frozen=True)
class TiledProduct:
    """Static parameters of a product, and where its tiles, steps and pipeline stages are.

    Several terms a_i @ b_i may be added, and several products may multiply one tile of a by a b each.
    """

    m: int
    """Rows of the result; the arrays may have a few more rows, of padding."""
    n: int
    """Columns of each product's b."""
    ks: tuple[int, ...]
    """Length of K of each term."""
    dtype: Any
    blocks: tuple[Block, ...]
    """Positions of b for each term a_i @ b_i, and for each of its products that share a_i."""
    config: MatmulConfig
    multiprocessors: int
    products: int = 1
    a_transposed: bool = False
    b_transposed: bool = False
    b_columns: int = 0
    """Columns of each product's b in memory where it is [K, N]; more than `n` where XLA padded it."""
    scaled_columns: int = 0
    """Columns of b that share a scale in a K step, or 0 without scales. The sums of each K step are
    multiplied by a scale of the row and one of these columns before those of other steps are added."""
    quantized: Format | None = None
    """Format of b, if it is quantised: the producer warpgroup then dequantises it to a's dtype."""
    b_dtype: Any = None
    """Dtype of b if it differs from a's; only the two float8 dtypes may be mixed."""
    promoted_steps: int = 0
    """K steps after which the sums are added to float32 totals in registers; 0 for never. The tensor
    cores keep fewer bits of a float8 product's sums than a float32 has."""

    @property
    def tile_k(self) -> int:
        return swizzled_columns(self.dtype)

    @property
    def scales_columns_alike(self) -> bool:
        """True if several columns share a scale; consumers then load a tile's few scales one by one."""
        return self.scaled_columns > 1

    @property
    def accumulator_dtype(self) -> Any:
        """Dtype of the accumulators: integers are summed exactly."""
        return jnp.int32 if self.dtype == jnp.int8 else jnp.float32

    @property
    def a_tile(self) -> OperandTile:
        return OperandTile(
            span=self.config.cta_tile_m,
            k_last=not self.a_transposed,
            # A WGMMA reads one block, 64 rows of a, so a copy need not cover several blocks.
            whole_blocks=False,
            dtype=self.dtype,
        )

    @property
    def b_tile(self) -> OperandTile:
        return OperandTile(
            span=self.part_n,
            k_last=self.b_transposed,
            whole_blocks=self.quantized is not None
            or self.b_columns % swizzled_columns(self.dtype) == 0,
            dtype=self.b_dtype or self.dtype,
        )

    @property
    def part_n(self) -> int:
        """Columns of each product in an output tile."""
        return self.config.tile_n // self.products

    @property
    def shares_b(self) -> bool:
        """True if the CTAs of a cluster share the tiles of b: each multicasts a part of them to all."""
        return self.config.cluster > 1

    @property
    def tile_grid(self) -> tuple[int, int]:
        """Rows and columns of tiles that cover the output; the tiles of a cluster count as one row."""
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
    def steps_of_terms(self) -> tuple[int, ...]:
        """K steps of each term, each of which fills a pipeline stage."""
        return tuple(pl.cdiv(k, self.tile_k) for k in self.ks)

    @property
    def k_steps(self) -> int:
        if self.quantized is not None:
            return self.raw_steps * (self.raw_step // self.tile_k)
        return sum(self.steps_of_terms)

    @property
    def copies_of_slot(self) -> int:
        """Arrivals at a stage's full barrier: of copies, and of the producer where it dequantises b."""
        of_b = self.products * self.b_tile.blocks if self.quantized is None else 1
        of_scales = 0
        if self.scaled_columns:
            of_scales = 1 if self.scales_columns_alike else 2
        return self.a_tile.blocks + of_b + of_scales

    @property
    def raw_step(self) -> int:
        """Elements along K that are dequantised at a time."""
        return RAW_STEP if self.b_transposed else self.tile_k

    @property
    def raw_steps(self) -> int:
        """Steps along K, each of `raw_step` elements of the quantised weights."""
        return pl.cdiv(self.ks[0], self.raw_step)

    @property
    def raw_tile(self) -> QuantizedTile:
        """Tile of one step of quantised weights, which share scales along K or, in [K, N], along N."""
        assert self.quantized is not None
        if self.b_transposed:
            return QuantizedTile(self.quantized, self.part_n, self.dtype, RAW_STEP)
        return QuantizedTile(self.quantized, self.raw_step, self.dtype, self.part_n)

    def shared_bytes(self, scratch: Mapping[str, Any], *, sums: bool) -> int:
        """Returns the bytes of shared memory per CTA for the operands and the epilogue's `scratch`.

        Args:
          sums: whether the epilogue sums along an axis.
        """
        reductions = REDUCTION_BYTES if sums else 0
        return allocated_bytes((self._ring_memory(), dict(scratch))) + reductions

    def check_shared_bytes(self, wanted: int) -> None:
        """Raises a ValueError if a CTA has less shared memory than `wanted` bytes."""
        if wanted > SHARED_MEMORY_BYTES:
            raise ValueError(
                f"MatmulConfig: a CTA has {SHARED_MEMORY_BYTES} bytes of shared memory, and"
                f" {wanted} are needed; pass fewer stages or slots, or smaller tiles ({self.config})"
            )

    def operand_memory(self) -> dict[str, Any]:
        """Returns the shared memory of the pipeline's operands."""
        stages = self.config.stages
        return dict(
            a_smem=self.a_tile.memory(stages),
            b_smem=[self.b_tile.memory(stages) for _ in range(self.products)],
        )

    def stream_memory(self, leading: tuple[int, ...], columns: int, dtype: Any) -> plgpu.RefUnion:
        """Returns buffers [*leading, tile_m, columns], for copies from or to arrays [M, N]."""
        return block(leading, self.config.tile_m, columns, dtype)

    def _ring_memory(self) -> dict[str, Any]:
        c = self.config
        takers = 1 if c.ping_pong else CONSUMERS
        ring = self.operand_memory() | dict(
            # A wait tells only odd phases of a barrier from even ones, so a warpgroup must not skip one.
            # In ping-pong each warpgroup waits for the stages of its own tiles alone, and so has
            # barriers of its own.
            full=plgpu.Barrier(
                num_arrivals=self.copies_of_slot,
                num_barriers=c.stages * (CONSUMERS if c.ping_pong else 1),
            ),
            free=plgpu.Barrier(num_arrivals=takers, num_barriers=c.stages)
            if not self.shares_b
            else plgpu.ClusterBarrier(
                collective_axes=("cta",), num_arrivals=takers, num_barriers=c.stages
            ),
        )
        if self.scaled_columns:
            ring["a_scale"] = plgpu.SMEM((c.stages, c.cta_tile_m), jnp.float32)
        if self.scaled_columns and not self.scales_columns_alike:
            ring["b_scale"] = plgpu.SMEM((c.stages, c.tile_n), jnp.float32)
        if self.quantized is not None:
            ring["raw"] = [self.raw_tile.memory(RAW_STAGES) for _ in range(self.products)]
            ring["raw_full"] = plgpu.Barrier(
                num_arrivals=self.products * self.raw_tile.copies, num_barriers=RAW_STAGES
            )
        if c.ping_pong:
            ring["turn"] = plgpu.Barrier(num_barriers=CONSUMERS)
        return ring

    # --- on the device ----------------------------------------------------------------------------

    def tiles_of_cluster(self) -> jax.Array:
        """Returns the number of tiles that each CTA of this cluster computes."""
        first = lax.axis_index("cluster")
        return lax.div(jnp.int32(self.tile_count - 1) - first, jnp.int32(self.clusters)) + 1

    def share_of_cluster(self, tiles: jax.Array) -> jax.Array:
        """Returns how many of `tiles` tiles (a value known only on the device) this cluster computes."""
        first, ctas = lax.axis_index("cluster"), jnp.int32(self.clusters)
        return lax.div(jnp.maximum(tiles - first, 0) + (ctas - 1), ctas)

    def position(self, sequence_idx: Any) -> tuple[jax.Array, ...]:
        """Returns the first row and the column-of-tiles index of this CTA's tile `sequence_idx`.

        A grouped product also returns the tile's group.
        """
        c = self.config
        m_idx, n_idx = plgpu.planar_snake(
            lax.axis_index("cluster") + sequence_idx * self.clusters, self.tile_grid, 0, c.band
        )
        return (m_idx * c.cluster + lax.axis_index("cta")) * c.cta_tile_m, n_idx

    def full_idx(self, sequence_idx: Any, slot: Any) -> jax.Array:
        """Returns the index of the barrier on which a tile's copies into stage `slot` arrive."""
        if not self.config.ping_pong:
            return slot
        return lax.rem(sequence_idx, jnp.int32(CONSUMERS)) * self.config.stages + slot

    def next_slot(self, slot: Any) -> jax.Array:
        """Returns the stage after `slot`, in circular order."""
        return lax.select(slot == self.config.stages - 1, jnp.int32(0), slot + 1)

    def rows_at(self, ref: Any, m_start: Any, columns: Any) -> Any:
        """Returns a view of an array [M, N]: `columns`, and the tile_m rows from `m_start` on."""
        return ref.at[pl.ds(m_start, self.config.tile_m), columns]

    def store_rows(self, source: Any, ref: Any, place: TilePlace, columns: Any) -> None:
        """Starts the copy of `source`, in shared memory, to `columns` of a tile's rows of ref [M, N]."""
        destination = self.rows_at(ref, place.m_start, columns)
        plgpu.copy_smem_to_gmem(source, destination, commit_group=False)

    def after_tiles(self, wg_idx: Any, epilogue_of: Callable[[TilePlace], Any]) -> None:
        """Stores rows of the result that are in no tile, such as zeros; each consumer calls it last."""

    @property
    def rows(self) -> int:
        """Rows of the result, without the padding of tiles."""
        return self.m

    def rows_of_tile(self, m_start: Any) -> Any:
        """Returns the number of valid rows in a warpgroup's tile; below 1 for a tile past the end."""
        return jnp.minimum(self.m - m_start, self.config.tile_m)

    def which_rows(self, m_start: Any, shape: tuple[int, int], layout: Any) -> Any:
        """Returns a mask of the valid rows in a warpgroup's tile, or None where every tile is full."""
        down, _ = self.tile_grid
        if down * self.config.cta_tile_m * self.config.cluster == self.m:
            return None
        row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout)
        return row < self.m - m_start

    def copy_once(self, ring: "Ring", b_gmem: Sequence[Any]) -> None:
        """Starts the copies of operands that stay in shared memory for all tiles."""

    def await_once(self, ring: "Ring") -> None:
        """Waits in a consumer warpgroup for the copies of `copy_once`."""

    def copy_step(
        self,
        ring: "Ring",
        a_gmem: Sequence[Any],
        b_gmem: Sequence[Any],
        slot: Any,
        step: "Step",
        full: Any,
    ) -> None:
        """Starts the copies of a step's operands, each of which arrives at `full`."""
        k_start = step.k_idx * self.tile_k
        a = matrix_of(a_gmem[step.term])
        self.a_tile.copy(a, ring.a_smem, slot, step.m_start, k_start, full)
        for index in range(self.products):
            place = self.blocks[step.term * self.products + index]
            self.b_tile.copy(
                place.view(b_gmem, self.b_transposed),
                ring.b_smem[index],
                slot,
                step.n_idx * self.part_n,
                k_start,
                full,
                collective_axes="cta" if self.shares_b else None,
            )

    def instructions(
        self, acc_ref: Any, ring: "Ring", slot: Any, k_idx: Any, share: Any, shares: int
    ) -> Iterator[tuple[Any, Any, Any]]:
        """Yields a stage's WGMMAs: the part of the accumulators that each adds to, its a and its b.

        Args:
          k_idx: the tile's K step that is in the stage, counted over all terms.
          share: index of this warpgroup's part of a tile's rows, of `shares` equal ones.
        """
        del k_idx
        for index, b_smem in enumerate(ring.b_smem):
            for columns, b in self.b_tile.operands(b_smem, slot):
                for rows, a in self.a_tile.operands(ring.a_smem, slot, share, shares):
                    start = index * self.part_n
                    yield (
                        part(acc_ref, rows, slice(start + columns.start, start + columns.stop)),
                        a.transpose((1, 0)) if self.a_transposed else a,
                        b.transpose((1, 0)) if self.b_transposed else b,
                    )

    def no_sums(self) -> Any:
        """Returns the initial sums of `sum_slot`; None where nothing is summed."""
        return None

    def sum_slot(self, ring: "Ring", slot: Any, place: TilePlace, sums: Any) -> Any:
        """Adds a stage's operands to `sums`, while the WGMMAs that read them run."""
        del ring, slot, place
        return sums


@dataclass(frozen=True)
class Step:
    """A K step of an output tile."""

    m_start: Any
    n_idx: Any
    term: int
    k_idx: Any
    """Index of the K step within its term."""
    group: Any = None
    """Group of rows that the tile belongs to, in a grouped product."""


@dataclass(frozen=True)
class Ring:
    """The pipeline in shared memory: stages for tiles of operands, and their barriers."""

    a_smem: Any
    b_smem: Sequence[Any]
    full: Any
    """Barriers that say that a stage holds the tiles of a K step."""
    free: Any
    """Barriers that say that all WGMMAs that read a stage have ended, so that it may be filled."""
    turn: Any = None
    """Barriers of ping-pong that let a warpgroup issue its WGMMAs."""
    a_scale: Any = None
    b_scale: Any = None
    raw: Any = None
    """Quantised tiles of b, which the producer warpgroup dequantises into `b_smem`."""
    raw_full: Any = None
    once: Any = None
    """Barrier that says that the operands which stay in shared memory have arrived."""
    masked: Any = None
    """Barrier that says that both consumers have set the rows of other groups in a stage to zero, in a
    grouped wgrad."""


def part(acc_ref: Any, rows: slice, columns: slice) -> Any:
    """Returns `rows` and `columns` of the accumulators; an axis that is whole is not sliced."""
    height, width = acc_ref.shape
    if (rows.start, rows.stop) != (0, height):
        return acc_ref.at[rows, columns]
    return acc_ref if (columns.start, columns.stop) == (0, width) else acc_ref.at[:, columns]
