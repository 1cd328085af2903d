"""How a row in registers becomes a row of 8 bits: its scale, and what is rounded."""

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
    """The rounding of rows, each by its largest magnitude."""

    name: str
    """One of DTYPES."""
    largest: float
    """The number of that dtype which the largest magnitude of a row becomes."""

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
          tiles, place, row: which tile it is.
          parity: of the exchange, as `RowTiles.total` takes it.
          x: the tile's column blocks, float32.
          values_gmem, scale_gmem: what is written.
          exchange_smem, exchange_barrier: of `RowTiles.exchange_scratch`.
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
        """Zeros get the smallest scale that can be divided by; an infinity and a NaN make it NaN."""
        unit = np.float32(1) / np.float32(self.largest)
        scale = jnp.maximum(largest * unit, jnp.finfo(jnp.float32).tiny)
        return jnp.where(scale < jnp.inf, scale, jnp.nan)

    def _rounded(self, units: jax.Array) -> jax.Array:
        if self.dtype != jnp.int8:
            return jnp.clip(units, -self.largest, self.largest).astype(self.dtype)
        # What the division has rounded up is not beyond the range by half a unit.
        rounded = jnp.round(units)
        return jnp.where(units == units, rounded, 0.0).astype(jnp.int8)
