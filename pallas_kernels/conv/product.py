"""A convolution as an implicit product: the boxes of x that a step copies and the WGMMAs that read them.

The product is [pixels of the result, taps x channels] @ [taps x channels, features], where a tap is a
weight of the window. The left operand is never written to memory: each of its tiles is a box of x, which
TMA copies for the tap and the channels of a K step. There are three plans:

- "taps": a K step is one weight of the window and 128 bytes of channels (64 of 16 bits).
- "rows": a K step is all weights of a column of the window. Its box of x has the window's reach (the
  distance of its first and last row) more rows than the result's box, and each weight of the column
  reads it from another row on: x is copied once for each column of the window, not for each weight.
- "resident": as "rows", but the weights stay in shared memory for all tiles of a CTA. This is for few
  channels, where the copies of the weights for each tile would dominate.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.conv.window import Boxes, Window
from pallas_kernels.gemm.mainloop import Product
from pallas_kernels.gemm.matmul_config import CONSUMERS, MatmulConfig
from pallas_kernels.gemm.operands import SWIZZLE_BYTES, matrix_of, tiled
from pallas_kernels.gemm.tiled_product import Ring, Step, part

Plan = Literal["taps", "rows", "resident"]


@dataclass(frozen=True)
class ConvConfig(MatmulConfig):
    """Config of a convolution: tiles, and the plan that says which weights a K step multiplies."""

    plan: Plan = "taps"
    turns_weights: bool = False
    """True if XLA transposes the weights to [taps, features, channels] first. A tile may then be any
    multiple of 8 features wide. For 8-bit weights it is the only layout that WGMMA reads."""


@dataclass(frozen=True, kw_only=True)
class ConvProduct(Product):
    """Static parameters of a launch, and how windows are copied and multiplied.

    The inherited `m` counts the rows of all tiles, and `ks` holds the channels of x.
    """

    window: Window
    boxes: Boxes
    flipped: bool
    """True if the window is rotated by 180 degrees, as in dgrad."""
    first_channels: int = 0
    """Channels of the first array if x is two concatenated arrays; 0 if x is one array."""
    block: tuple[int, int] = (1, 1)
    """Rows and columns of pixels that one row of the product computes, with all their features."""

    @property
    def _plan(self) -> Plan:
        assert isinstance(self.config, ConvConfig)
        return self.config.plan

    @property
    def channel_steps(self) -> int:
        return pl.cdiv(self.ks[0], self.tile_k)

    @property
    def rows_at_once(self) -> int:
        """Number of vertically adjacent weights of the window that one K step multiplies."""
        return 1 if self._plan == "taps" else self.window.kernel[-2]

    @property
    def steps_of_terms(self) -> tuple[int, ...]:
        return (self.window.taps // self.rows_at_once * self.channel_steps,)

    @property
    def is_resident(self) -> bool:
        return self._plan == "resident"

    @property
    def boxes_of_slot(self) -> int:
        return 1 if self.config.ping_pong else CONSUMERS

    @property
    def x_box(self) -> tuple[int, ...]:
        """Sizes of the box of x that a K step copies for a box of the result."""
        *before, height, width = self.boxes.box
        if self.rows_at_once > 1:
            height += self.window.reach[-2]
        return (*before, height, width)

    @property
    def copies_of_slot(self) -> int:
        weights = 0 if self.is_resident else self.rows_at_once * self.b_tile.blocks
        return self.boxes_of_slot + weights

    def operand_memory(self) -> dict[str, Any]:
        stages, columns = self.config.stages, self.tile_k
        leading = (stages, self.boxes_of_slot)
        x_rows = math.prod(self.x_box)
        swizzle = plgpu.SwizzleTransform(SWIZZLE_BYTES)
        x_smem = plgpu.RefUnion(
            tiled((*leading, x_rows, columns), self.dtype, columns),
            plgpu.SMEM((*leading, *self.x_box, columns), self.dtype, transforms=(swizzle,)),
        )
        steps = self.k_steps if self.is_resident else stages
        memory = dict(a_smem=x_smem, b_smem=[self.b_tile.memory(steps * self.rows_at_once)])
        if self.is_resident:
            arrivals = self.window.taps * self.channel_steps * self.b_tile.blocks
            memory["once"] = plgpu.Barrier(num_arrivals=arrivals)
        return memory

    def stream_memory(self, leading: tuple[int, ...], columns: int, dtype: Any) -> plgpu.RefUnion:
        swizzle = plgpu.SwizzleTransform(columns * jnp.dtype(dtype).itemsize)
        return plgpu.RefUnion(
            tiled((*leading, self.config.tile_m, columns), dtype, columns),
            plgpu.SMEM((*leading, *self.boxes.box, columns), dtype, transforms=(swizzle,)),
        )

    # --- on the device ----------------------------------------------------------------------------

    def rows_at(self, ref: Any, m_start: Any, columns: Any) -> Any:
        starts = self.boxes.start(lax.div(m_start, jnp.int32(self.config.tile_m)))
        spans = [pl.ds(start, size) for start, size in zip(starts, self.boxes.box, strict=True)]
        if self.block == (1, 1):
            return ref.at[(*spans, columns)]
        images, rows, across = spans
        features = jnp.int32(ref.shape[-1])
        pixel = lax.div(columns.start, features)
        row, column = pixel * 0, pixel
        # TMA skips a copy if an index is past the end of an axis. For columns past the last feature this
        # is the index of the row in the block or, in a block of one row, whose axis TMA drops, that of
        # the column.
        if self.block[0] > 1:
            across_block = jnp.int32(self.block[1])
            row, column = lax.div(pixel, across_block), lax.rem(pixel, across_block)
        columns = pl.ds(columns.start - pixel * features, columns.size)
        return ref.at[images, rows, row, across, column, columns]

    @property
    def rows(self) -> int:
        return math.prod(self.boxes.sizes)

    def rows_of_tile(self, m_start: Any) -> Any:
        starts = self.boxes.start(lax.div(m_start, jnp.int32(self.config.tile_m)))
        count = jnp.int32(1)
        for start, size, box in zip(starts, self.boxes.sizes, self.boxes.box, strict=True):
            count = count * jnp.minimum(jnp.maximum(size - start, 0), box)
        return count

    def which_rows(self, m_start: Any, shape: tuple[int, int], layout: Any) -> Any:
        down, _ = self.tile_grid
        tiles = down * self.config.cta_tile_m * self.config.cluster // self.config.tile_m
        fits = all(s % b == 0 for s, b in zip(self.boxes.sizes, self.boxes.box, strict=True))
        if fits and tiles == self.boxes.count:
            return None
        starts = self.boxes.start(lax.div(m_start, jnp.int32(self.config.tile_m)))
        # Sizes of a box are powers of two: shifts and masks divide a row's index into coordinates.
        rest = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout)
        exists = None
        for start, size, box in reversed(
            list(zip(starts, self.boxes.sizes, self.boxes.box, strict=True))
        ):
            inside = (rest & (box - 1)) < size - start
            exists = inside if exists is None else exists & inside
            rest = rest >> (box.bit_length() - 1)
        return exists

    def copy_once(self, ring: Ring, b_gmem: Sequence[Any]) -> None:
        if not self.is_resident:
            return

        def step(k_idx, _):
            self._copy_weights(ring, b_gmem, k_idx, k_idx, jnp.int32(0), ring.once)

        lax.fori_loop(0, self.k_steps, step, None)

    def await_once(self, ring: Ring) -> None:
        if self.is_resident:
            plgpu.barrier_wait(ring.once)

    def copy_step(
        self,
        ring: Ring,
        a_gmem: Sequence[Any],
        b_gmem: Sequence[Any],
        slot: Any,
        step: Step,
        full: Any,
    ) -> None:
        first_tap, channel = self._tap_and_channel(step.k_idx)
        first_box = lax.div(step.m_start, jnp.int32(self.config.tile_m))
        for index in range(self.boxes_of_slot):
            starts = self.boxes.start(first_box + index)

            def copy(array, channel, index=index, starts=starts):
                box = self._box_of_x(a_gmem[array], starts, first_tap, channel)
                plgpu.copy_gmem_to_smem(box, ring.a_smem[1].at[slot, index], full)

            if not self.first_channels:
                copy(0, channel)
            else:
                further = channel - self.first_channels
                pl.when(further < 0)(functools.partial(copy, 0, channel))
                pl.when(further >= 0)(functools.partial(copy, 1, further))
        if not self.is_resident:
            self._copy_weights(ring, b_gmem, step.k_idx, slot, step.n_idx, full)

    def _tap_and_channel(self, k_idx: Any) -> tuple[list[Any], Any]:
        """Returns a K step's first weight, as indices along the window's axes, and its first channel.

        K steps go over all weights of the window before the next channels, so that pixels of x that
        several weights read are still in the L2 cache.
        """
        places = jnp.int32(self.window.taps // self.rows_at_once)
        rest = lax.rem(k_idx, places)
        channel = lax.div(k_idx, places) * self.tile_k
        place = []
        for axis, size in reversed(list(enumerate(self.window.kernel))):
            if self.rows_at_once > 1 and axis == len(self.window.kernel) - 2:
                place.append(jnp.int32(0))
                continue
            place.append(lax.rem(rest, jnp.int32(size)))
            rest = lax.div(rest, jnp.int32(size))
        return place[::-1], channel

    def _box_of_x(
        self, x_gmem: Any, starts: Sequence[Any], tap: Sequence[Any], channel: Any
    ) -> Any:
        """Returns the box of x that weight `tap` reads for the box of the result at `starts`."""
        window = self.window
        places = [
            start * stride + index * dilation - low
            for start, stride, index, dilation, (low, _) in zip(
                starts[1:], window.strides, tap, window.dilation, window.padding, strict=True
            )
        ]
        sizes = self.x_box
        if not window.is_strided:
            spans = [pl.ds(s, size) for s, size in zip((starts[0], *places), sizes, strict=True)]
            return x_gmem.at[(*spans, pl.ds(channel, self.tile_k))]
        index = [pl.ds(starts[0], sizes[0])]
        for place, stride, size, (low, _) in zip(
            places, window.strides, sizes[1:], window.padding, strict=True
        ):
            # lax.div rounds towards 0, but indices before the array's start (in the padding) are
            # negative, and their quotients must be rounded down.
            beyond = pl.cdiv(low, stride) * stride
            quotient = lax.div(place + beyond, jnp.int32(stride)) - beyond // stride
            index += [pl.ds(quotient, size), place - quotient * stride]
        *index, last = index
        return x_gmem.at[(*index, pl.ds(last * self.ks[0] + channel, self.tile_k))]

    def _copy_weights(
        self, ring: Ring, b_gmem: Sequence[Any], k_idx: Any, slot: Any, n_idx: Any, full: Any
    ) -> None:
        """Starts the copies of a K step's weights to entry `slot` of their shared memory.

        `slot` is a pipeline stage or, with resident weights, the index of the K step.
        """
        place, channel = self._tap_and_channel(k_idx)
        first: Any = jnp.int32(0)
        for index, size in zip(place, self.window.kernel, strict=True):
            first = first * size + index
        for row in range(self.rows_at_once):
            tap = first + row * self.window.kernel[-1]
            if self.flipped:
                tap = self.window.taps - 1 - tap
            self.b_tile.copy(
                matrix_of(b_gmem[0], tap),
                ring.b_smem[0],
                slot * self.rows_at_once + row,
                n_idx * self.part_n,
                channel,
                full,
                collective_axes="cta" if self.config.cluster > 1 else None,
            )

    def instructions(
        self, acc_ref: Any, ring: Ring, slot: Any, k_idx: Any, share: Any, shares: int
    ) -> Iterator[tuple[Any, Any, Any]]:
        x_smem = ring.a_smem[0]
        step = k_idx if self.is_resident else slot
        *before, height, width = self.x_box
        if self.rows_at_once == 1:
            # A box's pixels are contiguous in shared memory: one WGMMA operand has them all.
            parts, height_of_part = 1, self.boxes.rows // width
        else:
            parts = math.prod(before)
            height_of_part = self.boxes.box[-2]
        rows = height_of_part * width
        for row, index in itertools.product(range(self.rows_at_once), range(parts)):
            start = (index * height + row * self.window.dilation[-2]) * width
            x = x_smem.at[slot, share]
            if rows != self.boxes.rows or self.rows_at_once > 1:
                x = x.at[pl.ds(start, rows)]
            weights = self.b_tile.operands(ring.b_smem[0], step * self.rows_at_once + row)
            for columns, w in weights:
                yield (
                    part(acc_ref, slice(index * rows, (index + 1) * rows), columns),
                    x,
                    w.transpose((1, 0)) if self.b_transposed else w,
                )
