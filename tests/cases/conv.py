"""Shapes of conv, for the reference and for every kernel."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.cases.normal import normal
from tests.support.arrays import put


@dataclass(frozen=True)
class Case:
    shape: tuple[int, ...]
    kernel: tuple[int, ...]
    features: int
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the call, activation among them."""
    bias: bool = False
    residual_shape: tuple[int, ...] | None = None
    w_dtype: str | None = None
    """Dtype of w; None for x's."""

    def arguments(self, dtype, seed=0):
        """Returns (x, w, bias, residual); weights are scaled to keep the result of order 1."""
        rng = np.random.default_rng(seed)
        w_dtype = dtype if self.w_dtype is None else self.w_dtype
        channels = self.shape[-1] // self.options.get("feature_group_count", 1)
        w = rng.normal(size=(*self.kernel, channels, self.features))
        return (
            normal(rng, dtype, *self.shape),
            put(w / (channels * max(self.kernel)), w_dtype),
            normal(rng, w_dtype, self.features) if self.bias else None,
            None if self.residual_shape is None else normal(rng, dtype, *self.residual_shape),
        )


CASES = (
    Case((2, 5, 7, 3), (3, 3), 3, {"activation": "relu"}, bias=True, residual_shape=(2, 5, 7, 3)),
    Case((2, 9, 3), (4,), 5, {"strides": 2, "activation": "silu"}, bias=True, w_dtype="float32"),
    Case((2, 6, 6, 4), (3, 2), 8, {"feature_group_count": 4, "padding": "VALID"}),
)

DENSE_CASES = (
    Case(
        (2, 5, 8, 64), (3, 3), 64, {"activation": "silu"}, bias=True, residual_shape=(2, 5, 8, 64)
    ),
    Case((1, 6, 7, 16), (2, 3), 24, {"activation": "relu", "padding": "VALID"}, bias=True),
    Case((2, 6, 8, 64), (3, 3), 8, {"strides": 2, "activation": "gelu_tanh"}, bias=True),
    Case((2, 9, 8), (1,), 16, {"activation": "relu"}, bias=True, w_dtype="float32"),
    Case((2, 9, 16), (4,), 16, {"padding": [(3, 0)]}, bias=True),
    Case((2, 11, 12, 3), (5, 5), 16, {"strides": 2, "activation": "relu"}, bias=True),
)
DENSE_KERNEL_CASES = (
    Case((3, 33, 47, 64), (3, 3), 64, {"activation": "silu"}, bias=True),
    Case((2, 30, 31, 136), (5, 5), 72, {"activation": "gelu_erf"}, bias=True),
    Case((2, 32, 32, 128), (3, 3), 256, {"strides": 2, "activation": "relu"}, bias=True),
    Case((2, 24, 24, 320), (1, 1), 320, {"activation": "silu"}, residual_shape=(2, 24, 24, 320)),
    Case((3, 61, 64, 3), (7, 7), 64, {"strides": 2}),
    Case((2, 40, 41, 3), (3, 3), 64, {"activation": "silu"}, bias=True),
    Case((2, 16, 16, 64), (3, 3), 64, {"activation": "hard_swish"}, bias=True),
    Case((2, 16, 16, 64), (1, 1), 64, {"activation": "relu6"}, bias=True),
    Case((2, 16, 16, 64), (3, 3), 64, {"activation": "leaky_relu"}, bias=True),
)
"""Cases with several tiles of channels and of pixels, and last tiles that are not full."""


def depthwise(shape, kernel, **options):
    channels = shape[-1]
    bias, residual = options.pop("bias", True), options.pop("residual_shape", None)
    options["feature_group_count"] = channels
    return Case(shape, kernel, channels, options, bias=bias, residual_shape=residual)


DEPTHWISE_CASES = (
    depthwise((2, 5, 7, 6), (3, 3), activation="silu", residual_shape=(2, 5, 7, 6)),
    depthwise((2, 8, 9, 4), (3, 3), strides=2, activation="relu"),
    depthwise((1, 9, 8, 4), (7, 7), bias=False),
    depthwise((2, 9, 6, 4), (5, 5), padding="VALID", activation="gelu_tanh"),
    depthwise((2, 1, 1, 2), (3, 3)),
    depthwise((2, 6, 7, 4), (3, 3), activation="hard_swish"),
)
CONV1D_CASES = (
    depthwise((3, 11, 8), (4,), padding=[(3, 0)], activation="silu", residual_shape=(3, 11, 8)),
    depthwise((2, 70, 6), (3,), activation="gelu_tanh"),
    depthwise((2, 9, 4), (5,), padding="VALID", bias=False),
    depthwise((1, 3, 130, 5), (1, 2), padding=[(0, 0), (1, 0)], activation="relu", bias=False),
    depthwise((2, 90, 12), (7,), activation="gelu_erf", residual_shape=(2, 90, 12)),
    depthwise((2, 1, 4), (4,), padding=[(0, 3)], activation="silu"),
    depthwise((2, 6, 4), (3,), padding=[(2, 2)], activation="silu"),
)
"""Cases with several pieces of the length, channels not in vectors, results shorter or longer than x."""
CONV1D_KERNEL_CASES = (
    depthwise((5, 300, 64), (7,), activation="gelu_erf"),
    depthwise((4, 1000, 512), (4,), padding=[(3, 0)], activation="silu"),
    depthwise((1, 5000, 72), (4,), padding=[(3, 0)], activation="silu"),
    depthwise((2, 777, 33), (3,), activation="silu", residual_shape=(2, 777, 33)),
)
DEPTHWISE_KERNEL_CASES = (
    depthwise((4, 56, 56, 128), (3, 3), activation="relu"),
    depthwise((3, 33, 47, 72), (7, 7), residual_shape=(3, 33, 47, 72)),
    depthwise((2, 30, 31, 130), (5, 5), strides=2),
    depthwise((3, 19, 21, 16), (3, 3), activation="silu"),
    depthwise((2, 21, 18, 28), (3, 3), strides=2, residual_shape=(2, 11, 9, 28)),
    depthwise((2, 28, 28, 96), (3, 3), activation="relu6"),
    depthwise((2, 28, 28, 96), (5, 5), strides=2, activation="hard_swish"),
)
"""Cases with several strips, more channels than a block, and a last vector that is not full."""

TILED_CASES = (
    depthwise((2, 9, 10, 24), (7, 7), activation="silu", residual_shape=(2, 9, 10, 24)),
    depthwise((17, 7, 7, 40), (7, 7)),
    depthwise((5, 14, 14, 64), (7, 7), padding="VALID", bias=False),
    depthwise((2, 61, 70, 16), (5, 5), activation="gelu_tanh"),
    depthwise((2, 33, 47, 24), (7, 7), residual_shape=(2, 33, 47, 24)),
    depthwise((2, 28, 28, 80), (7, 7), activation="relu"),
)
"""Cases that tensor cores compute: tiles of several images, last tiles that are not full."""
