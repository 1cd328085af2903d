"""Masks that say which query attends to which key, in every implementation of dot_product_attention."""

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp

from jaxfused.ops.attention.masks.pattern import Pattern
from jaxfused.runtime import resharding

EMPTY_LSE = -0.7 * float(jnp.finfo(jnp.float32).max)
"""Log-sum-exp of a row that attends to nothing: finite, so that the difference of two is 0."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mask:
    """Conditions that query t and key s must all meet for t to attend to s.

    Query t stands at position p = t + offset among the keys, and the offset is 0 where none is given.
    Position and lengths allow each query one interval of keys. Its ends do not decrease with t among the
    queries within their length. So a kernel needs only the first and the last row of a block of queries:
    keys before the first row's start or from the last row's stop on are masked in all rows, and keys
    from the last row's start to the first row's stop in none.
    """

    is_causal: bool = field(default=False, metadata={"static": True})
    """Condition s <= p."""
    window: tuple[int, int] | None = field(default=None, metadata={"static": True})
    """Condition p - left <= s <= p + right."""
    query_lengths: jax.Array | None = None
    """Lengths [B], condition t < length; a query at or beyond the length attends to nothing."""
    key_lengths: jax.Array | None = None
    """Lengths [B], condition s < length."""
    query_segments: jax.Array | None = None
    """Ids [B, T] of the queries' segments; the condition is the same id in key_segments."""
    key_segments: jax.Array | None = None
    """Ids [B, S] of the keys' segments."""
    explicit: jax.Array | None = None
    """Booleans that broadcast to [B, N, T, S], True where a query may attend to a key."""
    query_offset: jax.Array | None = None
    """Positions [B] of the first query among the keys."""
    pattern: Pattern | None = field(default=None, metadata={"static": True})
    """Combined mask objects of a call; `query_offset` is not added to the positions that they see."""
    pattern_heads: jax.Array | None = None
    """Indices [N] of each head's mask in the pattern; None if all heads share one."""

    def key_interval(self, query: jax.Array, key_count: int) -> tuple[jax.Array, jax.Array]:
        """Returns (start, stop), [B or 1, T]: the keys of each query by position and lengths alone."""
        position = query[None]
        if self.query_offset is not None:
            position = position + self.query_offset[:, None]
        start = jnp.zeros_like(position)
        stop = jnp.full_like(position, key_count)
        if self.is_causal:
            stop = jnp.minimum(stop, position + 1)
        if self.window is not None:
            left, right = self.window
            start = jnp.maximum(start, position - left)
            stop = jnp.minimum(stop, position + right + 1)
        if self.key_lengths is not None:
            stop = jnp.minimum(stop, self.key_lengths[:, None])
        if self.query_lengths is not None:
            stop = jnp.where(query[None] < self.query_lengths[:, None], stop, 0)
        return start, stop

    def allowed(self, query_count: int, key_count: int) -> jax.Array:
        """Returns booleans that broadcast to [B, N, T, S], True where a query attends to a key."""
        key = jnp.arange(key_count, dtype=jnp.int32)[None, None]
        start, stop = self.key_interval(jnp.arange(query_count, dtype=jnp.int32), key_count)
        allowed = (key >= start[..., None]) & (key < stop[..., None])
        if self.query_segments is not None and self.key_segments is not None:
            # Devices may share the tokens of queries and keys; a mask must not be split along both.
            keys = resharding.unsplit(self.key_segments, [1])
            allowed = allowed & (self.query_segments[:, :, None] == keys[:, None, :])
        allowed = allowed[:, None]
        if self.pattern is not None:
            allowed = allowed & self.pattern.allowed(self.pattern_heads)
        return allowed if self.explicit is None else allowed & self.explicit

    def limited_to(self, allowed: jax.Array) -> "Mask":
        """Returns the mask with one more condition: `allowed`, [B or 1, N or 1, T or 1, S or 1]."""
        return replace(self, explicit=allowed if self.explicit is None else self.explicit & allowed)

    def without_pattern(self) -> "Mask":
        """Returns an equal mask, with the pattern as a part of `explicit`."""
        if self.pattern is None:
            return self
        explicit = self.pattern.allowed(self.pattern_heads)
        if self.explicit is not None:
            explicit = explicit & self.explicit
        return replace(self, pattern=None, pattern_heads=None, explicit=explicit)
