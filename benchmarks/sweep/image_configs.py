"""Cases of the operators over images [batch, height, width, channels], and how they are drawn."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from benchmarks.run.draw import MOST_ELEMENTS, MOST_FLOPS, Draw

SIDES = (7, 8, 14, 16, 28, 32, 56, 64, 112, 128, 256)
"""Heights and widths in ResNets, ConvNeXts and U-Nets of 224 to 512 pixels."""
CHANNELS = (64, 64, 96, 128, 128, 192, 256, 320, 384, 512, 640, 768, 1024, 1280, 2048)
_ACTIVATIONS = (None, "relu", "silu", "silu")


@dataclass(frozen=True)
class _Images:
    """Sizes that all cases over images share."""

    batch: int
    height: int
    width: int
    channels: int
    dtype: str

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (self.batch, self.height, self.width, self.channels)

    def fits(self) -> bool:
        return self.batch * self.height * self.width * self.channels <= MOST_ELEMENTS // 2


def _images(draw: Draw) -> _Images:
    side = draw.pick(SIDES) if draw.chance(0.85) else draw.size(1, 400)
    return _Images(
        batch=draw.shard(draw.batch(256)),
        height=side,
        width=side if draw.chance(0.8) else draw.size(1, 400),
        channels=draw.pick(CHANNELS) if draw.chance(0.85) else draw.size(1, 128) * 8,
        dtype=draw.dtype("float32"),
    )


@dataclass(frozen=True)
class ImageNorm(_Images):
    """group_norm with `groups`, or batch_norm in training."""

    operator: str
    groups: int
    activation: str | None
    residual: bool

    def tiny(self) -> "ImageNorm":
        return replace(self, batch=2, height=3, width=4, channels=8, groups=4)


def image_norm(draw: Draw, operator: str) -> ImageNorm:
    images = _images(draw)
    groups = draw.pick((32, 32, 32, 16, 8, 1, images.channels))
    while images.channels % groups:
        groups //= 2
    return ImageNorm(
        **vars(images),
        operator=operator,
        groups=groups if operator == "group_norm" else 0,
        activation=draw.pick(_ACTIVATIONS),
        residual=draw.chance(0.25),
    )


@dataclass(frozen=True)
class DepthwiseConv(_Images):
    """A depthwise convolution with "SAME" padding; over a sequence if the height is 1."""

    window: int
    stride: int
    bias: bool
    activation: str | None
    operator: ClassVar[str] = "depthwise_conv"

    @property
    def kernel(self) -> tuple[int, int]:
        return (1 if self.height == 1 else self.window, self.window)

    def fits(self) -> bool:
        # XLA has no fast kernel for these convolutions: large windows over large images take seconds.
        multiplications = math.prod(self.shape) * math.prod(self.kernel)
        return super().fits() and 2 * multiplications <= MOST_FLOPS // 32

    def tiny(self) -> "DepthwiseConv":
        height = min(self.height, 5)
        return replace(self, batch=2, height=height, width=6, channels=8)


def depthwise_conv(draw: Draw) -> DepthwiseConv:
    images, window = _images(draw), draw.pick((3, 3, 5, 7, 7, 13, 31))
    if draw.chance(0.2):
        images = replace(images, height=1, width=draw.pick((512, 1024, 2048, 4096, 8192)))
        window = draw.pick((4, 7, 9, 32, 128, 512))
    return DepthwiseConv(
        **vars(images),
        window=window,
        stride=draw.pick((1, 1, 1, 2)) if window < 7 and images.height > 1 else 1,
        bias=draw.chance(0.5),
        activation=draw.pick(_ACTIVATIONS),
    )


@dataclass(frozen=True)
class InvertedResidual(_Images):
    """MobileNet's block: expands the channels, relu, depthwise convolution, relu, projects, plus x."""

    expansion: int
    window: int
    operator: ClassVar[str] = "inverted_residual"

    def fits(self) -> bool:
        return self.expansion * math.prod(self.shape) <= MOST_ELEMENTS // 2

    def tiny(self) -> "InvertedResidual":
        return replace(self, batch=2, height=5, width=6, channels=8)


def inverted_residual(draw: Draw) -> InvertedResidual:
    images = replace(_images(draw), channels=draw.pick((16, 24, 32, 40, 64, 80, 96, 112, 160, 192)))
    return InvertedResidual(
        **vars(images), expansion=draw.pick((3, 4, 6)), window=draw.pick((3, 3, 5))
    )


@dataclass(frozen=True)
class Pool(_Images):
    """max_pool over square windows, without padding."""

    window: int
    stride: int
    operator: ClassVar[str] = "max_pool"

    def tiny(self) -> "Pool":
        return replace(self, batch=2, height=6, width=5, channels=8)

    def fits(self) -> bool:
        return super().fits() and min(self.height, self.width) >= self.window


def max_pool(draw: Draw) -> Pool:
    window, stride = draw.pick(((2, 2), (2, 2), (3, 2), (3, 1)))
    return Pool(**vars(_images(draw)), window=window, stride=stride)


@dataclass(frozen=True)
class Upsample(_Images):
    """Bilinear upsampling by 2."""

    operator: ClassVar[str] = "upsample"

    def tiny(self) -> "Upsample":
        return replace(self, batch=2, height=3, width=4, channels=8)

    def fits(self) -> bool:
        return 4 * self.batch * self.height * self.width * self.channels <= MOST_ELEMENTS // 2


def upsample(draw: Draw) -> Upsample:
    return Upsample(**vars(_images(draw)))


@dataclass(frozen=True)
class Conv:
    """conv over [batch, *sides, channels] with `axes` sides and "SAME" padding."""

    batch: int
    axes: int
    side: int
    """Size of all spatial axes but the last, whose size is `last`."""
    last: int
    channels: int
    out: int
    window: int
    stride: int
    dilation: int
    dtype: str
    param_dtype: str
    bias: bool
    activation: str | None
    residual: bool
    operator: ClassVar[str] = "conv"

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.batch, *(self.side,) * (self.axes - 1), self.last, self.channels)

    @property
    def result(self) -> tuple[int, ...]:
        sides = (-(-side // self.stride) for side in self.shape[1:-1])
        return (self.batch, *sides, self.out)

    def fits(self) -> bool:
        work = 2 * math.prod(self.result) * self.channels * self.window**self.axes
        largest = max(math.prod(self.shape), math.prod(self.result))
        return work <= MOST_FLOPS and largest <= MOST_ELEMENTS

    def tiny(self) -> "Conv":
        return replace(
            self,
            batch=2,
            side=min(self.side, 6),
            last=min(self.last, 7),
            channels=16,
            out=24,
        )


def conv(draw: Draw) -> Conv:
    """Draws convolutions of ResNets and U-Nets, over volumes, and over one axis."""
    axes = draw.pick((1, 2, 2, 2, 2, 2, 2, 3))
    most = {1: 16384, 2: 512, 3: 128}[axes]
    side = draw.rounded(4 if axes > 1 else 64, most)
    if axes == 2 and draw.chance(0.6):
        side = draw.pick((7, 14, 28, 56, 112, 16, 32, 64, 128, 256))
    channels = draw.pick((64, 64, 128, 128, 256, 320, 512, 640, 1024))
    if draw.chance(0.2):
        channels = draw.pick((3, 8, 16, 24, 32, 40, 48, 96, 160, 192))
    stride = draw.pick((1, 1, 1, 1, 2))
    return Conv(
        batch=draw.shard(draw.batch(256 if axes < 3 else 16)),
        axes=axes,
        side=side,
        last=side if draw.chance(0.8) else draw.rounded(4, most),
        channels=channels,
        out=draw.pick((channels, channels, 2 * channels, max(8, channels // 2), 64)),
        window=draw.pick((1, 3, 3, 3, 3, 3, 5, 7)) if axes < 3 else 3,
        stride=stride,
        dilation=draw.pick((1, 1, 1, 1, 2)) if stride == 1 else 1,
        dtype=draw.dtype(),
        param_dtype=draw.pick(("same", "same", "same", "float32")),
        bias=draw.chance(0.7),
        activation=draw.pick((None, "relu", "relu", "silu", "gelu_tanh")),
        residual=draw.chance(0.25),
    )
