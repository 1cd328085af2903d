"""Shapes of segmentation_loss, for the reference and for every kernel."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.support.arrays import put


@dataclass(frozen=True)
class Case:
    pixels: tuple[int, ...]
    """Shape of the labels, [B, ...]."""
    classes: int | None
    """Number of classes; None for a binary mask."""
    weights: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def labels(self, seed=0):
        """Draws classes, about a third `ignore_index` if there is one."""
        rng = np.random.default_rng(seed)
        labels = rng.integers(self.classes or 2, size=self.pixels, dtype=np.int32)
        if (ignore_index := self.options.get("ignore_index")) is not None:
            labels[rng.random(self.pixels) < 0.3] = ignore_index
        return put(labels)

    def arguments(self, dtype, seed=1):
        """Returns (logits, weights)."""
        rng = np.random.default_rng(seed)
        shape = self.pixels if self.classes is None else (*self.pixels, self.classes)
        logits = put(rng.normal(scale=3.0, size=shape), dtype)
        return logits, put(rng.random(self.pixels), dtype) if self.weights else None


CASES = (
    Case((2, 5, 7), None),
    Case((3, 6, 5), None, weights=True, options={"ignore_index": 255, "dice_weight": 0.5}),
    Case((2, 4, 3, 2), 3, weights=True, options={"smooth": 1e-2, "reduction": "none"}),
    Case((3, 9), 5, options={"ignore_index": -1, "cross_entropy_weight": 2.0}),
    Case((2, 7, 5), None, options={"focal_gamma": 2.0, "tversky_alpha": 0.3, "tversky_beta": 0.7}),
    Case((2, 30), 6, weights=True, options={"focal_gamma": 1.5, "tversky_beta": 0.9}),
)
