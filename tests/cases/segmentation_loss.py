"""Shapes of segmentation_loss, for the reference and for every kernel."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Case:
    pixels: tuple[int, ...]
    """[B, ...]"""
    classes: int | None
    """None for a binary mask."""
    weights: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def labels(self, seed=0):
        """Classes, of which about a third is `ignore_index` where there is one."""
        keys = jax.random.split(jax.random.key(seed))
        labels = jax.random.randint(keys[0], self.pixels, 0, self.classes or 2)
        ignore_index = self.options.get("ignore_index")
        if ignore_index is None:
            return labels
        return jnp.where(jax.random.bernoulli(keys[1], 0.3, self.pixels), ignore_index, labels)

    def arguments(self, dtype, seed=1):
        """(logits, weights)."""
        keys = jax.random.split(jax.random.key(seed))
        shape = self.pixels if self.classes is None else (*self.pixels, self.classes)
        logits = 3.0 * jax.random.normal(keys[0], shape, dtype)
        return logits, jax.random.uniform(keys[1], self.pixels, dtype) if self.weights else None


CASES = (
    Case((2, 5, 7), None),
    Case((3, 6, 5), None, weights=True, options={"ignore_index": 255, "dice_weight": 0.5}),
    Case((2, 4, 3, 2), 3, weights=True, options={"smooth": 1e-2, "reduction": "none"}),
    Case((3, 9), 5, options={"ignore_index": -1, "cross_entropy_weight": 2.0}),
)
