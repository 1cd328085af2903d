"""Batched products for Hopper: symmetric ones, computed by half, and products with their transposes.

A symmetric product is a I + b S + c X Y^T. A product both ways is X Y^T and its transpose: tf32 WGMMAs
sum along the last axes of both operands, so a result that later products sum along either axis is stored
in both layouts.

The tiles of a symmetric result above its diagonal are those below it, transposed. So only the tiles on
the diagonal and below it are multiplied, and each tile below it is stored twice, once transposed in
registers.

CTAs of a cluster compute vertically adjacent tiles and share their rows of Y, which are read from the L2
once.

The triangle of a matrix's tiles is folded into a rectangle, whose tiles are taken in the usual raster
order; with clusters, it consists of squares of as many tiles a side as a cluster has CTAs. With T tiles
a side, T odd, the rectangle has T rows and (T + 1) / 2 columns: its tile (r, c) is the matrix's (r, c)
where c <= r, and else (T - 1 - r, T - c). With T even it has T + 1 rows and T / 2 columns: its tile (r,
c) is (r - 1, c) where c < r, and else (T - 1 - r, T - 1 - c).
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper
from pallas_kernels.gemm.mainloop import Product, TileEpilogue
from pallas_kernels.gemm.matmul_config import CONSUMERS, MatmulConfig
from pallas_kernels.gemm.operands import matrix_of, tiled
from pallas_kernels.gemm.tiled_product import Block, Ring, Step, TilePlace
from pallas_kernels.hopper import SHARED_MEMORY_BYTES

_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
GRAIN = 64
"""Divisor of a matrix's rows: a transposed tile is copied in pieces of 64."""
_ROW_BYTES = 16
"""Divisor of a row's bytes, as TMA requires."""
TILE = 128
"""Rows of a warpgroup's tile, and its columns in symmetric products, where tiles are transposed."""


def why_unsupported(
    *,
    compute_capability: tuple[int, int] | None,
    shape: tuple[int, int, int],
    dtype: Any,
    allows_tf32: bool,
) -> str | None:
    """Returns None if the kernel can run, else the reason.

    Args:
      compute_capability: of the GPU, or None where there is none.
      shape: of x, [B, M, K].
      dtype: of x.
      allows_tf32: whether float32 may be multiplied with the 10 bits of tf32.
    """
    reason = hopper.why_unfit(compute_capability)
    if reason is not None:
        return reason
    if dtype not in _DTYPES:
        return f"it takes float32, bfloat16 and float16, and x has dtype {jnp.dtype(dtype)}"
    if dtype == jnp.float32 and not allows_tf32:
        return (
            "it multiplies float32 as tf32, and the precision asked for x has more bits than tf32"
        )
    _, rows, columns = shape
    if rows % GRAIN:
        return f"it takes matrices of a multiple of {GRAIN} rows, and x has {rows}"
    row_bytes = columns * jnp.dtype(dtype).itemsize
    if row_bytes % _ROW_BYTES:
        return f"it takes rows of a multiple of {_ROW_BYTES} bytes, and those of x have {row_bytes}"
    return None


def candidates(dtype: Any) -> list[MatmulConfig]:
    """Returns the configs of `symmetric_product` that fit into shared memory, the default one first."""
    slots = ((4, 2, 2), (4, 1, 2), (4, 1, 1), (3, 1, 1), (2, 1, 2))
    configs = [
        MatmulConfig(
            TILE,
            TILE,
            stages=stages,
            epilogue_columns=32,
            read_slots=read,
            write_slots=write,
            cluster=cluster,
        )
        for cluster in (2, 1)
        for stages, read, write in slots
    ]
    return [c for c in configs if _launch((1, TILE, TILE), dtype, c, 1, adds=True).fits]


def product_candidates(dtype: Any) -> list[MatmulConfig]:
    """Returns the configs of `product_both_ways` that fit into shared memory, the default one first."""
    configs = [
        MatmulConfig(
            TILE, tile_n, stages=stages, epilogue_columns=32, write_slots=write, cluster=cluster
        )
        for cluster in (2, 1)
        for tile_n, stages, write in ((192, 4, 1), (TILE, 4, 2), (192, 3, 2), (TILE, 4, 1))
    ]
    return [c for c in configs if _launch((1, TILE, TILE), dtype, c, 1, columns=TILE).fits]


def symmetric_product(
    x: jax.Array,
    y: jax.Array | None = None,
    matrix: jax.Array | None = None,
    coefficients: jax.Array | None = None,
    scales: jax.Array | None = None,
    *,
    is_factor: bool = False,
    multiprocessors: int,
    config: MatmulConfig | None = None,
) -> jax.Array:
    """Returns a I + b S + c X Y^T for each matrix X of x, or X Y^T without S; [B, M, M] of x's dtype.

    Args:
      x: [B, M, K].
      y: [B, M, K] of x's dtype, such that X Y^T is symmetric; None for x.
      matrix: S, [B, M, M] of x's dtype, each of them symmetric, or None.
      coefficients: (a, b, c), float32 [3], with `matrix`.
      scales: factors of each X Y^T, float32 [B], without `matrix`; None for 1.
      is_factor: whether a float32 result is rounded to tf32, the bits that a later product reads. WGMMA
        truncates operands that are not rounded, which makes them smaller on average.
      multiprocessors: SMs of the device.
      config: one of `candidates`; None for the first.
    """
    config = candidates(x.dtype)[0] if config is None else config
    batch, rows, _ = x.shape
    launch = _launch(
        x.shape,
        x.dtype,
        config,
        multiprocessors,
        adds=matrix is not None,
        scales=scales is not None,
        rounds=is_factor,
    )
    others = [a for a in (matrix, coefficients, scales) if a is not None]
    [result] = launch.product.launch(
        (x,),
        () if y is None else (y,),
        others,
        out_type=[jax.ShapeDtypeStruct((batch, rows, rows), x.dtype)],
        scratch=launch.scratch(),
        epilogue=launch.of_tile,
        name="symmetric_product",
    )
    return result


def product_both_ways(
    x: jax.Array,
    y: jax.Array,
    scales: jax.Array | None = None,
    *,
    first_turned: int | None = None,
    is_factor: bool = False,
    multiprocessors: int,
    config: MatmulConfig | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns s X Y^T for each matrix X of x, and its transpose: [B, M, N] and [B, N, M] of x's dtype.

    Args:
      x: [B, M, K].
      y: [B, N, K] of x's dtype.
      scales: s, float32 [B]; None for 1.
      first_turned: matrices before this index get only the product, all others only its transpose; None
        for both of all matrices.
      is_factor: whether float32 results are rounded to tf32, since a product that reads them truncates.
      multiprocessors: SMs of the device.
      config: one of `product_candidates`; None for the first.
    """
    config = product_candidates(x.dtype)[0] if config is None else config
    batch, rows, _ = x.shape
    columns = y.shape[1]
    launch = _launch(
        x.shape,
        x.dtype,
        config,
        multiprocessors,
        columns=columns,
        scales=scales is not None,
        rounds=is_factor,
        first_turned=first_turned,
    )
    result, turned = launch.product.launch(
        (x,),
        (y,),
        [] if scales is None else [scales],
        out_type=[
            jax.ShapeDtypeStruct((batch, rows, columns), x.dtype),
            jax.ShapeDtypeStruct((batch, columns, rows), x.dtype),
        ],
        scratch=launch.scratch(),
        epilogue=launch.of_tile,
        name="product_both_ways",
    )
    return result, turned


def _launch(
    shape: tuple[int, int, int],
    dtype: Any,
    config: MatmulConfig,
    multiprocessors: int,
    *,
    columns: int | None = None,
    adds: bool = False,
    scales: bool = False,
    rounds: bool = False,
    first_turned: int | None = None,
) -> "_Launch":
    """Returns a launch for x of `shape`; `columns` of the result, or None for a symmetric one."""
    batch, rows, sums = shape
    product = _BatchedProduct(
        m=rows,
        n=rows if columns is None else columns,
        ks=(sums,),
        dtype=jnp.dtype(dtype),
        blocks=(Block(0),),
        config=config,
        multiprocessors=multiprocessors,
        b_transposed=True,
        batch=batch,
        is_symmetric=columns is None,
    )
    return _Launch(product, adds, scales, rounds and dtype == jnp.float32, first_turned)


@dataclass(frozen=True, kw_only=True)
class _BatchedProduct(Product):
    """Static parameters of a launch, and the tiles that are multiplied.

    A first row (`m_start`) counts the rows of all matrices, each padded to whole tiles of a cluster, so
    that it identifies the matrix too.
    """

    batch: int
    is_symmetric: bool

    @property
    def sides(self) -> int:
        """Squares of tiles along a matrix's side, each with `cluster` tiles on a side."""
        return pl.cdiv(self.m, TILE * self.config.cluster)

    @property
    def tile_grid(self) -> tuple[int, int]:
        """Rows and columns of the rectangle of tiles; a cluster's tiles count as one row."""
        if not self.is_symmetric:
            return self.sides, pl.cdiv(self.n, self.config.tile_n)
        across = (self.sides + 1) // 2
        return self.sides + 1 - self.sides % 2, across * self.config.cluster

    @property
    def tile_count(self) -> int:
        down, across = self.tile_grid
        return self.batch * down * across

    # --- on the device ----------------------------------------------------------------------------

    def position(self, sequence_idx: Any) -> tuple[jax.Array, jax.Array]:
        c = self.config
        item = lax.axis_index("cluster") + sequence_idx * self.clusters
        of_matrix = self.tile_count // self.batch
        index = lax.rem(item, jnp.int32(of_matrix))
        m_idx, n_idx = plgpu.planar_snake(index, self.tile_grid, 0, c.band)
        if self.is_symmetric:
            side, within = (
                lax.div(n_idx, jnp.int32(c.cluster)),
                lax.rem(n_idx, jnp.int32(c.cluster)),
            )
            m_idx, side = self.fold(m_idx, side)
            n_idx = side * c.cluster + within
        matrix = lax.div(item, jnp.int32(of_matrix))
        row = (matrix * self.sides + m_idx) * c.cluster + lax.axis_index("cta")
        return row * TILE, n_idx

    def fold(self, row: Any, column: Any) -> tuple[Any, Any]:
        """Returns a square's row and column in the matrix, given those in the folded rectangle."""
        even = 1 - self.sides % 2
        below = column <= row - even
        m_idx = jnp.where(below, row - even, self.sides - 1 - row)
        n_idx = jnp.where(below, column, self.sides - even - column)
        return m_idx, n_idx

    def place_of(self, m_start: Any) -> tuple[jax.Array, jax.Array]:
        """Converts a tile's first row, counted over all matrices, to its matrix and the row in it."""
        rows = jnp.int32(self.sides * self.config.cluster * TILE)
        return lax.div(m_start, rows), lax.rem(m_start, rows)

    def copy_step(
        self,
        ring: Ring,
        a_gmem: Sequence[Any],
        b_gmem: Sequence[Any],
        slot: Any,
        step: Step,
        full: Any,
    ) -> None:
        matrix, row = self.place_of(step.m_start)
        k_start = step.k_idx * self.tile_k
        [x], [y] = a_gmem, b_gmem or a_gmem
        self.a_tile.copy(matrix_of(x, matrix), ring.a_smem, slot, row, k_start, full)
        self.b_tile.copy(
            matrix_of(y, matrix),
            ring.b_smem[0],
            slot,
            step.n_idx * self.part_n,
            k_start,
            full,
            collective_axes="cta" if self.shares_b else None,
        )


@dataclass(frozen=True)
class _Launch:
    """A launch: the product, and which terms and results its epilogue has."""

    product: _BatchedProduct
    adds: bool
    """True if a I and b S are added."""
    scales: bool
    """True if each matrix's product is multiplied by a scale."""
    rounds: bool
    """True if the result is rounded to tf32."""
    first_turned: int | None
    """Index of the first matrix that is stored only as its transpose; None if there is none."""

    @property
    def fits(self) -> bool:
        return self.product.shared_bytes(self.scratch(), sums=False) <= SHARED_MEMORY_BYTES

    def scratch(self) -> dict[str, Any]:
        c, dtype = self.product.config, self.product.dtype
        width = c.epilogue_columns

        def stream(slots: int) -> Any:
            return self.product.stream_memory((CONSUMERS, slots), width, dtype)

        scratch: dict[str, Any] = dict(
            out_smem=stream(c.write_slots),
            turned_smem=tiled((CONSUMERS, c.write_slots, width, TILE), dtype, width),
        )
        if self.adds:
            scratch["matrix_smem"] = stream(c.read_slots)
            scratch["matrix_full"] = plgpu.Barrier(num_barriers=CONSUMERS * c.read_slots)
        return scratch

    def of_tile(
        self, refs: Sequence[Any], smem: Mapping[str, Any], place: TilePlace
    ) -> TileEpilogue:
        count = 1 if self.product.is_symmetric else 2
        others, results = refs[:-count], refs[-count:]
        return _EpilogueOfTile(self, others, results, smem, place)


@dataclass(frozen=True)
class _EpilogueOfTile:
    """Epilogue of a tile, which stores it in chunks of columns, untransposed and transposed."""

    launch: _Launch
    others: Sequence[Any]
    """Operands in global memory: S and the coefficients, or the scales."""
    results: Sequence[Any]
    """The product and, if it is not symmetric, its transpose."""
    smem: Mapping[str, Any]
    place: TilePlace

    @property
    def _config(self) -> MatmulConfig:
        return self.launch.product.config

    @property
    def _chunks(self) -> int:
        return self._config.tile_n // self._config.epilogue_columns

    def _columns(self, chunk: int) -> Any:
        """Returns a chunk's columns of the result."""
        width = self._config.epilogue_columns
        return pl.ds(self.place.n_idx * self._config.tile_n + chunk * width, width)

    def prefetch(self) -> None:
        if self.launch.adds:
            for chunk in range(min(self._chunks, self._config.read_slots)):
                self._copy_matrix(chunk)

    def _copy_matrix(self, chunk: int) -> None:
        slot = chunk % self._config.read_slots
        matrix, row = self.launch.product.place_of(self.place.m_start)
        _, copies = self.smem["matrix_smem"]
        plgpu.copy_gmem_to_smem(
            self.others[0].at[matrix, pl.ds(row, TILE), self._columns(chunk)],
            copies.at[self.place.wg_idx, slot],
            self._matrix_full(slot),
        )

    def _matrix_full(self, slot: int) -> Any:
        return self.smem["matrix_full"].at[self.place.wg_idx * self._config.read_slots + slot]

    def run(self, acc: jax.Array) -> None:
        width = self._config.epilogue_columns
        if self.launch.scales:
            matrix, _ = self.launch.product.place_of(self.place.m_start)
            scale = self.others[0][matrix]
        for chunk in range(self._chunks):
            value = acc[:, chunk * width : (chunk + 1) * width]
            if self.launch.adds:
                value = self._added(value, chunk)
            if self.launch.scales:
                value = value * scale
            if self.launch.rounds:
                value = _rounded_to_tf32(value)
            self._store(value.astype(self.launch.product.dtype), chunk)

    def _added(self, value: jax.Array, chunk: int) -> jax.Array:
        """Returns the sum of a I, b S and c times a chunk of the product."""
        slots = self._config.read_slots
        slot = chunk % slots
        plgpu.barrier_wait(self._matrix_full(slot))
        registers, _ = self.smem["matrix_smem"]
        s = plgpu.load(registers.at[self.place.wg_idx, slot], layout=plgpu.Layout.WGMMA)
        s = s.astype(jnp.float32)
        if chunk + slots < self._chunks:
            plgpu.commit_smem()  # The commit waits until all four warps have read the stage.
            self._copy_matrix(chunk + slots)
        a, b, c = (self.others[1][index] for index in range(3))
        _, row = self.launch.product.place_of(self.place.m_start)
        first = self.place.n_idx * TILE + chunk * self._config.epilogue_columns
        rows, columns = (
            plgpu.broadcasted_iota(jnp.int32, value.shape, axis, layout=plgpu.Layout.WGMMA)
            for axis in (0, 1)
        )
        on_diagonal = rows - columns == first - row
        return value * c + s * b + jnp.where(on_diagonal, a, 0.0)

    def _store(self, value: jax.Array, chunk: int) -> None:
        """Starts the copies of a chunk of a tile and of its transpose across the diagonal."""
        slots = self._config.write_slots
        index = self.place.wg_idx, chunk % slots
        registers, copies = self.smem["out_smem"]
        turned = self.smem["turned_smem"].at[index]
        # The first chunk waits for all copies of the previous tile, which have ended by now.
        plgpu.wait_smem_to_gmem(slots - 1 if chunk else 0, wait_read_only=True)
        registers.at[index][...] = value
        turned.transpose((1, 0))[...] = plgpu.layout_cast(value, plgpu.Layout.WGMMA_TRANSPOSED)
        plgpu.commit_smem()
        matrix, row = self.launch.product.place_of(self.place.m_start)
        rows, columns = pl.ds(row, TILE), self._columns(chunk)
        for_copies = (copies.at[index], turned)
        places = ((rows, columns), (columns, rows))
        wanted = self._stored(matrix, row)
        for i, (source, place) in enumerate(zip(for_copies, places, strict=True)):
            destination = self.results[-1 if i else 0].at[matrix, *place]
            store = functools.partial(
                plgpu.copy_smem_to_gmem, source, destination, commit_group=False
            )
            if wanted[i] is None:
                store()
            else:
                pl.when(wanted[i])(store)
        plgpu.commit_smem_to_gmem_group()

    def _stored(self, matrix: Any, row: Any) -> tuple[Any, Any]:
        """Returns traced conditions to store the tile and to store its transpose; None for always."""
        if not self.launch.product.is_symmetric:
            first_turned = self.launch.first_turned
            if first_turned is None:
                return None, None
            return matrix < first_turned, matrix >= first_turned
        column = self.place.n_idx * TILE
        # CTAs of a cluster also multiply some tiles above the diagonal, which are not stored.
        below = None if self._config.cluster == 1 else row >= column
        return below, row != column if below is None else row > column


_DROPPED = (1 << 13) - 1
"""Mask of the float32 bits that tf32 drops: it keeps 10 of the 23 bits after the point."""


def _rounded_to_tf32(value: jax.Array) -> jax.Array:
    """Rounds to the nearest tf32, ties away from zero; NaN, whose bits would overflow, stays."""
    bits = lax.bitcast_convert_type(value, jnp.int32) + (_DROPPED + 1) // 2
    rounded = lax.bitcast_convert_type(bits & ~_DROPPED, jnp.float32)
    return jnp.where(value != value, value, rounded)
