"""quantized_matmul in plain JAX: the truth against which the kernels are tested."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxfused.quantization.quantized_array import WORD_BLOCK, QuantizedArray, of_each_column, spread
from jaxfused.reference import linear
from jaxfused.reference.linear import PREACTIVATION, add_residual, save_preactivation
from jaxfused.reference.product import product
from jaxfused.reference.promotion import accumulator_dtype, along_last_axis
from jaxfused.semantics.activation import activate


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
        narrow = None if isinstance(x, QuantizedArray) else x.dtype
        if narrow is None:
            z = quantized_product(x, w)
        else:
            # As of `linear`: the product leaves in x's dtype where its sums are rounded to it anyway.
            rounds = activation is not None or out_dtype == narrow
            z = frozen_product(narrow if rounds else None, scale_gradient, x, w)
            z = z.astype(accumulator_dtype(narrow))
        z = z if bias is None else z + along_last_axis(bias, z)
        if activation is not None:
            dtype = narrow or z.dtype
            z = checkpoint_name(z.astype(dtype), PREACTIVATION)
            z = activate(activation, z.astype(accumulator_dtype(dtype)))
        return add_residual(z, residual, out_dtype)

    return run(x, w, bias, residual)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def frozen_product(
    out_dtype: Any, scale_gradient: bool, x: jax.Array, w: QuantizedArray
) -> jax.Array:
    """Returns x @ w in `out_dtype`, or if it is None in float32, with w dequantised to x's dtype.

    Only x gets a gradient, and the scale of w where it is wanted. The backward dequantises w again: to
    keep the dequantised weights for it would take the memory that quantisation has saved.
    """
    del scale_gradient
    rows = linear.letters_of_rows(x)
    return product(f"{rows}D,DF->{rows}F", x, w.dequantize(x.dtype), out_dtype=out_dtype)


def _frozen_product_fwd(out_dtype, scale_gradient, x, w):
    y = frozen_product(out_dtype, scale_gradient, x, w)
    no_x = jnp.zeros((0,), x.dtype)
    return y, (x if scale_gradient else no_x, w)


def _frozen_product_bwd(out_dtype, scale_gradient, saved, dy):
    del out_dtype
    x, w = saved
    dy = dy.astype(x.dtype)
    dw = None
    if scale_gradient:
        values: Any = None
        dw = QuantizedArray(values, gradient_of_scale(x, w, dy), None, w.axis, w.layout)
    return input_gradient(w, dy), dw


frozen_product.defvjp(_frozen_product_fwd, _frozen_product_bwd)


def input_gradient(w: QuantizedArray, dy: jax.Array) -> jax.Array:
    """The gradient dy @ w^T of x, in dy's dtype, which is x's."""
    rows = linear.letters_of_rows(dy)
    wide, dy = dequantized_again(w, dy)
    return product(f"{rows}F,DF->{rows}D", dy, wide, out_dtype=dy.dtype)


def dequantized_again(w: QuantizedArray, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The weights in the dtype of dy, for a backward; and dy.

    XLA sees that a forward has dequantised them too, and would keep that copy for the backward.
    """
    w, dy = jax.lax.optimization_barrier((w, dy))
    return w.dequantize(dy.dtype), dy


_MOST_FEATURES = 512
"""Input features whose part of the weights' gradient exists at a time."""


def gradient_of_scale(x: jax.Array, w: QuantizedArray, dy: jax.Array) -> jax.Array:
    """The gradient of w's scale, in its shape, of x [..., D] and dy [..., F].

    The gradient of the weights would be x^T dy; each part of it is summed over its groups before the
    next one is taken, so that nothing of the weights' size is made.
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
    # One scale may serve several columns.
    return sums.reshape(*w.scale.shape, w.columns_alike).sum(axis=2)


def _features_at_a_time(w: QuantizedArray, group: int) -> int:
    """How many features one part has: whole groups, or a part of one, as the values are packed."""
    features = w.shape[0]
    grain = {"int8": 1, "int4": WORD_BLOCK if w.layout == "columns" else 2}.get(w.dtype, 1)
    fitting = [
        part
        for part in range(grain, min(features, _MOST_FEATURES) + 1, grain)
        if features % part == 0 and (part % group == 0 or group % part == 0)
    ]
    return max(fitting, default=features)


def _rows_of(w: QuantizedArray, start: jax.Array, count: int) -> jax.Array:
    """The values of `count` rows of w, [count, F], one to a byte."""
    axis = -1 if w.layout == "columns" else -2
    per_row = w.values.shape[axis] / w.shape[0]
    packed = round(count * per_row)
    first = start * packed // count
    values = jax.lax.dynamic_slice_in_dim(w.values, first, packed, axis=axis % w.ndim)
    return QuantizedArray(values, w.scale, None, w.axis, w.layout).unpacked()


def layer(
    x: jax.Array | QuantizedArray,
    w: QuantizedArray,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    activation: str | None,
    save_preactivation: bool,
    out_dtype: Any,
) -> tuple[jax.Array, jax.Array | None]:
    """(y, z): y as `matmul` returns it, and if it is saved what the activation reads."""
    if not isinstance(x, QuantizedArray):
        return linear.layer(
            x,
            w.dequantize(x.dtype),
            bias,
            residual,
            activation=activation,
            out_dtype=out_dtype,
            save_preactivation=save_preactivation,
            precision=None,
        )
    z = quantized_product(x, w)
    z = z if bias is None else z + along_last_axis(bias, z)
    kept = z if save_preactivation else None
    y = z if activation is None else activate(activation, z)
    return add_residual(y, residual, out_dtype), kept


def quantized_product(x: QuantizedArray, w: QuantizedArray) -> jax.Array:
    """Returns x @ w in float32.

    With one scale for each row of x and each column of w (or one for all), the stored values themselves
    are multiplied: integers are summed in int32, float8 in float32, and the scales multiply the sum.
    Groups, and integers with float8, are dequantised to float32 first.
    """
    a, b = x.unpacked(), w.unpacked()
    integers = [jnp.issubdtype(q.dtype, jnp.integer) for q in (a, b)]
    if x.groups > 1 or w.groups > 1 or integers[0] != integers[1]:
        return jnp.matmul(x.dequantize(), w.dequantize())
    if not integers[0]:
        return _scaled(_float8_matmul(a, b), x, w)
    total = _int8_matmul(a, b)
    # This computes the sum of (a - zx) (b - zw) from a product in int8.
    if x.zero_point is not None:
        columns = jnp.sum(b, axis=0, dtype=jnp.int32)
        total = total - x.zero_point.astype(jnp.int32) * along_last_axis(columns, total)
    if w.zero_point is not None:
        rows = jnp.sum(a, axis=-1, keepdims=True, dtype=jnp.int32)
        if x.zero_point is not None:
            rows = rows - a.shape[-1] * x.zero_point.astype(jnp.int32)
        zeros = of_each_column(w.zero_point, w.shape[1])[0]
        total = total - rows * along_last_axis(zeros, total)
    return _scaled(total.astype(jnp.float32), x, w)


def _scaled(total: jax.Array, x: QuantizedArray, w: QuantizedArray) -> jax.Array:
    """A product of stored values times the scales of its rows and columns."""
    return total * x.scale * along_last_axis(of_each_column(w.scale, w.shape[1])[0], total)


def _int8_matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns the product of [..., D] and [D, F] in int32, with every axis padded to a multiple of 16.

    Some of the int8 kernels that XLA tries on a GPU return twice the product (jax 0.11.2, an H200).
    XLA's autotuning rejects these kernels only where cuBLAS can compute the product as well, which it
    can at multiples of 16; [5, 17] x [17, 3] was doubled. Without autotuning
    (--xla_gpu_autotune_level=0) every int8 product of JAX is doubled, unless
    --xla_gpu_enable_triton_gemm=false excludes those kernels. The padding adds only zeros to the sums.
    """
    rows = a.reshape(-1, a.shape[-1])
    padded = [jnp.pad(matrix, [(0, -size % 16) for size in matrix.shape]) for matrix in (rows, b)]
    total = jnp.matmul(*padded, preferred_element_type=jnp.int32)
    return total[: rows.shape[0], : b.shape[1]].reshape(*a.shape[:-1], b.shape[1])


def _float8_matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns the product in float32, with operands in bfloat16, which represents every float8 exactly.

    If XLA sees float8 under a scale, it may call cuBLASLt's scaled product, which returned NaN for [3,
    9] x [9, 7] on an H200 with jax 0.11.2.
    """
    a, b = lax.optimization_barrier((a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)))
    return jnp.matmul(a, b, preferred_element_type=jnp.float32)
