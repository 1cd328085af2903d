"""max_pool of 2 x 2 and of 3 x 3 at stride 2, forward and with gradients."""

from collections.abc import Sequence
from functools import partial

import flax.linen

import jaxfused
from benchmarks.cases import image_case
from benchmarks.cases.image_case import Operation, Shape
from benchmarks.run.case import Bar, Case

SHAPES: tuple[Shape, ...] = ((32, 256, 256, 64), (32, 64, 64, 256), (64, 112, 112, 64))
QUICK_SHAPES = SHAPES[1:2]
WINDOWS = (2, 3)
_BARS = {
    (f"max_pool {window} x {window} {image_case.WITH_GRADIENTS}", shape): (Bar("xla", must=2.0),)
    for window in WINDOWS
    for shape in SHAPES
}


def cases(quick: bool = False, shapes: Sequence[Shape] | None = None) -> list[Case]:
    return image_case.cases(_operations, shapes or (QUICK_SHAPES if quick else SHAPES), _BARS)


def _ours(window, x, *, implementation):
    return jaxfused.max_pool(x, window, strides=2, implementation=implementation)


def _flax(window, x):
    return flax.linen.max_pool(x, (window, window), (2, 2))


def _torch(window, x):
    from torch.nn import functional

    return functional.max_pool2d(x.movedim(-1, 1), window, 2).movedim(1, -1)


def _operations(shape: Shape) -> list[Operation]:
    del shape
    return [
        Operation(
            f"max_pool {window} x {window}",
            partial(_ours, window),
            {"xla": partial(_flax, window)},
            partial(_torch, window),
        )
        for window in WINDOWS
    ]
