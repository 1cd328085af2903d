"""wgrad of a convolution for Hopper: a product over the pixels of all images.

For each weight of the window it is x^T @ dz, summed over the pixels of dz whose pixel of x lies in the
image. A tile of the product has 64 channels of x and all weights of a column of the window: each weight
multiplies the same dz with the same box of x, read from another row on. There are few tiles and many
pixels, so several CTAs compute each tile, each over some of the pixels (split-K); XLA adds their results
in a fixed order.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper
from pallas_kernels.conv import cost
from pallas_kernels.conv.window import MAX_REACH, Boxes, Window, best_box
from pallas_kernels.gemm.epilogue import Epilogue
from pallas_kernels.gemm.mainloop import Product
from pallas_kernels.gemm.matmul_config import ACCUMULATOR_ELEMENTS, MatmulConfig
from pallas_kernels.gemm.operands import SWIZZLE_BYTES, swizzled_columns, tiled
from pallas_kernels.gemm.tiled_product import Ring, Step, part

CHANNELS = 64
"""Channels of x in a tile: the 64 rows of a WGMMA, and 128 swizzled bytes of 16-bit values."""


@dataclass(frozen=True)
class ConvWeightGradientConfig:
    """Tiles, pipeline stages and split of the summed pixels (split-K) of wgrad; see `MatmulConfig`."""

    tile_n: int = 128
    """Features of a tile."""
    pixels: int = 64
    """Pixels that a K step sums over."""
    stages: int = 4
    """Pipeline stages: K steps whose operands are in flight or in use."""
    parts: int | None = None
    """CTAs that share a tile, each with some of the pixels; None for the number predicted fastest."""

    def __post_init__(self) -> None:
        if self.pixels < 1 or (self.parts is not None and self.parts < 1):
            raise ValueError(
                "ConvWeightGradientConfig: pixels and parts must be at least 1, got"
                f" {self.pixels} and {self.parts}; pass another config"
            )


@dataclass(frozen=True, kw_only=True)
class _WeightProduct(Product):
    """Static parameters of a launch, and how boxes of x and dz are copied and multiplied.

    The inherited `m` counts the rows of all tiles: a tile has one for each weight of a window's column
    and each channel. `ks` holds the pixels of all boxes.
    """

    window: Window
    boxes: Boxes
    channels: int
    parts: int

    @property
    def rows_at_once(self) -> int:
        return self.window.kernel[-2]

    @property
    def channel_tiles(self) -> int:
        return pl.cdiv(self.channels, CHANNELS)

    @property
    def columns_of_window(self) -> int:
        return self.window.taps // self.rows_at_once

    @property
    def steps_of_terms(self) -> tuple[int, ...]:
        """Boxes of pixels that a CTA sums, as a tuple of one number.

        The last CTA of a tile may have fewer; its copies past the last box bring zeros.
        """
        return (pl.cdiv(self.boxes.count, self.parts),)

    @property
    def x_box(self) -> tuple[int, ...]:
        *before, height, width = self.boxes.box
        return (*before, height + self.window.reach[-2], width)

    @property
    def copies_of_slot(self) -> int:
        return 1 + self.part_n // self._columns

    @property
    def _columns(self) -> int:
        return swizzled_columns(self.dtype)

    def operand_memory(self) -> dict[str, Any]:
        return dict(
            a_smem=self._memory(1, self.x_box),
            b_smem=[self._memory(self.part_n // self._columns, self.boxes.box)],
        )

    def _memory(self, blocks: int, box: tuple[int, ...]) -> plgpu.RefUnion:
        """Returns buffers [stages, blocks, pixels of `box`, 128 bytes of channels]."""
        leading = (self.config.stages, blocks)
        swizzle = plgpu.SwizzleTransform(SWIZZLE_BYTES)
        return plgpu.RefUnion(
            tiled((*leading, math.prod(box), self._columns), self.dtype, self._columns),
            plgpu.SMEM((*leading, *box, self._columns), self.dtype, transforms=(swizzle,)),
        )

    def stream_memory(self, leading: tuple[int, ...], columns: int, dtype: Any) -> plgpu.RefUnion:
        swizzle = plgpu.SwizzleTransform(columns * jnp.dtype(dtype).itemsize)
        rows = (self.rows_at_once, CHANNELS)
        return plgpu.RefUnion(
            tiled((*leading, self.config.tile_m, columns), dtype, columns),
            plgpu.SMEM((*leading, *rows, columns), dtype, transforms=(swizzle,)),
        )

    # --- on the device ----------------------------------------------------------------------------

    def _place(self, m_start: Any) -> tuple[Any, Any, Any]:
        """Returns a tile's split-K index, its column of the window, and its first channel of x."""
        tile = lax.div(m_start, jnp.int32(self.config.tile_m))
        channel = lax.rem(tile, jnp.int32(self.channel_tiles)) * CHANNELS
        tile = lax.div(tile, jnp.int32(self.channel_tiles))
        column = lax.rem(tile, jnp.int32(self.columns_of_window))
        return lax.div(tile, jnp.int32(self.columns_of_window)), column, channel

    def rows_at(self, ref: Any, m_start: Any, columns: Any) -> Any:
        part_idx, column, channel = self._place(m_start)
        rows = pl.ds(0, self.rows_at_once)
        return ref.at[part_idx, column, rows, pl.ds(channel, CHANNELS), columns]

    def copy_step(
        self,
        ring: Ring,
        a_gmem: Sequence[Any],
        b_gmem: Sequence[Any],
        slot: Any,
        step: Step,
        full: Any,
    ) -> None:
        part_idx, column, channel = self._place(step.m_start)
        starts = self.boxes.start(part_idx * self.k_steps + step.k_idx)
        spans = [pl.ds(start, size) for start, size in zip(starts, self.boxes.box, strict=True)]
        for index in range(self.part_n // self._columns):
            features = pl.ds(step.n_idx * self.part_n + index * self._columns, self._columns)
            plgpu.copy_gmem_to_smem(
                b_gmem[0].at[(*spans, features)], ring.b_smem[0][1].at[slot, index], full
            )
        window = self.window
        place = [jnp.int32(0), lax.rem(column, jnp.int32(window.kernel[-1]))]
        if len(window.kernel) > 2:
            place.insert(0, lax.div(column, jnp.int32(window.kernel[-1])))
        spans = [pl.ds(starts[0], self.x_box[0])]
        for start, size, index, dilation, (low, _) in zip(
            starts[1:], self.x_box[1:], place, window.dilation, window.padding, strict=True
        ):
            spans.append(pl.ds(start + index * dilation - low, size))
        plgpu.copy_gmem_to_smem(
            a_gmem[0].at[(*spans, pl.ds(channel, CHANNELS))], ring.a_smem[1].at[slot, 0], full
        )

    def instructions(
        self, acc_ref: Any, ring: Ring, slot: Any, k_idx: Any, share: Any, shares: int
    ) -> Iterator[tuple[Any, Any, Any]]:
        del k_idx, share
        assert shares == 1
        *before, height, width = self.x_box
        pixels = self.boxes.box[-2] * width
        images = math.prod(before)
        for index, row in itertools.product(range(images), range(self.rows_at_once)):
            start = (index * height + row * self.window.dilation[-2]) * width
            x = ring.a_smem[0].at[slot, 0, pl.ds(start, pixels)]
            for column in range(self.part_n // self._columns):
                dz = ring.b_smem[0][0].at[slot, column]
                if images > 1:
                    dz = dz.at[pl.ds(index * pixels, pixels)]
                rows = slice(row * CHANNELS, (row + 1) * CHANNELS)
                columns = slice(column * self._columns, (column + 1) * self._columns)
                yield part(acc_ref, rows, columns), x.transpose((1, 0)), dz


def _best_parts(
    tiles: int, boxes: int, multiprocessors: int, of_parts: Callable[..., float]
) -> int:
    """Returns into how many CTAs to split each tile's sum (split-K) for the least predicted time.

    Args:
      tiles: the gradient's tiles.
      boxes: the K steps of each tile, over all of its CTAs.
      of_parts: microseconds, given `steps`, `rounds` (waves) and `parts`.
    """

    def time(parts: int) -> float:
        rounds = pl.cdiv(tiles * parts, multiprocessors)
        return of_parts(steps=pl.cdiv(boxes, parts), rounds=rounds, parts=parts)

    most = min(boxes, 4 * pl.cdiv(multiprocessors, tiles))
    return min(range(1, most + 1), key=time)


def why_unsupported(window: Window) -> str | None:
    """Returns None if the wgrad kernel takes a convolution that `conv` takes, else the reason."""
    if window.is_strided:
        return "the rows that a strided window reads are not adjacent in memory"
    if window.is_pointwise:
        return "a window of one weight is a matrix product"
    if window.reach[-2] > MAX_REACH:
        return f"the window may reach {MAX_REACH} rows, and reaches {window.reach[-2]}"
    if window.kernel[-2] * CHANNELS * swizzled_columns(jnp.bfloat16) > ACCUMULATOR_ELEMENTS:
        return f"{window.kernel[-2]} rows of weights do not fit into the accumulators"
    return None


def fitting(
    x: Any, dz: Any, *, window: Window, multiprocessors: int
) -> list[ConvWeightGradientConfig]:
    """Returns configs that fit into shared memory, predicted fastest first."""
    rows = window.kernel[-2] * CHANNELS
    configs = [
        ConvWeightGradientConfig(tile_n, pixels, stages)
        for tile_n in (64, 128)
        if (tile_n == 64 or dz.shape[-1] > 64) and rows * tile_n <= ACCUMULATOR_ELEMENTS
        for pixels, stages in ((64, 8), (64, 6), (128, 4), (128, 3), (64, 4), (64, 3), (64, 2))
    ]
    calls = {config: _call(x, dz, window, multiprocessors, config) for config in configs}
    fits = [c for c in configs if calls[c].shared_bytes <= hopper.SHARED_MEMORY_BYTES]
    return sorted(fits, key=lambda config: _time(calls[config].product))


def _time(product: Product) -> float:
    assert isinstance(product, _WeightProduct)
    rounds = pl.cdiv(product.tile_count, product.multiprocessors)
    of_parts = _of_parts(product.window, product.channels, product.n, product.config, product.boxes)
    return of_parts(steps=product.k_steps, rounds=rounds, parts=product.parts)


def _of_parts(
    window: Window, channels: int, features: int, config: MatmulConfig, boxes: Boxes
) -> Callable[..., float]:
    """Returns a function from K `steps`, `rounds` (waves) and `parts` (split-K) to microseconds."""
    return functools.partial(
        cost.weight_gradient,
        multiplications=config.tile_m * config.tile_n * boxes.rows,
        wide=config.tile_n > CHANNELS,
        pixels_in_ring=config.stages * boxes.rows,
        sums=window.taps * channels * features,
    )


def weight_gradient(
    x: jax.Array,
    dz: jax.Array,
    *,
    window: Window,
    multiprocessors: int,
    config: ConvWeightGradientConfig | None = None,
) -> jax.Array:
    """Returns wgrad [*kernel, C, F] in float32, from x [B, *spatial, C] and dz [B, *spatial', F]."""
    if config is None:
        config = fitting(x, dz, window=window, multiprocessors=multiprocessors)[0]
    whole = _call(x, dz, window, multiprocessors, config)
    product = whole.product
    assert isinstance(product, _WeightProduct)
    product.check_shared_bytes(whole.shared_bytes)
    shape = (product.parts, product.columns_of_window, product.rows_at_once, x.shape[-1])
    (parts,) = product.launch(
        (x,),
        (dz,),
        (),
        out_type=[jax.ShapeDtypeStruct((*shape, dz.shape[-1]), jnp.float32)],
        scratch=whole.scratch(),
        epilogue=whole.of_tile,
        name="conv_weight_gradient",
    )
    *before, rows, columns = window.kernel
    dw = jnp.sum(parts, axis=0).reshape(*before, columns, rows, *parts.shape[-2:])
    return dw.swapaxes(-3, -4)


def _call(
    x: Any,
    dz: Any,
    window: Window,
    multiprocessors: int,
    config: ConvWeightGradientConfig,
) -> Epilogue:
    result = dz.shape[:-1]
    boxes = Boxes(result, best_box(result, config.pixels, halo=max(1, window.reach[-2])))
    tile_m = window.kernel[-2] * CHANNELS
    channels, features = x.shape[-1], dz.shape[-1]
    tiles = window.taps // window.kernel[-2] * pl.cdiv(channels, CHANNELS)
    across = pl.cdiv(features, config.tile_n)
    tiling = MatmulConfig(
        tile_m=tile_m, tile_n=config.tile_n, stages=config.stages, epilogue_columns=32
    )
    parts = config.parts or _best_parts(
        tiles * across,
        boxes.count,
        multiprocessors,
        _of_parts(window, channels, features, tiling, boxes),
    )
    product = _WeightProduct(
        m=min(parts, boxes.count) * tiles * tile_m,
        n=features,
        ks=(boxes.count * config.pixels,),
        dtype=x.dtype,
        blocks=(),
        config=tiling,
        multiprocessors=multiprocessors,
        a_transposed=True,
        b_columns=features,
        window=window,
        boxes=boxes,
        channels=channels,
        parts=min(parts, boxes.count),
    )
    return Epilogue(
        product=product,
        function=lambda dw: {"dw": dw},
        vectors={},
        matrices={},
        outputs={"dw": jnp.float32},
        column_sums=(),
    )
