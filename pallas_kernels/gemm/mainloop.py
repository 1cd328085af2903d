"""The main loop of a product: the operands' pipeline, the WGMMAs and the order of the tiles.

A CTA has one producer warpgroup, which copies tiles of the operands into the stages of a pipeline in
shared memory, and two consumers, which multiply. In ping-pong the consumers hold different output tiles:
one runs its epilogue and stores while the other multiplies, so that an epilogue costs nothing as long as
it is shorter than a tile's product. Otherwise they share an output tile of twice the height, whose
operands are read less often.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gemm.operands import OperandTile, allocated_bytes, block, swizzled_columns
from pallas_kernels.gemm.quantized_weights import Format, QuantizedTile
from pallas_kernels.hopper import REDUCTION_BYTES, SHARED_MEMORY_BYTES

CONSUMERS = 2
"""Consumer warpgroups of a CTA; the warpgroup after them is the producer."""
ACCUMULATOR_ELEMENTS = 128 * 192
"""Largest number of elements of a warpgroup's tile: 192 of a thread's 232 registers. With 256 they
spill."""

RAW_STEP = 128
"""Elements along K of quantised weights that are dequantised at a time."""
RAW_STAGES = 2
"""Steps of quantised weights that are in flight, or being dequantised."""


@dataclass(frozen=True)
class MatmulConfig:
    """Tiles, pipeline and raster order of a product."""

    tile_m: int = 128
    """Rows of a warpgroup's accumulators."""
    tile_n: int = 192
    """Columns of a warpgroup's accumulators; several products in one pass over a divide them equally."""
    stages: int = 4
    """Pipeline stages: tiles of the operands in flight or in use."""
    ping_pong: bool = True
    """True if the consumers hold different output tiles, not the halves of one twice as high."""
    cluster: int = 1
    """CTAs, one below the other, that share the tiles of b: each multicasts a part of them to all."""
    epilogue_columns: int = 64
    """Columns of a chunk, the part of a tile that the epilogue processes at a time."""
    read_slots: int = 1
    """Load stages: chunks of each matrix that the epilogue reads; all are filled ahead of it."""
    write_slots: int = 1
    """Store stages: chunks of each matrix that the epilogue writes."""
    band: int = 8
    """Rows of tiles in a group of the raster order, which keeps shared operands in L2."""
    pads_columns: bool = False
    """True if XLA first pads b to whole blocks of columns, where its width is not a multiple of one. A
    WGMMA then takes all of a tile's columns and not one block of them, which pays for many rows."""

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


class TileEpilogue(Protocol):
    """The epilogue of one output tile."""

    def prefetch(self) -> None:
        """Starts the copies of what the epilogue reads, which overlap the product of the tile."""

    def run(self, acc: jax.Array) -> None:
        """Stores the epilogue's results for the accumulators."""


class SummingEpilogue(TileEpilogue, Protocol):
    """The epilogue of a product that also sums operands from the pipeline's stages."""

    def store_sums(self, sums: Any) -> None:
        """Stores what `Product.sum_slot` has summed, before the accumulators."""


@dataclass(frozen=True)
class TilePlace:
    """The tile that a warpgroup computes."""

    wg_idx: jax.Array
    m_start: jax.Array
    n_idx: jax.Array
    """Index of the column of tiles."""
    group: Any = None
    """The group of rows that the tile belongs to, in a grouped product."""


@dataclass(frozen=True)
class Block:
    """The position of one product's b in the operand arrays."""

    array: int
    k_part: int | None = None
    """Index along the axis of terms, in an array with the b of several terms."""
    n_part: int | None = None
    """Index along the axis of products, in an array with the b of several products."""

    def view(self, refs: Sequence[Any], transposed: bool) -> Callable[[Any, Any], Any]:
        """Returns a function from spans of b's axes, in the array's order, to that part of the array."""

        def index(part, span):
            return (span,) if part is None else (part, span)

        def part(first, second):
            parts = (self.n_part, self.k_part) if transposed else (self.k_part, self.n_part)
            return refs[self.array].at[(*index(parts[0], first), *index(parts[1], second))]

        return part


@dataclass(frozen=True)
class Product:
    """Static parameters of a launch, without its epilogue, and the code of its warpgroups.

    Several terms a_i @ b_i may be added, and several products may multiply one tile of a by a b each.
    """

    m: int
    """Valid rows; the arrays may have a few more."""
    n: int
    """Columns of each product."""
    ks: tuple[int, ...]
    """Length of K of each term."""
    dtype: Any
    blocks: tuple[Block, ...]
    """Positions of b, one for each product of each term, terms outermost."""
    config: MatmulConfig
    multiprocessors: int
    products: int = 1
    a_transposed: bool = False
    b_transposed: bool = False
    b_columns: int = 0
    """Columns of each product's b in memory where it is [K, N]; more than `n` where XLA padded it."""
    scaled_columns: int = 0
    """Columns that share a scale, or 0 without scales. The sums of each K step are multiplied by a scale
    of the row and one of these columns before they are added to those of the steps before."""
    quantized: Format | None = None
    """Format of b, if it is quantised: the producer warpgroup then dequantises it to a's dtype."""
    b_dtype: Any = None
    """Dtype of b where it is not a's: one float8 may be multiplied by the other."""
    promoted_steps: int = 0
    """K steps after which the sums are added to float32 totals in registers; 0 for never. The tensor
    cores keep fewer bits of a float8 product's sums than a float32 has."""

    @property
    def tile_k(self) -> int:
        return swizzled_columns(self.dtype)

    @property
    def scales_columns_alike(self) -> bool:
        """True if columns share a step's scales, which are then few enough to be loaded when needed."""
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
            # A WGMMA takes 64 rows, which is one block.
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
        """Rows and columns of cluster tiles that cover the output."""
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
        """Elements along K of quantised weights that are dequantised at a time."""
        return RAW_STEP if self.b_transposed else self.tile_k

    @property
    def raw_steps(self) -> int:
        """Steps of quantised weights along K."""
        return pl.cdiv(self.ks[0], self.raw_step)

    @property
    def raw_tile(self) -> QuantizedTile:
        """Tile of one step of quantised weights, whose groups run along K or along the columns."""
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
        """Raises a ValueError where a CTA has less shared memory than `wanted` bytes."""
        if wanted > SHARED_MEMORY_BYTES:
            raise ValueError(
                f"MatmulConfig: a CTA has {SHARED_MEMORY_BYTES} bytes of shared memory, and"
                f" {wanted} are needed; pass fewer stages or slots, or smaller tiles ({self.config})"
            )

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
        step_scales: Sequence[jax.Array] = (),
    ) -> Sequence[jax.Array]:
        """Runs the kernel.

        Args:
          others: further operands, for the epilogue.
          scratch: shared memory of the epilogue.
          epilogue: makes that of a tile, from `others` and the outputs in global memory, and `scratch`.
          name: the kernel's name in a profile.
          step_scales: with `scaled_columns`, scales of the rows [steps, M] and of the columns [steps,
            N], or of runs of `scaled_columns` columns each.
        """

        def kernel(*refs, ring, own):
            a_gmem, b_gmem = refs[: len(terms)], refs[len(terms) : len(terms) + len(bs)]
            rest = refs[len(terms) + len(bs) :]
            of_steps, rest = rest[: len(step_scales)], rest[len(step_scales) :]
            product, rest = self.on_device(rest)
            wg_idx = lax.axis_index("wg")
            producer = product.producer(Ring(**ring), a_gmem, b_gmem, of_steps)
            epilogue_of = functools.partial(epilogue, rest, own)
            consumer = product.consumer(Ring(**ring), wg_idx, epilogue_of, of_steps)
            lax.cond(wg_idx == CONSUMERS, lambda: producer.run(), lambda: consumer.run())

        return plgpu.kernel(
            kernel,
            out_type=tuple(out_type),
            scratch_types={"ring": self._ring_memory(), "own": dict(scratch)},
            grid=(self.clusters,),
            grid_names=("cluster",),
            cluster=(self.config.cluster,),
            cluster_names=("cta",),
            num_threads=CONSUMERS + 1,
            thread_name="wg",
            kernel_name=name,
            compiler_params=plgpu.CompilerParams(approx_math=True),
        )(*terms, *bs, *step_scales, *others)

    def operand_memory(self) -> dict[str, Any]:
        """Returns the shared memory of the operands in the pipeline, and of what goes with them."""
        stages = self.config.stages
        return dict(
            a_smem=self.a_tile.memory(stages),
            b_smem=[self.b_tile.memory(stages) for _ in range(self.products)],
        )

    def stream_memory(self, leading: tuple[int, ...], columns: int, dtype: Any) -> plgpu.RefUnion:
        """Returns buffers for `columns` of a tile's rows, to copy from or to arrays with a's rows."""
        return block(leading, self.config.tile_m, columns, dtype)

    def _ring_memory(self) -> dict[str, Any]:
        c = self.config
        takers = 1 if c.ping_pong else CONSUMERS
        ring = self.operand_memory() | dict(
            # A warpgroup must wait for every phase of a barrier. In ping-pong each one waits only for
            # its own tiles' stages, and so has barriers of its own.
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

    def on_device(self, others: Sequence[Any]) -> tuple["Product", Sequence[Any]]:
        """Returns the product with the arrays of `others` that it reads itself, and the other ones."""
        return self, others

    def producer(
        self, ring: "Ring", a_gmem: Sequence[Any], b_gmem: Sequence[Any], step_scales: Sequence[Any]
    ) -> "Producer":
        """Returns the producer warpgroup."""
        if self.quantized is None:
            return Producer(self, ring, a_gmem, b_gmem, step_scales)
        return _Converter(self, ring, a_gmem, b_gmem)

    def consumer(
        self,
        ring: "Ring",
        wg_idx: Any,
        epilogue_of: Callable[[TilePlace], Any],
        step_scales: Sequence[Any],
    ) -> "Consumer":
        """Returns a consumer warpgroup."""
        return Consumer(self, ring, wg_idx, epilogue_of, step_scales)

    def tiles_of_cluster(self) -> jax.Array:
        """Returns the number of tiles that each CTA of this cluster computes."""
        first = lax.axis_index("cluster")
        return lax.div(jnp.int32(self.tile_count - 1) - first, jnp.int32(self.clusters)) + 1

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
        """Returns the index of the barrier at which the copies into a stage arrive for a tile."""
        if not self.config.ping_pong:
            return slot
        return lax.rem(sequence_idx, jnp.int32(CONSUMERS)) * self.config.stages + slot

    def next_slot(self, slot: Any) -> jax.Array:
        """Returns the stage after this one, in circular order."""
        return lax.select(slot == self.config.stages - 1, jnp.int32(0), slot + 1)

    def rows_at(self, ref: Any, m_start: Any, columns: Any) -> Any:
        """Returns the rows of a warpgroup's tile, and some columns, of an array with rows like a's."""
        return ref.at[pl.ds(m_start, self.config.tile_m), columns]

    def store_rows(self, source: Any, ref: Any, place: TilePlace, columns: Any) -> None:
        """Starts the copies of a warpgroup's tile, in some columns, to an array with rows like a's."""
        destination = self.rows_at(ref, place.m_start, columns)
        plgpu.copy_smem_to_gmem(source, destination, commit_group=False)

    def after_tiles(self, wg_idx: Any, epilogue_of: Callable[[TilePlace], Any]) -> None:
        """Stores, in a consumer warpgroup, what no tile of the product has."""

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
        """Starts the copies of what stays in shared memory for all tiles."""

    def await_once(self, ring: "Ring") -> None:
        """Waits in a consumer warpgroup for what `copy_once` has copied."""

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

        def a_matrix(first, second):
            return a_gmem[step.term].at[first, second]

        self.a_tile.copy(a_matrix, ring.a_smem, slot, step.m_start, k_start, full)
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
    """Index among the steps of the term."""
    group: Any = None
    """The group of rows that the tile belongs to, in a grouped product."""


@dataclass(frozen=True)
class Ring:
    """The pipeline in shared memory: stages for tiles of operands, and their barriers."""

    a_smem: Any
    b_smem: Sequence[Any]
    full: Any
    """Barriers: a stage holds the tiles of a K step."""
    free: Any
    """Barriers: all WGMMAs that read a stage have ended."""
    turn: Any = None
    """Barriers of ping-pong: a warpgroup may issue its WGMMAs."""
    a_scale: Any = None
    b_scale: Any = None
    raw: Any = None
    """Quantised tiles of b, which only the producer warpgroup reads."""
    raw_full: Any = None
    once: Any = None
    """Barrier: the operands that stay in shared memory for all tiles have arrived."""
    masked: Any = None
    """Barrier: the consumers have cleared the rows of other groups from a stage."""


@dataclass(frozen=True)
class Producer:
    """The producer warpgroup, which fills stages output tile by output tile and step by step along K."""

    product: Product
    ring: Ring
    a_gmem: Sequence[Any]
    b_gmem: Sequence[Any]
    step_scales: Sequence[Any] = ()

    def run(self) -> None:
        plgpu.set_max_registers(40, action="decrease")
        self.product.copy_once(self.ring, self.b_gmem)
        nothing = (jnp.int32(0), jnp.int32(0))
        slot, filled = lax.fori_loop(0, self.product.tiles_of_cluster(), self._fill_tile, nothing)
        self._await_readers(slot, filled)

    def _fill_tile(self, sequence_idx, carry):
        """Fills stages for all K steps of a tile; carries the next stage and how many were filled."""
        place = self.product.position(sequence_idx)
        for term, steps in enumerate(self.product.steps_of_terms):
            fill = functools.partial(self._fill_slot, sequence_idx, place, term)
            carry = lax.fori_loop(0, steps, fill, carry)
        return carry

    def _fill_slot(self, sequence_idx, place, term, k_idx, carry):
        product, ring = self.product, self.ring
        slot, filled = carry
        m_start, n_idx, *group = place

        @pl.when(filled >= product.config.stages)
        def _():
            plgpu.barrier_wait(ring.free.at[slot])

        full = ring.full.at[product.full_idx(sequence_idx, slot)]
        step = Step(m_start, n_idx, term, k_idx, *group)
        product.copy_step(ring, self.a_gmem, self.b_gmem, slot, step, full)
        if product.scaled_columns:
            of_rows, of_columns = self.step_scales
            rows = pl.ds(m_start, product.config.cta_tile_m)
            plgpu.copy_gmem_to_smem(of_rows.at[k_idx, rows], ring.a_scale.at[slot], full)
            if not product.scales_columns_alike:
                columns = pl.ds(n_idx * product.part_n, product.part_n)
                plgpu.copy_gmem_to_smem(of_columns.at[k_idx, columns], ring.b_scale.at[slot], full)
        return product.next_slot(slot), filled + 1

    def _await_readers(self, slot, filled) -> None:
        """Waits until all stages are free: no CTA may arrive at a barrier of one that has exited."""
        stages = self.product.config.stages
        for back in range(1, stages + 1):

            @pl.when(filled >= back)
            def _(back=back):
                last_filled = lax.rem(slot + (stages - back), jnp.int32(stages))
                plgpu.barrier_wait(self.ring.free.at[last_filled])


@dataclass(frozen=True)
class _Converter(Producer):
    """The producer warpgroup for a quantised b: it copies, dequantises and stores each step."""

    def run(self) -> None:
        # The registers that the consumers leave.
        plgpu.set_max_registers(56, action="decrease")
        product = self.product
        total = product.tiles_of_cluster() * product.raw_steps
        for step in range(RAW_STAGES):
            pl.when(step < total)(functools.partial(self._copy_raw, jnp.int32(step)))
        nothing = (jnp.int32(0), jnp.int32(0))
        step = functools.partial(self._convert_step, total)
        slot, filled = lax.fori_loop(0, total, step, nothing)
        self._await_readers(slot, filled)

    def _copy_raw(self, step) -> None:
        """Starts the copies of a step of quantised weights, counted over all tiles."""
        product = self.product
        _, n_idx = product.position(lax.div(step, jnp.int32(product.raw_steps)))
        k_start = lax.rem(step, jnp.int32(product.raw_steps)) * product.raw_step
        n_start = n_idx * product.part_n
        starts = (n_start, k_start) if product.b_transposed else (k_start, n_start)
        raw_slot = lax.rem(step, jnp.int32(RAW_STAGES))
        count = len(self.b_gmem) // product.products
        for index, memory in enumerate(self.ring.raw):
            arrays = self.b_gmem[index * count : (index + 1) * count]
            full = self.ring.raw_full.at[raw_slot]
            product.raw_tile.copy(arrays, memory, raw_slot, *starts, full)

    def _convert_step(self, total, step, carry):
        """Dequantises a step of weights into its stages, and starts the copies of a later step."""
        product, ring, c = self.product, self.ring, self.product.config
        slot, filled = carry
        sequence_idx = lax.div(step, jnp.int32(product.raw_steps))
        m_start, _ = product.position(sequence_idx)
        k_start = lax.rem(step, jnp.int32(product.raw_steps)) * product.raw_step
        raw_slot = lax.rem(step, jnp.int32(RAW_STAGES))
        slots = []
        for half in range(product.raw_step // product.tile_k):

            @pl.when(filled >= c.stages)
            def _(slot=slot):
                plgpu.barrier_wait(ring.free.at[slot])

            full = ring.full.at[product.full_idx(sequence_idx, slot)]
            product.a_tile.copy(
                lambda first, second: self.a_gmem[0].at[first, second],
                ring.a_smem,
                slot,
                m_start,
                k_start + half * product.tile_k,
                full,
            )
            slots.append((slot, full))
            slot, filled = product.next_slot(slot), filled + 1
        plgpu.barrier_wait(ring.raw_full.at[raw_slot])
        for index, raw in enumerate(ring.raw):
            if product.b_transposed:
                for start in range(0, product.part_n, _CONVERTED_COLUMNS):
                    self._convert(index, raw, raw_slot, start, [slot for slot, _ in slots])
            else:
                self._convert_rows(index, raw, raw_slot, slots[0][0])
        plgpu.commit_smem()
        for _, full in slots:
            plgpu.barrier_arrive(full)
        pl.when(step + RAW_STAGES < total)(lambda: self._copy_raw(step + RAW_STAGES))
        return slot, filled

    def _convert(self, index: int, raw: Any, raw_slot: Any, start: int, slots: Any) -> None:
        """Dequantises 64 columns of b into the stages of a step."""
        tile_k, first = self.product.tile_k, 0
        registers, _ = self.ring.b_smem[index]
        for w in self.product.raw_tile.dequantized(raw, raw_slot, start, _CONVERTED_COLUMNS):
            for part in range(0, w.shape[1], min(tile_k, w.shape[1])):
                width = min(tile_k, w.shape[1])
                place = registers.at[
                    slots[first // tile_k],
                    0,
                    pl.ds(start, _CONVERTED_COLUMNS),
                    pl.ds(first % tile_k, width),
                ]
                place[...] = w if width == w.shape[1] else w[:, part : part + width]
                first += width

    def _convert_rows(self, index: int, raw: Any, raw_slot: Any, slot: Any) -> None:
        """Dequantises all columns of b into a stage, where the weights' groups run along the columns."""
        tile, memory, first = self.product.raw_tile, self.ring.b_smem[index], 0
        for w in tile.dequantized(raw, raw_slot, 0, tile.span):
            memory.at[slot, :, pl.ds(first, w.shape[1])][...] = w
            first += w.shape[1]


_CONVERTED_COLUMNS = 64
"""Columns of b that a warpgroup dequantises in registers at a time."""


SCALED_PIECE = 64
"""Columns that are scaled at a time where columns share scales; divides the columns of a scale."""


@dataclass(frozen=True)
class Consumer:
    """A consumer warpgroup, which multiplies and runs the epilogue of its tiles."""

    product: Product
    ring: Ring
    wg_idx: jax.Array
    epilogue_of: Callable[[TilePlace], Any]
    """Returns a `TileEpilogue`, or a `SummingEpilogue` where the product sums."""
    step_scales: Sequence[Any] = ()

    def run(self) -> None:
        ping_pong, turn = self.product.config.ping_pong, self.ring.turn
        registers = 232 if self.product.quantized is None else 224
        plgpu.set_max_registers(registers, action="increase")
        self.product.await_once(self.ring)
        tiles = self.product.tiles_of_cluster()
        stride = CONSUMERS if ping_pong else 1
        first = self.wg_idx if ping_pong else jnp.int32(0)
        if ping_pong:
            pl.when(self.wg_idx == CONSUMERS - 1)(lambda: plgpu.barrier_arrive(turn.at[0]))

        def tile(tile_idx, _):
            self._compute_tile(first + tile_idx * stride, tiles)

        count = lax.div(tiles - first + (stride - 1), jnp.int32(stride))
        lax.fori_loop(0, count, tile, None)
        self.product.after_tiles(self.wg_idx, self.epilogue_of)
        plgpu.wait_smem_to_gmem(0)

    def _compute_tile(self, sequence_idx, tiles) -> None:
        c = self.product.config
        m_start, n_idx, *group = self.product.position(sequence_idx)
        if not c.ping_pong:
            m_start += self.wg_idx * c.tile_m
        place = TilePlace(self.wg_idx, m_start, n_idx, *group)
        epilogue = self.epilogue_of(place)
        epilogue.prefetch()
        if self.product.scaled_columns:
            epilogue.run(self._accumulate_scaled(sequence_idx, n_idx))
            return
        if self.product.promoted_steps:
            epilogue.run(self._accumulate_promoted(sequence_idx))
            return
        accumulate = functools.partial(self._accumulate, sequence_idx, tiles, place)
        acc, slot, sums = pl.run_scoped(accumulate, self._accumulator)
        plgpu.barrier_arrive(self.ring.free.at[slot])
        if sums is not None:
            epilogue.store_sums(sums)
        epilogue.run(acc)

    @property
    def _accumulator(self) -> Any:
        c = self.product.config
        return plgpu.ACC((c.tile_m, c.tile_n), self.product.accumulator_dtype)

    def _accumulate_scaled(self, sequence_idx, n_idx) -> jax.Array:
        """Returns the sums of a tile, where each K step's are scaled before they are added.

        While one warpgroup scales, the other one uses the tensor cores.
        """
        product, c = self.product, self.product.config
        # Columns that share a scale also share its product with a row's scale.
        width = SCALED_PIECE if product.scales_columns_alike else c.tile_n
        starts = range(0, c.tile_n, width)

        def step(k_idx, carry):
            slot, totals = carry
            # Scales are loaded before the WGMMAs, which hide the memory's latency.
            numbers = self._column_numbers(k_idx, n_idx, starts)
            self._await_slot(sequence_idx, slot)

            def multiply(acc_ref):
                self._issue(acc_ref, k_idx, slot)
                plgpu.wgmma_wait(0)
                return acc_ref[...]

            # Accumulators that are allocated after the wait cost no instructions: the first WGMMA adds
            # to the zero register.
            sums = pl.run_scoped(multiply, self._accumulator).astype(jnp.float32)
            scaled = self._scaled_pieces(sums, slot, starts, numbers)
            totals = tuple(total + piece for total, piece in zip(totals, scaled, strict=True))
            plgpu.barrier_arrive(self.ring.free.at[slot])
            return product.next_slot(slot), totals

        slot = lax.rem(sequence_idx * product.k_steps, jnp.int32(c.stages))
        zeros = plgpu.layout_cast(jnp.zeros((c.tile_m, width), jnp.float32), plgpu.Layout.WGMMA)
        _, totals = lax.fori_loop(0, product.k_steps, step, (slot, (zeros,) * len(starts)))
        return totals[0] if len(totals) == 1 else jnp.concatenate(totals, axis=1)

    def _column_numbers(self, k_idx, n_idx, starts: range) -> list[jax.Array]:
        """Loads a step's scale for each piece of the tile's columns, where columns share scales."""
        product = self.product
        if not product.scales_columns_alike:
            return []
        columns = (jnp.minimum(n_idx * product.part_n + s, product.n - 1) for s in starts)
        numbers = self.step_scales[1]
        return [numbers[k_idx, lax.div(c, jnp.int32(product.scaled_columns))] for c in columns]

    def _scaled_pieces(
        self, sums, slot, starts: range, numbers: Sequence[jax.Array]
    ) -> Iterator[jax.Array]:
        """Yields the pieces of a step's sums, multiplied by the step's scales of rows and columns."""
        ring, c = self.ring, self.product.config
        rows = pl.ds(self.wg_idx * c.tile_m, c.tile_m)
        of_rows = plgpu.load(ring.a_scale.at[slot, rows], layout=plgpu.Layout.WGMMA.reduce(1))
        if not numbers:
            of_columns = plgpu.load(ring.b_scale.at[slot], layout=plgpu.Layout.WGMMA.reduce(0))
            of_columns = lax.broadcast_in_dim(of_columns, sums.shape, (1,))
            yield sums * of_columns * lax.broadcast_in_dim(of_rows, sums.shape, (0,))
        for start, number in zip(starts, numbers, strict=False):
            piece = sums[:, start : start + starts.step]
            yield piece * lax.broadcast_in_dim(of_rows * number, piece.shape, (0,))

    def _accumulate_promoted(self, sequence_idx) -> jax.Array:
        """Returns the sums of a tile; after every `promoted_steps` steps they move to float32 totals."""
        product, c = self.product, self.product.config
        slot = lax.rem(sequence_idx * product.k_steps, jnp.int32(c.stages))
        zeros = jnp.zeros((c.tile_m, c.tile_n), jnp.float32)
        carry = (slot, plgpu.layout_cast(zeros, plgpu.Layout.WGMMA))
        blocks, rest = divmod(product.k_steps, product.promoted_steps)

        def promoted(index, carry, steps=product.promoted_steps):
            first = index * product.promoted_steps
            return self._promoted(sequence_idx, first, steps, *carry)

        carry = lax.fori_loop(0, blocks, promoted, carry)
        if rest:
            carry = promoted(jnp.int32(blocks), carry, rest)
        return carry[1]

    def _promoted(self, sequence_idx, first, steps: int, slot, total) -> tuple[Any, jax.Array]:
        """Adds the sums of `steps` steps from `first` on to `total`; returns it with the next stage.

        The loop over steps is unrolled: one of unknown length would copy the accumulators' registers at
        its end, before the last WGMMA has written them.
        """

        def multiply(acc_ref):
            last = slot
            self._issue(acc_ref, first, last)
            for step in range(1, steps):
                previous, last = last, self.product.next_slot(last)
                plgpu.wgmma_wait(self._multiply(acc_ref, sequence_idx, first + step, last))
                plgpu.barrier_arrive(self.ring.free.at[previous])
            plgpu.wgmma_wait(0)
            return acc_ref[...], last

        # As in `_accumulate_scaled`, accumulators are allocated after the wait.
        self._await_slot(sequence_idx, slot)
        sums, last = pl.run_scoped(multiply, self._accumulator)
        plgpu.barrier_arrive(self.ring.free.at[last])
        return self.product.next_slot(last), total + sums

    def _accumulate(self, sequence_idx, tiles, place, acc_ref):
        """Runs all K steps of a tile; returns accumulators, the stage still to free, and sums."""
        product, turn = self.product, self.ring.turn
        if product.config.ping_pong:
            plgpu.barrier_wait(turn.at[self.wg_idx])
        slot = lax.rem(sequence_idx * product.k_steps, jnp.int32(product.config.stages))
        self._multiply(acc_ref, sequence_idx, jnp.int32(0), slot)
        sums = product.sum_slot(self.ring, slot, place, product.no_sums())
        step = functools.partial(self._step, acc_ref, sequence_idx, place)
        slot, sums = lax.fori_loop(1, product.k_steps, step, (slot, sums))
        if product.config.ping_pong:
            other = turn.at[CONSUMERS - 1 - self.wg_idx]
            pl.when(sequence_idx < tiles - 1)(lambda: plgpu.barrier_arrive(other))
        return acc_ref[...], slot, sums

    def _step(self, acc_ref, sequence_idx, place, k_idx, carry):
        """Multiplies a stage, and frees the one before it, whose WGMMAs have ended by then."""
        previous, sums = carry
        slot = self.product.next_slot(previous)
        count = self._multiply(acc_ref, sequence_idx, k_idx, slot)
        sums = self.product.sum_slot(self.ring, slot, place, sums)
        plgpu.wgmma_wait(count)
        plgpu.barrier_arrive(self.ring.free.at[previous])
        return slot, sums

    def _multiply(self, acc_ref, sequence_idx, k_idx, slot) -> int:
        """Issues the WGMMAs of a stage once it is filled, and returns their number."""
        self._await_slot(sequence_idx, slot)
        return self._issue(acc_ref, k_idx, slot)

    def _await_slot(self, sequence_idx, slot) -> None:
        """Waits until a stage is filled."""
        plgpu.barrier_wait(self.ring.full.at[self.product.full_idx(sequence_idx, slot)])

    def _issue(self, acc_ref, k_idx, slot) -> int:
        """Issues the WGMMAs of a filled stage, and returns their number."""
        product = self.product
        ping_pong = product.config.ping_pong
        share, shares = (jnp.int32(0), 1) if ping_pong else (self.wg_idx, CONSUMERS)
        count = 0
        for part_of_acc, a, b in product.instructions(
            acc_ref, self.ring, slot, k_idx, share, shares
        ):
            plgpu.wgmma(part_of_acc, a, b)
            count += 1
        return count


def part(acc_ref: Any, rows: slice, columns: slice) -> Any:
    """Returns a part of the accumulators, without slicing an axis that is taken whole."""
    height, width = acc_ref.shape
    if (rows.start, rows.stop) != (0, height):
        return acc_ref.at[rows, columns]
    return acc_ref if (columns.start, columns.stop) == (0, width) else acc_ref.at[:, columns]
