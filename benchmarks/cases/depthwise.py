"""Depthwise convolutions of 3 x 3, 7 x 7 and 31 x 31, forward and with gradients."""

from collections.abc import Sequence
from functools import partial

from benchmarks.cases import of_config
from benchmarks.run.case import Bar, Case
from benchmarks.sweep.image_configs import DepthwiseConv

Shape = tuple[int, ...]
"""Sizes [B, H, W, C] of x."""

SHAPES: tuple[Shape, ...] = ((32, 112, 112, 64), (32, 56, 56, 128), (64, 28, 28, 384))
QUICK_SHAPES = SHAPES[:2]
WINDOWS = (3, 7, 31)
_BARS = {
    (f"7 x 7 {of_config.FORWARD}", SHAPES[0]): (Bar("xla", must=178 / 65, aim=178 / 50),),
    (f"7 x 7 {of_config.WITH_GRADIENTS}", SHAPES[0]): (Bar("xla", must=2.5),),
    (f"3 x 3 {of_config.FORWARD}", SHAPES[1]): (Bar("xla", must=1.4),),
}


def _torch(window, x, w):
    from torch.nn import functional

    y = functional.conv2d(
        x.movedim(-1, 1), w.movedim((-1, -2), (0, 1)), padding=window // 2, groups=x.shape[-1]
    )
    return y.movedim(1, -1)


def cases(quick: bool = False, shapes: Sequence[Shape] | None = None) -> list[Case]:
    shapes = shapes or (QUICK_SHAPES if quick else SHAPES)
    return [case for shape in shapes for case in _cases(shape)]


def _cases(shape: Shape) -> list[Case]:
    return [
        case
        for window in WINDOWS
        for case in of_config.of_images(
            f"{window} x {window}",
            shape,
            DepthwiseConv(*shape, "bfloat16", window, 1, bias=False, activation=None),
            _BARS,
            stock="flax",
            torch=partial(_torch, window),
        )
    ]
