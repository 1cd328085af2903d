"""max_pool of 2 x 2 and of 3 x 3 at stride 2, forward and with gradients."""

from collections.abc import Sequence
from functools import partial

from benchmarks.cases import of_config
from benchmarks.run.case import Bar, Case
from benchmarks.sweep.image_configs import Pool

Shape = tuple[int, ...]
"""Sizes [B, H, W, C] of x."""

SHAPES: tuple[Shape, ...] = ((32, 256, 256, 64), (32, 64, 64, 256), (64, 112, 112, 64))
QUICK_SHAPES = SHAPES[1:2]
WINDOWS = (2, 3)
_BARS = {
    (f"max_pool {window} x {window} {of_config.WITH_GRADIENTS}", shape): (Bar("xla", must=2.0),)
    for window in WINDOWS
    for shape in SHAPES
}


def _torch(window, x):
    from torch.nn import functional

    return functional.max_pool2d(x.movedim(-1, 1), window, 2).movedim(1, -1)


def cases(quick: bool = False, shapes: Sequence[Shape] | None = None) -> list[Case]:
    shapes = shapes or (QUICK_SHAPES if quick else SHAPES)
    return [case for shape in shapes for case in _cases(shape)]


def _cases(shape: Shape) -> list[Case]:
    return [
        case
        for window in WINDOWS
        for case in of_config.of_images(
            f"max_pool {window} x {window}",
            shape,
            Pool(*shape, "bfloat16", window, 2),
            _BARS,
            stock="flax",
            torch=partial(_torch, window),
        )
    ]
