"""group_norm + silu of 32 groups, forward and with gradients."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

import jaxfused
from benchmarks.cases import image_case
from benchmarks.cases.image_case import Operation, Shape
from benchmarks.run.case import Bar, Case

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
    for direction in (image_case.FORWARD, image_case.WITH_GRADIENTS)
    for shape in SHAPES
} | {(f"{_NAME} {image_case.WITH_GRADIENTS}", SHAPES[-1]): (Bar("xla", must=1.8),)}


def cases(quick: bool = False, shapes: Sequence[Shape] | None = None) -> list[Case]:
    return image_case.cases(_operations, shapes or (QUICK_SHAPES if quick else SHAPES), _BARS)


def _ours(x, scale, bias, *, implementation):
    return jaxfused.group_norm(
        x,
        scale,
        bias,
        num_groups=min(GROUPS, x.shape[-1]),
        activation="silu",
        implementation=implementation,
    )


def _flax(x, scale, bias):
    """Computes what flax.linen.GroupNorm and jax.nn do, by the mean of squares."""
    images, groups = len(x), min(GROUPS, x.shape[-1])
    wide = x.reshape(images, -1, groups, x.shape[-1] // groups).astype(jnp.float32)
    mean = wide.mean((1, 3), keepdims=True)
    square = jnp.square(wide).mean((1, 3), keepdims=True)
    variance = jnp.maximum(square - jnp.square(mean), 0.0)
    factor = jax.lax.rsqrt(variance + 1e-6) * scale.reshape(groups, -1)
    y = (wide - mean) * factor + bias.reshape(groups, -1)
    return jax.nn.silu(y.reshape(x.shape).astype(x.dtype))


def _torch(x, scale, bias):
    from torch.nn import functional

    groups = min(GROUPS, x.shape[-1])
    y = functional.group_norm(x.movedim(-1, 1), groups, scale, bias, 1e-6)
    return functional.silu(y).movedim(1, -1)


def _operations(shape: Shape) -> list[Operation]:
    parameters = (shape[-1:],) * 2
    return [Operation(_NAME, _ours, {"xla": _flax}, _torch, parameters, 0.1, is_norm=True)]
