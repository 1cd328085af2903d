"""The config of a product on Hopper: tiles, pipeline and raster order."""

from dataclasses import dataclass

CONSUMERS = 2
"""Consumer warpgroups of a CTA; the warpgroup after them is the producer."""
ACCUMULATOR_ELEMENTS = 128 * 192
"""Largest number of elements of a warpgroup's tile: 192 of a thread's 232 registers. With 256 they
spill."""


@dataclass(frozen=True)
class MatmulConfig:
    """Tiles, pipeline and raster order of a product."""

    tile_m: int = 128
    """Rows of a warpgroup's accumulators."""
    tile_n: int = 192
    """Columns of a warpgroup's accumulators, split equally among products that share a pass over `a`."""
    stages: int = 4
    """Pipeline stages: K steps whose operand tiles are in flight or in use."""
    ping_pong: bool = True
    """True if the consumers hold different output tiles; false if they hold halves of one tile of twice
    the height."""
    cluster: int = 1
    """CTAs of a cluster, with vertically adjacent tiles; each multicasts a part of b's tile."""
    epilogue_columns: int = 64
    """Columns of a chunk, the part of a tile that the epilogue processes at a time."""
    read_slots: int = 1
    """Input buffers of the epilogue: chunks that it prefetches of each matrix that it reads."""
    write_slots: int = 1
    """Output buffers of the epilogue, in chunks of each matrix that it writes."""
    band: int = 8
    """Rows of tiles in a group of the raster order: a group's tiles share columns of b in the L2."""
    pads_columns: bool = False
    """True if XLA first pads b's width to whole blocks of 128 bytes. A WGMMA then covers all of a tile's
    columns, not one block of them. With many rows this saves more time than the padded copy takes."""

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
