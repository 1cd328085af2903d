"""softmax_cross_entropy, linear_softmax_cross_entropy and segmentation_loss, with their gradients."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import optax

import jaxfused
from benchmarks.cases.linear import random_operands
from benchmarks.run.case import BULK_COPY, Arrays, Bar, Case, Function, functions, torch_compiled

LOGITS: tuple[tuple[int, int], ...] = ((8192, 128256), (16384, 32000))
"""Sizes (tokens, classes)."""
LAYERS: tuple[tuple[int, int, int], ...] = ((8192, 4096, 128256), (8192, 4096, 32768))
"""Sizes (tokens, features, classes)."""
IMAGES: tuple[tuple[int, int, int], ...] = ((32, 256, 256),)
"""Sizes (images, height, width)."""


def cases(
    quick: bool = False,
    logits: Sequence[tuple[int, int]] | None = None,
    layers: Sequence[tuple[int, int, int]] | None = None,
    images: Sequence[tuple[int, int, int]] | None = None,
) -> list[Case]:
    """Returns every operation at every shape, in the order in which they are measured."""
    del quick  # There are few shapes.
    return [
        *(_logits_case(operation, shape) for operation in _OF_LOGITS for shape in logits or LOGITS),
        *(_layer_case(shape) for shape in layers or LAYERS),
        *(_image_case(shape) for shape in images or IMAGES),
    ]


# --- logits ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Operation:
    name: str
    passes: int
    bars: tuple[Bar, ...]
    cotangent: str | None = None


_OVER_XLA = Bar("xla", must=1.5)

_OF_LOGITS = (
    _Operation(
        "softmax_cross_entropy forward+backward",
        2,
        (Bar(BULK_COPY, must=0.75), _OVER_XLA),
    ),
    _Operation(
        "softmax_cross_entropy of any cotangent forward+backward",
        3,
        (Bar(BULK_COPY, must=0.85), _OVER_XLA),
        cotangent="any",
    ),
)


def _logits_case(operation: _Operation, shape: tuple[int, int]) -> Case:
    def ours(logits, labels, *, implementation):
        return jaxfused.softmax_cross_entropy(
            logits, labels, cotangent=operation.cotangent, implementation=implementation
        )

    def make_inputs(key: jax.Array) -> Arrays:
        of_logits, of_labels = jax.random.split(key)
        logits = 3.0 * jax.random.normal(of_logits, shape, jnp.bfloat16)
        return logits, _labels(of_labels, shape[:1], shape[1]), jnp.ones(())

    return Case(
        name=operation.name,
        shape=shape,
        make_inputs=make_inputs,
        bytes=operation.passes * shape[0] * shape[1] * 2,
        bars=operation.bars,
        **_functions(ours, _optax_mean, _torch_mean, differentiable=1),
    )


def _labels(key: jax.Array, shape: tuple[int, ...], classes: int) -> jax.Array:
    return jax.random.randint(key, shape, 0, classes)


def _optax_mean(logits, labels):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean().astype(jnp.float32)


def _torch_mean(logits, labels):
    import torch

    return torch.nn.functional.cross_entropy(logits.float(), labels.long())


def _functions(ours: Function, in_jax: Function, in_torch: Function, *, differentiable: int):
    return functions(
        ours,
        {"xla": in_jax},
        {"torch_compile": partial(torch_compiled, in_torch)},
        differentiable=differentiable,
        cotangents=1,
    )


# --- the logits of a linear layer -----------------------------------------------------------------


def _layer_case(shape: tuple[int, int, int]) -> Case:
    tokens, features, classes = shape

    def make_inputs(key: jax.Array) -> Arrays:
        of_layer, of_labels = jax.random.split(key)
        x, w = random_operands(of_layer, [(tokens, features)], [(features, classes)])
        return x, w, _labels(of_labels, (tokens,), classes), jnp.ones(())

    def ours(x, w, labels, *, implementation):
        return jaxfused.linear_softmax_cross_entropy(x, w, labels, implementation=implementation)

    def stock(mean: Function, x, w, labels):
        return mean(x @ w, labels)

    return Case(
        name="linear_softmax_cross_entropy forward+backward",
        shape=shape,
        make_inputs=make_inputs,
        bytes=2 * 2 * (tokens * features + features * classes),
        flops=3 * 2 * tokens * features * classes,
        bars=(Bar("xla", must=40.7 / 36.0),),
        **_functions(
            ours, partial(stock, _optax_mean), partial(stock, _torch_mean), differentiable=2
        ),
    )


# --- images ---------------------------------------------------------------------------------------


def _image_case(shape: tuple[int, int, int]) -> Case:
    def make_inputs(key: jax.Array) -> Arrays:
        of_logits, of_labels = jax.random.split(key)
        logits = 3.0 * jax.random.normal(of_logits, shape, jnp.bfloat16)
        return logits, _labels(of_labels, shape, 2), jnp.ones(())

    def ours(logits, labels, *, implementation):
        return jaxfused.segmentation_loss(logits, labels, implementation=implementation)

    pixels = shape[0] * shape[1] * shape[2]
    return Case(
        name="segmentation_loss forward+backward",
        shape=shape,
        make_inputs=make_inputs,
        # Logits and labels are read for the sums and for the gradient.
        bytes=pixels * (2 * (2 + 4) + 2),
        bars=(Bar("xla", must=2.0),),
        **_functions(ours, _stock_segmentation, _torch_segmentation, differentiable=1),
    )


def _stock_segmentation(logits, labels):
    logits, targets = logits.astype(jnp.float32), labels.astype(jnp.float32)
    pixels = tuple(range(1, logits.ndim))
    cross_entropy = optax.sigmoid_binary_cross_entropy(logits, targets).mean(pixels)
    p = jax.nn.sigmoid(logits)
    dice = (2.0 * (p * targets).sum(pixels) + 1.0) / ((p + targets).sum(pixels) + 1.0)
    return jnp.mean(cross_entropy + 1.0 - dice)


def _torch_segmentation(logits, labels):
    import torch

    logits, targets = logits.float().flatten(1), labels.float().flatten(1)
    losses = torch.nn.functional.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    p = logits.sigmoid()
    dice = (2.0 * (p * targets).sum(1) + 1.0) / ((p + targets).sum(1) + 1.0)
    return (losses.mean(1) + 1.0 - dice).mean()
