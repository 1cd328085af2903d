"""dgrad of a strided convolution for Hopper: a convolution of dz that writes blocks of pixels of dx.

Along an axis with stride s, output o reads inputs s o + r - low, where r is a weight's index and low is
the number of zeros before x. So dx[s q + p] sums w[r] dz[q + (p + low - r) / s] over the weights r for
which s divides p + low - r. The block of s pixels of a q depends on about k / s values of dz: it is a
convolution of dz by a window of that size, with s times the channels of x as features, and zeros where
a pixel's sum lacks a value of dz. A window of 3 x 3 with strides of 2 takes 16 matrix products, of which
9 are needed; with zeros inserted between the values of dz it would take 36.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.conv import conv as pallas_conv
from pallas_kernels.conv.window import Window


@dataclass(frozen=True)
class _Axis:
    """One axis of a strided window, rewritten as a window over dz with stride 1.

    Each result of that window is a block of `stride` pixels of dx.
    """

    first: int
    """Index in dz that the window's first element reads, minus the index of the block of dx."""
    places: tuple[tuple[int | None, ...], ...]
    """places[i][p] is the index, in the strided window, of the weight by which element i of the window
    over dz is multiplied for pixel p of a block of dx; None for a zero."""

    @classmethod
    def of(cls, kernel: int, stride: int, low: int) -> "_Axis":
        met = {
            ((value + low - place) // stride, value): place
            for value in range(stride)
            for place in range((value + low) % stride, kernel, stride)
        }
        distances = [distance for distance, _ in met]
        first = min(distances)
        return cls(
            first,
            tuple(
                tuple(met.get((distance, value)) for value in range(stride))
                for distance in range(first, max(distances) + 1)
            ),
        )


def _axes(window: Window) -> list[_Axis]:
    return [
        _Axis.of(kernel, stride, low)
        for kernel, stride, (low, _) in zip(
            window.kernel, window.strides, window.padding, strict=True
        )
    ]


def _block(window: Window) -> tuple[int, int]:
    rows, columns = window.strides
    return rows, columns


def window_of_blocks(window: Window, sizes: tuple[int, ...]) -> Window:
    """Returns the window over dz, with stride 1, each of whose results is one block of dx.

    A block has as many pixels as the strides of `window`; `sizes` are the lengths of x's spatial axes.
    """
    kernel, padding = [], []
    for axis, size, stride, result in zip(
        _axes(window), sizes, window.strides, window.result(sizes), strict=True
    ):
        reach = len(axis.places) - 1
        low = -axis.first
        kernel.append(reach + 1)
        padding.append((low, size // stride + reach - result - low))
    ones = (1,) * len(kernel)
    return Window(tuple(kernel), tuple(padding), ones, ones)


def why_unsupported(
    *,
    compute_capability: tuple[int, int] | None,
    dtypes: Mapping[str, Any],
    channels: int,
    features: int,
    images: int,
    sizes: tuple[int, ...],
    window: Window,
) -> str | None:
    """Returns None if dgrad can be computed in blocks, else the reason.

    Args:
      dtypes: the operands' dtypes, keyed by name.
      channels: the channels of x.
      features: the channels of dz.
      images: the number of images.
      sizes: the spatial sizes of x.
    """
    if len(sizes) != 2:
        return f"x must have two spatial axes for dgrad in blocks of pixels, and has {len(sizes)}"
    if max(window.dilation) > 1:
        return (
            f"a window with strides must not be dilated, and this is dilated by {window.dilation}"
        )
    if any(size % stride for size, stride in zip(sizes, window.strides, strict=True)):
        return f"the strides {window.strides} must divide the spatial sizes of x, which are {sizes}"
    if any(kernel < stride for kernel, stride in zip(window.kernel, window.strides, strict=True)):
        return "the window must not be smaller than its strides, or it skips pixels of x"
    reason = pallas_conv.why_enlarging_unsupported(
        compute_capability=compute_capability,
        dtypes=dtypes,
        channels={"x": features, "the result": channels},
        sizes=(images, *window.result(sizes)),
        block=_block(window),
    )
    return reason or window_of_blocks(window, sizes).why_unfit(window.result(sizes))


def call_of(
    dz: Any, channels: int, *, window: Window, sizes: tuple[int, ...], multiprocessors: int
) -> pallas_conv.ConvCall:
    """Returns the convolution of dz [B, *spatial', F] that gives dgrad of x [B, *sizes, channels]."""
    return pallas_conv.ConvCall(
        sizes=dz.shape[:-1],
        channels=dz.shape[-1],
        features=math.prod(window.strides) * channels,
        window=window_of_blocks(window, sizes),
        dtype=dz.dtype,
        multiprocessors=multiprocessors,
        block=_block(window),
    )


def input_gradient(
    dz: jax.Array,
    w: jax.Array,
    *,
    window: Window,
    sizes: tuple[int, ...],
    multiprocessors: int,
    config: pallas_conv.Config | None = None,
) -> jax.Array:
    """Returns dgrad [B, *sizes, C] of a convolution by `window` with w [*kernel, C, F]."""
    results = pallas_conv.conv(
        dz,
        _weights_of_blocks(w.astype(dz.dtype), window),
        window=window_of_blocks(window, sizes),
        epilogue=lambda dx: {"dx": dx},
        outputs={"dx": dz.dtype},
        block=_block(window),
        multiprocessors=multiprocessors,
        config=config,
        name="conv_strided_input_gradient",
    )
    return results["dx"]


def _weights_of_blocks(w: jax.Array, window: Window) -> jax.Array:
    """Returns the weights [rows', columns', F, pixels of a block * C] of `window_of_blocks`.

    They are those of w [rows, columns, C, F], and zeros.
    """
    turned = w.transpose(0, 1, 3, 2)
    nothing = jnp.zeros_like(turned[0, 0])

    def weight(row: int | None, column: int | None) -> jax.Array:
        return nothing if row is None or column is None else turned[row, column]

    rows, columns = (axis.places for axis in _axes(window))
    blocks = [
        jnp.concatenate([weight(r, c) for r in in_rows for c in in_columns], axis=-1)
        for in_rows in rows
        for in_columns in columns
    ]
    return jnp.stack(blocks).reshape(len(rows), len(columns), *blocks[0].shape)
