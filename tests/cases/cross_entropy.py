"""Shapes of the cross-entropies, for the reference and for every kernel."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp


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
    """None for the dtype of x."""

    def labels(self, dtype, seed=0):
        """Classes, of which about a third is `ignore_index` where there is one, or distributions."""
        keys = jax.random.split(jax.random.key(seed))
        if self.soft:
            logits = jax.random.normal(keys[0], (*self.tokens, self.classes))
            return jax.nn.softmax(logits).astype(dtype)
        labels = jax.random.randint(keys[0], self.tokens, 0, self.classes)
        ignore_index = self.options.get("ignore_index")
        if ignore_index is None:
            return labels
        return jnp.where(jax.random.bernoulli(keys[1], 0.3, self.tokens), ignore_index, labels)

    def logits(self, dtype, seed=1):
        return 3.0 * jax.random.normal(jax.random.key(seed), (*self.tokens, self.classes), dtype)

    def token_weights(self, dtype, seed=2):
        if not self.weights:
            return None
        return jax.random.uniform(jax.random.key(seed), self.tokens, dtype)

    def linear_layer(self, dtype, seed=3):
        """(x, w, bias), scaled to give logits of order 1."""
        keys = jax.random.split(jax.random.key(seed), 3)
        w_dtype = dtype if self.w_dtype is None else self.w_dtype
        x = jax.random.normal(keys[0], (*self.tokens, self.features), dtype)
        w = jax.random.normal(keys[1], (self.features, self.classes)) * self.features**-0.5
        bias = jax.random.normal(keys[2], (self.classes,), w_dtype) if self.bias else None
        return x, w.astype(w_dtype), bias


CASES = (
    Case((17,), 8, 11),
    Case((3, 7), 5, 33, weights=True, bias=True, options={"label_smoothing": 0.1, "z_loss": 1e-2}),
    Case((29,), 6, 7, w_dtype="float32", options={"ignore_index": -100, "reduction": "sum"}),
    Case((4, 5), 6, 9, soft=True, weights=True, options={"label_smoothing": 0.2, "z_loss": 1e-2}),
)
