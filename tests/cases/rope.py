"""Shapes of rope, for the reference and for every kernel."""

from dataclasses import dataclass

import numpy as np

from tests.support.arrays import put


@dataclass(frozen=True)
class Case:
    rows: tuple[int, ...]
    """Axes before the heads; the last one is the length."""
    heads: int
    key_heads: int
    head_size: int
    rotary_dim: int | None = None
    interleaved: bool = False
    first: tuple[int, ...] | None = None
    """First position of each sequence; None for 0, without a batch axis."""

    def arguments(self, dtype, seed=0):
        """Returns (q, k)."""
        rng = np.random.default_rng(seed)
        return tuple(
            put(rng.normal(size=(*self.rows, heads, self.head_size)), dtype)
            for heads in (self.heads, self.key_heads)
        )

    def positions(self):
        """Returns positions, [T] or [B, T]."""
        steps = np.arange(self.rows[-1])
        return steps if self.first is None else np.array(self.first)[:, None] + steps


CASES = (
    Case((2, 5), 4, 2, 8),
    Case((2, 5), 3, 3, 8, interleaved=True, first=(7, 1000)),
    Case((7,), 2, 1, 10, rotary_dim=6),
    Case((2, 3), 2, 1, 10, rotary_dim=4, interleaved=True, first=(0, 3)),
)
