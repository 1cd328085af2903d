"""Which values of a picture a convolution takes: its window, and the boxes of results that are tiles.

A tile of the product is not 128 rows of a matrix but a box of the picture: some images, rows and columns
of the result. What it takes of x for one weight of the window is a box of the same size elsewhere, which
the copy engine brings as it is: beyond the edges of the picture it fills with zeros, which are the
padding. A picture that is read in steps is seen as one with further axes, for what is left over when a
coordinate is divided by the step, and in it the box is dense again.
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
"""Rows of a matrix that swizzling treats as one: where a tile is read from, it begins at one of them."""
MAX_REACH = 48
"""Rows from a window's first weight to its last where all weights of a column read one box of x."""


@dataclass(frozen=True)
class Window:
    """The window of a convolution over pictures with two or more axes, and its steps."""

    kernel: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    """Zeros before and after each axis; negative ones crop."""
    strides: tuple[int, ...]
    dilation: tuple[int, ...]
    """The distance of the values that neighbouring weights meet."""

    @classmethod
    def pointwise(cls, axes: int) -> "Window":
        """The window of a single weight, whose convolution is a matrix product of the pixels."""
        ones = (1,) * axes
        return cls(ones, ((0, 0),) * axes, ones, ones)

    @property
    def taps(self) -> int:
        """Weights of the window."""
        return math.prod(self.kernel)

    @property
    def reach(self) -> tuple[int, ...]:
        """Values from the first that a window takes of an axis to its last."""
        return tuple((k - 1) * d for k, d in zip(self.kernel, self.dilation, strict=True))

    @property
    def is_strided(self) -> bool:
        return any(stride > 1 for stride in self.strides)

    @property
    def is_pointwise(self) -> bool:
        """Whether each value of the result is made of one pixel, and each pixel makes one."""
        return self.taps == 1 and not self.is_strided and not any(map(any, self.padding))

    def result(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """The size of the result for a picture of these sizes."""
        return tuple(
            (size + sum(pads) - reach - 1) // stride + 1
            for size, pads, reach, stride in zip(
                sizes, self.padding, self.reach, self.strides, strict=True
            )
        )

    def why_unfit(self, sizes: tuple[int, ...]) -> str | None:
        """None where boxes of a picture of these sizes can be copied with their padding, else why not.

        A copy leaves out an axis of one element, and would find its one element where zeros should be.
        A picture with one axis is one with a row, which nothing pads.
        """
        row = (1,) * (len(self.kernel) - len(sizes))
        for size, stride, pads in zip(row + sizes, self.strides, self.padding, strict=True):
            if size <= stride and any(pads):
                return f"it takes no padding of an axis of {size}, which a stride of {stride} spans"
        return None

    def transposed(self) -> "Window":
        """The window of the gradient of x, whose weights are turned around; only with strides of 1."""
        assert not self.is_strided
        padding = tuple(
            (reach - low, reach - high)
            for reach, (low, high) in zip(self.reach, self.padding, strict=True)
        )
        return Window(self.kernel, padding, self.strides, self.dilation)

    def splits(self, x: jax.Array) -> jax.Array:
        """Returns x as the copies of a strided window see it, [B, H / s, s, W / s, s * C]."""
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
    """The result, cut into boxes: images, then each axis of the picture."""

    sizes: tuple[int, ...]
    """Of the result: images, then each axis of the picture."""
    box: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Of a tile of the product: the elements of a box."""
        return math.prod(self.box)

    @property
    def counts(self) -> tuple[int, ...]:
        """Boxes along each axis."""
        return tuple(pl.cdiv(size, box) for size, box in zip(self.sizes, self.box, strict=True))

    @property
    def count(self) -> int:
        return math.prod(self.counts)

    def start(self, box_idx: Any) -> tuple[Any, ...]:
        """Where a box begins; beyond the last one they begin beyond the end of the first axis.

        An axis where all there is is one element does not count as one: a copy leaves it out, and with
        it where the copy was to begin.
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
    """The box of so many elements that covers a result with the fewest of them, and reads the least.

    Args:
      sizes: images, then each axis of the picture.
      rows: a power of two.
      halo: rows of the picture that are read beyond the box, of each image. Its columns are then a
        multiple of `GROUP`, and what it has of an image is a multiple of the 64 rows of an instruction.
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
                # Long rows of a picture lie together in memory.
                key = (read, boxes.count, abs(math.log2(width) - 4))
                if best is None or key < best[0]:
                    best = (key, box)
    assert best is not None
    return best[1]
