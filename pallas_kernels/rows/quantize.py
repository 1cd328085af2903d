"""Rows quantised by their largest magnitude on Hopper: read once, and written with a scale each."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.rows import layer_norm
from pallas_kernels.rows.tiles import RowConfig, RowTiles

DTYPES = {"int8": jnp.int8, "float8_e4m3fn": jnp.float8_e4m3fn, "float8_e5m2": jnp.float8_e5m2}


def candidates(rows: int, features: int, itemsize: int) -> list[RowConfig]:
    """Configs for x [rows, features], the best guess first; none where no config can run."""
    return layer_norm.forward_candidates(rows, features, itemsize, matrices=1, vectors=0)


def why_unsupported(
    *, compute_capability: tuple[int, int] | None, rows: int, features: int, dtype: Any
) -> str | None:
    """None where x [rows, features] of a dtype can be quantised, else why not."""
    return layer_norm.why_unsupported(
        compute_capability=compute_capability, rows=rows, features=features, dtype=dtype
    )


def forward(
    x: jax.Array,
    dtype: str,
    largest: float,
    *,
    multiprocessors: int,
    config: RowConfig | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(values [M, D], scale [M]) of x [M, D]: x divided by its row's scale, rounded to `dtype`.

    Args:
      largest: the number of `dtype` that the largest magnitude of a row becomes.
    """
    rows, features = x.shape
    config = config or candidates(rows, features, x.dtype.itemsize)[0]
    tiles = RowTiles.plan(config, rows, features, 1, multiprocessors)
    values, scale = plgpu.kernel(
        _Kernel(tiles, x.dtype, DTYPES[dtype], largest).quantize_rows,
        out_type=(
            jax.ShapeDtypeStruct(tiles.matrix_shape, DTYPES[dtype]),
            jax.ShapeDtypeStruct((rows,), jnp.float32),
        ),
        scratch_types=dict(**tiles.ring_scratch({"x": x.dtype}), **tiles.exchange_scratch(1)),
        **tiles.launch,
    )(tiles.matrix_view(x))
    return values.reshape(x.shape), scale


@dataclass(frozen=True)
class _Kernel:
    """The kernel over `tiles`."""

    tiles: RowTiles
    x_dtype: Any
    dtype: Any
    largest: float

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
            x = tiles.per_chunk(lambda chunk: tiles.load(tile_refs[0], chunk, layout))
            (largest,) = tiles.total(
                [tiles.line_max(lambda chunk: jnp.abs(x(chunk)))],
                exchange_smem,
                exchange_barrier,
                lax.rem(step_idx, jnp.int32(2)),
                place,
                combine=jnp.maximum,
            )
            scale = self._scale(largest)
            tiles.store_statistic(scale_gmem, place, row, scale)
            for chunk in range(tiles.config.chunks):
                values = self._rounded(x(chunk) / tiles.across_columns(scale))
                tiles.store(values_gmem, place, row, chunk, values)

        tiles.for_each_tile(place, [(x_gmem, x_smem)], ring_barriers, quantize_tile, None)

    def _scale(self, largest: jax.Array) -> jax.Array:
        """Zeros get the smallest scale that can be divided by; an infinity and a NaN make it NaN."""
        scale = jnp.maximum(largest / self.largest, jnp.finfo(jnp.float32).tiny)
        return jnp.where(scale < jnp.inf, scale, jnp.nan)

    def _rounded(self, units: jax.Array) -> jax.Array:
        if self.dtype != jnp.int8:
            return jnp.clip(units, -self.largest, self.largest).astype(self.dtype)
        # What the division has rounded up is not beyond the range by half a unit.
        rounded = jnp.round(units)
        return jnp.where(units == units, rounded, 0.0).astype(jnp.int8)
