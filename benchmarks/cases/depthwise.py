"""Depthwise convolutions of 3 x 3, 7 x 7 and 31 x 31, forward and with gradients."""

from collections.abc import Sequence
from functools import partial

import jax

import jaxfused
from benchmarks.cases import image_case
from benchmarks.cases.image_case import Operation, Shape
from benchmarks.run.case import Bar, Case

SHAPES: tuple[Shape, ...] = ((32, 112, 112, 64), (32, 56, 56, 128), (64, 28, 28, 384))
QUICK_SHAPES = SHAPES[:2]
WINDOWS = (3, 7, 31)
_BARS = {
    (f"7 x 7 {image_case.FORWARD}", SHAPES[0]): (Bar("xla", must=178 / 65, aim=178 / 50),),
    (f"7 x 7 {image_case.WITH_GRADIENTS}", SHAPES[0]): (Bar("xla", must=2.5),),
    (f"3 x 3 {image_case.FORWARD}", SHAPES[1]): (Bar("xla", must=1.4),),
}


def cases(quick: bool = False, shapes: Sequence[Shape] | None = None) -> list[Case]:
    return image_case.cases(_operations, shapes or (QUICK_SHAPES if quick else SHAPES), _BARS)


def _ours(x, w, *, implementation):
    return jaxfused.conv(x, w, feature_group_count=x.shape[-1], implementation=implementation)


def _flax(x, w):
    return jax.lax.conv_general_dilated(
        x,
        w,
        (1, 1),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=x.shape[-1],
    )


def _torch(window, x, w):
    from torch.nn import functional

    y = functional.conv2d(
        x.movedim(-1, 1), w.movedim((-1, -2), (0, 1)), padding=window // 2, groups=x.shape[-1]
    )
    return y.movedim(1, -1)


def _operations(shape: Shape) -> list[Operation]:
    return [
        Operation(
            f"{window} x {window}",
            _ours,
            {"xla": _flax},
            partial(_torch, window),
            ((window, window, 1, shape[-1]),),
            1 / window,
        )
        for window in WINDOWS
    ]
