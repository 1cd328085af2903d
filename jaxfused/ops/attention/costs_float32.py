"""How long attention of float32 takes in the CUDA kernels and in XLA, which says which runs first.

A CTA of the kernels owns a tile of rows of one head and visits blocks of columns one after the other.
Two CTAs that share a multiprocessor take almost twice as long as one. XLA writes the logits to memory
and reads them several times. The microseconds were fitted to kernel times on an H200
(benchmarks/LAB.md); on another GPU the same order is the best guess.
"""

import math
from dataclasses import dataclass

_LAUNCH = 4.0
"""A kernel's start and end."""
_BYTES = 3.9e6
"""The bytes that memory moves."""


@dataclass(frozen=True)
class Work:
    """The sizes of a call."""

    batch: int
    queries: int
    keys: int
    heads: int
    key_heads: int
    head_size: int
    """The larger of the head sizes of the keys and the values."""
    visited_keys: float
    """The keys to which a query may attend by its position, on average over the queries."""
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
        """How many blocks of columns a tile of rows visits, and one for what comes before and after.

        A row visits `visited` of the `count` columns, and the next row others, unless all visit all.
        """
        return 1 + math.ceil(min(count, visited + (rows / 2 if visited < count else 0)) / columns)

    def _rounds(self, heads: int, length: int, rows: int) -> float:
        """How many CTAs the multiprocessor with the most of them gets."""
        ctas = self.batch * heads * -(-length // rows)
        return max(1.0, -(-ctas // max(1, self.multiprocessors)))

    def _logits(self) -> float:
        return float(self.batch) * self.heads * self.queries * self.keys

    def _of_queries(self) -> float:
        """The values of the queries."""
        return float(self.batch) * self.queries * self.heads * self.head_size

    def _of_keys(self) -> float:
        """The values of the keys and of the values together, halved."""
        return float(self.batch) * self.keys * self.key_heads * self.head_size
