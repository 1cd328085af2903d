"""Rows of attention's output that a CTA merges from outputs over parts of the keys, one row a warp."""

from dataclasses import dataclass
from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.shape import Shape
from pallas_kernels.hopper import LANES, WARPS

_WIDEST = 128
"""Largest number of columns of the output [..., V] that a CTA merges."""


@dataclass(frozen=True)
class MergedRows:
    """Columns of four rows of the output [..., V], which one CTA merges."""

    shape: Shape
    dtype: Any
    """Dtype of the output."""

    @property
    def columns(self) -> int:
        """Columns of the output that a CTA merges: 64 or 128."""
        return _WIDEST if self.shape.value_size > _WIDEST // 2 else _WIDEST // 2

    @property
    def chunks(self) -> int:
        """CTAs that share the columns of a row."""
        return -(-self.shape.value_size // self.columns)

    def layout(self) -> Any:
        """Returns the register layout of [4, columns]: a row in each warp, contiguous in a lane."""
        vector = self.columns // LANES
        return plgpu.Layout.TILED(
            plgpu.Tiling(((WARPS, self.columns), (vector,))),
            warp_dims=(-3,),
            lane_dims=(-2,),
            vector_dim=-1,
        )
