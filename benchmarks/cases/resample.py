"""Bilinear upsampling by 2, forward and with gradients."""

from collections.abc import Sequence

from benchmarks.cases import of_config
from benchmarks.run.case import Bar, Case
from benchmarks.sweep.image_configs import Upsample

Shape = tuple[int, ...]
"""Sizes [B, H, W, C] of x."""

SHAPES: tuple[Shape, ...] = ((32, 64, 64, 256), (16, 128, 128, 64), (8, 32, 32, 512))
QUICK_SHAPES = SHAPES[:1]
_NAME = "bilinear upsampling by 2"
_BARS = {
    (f"{_NAME} {direction}", shape): (Bar("xla", must=1.5),)
    for direction in (of_config.FORWARD, of_config.WITH_GRADIENTS)
    for shape in SHAPES
}


def _torch(x):
    from torch.nn import functional

    y = functional.interpolate(x.movedim(-1, 1), scale_factor=2, mode="bilinear")
    return y.movedim(1, -1)


def cases(quick: bool = False, shapes: Sequence[Shape] | None = None) -> list[Case]:
    shapes = shapes or (QUICK_SHAPES if quick else SHAPES)
    return [case for shape in shapes for case in _cases(shape)]


def _cases(shape: Shape) -> list[Case]:
    config = Upsample(*shape, "bfloat16")
    return of_config.of_images(_NAME, shape, config, _BARS, stock="jax.image", torch=_torch)
