"""batch_norm + relu in training, forward and with gradients."""

from collections.abc import Sequence

from benchmarks.cases import of_config
from benchmarks.run.case import Bar, Case
from benchmarks.sweep.image_configs import ImageNorm

Shape = tuple[int, ...]
"""Sizes [B, H, W, C] of x."""

SHAPES: tuple[Shape, ...] = (
    (64, 56, 56, 256),
    (64, 28, 28, 192),
    (64, 14, 14, 256),
    (64, 7, 7, 2048),
)
QUICK_SHAPES = SHAPES[:2]
_NAME = "batch_norm + relu"
_BARS = {
    (f"{_NAME} {of_config.WITH_GRADIENTS}", shape): (Bar("xla", must=1.3, aim=2.0),)
    for shape in SHAPES
}


def _torch(x, scale, bias):
    from torch.nn import functional

    y = functional.batch_norm(x.movedim(-1, 1), None, None, scale, bias, training=True, eps=1e-6)
    return functional.relu(y).movedim(1, -1)


def cases(quick: bool = False, shapes: Sequence[Shape] | None = None) -> list[Case]:
    shapes = shapes or (QUICK_SHAPES if quick else SHAPES)
    return [case for shape in shapes for case in _cases(shape)]


def _cases(shape: Shape) -> list[Case]:
    config = ImageNorm(*shape, "bfloat16", "batch_norm", 0, "relu", residual=False)
    options = dict(stock="fast variance", torch=_torch, far_bias=2)
    return of_config.of_images(_NAME, shape, config, _BARS, **options)
