"""Packs several numbers of few bits into a byte or word, as the docstring of `quantized_array` says."""

import functools
import operator

import jax
import jax.numpy as jnp

from jaxfused.runtime.shapes import in_parts, reshaped


def pack_int4(values: jax.Array, axis: int) -> jax.Array:
    """Packs pairs of integers -8 to 7 along `axis` into uint8, the first of each in the low bits."""
    low, high = _every(2, values, axis % values.ndim)
    low, high = (half.astype(jnp.uint8) & 15 for half in (low, high))
    return low | (high << 4)


def unpack_int4(packed: jax.Array, axis: int) -> jax.Array:
    """Returns the integers that `pack_int4` packed, as int8."""
    axis = axis % packed.ndim
    # One shift of a broadcast axis computes both halves of a byte; two results would have to be
    # interleaved by an extra write. Shifting an int8 to the right repeats its sign.
    pairs = jnp.expand_dims(packed, axis + 1)
    shape = [2 if i == axis + 1 else 1 for i in range(pairs.ndim)]
    shifts = jnp.array([4, 0], jnp.uint8).reshape(shape)
    numbers = jax.lax.bitcast_convert_type(pairs << shifts, jnp.int8) >> 4
    return numbers.reshape(*packed.shape[:axis], 2 * packed.shape[axis], *packed.shape[axis + 1 :])


def pack_codes(codes: jax.Array, axis: int, bits: int) -> jax.Array:
    """Packs 2 codes of 4 bits, or 4 of 2 bits, along `axis` into a uint8, the first in the low bits."""
    axis, count = axis % codes.ndim, 8 // bits
    parts = _every(count, codes, axis)
    shifted = [part.astype(jnp.uint8) << (bits * i) for i, part in enumerate(parts)]
    return functools.reduce(operator.or_, shifted)


def unpack_codes(packed: jax.Array, axis: int, bits: int) -> jax.Array:
    """Returns the codes that `pack_codes` packed, as uint8."""
    axis, count = axis % packed.ndim, 8 // bits
    shape = [count if i == axis + 1 else 1 for i in range(packed.ndim + 1)]
    shifts = jnp.arange(0, 8, bits, dtype=jnp.uint8).reshape(shape)
    codes = (jnp.expand_dims(packed, axis + 1) >> shifts) & (2**bits - 1)
    return codes.reshape(
        *packed.shape[:axis], count * packed.shape[axis], *packed.shape[axis + 1 :]
    )


def _every(count: int, array: jax.Array, axis: int) -> list[jax.Array]:
    """Returns `count` slices along `axis`; slice i has entries i, i + count, i + 2 * count ..."""
    array = in_parts(array, axis, array.shape[axis] // count)
    starts = (min(i, array.shape[axis]) for i in range(count))
    return [jax.lax.slice_in_dim(array, i, None, stride=count, axis=axis) for i in starts]


NIBBLES = 8
"""Number of int4 values in a 32-bit word."""
WORD_BLOCK = 128
"""Number of int4 values along the summed axis K in a block, whose words are stored contiguously."""


def pack_words(values: jax.Array) -> jax.Array:
    """Packs integers -8 to 7 [..., N, K] into words [..., N, K / 8] for kernels; 128 divides K.

    Of each run of 16 numbers along K, thread t of four feeds numbers 2 t, 2 t + 1, 2 t + 8 and 2 t +
    9 to a WGMMA. A word holds one thread's numbers of two runs, each plus 8: those of even index in
    its low half, of odd index in its high half. The words of a block of 128 numbers are ordered by t,
    then by run.
    """
    *leading, k = values.shape
    values = in_parts(values, values.ndim - 1, k // WORD_BLOCK)
    # Axes of `runs`: block, word of the thread, run of the word, half of the run, thread, odd.
    runs = (values.astype(jnp.int32) + 8).reshape(*leading, k // WORD_BLOCK, 4, 2, 2, 4, 2)
    runs = jnp.moveaxis(runs, (-2, -5, -1), (-5, -4, -3))
    nibbles = reshaped(runs, *leading, k // NIBBLES, NIBBLES)
    shifted = jax.lax.bitcast_convert_type(nibbles, jnp.uint32) << _nibble_shifts()
    words = jnp.sum(shifted, axis=-1, dtype=jnp.uint32)
    return jax.lax.bitcast_convert_type(words, jnp.int32)


def unpack_words(words: jax.Array) -> jax.Array:
    """Returns the integers [..., N, K] that `pack_words` packed, as int8."""
    *leading, count = words.shape
    unsigned = jax.lax.bitcast_convert_type(words, jnp.uint32)
    nibbles = ((unsigned[..., None] >> _nibble_shifts()) & 15).astype(jnp.int8) - jnp.int8(8)
    blocks = count * NIBBLES // WORD_BLOCK
    # Axes: block, thread, word of the thread, odd, run of the word, half of the run. One axis is split
    # at a time, which JAX can do for arrays whose types state a sharding.
    runs = nibbles.reshape(*leading, blocks, 4, 4, NIBBLES)
    runs = runs.reshape(*leading, blocks, 4, 4, 2, 2, 2)
    return jnp.moveaxis(runs, (-5, -4, -3), (-2, -5, -1)).reshape(*leading, count * NIBBLES)


def _nibble_shifts() -> jax.Array:
    return 4 * jnp.arange(NIBBLES, dtype=jnp.uint32)
