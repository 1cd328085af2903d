"""Grouped products for Hopper: groups of rows of one matrix, each multiplied by its own matrix.

The sizes of the groups are known on the device only. A tile starts at the first row of its group or a
whole number of tiles after it, so that no tile mixes groups; rows of the next group in a group's last
tile are not stored; `groups` finds the group of a tile. Rows that belong to no group are stored as zeros
after all tiles. Several matrices of a group may share one pass over its rows, and an epilogue, a traced
function of their float32 tiles, computes the results.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gemm import cost, groups, operands
from pallas_kernels.gemm.cost import Work
from pallas_kernels.gemm.epilogue import Epilogue, Function
from pallas_kernels.gemm.groups import Group, Groups
from pallas_kernels.gemm.mainloop import Product
from pallas_kernels.gemm.matmul_config import CONSUMERS, MatmulConfig
from pallas_kernels.gemm.operands import matrix_of, swizzled_columns
from pallas_kernels.gemm.tiled_product import Ring, Step, TilePlace
from pallas_kernels.hopper import SHARED_MEMORY_BYTES

GRAIN = 8
"""Divisor of K and N: rows of 16-bit numbers then begin at multiples of 16 bytes, as TMA requires."""
MOST_GROUPS = 1024
"""Largest number of groups: the work for the table of their first rows grows with its square."""


def why_unsupported(
    *,
    compute_capability: tuple[int, int] | None,
    dtypes: Mapping[str, Any],
    features: Mapping[str, int],
    out_dtype: Any,
    rows: int,
    groups: int,
) -> str | None:
    """Returns None if the kernels can run, else the reason.

    Args:
      compute_capability: of the GPU, or None where there is none.
      dtypes: dtypes of the operands, keyed by name.
      features: the sizes of all axes but rows and groups, keyed by name.
      out_dtype: of the result.
      rows: rows of all groups.
      groups: the number of groups.
    """
    if reason := operands.why_unfit(compute_capability, dtypes, out_dtype):
        return reason
    for name, size in features.items():
        if size % GRAIN:
            return f"it takes multiples of {GRAIN} features, and {name} has {size}"
    if groups > MOST_GROUPS:
        return f"it takes at most {MOST_GROUPS} groups, and there are {groups}"
    if rows * groups >= 2**31:
        return "its indices have 32 bits, and there are too many rows and groups for them"
    return None


def candidates(
    work: Work,
    outputs: Mapping[str, Any],
    multiprocessors: int,
) -> list[MatmulConfig]:
    """Returns the configs that fit into shared memory, predicted fastest first.

    Args:
      work: the product.
      outputs: dtypes of the results, keyed by name, with equally many bytes.
      multiprocessors: SMs of the device.
    """
    # A TMA copy begins at a multiple of 128 bytes of shared memory: a chunk's rows have 128 bytes, so
    # that copies of a group's last rows may begin at any of them.
    [columns] = {swizzled_columns(dtype) for dtype in outputs.values()}
    configs = [
        MatmulConfig(
            tile_m,
            tile_n,
            stages,
            ping_pong,
            epilogue_columns=columns,
            write_slots=slots,
            band=band,
        )
        for (tile_m, tile_n, ping_pong) in _TILES
        for stages, slots in _STAGES
        for band in _BANDS
        if tile_n % (work.products * swizzled_columns(jnp.bfloat16)) == 0
    ]
    fitting = [
        config
        for config in configs
        if _tiles(work, jnp.bfloat16, config, 1, outputs).shared_bytes <= SHARED_MEMORY_BYTES
    ]
    return sorted(fitting, key=lambda config: predicted_time(work, config, multiprocessors))


_TILES = ((128, 192, True), (128, 128, True), (64, 256, True), (64, 128, True), (64, 256, False))
"""Rows and columns of a warpgroup's tile, and True if the warpgroups have different tiles
(ping-pong)."""
_STAGES = ((4, 2), (5, 2), (6, 2), (4, 1), (5, 1), (3, 1))
"""Pipeline stages, and epilogue buffers for results; earlier pairs win ties of predicted time."""
_BANDS = (8, 16)


def predicted_time(work: Work, config: MatmulConfig, multiprocessors: int) -> float:
    """Returns the predicted microseconds, a compromise between groups of equal and of unequal sizes.

    The empty rows of each group's last tile count as a quarter of a tile.
    """
    groups = min(work.groups, work.m)
    tiles = work.m / groups / config.cta_tile_m
    rows = groups * config.cta_tile_m * max(1.0, tiles + (0.25 if work.groups > 1 else 0.0))
    predicted = cost.kernel(replace(work, m=math.ceil(rows)), config, multiprocessors)
    if config.tile_m == 64 and config.ping_pong:
        predicted *= _LOW if work.m > _FEW_ROWS * groups else _LOW_OF_FEW_ROWS
    return predicted


_FEW_ROWS = 128
"""Rows of a group up to which reading the group's matrix from memory takes all of the time."""
_LOW = 1.08
"""Factor on the modelled time of 64-row tiles in ping-pong (benchmarks/LAB.md, 2026-11-28)."""
_LOW_OF_FEW_ROWS = 0.97
"""The factor in place of `_LOW` for groups of few rows: 64 groups of 128 rows take 153.9 us with the
config that it selects, 162.3 without this factor."""


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupedProduct:
    """Description of products of groups of rows with an epilogue, as `FusedProduct` is of one product.

    `run` launches its kernel. Everything else needs only the shapes and dtypes of the arrays.
    """

    name: str
    """Name of the kernel in a profile."""
    a: Sequence[Any]
    """Left operands [M, K], bfloat16 or float16; several for a sum of products a_i @ b_i."""
    b: Sequence[Any]
    """Right operands [E, K, N] of the same dtype ([E, N, K] with `b_transposed`) for each a and each of
    the `products` that share a pass over a, in this order. For one a they may also be one array with all
    products concatenated, [E, K, products N] ([E, products N, K])."""
    epilogue: Function
    """Function of a float32 tile of each product, which returns a dict of tiles."""
    outputs: Mapping[str, Any]
    """Dtypes, keyed by name and equally wide, of the epilogue's tiles that are stored, [M, N]."""
    b_transposed: bool = False
    products: int = 1
    activations: int = 0
    """Activations and derivatives that the epilogue evaluates for each element."""

    @property
    def work(self) -> Work:
        joined = len(self.a) * self.products // len(self.b)
        return Work(
            m=self.a[0].shape[0],
            n=self.b[0].shape[1 if self.b_transposed else 2] // joined,
            k=sum(term.shape[1] for term in self.a),
            products=self.products,
            written_bytes=sum(jnp.dtype(dtype).itemsize for dtype in self.outputs.values()),
            activations=self.activations,
            k_last=self.b_transposed,
            terms=len(self.a),
            groups=self.b[0].shape[0],
        )

    def candidates(self, multiprocessors: int) -> list[MatmulConfig]:
        """Returns the configs that fit into shared memory, predicted fastest first."""
        return candidates(self.work, self.outputs, multiprocessors)

    def run(
        self,
        group_sizes: jax.Array,
        offset: jax.Array,
        *,
        multiprocessors: int,
        config: MatmulConfig | None = None,
    ) -> dict[str, jax.Array]:
        """Runs the kernel; returns the outputs keyed by name, with zeros in rows of no group.

        Args:
          group_sizes: int [G]: rows of each group.
          offset: int [], the index of the group that b's first matrix is for.
          multiprocessors: SMs of the device.
          config: one of `candidates`; None for the first.
        """
        work = self.work
        config = self.candidates(multiprocessors)[0] if config is None else config
        tiles = _tiles(work, self.a[0].dtype, config, multiprocessors, self.outputs)
        tiles = replace(tiles, function=self.epilogue)
        product = tiles.product
        product.check_shared_bytes(tiles.shared_bytes)
        of_groups = groups.operands(
            group_sizes, offset, groups=work.groups, rows=work.m, tile_m=config.cta_tile_m
        )
        results = product.launch(
            self.a,
            self.b,
            of_groups,
            out_type=[
                jax.ShapeDtypeStruct((work.m, work.n), dtype) for dtype in self.outputs.values()
            ],
            scratch=tiles.scratch(),
            epilogue=tiles.of_tile,
            name=self.name,
        )
        return dict(zip(self.outputs, results, strict=True))


def _tiles(
    work: Work,
    dtype: Any,
    config: MatmulConfig,
    multiprocessors: int,
    outputs: Mapping[str, Any],
) -> Epilogue:
    """Returns the product with the memory of its epilogue, but without the epilogue's function."""
    product = _GroupedProduct(
        m=work.m,
        n=work.n,
        ks=(work.k // work.terms,) * work.terms,
        dtype=jnp.dtype(dtype),
        blocks=(),
        config=config,
        multiprocessors=multiprocessors,
        products=work.products,
        b_transposed=work.k_last,
        b_columns=work.n,
        group_count=work.groups,
    )
    return Epilogue(
        product=product,
        function=dict,
        vectors={},
        matrices={},
        outputs=outputs,
        column_sums=(),
    )


@dataclass(frozen=True, kw_only=True)
class _GroupedProduct(Product):
    """Static parameters of a grouped launch, and where each group's tiles are."""

    group_count: int
    groups: Groups | None = None
    """Rows and tiles of each group, which only the device knows; None outside of a kernel."""

    @property
    def tile_grid(self) -> tuple[int, int]:
        """Rows of tiles (an upper limit) and columns of tiles."""
        down = self.m // self.config.cta_tile_m + min(self.group_count, self.m)
        return down, pl.cdiv(self.n, self.part_n)

    # --- on the device ----------------------------------------------------------------------------

    def on_device(self, others: Sequence[Any]) -> tuple[Product, Sequence[Any]]:
        found, others = groups.on_device(
            others, groups=self.group_count, rows=self.m, tile_m=self.config.cta_tile_m
        )
        return replace(self, groups=found), others

    def tiles_of_cluster(self) -> jax.Array:
        return self.share_of_cluster(self.groups.tiles() * self.tile_grid[1])

    def position(self, sequence_idx: Any) -> tuple[jax.Array, ...]:
        c = self.config
        down = self.groups.tiles()
        item = lax.axis_index("cluster") + sequence_idx * self.clusters
        m_idx, n_idx = plgpu.planar_snake(item, (down, self.tile_grid[1]), 0, c.band)
        group, within = self.groups.of_tile(m_idx)
        return group.start + within * c.cta_tile_m, n_idx, group

    def copy_step(
        self,
        ring: Ring,
        a_gmem: Sequence[Any],
        b_gmem: Sequence[Any],
        slot: Any,
        step: Step,
        full: Any,
    ) -> None:
        k_start = step.k_idx * self.tile_k
        a = matrix_of(a_gmem[step.term])
        self.a_tile.copy(a, ring.a_smem, slot, step.m_start, k_start, full)
        count = len(b_gmem) // len(self.ks)
        arrays = b_gmem[step.term * count : (step.term + 1) * count]
        for index, b_smem in enumerate(ring.b_smem):
            b = matrix_of(arrays[index % len(arrays)], step.group.index)
            first_column = (index // len(arrays)) * self.n
            start = first_column + step.n_idx * self.part_n
            self.b_tile.copy(b, b_smem, slot, start, k_start, full)

    def store_rows(self, source: Any, ref: Any, place: TilePlace, columns: Any) -> None:
        """Stores a tile's rows before the group's end, in copies of 2^i rows, since sizes are static."""
        tile_m = self.config.tile_m
        rows = jnp.clip(place.group.end - place.m_start, 0, tile_m)

        def copy(start: Any, size: int) -> None:
            plgpu.copy_smem_to_gmem(
                source.at[pl.ds(start, size)],
                ref.at[pl.ds(place.m_start + start, size), columns],
                commit_group=False,
            )

        @pl.when(rows == tile_m)
        def _():
            destination = self.rows_at(ref, place.m_start, columns)
            plgpu.copy_smem_to_gmem(source, destination, commit_group=False)

        @pl.when(rows < tile_m)
        def _():
            for bit in reversed(range((tile_m - 1).bit_length())):
                size = 1 << bit
                start = (rows >> (bit + 1)) << (bit + 1)
                pl.when(rows & size != 0)(functools.partial(copy, start, size))

    def after_tiles(self, wg_idx: Any, epilogue_of: Callable[[TilePlace], Any]) -> None:
        """Stores zeros in the rows before the first group and after the last one."""
        tile_m, across = self.config.tile_m, self.tile_grid[1]
        before, after = self.groups.bounds()
        tiles_before = lax.div(before + (tile_m - 1), jnp.int32(tile_m))
        tiles = tiles_before + lax.div(self.m - after + (tile_m - 1), jnp.int32(tile_m))
        first = lax.axis_index("cluster") * CONSUMERS + wg_idx
        stride = jnp.int32(self.clusters * CONSUMERS)

        def store(index: Any, _: None) -> None:
            item = first + index * stride
            m_idx, n_idx = lax.div(item, jnp.int32(across)), lax.rem(item, jnp.int32(across))
            is_before = m_idx < tiles_before
            start = jnp.where(is_before, 0, after - tiles_before * tile_m) + m_idx * tile_m
            no_group = Group(jnp.int32(-1), start, jnp.where(is_before, before, self.m))
            epilogue_of(TilePlace(wg_idx, start, n_idx, no_group)).store_zeros()

        count = lax.div(jnp.maximum(tiles * across - first, 0) + (stride - 1), stride)
        lax.fori_loop(0, count, store, None)
