"""Keys and values of the tokens that a model has read, for each sequence of a batch."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax

from examples.lm.config import Config


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerCache:
    """Keys and values of one layer, [B, S, K, H] each: S places for every sequence."""

    keys: jax.Array
    values: jax.Array

    def append(self, keys: jax.Array, values: jax.Array, lengths: jax.Array) -> "LayerCache":
        """Returns the cache with [B, T, K, H] written at place lengths[b] of sequence b."""

        @jax.vmap
        def write(cache: jax.Array, new: jax.Array, at: jax.Array) -> jax.Array:
            return lax.dynamic_update_slice(cache, new.astype(cache.dtype), (at, 0, 0))

        return LayerCache(write(self.keys, keys, lengths), write(self.values, values, lengths))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """The caches of all layers.

    What lies beyond a sequence's length is not read, and is written over by what comes next.
    """

    layers: tuple[LayerCache, ...]
    lengths: jax.Array
    """How many tokens of each sequence are held, [B]."""

    @classmethod
    def zeros(cls, config: Config, *, batch: int, length: int, dtype: jax.typing.DTypeLike):
        """Returns an empty cache of `length` places for each of `batch` sequences."""
        shape = (batch, length, config.key_heads, config.head_size)
        layers = tuple(
            LayerCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
            for _ in range(config.depth)
        )
        return cls(layers, jnp.zeros(batch, jnp.int32))

    def positions(self, tokens: int) -> jax.Array:
        """Returns the positions of the next `tokens` tokens, [B, T]."""
        return self.lengths[:, None] + jnp.arange(tokens)

    def counted(self, tokens: jax.Array | int) -> "Cache":
        """Returns the cache with so many more tokens of each sequence held."""
        return replace(self, lengths=self.lengths + tokens)

    def sequence(self, index: jax.Array) -> "Cache":
        """Returns the cache of one sequence alone, as a batch of 1."""
        return jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, index, 1), self)

    def with_sequence(self, index: jax.Array, cache: "Cache") -> "Cache":
        """Returns the cache with that of one sequence, a batch of 1, in its place."""
        return jax.tree.map(
            lambda a, part: lax.dynamic_update_slice_in_dim(a, part, index, 0), self, cache
        )
