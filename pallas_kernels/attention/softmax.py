"""Online softmax of the forward kernels, which visit one block of keys at a time."""

import functools
import operator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.logits import Logits, Operands, Tile
from pallas_kernels.attention.mask import Extent
from pallas_kernels.attention.memory import WGMMA_ROWS

_MOST = float(jnp.finfo(jnp.float32).max)

VECTOR = plgpu.Layout.WGMMA.reduce(1)
"""Register layout of one number for each row of a tile."""


class Softmax(NamedTuple):
    """Running softmax of 64 rows, in the base of `Logits.logits`, times its multiplier."""

    maximum: jax.Array
    """Running maximum of each row."""
    total: jax.Array
    """Running sums of weights [64, 8]: sum i is over columns i, i + 8, i + 16, ... of one thread."""

    @classmethod
    def start(cls, saves_rest: bool = False) -> "Softmax":
        """Returns the softmax over no keys, of `Logits` that `saves_rest` or not.

        Its maximum is finite, as -inf (a masked logit) minus a maximum of -inf is NaN.
        """
        # A bias may be as low as float32 goes.
        least = -_MOST if saves_rest else -0.5 * _MOST
        lowest = plgpu.layout_cast(jnp.full((WGMMA_ROWS,), least, jnp.float32), VECTOR)
        total = plgpu.layout_cast(jnp.zeros((WGMMA_ROWS, 8), jnp.float32), plgpu.Layout.WGMMA)
        return cls(lowest, total)


class Weighted(NamedTuple):
    """Result of `Weighing` for a tile of 64 queries and a block of keys."""

    weights: jax.Array
    """exp(logit - maximum) [64, keys of the block], after dropout, in the dtype of the operands."""
    softmax: Softmax
    decay: jax.Array
    """Factor of each row by which the sums over earlier blocks are rescaled."""


@dataclass(frozen=True)
class Weighing:
    """Static parameters of the step from a block's products Q K^T to its softmax weights."""

    logits: Logits
    dtype: Any

    def __call__(
        self,
        products: jax.Array,
        tile: Tile,
        operands: Operands,
        extent: Extent,
        is_partial: bool | jax.Array,
        softmax: Softmax,
        value_scale: jax.Array | None = None,
    ) -> Weighted:
        """Adds a block, which needs masking if it `is_partial`, to the running softmax.

        The weights are multiplied by `value_scale`, the scales of 8-bit values as a tile, if given.
        """
        logits = self.logits
        x = logits.logits_if_masked(products, tile, operands, extent, is_partial)
        scaled = _times(jnp.max(x, axis=1), logits.multiplier)
        shift = logits.shift(tile, operands)
        maximum = jnp.maximum(softmax.maximum, scaled if shift is None else scaled + shift)
        decay = logits.exp(softmax.maximum - maximum)
        of_block = maximum if shift is None else maximum - shift
        weights = logits.exp(_times(x, logits.multiplier) - across(of_block, products.shape))
        # Each thread adds the weights of its own columns, which are 8 apart in WGMMA's layout. The sums
        # of the four threads of a row are added once, after the last block.
        total = softmax.total * across(decay, softmax.total.shape)
        columns = range(0, products.shape[1], 8)
        total += functools.reduce(operator.add, [weights[:, c : c + 8] for c in columns])
        if logits.dropout_rate > 0:
            weights = logits.dropped(weights, tile, operands)
        if value_scale is not None:
            weights = weights * value_scale
        return Weighted(weights.astype(self.dtype), Softmax(maximum, total), decay)


def across(vector: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Broadcasts a vector with one number per row over the columns of a tile of `shape`."""
    return lax.broadcast_in_dim(vector, shape, [0])


def _times(x: jax.Array, factor: float) -> jax.Array:
    return x if factor == 1.0 else x * factor
