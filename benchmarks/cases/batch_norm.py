"""batch_norm + relu in training, forward and with gradients."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

import jaxfused
from benchmarks.cases import image_case
from benchmarks.cases.image_case import Operation, Shape
from benchmarks.run.case import Bar, Case

SHAPES: tuple[Shape, ...] = (
    (64, 56, 56, 256),
    (64, 28, 28, 192),
    (64, 14, 14, 256),
    (64, 7, 7, 2048),
)
QUICK_SHAPES = SHAPES[:2]
_NAME = "batch_norm + relu"
_BARS = {
    (f"{_NAME} {image_case.WITH_GRADIENTS}", shape): (Bar("xla", must=1.3, aim=2.0),)
    for shape in SHAPES
}
_FAR = 8.0
"""Magnitude of the bias in standard deviations: no rounding of a result then turns a gradient on or
off."""


def cases(quick: bool = False, shapes: Sequence[Shape] | None = None) -> list[Case]:
    return image_case.cases(_operations, shapes or (QUICK_SHAPES if quick else SHAPES), _BARS)


def _ours(x, scale, bias, *, implementation):
    bias = _FAR * jnp.sign(bias)
    y, *_ = jaxfused.batch_norm(x, scale, bias, activation="relu", implementation=implementation)
    return y


def _flax(x, scale, bias):
    """Computes what flax.linen.BatchNorm and jax.nn do, by the mean of squares."""
    wide = x.astype(jnp.float32)
    mean = wide.mean((0, 1, 2))
    variance = jnp.maximum(jnp.square(wide).mean((0, 1, 2)) - jnp.square(mean), 0.0)
    y = (wide - mean) * (jax.lax.rsqrt(variance + 1e-5) * scale) + _FAR * jnp.sign(bias)
    return jax.nn.relu(y.astype(x.dtype))


def _torch(x, scale, bias):
    from torch.nn import functional

    y = functional.batch_norm(
        x.movedim(-1, 1), None, None, scale, _FAR * bias.sign(), training=True, eps=1e-5
    )
    return functional.relu(y).movedim(1, -1)


def _operations(shape: Shape) -> list[Operation]:
    parameters = (shape[-1:],) * 2
    return [Operation(_NAME, _ours, {"xla": _flax}, _torch, parameters, 0.1, is_norm=True)]
