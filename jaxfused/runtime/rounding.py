"""Quantisation in plain jax.numpy: the choice of scales, the rounding, and what is clipped."""

import functools

import jax
import jax.numpy as jnp

from jaxfused.runtime import resharding
from jaxfused.runtime.packing import pack_int4, pack_words
from jaxfused.runtime.promotion import accumulator_dtype
from jaxfused.runtime.quantized_array import FORMATS, Layout, QuantizedArray, assembled
from jaxfused.runtime.scale_groups import spread
from jaxfused.runtime.shapes import split_axis


# The jit of `scales` and `encode` matters because the layers of a model are quantised one by one.
@functools.partial(
    jax.jit, static_argnames=("dtype", "axis", "groups", "blocks", "per_tensor", "symmetric")
)
def scales(
    x: jax.Array,
    dtype: str,
    *,
    axis: int,
    groups: int,
    blocks: int | None = None,
    per_tensor: bool,
    symmetric: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns (scale, zero_point), such that the range of each group just fits into `dtype`.

    Args:
      groups: the number of equal groups into which `axis` is cut.
      blocks: the number of groups of columns where `axis` is -2; None gives each column its own scale.
    """
    limits = FORMATS[dtype]
    if per_tensor:
        runs, over = x, tuple(range(x.ndim))
    else:
        axis = axis % x.ndim
        runs = split_axis(x, axis, groups, x.shape[axis] // groups)
        over = (axis + 1,)
        if blocks is not None:
            runs = split_axis(runs, runs.ndim - 1, blocks, x.shape[-1] // blocks)
            over = (axis + 1, axis + 3)
    runs = runs.astype(accumulator_dtype(x.dtype))

    def extreme(reduction, values):
        result = reduction(values, axis=over, keepdims=per_tensor, initial=0.0)
        # XLA's maximum on a CPU may ignore NaN (jax 0.11.2).
        has_nan = jnp.any(jnp.isnan(values), axis=over, keepdims=per_tensor)
        return jnp.where(has_nan, jnp.nan, result.astype(jnp.float32))

    def divisible(scale):
        # A group of (almost) zeros gets the smallest scale by which float32 can be divided. An
        # infinite scale becomes NaN, so that all values of its group do. `scale + 0 * scale`
        # computes that, because XLA would run a `jnp.where` as a separate kernel.
        scale = jnp.maximum(scale, jnp.finfo(jnp.float32).tiny)
        return scale + 0 * scale

    if symmetric:
        return divisible(largest_magnitude(runs, over, keepdims=per_tensor) * limits.unit), None
    low, high = extreme(jnp.min, runs), extreme(jnp.max, runs)
    scale = divisible((high - low) * limits.asymmetric_unit)
    return scale, to_integers(limits.smallest - low / scale, dtype)


def largest_magnitude(x: jax.Array, axis: tuple[int, ...], *, keepdims: bool) -> jax.Array:
    """Returns the largest |x| over the axes, in float32; NaN if an element is NaN, 0 for no elements.

    The bits of positive floats, read as integers, have the order of the floats, with NaN as the largest.
    One integer maximum finds both; XLA's float maximum may ignore NaN on a CPU (jax 0.11.2).
    """
    integer = jnp.dtype(f"int{8 * x.dtype.itemsize}")
    bits = jax.lax.bitcast_convert_type(jnp.abs(x), integer)
    largest = jnp.max(bits, axis=axis, keepdims=keepdims, initial=0)
    return jax.lax.bitcast_convert_type(largest, x.dtype).astype(jnp.float32)


def to_integers(values: jax.Array, dtype: str) -> jax.Array:
    """Rounds to the nearest integer (half to even) that `dtype` holds, as int8; NaN becomes 0."""
    limits = FORMATS[dtype]
    clipped = jnp.clip(jnp.round(values), limits.smallest, limits.largest)
    return jnp.where(jnp.isnan(clipped), 0.0, clipped).astype(jnp.int8)


def in_units(
    x: jax.Array,
    scale: jax.Array,
    zero_point: jax.Array | None,
    axis: int,
    group_size: int | tuple[int, int] | None,
) -> jax.Array:
    """Returns `x / scale + zero_point`, the numbers to round; `axis` is counted from the last."""
    units = x.astype(accumulator_dtype(x.dtype))
    scale = resharding.split_with(spread(scale, x.shape, axis, group_size), units)
    units = units / scale.astype(units.dtype)
    if zero_point is None:
        return units
    zeros = resharding.split_with(spread(zero_point, x.shape, axis, group_size), units)
    return units + zeros.astype(units.dtype)


@functools.partial(jax.jit, static_argnames=("dtype", "axis", "layout", "group_size"))
def encode(
    x: jax.Array,
    dtype: str,
    scale: jax.Array,
    zero_point: jax.Array | None,
    axis: int,
    layout: Layout = "rows",
    group_size: int | tuple[int, int] | None = None,
) -> QuantizedArray:
    """Quantises x by given scales and zero points; values outside the range of `dtype` are clipped."""
    units = in_units(x, scale, zero_point, axis, group_size)
    values = codes(units, dtype, symmetric=zero_point is None)
    values = values.mT if layout == "columns" else values
    if dtype == "int4":
        values = pack_words(values) if layout == "columns" else pack_int4(values, axis)
    elif not dtype.startswith("int"):
        # The barrier keeps XLA from dropping the rounding on a GPU if the values are widened again.
        values = jax.lax.optimization_barrier(values)
    return assembled(values, scale, zero_point, axis, layout, group_size)


def codes(units: jax.Array, dtype: str, *, symmetric: bool) -> jax.Array:
    """Returns `units` rounded to `dtype`, one number per byte: an int4 in an int8."""
    limits = FORMATS[dtype]
    if dtype.startswith("int"):
        if symmetric:
            units = jnp.clip(units, -limits.largest, limits.largest)
        return to_integers(units, dtype)
    # The clip comes first, because a conversion turns numbers that are too large into NaN or Inf.
    clipped = jnp.clip(units, limits.smallest, limits.largest)
    return clipped.astype(jnp.float32).astype(limits.storage)


def inside_range(
    x: jax.Array,
    dtype: str,
    scale: jax.Array,
    zero_point: jax.Array | None,
    axis: int,
    group_size: int | tuple[int, int] | None,
) -> jax.Array:
    """Returns a mask of the elements of x that are rounded and not clipped."""
    limits = FORMATS[dtype]
    units = in_units(x, scale, zero_point, axis, group_size)
    if zero_point is None:
        return jnp.abs(units) < limits.clipped_from
    return (units >= limits.smallest - 0.5) & (units < limits.clipped_from)


@jax.custom_jvp
def straight_through(x: jax.Array, rounded: jax.Array, inside: jax.Array) -> jax.Array:
    """Returns `rounded`, with the derivative of x where `inside` and 0 elsewhere."""
    return rounded


@straight_through.defjvp
def _straight_through_jvp(primals, tangents):
    _, rounded, inside = primals
    dx = tangents[0]
    return rounded, jnp.where(inside, dx, jnp.zeros_like(dx))
