"""conv: windows of 3 x 3 and 3 x 3 x 3, bias, activation, residual, forward and with gradients."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from benchmarks.cases import of_config
from benchmarks.run.case import Bar, Case
from benchmarks.sweep.image_configs import Conv
from benchmarks.sweep.program_parts import split_operands

Shape = tuple[int, ...]
"""Sizes (images, *spatial sizes, channels, features)."""

_FEW: Shape = (64, 56, 56, 64, 64)
_FEW_LARGE: Shape = (32, 128, 128, 64, 64)
_MANY: Shape = (16, 64, 64, 320, 320)
_MORE: Shape = (16, 32, 32, 640, 640)
_VOLUMES: Shape = (4, 32, 64, 64, 64, 64)
SHAPES: tuple[Shape, ...] = (_FEW, _FEW_LARGE, _MANY, _MORE, _VOLUMES)
QUICK_SHAPES = (_FEW, _MANY)
WINDOW = 3


def cases(quick: bool = False, shapes: Sequence[Shape] | None = None) -> list[Case]:
    """Returns a case for each operation at each shape, in the order of measurement."""
    shapes = shapes or (QUICK_SHAPES if quick else SHAPES)
    return [_case(operation, shape) for operation in _OPERATIONS for shape in shapes]


@dataclass(frozen=True)
class _Operation:
    name: str
    activation: str | None = None
    bias: bool = True
    residual: bool = False
    with_gradient: bool = False

    def torch(self, *args):
        """Runs torch on views of the same memory, which torch calls channels_last."""
        import torch

        x, w, bias, residual = split_operands(self, args)
        axes = x.ndim - 2
        convolve = torch.nn.functional.conv2d if axes == 2 else torch.nn.functional.conv3d
        y = convolve(x.movedim(-1, 1), w.movedim((-1, -2), (0, 1)), bias, padding=WINDOW // 2)
        y = y.movedim(1, -1)
        y = y if residual is None else y + residual
        return y if self.activation is None else getattr(torch.nn.functional, self.activation)(y)


_OPERATIONS = (
    _Operation("conv forward", bias=False),
    _Operation("conv + bias + relu forward", "relu"),
    _Operation("conv + bias + residual + relu forward", "relu", residual=True),
    _Operation("conv + bias + silu forward", "silu"),
    _Operation("conv + bias + relu forward+backward", "relu", with_gradient=True),
    _Operation("conv + bias + silu forward+backward", "silu", with_gradient=True),
)


def _bars(operation: _Operation, shape: Shape) -> tuple[Bar, ...]:
    if shape not in SHAPES:
        return ()
    if not operation.bias:
        return (Bar("xla", aim=1.0),)
    if operation.with_gradient:
        return (Bar("xla", must=2.0 if shape == _VOLUMES else 1.1),)
    if operation.activation == "relu":
        return (Bar("xla", must=1.0),)
    return (Bar("xla", must=1.3 if shape in (_FEW, _FEW_LARGE, _VOLUMES) else 1.2),)


def config_of(
    shape: Shape, *, bias: bool = False, activation: str | None = None, residual: bool = False
) -> Conv:
    batch, *sides, channels, features = shape
    return Conv(
        batch=batch,
        axes=len(sides),
        side=sides[0],
        last=sides[-1],
        channels=channels,
        out=features,
        window=WINDOW,
        stride=1,
        dilation=1,
        dtype="bfloat16",
        param_dtype="same",
        bias=bias,
        activation=activation,
        residual=residual,
    )


def _case(operation: _Operation, shape: Shape) -> Case:
    batch, *sides, channels, features = shape
    config = config_of(
        shape,
        bias=operation.bias,
        activation=operation.activation,
        residual=operation.residual,
    )
    pixels, taps = batch * prod(sides), WINDOW ** len(sides)
    # The backward reads x, w and what the activation's derivative needs, which the forward wrote.
    saved = pixels * channels + taps * channels * features + 2 * pixels * features
    return of_config.case(
        operation.name,
        shape,
        config,
        stock="flax",
        torch=operation.torch,
        with_gradient=operation.with_gradient,
        read_again=2 * saved if operation.with_gradient else 0,
        flops=2 * pixels * taps * channels * features,
        bars=_bars(operation, shape),
        far_bias=2 if operation.activation == "relu" else None,
        # The derivative of an activation reads a rounded preactivation, and is rounded itself.
        error_limit=2e-2 if operation.with_gradient else 1e-2,
    )
