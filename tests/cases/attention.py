"""Shapes and options of dot_product_attention, for the reference and for every kernel."""

import functools
from dataclasses import dataclass

import numpy as np

from tests.cases.normal import normal


@dataclass(frozen=True)
class Case:
    name: str
    queries: int
    keys: int
    heads: int = 2
    key_heads: int = 2
    head_size: int = 8
    value_head_size: int | None = None
    batch: int = 2
    bias: tuple[int, ...] | None = None
    """Shape of the bias, None for no bias; `mask` is the mask's."""
    mask: tuple[int, ...] | None = None
    scale: float | None = None
    is_causal: bool = False
    window: int | tuple[int, int] | None = None
    offset: int | tuple[int, ...] | str | None = None
    query_lengths: tuple[int, ...] | None = None
    key_lengths: tuple[int, ...] | None = None
    segments: int = 0
    """Number of segments, 0 for none; queries have one more, which has no key."""
    soft_cap: float | None = None
    sinks: bool = False

    def __str__(self) -> str:
        return self.name

    def arrays(self, dtype, seed=0):
        """Returns (query, key, value, bias, sinks), the operands with gradients."""
        draw = functools.partial(normal, np.random.default_rng(seed), dtype)
        value_head_size = self.value_head_size or self.head_size
        return (
            draw(self.batch, self.queries, self.heads, self.head_size),
            draw(self.batch, self.keys, self.key_heads, self.head_size),
            draw(self.batch, self.keys, self.key_heads, value_head_size),
            None if self.bias is None else draw(*self.bias),
            draw(self.heads) if self.sinks else None,
        )

    def offsets(self):
        """Returns the position of each sequence's first query, [B]."""
        offset = self.offset
        if offset == "bottom_right":
            keys, queries = self.key_lengths or self.keys, self.query_lengths or self.queries
            offset = np.subtract(keys, queries)
        return np.broadcast_to(np.int32(0 if offset is None else offset), (self.batch,))

    def options(self, seed=1):
        """Returns the other arguments of dot_product_attention; a mask leaves the first query no key."""
        rng = np.random.default_rng(seed)
        options = {"scale": self.scale, "is_causal": self.is_causal}
        if self.mask is not None:
            mask = rng.random(self.mask) < 0.7
            mask[..., 0, :] = False
            options["mask"] = mask
        if self.window is not None:
            options["local_window_size"] = self.window
        if self.offset is not None:
            is_static = isinstance(self.offset, int | str)
            options["query_offset"] = self.offset if is_static else np.array(self.offset, np.int32)
        if self.query_lengths is not None:
            options["query_seq_lengths"] = np.array(self.query_lengths, np.int32)
        if self.key_lengths is not None:
            options["key_value_seq_lengths"] = np.array(self.key_lengths, np.int32)
        if self.segments:
            options["query_segment_ids"] = rng.integers(
                self.segments + 1, size=(self.batch, self.queries)
            )
            options["key_value_segment_ids"] = rng.integers(
                self.segments, size=(self.batch, self.keys)
            )
        if self.soft_cap is not None:
            options["logits_soft_cap"] = self.soft_cap
        return options


JAX_CASES = (
    Case("self-attention", 7, 7),
    Case("grouped queries, causal, fewer keys", 7, 5, heads=6, is_causal=True),
    Case("one key head, bias and mask", 5, 9, 4, 1, bias=(1, 4, 5, 9), mask=(2, 1, 5, 9)),
    Case("lengths", 6, 5, query_lengths=(4, 6), key_lengths=(5, 1), bias=(1, 2, 6, 5)),
    Case("causal window", 6, 8, is_causal=True, window=2, scale=0.3),
    Case("window, more queries than keys", 9, 4, window=(2, 1)),
)
"""Cases that `jax.nn.dot_product_attention` supports too."""

CASES = (
    *JAX_CASES,
    Case("no keys in one sequence", 3, 5, key_lengths=(0, 4)),
    Case("segments", 6, 7, segments=2),
    Case(
        "new tokens of a cache", 3, 9, 6, is_causal=True, offset="bottom_right", key_lengths=(9, 5)
    ),
    Case("window at offsets", 5, 9, 6, window=(3, 1), offset=(6, -2), segments=2, sinks=True),
    Case("more queries than keys, at the end", 7, 4, is_causal=True, window=(2, 5), offset=-3),
    Case("soft cap and sinks", 9, 11, heads=6, soft_cap=1.5, sinks=True),
    Case("wide values", 5, 6, head_size=3, value_head_size=11, bias=(2, 1, 6), mask=(2, 5, 6)),
    Case(
        "everything",
        11,
        13,
        heads=6,
        bias=(1, 1, 11, 13),
        mask=(2, 6, 11, 13),
        is_causal=True,
        window=(6, 3),
        query_lengths=(9, 11),
        key_lengths=(13, 7),
        segments=2,
        soft_cap=2.0,
        sinks=True,
    ),
)
