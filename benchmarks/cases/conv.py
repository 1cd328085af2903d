"""conv: windows of 3 x 3 and 3 x 3 x 3, bias, activation, residual, forward and with gradients."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import jax
import jax.numpy as jnp

import jaxfused
from benchmarks.run.case import Arrays, Bar, Case, functions, torch_compiled
from benchmarks.sweep.program_parts import split_operands

Shape = tuple[int, ...]
"""Sizes (images, *sides of an image, channels, features)."""

_FEW: Shape = (64, 56, 56, 64, 64)
_FEW_LARGE: Shape = (32, 128, 128, 64, 64)
_MANY: Shape = (16, 64, 64, 320, 320)
_MORE: Shape = (16, 32, 32, 640, 640)
_VOLUMES: Shape = (4, 32, 64, 64, 64, 64)
SHAPES: tuple[Shape, ...] = (_FEW, _FEW_LARGE, _MANY, _MORE, _VOLUMES)
QUICK_SHAPES = (_FEW, _MANY)
WINDOW = 3
_FAR = 8.0
"""Magnitude of biases before a relu, in standard deviations of a sum."""


def cases(quick: bool = False, shapes: Sequence[Shape] | None = None) -> list[Case]:
    """Returns every operation at every shape, in the order in which they are measured."""
    shapes = shapes or (QUICK_SHAPES if quick else SHAPES)
    return [_case(operation, shape) for operation in _OPERATIONS for shape in shapes]


@dataclass(frozen=True)
class _Operation:
    name: str
    activation: str | None = None
    bias: bool = True
    residual: bool = False
    with_gradient: bool = False

    @property
    def differentiable(self) -> int:
        return 2 + self.bias + self.residual

    def ours(self, *args, implementation):
        x, w, bias, residual = split_operands(self, args)
        return jaxfused.conv(
            x,
            w,
            bias,
            activation=self.activation,
            residual=residual,
            implementation=implementation,
        )

    def flax(self, *args):
        """Computes what flax.linen.Conv and jax.nn do."""
        x, w, bias, residual = split_operands(self, args)
        letters = "DHW"[-(x.ndim - 2) :]
        names = (f"N{letters}C", f"{letters}IO", f"N{letters}C")
        y = jax.lax.conv_general_dilated(x, w, (1,) * (x.ndim - 2), "SAME", dimension_numbers=names)
        y = y if bias is None else y + bias
        y = y if residual is None else y + residual
        return y if self.activation is None else getattr(jax.nn, self.activation)(y)

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


def _case(operation: _Operation, shape: Shape) -> Case:
    *pixels, channels, features = shape
    taps = WINDOW ** (len(pixels) - 1)
    x_size, y_size = prod(pixels) * channels, prod(pixels) * features
    w_size = taps * channels * features
    b_size = features if operation.bias else 0
    size = x_size + w_size + b_size + y_size * (2 if operation.residual else 1)
    if operation.with_gradient:
        # Reads x, w, dy and the forward's values for the activation's derivative; writes dx and dw.
        size += 2 * x_size + 2 * w_size + b_size + 3 * y_size
    return Case(
        name=operation.name,
        shape=shape,
        make_inputs=partial(_make_inputs, operation, shape),
        bytes=2 * size,
        flops=2 * prod(pixels) * taps * channels * features * (3 if operation.with_gradient else 1),
        bars=_bars(operation, shape),
        # The derivative of an activation is taken at a rounded sum, and is rounded itself.
        error_limit=2e-2 if operation.with_gradient else 1e-2,
        **functions(
            operation.ours,
            {"xla": operation.flax},
            {"torch_compile": partial(torch_compiled, operation.torch)},
            differentiable=operation.differentiable,
            cotangents=int(operation.with_gradient),
        ),
    )


def _make_inputs(operation: _Operation, shape: Shape, key: jax.Array) -> Arrays:
    *pixels, channels, features = shape
    keys = iter(jax.random.split(key, 5))
    window = (WINDOW,) * (len(pixels) - 1)
    deviation = (prod(window) * channels) ** -0.5

    def normal(shape: Sequence[int], deviation: float = 1.0) -> jax.Array:
        return (deviation * jax.random.normal(next(keys), tuple(shape))).astype(jnp.bfloat16)

    operands = [normal((*pixels, channels)), normal((*window, channels, features), deviation)]
    if operation.bias:
        bias = normal((features,), 0.1)
        if operation.activation == "relu":
            # No sum is near relu's kink, where its rounding would turn a gradient on or off.
            bias = _FAR * jnp.sign(bias)
        operands.append(bias)
    results = operation.residual + operation.with_gradient
    return (*operands, *(normal((*pixels, features)) for _ in range(results)))
