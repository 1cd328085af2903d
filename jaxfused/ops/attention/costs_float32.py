"""Predicted times of float32 attention in the CUDA kernels and in XLA; the faster one runs first.

A CTA of the kernels owns a tile of rows of one head and visits blocks of columns one after the other.
Two CTAs that share an SM take almost twice as long as one. XLA writes the logits to memory and reads
them several times. The microseconds were fitted to kernel times on an H200 (benchmarks/LAB.md); other
GPUs take the same order, which is the best guess.
"""

import math
from dataclasses import dataclass

_LAUNCH = 4.0
"""Microseconds of a kernel's start and end."""
_BYTES = 3.9e6
"""Bytes that memory moves in a microsecond."""


@dataclass(frozen=True)
class Work:
    """Sizes of a call."""

    batch: int
    queries: int
    keys: int
    heads: int
    key_heads: int
    head_size: int
    """Larger one of the head sizes of keys and values."""
    visited_keys: float
    """Number of keys that a query's position allows, on average over the queries."""
    multiprocessors: int

    def forward(self) -> float:
        """Microseconds of the CUDA kernel."""
        columns = 64 if self.head_size <= 64 else 32
        per_visit = 2.05 if self.head_size <= 64 else 1.95
        rounds = self._rounds(self.heads, self.queries, 128)
        return _LAUNCH + rounds * per_visit * self._visits(
            self.visited_keys, self.keys, 128, columns
        )

    def backward(self) -> float:
        """Microseconds of the CUDA kernels."""
        rows = 128 if self.head_size <= 64 else 64
        of_queries, of_keys = (1.4, 1.8) if self.head_size <= 64 else (1.7, 2.1)
        groups = self.heads // self.key_heads
        visited_queries = self.queries * self.visited_keys / max(1, self.keys)
        delta = 8 * self._of_queries() / _BYTES
        by_queries = self._rounds(self.heads, self.queries, rows) * of_queries
        by_queries *= self._visits(self.visited_keys, self.keys, rows, 32)
        by_keys = self._rounds(self.key_heads, self.keys, rows) * of_keys
        by_keys *= 1 + groups * (self._visits(visited_queries, self.queries, rows, 32) - 1)
        return 3 * _LAUNCH + delta + by_queries + by_keys

    def xla_forward(self) -> float:
        """Microseconds of XLA's kernels: passes over the logits, and copies in other layouts."""
        copies = (20 * self._of_queries() + 24 * self._of_keys()) / _BYTES
        return 10.0 + 4.2e-6 * self._logits() + copies

    def xla_backward(self) -> float:
        """Microseconds of XLA's kernels, which compute the forward once more."""
        copies = 60 * (self._of_queries() + self._of_keys()) / _BYTES
        return 28.0 + 13e-6 * self._logits() + copies

    @staticmethod
    def _visits(visited: float, count: int, rows: int, columns: int) -> int:
        """Returns the column blocks that a tile of rows visits, plus one for its start and end.

        A row visits `visited` of the `count` columns, and the next row other columns, unless all visit
        all.
        """
        return 1 + math.ceil(min(count, visited + (rows / 2 if visited < count else 0)) / columns)

    def _rounds(self, heads: int, length: int, rows: int) -> float:
        """Returns the number of CTAs of the SM that has the most of them."""
        ctas = self.batch * heads * -(-length // rows)
        return max(1.0, -(-ctas // max(1, self.multiprocessors)))

    def _logits(self) -> float:
        return float(self.batch) * self.heads * self.queries * self.keys

    def _of_queries(self) -> float:
        """Number of elements of the queries."""
        return float(self.batch) * self.queries * self.heads * self.head_size

    def _of_keys(self) -> float:
        """Number of elements of the keys; the values have as many."""
        return float(self.batch) * self.keys * self.key_heads * self.head_size
