"""The weight gradient (wgrad) for Hopper: x^T @ dy, which sums over many rows.

Several dy may share an x, which is then read once for all of them. The result has few tiles, and the
sums are long: several CTAs compute each tile, each over some of the rows (split-K). The CTAs of a
cluster add their partial sums through each other's shared memory, and XLA adds the clusters' results,
both in a fixed order. The sums of dy over its rows, the gradient of a bias, are computed from the same
tiles in shared memory while the tensor cores multiply them.
"""

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gemm import cost, operands
from pallas_kernels.gemm.cost import WeightWork
from pallas_kernels.gemm.mainloop import Product
from pallas_kernels.gemm.matmul_config import ACCUMULATOR_ELEMENTS, CONSUMERS, MatmulConfig
from pallas_kernels.gemm.operands import OperandTile, block, matrix_of, swizzled_columns
from pallas_kernels.gemm.tiled_product import Ring, Step, TilePlace
from pallas_kernels.hopper import SHARED_MEMORY_BYTES
from pallas_kernels.store import store_unoptimized

GRAIN = 8
"""Divisor of the features of x and of dy: rows of 16-bit numbers then begin at multiples of 16 bytes, as
TMA requires. There may be any number of rows."""
_CHUNK = 32
"""Columns of a tile that are exchanged and stored at a time: 128 bytes of float32."""
PIECE_ROWS = 8
"""Rows of dy in shared memory that a warpgroup loads at a time to sum them."""


@dataclass(frozen=True)
class WeightGradientConfig:
    """Config of the gradient: tiles, pipeline and split-K."""

    tile_m: int = 64
    """Features of x in a warpgroup's accumulators; the two warpgroups have adjacent tiles."""
    tile_n: int = 256
    """Features of dy in a warpgroup's accumulators."""
    stages: int = 4
    """Pipeline stages: K steps whose operands are in flight or in use."""
    parts: int = 1
    """CTAs that share a tile, each of which takes some of the rows (split-K)."""
    cluster: int = 1
    """CTAs of a cluster, which add their partial sums before they store them."""

    def __post_init__(self) -> None:
        if self.tile_m % 64 or self.tile_n % 64 or not 0 < self.tile_n <= 256:
            raise ValueError(
                "WeightGradientConfig: tiles have a multiple of 64 rows and of 64 columns, of which"
                f" there are up to 256, got {self.tile_m} x {self.tile_n}"
            )
        if self.tile_m * self.tile_n > ACCUMULATOR_ELEMENTS:
            raise ValueError(
                f"WeightGradientConfig: a tile may have {ACCUMULATOR_ELEMENTS} elements,"
                f" got {self.tile_m} x {self.tile_n}"
            )
        if self.stages < 1 or self.cluster < 1 or self.parts < 1:
            raise ValueError(
                "WeightGradientConfig: stages, cluster and parts must be at least 1,"
                f" got {self.stages}, {self.cluster} and {self.parts}"
            )
        if self.parts % self.cluster or self.tile_n // _CHUNK % self.cluster:
            raise ValueError(
                f"WeightGradientConfig: the {self.cluster} CTAs of a cluster take equal shares of the"
                f" parts and of a tile's pieces of {_CHUNK} columns, got {self.parts} parts and"
                f" {self.tile_n} columns"
            )

    @property
    def cta_tile_m(self) -> int:
        return CONSUMERS * self.tile_m


def why_unsupported(
    *,
    compute_capability: tuple[int, int] | None,
    dtypes: Mapping[str, Any],
    features: Mapping[str, int],
) -> str | None:
    """Returns None if the wgrad kernel can run, else the reason.

    Args:
      compute_capability: of the GPU, or None where there is none.
      dtypes: dtypes of the operands, keyed by name.
      features: the sizes of the last axes, keyed by name.
    """
    if reason := operands.why_unfit(compute_capability, dtypes):
        return reason
    for name, size in features.items():
        if size % GRAIN:
            return f"it takes multiples of {GRAIN} features, and {name} has {size}"
    return None


_TILES = ((64, 256), (64, 192), (64, 128), (64, 64))
_CLUSTERS = (1, 2)
_MAX_STAGES = 6
_PARTS_TRIED = 2
"""Number of values of `parts` to measure for each tile and cluster size."""


@functools.lru_cache(maxsize=1024)
def fitting(work: WeightWork, multiprocessors: int) -> tuple[WeightGradientConfig, ...]:
    """Returns configs that fit into shared memory, predicted fastest first.

    They are cached, since the layers of a model have the same product.
    """

    def time(config: WeightGradientConfig) -> float:
        return predicted_time(work, config, multiprocessors)

    configs: list[WeightGradientConfig] = []
    for (tile_m, tile_n), cluster in itertools.product(_TILES, _CLUSTERS):
        if tile_n // _CHUNK % cluster:
            continue
        plain = WeightGradientConfig(tile_m, tile_n, 2, cluster, cluster)
        stages = _most_stages(work, plain)
        if stages < 2:
            continue
        tiles = cost.weight_tiles(work, plain.cta_tile_m, tile_n)
        most = min(work.steps, _MOST_ROUNDS * pl.cdiv(multiprocessors, tiles))
        most = min(most, cluster * max(1, _MOST_BYTES_OF_PARTS // (4 * work.elements)))
        several = [
            replace(plain, stages=stages, parts=parts)
            for parts in range(cluster, max(most, cluster) + 1, cluster)
        ]
        configs += sorted(several, key=time)[:_PARTS_TRIED]
    return tuple(sorted(configs, key=time))


_MOST_ROUNDS = 4
"""Largest number of waves of CTAs (split-K parts of all tiles)."""
_MOST_BYTES_OF_PARTS = 2**28
"""Largest number of bytes of the partial gradients that XLA adds."""


def _most_stages(work: WeightWork, config: WeightGradientConfig) -> int:
    """Returns the most pipeline stages that fit into shared memory next to the output's buffers."""

    def fits(stages: int) -> bool:
        launch = _launch(work, replace(config, stages=stages), jnp.bfloat16, jnp.float32, 1)
        return launch.shared_bytes <= SHARED_MEMORY_BYTES

    return next((stages for stages in range(_MAX_STAGES, 0, -1) if fits(stages)), 0)


def predicted_time(work: WeightWork, config: WeightGradientConfig, multiprocessors: int) -> float:
    """Returns the predicted microseconds of the gradient with a config."""
    return cost.weight_gradient(
        work,
        tile=(config.cta_tile_m, config.tile_n),
        parts=config.parts,
        cluster=config.cluster,
        multiprocessors=multiprocessors,
    )


def weight_gradient(
    x: jax.Array,
    dys: Sequence[jax.Array],
    *,
    out_dtype: Any,
    sums_rows: bool,
    multiprocessors: int,
    config: WeightGradientConfig | None = None,
    name: str = "weight_gradient",
) -> tuple[list[jax.Array], list[jax.Array] | None]:
    """Returns x^T @ dy for x [M, K] and each dy [M, N], and the sums of each dy's rows if asked.

    Args:
      x: of bfloat16 or float16.
      dys: of the same dtype, each of its own width.
      out_dtype: dtype of the products; they are summed in float32 and rounded once.
      sums_rows: whether dy is also summed over its rows, in float32.
      multiprocessors: SMs of the device.
      config: tiles, pipeline and split-K; by default those predicted fastest.
      name: the kernel's name in a profile.

    Returns:
      [K, N] for each dy, and [N] for each or None.
    """
    work = WeightWork(
        rows=x.shape[0],
        features=x.shape[1],
        widths=tuple(dy.shape[1] for dy in dys),
        out_bytes=jnp.dtype(out_dtype).itemsize,
        sums=sums_rows,
    )
    config = fitting(work, multiprocessors)[0] if config is None else config
    launch = _launch(work, config, x.dtype, jnp.dtype(out_dtype), multiprocessors)
    product = launch.product
    product.check_shared_bytes(launch.shared_bytes)
    out_type = [
        jax.ShapeDtypeStruct((product.groups, work.features, width), launch.stored_dtype)
        for width in work.widths
    ]
    if sums_rows:
        out_type.append(jax.ShapeDtypeStruct(product.sums_shape, jnp.float32))
    results = list(
        product.launch(
            (x,),
            dys,
            (),
            out_type=out_type,
            scratch=launch.scratch(),
            epilogue=launch.of_tile,
            name=name,
        )
    )
    sums = None
    if sums_rows:
        # XLA adds these few rows of partial sums: a kernel of ours would take longer to start.
        total = jnp.sum(results.pop(), axis=0)
        starts = [first * config.tile_n for first in product.first_tiles[:-1]]
        sums = [
            total[start : start + width] for start, width in zip(starts, work.widths, strict=True)
        ]
    dws = [dw[0] if product.groups == 1 else jnp.sum(dw, axis=0) for dw in results]
    return [dw.astype(out_dtype) for dw in dws], sums


def _launch(
    work: WeightWork,
    config: WeightGradientConfig,
    dtype: Any,
    out_dtype: Any,
    multiprocessors: int,
) -> "_Launch":
    product = _WeightProduct(
        m=work.features,
        n=sum(work.widths),
        ks=(work.rows,),
        dtype=dtype,
        blocks=(),
        config=MatmulConfig(
            tile_m=config.tile_m,
            tile_n=config.tile_n,
            stages=config.stages,
            ping_pong=False,
            cluster=config.cluster,
            epilogue_columns=_CHUNK,
        ),
        multiprocessors=multiprocessors,
        a_transposed=True,
        widths=work.widths,
        parts=config.parts,
        sums_rows=work.sums,
    )
    return _Launch(product, out_dtype)


@dataclass(frozen=True, kw_only=True)
class _WeightProduct(Product):
    """Static parameters of a launch, and how parts of x and dy are copied and summed.

    `m` is the number of the result's rows. With R that number padded to whole tiles, `m_start` is
    part * R + row, so that it identifies the part of split-K too.
    """

    widths: tuple[int, ...]
    """Columns of each dy."""
    parts: int
    sums_rows: bool

    @property
    def b_tile(self) -> OperandTile:
        # TMA writes WGMMA's layout, in tiles of 8 rows x 128 bytes, only if these divide both axes.
        columns = swizzled_columns(self.dtype)
        whole = all(width % columns == 0 for width in self.widths) and self.ks[0] % 8 == 0
        return OperandTile(span=self.part_n, k_last=False, whole_blocks=whole, dtype=self.dtype)

    @property
    def shares_b(self) -> bool:
        """Returns False: a cluster's CTAs have different parts of a tile, so different rows of dy."""
        return False

    @property
    def down(self) -> int:
        """Rows of tiles in the result."""
        return pl.cdiv(self.m, self.config.cta_tile_m)

    @property
    def first_tiles(self) -> list[int]:
        """Index of each dy's first column of tiles, and then the number of all columns of tiles."""
        counts = (pl.cdiv(width, self.config.tile_n) for width in self.widths)
        return list(itertools.accumulate(counts, initial=0))

    @property
    def tile_grid(self) -> tuple[int, int]:
        return self.down, self.first_tiles[-1]

    @property
    def groups(self) -> int:
        """Number of partial results of a tile, one per cluster, which XLA adds."""
        return self.parts // self.config.cluster

    @property
    def tile_count(self) -> int:
        return self.down * self.first_tiles[-1] * self.groups

    @property
    def steps_of_terms(self) -> tuple[int, ...]:
        """K steps of each split-K part; the last parts may have fewer, and add zeros for the rest."""
        return (pl.cdiv(pl.cdiv(self.ks[0], self.tile_k), self.parts),)

    @property
    def sharers(self) -> int:
        """Warpgroups that read the same rows and columns of dy, and divide the summing of its rows."""
        return CONSUMERS * self.down

    @property
    def summers(self) -> int:
        """Number of `sharers` that sum rows: at most the pieces of 8 rows of a K step."""
        return min(self.sharers, self.tile_k // PIECE_ROWS)

    @property
    def sums_shape(self) -> tuple[int, int]:
        """Shape of the partial sums of dy's rows: a row for each part and warpgroup that stores sums."""
        return self.parts * self.summers, self.first_tiles[-1] * self.config.tile_n

    # --- on the device ----------------------------------------------------------------------------

    def position(self, sequence_idx: Any) -> tuple[jax.Array, jax.Array]:
        c, (down, across) = self.config, self.tile_grid
        item = lax.axis_index("cluster") + sequence_idx * self.clusters
        tiles = jnp.int32(down * across)
        m_idx, n_idx = plgpu.planar_snake(lax.rem(item, tiles), (down, across), 0, c.band)
        part = lax.div(item, tiles) * c.cluster + lax.axis_index("cta")
        return (part * down + m_idx) * c.cta_tile_m, n_idx

    def place_of(self, m_start: Any) -> tuple[jax.Array, jax.Array]:
        """Converts a tile's `m_start` to its part of split-K and its first row in the result."""
        rows = jnp.int32(self.down * self.config.cta_tile_m)
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
        part, row = self.place_of(step.m_start)
        k_start = (part * self.k_steps + step.k_idx) * self.tile_k
        self.a_tile.copy(matrix_of(a_gmem[0]), ring.a_smem, slot, row, k_start, full)

        def copy(dy: Any, first: int) -> None:
            start = (step.n_idx - first) * self.part_n
            self.b_tile.copy(matrix_of(dy), ring.b_smem[0], slot, start, k_start, full)

        self.each_dy(step.n_idx, b_gmem, copy)

    def each_dy(self, n_idx: Any, arrays: Sequence[Any], do: Any) -> None:
        """Calls `do(array, first)` for the array, one for each dy, that has the column of tiles `n_idx`.

        `first` is the array's first column of tiles.
        """
        for array, (first, last) in zip(arrays, itertools.pairwise(self.first_tiles), strict=True):
            if len(arrays) == 1:
                do(array, first)
            else:

                @pl.when((n_idx >= first) & (n_idx < last))
                def _(array=array, first=first):
                    do(array, first)

    def no_sums(self) -> Any:
        if not self.sums_rows:
            return None
        tile = self.b_tile
        zero = jnp.zeros((PIECE_ROWS, tile.block_span), jnp.float32)
        return (plgpu.layout_cast(zero, PIECE_LAYOUT),) * tile.blocks

    def sharer(self, place: TilePlace) -> Any:
        """Returns the index of a warpgroup among the `sharers` of the same rows of dy."""
        _, row = self.place_of(place.m_start)
        return lax.div(row, jnp.int32(self.config.tile_m))

    def sum_slot(self, ring: Ring, slot: Any, place: TilePlace, sums: Any) -> Any:
        if not self.sums_rows:
            return None
        pieces = self.tile_k // PIECE_ROWS
        sharer = self.sharer(place)
        for turn in range(pl.cdiv(pieces, self.sharers)):
            piece = sharer + turn * self.sharers
            rows = pl.ds(pl.multiple_of(lax.rem(piece, pieces) * PIECE_ROWS, PIECE_ROWS), 8)
            tiles = [dy for _, dy in self.b_tile.operands(ring.b_smem[0], slot)]
            loaded = [
                plgpu.load(dy.at[rows], layout=PIECE_LAYOUT, optimized=False).astype(jnp.float32)
                for dy in tiles
            ]
            if self.sharers < pieces and pieces % self.sharers:
                counts = (piece < pieces).astype(jnp.float32)
                loaded = [value * counts for value in loaded]
            sums = tuple(total + value for total, value in zip(sums, loaded, strict=True))
        plgpu.commit_smem()  # The fence lets TMA overwrite the stage that was read here.
        return sums


PIECE_LAYOUT = plgpu.Layout.TILED(
    plgpu.Tiling(((PIECE_ROWS, 64), (16,), (4,))),
    warp_dims=(-3,),
    lane_dims=(-4, -2),
    vector_dim=-1,
)
"""Layout in which each warp has a quarter of a piece's columns, and so sums over rows by itself."""


@dataclass(frozen=True)
class _Launch:
    """A wgrad launch: its product, the dtype of its results and the shared memory of its epilogue."""

    product: _WeightProduct
    out_dtype: Any

    @property
    def stored_dtype(self) -> Any:
        """Dtype that the kernel stores: float32 if XLA still adds partial sums of several clusters."""
        return self.out_dtype if self.product.groups == 1 else jnp.dtype(jnp.float32)

    @property
    def slots(self) -> int:
        """Buffers of each warpgroup for pieces (32 columns) of its tile that are being stored."""
        cluster = self.product.config.cluster
        return cluster if cluster > 1 else 2

    def scratch(self) -> dict[str, Any]:
        c = self.product.config
        if c.cluster == 1:
            memory = block((CONSUMERS, self.slots), c.tile_m, _CHUNK, self.stored_dtype)
            return {"out_smem": memory}
        # Mosaic takes references to another CTA's shared memory only to whole arrays, so that each
        # piece is an array of its own.
        views = block((), c.tile_m, _CHUNK, self.stored_dtype).refs
        if self.stored_dtype != jnp.float32:
            views = (*views, *block((), c.tile_m, _CHUNK, jnp.float32).refs)
        pieces = [[plgpu.RefUnion(*views) for _ in range(c.cluster)] for _ in range(CONSUMERS)]
        barrier = plgpu.ClusterBarrier(collective_axes=("cta",), num_barriers=CONSUMERS)
        return {"out_smem": pieces, "left": barrier, "read": barrier}

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory per CTA."""
        return self.product.shared_bytes(self.scratch(), sums=self.product.sums_rows)

    def of_tile(
        self, refs: Sequence[Any], smem: Mapping[str, Any], place: TilePlace
    ) -> "_StoreOfTile":
        count = len(self.product.widths)
        sums = refs[count] if self.product.sums_rows else None
        return _StoreOfTile(self, refs[:count], sums, smem, place)


@dataclass(frozen=True)
class _StoreOfTile:
    """The epilogue of a tile: adds the partial sums of the cluster's CTAs, and stores the total."""

    launch: _Launch
    outputs: Sequence[Any]
    sums: Any
    smem: Mapping[str, Any]
    place: TilePlace

    def prefetch(self) -> None:
        """Does nothing: the epilogue reads no operands."""

    def store_sums(self, sums: Sequence[jax.Array]) -> None:
        product = self.launch.product
        part, _ = product.place_of(self.place.m_start)
        sharer = product.sharer(self.place)
        rows = [jnp.sum(value, axis=0) for value in sums]

        @pl.when(sharer < product.summers)
        def _():
            start = self.place.n_idx * product.part_n
            for row in rows:
                columns = pl.ds(start, row.shape[0])
                store_unoptimized(self.sums.at[part * product.summers + sharer].at[columns], row)
                start += row.shape[0]

    def run(self, acc: jax.Array) -> None:
        product = self.launch.product
        cluster = product.config.cluster
        width = min(product.part_n, max(product.widths))
        for turn in range(pl.cdiv(width, _CHUNK * cluster)):
            if cluster == 1:
                self._store(acc, turn)
            else:
                self._exchange(acc, turn)

    @staticmethod
    def _piece(acc: jax.Array, index: int) -> jax.Array:
        return acc[:, index * _CHUNK : (index + 1) * _CHUNK]

    def _store(self, acc: jax.Array, index: int) -> None:
        """Writes a piece of the tile's columns to shared memory, and starts its copy from there."""
        launch = self.launch
        registers, copies = self.smem["out_smem"]
        place = (self.place.wg_idx, index % launch.slots)
        # The first piece waits for all copies of the previous tile, which have ended by now.
        plgpu.wait_smem_to_gmem(launch.slots - 1 if index else 0, wait_read_only=True)
        registers.at[place][...] = self._piece(acc, index).astype(launch.stored_dtype)
        plgpu.commit_smem()
        self._copy(copies.at[place], index)

    def _exchange(self, acc: jax.Array, turn: int) -> None:
        """Exchanges pieces (32 columns) of the tile; each CTA of the cluster adds and stores one."""
        cluster = self.launch.product.config.cluster
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for wg_idx, pieces in enumerate(self.smem["out_smem"]):

            @pl.when(self.place.wg_idx == wg_idx)
            def _(pieces=pieces):
                for index, (*_, wide, _) in enumerate(pieces):
                    wide[...] = self._piece(acc, turn * cluster + index)

        plgpu.commit_smem()
        self._meet("left")
        for wg_idx, pieces in enumerate(self.smem["out_smem"]):
            for index, piece in enumerate(pieces):
                mine = lax.axis_index("cta") == index
                add = functools.partial(self._add, piece, turn * cluster + index)
                pl.when((self.place.wg_idx == wg_idx) & mine)(add)
        # This CTA's pieces are not overwritten until all CTAs of the cluster have read them.
        self._meet("read")

    def _meet(self, name: str) -> None:
        """Waits until the same warpgroup of every CTA in the cluster has reached this point."""
        plgpu.barrier_arrive(self.smem[name].at[self.place.wg_idx])
        plgpu.barrier_wait(self.smem[name].at[self.place.wg_idx])

    def _add(self, piece: Sequence[Any], index: int) -> None:
        """Adds up a piece over the cluster's CTAs, in their order, and starts its copy to the result."""
        registers, copies, *_ = piece
        total = None
        for cta in range(self.launch.product.config.cluster):
            other = plgpu.cluster_ref(piece[-2], {"cta": jnp.int32(cta)})
            value = plgpu.load(other, layout=plgpu.Layout.WGMMA, optimized=False)
            total = value if total is None else total + value
        assert total is not None
        plgpu.commit_smem()  # The commit waits until all four warps have read the piece.
        registers[...] = total.astype(self.launch.stored_dtype)
        plgpu.commit_smem()
        self._copy(copies, index)

    def _copy(self, piece: Any, index: int) -> None:
        """Starts the copy of a piece, 32 of the tile's columns, to the result of its dy."""
        product = self.launch.product
        part, row = product.place_of(self.place.m_start)
        group = lax.div(part, jnp.int32(product.config.cluster))
        rows = pl.ds(row, product.config.tile_m)

        def copy(output: Any, first: int) -> None:
            start = (self.place.n_idx - first) * product.part_n + index * _CHUNK
            columns = pl.ds(start, _CHUNK)
            plgpu.copy_smem_to_gmem(piece, output.at[group, rows, columns], commit_group=False)

        product.each_dy(self.place.n_idx, self.outputs, copy)
        plgpu.commit_smem_to_gmem_group()
