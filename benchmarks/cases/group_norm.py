"""group_norm + silu of 32 groups, forward and with gradients."""

from collections.abc import Sequence

from benchmarks.cases import of_config
from benchmarks.run.case import Bar, Case
from benchmarks.sweep.image_configs import ImageNorm

Shape = tuple[int, ...]
"""Sizes [B, H, W, C] of x."""

GROUPS = 32
SHAPES: tuple[Shape, ...] = (
    (8, 128, 128, 128),
    (16, 64, 64, 320),
    (16, 64, 64, 512),
    (32, 256, 256, 64),
)
QUICK_SHAPES = SHAPES[:2]
_NAME = "group_norm + silu"
_BARS = {
    (f"{_NAME} {direction}", shape): (Bar("xla", must=2.0),)
    for direction in (of_config.FORWARD, of_config.WITH_GRADIENTS)
    for shape in SHAPES
} | {(f"{_NAME} {of_config.WITH_GRADIENTS}", SHAPES[-1]): (Bar("xla", must=1.8),)}


def _torch(x, scale, bias):
    from torch.nn import functional

    groups = min(GROUPS, x.shape[-1])
    y = functional.group_norm(x.movedim(-1, 1), groups, scale, bias, 1e-6)
    return functional.silu(y).movedim(1, -1)


def cases(quick: bool = False, shapes: Sequence[Shape] | None = None) -> list[Case]:
    shapes = shapes or (QUICK_SHAPES if quick else SHAPES)
    return [case for shape in shapes for case in _cases(shape)]


def _cases(shape: Shape) -> list[Case]:
    groups = min(GROUPS, shape[-1])
    config = ImageNorm(*shape, "bfloat16", "group_norm", groups, "silu", residual=False)
    return of_config.of_images(_NAME, shape, config, _BARS, stock="fast variance", torch=_torch)
