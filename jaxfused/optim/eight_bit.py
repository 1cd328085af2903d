"""Moments in 8 bits: codes, and a float32 scale for each block of 256 adjacent values.

A first moment is a signed code, a second one an unsigned code, and the scale is the largest magnitude of
the block. The distance of two codes grows with the value, since the relative error of a moment matters::

    first moment  = scale * sign(code) * (code / 127)^2
    second moment = scale * (code / 255)^4

A moment whose gradient is small compared with the others of its block changes by less than half the
distance of two codes a step, and would never change if it were rounded to nearest. Each moment is
therefore rounded at random to one of the two codes around it, such that the mean of the decoded values
(not of the codes) equals the moment. A zero stays zero.

A second moment becomes 0 only if it is 0: otherwise a first moment that is not rounded to 0 would be
divided by the root of 0. At the lowest codes the first moment over the root of the second is (1 / 127)^2
/ (1 / 255)^2, a step of 4.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxfused.runtime import stochastic_rounding
from jaxfused.runtime.serialization import serializable

BLOCK = 256
LEAST_SIZE = 4096
"""Fewest elements of a leaf with moments in 8 bits; smaller leaves have moments in float32."""


@serializable
@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class EightBitMoment:
    """An optimizer's moment of one parameter, in 8 bits."""

    codes: jax.Array
    """Codes, int8 or uint8, of the leaf's shape."""
    scales: jax.Array
    """Scales, float32 [*leading, blocks]: the leaf's other axes are merged into one, which is cut
    into blocks with one scale each."""


def is_coded(moment: Any) -> bool:
    """Returns whether a moment is stored in 8 bits."""
    return isinstance(moment, EightBitMoment)


def codes_and_scales(moment: Any) -> tuple[Any, jax.Array | None]:
    """Returns the arrays of a moment: codes and scales, or values and None."""
    return (moment.codes, moment.scales) if isinstance(moment, EightBitMoment) else (moment, None)


def zero_moment(param: jax.Array, *, signed: bool) -> EightBitMoment | None:
    """Returns a moment of zeros in 8 bits; None for a small leaf, or a size no multiple of BLOCK."""
    if (
        param.size < LEAST_SIZE
        or param.size % BLOCK
        or not jnp.issubdtype(param.dtype, jnp.floating)
    ):
        return None
    last = param.ndim - 1
    while math.prod(param.shape[last:]) % BLOCK:
        last -= 1
    scales = (*param.shape[:last], math.prod(param.shape[last:]) // BLOCK)
    return EightBitMoment(
        jnp.zeros_like(param, dtype=jnp.int8 if signed else jnp.uint8),
        jnp.zeros_like(param, shape=scales, dtype=jnp.float32),
    )


def decode(moment: Any) -> jax.Array:
    """Returns a moment's values in float32; a moment that is not in 8 bits is returned unchanged."""
    if not isinstance(moment, EightBitMoment):
        return moment
    codes = moment.codes.reshape(*moment.scales.shape, BLOCK).astype(jnp.float32)
    if moment.codes.dtype == jnp.int8:
        unit = moment.scales * jnp.float32(1 / 127**2)
        values = unit[..., None] * (codes * jnp.abs(codes))
    else:
        unit = moment.scales * jnp.float32(1 / 255**4)
        values = unit[..., None] * jnp.square(jnp.square(codes))
    return values.reshape(moment.codes.shape)


def encode(values: jax.Array, like: Any, seeds: jax.Array) -> Any:
    """Returns values as a moment in the format of `like`.

    Args:
      values: the moment, of any float dtype.
      like: a moment of this leaf.
      seeds: from `stochastic_rounding.leaf_seeds`.
    """
    if not isinstance(like, EightBitMoment):
        return values.astype(like.dtype)
    blocks = values.astype(jnp.float32).reshape(*like.scales.shape, BLOCK)
    # XLA's maximum may ignore a NaN, which is tested separately.
    scales = jnp.where(
        jnp.any(jnp.isnan(blocks), axis=-1), jnp.nan, jnp.max(jnp.abs(blocks), axis=-1)
    )
    inverse = jnp.where(scales == 0, 0, 1 / scales)[..., None]
    halves = stochastic_rounding.random_halves(seeds, like.codes.shape).reshape(blocks.shape)
    ratio = jnp.abs(blocks) * inverse
    if like.codes.dtype == jnp.int8:
        magnitudes = _rounded(127 * jnp.sqrt(ratio), 127, ratio, 2, halves)
        codes = jnp.copysign(magnitudes, blocks)
    else:
        codes = _rounded(255 * jnp.sqrt(jnp.sqrt(ratio)), 255, ratio, 4, halves)
        codes = jnp.maximum(codes, (ratio > 0).astype(codes.dtype))
    return EightBitMoment(codes.astype(like.codes.dtype).reshape(like.codes.shape), scales)


def _rounded(
    exact: jax.Array, largest: int, ratio: jax.Array, power: int, halves: jax.Array
) -> jax.Array:
    """Returns one of the two codes next to `exact`, at random: (code / largest)^power has mean `ratio`.

    A value whose probability to be rounded up is below 1 / 131072 is never rounded up, because 16 random
    bits cannot express that probability.
    """
    low = jnp.minimum(jnp.floor(exact), largest - 1)
    below, above = low**power, (low + 1) ** power
    part = ratio * jnp.float32(largest**power) - below
    return low + ((halves.astype(jnp.float32) + 0.5) * (above - below) < part * 65536)
