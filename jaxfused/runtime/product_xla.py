"""The matrix product in plain jax.numpy: narrow operands, wide accumulators, also in the gradient.

The forward of `jnp.einsum` with 16-bit operands and float32 results is right. Its gradient, however,
multiplies a float32 cotangent by a 16-bit operand, which is a product in float32, and rounds the
gradient of a float32 weight to 16 bits if the weight was cast first. The gradient stated here does
neither.
"""

import functools
import math
import string
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxfused.runtime.promotion import accumulator_dtype
from jaxfused.runtime.stated_gradient import stated_gradient


def product(
    subscripts: str,
    a: jax.Array,
    b: jax.Array,
    *,
    dtype: Any = None,
    out_dtype: Any = None,
    precision: Any = None,
    of_weights: bool = False,
) -> jax.Array:
    """Returns `einsum(subscripts, a, b)` of operands rounded to `dtype` and accumulated in float32.

    Args:
      subscripts: explicit ("md,df->mf"); each index of an operand is in the other one or in the result.
      a: of any float dtype.
      b: of any float dtype.
      dtype: of the multiplication, by default a's. The cotangent is rounded to it as well.
      out_dtype: of the result, by default float32 (float64 where `dtype` is float64). Writing and
        reading a large result takes as long as the product, and twice as long in float32.
      precision: as in `jax.lax.dot_general`.
      of_weights: whether b is weights [D, F], whose gradient is computed as by `weight_product`.

    Returns:
      The sums, rounded once to `out_dtype`; gradients likewise, to the dtype of their operand.

    Differentiation works in both modes and to any order.
    """
    dtype = jnp.dtype(a.dtype if dtype is None else dtype)
    out_dtype = jnp.dtype(accumulator_dtype(dtype) if out_dtype is None else out_dtype)
    if a.dtype == b.dtype == dtype == out_dtype == accumulator_dtype(dtype):
        return _einsum(subscripts, a, b, precision=precision)
    return _rounding_product(subscripts, dtype, out_dtype, precision, of_weights, a, b)


def _einsum(
    subscripts: str,
    a: jax.Array,
    b: jax.Array,
    *,
    spec: PartitionSpec | None = None,
    **options: Any,
) -> jax.Array:
    """Runs `jnp.einsum`, and states the result's sharding where the operands' types state theirs.

    JAX requires a stated sharding for sums over split axes. By default it follows from the operands'.
    """
    mesh = explicit_mesh(a, b)
    if mesh is None:
        return jnp.einsum(subscripts, a, b, **options)
    if spec is None:
        operands, result = subscripts.split("->")
        places: dict[str, Any] = {}
        taken: set[str] = set()
        for axes, operand in zip(operands.split(","), (a, b), strict=True):
            for axis, entry in zip(axes, jax.typeof(operand).sharding.spec, strict=False):
                names = {entry} if isinstance(entry, str) else set(entry or ())
                if axis in result and axis not in places and taken.isdisjoint(names):
                    places[axis] = entry
                    taken |= names
        spec = PartitionSpec(*(places.get(axis) for axis in result))
    return jnp.einsum(subscripts, a, b, out_sharding=NamedSharding(mesh, spec), **options)


def explicit_mesh(*operands: jax.Array) -> Any:
    """Returns the mesh of the first operand whose type states its sharding, or None."""
    meshes = (jax.typeof(operand).sharding.mesh for operand in operands)
    return next((mesh for mesh in meshes if mesh.explicit_axes), None)


def weight_product(x: jax.Array, dy: jax.Array, *, out_dtype: Any, precision: Any) -> jax.Array:
    """Returns the transpose of x [..., D] times dy [..., F] over all rows, multiplied in x's dtype.

    On a GPU it is computed as the transpose of [F, D], as in JAX's gradient of x @ w: for a result
    [D, F], or rows merged into one axis, XLA chooses other kernels, some of them slower. XLA on a CPU
    has no kernels for some products [F, D].
    """
    rows = string.ascii_uppercase[: x.ndim - 1]
    axes = (f"{rows}d", f"{rows}f", "df")
    return _weight_product(axes, x.dtype, jnp.dtype(out_dtype), precision, x, dy)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3), inline=True)
def _weight_product(
    axes: tuple[str, str, str],
    dtype: Any,
    out_dtype: Any,
    precision: Any,
    x: jax.Array,
    dy: jax.Array,
) -> jax.Array:
    """Computes `weight_product`; `axes` has the letters of x, dy and the weights [D, F]."""
    x_axes, dy_axes, w_axes = axes
    options = dict(dtype=dtype, out_dtype=out_dtype, precision=precision)
    wide = accumulator_dtype(dtype)

    def in_order(x: jax.Array, dy: jax.Array) -> jax.Array:
        return product(f"{x_axes},{dy_axes}->{w_axes}", x, dy, **options)

    def widened(x: jax.Array, dy: jax.Array) -> jax.Array:
        """Multiplies float32 copies, because XLA on a CPU has no such 16-bit product: see `_rounded`."""
        x, dy = (a.astype(dtype).astype(wide) for a in (x, dy))
        return product(f"{x_axes},{dy_axes}->{w_axes}", x, dy, **options | {"dtype": wide})

    return jax.lax.platform_dependent(
        x,
        dy,
        cuda=lambda x, dy: product(f"{dy_axes},{x_axes}->{w_axes[::-1]}", dy, x, **options).T,
        cpu=widened,
        default=in_order,
    )


def side_by_side(arrays: Sequence[jax.Array], piece: int | None = None) -> jax.Array:
    """Returns arrays [..., F_i] concatenated along the features, in pieces of `piece` columns.

    XLA fuses the arrays' computation into the copy if each piece (such as a head's features) is a short
    axis of its own; without pieces it writes the arrays to memory first.
    """
    if piece is None:
        return jnp.concatenate(arrays, axis=-1)
    pieces = [a.reshape(*a.shape[:-1], a.shape[-1] // piece, piece) for a in arrays]
    joined = jnp.concatenate(pieces, axis=-2)
    return joined.reshape(*joined.shape[:-2], joined.shape[-2] * piece)


def sums_side_by_side(sums: Sequence[jax.Array]) -> jax.Array:
    """Returns sums over rows, each [F], concatenated.

    The barrier keeps XLA from computing the sums within the copy, where one thread would add up all rows
    of a column.
    """
    return jnp.concatenate(jax.lax.optimization_barrier(list(sums)))


def sum_written_rows(values: jax.Array, *, of_relu: bool = False) -> jax.Array:
    """Sums values [..., F], which the caller also returns, over the rows in float32.

    Without the barrier, XLA would sum them before they are rounded, and so evaluate them twice or write
    them in float32 first. Only for a relu's gradient (`of_relu`) does it sum and write in one kernel.
    """
    return sum_over_rows(values if of_relu else jax.lax.optimization_barrier(values))


def sum_over_rows(values: jax.Array) -> jax.Array:
    """Sums values [..., F] over their rows in float32, in two steps where that is faster.

    XLA sums up to 4,096 rows with one CTA for each 64 columns, and splits longer sums itself. The
    barrier keeps XLA from merging the two sums.
    """
    dtype = accumulator_dtype(values.dtype)
    parts = _parts(values, math.prod(values.shape[:-1]))
    if parts is not None:
        inner = tuple(range(1, parts.ndim - 1))
        values = jax.lax.optimization_barrier(jnp.sum(parts, axis=inner, dtype=dtype))
    return jnp.sum(values, axis=tuple(range(values.ndim - 1)), dtype=dtype)


def _parts(values: jax.Array, rows: int) -> jax.Array | None:
    """Returns the values with their rows cut into parts, one more axis, or None if one sum is best.

    The first of several axes of rows counts the parts, even if it is sharded. A single axis of rows is
    cut only on a single device, since on several it could be sharded.
    """
    parts, columns = values.shape[0] if values.ndim > 2 else 0, values.shape[-1]
    if _is_slow(rows, columns) and _FEWEST_PARTS <= parts <= rows // _ROWS_OF_PART:
        return values
    count = None if jax.device_count() > 1 else parts_of_rows(rows, columns)
    return None if count is None else values.reshape(count, rows // count, columns)


def parts_of_rows(rows: int, columns: int) -> int | None:
    """Returns into how many equal parts to split a sum of rows, or None for one sum."""
    if not _is_slow(rows, columns):
        return None
    counts = range(min(rows // _ROWS_OF_PART, _MOST_PARTS), _FEWEST_PARTS - 1, -1)
    return next((count for count in counts if rows % count == 0), None)


def _is_slow(rows: int, columns: int) -> bool:
    """Returns whether XLA sums the rows in one kernel where two successive sums would be faster."""
    of_block = rows * min(columns, _COLUMNS_OF_BLOCK)
    return rows <= 4096 and of_block >= 512 * _COLUMNS_OF_BLOCK


_COLUMNS_OF_BLOCK = 64
_ROWS_OF_PART = 32
"""Rows that a thread block (CTA) of XLA's sum over rows reads at a time."""
_FEWEST_PARTS, _MOST_PARTS = 4, 64


_FEW_ROWS = 128
"""Most rows at which a product takes as long as reading its weights, so that merging two products saves
a launch."""
_FEW_ROWS_OF_CONVERTED = 512
"""`_FEW_ROWS` for weights that are converted from another dtype: the conversion writes the merged
matrix, so that merging needs no further copy."""
_LITTLE = 2**19
"""Most bytes of an array whose copy takes no longer than the launch of a GPU kernel."""
_NARROW = 256
"""Most columns of `other` at which its product with x takes no longer than reading x. Merging two
products of x, which reads x once, then saves time."""


def unshared(
    x: jax.Array, other: jax.Array, *, converted: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Keeps XLA from merging the product of x and `other` with others of x, unless that is faster.

    XLA merges products that share an operand into one of concatenated operands, and slices its result.
    The copies take longer than the merging saves, unless x has few rows, or `other` is much smaller than
    x, which is then read once instead of twice. An operand `converted` from another dtype is copied in
    any case.
    """
    rows = math.prod(x.shape[:-1])
    few = _FEW_ROWS_OF_CONVERTED if converted else _FEW_ROWS
    is_narrow = other.shape[-1] <= _NARROW and 4 * other.size <= x.size
    if rows <= few or other.size * other.dtype.itemsize <= _LITTLE or is_narrow:
        return x, other
    return jax.lax.optimization_barrier((x, other))


# The functions passed to `platform_dependent` differ from call to call, so that outside of
# `jax.jit` each call would be compiled again. A `jax.jit` with their options as static arguments
# compiles them once.


@functools.partial(stated_gradient, nondiff_argnums=(0, 1, 2, 3, 4))
def _rounding_product(subscripts, dtype, out_dtype, precision, of_weights, a, b):
    del of_weights
    return _rounded(subscripts, dtype, out_dtype, precision, a, b)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 6), inline=True)
def _rounded(subscripts, dtype, out_dtype, precision, a, b, spec=None):
    # The product returns its sums in the operands' dtype or in the accumulators' dtype.
    leaving = dtype if out_dtype == dtype else accumulator_dtype(dtype)
    einsum = functools.partial(
        _einsum, subscripts, precision=precision, preferred_element_type=leaving, spec=spec
    )
    a, b = a.astype(dtype), b.astype(dtype)
    if leaving == dtype or not _is_batched(subscripts) or explicit_mesh(a, b) is not None:
        return einsum(a, b).astype(out_dtype)
    # XLA on a CPU has no batched product of 16-bit operands into float32 with a transposed operand.
    # The product of float32 copies has the same terms and the same sums.
    y = jax.lax.platform_dependent(
        a, b, cpu=lambda a, b: einsum(a.astype(leaving), b.astype(leaving)), default=einsum
    )
    return y.astype(out_dtype)


def _is_batched(subscripts: str) -> bool:
    """Returns whether both operands and the result have an axis in common."""
    operands, y_axes = subscripts.split("->")
    a_axes, b_axes = operands.split(",")
    return bool(set(a_axes) & set(b_axes) & set(y_axes))


def _rounding_product_fwd(subscripts, dtype, out_dtype, precision, of_weights, a, b):
    y = _rounding_product(subscripts, dtype, out_dtype, precision, of_weights, a, b)
    return y, (a, b)


def _rounding_product_bwd(subscripts, dtype, out_dtype, precision, of_weights, operands, dy):
    del out_dtype
    a, b = operands
    operand_subscripts, y_axes = subscripts.split("->")
    a_axes, b_axes = operand_subscripts.split(",")
    for_a, for_b = f"{y_axes},{b_axes}->{a_axes}", f"{a_axes},{y_axes}->{b_axes}"
    if explicit_mesh(a, b) is not None:
        # Each operand's gradient gets the sharding of that operand.
        return (
            _rounded(for_a, dtype, a.dtype, precision, dy, b, jax.typeof(a).sharding.spec),
            _rounded(for_b, dtype, b.dtype, precision, a, dy, jax.typeof(b).sharding.spec),
        )
    da = _gradient(for_a, dtype, a.dtype, precision, dy, b)
    if of_weights:
        axes = (a_axes, y_axes, b_axes)
        return da, _weight_product(axes, dtype, b.dtype, precision, a, dy)
    return da, _gradient(for_b, dtype, b.dtype, precision, a, dy)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3), inline=True)
def _gradient(subscripts, dtype, out_dtype, precision, a, b):
    """Returns the product that is a gradient; on a CPU, of float32 copies if its result is float32.

    See `_rounded`. A forward without batch axes multiplies no copies, since policies of `jax.checkpoint`
    look for its product.
    """

    def as_it_is(a, b):
        return _rounding_product(subscripts, dtype, out_dtype, precision, False, a, b)

    def widened(a, b):
        a, b = (x.astype(dtype).astype(wide) for x in (a, b))
        return _rounding_product(subscripts, wide, out_dtype, precision, False, a, b)

    wide = accumulator_dtype(dtype)
    if dtype in (out_dtype, wide) or _is_batched(subscripts):
        return as_it_is(a, b)
    return jax.lax.platform_dependent(a, b, cpu=widened, default=as_it_is)


_rounding_product.defvjp(_rounding_product_fwd, _rounding_product_bwd)
