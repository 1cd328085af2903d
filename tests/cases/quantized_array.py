"""Quantised arrays for tests: shapes and options, for the reference and for every kernel."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.support.arrays import put


@dataclass(frozen=True)
class Case:
    shape: tuple[int, ...]
    dtype: str
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of quantize."""

    def x(self, dtype="float32", seed=0):
        """Draws columns of unlike scale, with a mean that is not zero."""
        rng = np.random.default_rng(seed)
        scale = 2.0 ** rng.uniform(-8, 8, self.shape[-1])
        return put(rng.normal(0.3, size=self.shape) * scale, dtype)


CASES = (
    Case((6, 5), "int8"),
    Case((96, 3), "int8", {"group_size": 32, "symmetric": False}),
    Case((7, 9), "int8", {"per_tensor": True}),
    Case((3, 3, 4, 5), "int8", {"axis": 2, "symmetric": False}),
    Case((128, 3), "int4", {"group_size": 64}),
    Case((6, 5), "int4", {"symmetric": False}),
    Case((3, 8), "int4", {"axis": -1}),
    Case((5,), "float8_e4m3fn", {"axis": 0}),
    Case((128, 3), "float8_e4m3fn", {"group_size": 128}),
    Case((2, 6, 5), "float8_e5m2"),
)
