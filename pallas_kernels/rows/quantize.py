"""Quantisation of rows by their largest magnitude on Hopper: one read, and one scale for each row."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.rows import layer_norm, layer_norm_configs
from pallas_kernels.rows.rounding import RowRounding
from pallas_kernels.rows.tiles import RowConfig, RowTiles


def candidates(rows: int, features: int, itemsize: int) -> list[RowConfig]:
    """Returns configs for x [rows, features], the best guess first; none if no config can run."""
    return layer_norm_configs.forward_candidates(rows, features, itemsize, matrices=1, vectors=0)


def why_unsupported(
    *, compute_capability: tuple[int, int] | None, rows: int, features: int, dtype: Any
) -> str | None:
    """Returns None if x [rows, features] can be quantised, else the reason."""
    return layer_norm.why_unsupported(
        compute_capability=compute_capability, rows=rows, features=features, dtype=dtype
    )


def forward(
    x: jax.Array,
    rounding: RowRounding,
    *,
    multiprocessors: int,
    config: RowConfig | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns values [M, D], x divided by its rows' scales and rounded, and the scales [M]."""
    rows, features = x.shape
    config = config or candidates(rows, features, x.dtype.itemsize)[0]
    tiles = RowTiles.plan(config, rows, features, 1, multiprocessors)
    values, scale = plgpu.kernel(
        _Kernel(tiles, x.dtype, rounding).quantize_rows,
        out_type=(
            jax.ShapeDtypeStruct(tiles.matrix_shape, rounding.dtype),
            jax.ShapeDtypeStruct((rows,), jnp.float32),
        ),
        scratch_types=dict(**tiles.ring_scratch({"x": x.dtype}), **tiles.exchange_scratch(1)),
        **tiles.launch,
    )(tiles.matrix_view(x))
    return values.reshape(x.shape), scale


@dataclass(frozen=True)
class _Kernel:
    """Kernel that quantises the rows of a matrix, divided into `tiles`."""

    tiles: RowTiles
    x_dtype: Any
    rounding: RowRounding

    def quantize_rows(
        self,
        x_gmem,
        values_gmem,
        scale_gmem,
        *,
        exchange_smem,
        exchange_barrier,
        ring_barriers=None,
        x_smem=None,
    ) -> None:
        tiles = self.tiles
        place, layout = tiles.place(), tiles.layout(self.x_dtype.itemsize)

        def quantize_tile(step_idx, row, tile_refs, _):
            self.rounding.store(
                tiles,
                place,
                row,
                lax.rem(step_idx, jnp.int32(2)),
                tiles.per_chunk(lambda chunk: tiles.load(tile_refs[0], chunk, layout)),
                values_gmem,
                scale_gmem,
                exchange_smem,
                exchange_barrier,
            )

        tiles.for_each_tile(place, [(x_gmem, x_smem)], ring_barriers, quantize_tile, None)
