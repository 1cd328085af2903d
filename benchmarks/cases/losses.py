"""softmax_cross_entropy, linear_softmax_cross_entropy and segmentation_loss, with their gradients."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.cases import of_config
from benchmarks.fuzz import losses
from benchmarks.fuzz.problem import Problem
from benchmarks.run.case import BULK_COPY, Bar, Case, Function
from benchmarks.sweep.program_parts import of_problem

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
    """Returns a case for each operation at each shape, in the order of measurement."""
    del quick  # There are few shapes: all are measured.
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
        "softmax_cross_entropy",
        2,
        (Bar(BULK_COPY, must=0.75), _OVER_XLA),
    ),
    _Operation(
        "softmax_cross_entropy of any cotangent",
        3,
        (Bar(BULK_COPY, must=0.85), _OVER_XLA),
        cotangent="any",
    ),
)


def _logits_case(operation: _Operation, shape: tuple[int, int]) -> Case:
    options = dict(
        rows=shape[:1], classes=shape[1], dtype="bfloat16", cotangent=operation.cotangent
    )
    return _case(
        operation.name,
        shape,
        losses.softmax_cross_entropy(options),
        _optax_mean,
        _torch_mean,
        bytes=operation.passes * shape[0] * shape[1] * 2,
        bars=operation.bars,
    )


def _case(
    name: str,
    shape: tuple[int, ...],
    problem: Problem,
    stock: Function,
    torch: Function,
    **more: Any,
) -> Case:
    """Returns the case of a loss with its gradient; `more` are arguments of `of_config.case`."""
    programs = of_problem(problem, {"optax": stock})
    return of_config.case(
        f"{name} forward+backward",
        shape,
        programs,
        stock="optax",
        torch=torch,
        with_gradient=True,
        **more,
    )


def _optax_mean(logits, labels):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean().astype(jnp.float32)


def _torch_mean(logits, labels):
    import torch

    return torch.nn.functional.cross_entropy(logits.float(), labels.long())


# --- the logits of a linear layer -----------------------------------------------------------------


def _layer_case(shape: tuple[int, int, int]) -> Case:
    tokens, features, classes = shape

    def of_layer(mean: Function, x, w, labels):
        return mean(x @ w, labels)

    return _case(
        "linear_softmax_cross_entropy",
        shape,
        losses.linear_softmax_cross_entropy(
            dict(rows=(tokens,), width=features, classes=classes, dtype="bfloat16")
        ),
        partial(of_layer, _optax_mean),
        partial(of_layer, _torch_mean),
        bytes=2 * 2 * (tokens * features + features * classes),
        flops=2 * tokens * features * classes,
        bars=(Bar("xla", must=40.7 / 36.0),),
    )


# --- images ---------------------------------------------------------------------------------------


def _image_case(shape: tuple[int, int, int]) -> Case:
    return _case(
        "segmentation_loss",
        shape,
        losses.segmentation_loss(dict(shape=shape, classes=None, dtype="bfloat16")),
        _stock_segmentation,
        _torch_segmentation,
        # Logits and labels are read for the sums and for the gradient.
        bytes=shape[0] * shape[1] * shape[2] * (2 * (2 + 4) + 2),
        bars=(Bar("xla", must=2.0),),
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
