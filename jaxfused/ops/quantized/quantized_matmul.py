"""quantized_matmul: validation, choice of implementation, gradient."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxfused import dispatch
from jaxfused.ops.linear.input_gradient import input_gradient
from jaxfused.ops.linear.linear import check_affine, check_residual, resolve_out_dtype
from jaxfused.ops.linear.linear_stages import ActivationGradient
from jaxfused.ops.linear.weight_gradient import sum_rows
from jaxfused.ops.quantized import quantized_matmul_xla
from jaxfused.ops.quantized.quantized_matmul_stages import WHOLE, InputGradient, Options
from jaxfused.runtime import sharding
from jaxfused.runtime.checks import as_arrays, check_activation, check_floating, python_numbers
from jaxfused.runtime.gate import takes_reference
from jaxfused.runtime.kernel_gradient import kernel_gradient
from jaxfused.runtime.other_arrays import converted, is_of_qwix
from jaxfused.runtime.packing import WORD_BLOCK
from jaxfused.runtime.quantized_array import FORMATS, QuantizedArray, as_operand, layout_of
from jaxfused.runtime.runner import Runner
from jaxfused.runtime.scale_groups import of_each_column
from pallas_kernels.gemm import quantized as pallas_quantized


@python_numbers
def quantized_matmul(
    x: jax.Array | QuantizedArray,
    w: QuantizedArray,
    bias: jax.Array | None = None,
    *,
    activation: str | None = None,
    residual: jax.Array | None = None,
    out_dtype: Any = None,
    scale_gradient: bool = False,
    implementation: dispatch.Implementation | None = None,
) -> jax.Array:
    r"""A linear layer with quantised weights and, optionally, quantised inputs.

    .. math::
        y = \text{activation}(x w + \text{bias}) + \text{residual}

    Float x: the weights are dequantised to x's dtype, or with one scale a column their scales multiply
    the sums, which are in float32. Quantised x: with one scale for each row of x and each column of
    w (or one for all), the stored values are multiplied, integers with exact sums and float8 with sums
    in float32. Otherwise both are dequantised, to out_dtype if that has 16 bits and else to float32;
    but kernels for scales by group multiply the stored values. Bias and residual are added in float32.

    The weights are frozen: gradients go to x (where it is float), bias and residual, and with
    `scale_gradient` to the scales of w, whose gradients are zero otherwise. Where no
    kernel runs, forward- and reverse-mode gradients of any order exist. With implementation "pallas" no
    float copy of the weights is written, except in the gradient of x for codes and groups of 32.

    The kernels read weights of layout "columns", as `quantize` makes them: integers, float8, and codes
    of 16 numbers, two in a uint8, with scales in float32 or float8_e8m0fnu. They run with float x of 16
    bits, and with quantised x of more than 64 rows. Results or a residual in float32 are left to XLA
    from 129 rows on, which copies the weights in x's dtype, unless `implementation="pallas"` is passed.
    `implementation="cuda"` takes any number of rows, on GPUs from Turing on.

    Args:
      x: [..., D], float32, bfloat16 or float16 (float64 with implementation "xla"); or a
        `QuantizedArray` of that shape with axis -1, as `quantize_rows` makes it.
      w: a `QuantizedArray` of shape [D, F] with axis -2, as `quantize` makes it. A `qwix.QArray` is
        taken too, as x also; `jaxfused.quantization.from_qwix` has the layout of the kernels.
      bias: [F], of any float dtype, as is residual.
      activation: None or a name of `jaxfused.ACTIVATIONS`.
      residual: [..., F], is added after the activation.
      out_dtype: of y; by default the residual's dtype, else x's, else float32.
      scale_gradient: whether w.scale gets its gradient, for float x. The forward then saves x.
      implementation: None for the fastest that can run, or "pallas", "cuda", "xla".

    Returns:
      y, [..., F].

    Raises:
      ValueError: shapes or dtypes do not fit, D is so large that int32 could overflow, or the named
        implementation cannot run.

    Example:
      >>> import jax.numpy as jnp, jaxfused
      >>> x, w = jnp.array([[1.0, 2.0]]), jnp.array([[127.0, 0.0], [1.0, -127.0]])
      >>> jaxfused.quantized_matmul(x, jaxfused.quantize(w), activation="relu")
      Array([[129.,   0.]], dtype=float32)
      >>> jaxfused.quantized_matmul(jaxfused.quantize_rows(x), jaxfused.quantize(w)).shape
      (1, 2)

    Source: Dettmers et al., "LLM.int8()", 2022, https://arxiv.org/abs/2208.07339
    """
    op = "quantized_matmul"
    bias, residual = as_arrays(bias, residual)
    check_floating(op, dict(bias=bias, residual=residual))
    check_activation(op, activation)
    if scale_gradient:
        _check_scale_has_gradient(op, w)
    exponents = exponents_of(w)
    w = _operand(op, "w", w, -2, "quantize(w)")
    if isinstance(x, QuantizedArray) or is_of_qwix(x):
        x = _operand(op, "x", x, -1, "quantize_rows(x)")
        values: Any = x.values
        array: Any = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    else:
        x = values = array = jnp.asarray(x)
        check_floating(op, dict(x=x))
    w_like: Any = jax.ShapeDtypeStruct(w.shape, jnp.float32)
    check_affine(op, array, "w", w_like, "bias", bias)
    check_residual(op, residual, array, w.shape[1])
    _check_sums_fit(op, x, w)
    if scale_gradient and isinstance(x, QuantizedArray):
        raise ValueError(
            f"{op}: scale_gradient=True was passed with a quantised x, but the weights' scales get a"
            " gradient only with float x; pass x as floats, or leave scale_gradient out."
        )
    out_dtype = jnp.dtype(resolve_out_dtype(op, out_dtype, array, residual))
    if _takes_reference(op, implementation, array, x, w):
        if sharding.is_explicit(values, *jax.tree.leaves(w)):
            x, w = _with_whole_sums(x, w)
        return quantized_matmul_xla.matmul(
            x,
            w,
            bias,
            residual,
            activation=activation,
            out_dtype=out_dtype,
            scale_gradient=scale_gradient,
        )
    options = Options(
        activation,
        out_dtype,
        w.layout,
        w.dtype,
        w.columns_alike,
        w.codebook,
        x_dtype=None if isinstance(x, QuantizedArray) else x.dtype,
        residual_dtype=None if residual is None else residual.dtype,
        scale_gradient=scale_gradient,
    )
    rows = sharding.leading_axes(values.ndim - 1)
    scale, zero_point = of_columns(w)
    if exponents is not None and exponents.shape == w.scale.shape:
        scale = of_each_column(exponents, w.shape[1])
    arrays = sharding.align(
        (
            values,
            _of_rows(x) if isinstance(x, QuantizedArray) else None,
            w.values,
            scale,
            zero_point,
            bias,
            residual,
        ),
        operand_axes=(rows + "d", rows + "h", options.letters, "gf", "gf", "f", rows + "f"),
        whole=WHOLE,
    )
    device = dispatch.current_device(values)
    return _quantized_matmul(Runner(implementation, device), options, *arrays)


def _with_whole_sums(
    x: jax.Array | QuantizedArray, w: QuantizedArray
) -> tuple[jax.Array | QuantizedArray, QuantizedArray]:
    """Returns the operands resharded such that the summed axis is not split."""

    def whole(part: jax.Array, letters: str) -> Any:
        return sharding.align((part,), operand_axes=(letters,), whole="d")[0]

    rows = sharding.leading_axes(len(x.shape) - 1)
    letters = "df" if w.layout == "rows" else "dd"
    return (
        jax.tree.map(lambda part: whole(part, rows + "d"), x),
        jax.tree.map(lambda part: whole(part, letters), w),
    )


def _takes_reference(
    op: str,
    implementation: str | None,
    array: Any,
    x: jax.Array | QuantizedArray,
    w: QuantizedArray,
) -> bool:
    """Returns whether plain jax.numpy computes the call; `array` has x's shape and a float dtype."""
    why_xla = why_no_kernel_reads(w)
    if why_xla is None and isinstance(x, QuantizedArray) and w.codebook is not None:
        why_xla = "its kernels multiply codes of a codebook by float x: pass x.dequantize()"
    if (
        why_xla is None
        and isinstance(x, QuantizedArray)
        and (x.dtype not in _OF_8_BITS or not x.is_scaled)
    ):
        why_xla = "its kernels take symmetric x of 8 bits: pass jaxfused.quantize_rows(x)"
    missing = {} if why_xla is None else dict.fromkeys(("pallas", "cuda"), why_xla)
    values = x.values if isinstance(x, QuantizedArray) else x
    device = dispatch.current_device(values)
    return takes_reference(op, implementation, device, array, why_xla=why_xla, missing=missing)


_OF_8_BITS = ("int8", "float8_e4m3fn", "float8_e5m2")


def why_no_kernel_reads(w: QuantizedArray) -> str | None:
    """Returns why no kernel reads these weights, or None."""
    if w.layout != "columns":
        fits = layout_of(w.dtype, w.shape, w.axis) == "columns"
        return (
            "its kernels read weights whose columns are contiguous: pass"
            " jaxfused.quantize(w, layout='columns')"
        ) + ("" if fits else f", with w and x padded to a multiple of {WORD_BLOCK} inputs")
    if w.offset is not None:
        return "its kernels read no offsets, which w has"
    if w.codebook is not None:
        return _why_no_kernel_reads_codes(w)
    if w.dtype not in FORMATS or w.values.dtype == jnp.int4:
        return f"its kernels read int4 in words, int8 and float8, and w.values is {w.values.dtype}"
    if w.zero_point is not None and (
        w.zero_point.dtype != jnp.int8 or w.dtype not in ("int8", "int4")
    ):
        return "its kernels read zero points of int8 beside int8 and int4"
    if w.scale.dtype != jnp.float32:
        return f"its kernels read scales of float32, and w.scale is {w.scale.dtype}"
    return None


def _why_no_kernel_reads_codes(w: QuantizedArray) -> str | None:
    """Returns why no kernel reads these codes of a codebook, or None."""
    if w.values.dtype != jnp.uint8 or w.dtype != "uint4":
        return f"its kernels read codes of 4 bits, two in a uint8, and w has {w.dtype} codes"
    if w.zero_point is not None:
        return "its kernels read no zero points of codes"
    if w.scale.dtype != jnp.float32:
        return f"its kernels read scales of float32 and E8M0, and w.scale is {w.scale.dtype}"
    return None


def exponents_of(w: Any) -> jax.Array | None:
    """Returns codebook weights' E8M0 scales as uint8 exponents, as kernels read them; else None."""
    if not isinstance(w, QuantizedArray) or w.codebook is None:
        return None
    if getattr(w.scale, "dtype", None) != jnp.float8_e8m0fnu:
        return None
    return jax.lax.bitcast_convert_type(jnp.asarray(w.scale), jnp.uint8)


def of_columns(w: QuantizedArray) -> tuple[jax.Array, jax.Array | None]:
    """Returns the weights' scale and zero point as [..., groups, F], repeated if columns share one."""
    zero_point, columns = w.zero_point, w.shape[-1]
    return (
        of_each_column(w.scale, columns),
        None if zero_point is None else of_each_column(zero_point, columns),
    )


def _of_rows(x: QuantizedArray) -> jax.Array:
    """Returns the scales of quantised x as [..., groups], repeated if rows share one."""
    return jnp.broadcast_to(x.scale, (*x.shape[:-1], x.groups))


def _check_scale_has_gradient(op: str, w: Any) -> None:
    """Checks that the dtype of the scales, and so of their gradient, has fractions and signs."""
    if isinstance(w, QuantizedArray) and jnp.dtype(w.scale.dtype).itemsize < 2:
        raise ValueError(
            f"{op}: scale_gradient=True was passed with a w.scale of {w.scale.dtype}, which cannot hold"
            " a gradient; pass w with scale.astype(jnp.float32)."
        )


def _operand(op: str, name: str, array: Any, axis: int, remedy: str) -> QuantizedArray:
    """Returns x or w as a QuantizedArray in the form that kernels read, after checks."""
    if is_of_qwix(array):
        array = converted(op, array, axis, packs=False)
    if not isinstance(array, QuantizedArray):
        raise ValueError(
            f"{op}: {name} is a {type(array).__name__}, but it has to be a QuantizedArray;"
            f" pass jaxfused.{remedy}."
        )
    read = as_operand(op, name, array)
    if array.axis != axis:
        raise ValueError(
            f"{op}: {name} was quantised along axis {array.axis}, but the product sums over axis"
            f" {axis}; pass jaxfused.{remedy}."
        )
    return read


def _check_sums_fit(op: str, x: jax.Array | QuantizedArray, w: QuantizedArray) -> None:
    """Checks that int32 can hold the sums of integer products without wrapping around."""
    if not (isinstance(x, QuantizedArray) and quantized_matmul_xla.sums_integers(x, w)):
        return
    largest = 1
    for q in (x, w):
        largest *= 128 if q.zero_point is None else 255
    limit = (2**31 - 1) // largest
    if w.shape[0] > limit:
        raise ValueError(
            f"{op}: w has {w.shape[0]} input features, but sums of more than {limit} products of"
            " these integers may not fit into int32; pass x as floats, or split the features."
        )


# --- gradient -------------------------------------------------------------------------------------


class _Residuals(NamedTuple):
    w: QuantizedArray
    bias: jax.Array | None
    preactivation: jax.Array | None
    """Preactivation x @ w + bias in x's dtype, or float32 if x is quantised; None without an
    activation."""
    x: jax.Array | None
    """Input x, if the scales get a gradient."""


@functools.partial(kernel_gradient, nondiff_argnums=(0, 1), op="quantized_matmul")
def _quantized_matmul(run: Runner, options: Options, x, x_scale, *weights_bias_residual):
    layer = options.forward(save_preactivation=False)
    y, _ = run(layer, x, x_scale, *weights_bias_residual)
    return y


def _quantized_matmul_fwd(run: Runner, options: Options, x, x_scale, *weights_bias_residual):
    layer = options.forward(save_preactivation=options.activation is not None)
    y, preactivation = run(layer, x, x_scale, *weights_bias_residual)
    *weights, bias, _ = weights_bias_residual
    kept = x if options.scale_gradient else None
    return y, _Residuals(options.weights(*weights), bias, preactivation, kept)


def _quantized_matmul_bwd(run: Runner, options: Options, saved: _Residuals, dy):
    dtype, bias = options.x_dtype or jnp.float32, saved.bias
    if saved.preactivation is None:
        dz, dbias = dy.astype(dtype), None if bias is None else sum_rows(dy, bias.dtype)
    else:
        gradient = ActivationGradient(str(options.activation), bias is not None)
        dz, sums = run(gradient, dy, saved.preactivation)
        dbias = None if bias is None else sums.astype(bias.dtype)
    dscale = None
    if saved.x is not None:
        dscale = quantized_matmul_xla.gradient_of_scale(saved.x, saved.w, dz)
    return (
        None if options.x_dtype is None else _input_gradient(run, options, saved.w, dz),
        None,
        None,
        dscale,
        None,
        dbias,
        None if options.residual_dtype is None else dy.astype(options.residual_dtype),
    )


_quantized_matmul.defvjp(_quantized_matmul_fwd, _quantized_matmul_bwd)


def _input_gradient(run: Runner, options: Options, w: QuantizedArray, dz: jax.Array) -> jax.Array:
    """Returns the gradient of x, given dz in x's dtype."""
    weights = options.packed(w.values, w.scale, w.zero_point)
    reason = pallas_quantized.why_gradient_unsupported(
        compute_capability=run.device.compute_capability,
        dtype=dz.dtype,
        k=w.shape[0],
        w=weights,
    )
    # A kernel needs all of F on one device. If devices may split F, XLA sums their products.
    in_one_piece = sharding.is_in_one_piece(dz, w.values)
    if reason is None and in_one_piece and run.implementation in (None, "pallas"):
        (dx,) = run(InputGradient(options, w.shape[0]), dz, w.values, w.scale, w.zero_point)
        return dx
    if in_one_piece and quantized_matmul_xla.is_scaled_last(dz, w):
        return quantized_matmul_xla.input_gradient(w, dz)
    wide, dz = quantized_matmul_xla.dequantized_again(w, dz)
    return input_gradient(run, dz, wide, dz.dtype, None)


# --- kernels --------------------------------------------------------------------------------------
