"""quantize to formats of 4-bit floats: NF4, MXFP4 and NVFP4, whose numbers are entries of a codebook."""

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxfused.runtime.packing import pack_codes
from jaxfused.runtime.quantized_array import CODEBOOKS, Layout, QuantizedArray, assembled
from jaxfused.runtime.scale_groups import spread
from jaxfused.runtime.shapes import split_axis


class CodeFormat(NamedTuple):
    """A 4-bit format whose values are indices into a codebook."""

    codebook: tuple[float, ...]
    group_size: int
    """Number of values that share a scale; callers may choose another unless `is_fixed`."""
    is_fixed: bool


CODE_FORMATS = {
    "nf4": CodeFormat(CODEBOOKS["nf4"], 64, False),
    "mxfp4": CodeFormat(CODEBOOKS["e2m1"], 32, True),
    "nvfp4": CodeFormat(CODEBOOKS["e2m1"], 16, True),
}


def quantize_codes(
    op: str, x: jax.Array, name: str, axis: int, group_size: Any, layout: Layout
) -> QuantizedArray:
    """Returns x in one of CODE_FORMATS, rounded to nearest; `axis` counts from the last."""
    form, size = CODE_FORMATS[name], x.shape[axis]
    group = form.group_size if group_size is None else group_size
    if (
        not isinstance(group, int)
        or group < 1
        or size % group
        or (form.is_fixed and group != form[1])
    ):
        remedy = f"pad x to a multiple of {form.group_size}, and leave group_size out"
        if not form.is_fixed:
            remedy = "pass a group_size that divides them, or pad x"
        raise ValueError(
            f"{op}: dtype {name!r} has groups of {form.group_size if form.is_fixed else group}, but"
            f" group_size is {group_size} and x has {size} values along axis {axis}; {remedy}."
        )
    wide = x.astype(jnp.float32)
    at = axis % x.ndim
    runs = max(1, size // group)
    split = split_axis(wide, at, runs, size // runs)
    largest = jnp.max(jnp.abs(split), axis=at + 1, initial=0.0)
    # A NaN or an infinity makes its group NaN.
    largest = jnp.where(jnp.isfinite(largest), largest, jnp.nan)
    scale: Any
    if name == "nf4":
        scale = jnp.maximum(largest, jnp.finfo(jnp.float32).tiny)
        # XLA multiplies by the inverse of a broadcast scale, which is 0 for scales above 8.5e37.
        quarter = jnp.where(scale > 1, 0.25, 1.0)
        units = wide * spread(quarter, x.shape) / spread(scale * quarter, x.shape)
        codes = _ranks(units, form.codebook)
    else:
        scale = _powers(largest, x.dtype) if name == "mxfp4" else _of_two_levels(largest)
        each = spread(scale.astype(jnp.float32), x.shape)
        codes = _e2m1(jnp.where(each > 0, wide / each, 0.0))
    if layout == "columns":
        values = pack_codes(codes.mT, -1, 4)
    else:
        values = pack_codes(codes, axis, 4)
    return assembled(values, scale, None, axis, layout, codebook=form.codebook)


def _ranks(x: jax.Array, codebook: tuple[float, ...]) -> jax.Array:
    """Returns the index (uint8) of the entry nearest to each x in an ascending codebook."""
    middles = [(a + b) / 2 for a, b in itertools.pairwise(codebook)]
    rank = jnp.zeros(x.shape, jnp.uint8)
    for middle in middles:
        rank += (x > middle).astype(jnp.uint8)
    return rank


def _e2m1(x: jax.Array) -> jax.Array:
    """Returns the 4-bit E2M1 codes of x, rounded to nearest, half to even."""
    sizes, size = CODEBOOKS["e2m1"][:8], jnp.abs(x)
    rank = jnp.zeros(x.shape, jnp.uint8)
    for code, (a, b) in enumerate(itertools.pairwise(sizes)):
        middle = (a + b) / 2
        above = size > middle if code % 2 == 0 else size >= middle
        rank += above.astype(jnp.uint8)
    return jnp.where(x < 0, rank | 8, rank)


def _powers(largest: jax.Array, dtype: Any) -> jax.Array:
    """Returns each group's E8M0 scale: the least power of two that puts its largest magnitude below 7.

    Below 7, E2M1 rounds to 6 at most. Scales are limited so that 6 times a scale is finite in x's
    `dtype`.
    """
    mantissa, exponent = jnp.frexp(largest)
    power = exponent - 3 + (mantissa >= 0.875)
    most = min(jnp.finfo(dtype).maxexp, jnp.finfo(jnp.float32).maxexp) - 3
    scale = jnp.ldexp(jnp.float32(1), jnp.clip(power, -126, most))
    return jnp.where(jnp.isnan(largest), jnp.nan, scale).astype(jnp.float8_e8m0fnu)


def _of_two_levels(largest: jax.Array) -> jax.Array:
    """Returns NVFP4's scales as float32: float8_e4m3fn numbers times one float32 scale of the matrix."""
    axes = (-2, -1)[-largest.ndim :]
    whole = jnp.nanmax(largest, axis=axes, keepdims=True, initial=0.0) / (6.0 * 448.0)
    whole = jnp.where(whole > 0, whole, 1.0)
    return (largest / 6.0 / whole).astype(jnp.float8_e4m3fn).astype(jnp.float32) * whole
