"""quantized_matmul in plain JAX: the reference against which the kernels are tested."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxfused.ops.linear import linear_xla
from jaxfused.ops.linear.linear_xla import (
    PREACTIVATION,
    activated,
    save_preactivation,
)
from jaxfused.runtime.activation import activate
from jaxfused.runtime.packing import WORD_BLOCK
from jaxfused.runtime.product_xla import explicit_mesh, product, sum_written_rows
from jaxfused.runtime.promotion import accumulator_dtype, along_last_axis
from jaxfused.runtime.quantized_array import QuantizedArray, assembled
from jaxfused.runtime.scale_groups import of_each_column, spread
from jaxfused.runtime.shapes import is_symbolic
from jaxfused.runtime.stated_gradient import stated_gradient


def matmul(
    x: jax.Array | QuantizedArray,
    w: QuantizedArray,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    activation: str | None,
    out_dtype: Any,
    scale_gradient: bool = False,
) -> jax.Array:
    """Returns act(x @ w + bias) + residual of [..., D] and [D, F], in `out_dtype`."""

    @functools.partial(jax.checkpoint, policy=save_preactivation)
    def run(x, w, bias, residual):
        options: Any = dict(activation=activation, out_dtype=out_dtype)
        return layer(x, w, bias, residual, **options, scale_gradient=scale_gradient)[0]

    return run(x, w, bias, residual)


def layer(
    x: jax.Array | QuantizedArray,
    w: QuantizedArray,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    activation: str | None,
    out_dtype: Any,
    save_preactivation: bool = False,
    scale_gradient: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns `matmul`'s y and, with `save_preactivation`, the preactivation."""
    if isinstance(x, QuantizedArray):
        z = quantized_product(x, w, out_dtype)
        narrow = z.dtype
    else:
        # The product has x's dtype if its sums are rounded to that dtype anyway. XLA's product can then
        # add a bias and a residual of that dtype before its only rounding.
        narrow = x.dtype
        rounds = activation is not None or out_dtype == narrow
        joins = rounds and narrow.itemsize == 2 and bias is not None and bias.dtype == narrow
        added, bias = (bias, None) if joins else (None, bias)
        z = frozen_product(narrow if rounds else None, scale_gradient, x, w, added)
    if bias is not None:
        z = z.astype(accumulator_dtype(narrow))
        z = z + along_last_axis(bias, z)
    if activation is not None:
        z = checkpoint_name(z.astype(narrow), PREACTIVATION)
    y = activated(activation, z, residual, out_dtype)
    return y, z if save_preactivation else None


def gated_unit(
    x: jax.Array,
    gate: QuantizedArray,
    up: QuantizedArray,
    b_gate: jax.Array | None,
    b_up: jax.Array | None,
    *,
    activation: str | None,
) -> jax.Array:
    """Returns act(x @ gate + b_gate) * (x @ up + b_up), [..., F], in x's dtype."""

    @functools.partial(jax.checkpoint, policy=save_preactivation)
    def run(x, gate, up, b_gate, b_up):
        def preactivation(w, bias):
            z, _ = layer(x, w, bias, None, activation=None, out_dtype=x.dtype)
            return checkpoint_name(z, PREACTIVATION).astype(accumulator_dtype(x.dtype))

        activated = activate(activation, preactivation(gate, b_gate))
        return (activated * preactivation(up, b_up)).astype(x.dtype)

    return run(x, gate, up, b_gate, b_up)


# --- float x --------------------------------------------------------------------------------------


@functools.partial(stated_gradient, nondiff_argnums=(0, 1), linear=(2, 4))
def frozen_product(
    out_dtype: Any,
    scale_gradient: bool,
    x: jax.Array,
    w: QuantizedArray,
    bias: jax.Array | None,
) -> jax.Array:
    """Returns x @ w plus a bias of the result's 16 bits, in `out_dtype` or, if it is None, float32.

    Gradients go to x and the bias, and with `scale_gradient` to the scale of w. The backward dequantises
    w again: saving the dequantised weights would take the memory that quantisation saves.
    """
    del scale_gradient
    rows = linear_xla.letters_of_rows(x)
    axes = f"{rows}D,DF->{rows}F"
    if is_scaled_last(x, w):
        of_w, values = _as_stored(w)
        sums = product(f"{rows}D,{of_w}->{rows}F", x, values.astype(x.dtype))
        y = (sums * _scale_of_columns(w, sums)).astype(out_dtype or sums.dtype)
    elif _is_by_groups(x, w):
        sums = _product_by_groups(rows, x, w)
        y = sums.astype(out_dtype or sums.dtype)
    else:
        y = product(axes, x, w.dequantize(x.dtype), out_dtype=out_dtype)
    return y if bias is None else y + along_last_axis(bias, y)


def _frozen_product_fwd(out_dtype, scale_gradient, x, w, bias):
    y = frozen_product(out_dtype, scale_gradient, x, w, bias)
    no_x = jnp.zeros((0,), x.dtype)
    no_bias = None if bias is None else jnp.zeros((0,), bias.dtype)
    return y, (x if scale_gradient else no_x, w, no_bias)


def _frozen_product_bwd(out_dtype, scale_gradient, saved, dy):
    del out_dtype
    x, w, no_bias = saved
    dbias = None if no_bias is None else sum_written_rows(dy).astype(no_bias.dtype)
    dy = dy.astype(x.dtype)
    dw = None
    if scale_gradient:
        values: Any = None
        dw = assembled(
            values,
            gradient_of_scale(x, w, dy),
            None,
            w.axis,
            w.layout,
            offset=None if w.offset is None else jnp.zeros_like(w.offset),
            codebook=w.codebook,
        )
    return input_gradient(w, dy), dw, dbias


frozen_product.defvjp(_frozen_product_fwd, _frozen_product_bwd)


_MOST_SCALED_ROWS = 512
"""Most rows of x for which XLA's Triton product, which converts weights as it reads them, should be
faster than a dequantised copy and cuBLAS. At 55 % of cuBLAS's speed, Triton's product of this many
rows takes longer than cuBLAS's by the time in which the copy is written at 2.5 TB/s."""


def is_scaled_last(x: jax.Array, w: QuantizedArray) -> bool:
    """Returns whether the stored numbers are multiplied, and the sums then scaled by column.

    Every float dtype of x holds these numbers exactly. XLA converts them inside a product of small M,
    but would write a dequantised copy to memory. XLA computes a single row as a reduction, in which
    dequantising would take six times as long as reading the numbers.
    """
    is_few = not is_symbolic(x) and math.prod(x.shape[:-1]) <= _MOST_SCALED_ROWS
    return w.groups == 1 and w.is_scaled and is_few


def _is_by_groups(x: jax.Array, w: QuantizedArray) -> bool:
    """Returns whether each group is summed separately, and scaled before the sums are added.

    For at most half as many rows as a group has numbers, separate sums move fewer bytes than a
    dequantised copy of the weights. With Explicit mesh axes this is False: JAX cannot split a sharded
    axis into groups.
    """
    group = w.shape[0] // w.groups
    is_few = not is_symbolic(x) and 2 * math.prod(x.shape[:-1]) <= group
    by_scale = w.groups > 1 and w.offset is None
    return by_scale and is_few and explicit_mesh(x, w.values) is None


def _product_by_groups(rows: str, x: jax.Array, w: QuantizedArray) -> jax.Array:
    """Returns the product of x [*rows, D] with w in float32, scaled group by group."""
    (features, columns), groups = w.shape, w.groups
    numbers = w.numbers().reshape(groups, features // groups, columns)
    if w.zero_point is not None:
        # A zero point may have a fraction, which a 16-bit dtype would round before the difference.
        wide = accumulator_dtype(x.dtype)
        zeros = of_each_column(w.zero_point, columns).astype(wide)
        numbers = numbers.astype(wide) - zeros.reshape(groups, 1, columns)
    numbers = numbers.astype(x.dtype)
    parts = x.reshape(*x.shape[:-1], groups, features // groups)
    sums = product(f"{rows}GD,GDF->G{rows}F", parts, numbers)
    scale = of_each_column(w.scale, columns).astype(sums.dtype)
    return jnp.sum(sums * scale.reshape(groups, *(1,) * (x.ndim - 1), columns), axis=0)


def _scale_of_columns(w: QuantizedArray, like: jax.Array) -> jax.Array:
    return along_last_axis(of_each_column(w.scale, w.shape[1])[0], like)


def input_gradient(w: QuantizedArray, dy: jax.Array) -> jax.Array:
    """Returns the gradient dy @ w^T of x in dy's dtype, which is x's."""
    rows = linear_xla.letters_of_rows(dy)
    axes = f"{rows}F,DF->{rows}D"
    if not is_scaled_last(dy, w):
        wide, dy = dequantized_again(w, dy)
        return product(axes, dy, wide, out_dtype=dy.dtype)
    w = lax.optimization_barrier(w)
    # Products of scales and gradients may be too small for float16.
    dtype = jnp.float32 if dy.dtype == jnp.float16 else dy.dtype
    scaled = dy.astype(accumulator_dtype(dtype))
    scaled = (scaled * _scale_of_columns(w, scaled)).astype(dtype)
    return product(axes, scaled, w.unpacked().astype(dtype), out_dtype=dy.dtype)


def dequantized_again(w: QuantizedArray, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the weights in dy's dtype for a backward, and dy, both behind a barrier.

    Without it, XLA would keep the forward's dequantised copy for the backward.
    """
    w, dy = lax.optimization_barrier((w, dy))
    return w.dequantize(dy.dtype), dy


_MOST_FEATURES = 512
"""Largest number of input features whose weight gradient is in memory at a time."""


def gradient_of_scale(x: jax.Array, w: QuantizedArray, dy: jax.Array) -> jax.Array:
    """Returns the gradient of w's scale, in its shape, for x [..., D] and dy [..., F].

    It follows from the weights' gradient x^T dy. Each part of that is summed over its groups before the
    next one is computed, so that no float array of the weights' size exists.
    """
    features, columns = w.shape
    rows, dy = x.reshape(-1, features), dy.reshape(-1, columns)
    group = features // w.groups
    part = _features_at_a_time(w, group)

    def of_part(start):
        values = _rows_of(w, start, part).astype(jnp.float32)
        if w.zero_point is not None:
            first = start // group
            count = max(part // group, 1)
            zeros = jax.lax.dynamic_slice_in_dim(w.zero_point, first, count).astype(jnp.float32)
            values = values - spread(zeros, values.shape)
        piece = jax.lax.dynamic_slice_in_dim(rows, start, part, axis=1)
        gradient = jnp.matmul(piece.T, dy, preferred_element_type=jnp.float32)
        return (values * gradient).reshape(-1, min(part, group), columns).sum(axis=1)

    sums = jax.lax.map(of_part, jnp.arange(0, features, part))
    sums = sums.reshape(w.groups, -1, columns).sum(axis=1)
    # The gradients of columns that share a scale are added.
    return sums.reshape(*w.scale.shape, w.columns_alike).sum(axis=2)


def _features_at_a_time(w: QuantizedArray, group: int) -> int:
    """Returns for how many input features of w the gradient is computed at a time.

    They are whole groups or a part of one group, and whole packed words.
    """
    features = w.shape[0]
    grain = WORD_BLOCK if w.values.dtype == jnp.int32 else w.packed
    fitting = [
        part
        for part in range(grain, min(features, _MOST_FEATURES) + 1, grain)
        if features % part == 0 and (part % group == 0 or group % part == 0)
    ]
    return max(fitting, default=features)


def _rows_of(w: QuantizedArray, start: jax.Array, count: int) -> jax.Array:
    """Returns `count` rows of w's stored values, unpacked to one per byte, [count, F]."""
    axis = -1 if w.layout == "columns" else -2
    per_row = w.values.shape[axis] / w.shape[0]
    packed = round(count * per_row)
    first = start * packed // count
    values = jax.lax.dynamic_slice_in_dim(w.values, first, packed, axis=axis % w.ndim)
    return assembled(values, w.scale, None, w.axis, w.layout, codebook=w.codebook).numbers()


# --- quantised x ----------------------------------------------------------------------------------


def quantized_product(x: QuantizedArray, w: QuantizedArray, out_dtype: Any) -> jax.Array:
    """Returns x @ w in float32, for a caller that rounds its result to `out_dtype`.

    With one scale for each row of x and each column of w (or one for all), the stored values themselves
    are multiplied: integers are summed in int32, float8 in float32, and the scales multiply the sum.
    Other operands are dequantised first, to `out_dtype` if that has 16 bits and else to float32: groups,
    integers with float8, float8 with zero points, zero points of integers that are not int8, offsets and
    codebooks.
    """
    of_integers = sums_integers(x, w)
    of_floats = x.is_scaled and w.is_scaled and not (_has_integers(x) or _has_integers(w))
    if x.groups > 1 or w.groups > 1 or not (of_integers or of_floats):
        dtype = out_dtype if jnp.dtype(out_dtype).itemsize == 2 else jnp.float32
        wide = x.dequantize(dtype), w.dequantize(dtype)
        return jnp.matmul(*wide, preferred_element_type=jnp.float32)
    a, b = x.unpacked(), w.unpacked()
    if not of_integers:
        return scaled(_float8_matmul(a, b), x, w)
    total = _int8_matmul(a, w)
    # The sum of (a - zero point of x) (b - zero point of w) follows from the int8 product of a and b.
    if x.zero_point is not None:
        columns = jnp.sum(b, axis=0, dtype=jnp.int32)
        total = total - x.zero_point.astype(jnp.int32) * along_last_axis(columns, total)
    if w.zero_point is not None:
        rows = jnp.sum(a, axis=-1, keepdims=True, dtype=jnp.int32)
        if x.zero_point is not None:
            rows = rows - a.shape[-1] * x.zero_point.astype(jnp.int32)
        zeros = of_each_column(w.zero_point, w.shape[1])[0]
        total = total - rows * along_last_axis(zeros, total)
    return scaled(total.astype(jnp.float32), x, w)


def sums_integers(x: QuantizedArray, w: QuantizedArray) -> bool:
    """Returns whether a product without groups multiplies the integers themselves, in int32."""
    zeros = (q.zero_point for q in (x, w) if q.zero_point is not None)
    return (
        _has_integers(x)
        and _has_integers(w)
        and x.offset is None
        and w.offset is None
        and all(z.dtype == jnp.int8 for z in zeros)
    )


def _has_integers(q: QuantizedArray) -> bool:
    return q.dtype in ("int8", "int4")


def scaled(total: jax.Array, x: QuantizedArray, w: QuantizedArray) -> jax.Array:
    """Returns a product of stored values times the scales of its rows and columns."""
    return total * x.scale * _scale_of_columns(w, total)


_GRAIN = 16
"""Number that must divide D and F for cuBLAS to multiply int8."""


def _as_stored(w: QuantizedArray) -> tuple[str, jax.Array]:
    """Returns the axes of the values in the order of memory, for `einsum`, and the values.

    XLA for CPUs multiplies a transposed array five times more slowly.
    """
    return ("FD", w.unpacked().mT) if w.layout == "columns" else ("DF", w.unpacked())


def _int8_matmul(a: jax.Array, w: QuantizedArray) -> jax.Array:
    """Returns the int32 product of [..., D] and the values [D, F] of w.

    XLA gets int8 only if 16 divides D and F.

    Some of the int8 kernels that XLA tries on a GPU return twice the product (jax 0.11.2, an H200).
    XLA's autotuning rejects these kernels only if cuBLAS can compute the product as well, which it can
    if D and F are multiples of 16; [5, 17] x [17, 3] was doubled. Without autotuning
    (--xla_gpu_autotune_level=0) every int8 product of JAX is doubled, unless
    --xla_gpu_enable_triton_gemm=false excludes those kernels.

    One row needs none of these kernels: XLA sums its products in a reduction.
    """
    rows, (d, n) = a.reshape(-1, a.shape[-1]), w.shape
    has_rows = is_symbolic(rows) or rows.shape[0] > 1
    if has_rows and (d % _GRAIN or n % _GRAIN):
        b = w.unpacked()
        total = _ragged_int8_matmul(rows, b, b.size + (rows.size if d % _GRAIN else 0))
    else:
        of_w, values = _as_stored(w)
        total = jnp.einsum(f"MD,{of_w}->MF", rows, values, preferred_element_type=jnp.int32)
    return total.reshape(*a.shape[:-1], n)


_EXACT_PRODUCTS = 1024
"""Number of int8 products, each of at most 2^14, that float32 sums exactly."""
_FEWEST_PRODUCTS = 256
"""Least number of products in a partial sum. Shorter ones cost too many reads and writes."""
_LAUNCH_BYTES = 2**23
"""Bytes that memory moves in the launch time of the kernels that pad x and slice the result."""


def _ragged_int8_matmul(a: jax.Array, b: jax.Array, copied: int) -> jax.Array:
    """Returns the int32 product of [M, D] and [D, F] by partial sums in bfloat16, or zero-padded.

    bfloat16 holds every int8, so that the parts are exact in float32. XLA converts to bfloat16 inside a
    product, but would write `copied` bytes of padded operands.
    """
    (m, d), n = a.shape, b.shape[1]
    lengths = [size for size in range(_FEWEST_PRODUCTS, _EXACT_PRODUCTS + 1) if d % size == 0]
    length = d if d <= _EXACT_PRODUCTS else max(lengths, default=0)
    # Symbolic sizes are treated as large ones.
    if length and not is_symbolic(a) and 8 * (d // length) * m * n <= _LAUNCH_BYTES + 2 * copied:
        parts = jnp.einsum(
            "mgd,gdf->gmf",
            a.astype(jnp.bfloat16).reshape(m, d // length, length),
            b.astype(jnp.bfloat16).reshape(d // length, length, n),
            preferred_element_type=jnp.float32,
        )
        return parts.astype(jnp.int32).sum(axis=0, dtype=jnp.int32)
    a = jnp.pad(a, ((0, 0), (0, -d % _GRAIN)))
    b = jnp.pad(b, ((0, -d % _GRAIN), (0, -n % _GRAIN)))
    return jnp.matmul(a, b, preferred_element_type=jnp.int32)[:, :n]


def _float8_matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns the product in float32, with operands in bfloat16, which represents every float8 exactly.

    If XLA sees that operands were float8, it may call cuBLASLt's product, which returned NaN for [3, 9]
    x [9, 7] on an H200 with jax 0.11.2. XLA looks through conversions but not through a change of sign,
    so both operands are negated. It runs one row as a reduction, without cuBLASLt.
    """
    a, b = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
    if is_symbolic(a) or math.prod(a.shape[:-1]) > 1:
        a, b = -a, -b
    return jnp.matmul(a, b, preferred_element_type=jnp.float32)
