"""The window of a convolution, and the boxes of its result that are tiles of a product.

A tile of the product is not 128 rows of a matrix but a box of the result: some images, rows and columns
of the result. For each weight of the window it reads a box of x of the same size, shifted by the
weight's index, by one TMA copy, which fills elements outside of the picture with zeros: the padding.
With strides, x is reshaped so that each coordinate is split into quotient and remainder by the stride:
the elements of a box, a stride apart in x, are then adjacent.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

GROUP = 8
"""Rows in shared memory after which the swizzle repeats: WGMMA operands start at multiples of 8 rows."""
MAX_REACH = 48
"""Largest reach (distance of the first and last row that a window reads) of the plans "rows" and
"resident", in which all weights of a column of the window read one copied box of x."""


@dataclass(frozen=True)
class Window:
    """The window of a convolution over pictures with two or more axes: sizes, padding and strides."""

    kernel: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    """Zeros before and after each axis; negative numbers crop."""
    strides: tuple[int, ...]
    dilation: tuple[int, ...]
    """Distance along each axis between the values that adjacent weights read."""

    @classmethod
    def pointwise(cls, axes: int) -> "Window":
        """Returns the window of a single weight, whose convolution is a matrix product of the pixels."""
        ones = (1,) * axes
        return cls(ones, ((0, 0),) * axes, ones, ones)

    @property
    def taps(self) -> int:
        """Weights of the window."""
        return math.prod(self.kernel)

    @property
    def reach(self) -> tuple[int, ...]:
        """Distance along each axis from the first value that a window reads to its last."""
        return tuple((k - 1) * d for k, d in zip(self.kernel, self.dilation, strict=True))

    @property
    def is_strided(self) -> bool:
        return any(stride > 1 for stride in self.strides)

    @property
    def is_pointwise(self) -> bool:
        """True if each pixel of the result reads one pixel of x, and each pixel of x is read once."""
        return self.taps == 1 and not self.is_strided and not any(map(any, self.padding))

    def result(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the result's spatial sizes for an image of spatial `sizes`."""
        return tuple(
            (size + sum(pads) - reach - 1) // stride + 1
            for size, pads, reach, stride in zip(
                sizes, self.padding, self.reach, self.strides, strict=True
            )
        )

    def why_unfit(self, sizes: tuple[int, ...]) -> str | None:
        """Returns None if boxes of images of these sizes can be copied with padding, else why not.

        TMA drops an axis of one element, and would read that element in place of the padding's zeros.
        A picture with one axis counts as a single row, which has no padding.
        """
        row = (1,) * (len(self.kernel) - len(sizes))
        for size, stride, pads in zip(row + sizes, self.strides, self.padding, strict=True):
            if size <= stride and any(pads):
                return f"it takes no padding of an axis of {size}, which a stride of {stride} spans"
        return None

    def transposed(self) -> "Window":
        """Returns the window of dgrad, which is rotated by 180 degrees; for strides of 1 alone."""
        assert not self.is_strided
        padding = tuple(
            (reach - low, reach - high)
            for reach, (low, high) in zip(self.reach, self.padding, strict=True)
        )
        return Window(self.kernel, padding, self.strides, self.dilation)

    def splits(self, x: jax.Array) -> jax.Array:
        """Returns x reshaped for the copies of a window with strides s: [B, H / s, s, W / s, s * C]."""
        if not self.is_strided:
            return x
        (step_h, step_w), (b, h, w, c) = self.strides, x.shape
        up = ((0, 0), (0, -h % step_h), (0, -w % step_w), (0, 0))
        if up[1][1] or up[2][1]:
            x = jnp.pad(x, up)
        h, w = x.shape[1:3]
        return x.reshape(b, h // step_h, step_h, w // step_w, step_w * c)


@dataclass(frozen=True)
class Boxes:
    """Division of a convolution's result [images, *spatial] into boxes of pixels."""

    sizes: tuple[int, ...]
    """Sizes of the result: number of images, then the size of each spatial axis."""
    box: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Rows of a tile of the product [pixels, features]: the pixels of a box."""
        return math.prod(self.box)

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of boxes along the axis of images and along each spatial axis."""
        return tuple(pl.cdiv(size, box) for size, box in zip(self.sizes, self.box, strict=True))

    @property
    def count(self) -> int:
        return math.prod(self.counts)

    def start(self, box_idx: Any) -> tuple[Any, ...]:
        """Returns a box's start; an index past the last box gives one past the end of the first axis.

        Axes with one element do not count here, as TMA drops them and ignores their start.
        """
        is_axis = [size > 1 or box > 1 for size, box in zip(self.sizes, self.box, strict=True)]
        first = is_axis.index(True)
        starts = []
        for count, size in zip(self.counts[:first:-1], self.box[:first:-1], strict=True):
            starts.append(lax.rem(box_idx, jnp.int32(count)) * size)
            box_idx = lax.div(box_idx, jnp.int32(count))
        return (*[box_idx * 0] * first, box_idx * self.box[first], *reversed(starts))


@functools.cache
def best_box(sizes: tuple[int, ...], rows: int, *, halo: int = 0) -> tuple[int, ...]:
    """Returns the box of `rows` pixels with which the least of x is read; among equals, fewest boxes.

    Args:
      sizes: the result's images, then each axis of its picture.
      rows: a power of two.
      halo: rows of x read in each image beyond the box's own. If not 0, a box's columns are a multiple
        of `GROUP`, and its pixels in an image a multiple of the 64 rows of a WGMMA.
    """

    def powers(limit: int) -> list[int]:
        return [2**i for i in range(limit.bit_length()) if limit % 2**i == 0]

    best: tuple[tuple[float, ...], tuple[int, ...]] | None = None
    for width in powers(rows):
        for height in powers(rows // width):
            rest = rows // (width * height)
            for depth in powers(rest) if len(sizes) == 4 else [1]:
                images = rest // depth
                box = (images, *((depth,) if len(sizes) == 4 else ()), height, width)
                if halo and (width % GROUP or height * width % 64):
                    continue
                if max(box) > 256 - halo:
                    continue
                boxes = Boxes(sizes, box)
                read = boxes.count * rows * (height + halo) / height
                # Ties go to boxes about 16 columns wide, because rows of an image are contiguous in
                # memory.
                key = (read, boxes.count, abs(math.log2(width) - 4))
                if best is None or key < best[0]:
                    best = (key, box)
    assert best is not None
    return best[1]
