"""Bilinear upsampling by 2, forward and with gradients."""

from collections.abc import Sequence

import jax

import jaxfused
from benchmarks.cases import image_case
from benchmarks.cases.image_case import Operation, Shape
from benchmarks.run.case import Bar, Case

SHAPES: tuple[Shape, ...] = ((32, 64, 64, 256), (16, 128, 128, 64), (8, 32, 32, 512))
QUICK_SHAPES = SHAPES[:1]
_NAME = "bilinear upsampling by 2"
_BARS = {
    (f"{_NAME} {direction}", shape): (Bar("xla", must=1.5),)
    for direction in (image_case.FORWARD, image_case.WITH_GRADIENTS)
    for shape in SHAPES
}


def cases(quick: bool = False, shapes: Sequence[Shape] | None = None) -> list[Case]:
    return image_case.cases(_operations, shapes or (QUICK_SHAPES if quick else SHAPES), _BARS)


def _ours(x, *, implementation):
    return jaxfused.upsample(x, implementation=implementation)


def _jax(x):
    images, height, width, channels = x.shape
    return jax.image.resize(x, (images, 2 * height, 2 * width, channels), "bilinear")


def _torch(x):
    from torch.nn import functional

    y = functional.interpolate(x.movedim(-1, 1), scale_factor=2, mode="bilinear")
    return y.movedim(1, -1)


def _operations(shape: Shape) -> list[Operation]:
    del shape
    return [Operation(_NAME, _ours, {"xla": _jax}, _torch)]
