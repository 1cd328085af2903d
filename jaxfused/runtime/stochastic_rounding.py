"""Stochastic rounding, by random bits that do not depend on the sharding.

A parameter in bfloat16 has 8 significant bits, so that a step smaller than half of the last bit would
never change it. Here the updated value is rounded away from 0 with a probability equal to the part that
is cut off, in units of the last bit, else towards 0: its expected value is the unrounded one. The random
bits depend on a seed, the step, the leaf, the array of the leaf
(see ARRAYS) and the element's index in the unsharded array.
"""

import jax
import jax.numpy as jnp

from jaxfused.runtime.dropout import murmur

ARRAYS = ("parameter", "first_moment", "second_moment")
"""Arrays that an optimizer stores for a leaf, each with its own random bits."""


def leaf_seeds(words: jax.Array, leaf: jax.Array | int, array: str) -> jax.Array:
    """Returns the two seed words [2, ...] of an array's random bits.

    Args:
      words: uint32 [2], a seed and the number of the step.
      leaf: the leaf's number in its tree, or an array of such numbers.
      array: one of `ARRAYS`.
    """
    row = jnp.asarray(leaf, jnp.uint32) * jnp.uint32(4) + jnp.uint32(ARRAYS.index(array))
    return jnp.stack([murmur(word ^ row) for word in words]) + jnp.uint32(0x9E3779B9)


def random_halves(seeds: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns 16 random bits for each element of an unsharded array, as uint32.

    Elements of index i (modulo 2^32) and i + 1, i even, share one word: `x = seeds[0] ^ (i // 2)`, then
    `murmur(x, tweak=seeds[1])` as in `dropout.keep`. Element i gets the lower half.
    """
    index = jnp.zeros(shape, jnp.uint32)
    stride = 1
    for axis in reversed(range(len(shape))):
        along = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
        index = index + along * jnp.uint32(stride % 2**32)
        stride *= shape[axis]
    word = murmur(seeds[0] ^ (index >> 1), seeds[1])
    return jnp.where(index & 1, word >> 16, word & 0xFFFF)


def round_to_bfloat16(x: jax.Array, halves: jax.Array) -> jax.Array:
    """Rounds float32 x to bfloat16, at random by the 16 bits `halves`.

    Away from 0 where the lower 16 bits of x plus `halves` overflow 16 bits, else towards 0.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    rounded = ((bits + halves) >> 16).astype(jnp.uint16)
    rounded = jax.lax.bitcast_convert_type(rounded, jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), rounded, x.astype(jnp.bfloat16))
