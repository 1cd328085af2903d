"""Tiles of rows and their division among warps, for the norms and row quantisation.

A warp holds whole rows ("row per warp", short rows), or all warps of a CTA share each row ("row per
CTA", long rows). Either way a warpgroup works on a [lines, width] tile, of which each of its four warps
holds every fourth line: a line is a row, or one warp's piece of it. A sum over a line takes warp
shuffles. Sums over several warps go through shared memory explicitly, as Mosaic's cross-warp reductions
race when a CTA has several warpgroups.

Tiles arrive through a ring of bulk copies (a pipeline), so that memory stays busy while warps compute.
Large arrays need no ring: a CTA for each tile is enough to keep the memory busy.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import BARRIER_BYTES, LANES, SHARED_MEMORY_BYTES, WARPS
from pallas_kernels.store import store_unoptimized


@dataclass(frozen=True)
class RowConfig:
    """Launch and tiling of a kernel over rows."""

    row_per_warp: bool
    """True if a warp computes whole rows; otherwise all warps of a CTA share each row."""
    warpgroups: int
    """Warpgroups in a CTA. With a row per warp each has tiles of its own, else all share each row."""
    slots: int
    """Pipeline stages: a warpgroup's tiles in flight or in use. With 0 a warpgroup loads a single tile,
    straight from global memory into registers."""
    ctas_per_multiprocessor: int
    """CTAs per SM, each of which computes several tiles; not used with 0 stages."""
    lines: int = WARPS
    """Lines of a warpgroup's tile: whole rows with a row per warp, else its four pieces of one row."""
    chunks: int = 1
    """Column blocks into which a line is cut and which are computed one after the other, so that fewer
    registers are live at the same time."""
    keeps_tile: bool = True
    """True if a tile stays in registers; otherwise each pass reads it from shared memory again."""
    keeps_vectors: bool = True
    """True if vectors [features], such as a norm's scale, stay in registers; otherwise they are loaded
    again for each tile."""

    def __post_init__(self) -> None:
        for name in ("warpgroups", "ctas_per_multiprocessor", "chunks"):
            if getattr(self, name) < 1:
                raise ValueError(f"RowConfig: {name} must be at least 1, got {getattr(self, name)}")
        if self.slots < 0:
            raise ValueError(f"RowConfig: slots must be at least 0, got {self.slots}")
        if self.lines % WARPS or (self.lines != WARPS and not self.row_per_warp):
            raise ValueError(
                f"RowConfig: lines must be a multiple of {WARPS}, and {WARPS} with a row per CTA,"
                f" got {self.lines}"
            )

    def width(self, features: int) -> int:
        """Returns the columns of a warpgroup's tile: a row's features, or those of a warp's piece."""
        return features if self.row_per_warp else features // (WARPS * self.warpgroups)

    def why_unfit(
        self, rows: int, features: int, element_bytes: int, sums: bool = False
    ) -> str | None:
        """Returns None if the config can run rows of `features`, else the rule that they break.

        `element_bytes` is the sum of the itemsizes of all matrices that are read; with `sums` the kernel
        also sums each column over the rows (see `RowTiles.store_partial`).
        """
        step = 2 * LANES * self.chunks
        if not self.row_per_warp:
            step *= WARPS * self.warpgroups
        if features % step:
            return f"the number of features must be a multiple of {step}, got {features}"
        if self.row_per_warp and 0 < rows < self.lines:
            return f"there must be at least {self.lines} rows, got {rows}"
        if sums and self.slots == 0:
            return "sums over rows need a pipeline of at least 1 slot, got 0 slots"
        wanted = self.shared_bytes(features, element_bytes, sums)
        if wanted > SHARED_MEMORY_BYTES:
            return (
                f"a CTA has {SHARED_MEMORY_BYTES} bytes of shared memory, and {wanted} are needed for"
                f" rows of {features} features"
            )
        return None

    def shared_bytes(self, features: int, element_bytes: int, sums: bool) -> int:
        """Returns an upper limit on a CTA's bytes of shared memory, given arguments of `why_unfit`."""
        lines = self.warpgroups * self.lines
        ring = self.slots * lines * self.width(features) * element_bytes
        partials = lines * features * 4 if sums and self.row_per_warp else 0
        return ring + partials + BARRIER_BYTES


class Place(NamedTuple):
    """Indices of a warpgroup in the grid and in its CTA."""

    cta_idx: jax.Array
    wg_idx: jax.Array


@dataclass(frozen=True)
class RowTiles:
    """Tiles of a [rows, features] matrix whose rows are divided into `segments` of equal length.

    The grid is `(ctas,)`; a CTA stays inside one segment.
    """

    config: RowConfig
    rows: int
    features: int
    segments: int
    ctas_per_segment: int

    @classmethod
    def plan(
        cls, config: RowConfig, rows: int, features: int, segments: int, multiprocessors: int
    ) -> "RowTiles":
        rows_per_cta = config.lines * config.warpgroups if config.row_per_warp else 1
        most = -(-(rows // segments) // rows_per_cta)
        if config.slots > 0:
            most = min(most, multiprocessors * config.ctas_per_multiprocessor // segments)
        return cls(config, rows, features, segments, max(1, most))

    @property
    def ctas(self) -> int:
        return self.segments * self.ctas_per_segment

    @property
    def width(self) -> int:
        return self.config.width(self.features)

    @property
    def chunk_width(self) -> int:
        return self.width // self.config.chunks

    @property
    def shape(self) -> tuple[int, int]:
        """Shape [lines, columns] of one column block of a tile."""
        return (self.config.lines, self.chunk_width)

    @property
    def ragged(self) -> bool:
        """True if a segment's number of rows is no multiple of a tile's, so that two tiles overlap."""
        return self.config.row_per_warp and (self.rows // self.segments) % self.config.lines != 0

    @property
    def stays_in_segment(self) -> bool:
        """True if no tile has rows of two segments, as a segment has at least as many rows as a tile."""
        return not self.config.row_per_warp or self.rows // self.segments >= self.config.lines

    def layout(self, itemsize: int) -> plgpu.Layout:
        """Returns a column block's register layout: a line per warp, up to 16 adjacent bytes a lane."""
        vec = 16 // itemsize
        while self.chunk_width % (LANES * vec):
            vec //= 2
        return plgpu.Layout.TILED(
            plgpu.Tiling(((WARPS, LANES * vec), (vec,))),
            warp_dims=(-3,),
            lane_dims=(-2,),
            vector_dim=-1,
        )

    # --- host side: arrays as the kernel indexes them ---------------------------------------------

    def matrix_view(self, array: jax.Array) -> jax.Array:
        return array.reshape(self.matrix_shape)

    @property
    def matrix_shape(self) -> tuple[int, ...]:
        if self.config.row_per_warp:
            return (self.rows, self.features)
        return (self.rows, WARPS * self.config.warpgroups, self.width)

    def vector_view(self, array: jax.Array) -> jax.Array:
        """Returns a vector [features], or [segments, features], reshaped as the kernel indexes it.

        With a row per CTA, features become two axes: lines of a row, and columns.
        """
        if self.config.row_per_warp:
            return array
        return array.reshape(*array.shape[:-1], WARPS * self.config.warpgroups, self.width)

    @property
    def launch(self) -> dict[str, Any]:
        """Returns arguments of plgpu.kernel: the grid, its threads and compiler options."""
        return {
            "grid": (self.ctas,),
            "grid_names": ("cta",),
            "num_threads": self.config.warpgroups,
            "thread_name": "wg",
            # Mosaic's automatic barriers are not needed without pipeline stages and with a row per warp,
            # as no warp then reads what another has written.
            "compiler_params": plgpu.CompilerParams(
                unsafe_no_auto_barriers=self.config.slots == 0 and self.config.row_per_warp
            ),
        }

    # --- device side ------------------------------------------------------------------------------

    def place(self) -> Place:
        """Returns the indices of the current warpgroup in the grid and in its CTA."""
        return Place(lax.axis_index("cta"), lax.axis_index("wg"))

    def lines(self, place: Place) -> pl.Slice:
        """Returns this warpgroup's lines (pieces of a row) where a CTA's warpgroups share each row."""
        return pl.ds(place.wg_idx * WARPS, WARPS)

    def columns(self, chunk: int) -> pl.Slice:
        """Returns the columns of a tile that column block `chunk` holds."""
        return pl.ds(chunk * self.chunk_width, self.chunk_width)

    def per_chunk(self, f: Callable[[int], Any]) -> Callable[[int], Any]:
        """Returns `f`, evaluated in advance for all column blocks if tiles stay in registers."""
        return self._kept(f) if self.config.keeps_tile else f

    def _kept(self, f: Callable[[int], Any]) -> Callable[[int], Any]:
        return [f(chunk) for chunk in range(self.config.chunks)].__getitem__

    def line_sum(self, f: Callable[[int], jax.Array]) -> jax.Array:
        """Returns each line's sum over its columns, [lines]; `f` returns a column block."""
        return jnp.sum(functools.reduce(jnp.add, map(f, range(self.config.chunks))), axis=1)

    def load(self, ref, chunk: int, layout: plgpu.Layout) -> jax.Array:
        """Returns column block `chunk` of a tile `ref` [lines, width], as float32."""
        block = ref.at[:, self.columns(chunk)]
        return plgpu.load(block, layout=layout, optimized=False).astype(jnp.float32)

    def line_max(self, f: Callable[[int], jax.Array]) -> jax.Array:
        """Returns each line's maximum over its columns, [lines]; `f` returns a column block."""
        return jnp.max(functools.reduce(jnp.maximum, map(f, range(self.config.chunks))), axis=1)

    def vector(self, ref, place: Place, layout: plgpu.Layout) -> Callable[[int], jax.Array]:
        """Returns a function from a column block's index to that block of a per-feature vector.

        Blocks are float32, broadcast to the tile's lines. If `ref` holds a vector for each segment, they
        are those of this CTA's segment.
        """
        if len(ref.shape) > (1 if self.config.row_per_warp else 2):
            ref = ref.at[self.segment(place)]

        def load(chunk):
            columns = self.columns(chunk)
            if self.config.row_per_warp:
                line = plgpu.load(ref.at[columns], layout=layout.reduce(0), optimized=False)
                return lax.broadcast_in_dim(line.astype(jnp.float32), self.shape, (1,))
            lines = ref.at[self.lines(place), columns]
            return plgpu.load(lines, layout=layout, optimized=False).astype(jnp.float32)

        return self._kept(load) if self.config.keeps_vectors else load

    def store(self, ref, place, row, chunk: int, value: jax.Array) -> None:
        """Writes column block `chunk` [lines, columns] of the tile at `row` to global memory."""
        self.tile(ref, place, row).at[:, self.columns(chunk)][...] = value

    def across_columns(self, per_row: jax.Array) -> jax.Array:
        """Returns a statistic of each row (see `total`), broadcast to the columns of a tile."""
        if self.config.row_per_warp:
            return lax.broadcast_in_dim(per_row, self.shape, (0,))
        return per_row

    def segment(self, place: Place) -> jax.Array:
        """Returns the segment that this CTA works on."""
        return lax.div(place.cta_idx, jnp.int32(self.ctas_per_segment))

    def tile_count(self, place):
        """Returns the number of tiles that this warpgroup works through."""
        first, step = self._first_and_step(place)
        rows = self.rows // self.segments
        tiles = -(-rows // self.config.lines) if self.config.row_per_warp else rows
        return lax.div(jnp.int32(tiles + step - 1) - first, jnp.int32(step))

    def _first_and_step(self, place):
        cta_in_segment = lax.rem(place.cta_idx, jnp.int32(self.ctas_per_segment))
        if not self.config.row_per_warp:
            return cta_in_segment, self.ctas_per_segment
        first = place.wg_idx * self.ctas_per_segment + cta_in_segment
        return first, self.ctas_per_segment * self.config.warpgroups

    def first_row(self, place, step_idx):
        """Returns the first row of this warpgroup's tile number `step_idx`.

        If a segment's rows are no multiple of a tile's, its last tile starts earlier, to end with the
        segment: some rows are computed twice, to the same bits. For a warpgroup without tiles this is
        the last tile's row. A tile longer than its segment also has rows of the next segments.
        """
        first, step = self._first_and_step(place)
        rows = self.rows // self.segments
        segment_start = self.segment(place) * rows
        tile = first + step_idx * step
        if not self.config.row_per_warp:
            return segment_start + tile
        lines = self.config.lines
        last = segment_start + rows - lines if self.stays_in_segment else self.rows - lines
        return jnp.minimum(segment_start + tile * lines, last)

    def counted(self, place, step_idx, layout: plgpu.Layout) -> jax.Array:
        """Returns bools [lines, columns], False in rows of the tile before or of another segment."""
        first, step = self._first_and_step(place)
        rows = self.rows // self.segments
        segment_start = self.segment(place) * rows
        start = segment_start + (first + step_idx * step) * self.config.lines
        line = plgpu.broadcasted_iota(jnp.int32, self.shape, 0, layout=layout)
        row = line + self.first_row(place, step_idx)
        return (row >= start) & (row < segment_start + rows)

    def tile(self, ref, place, row):
        """Returns the tile that starts at `row` of a matrix in global memory."""
        if self.config.row_per_warp:
            return ref.at[pl.ds(row, self.config.lines)]
        return ref.at[row, self.lines(place)]

    def load_statistic(self, ref, row) -> jax.Array:
        """Loads a statistic [rows] for the tile at `row`: [lines], or a scalar with a row per CTA."""
        if self.config.row_per_warp:
            layout = self.layout(4).reduce(1)
            return plgpu.load(self.tile(ref, None, row), layout=layout, optimized=False)
        return ref[row]

    def store_statistic(self, ref, place, row, value: jax.Array) -> None:
        """Writes one float32 for each row of the tile at `row`, as `load_statistic` reads it."""
        if self.config.row_per_warp:
            store_unoptimized(self.tile(ref, place, row), value)
            return

        @pl.when(place.wg_idx == 0)
        def _():
            ref[row] = value

    def partials_shape(self, quantities: int) -> tuple[int, ...]:
        """Shape [quantities, CTAs, features] of the sums of each CTA over its rows.

        With a row per CTA, features are two axes: lines of a row, and columns.
        """
        return (quantities, self.ctas, *self.matrix_shape[1:])

    def partial_scratch(self) -> dict[str, object]:
        """Shared memory that `store_partial` needs: float32 [warpgroups, lines, features]."""
        if not self.config.row_per_warp:
            return {}
        shape = (self.config.warpgroups, self.config.lines, self.features)
        return {"partial_smem": plgpu.SMEM(shape, jnp.float32)}

    def store_partial(
        self, ref, values: list[jax.Array], partial_smem, barrier, place: Place
    ) -> None:
        """Writes one quantity's column sums over all rows of this CTA to `ref`.

        `values` has an array [lines, columns] for each column block: the sums of each line's rows.
        """
        if not self.config.row_per_warp:
            for chunk, value in enumerate(values):
                store_unoptimized(ref.at[self.lines(place), self.columns(chunk)], value)
            return

        def synchronize():
            if self.config.warpgroups > 1:
                plgpu.barrier_arrive(barrier)
                plgpu.barrier_wait(barrier)

        for chunk, value in enumerate(values):
            store_unoptimized(partial_smem.at[place.wg_idx, :, self.columns(chunk)], value)
        synchronize()
        if self.features % (WARPS * LANES) == 0:
            vec = 4 if self.features % 512 == 0 else 2 if self.features % 256 == 0 else 1
            layout = plgpu.Layout.WG_STRIDED((self.features,), vec_size=vec)
        else:
            layout = self.layout(4).reduce(0)

        @pl.when(place.wg_idx == 0)
        def _():
            ref[...] = _combine_pairwise(
                [
                    plgpu.load(partial_smem.at[wg_idx, line], layout=layout, optimized=False)
                    for wg_idx in range(self.config.warpgroups)
                    for line in range(self.config.lines)
                ]
            )

        synchronize()

    def total(
        self,
        lines: list[jax.Array],
        exchange_smem,
        exchange_barrier,
        parity,
        place: Place,
        combine: Callable[[jax.Array, jax.Array], jax.Array] = jnp.add,
    ):
        """Returns each quantity's sums over whole rows, given an array [lines] of its sums over lines.

        With a row per CTA, a row's sum is a scalar. `combine` may replace the sum by a maximum.

        `exchange_smem` is [2, len(lines), warpgroups, 4]. `parity`, 0 or 1, must differ from that of the
        previous call: a fast warpgroup then does not overwrite numbers that a slow one still reads.
        """
        if self.config.row_per_warp:
            return lines
        for quantity, line in enumerate(lines):
            exchange_smem[parity, quantity, place.wg_idx] = line
        if self.config.warpgroups > 1:
            plgpu.barrier_arrive(exchange_barrier)
            plgpu.barrier_wait(exchange_barrier)
        return [
            _combine_pairwise(
                [
                    exchange_smem[parity, quantity, wg_idx, warp]
                    for wg_idx in range(self.config.warpgroups)
                    for warp in range(WARPS)
                ],
                combine,
            )
            for quantity in range(len(lines))
        ]

    def exchange_scratch(self, quantities: int) -> dict[str, object]:
        """Scratch memory that a call of `total` with up to `quantities` needs."""
        shape = (2, quantities, self.config.warpgroups, WARPS)
        return {
            "exchange_smem": plgpu.SMEM(shape, jnp.float32),
            "exchange_barrier": plgpu.Barrier(num_arrivals=self.config.warpgroups),
        }

    def ring_scratch(self, dtypes: dict[str, jnp.dtype]) -> dict[str, object]:
        """Scratch memory of the pipeline: stages for each matrix that is read, and their barriers."""
        if self.config.slots == 0:
            return {}
        shape = (self.config.warpgroups, self.config.slots, self.config.lines, self.width)
        scratch: dict[str, object] = {
            f"{name}_smem": plgpu.SMEM(shape, dtype) for name, dtype in dtypes.items()
        }
        scratch["ring_barriers"] = plgpu.Barrier(num_arrivals=len(dtypes), num_barriers=shape[:2])
        return scratch

    def for_each_tile(
        self,
        place: Place,
        sources: list[tuple[object, object]],
        ring_barriers,
        body: Callable[..., object],
        carry: object,
    ):
        """Runs `carry = body(step_idx, row, tile_refs, carry)` over this warpgroup's tiles.

        `sources` are the (global, shared) pairs that the ring copies; `row` is the tile's first row, and
        `tile_refs` holds each source's tile.
        """
        slots = self.config.slots
        if slots == 0:
            row = self.first_row(place, 0)
            tile_refs = [self.tile(gmem, place, row) for gmem, _ in sources]
            return body(jnp.int32(0), row, tile_refs, carry)
        count = self.tile_count(place)

        def copy_in(step_idx, slot):
            row = self.first_row(place, step_idx)
            for gmem, smem in sources:
                # `first_row` keeps the tile in bounds; PROMISE_IN_BOUNDS makes this one 1-D bulk copy.
                plgpu.copy_gmem_to_smem(
                    self.tile(gmem, place, row),
                    smem.at[place.wg_idx, slot],
                    ring_barriers.at[place.wg_idx, slot],
                    oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
                )

        for slot in range(slots):
            pl.when(slot < count)(functools.partial(copy_in, slot, slot))

        def step(step_idx, carry):
            slot = lax.rem(step_idx, jnp.int32(slots))
            plgpu.barrier_wait(ring_barriers.at[place.wg_idx, slot])
            row = self.first_row(place, step_idx)
            tile_refs = [smem.at[place.wg_idx, slot] for _, smem in sources]
            carry = body(step_idx, row, tile_refs, carry)
            pl.when(step_idx + slots < count)(functools.partial(copy_in, step_idx + slots, slot))
            return carry

        return lax.fori_loop(0, count, step, carry)


def _combine_pairwise(
    values: list[jax.Array], combine: Callable[[jax.Array, jax.Array], jax.Array] = jnp.add
) -> jax.Array:
    while len(values) > 1:
        paired = [combine(a, b) for a, b in zip(values[::2], values[1::2], strict=False)]
        values = paired + values[2 * len(paired) :]
    return values[0]
