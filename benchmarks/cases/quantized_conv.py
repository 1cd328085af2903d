"""quantized_conv: windows of 3 x 3 over int8, against the convolution in bfloat16."""

from collections.abc import Sequence
from math import prod

from benchmarks.cases import of_config
from benchmarks.cases.conv import WINDOW, Shape, config_of
from benchmarks.run.case import BARE, Bar, Case
from benchmarks.sweep import programs
from benchmarks.sweep.quantized_configs import QuantizedConv

_MANY: Shape = (16, 64, 64, 320, 320)
SHAPES: tuple[Shape, ...] = ((64, 56, 56, 64, 64), _MANY, (16, 32, 32, 640, 640))
QUICK_SHAPES = (_MANY,)


def cases(quick: bool = False, shapes: Sequence[Shape] | None = None) -> list[Case]:
    return [_case(shape) for shape in shapes or (QUICK_SHAPES if quick else SHAPES)]


def _case(shape: Shape) -> Case:
    *pixels, channels, features = shape
    taps = WINDOW ** (len(pixels) - 1)
    config = QuantizedConv(
        **vars(config_of(shape)), inputs="int8", weights="int8", scale_of_image=False
    )
    return of_config.case(
        "quantized_conv, int8 x int8",
        shape,
        config,
        bytes=prod(pixels) * (channels + 2 * features) + taps * channels * features + 4 * features,
        flops=2 * prod(pixels) * taps * channels * features,
        bars=(Bar(BARE, must=1.4),) if shape == _MANY else (),
        peers={BARE: programs.of(config).peers["bfloat16"]},
    )
