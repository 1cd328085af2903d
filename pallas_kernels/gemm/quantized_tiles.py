"""A product of many rows with quantised weights for Hopper, dequantised on the way to a WGMMA.

As in a small-M product, the operands are swapped: 64 columns of w, in registers, are the rows of a
WGMMA, and the rows of x its columns. A tile has up to 256 rows of x. A weight is dequantised once for
all of them, by the warpgroup that multiplies it, and is never written to memory. Each of several
consumer warpgroups has 64 columns, and dequantises the next piece of K while the tensor cores multiply
the previous one. A producer warpgroup copies x and the stored weights: into the stages of one pipeline
or, where a tile has so many rows that few such stages would fit, into a pipeline each.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gemm import dequantize
from pallas_kernels.gemm.dequantize import BLOCK
from pallas_kernels.gemm.operands import OperandTile, allocated_bytes, block
from pallas_kernels.gemm.quantized_weights import PIECE, Format, QuantizedTile
from pallas_kernels.hopper import SHARED_MEMORY_BYTES

COLUMNS = 64
"""Columns of w that a warpgroup multiplies: the rows of a WGMMA."""
_PIECES = BLOCK // PIECE
STORED_ROWS = 32
"""Rows of the result that a warpgroup stores at a time."""
STORE_SLOTS = 2
_TURNED = plgpu.Layout.WGMMA_TRANSPOSED
_REGISTERS = {1: 232, 2: 232, 3: 152}
"""Registers of a consumer's thread, keyed by the number of consumer warpgroups."""


@dataclass(frozen=True)
class QuantizedTilesConfig:
    """Tiles and pipeline of a product of many rows with quantised weights."""

    rows: int = 256
    """Rows of x in a tile."""
    warpgroups: int = 2
    """Consumer warpgroups, each with 64 columns of a tile."""
    stages: int = 3
    """Pipeline stages of the weights, each with 128 numbers of each column."""
    x_stages: int = 0
    """Pipeline stages of x, each with 64 numbers of each row; 0 if x shares those of the weights."""
    tail_rows: int = 0
    """Rows of x in the smaller tiles of the last columns, so that the last wave has more tiles; 0 for
    none."""
    band: int = 4
    """Rows of tiles in a group of the raster order: the tiles of a group share weights in the L2."""

    def __post_init__(self) -> None:
        if self.rows % STORED_ROWS or not 0 < self.rows <= 256:
            raise ValueError(
                f"QuantizedTilesConfig: rows must be a multiple of {STORED_ROWS} up to 256, got"
                f" {self.rows}; pass such a number"
            )
        if self.tail_rows % STORED_ROWS or not 0 <= self.tail_rows < self.rows:
            raise ValueError(
                f"QuantizedTilesConfig: tail_rows must be a multiple of {STORED_ROWS} below rows, got"
                f" {self.tail_rows} and {self.rows}; pass such a number"
            )
        if self.warpgroups not in _REGISTERS or (self.warpgroups == 3 and self.rows > 128):
            raise ValueError(
                "QuantizedTilesConfig: warpgroups must be 1, 2, or with at most 128 rows 3, got"
                f" {self.warpgroups} with {self.rows} rows; pass fewer"
            )
        if self.stages < 2 or self.x_stages == 1 or self.band < 1:
            raise ValueError(
                f"QuantizedTilesConfig: there must be at least 2 stages and a band of 1, got {self};"
                " pass more"
            )

    @property
    def columns(self) -> int:
        return COLUMNS * self.warpgroups


def candidates(
    m: int, n: int, k: int, quantized: Format, outputs: int, matrices: int, multiprocessors: int
) -> list[QuantizedTilesConfig]:
    """Returns configs for [m, k] x [k, n], predicted fastest first.

    Args:
      outputs: number of matrices that the epilogue writes.
      matrices: number of matrices that it reads.
    """
    chunks = STORE_SLOTS * outputs + matrices
    found = [
        filled(rows, warpgroups, quantized, chunks)
        for warpgroups, most in ((2, 256), (3, 128), (1, 256))
        for rows in range(64, most + 1, STORED_ROWS)
        if rows == 64 or rows < m + STORED_ROWS
    ]
    found += [
        replace(config, tail_rows=tail)
        for config in found
        for tail in (32, 64, 96, 128)
        if tail < config.rows
    ]
    found.sort(key=lambda config: microseconds(m, n, k, config, multiprocessors))
    return found[:_CANDIDATES]


_CANDIDATES = 8
"""Largest number of configs that a tuner measures."""


def microseconds(
    m: int, n: int, k: int, config: QuantizedTilesConfig, multiprocessors: int
) -> float:
    """Returns the predicted time of a product, within 12 % of 60 measured times (H200, 2026-11-28).

    CTAs compute their tiles in waves. The terms of a step of a tile are its products, the dequantisation
    of its columns, and barriers. A single warpgroup leaves the tensor cores idle at times.
    """
    alone = 8e-4 if config.warpgroups == 1 else 0.0
    step = sum(
        pl.cdiv(part.tiles, multiprocessors)
        * (2.5e-7 * config.columns * part.rows + 8.6e-6 * config.columns + 8.5e-4 + alone)
        for part in _parts(m, n, config, multiprocessors)
    )
    return 2.0 + k * step


_FEWEST_STAGES = 3
_MOST_STAGES = 5
"""Largest number of pipeline stages; more gain nothing."""


def filled(rows: int, warpgroups: int, quantized: Format, chunks: int) -> QuantizedTilesConfig:
    """Returns the config with as many stages as fit next to the epilogue's chunks."""
    table = math.prod(dequantize.TABLE_SHAPE) * 4 if quantized.has_table else 0
    groups = BLOCK // min(quantized.group or BLOCK, BLOCK)
    of_weights = COLUMNS * warpgroups * (BLOCK * quantized.bits // 8 + 8 * groups)
    of_epilogue = chunks * warpgroups * STORED_ROWS * COLUMNS * 2 + 8192
    left, of_x = SHARED_MEMORY_BYTES - table - of_epilogue, rows * PIECE * 2
    stages = min(_MOST_STAGES, left // (of_weights + _PIECES * of_x))
    if stages >= _FEWEST_STAGES:
        return QuantizedTilesConfig(rows, warpgroups, stages)
    x_stages = (left - _FEWEST_STAGES * of_weights) // of_x
    return QuantizedTilesConfig(rows, warpgroups, _FEWEST_STAGES, min(_MOST_STAGES, x_stages))


class Part(NamedTuple):
    """A range of the result's columns, in which all tiles have one size."""

    rows: int
    """Rows of x in a tile."""
    first: int
    """Index, among all columns of tiles, of the range's first one."""
    grid: tuple[int, int]
    """Rows and columns of tiles in the range."""

    @property
    def tiles(self) -> int:
        down, across = self.grid
        return down * across


def _parts(m: int, n: int, config: QuantizedTilesConfig, multiprocessors: int) -> list[Part]:
    """Returns the result's ranges of columns; with `tail_rows`, the first is of whole waves of tiles."""
    down, across = pl.cdiv(m, config.rows), pl.cdiv(n, config.columns)
    main = across
    if config.tail_rows:
        main = down * across // multiprocessors * multiprocessors // down
    parts = [
        Part(config.rows, 0, (down, main)),
        Part(config.tail_rows, main, (pl.cdiv(m, config.tail_rows or m), across - main)),
    ]
    return [part for part in parts if part.tiles]


class Place(NamedTuple):
    """Position of a tile in the result, or of a chunk of its rows."""

    m_start: Any
    n_start: Any
    group: Any = None
    """The `Group` of rows to which a tile belongs, in a grouped product."""


@dataclass(frozen=True)
class QuantizedTiles:
    """Static parameters of a launch."""

    m: int
    n: int
    k: int
    dtype: Any
    config: QuantizedTilesConfig
    quantized: Format
    function: Callable[..., Mapping[str, Any]]
    """The epilogue, which returns a dict of the outputs' tiles."""
    vectors: Mapping[str, jax.ShapeDtypeStruct]
    matrices: Mapping[str, jax.ShapeDtypeStruct]
    outputs: Mapping[str, Any]
    """Dtypes of the outputs, of 16 bits."""
    multiprocessors: int

    @property
    def x_tile(self) -> OperandTile:
        return OperandTile(span=self.config.rows, k_last=True, whole_blocks=False, dtype=self.dtype)

    @property
    def w_tile(self) -> QuantizedTile:
        return QuantizedTile(self.quantized, self.config.columns, self.dtype, BLOCK)

    @property
    def x_slots(self) -> int:
        """Number of buffers of x in shared memory, each of 64 elements along K."""
        return self.config.x_stages or _PIECES * self.config.stages

    def x_rows(self, memory: Any, part: Part, slot: Any) -> Any:
        """Returns the first `part.rows` rows of x's buffer `slot`, which a tile of the part uses."""
        place = memory.at[slot, 0]
        return place if part.rows == self.config.rows else place.at[pl.ds(0, part.rows)]

    @property
    def steps(self) -> int:
        """Steps along K, each of which uses a stage of the weights and `_PIECES` buffers of x."""
        return pl.cdiv(self.k, BLOCK)

    @property
    def parts(self) -> list[Part]:
        return _parts(self.m, self.n, self.config, self.multiprocessors)

    @property
    def ctas(self) -> int:
        return min(self.multiprocessors, max(part.tiles for part in self.parts))

    def scratch(self) -> dict[str, Any]:
        c = self.config
        scratch: dict[str, Any] = dict(
            x_smem=self.x_tile.memory(self.x_slots),
            w_smem=self.w_tile.memory(c.stages),
            w_full=plgpu.Barrier(
                num_arrivals=self.w_tile.copies + (0 if c.x_stages else _PIECES),
                num_barriers=c.stages,
            ),
            w_free=plgpu.Barrier(num_arrivals=c.warpgroups, num_barriers=c.stages),
            out_smem={
                name: block((c.warpgroups, STORE_SLOTS), STORED_ROWS, COLUMNS, dtype)
                for name, dtype in self.outputs.items()
            },
        )
        if c.x_stages:
            scratch["x_full"] = plgpu.Barrier(num_arrivals=1, num_barriers=c.x_stages)
            scratch["x_free"] = plgpu.Barrier(num_arrivals=c.warpgroups, num_barriers=c.x_stages)
        if self.quantized.has_table:
            scratch["table_full"] = plgpu.Barrier(num_arrivals=1)
        if self.vectors:
            scratch["vector_smem"] = {
                name: plgpu.SMEM((c.warpgroups, COLUMNS), v.dtype)
                for name, v in self.vectors.items()
            }
            scratch["vector_full"] = plgpu.Barrier(
                num_arrivals=len(self.vectors), num_barriers=c.warpgroups
            )
        if self.matrices:
            scratch["matrix_smem"] = {
                name: block((c.warpgroups,), STORED_ROWS, COLUMNS, x.dtype)
                for name, x in self.matrices.items()
            }
            scratch["matrix_full"] = plgpu.Barrier(
                num_arrivals=len(self.matrices), num_barriers=c.warpgroups
            )
        return scratch

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory per CTA."""
        return allocated_bytes(self.scratch())

    def launch(
        self,
        x: jax.Array,
        w: Sequence[jax.Array],
        others: Sequence[jax.Array],
        *,
        name: str,
        own: Sequence[jax.Array] = (),
    ) -> dict[str, jax.Array]:
        """Runs the kernel on x, `own` (arrays for `on_device`), the weights, vectors and matrices."""
        if self.shared_bytes > SHARED_MEMORY_BYTES:
            raise ValueError(
                f"QuantizedTilesConfig: a CTA has {SHARED_MEMORY_BYTES} bytes of shared memory, and"
                f" {self.shared_bytes} are needed; pass fewer stages or rows ({self.config})"
            )
        warpgroups = self.config.warpgroups

        def kernel(x_gmem, *refs, memory):
            product, refs = self.on_device(refs)
            remaining = iter(refs)
            w_gmem = [next(remaining) for _ in w]
            vectors = {name: next(remaining) for name in self.vectors}
            matrices = {name: next(remaining) for name in self.matrices}
            outputs = {name: next(remaining) for name in self.outputs}
            producer = _Producer(product, x_gmem, w_gmem, memory)
            wg_idx = lax.axis_index("wg")
            consumer = _Consumer(product, wg_idx, vectors, matrices, outputs, memory)
            lax.cond(wg_idx == warpgroups, lambda: producer.run(), lambda: consumer.run())

        results = plgpu.kernel(
            kernel,
            out_type=tuple(
                jax.ShapeDtypeStruct((self.m, self.n), dtype) for dtype in self.outputs.values()
            ),
            scratch_types={"memory": self.scratch()},
            grid=(self.ctas,),
            grid_names=("cta",),
            num_threads=warpgroups + 1,
            thread_name="wg",
            kernel_name=name,
            # Mosaic's own barriers are not needed: the epilogue has a barrier between its stores to
            # shared memory and the copies that read them.
            compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        )(x, *own, *w, *others)
        return dict(zip(self.outputs, results, strict=True))

    # --- on the device ----------------------------------------------------------------------------

    def on_device(self, refs: Sequence[Any]) -> tuple["QuantizedTiles", Sequence[Any]]:
        """Returns the product with `launch`'s `own` arrays, which come first, and the other refs."""
        return self, refs

    def grid_of(self, part: Part) -> tuple[Any, int]:
        """Returns how many rows and columns of tiles a part has."""
        return part.grid

    def tiles_of_cta(self, part: Part) -> jax.Array:
        """Returns the number of a part's tiles that this CTA computes."""
        down, across = self.grid_of(part)
        left, ctas = down * across - lax.axis_index("cta"), jnp.int32(self.ctas)
        return lax.div(jnp.maximum(left, 0) + (ctas - 1), ctas)

    def place(self, part: Part, sequence_idx: Any) -> Place:
        """Returns the `Place` of this CTA's tile `sequence_idx` in a range of columns (`part`)."""
        item = lax.axis_index("cta") + sequence_idx * self.ctas
        m_idx, n_idx = plgpu.planar_snake(item, self.grid_of(part), 0, self.config.band)
        return Place(m_idx * part.rows, (part.first + n_idx) * self.config.columns)

    def of_place(self, ref: Any, place: Place) -> Any:
        """Returns the matrix or vector in `ref` of the tile's group; without groups, all of `ref`."""
        del place
        return ref

    def weights_of(self, refs: Sequence[Any], place: Place) -> list[Any]:
        """Returns the weights' arrays that a tile reads; a table of a codebook is the same for all."""
        own = len(refs) - int(self.quantized.has_table)
        return [self.of_place(ref, place) if i < own else ref for i, ref in enumerate(refs)]

    def store_rows(self, source: Any, ref: Any, place: Place, columns: Any) -> None:
        """Starts the copy of `source`, rows of results, to `columns` of `ref` from place.m_start on."""
        rows = pl.ds(place.m_start, source.shape[0])
        plgpu.copy_smem_to_gmem(source, ref.at[rows, columns], commit_group=False)

    def after_tiles(self, wg_idx: Any, store_zeros: Callable[[Place], None]) -> None:
        """Stores the parts of the result that belong to no tile."""


def _next(slot: Any, stages: int) -> jax.Array:
    return lax.select(slot == stages - 1, jnp.int32(0), slot + 1)


def _before(slot: Any, stages: int) -> jax.Array:
    return lax.select(slot == 0, jnp.int32(stages - 1), slot - 1)


@dataclass(frozen=True)
class _Producer:
    """The warpgroup that copies x and the weights into pipeline stages, tile by tile, step by step."""

    product: QuantizedTiles
    x_gmem: Any
    w_gmem: Sequence[Any]
    memory: Mapping[str, Any]

    def run(self) -> None:
        plgpu.set_max_registers(40, action="decrease")
        zero, c = jnp.int32(0), self.product.config
        if "table_full" in self.memory:
            self.product.w_tile.copy_table(
                self.w_gmem, self.memory["w_smem"], self.memory["table_full"]
            )
        carry = (zero, zero, zero)
        for part in self.product.parts:
            tiles = self.product.tiles_of_cta(part)
            carry = lax.fori_loop(0, tiles, functools.partial(self._fill_tile, part), carry)
        w_slot, x_slot, filled = carry
        self._await_readers("w_free", w_slot, filled, c.stages)
        if c.x_stages:
            self._await_readers("x_free", x_slot, filled * _PIECES, c.x_stages)

    def _await_readers(self, name: str, slot: Any, filled: Any, stages: int) -> None:
        """Waits until consumers have freed all stages; every phase of a barrier must be waited for."""
        for back in range(1, stages + 1):

            @pl.when(filled >= back)
            def _(back=back):
                last = lax.rem(slot + (stages - back), jnp.int32(stages))
                plgpu.barrier_wait(self.memory[name].at[last])

    def _fill_tile(self, part, sequence_idx, carry):
        place = self.product.place(part, sequence_idx)
        step = functools.partial(self._fill_step, part, place)
        return lax.fori_loop(0, self.product.steps, lambda k, c: step(k, *c), carry)

    def _fill_step(self, part, place, k_idx, w_slot, x_slot, filled):
        """Fills a stage of the weights, and the stages of x for the same elements along K."""
        product, memory, c = self.product, self.memory, self.product.config

        @pl.when(filled >= c.stages)
        def _():
            plgpu.barrier_wait(memory["w_free"].at[w_slot])

        k_start, w_full = k_idx * BLOCK, memory["w_full"].at[w_slot]
        starts, w_gmem = (place.n_start, k_start), product.weights_of(self.w_gmem, place)
        product.w_tile.copy(w_gmem, memory["w_smem"], w_slot, *starts, w_full)
        for piece in range(_PIECES):
            if c.x_stages:

                @pl.when(filled * _PIECES + piece >= product.x_slots)
                def _(x_slot=x_slot):
                    plgpu.barrier_wait(memory["x_free"].at[x_slot])

            plgpu.copy_gmem_to_smem(
                self.x_gmem.at[
                    pl.ds(place.m_start, part.rows), pl.ds(k_start + piece * PIECE, PIECE)
                ],
                product.x_rows(memory["x_smem"][1], part, x_slot),
                memory["x_full"].at[x_slot] if c.x_stages else w_full,
            )
            x_slot = _next(x_slot, product.x_slots)
        return _next(w_slot, c.stages), x_slot, filled + 1


@dataclass(frozen=True)
class _Consumer:
    """A warpgroup that dequantises and multiplies 64 columns of each tile, and stores their results."""

    product: QuantizedTiles
    wg_idx: jax.Array
    vectors: Mapping[str, Any]
    matrices: Mapping[str, Any]
    outputs: Mapping[str, Any]
    memory: Mapping[str, Any]

    def run(self) -> None:
        plgpu.set_max_registers(_REGISTERS[self.product.config.warpgroups], action="increase")
        if "table_full" in self.memory:
            plgpu.barrier_wait(self.memory["table_full"])
        slots = jnp.int32(0), jnp.int32(0)
        for part in self.product.parts:
            tiles = self.product.tiles_of_cta(part)
            slots = lax.fori_loop(0, tiles, functools.partial(self._compute_tile, part), slots)
        self.product.after_tiles(self.wg_idx, self._store_zeros)
        plgpu.wait_smem_to_gmem(0)

    def _compute_tile(self, part, sequence_idx, slots):
        place = self.product.place(part, sequence_idx)
        place = place._replace(n_start=place.n_start + self.wg_idx * COLUMNS)
        self._prefetch(place)

        def multiply(acc):
            after = lax.fori_loop(0, self.product.steps, self._step_into(acc, part), slots)
            plgpu.wgmma_wait(0)
            return acc[...], after

        sums, slots = pl.run_scoped(multiply, plgpu.ACC((COLUMNS, part.rows), jnp.float32))
        self._free(*slots)
        if not self.product.quantized.group:
            sums = sums * self.product.w_tile.unit
        self._finish(sums, place)
        return slots

    def _step_into(self, acc: Any, part: Part) -> Callable[[Any, Any], Any]:
        """Returns the body of the loop over steps, which leaves the last piece's WGMMAs in flight."""
        product, memory, c = self.product, self.memory, self.product.config

        def step(k_idx, slots):
            w_slot, x_slot = slots
            plgpu.barrier_wait(memory["w_full"].at[w_slot])
            pieces = product.w_tile.pieces(memory["w_smem"], w_slot, self.wg_idx * COLUMNS, COLUMNS)
            for piece, w in enumerate(pieces):
                if c.x_stages:
                    plgpu.barrier_wait(memory["x_full"].at[x_slot])
                x = product.x_rows(memory["x_smem"][0], part, x_slot)
                plgpu.wgmma(acc, w, x.transpose((1, 0)))
                plgpu.wgmma_wait(1)
                # The wait leaves this piece's WGMMAs in flight; those of the previous piece have ended.
                if piece and c.x_stages:
                    self._free(w_slot, x_slot)
                elif not piece:
                    pl.when(k_idx > 0)(functools.partial(self._free, w_slot, x_slot))
                x_slot = _next(x_slot, product.x_slots)
            if c.x_stages:
                plgpu.barrier_arrive(memory["w_free"].at[w_slot])
            return _next(w_slot, c.stages), x_slot

        return step

    def _free(self, w_slot: Any, x_slot: Any) -> None:
        """Frees the stage of x before `x_slot` or, if x shares the stages of w, that before `w_slot`."""
        c = self.product.config
        if c.x_stages:
            before = _before(x_slot, self.product.x_slots)
            plgpu.barrier_arrive(self.memory["x_free"].at[before])
        else:
            plgpu.barrier_arrive(self.memory["w_free"].at[_before(w_slot, c.stages)])

    # --- the epilogue -----------------------------------------------------------------------------

    def _prefetch(self, place: Place) -> None:
        """Starts the copies of the vectors, which overlap the product."""
        for name, ref in self.vectors.items():
            plgpu.copy_gmem_to_smem(
                self.product.of_place(ref, place).at[pl.ds(place.n_start, COLUMNS)],
                self.memory["vector_smem"][name].at[self.wg_idx],
                self.memory["vector_full"].at[self.wg_idx],
            )

    def _finish(self, sums: jax.Array, place: Place) -> None:
        """Stores the epilogue's results for sums [columns, rows], `STORED_ROWS` rows at a time."""
        vectors = {}
        if self.vectors:
            plgpu.barrier_wait(self.memory["vector_full"].at[self.wg_idx])
            vectors = {
                name: self._over_rows(self.memory["vector_smem"][name]) for name in self.vectors
            }
        chunks = sums.shape[1] // STORED_ROWS
        for chunk in range(chunks):
            rows = place._replace(m_start=place.m_start + chunk * STORED_ROWS)
            if self.matrices:
                self._copy_matrices(rows.m_start, rows.n_start)
            part = sums[:, chunk * STORED_ROWS : (chunk + 1) * STORED_ROWS]
            self._store(
                self.product.function(part, **vectors, **self._load_matrices()),
                rows,
                chunk % STORE_SLOTS,
            )

    def _store(self, results: Mapping[str, jax.Array], place: Place, slot: int) -> None:
        """Starts the copies of results [columns, rows]."""
        # Waits until the copy of earlier results has read this buffer.
        plgpu.wait_smem_to_gmem(STORE_SLOTS - 1, wait_read_only=True)
        for name, dtype in self.product.outputs.items():
            turned = plgpu.layout_cast(results[name].astype(dtype), _TURNED)
            memory, _ = self.memory["out_smem"][name]
            memory.at[self.wg_idx, slot].transpose((1, 0))[...] = turned
        plgpu.commit_smem()
        columns = pl.ds(place.n_start, COLUMNS)
        for name, ref in self.outputs.items():
            _, memory = self.memory["out_smem"][name]
            self.product.store_rows(memory.at[self.wg_idx, slot], ref, place, columns)
        plgpu.commit_smem_to_gmem_group()

    def _store_zeros(self, place: Place) -> None:
        """Stores zeros in up to `STORED_ROWS` rows of the results, from `place` to its group's end."""
        shape = (COLUMNS, STORED_ROWS)
        zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        self._store(dict.fromkeys(self.product.outputs, zeros), place, 0)

    def _over_rows(self, memory: Any) -> jax.Array:
        vector = plgpu.load(memory.at[self.wg_idx], layout=plgpu.Layout.WGMMA.reduce(1))
        shape = (COLUMNS, STORED_ROWS)
        return lax.broadcast_in_dim(vector.astype(jnp.float32), shape, (0,))

    def _copy_matrices(self, row: Any, n_start: Any) -> None:
        # The commit waits until all warps have read the previous chunk, which is overwritten now.
        plgpu.commit_smem()
        for name, ref in self.matrices.items():
            _, memory = self.memory["matrix_smem"][name]
            plgpu.copy_gmem_to_smem(
                ref.at[pl.ds(row, STORED_ROWS), pl.ds(n_start, COLUMNS)],
                memory.at[self.wg_idx],
                self.memory["matrix_full"].at[self.wg_idx],
            )

    def _load_matrices(self) -> dict[str, jax.Array]:
        if not self.matrices:
            return {}
        plgpu.barrier_wait(self.memory["matrix_full"].at[self.wg_idx])
        loaded = {}
        for name in self.matrices:
            memory, _ = self.memory["matrix_smem"][name]
            turned = plgpu.load(
                memory.at[self.wg_idx].transpose((1, 0)), layout=plgpu.Layout.WGMMA_TRANSPOSED
            )
            loaded[name] = plgpu.layout_cast(turned, plgpu.Layout.WGMMA).astype(jnp.float32)
        return loaded
