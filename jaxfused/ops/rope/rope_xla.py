"""Rotary position embedding in plain jax.numpy: the angles, their scalings, and the rotation."""

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxfused.ops.rope.rope_scaling import RopeScaling
from jaxfused.runtime import resharding
from jaxfused.runtime.promotion import accumulator_dtype, along_last_axis
from jaxfused.runtime.shapes import is_symbolic


def rotate(
    x: jax.Array, cos: jax.Array, sin: jax.Array, *, interleaved: bool, in_one_piece: bool = False
) -> jax.Array:
    """Rotates the first R features of every head of [..., T, N, H] by the angles of [..., T, R/2].

    If heads have their own angles, these are [..., T, N, R/2], with as many axes as x.

    A pair is (i, i + R/2), or (2 i, 2 i + 1) if interleaved. The rotation is linear in x and its
    transpose is the inverse rotation, so that only cos and sin are saved for the backward.

    With `in_one_piece`, x is known to be unsharded, so that its axes can be merged.
    """
    of_heads = cos.ndim == x.ndim
    if in_one_piece and x.ndim > 3 and not of_heads:
        # If batch, positions and heads are powers of two, XLA reads halves by single values, but in
        # vectors once batch and positions are one axis. The checkpoint saves cos and sin before they are
        # repeated.
        merged = functools.partial(_rotate_merged, interleaved=interleaved)
        return jax.checkpoint(merged, prevent_cse=False)(x, cos, sin)
    x = resharding.unsplit(x, [-1])
    axes = range(x.ndim) if of_heads else (*range(x.ndim - 1 - cos.ndim, x.ndim - 2), -1)
    cos, sin = (resharding.split_with(resharding.unsplit(t, [-1]), x, axes) for t in (cos, sin))
    rotary_dim = 2 * cos.shape[-1]
    wide = accumulator_dtype(x.dtype)
    rotated, rest = x[..., :rotary_dim].astype(wide), x[..., rotary_dim:]
    cos, sin = cos.astype(wide), sin.astype(wide)
    if not of_heads:
        # cos and sin get an axis of heads, and the axes before the positions that they lack.
        axes = (*range(x.ndim - 1 - cos.ndim), -2)
        cos, sin = (jnp.expand_dims(table, axes) for table in (cos, sin))
    if interleaved:
        first, second = rotated[..., ::2], rotated[..., 1::2]
    else:
        first, second = jnp.split(rotated, 2, axis=-1)
        # A symbolic size counts as neither small nor large.
        size = _SMALL + 1 if is_symbolic(x) else x.size * x.dtype.itemsize
        of_power, single = rotary_dim.bit_count() == 1, x.shape[-2] == 1
        is_small = (of_power or single) and size <= _SMALL * (2 if of_power and single else 1)
        is_large = of_power and size >= _LARGE and x.ndim > 3
        is_whole = rotary_dim == x.shape[-1]
        is_odd = rotary_dim % 4 == 2 and size > _SMALL
        if (is_whole and (is_small or is_large)) or is_odd:
            # [cos, cos] and [sin, sin] give the same results. With them XLA moves large whole heads in
            # wider accesses if there are several axes of positions, rotates two small arrays in one
            # kernel, and reads fewer single values of halves with an odd number of features.
            cos, sin = (jnp.concatenate([table, table], axis=-1) for table in (cos, sin))
            turned = jnp.concatenate([-second, first], axis=-1)
            rotated = (rotated * cos + turned * sin).astype(x.dtype)
            return jnp.concatenate([rotated, rest], axis=-1)
    pair = (first * cos - second * sin, second * cos + first * sin)
    if interleaved:
        rotated = jnp.stack(pair, axis=-1).reshape(rotated.shape)
    else:
        rotated = jnp.concatenate(pair, axis=-1)
    return jnp.concatenate([rotated.astype(x.dtype), rest], axis=-1)


def _rotate_merged(x: jax.Array, cos: jax.Array, sin: jax.Array, *, interleaved: bool) -> jax.Array:
    """Computes `rotate` with the axes before the heads merged into one, and cos, sin broadcast to it."""
    rows = math.prod(x.shape[:-2])
    cos, sin = (
        jnp.broadcast_to(table, (*x.shape[:-2], table.shape[-1])).reshape(rows, table.shape[-1])
        for table in (cos, sin)
    )
    merged = x.reshape(rows, *x.shape[-2:])
    return rotate(merged, cos, sin, interleaved=interleaved).reshape(x.shape)


_SMALL, _LARGE = 2**17, 2**26
"""Bytes of x between which rotating by [cos, cos] and [sin, sin], as in `rotate`, is slower."""


# --- angles ---------------------------------------------------------------------------------------


def tables(
    positions: jax.Array, rotary_dim: int, theta: float, scaling: RopeScaling
) -> tuple[jax.Array, jax.Array]:
    """Returns (cos, sin) of float32 angles, positions.shape + (rotary_dim / 2,)."""
    positions = positions.astype(jnp.float32)
    if scaling.depends_on_length:
        length = jnp.max(positions, initial=-1.0) + 1.0
        frequencies = scaling.at_length(rotary_dim, theta, length)
    else:
        frequencies = _hidden(scaling.frequencies(rotary_dim, theta))
    positions = positions[..., None]
    cos, sin = _cos_sin(positions * along_last_axis(frequencies, positions))
    factor = scaling.attention_factor()
    return cos * factor, sin * factor


def axial_tables(
    positions: Sequence[jax.Array], frequencies: jax.Array, prefix: int
) -> tuple[jax.Array, jax.Array]:
    """Returns (cos, sin) of float32 angles that are a sum over axes of position times frequency.

    Args:
      positions: for each axis an array; together they broadcast to [..., T].
      frequencies: [axes, R/2], or [axes, N, R/2] where heads differ.
      prefix: how many tokens without an angle stand before those that have positions.

    Returns:
      Each [..., prefix + T, R/2] or [..., prefix + T, N, R/2].
    """
    frequencies = _hidden(frequencies)
    own = frequencies.shape[1:]
    wide = (position[..., None].astype(jnp.float32) for position in positions)
    terms = [
        position * along_last_axis(frequency.reshape(-1), position)
        for position, frequency in zip(wide, frequencies, strict=True)
    ]
    angles = functools.reduce(operator.add, terms)
    angles = angles.reshape(*angles.shape[:-1], *own)
    if prefix:
        axis = angles.ndim - len(own) - 1
        widths = [(prefix if a == axis else 0, 0) for a in range(angles.ndim)]
        angles = jnp.pad(angles, widths)
    return _cos_sin(angles)


def _hidden(frequencies: Any) -> jax.Array:
    """Returns the frequencies as float32 behind a barrier, so that XLA cannot see constants.

    XLA computes cosines and sines of one array in one kernel, but not those of a constant array.
    """
    return jax.lax.optimization_barrier(jnp.asarray(frequencies, jnp.float32))


def _cos_sin(angles: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.cos(angles), jnp.sin(angles)
