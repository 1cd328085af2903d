"""Shapes of the cross-entropies, for the reference and for every kernel."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.support.arrays import put


@dataclass(frozen=True)
class Case:
    tokens: tuple[int, ...]
    features: int
    classes: int
    soft: bool = False
    weights: bool = False
    bias: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    w_dtype: str | None = None
    """Dtype of w; None for x's."""

    def labels(self, dtype, seed=0):
        """Draws classes, about a third `ignore_index` if there is one, or distributions."""
        rng = np.random.default_rng(seed)
        if self.soft:
            odds = np.exp(rng.normal(size=(*self.tokens, self.classes)))
            return put(odds / odds.sum(-1, keepdims=True), dtype)
        labels = rng.integers(self.classes, size=self.tokens, dtype=np.int32)
        if (ignore_index := self.options.get("ignore_index")) is not None:
            labels[rng.random(self.tokens) < 0.3] = ignore_index
        return put(labels)

    def logits(self, dtype, seed=1):
        rng = np.random.default_rng(seed)
        return put(rng.normal(scale=3.0, size=(*self.tokens, self.classes)), dtype)

    def token_weights(self, dtype, seed=2):
        if not self.weights:
            return None
        return put(np.random.default_rng(seed).random(self.tokens), dtype)

    def linear_layer(self, dtype, seed=3):
        """Returns (x, w, bias), scaled to give logits of order 1."""
        rng = np.random.default_rng(seed)
        w_dtype = dtype if self.w_dtype is None else self.w_dtype
        x = rng.normal(size=(*self.tokens, self.features))
        w = rng.normal(size=(self.features, self.classes)) * self.features**-0.5
        bias = put(rng.normal(size=self.classes), w_dtype) if self.bias else None
        return put(x, dtype), put(w, w_dtype), bias


CASES = (
    Case((17,), 8, 11),
    Case((3, 7), 5, 33, weights=True, bias=True, options={"label_smoothing": 0.1, "z_loss": 1e-2}),
    Case((29,), 6, 7, w_dtype="float32", options={"ignore_index": -100, "reduction": "sum"}),
    Case((4, 5), 6, 9, soft=True, weights=True, options={"label_smoothing": 0.2, "z_loss": 1e-2}),
)
