"""Quantisation of rows in registers to 8 bits, with a scale for each row."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.rows.tiles import Place, RowTiles

DTYPES = {"int8": jnp.int8, "float8_e4m3fn": jnp.float8_e4m3fn, "float8_e5m2": jnp.float8_e5m2}


@dataclass(frozen=True)
class RowRounding:
    """The rounding of rows, each scaled by its largest magnitude."""

    name: str
    """Name of the 8-bit dtype, a key of DTYPES."""
    largest: float
    """Number in the 8-bit dtype to which a row's largest magnitude is scaled."""

    @property
    def dtype(self) -> Any:
        return DTYPES[self.name]

    def store(
        self,
        tiles: RowTiles,
        place: Place,
        row: Any,
        parity: Any,
        x: Callable[[int], jax.Array],
        values_gmem: Any,
        scale_gmem: Any,
        exchange_smem: Any,
        exchange_barrier: Any,
    ) -> None:
        """Writes a tile in 8 bits, and the scales of its rows.

        Args:
          tiles, place, row: the division into tiles, the warpgroup and its tile's first row.
          parity: 0 or 1, the half of `exchange_smem` to use; calls must alternate.
          x: function from the index of a column block of the tile to its float32 values.
          values_gmem, scale_gmem: the results in global memory.
          exchange_smem, exchange_barrier: from `RowTiles.exchange_scratch`.
        """
        (largest,) = tiles.total(
            [tiles.line_max(lambda chunk: jnp.abs(x(chunk)))],
            exchange_smem,
            exchange_barrier,
            parity,
            place,
            combine=jnp.maximum,
        )
        scale = self._scale(largest)
        tiles.store_statistic(scale_gmem, place, row, scale)
        for chunk in range(tiles.config.chunks):
            values = self._rounded(x(chunk) / tiles.across_columns(scale))
            tiles.store(values_gmem, place, row, chunk, values)

    def _scale(self, largest: jax.Array) -> jax.Array:
        """Returns the scale of each row, given the rows' largest magnitudes.

        The scale of a row of zeros is the smallest normal float32, that of a row with an infinity or NaN
        is NaN.
        """
        unit = np.float32(1) / np.float32(self.largest)
        scale = jnp.maximum(largest * unit, jnp.finfo(jnp.float32).tiny)
        return jnp.where(scale < jnp.inf, scale, jnp.nan)

    def _rounded(self, units: jax.Array) -> jax.Array:
        if self.dtype != jnp.int8:
            return jnp.clip(units, -self.largest, self.largest).astype(self.dtype)
        # x / scale may exceed int8's 127 by a rounding error, less than 0.5, which `round` removes. NaN,
        # in rows whose scale is NaN, becomes 0.
        rounded = jnp.round(units)
        return jnp.where(units == units, rounded, 0.0).astype(jnp.int8)
