"""Quantised operators of jaxfused and in stock JAX, and the exact results to compare with.

Stock multiplies the same numbers in the forms that XLA has kernels for. The truth of a product is the
float32 product of the dequantised numbers. Errors of quantised results are counted in steps between
values of their format, and may be twice stock's, whose own rounding is off by at most half a step.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import jaxfused
from benchmarks.run.case import Arrays, Function
from benchmarks.sweep.program_parts import (
    ACTIVATIONS,
    EPSILON,
    VARIANCES,
    Programs,
    RandomArrays,
    flax_norm,
    split_operands,
)
from benchmarks.sweep.quantized_configs import (
    QuantizedConv,
    QuantizedMatmul,
    QuantizedNorm,
    QuantizedProduct,
    QuantizedRows,
)
from jaxfused.ops.quantized.quantized_gated_unit import gated_unit
from jaxfused.runtime.quantized_array import Layout

# --- arrays of quantised weights ------------------------------------------------------------------


@dataclass(frozen=True)
class _Weights:
    """Format of quantised weights [inputs, outputs], which are several operands of a program.

    int4 weights are stored twice: packed by jaxfused, and in XLA's 4-bit dtype, which stock reads.
    """

    format: str
    layout: Layout
    group: int = 0
    symmetric: bool = True
    columns: int = 1

    @property
    def count(self) -> int:
        """Number of arrays that represent the weights."""
        return 2 + (not self.symmetric) + (self.format == "int4")

    def make(self, w: jax.Array) -> list[jax.Array]:
        """Quantises float weights into the arrays."""
        group = self.group or None
        q = jaxfused.quantize(
            w,
            self.format,
            group_size=group if self.columns == 1 else (group, self.columns),
            symmetric=self.symmetric,
            layout=self.layout,
        )
        arrays = [q.values, q.scale, *(() if q.zero_point is None else (q.zero_point,))]
        if self.format == "int4":
            numbers = q.unpacked()
            arrays.append((numbers.mT if self.layout == "columns" else numbers).astype(jnp.int4))
        return arrays

    def array(self, arrays: Sequence[jax.Array]) -> jaxfused.QuantizedArray:
        """Returns the weights as our operators read them."""
        zero_point = None if self.symmetric else arrays[2]
        return jaxfused.QuantizedArray(arrays[0], arrays[1], zero_point, -2, self.layout)

    def in_groups(self, arrays: Sequence[jax.Array], dtype: Any) -> tuple[jax.Array, jax.Array]:
        """Returns (numbers - zero points [groups, group size, outputs], scales [groups, outputs])."""
        numbers = arrays[-1] if self.format == "int4" else arrays[0]
        numbers = numbers.mT if self.layout == "columns" else numbers
        scale = jnp.repeat(arrays[1], self.columns, axis=1)
        numbers = numbers.reshape(scale.shape[0], -1, numbers.shape[-1]).astype(dtype)
        if not self.symmetric:
            numbers = numbers - arrays[2][:, None].astype(dtype)
        return numbers, scale

    def dequantised(self, arrays: Sequence[jax.Array], dtype: Any) -> jax.Array:
        """Dequantises in float32, and rounds to `dtype`: [inputs, outputs]."""
        numbers, scale = self.in_groups(arrays, jnp.float32)
        return (numbers * scale[:, None]).reshape(-1, numbers.shape[-1]).astype(dtype)


def narrow_sums(dtype: Any) -> Any:
    """Returns the dtype of a product's unscaled sums: float32 for float16, which they may overflow."""
    return jnp.float32 if dtype == jnp.float16 else dtype


# --- products with quantised weights --------------------------------------------------------------


def quantized_matmul(config: QuantizedMatmul) -> Programs:
    dtype, shape = jnp.dtype(config.dtype), (config.rows, config.out)
    weights = _weights_of(config)
    products = 2 if config.gated else 1
    biases = products * config.bias

    def make_inputs(key: jax.Array) -> Arrays:
        random = RandomArrays(key)
        operands = [random.normal((config.rows, config.width), dtype)]
        operands += [random.small(config.out, dtype) for _ in range(biases)]
        operands += [random.normal(shape, dtype) for _ in range(config.residual)]
        for _ in range(products):
            operands += weights.make(random.weight((config.width, config.out), jnp.float32))
        return (*operands, random.normal(shape, dtype))

    def split(args: Arrays) -> tuple[Any, Sequence[Any], Any, list[Sequence[jax.Array]]]:
        """Returns x, a bias or None for each product, the residual, and the arrays of each weight."""
        x, *rest = args
        of_products = rest[:biases] or [None] * products
        residual = rest[biases] if config.residual else None
        arrays = rest[biases + config.residual :]
        starts = range(0, products * weights.count, weights.count)
        return x, of_products, residual, [arrays[i : i + weights.count] for i in starts]

    def ours(*args: jax.Array, implementation: str | None = None) -> Any:
        x, of_products, residual, arrays = split(args)
        ws = [weights.array(a) for a in arrays]
        if config.gated:
            unit: Any = dict(activation=config.activation, implementation=implementation)
            return gated_unit(x, *ws, *of_products, **unit)
        (w,), (bias,) = ws, of_products
        options: Any = dict(activation=config.activation, residual=residual)
        return jaxfused.quantized_matmul(x, w, bias, implementation=implementation, **options)

    def floats(*args: jax.Array) -> Arrays:
        x, _, _, arrays = split(args)
        return x, *(weights.dequantised(of_one, dtype) for of_one in arrays)

    def stock(product: Function, *args: jax.Array) -> Any:
        x, of_products, residual, arrays = split(args)
        ys = [product(weights, x, of_one) for of_one in arrays]
        ys = [y if b is None else y + b for y, b in zip(ys, of_products, strict=True)]
        activated = ACTIVATIONS[config.activation](ys[0])
        if config.gated:
            return activated * ys[1]
        return activated if residual is None else activated + residual

    return Programs(
        make_inputs,
        ours,
        {name: partial(stock, form) for name, form in _forms_of_float_x(config).items()},
        differentiable=1 + biases + config.residual,
        floats=floats,
        weight_bytes=products * _bytes(config.width * config.out, config.weights),
    )


def _weights_of(config: QuantizedMatmul) -> _Weights:
    layout: Layout = "columns" if config.layout == "columns" else "rows"
    return _Weights(config.weights, layout, config.group, config.symmetric)


def _bytes(numbers: int, number_format: str) -> int:
    return numbers // 2 if number_format == "int4" else numbers


_MOST_PARTS = 2**26
"""Largest number of float32 partial sums that `_by_groups` may write before it adds them."""


def _forms_of_float_x(config: QuantizedMatmul) -> dict[str, Function]:
    """Returns functions that multiply float x by weights, in each form that may be fast in XLA."""
    forms: dict[str, Function] = {"dequantised": _dequantised_first}
    if not config.group:
        forms["scaled last"] = _scaled_last
    elif config.width // config.group * config.rows * config.out <= _MOST_PARTS:
        forms["by groups"] = _by_groups
    return forms


def _dequantised_first(weights: _Weights, x, arrays):
    return x @ weights.dequantised(arrays, x.dtype)


def _scaled_last(weights: _Weights, x, arrays):
    """Multiplies the stored numbers, then each column's sums by the column's scale."""
    numbers, scale = weights.in_groups(arrays, x.dtype)
    sums = jnp.matmul(x, numbers[0], preferred_element_type=narrow_sums(x.dtype))
    return (sums * scale).astype(x.dtype)


def _by_groups(weights: _Weights, x, arrays):
    """Sums each group separately, as AQT and Qwix do: the products read the stored numbers."""
    numbers, scale = weights.in_groups(arrays, x.dtype)
    groups = x.reshape(x.shape[0], scale.shape[0], -1)
    sums = jnp.einsum("mgd,gdf->gmf", groups, numbers, preferred_element_type=jnp.float32)
    return (sums * scale[:, None]).sum(0).astype(x.dtype)


# --- products of two quantised operands -----------------------------------------------------------


def quantized_product(config: QuantizedProduct) -> Programs:
    out_dtype, shape = jnp.dtype(config.out_dtype), (config.rows, config.out)
    layout: Layout = "columns" if config.layout == "columns" else "rows"
    weights = _Weights(config.format, layout, config.group, columns=config.columns)

    def make_inputs(key: jax.Array) -> Arrays:
        random = RandomArrays(key)
        x = random.normal((config.rows, config.width), jnp.float32)
        scales = dict(group_size=config.group or None, per_tensor=config.per_tensor)
        q = jaxfused.quantize(x, config.format, axis=-1, **scales)
        w = weights.make(random.weight((config.width, config.out), jnp.float32))
        operands = [q.values, q.scale, *w]
        operands += [random.small(config.out, jnp.float32) for _ in range(config.bias)]
        return (*operands, *(random.normal(shape, out_dtype) for _ in range(config.residual)))

    def split(args: Arrays) -> tuple[Arrays, Arrays, Any, Any]:
        x, w, rest = args[:2], args[2:4], [*args[4:]]
        bias = rest.pop(0) if config.bias else None
        return x, w, bias, rest.pop(0) if config.residual else None

    def ours(*args: jax.Array, implementation: str | None = None) -> Any:
        x, w, bias, residual = split(args)
        return jaxfused.quantized_matmul(
            jaxfused.QuantizedArray(*x, None, -1),
            weights.array(w),
            bias,
            activation=config.activation,
            residual=residual,
            out_dtype=out_dtype,
            implementation=implementation,
        )

    def floats(*args: jax.Array) -> Arrays:
        x, w, _, _ = split(args)
        return _dequantised(x, out_dtype), weights.dequantised(w, out_dtype)

    def written(dtype: Any, product: Function, *args: jax.Array) -> Any:
        x, w, bias, residual = split(args)
        y = product(weights, x, w).astype(jnp.float32)
        y = ACTIVATIONS[config.activation](y if bias is None else y + bias)
        return (y if residual is None else y + residual).astype(dtype)

    return Programs(
        make_inputs,
        ours,
        {
            name: partial(written, out_dtype, form)
            for name, form in _forms_of_both(config, out_dtype).items()
        },
        differentiable=0,
        reference=partial(written, out_dtype, _of_what_both_are),
        truth=partial(written, jnp.float32, _of_what_both_are),
        floats=floats,
        weight_bytes=_bytes(config.width * config.out, config.format),
    )


def _forms_of_both(config: QuantizedProduct, out_dtype: Any) -> dict[str, Function]:
    """Returns functions that multiply quantised matrices, in each form that may be fast in XLA."""
    if config.group:
        return {"dequantised": partial(_dequantised_both, dtype=out_dtype)}
    # bfloat16 represents all numbers of int8 and float8 exactly.
    narrow = narrow_sums(out_dtype)
    sums = jnp.int32 if config.format == "int8" else narrow
    return {
        config.format: partial(_scaled_sums, multiplied=None, sums=sums),
        "bfloat16": partial(_scaled_sums, multiplied=jnp.bfloat16, sums=narrow),
    }


def _scaled_sums(weights: _Weights, x, w, *, multiplied: Any, sums: Any):
    """Multiplies the stored numbers, perhaps in another dtype, and scales the sums."""
    (values, scale), numbers = x, w[0].mT if weights.layout == "columns" else w[0]
    if multiplied is not None:
        values, numbers = values.astype(multiplied), numbers.astype(multiplied)
    product = lax.dot_general(
        values, numbers, (((1,), (0,)), ((), ())), preferred_element_type=sums
    )
    return product.astype(jnp.float32) * scale * w[1]


def _dequantised_both(weights: _Weights, x, w, dtype: Any, precision: Any = None):
    of_x, of_w = _dequantised(x, dtype), weights.dequantised(w, dtype)
    return jnp.matmul(of_x, of_w, precision=precision, preferred_element_type=jnp.float32)


def _dequantised(x: Arrays, dtype: Any) -> jax.Array:
    values, scale = x
    in_groups = values.reshape(values.shape[0], scale.shape[1], -1).astype(jnp.float32)
    return (in_groups * scale[..., None]).reshape(values.shape).astype(dtype)


_of_what_both_are = partial(_dequantised_both, dtype=jnp.float32, precision="highest")


# --- quantised results ----------------------------------------------------------------------------


def quantised(x, number_format: str, axes: Any, *, reciprocal: bool = False):
    """Returns (numbers, scale) as users do: divided by the scale, or multiplied by its reciprocal."""
    wide = x.astype(jnp.float32)
    scale = _scale(wide, number_format, axes)
    units = wide * (1.0 / scale) if reciprocal else wide / scale
    largest = _largest(number_format)
    if number_format == "int8":
        units = jnp.round(units)
    return jnp.clip(units, -largest, largest).astype(number_format), scale


def _largest(number_format: str) -> float:
    return 127.0 if number_format == "int8" else float(jnp.finfo(number_format).max)


def _scale(wide, number_format: str, axes: Any):
    magnitude = jnp.max(jnp.abs(wide), axis=axes, keepdims=True)
    return jnp.maximum(magnitude / _largest(number_format), jnp.finfo(jnp.float32).tiny)


def _exactly(x, number_format: str, axes: Any):
    """Returns the truth of `quantised`: the numbers before their rounding."""
    wide = x.astype(jnp.float32)
    scale = _scale(wide, number_format, axes)
    return wide / scale, scale


def in_steps(number_format: str, results: Arrays) -> Arrays:
    """Returns results with the first one's numbers replaced by their ranks among a format's values.

    The rank counts the format's values from 0; a number between two values has a fraction.
    """
    numbers = results[0].astype(jnp.float32)
    if number_format != "int8":
        info = jnp.finfo(number_format)
        magnitude = jnp.abs(numbers)
        _, exponent = jnp.frexp(jnp.maximum(magnitude, float(info.smallest_normal)))
        binade = exponent - 1
        steps = jnp.ldexp(magnitude, info.nmant - binade)
        numbers = jnp.sign(numbers) * (steps + 2**info.nmant * (binade - info.minexp))
    return numbers, *results[1:]


def quantize_rows(config: QuantizedRows) -> Programs:
    dtype, axes = jnp.dtype(config.dtype), None if config.per_tensor else -1

    def make_inputs(key: jax.Array) -> Arrays:
        return (RandomArrays(key).normal((config.rows, config.width), dtype),)

    def ours(x):
        if config.per_tensor:
            q = jaxfused.quantize(x, config.format, axis=-1, per_tensor=True)
        else:
            q = jaxfused.quantize_rows(x, config.format)
        return q.values, q.scale

    def stock(reciprocal: bool, x):
        return quantised(x, config.format, axes, reciprocal=reciprocal)

    return Programs(
        make_inputs,
        ours,
        {"divided": partial(stock, False), "by the reciprocal": partial(stock, True)},
        differentiable=0,
        cotangents=2,
        truth=lambda x: _exactly(x, config.format, axes),
        judged=partial(in_steps, config.format),
        units=(jnp.float32, jnp.float32),
    )


def quantized_norm(config: QuantizedNorm) -> Programs:
    dtype, shape = jnp.dtype(config.dtype), (config.rows, config.width)
    norm = jaxfused.layer_norm if config.norm == "layer_norm" else jaxfused.rms_norm

    def make_inputs(key: jax.Array) -> Arrays:
        random = RandomArrays(key)
        operands = [random.normal(shape, dtype, mean=0.5, deviation=2.0)]
        operands.append(random.small(config.width, jnp.float32, mean=1.0))
        operands += [random.small(config.width, jnp.float32) for _ in range(config.bias)]
        return (*operands, *(random.normal(shape, dtype) for _ in range(config.residual)))

    def ours(*args: jax.Array) -> Any:
        x, scale, bias, residual = split_operands(config, args)
        options: Any = dict(epsilon=EPSILON, quantize_rows=config.format, residual=residual)
        results = norm(x, scale, bias, **options)
        q, *h = results if config.residual else (results,)
        return q.values, q.scale, *h

    def written(rounded: Function, variance: Function, *args: jax.Array) -> Any:
        x, scale, bias, residual = split_operands(config, args)
        h = x if residual is None else x + residual
        numbers, of_rows = rounded(flax_norm(h, scale, bias, variance), config.format, -1)
        return (numbers, of_rows) if residual is None else (numbers, of_rows, h)

    variances = VARIANCES[config.norm]
    return Programs(
        make_inputs,
        ours,
        {name: partial(written, quantised, variance) for name, variance in variances.items()},
        differentiable=0,
        cotangents=2 + config.residual,
        truth=partial(written, _exactly, next(iter(variances.values()))),
        judged=partial(in_steps, config.format),
        # A row's scale is as exact as the row's largest value, which is rounded to x's dtype.
        units=(jnp.float32, dtype, *[dtype] * config.residual),
    )


# --- convolutions ---------------------------------------------------------------------------------


def quantized_conv(config: QuantizedConv) -> Programs:
    dtype, window = jnp.dtype(config.dtype), (config.window,) * config.axes
    kernel = (*window, config.channels, config.out)
    weights = _Weights(config.weights, "columns")
    axes = tuple(range(1, 2 + config.axes)) if config.scale_of_image else None

    def make_inputs(key: jax.Array) -> Arrays:
        random = RandomArrays(key)
        x = random.normal(config.shape, dtype)
        scale = _scale(x.astype(jnp.float32), config.inputs, axes)
        q = jaxfused.quantize(x, config.inputs, axis=-1, scale=scale)
        w = random.normal(kernel, dtype, deviation=math.prod(kernel[:-1]) ** -0.5)
        operands = [q.values, q.scale, *weights.make(w.reshape(-1, config.out))]
        if config.bias:
            bias_dtype = config.dtype if config.param_dtype == "same" else config.param_dtype
            operands.append(random.small(config.out, bias_dtype))
        operands += [random.normal(config.result, dtype) for _ in range(config.residual)]
        # The peer convolves x and w, from which the other operands were quantised.
        return (*operands, x, w)

    def split(args: Arrays) -> tuple[Arrays, Arrays, Any, Any, Arrays]:
        x, w, rest, floats = args[:2], args[2:4], [*args[4:-2]], args[-2:]
        bias = rest.pop(0) if config.bias else None
        return x, w, bias, rest.pop(0) if config.residual else None, floats

    def ours(*args: jax.Array, implementation: str | None = None) -> Any:
        x, w, bias, residual, _ = split(args)
        return jaxfused.quantized_conv(
            jaxfused.QuantizedArray(*x, None, -1),
            weights.array(w),
            bias,
            kernel_size=window,
            strides=config.stride,
            kernel_dilation=config.dilation,
            activation=config.activation,
            residual=residual,
            out_dtype=dtype,
            implementation=implementation,
        )

    def written(dtype: Any, convolved: Callable[..., jax.Array], *args: jax.Array) -> Any:
        x, w, bias, residual, floats = split(args)
        y = convolved(x, w, floats)
        y = y if bias is None else y + bias.astype(y.dtype)
        y = ACTIVATIONS[config.activation](y if residual is None else y + residual)
        return y.astype(dtype)

    def of_floats(x, w, floats):
        del x, w
        return _convolution(config, *floats)

    def dequantised(of: Any, x, w, floats):
        del floats
        values, wide = x[0].astype(jnp.float32) * x[1], weights.dequantised(w, of)
        precision = "highest" if of == jnp.float32 else None
        return _convolution(config, values.astype(of), wide.reshape(kernel), precision)

    def scaled_last(x, w, floats):
        del floats
        numbers = weights.in_groups(w, dtype)[0].reshape(kernel)
        return _convolution(config, x[0].astype(dtype), numbers) * x[1] * w[1][0]

    forms = {"dequantised": partial(dequantised, dtype)}
    if dtype != jnp.float16:
        # Unscaled sums might overflow float16.
        forms["scaled last"] = scaled_last
    exact = partial(dequantised, jnp.float32)
    return Programs(
        make_inputs,
        ours,
        {name: partial(written, dtype, form) for name, form in forms.items()},
        differentiable=0,
        peers={"bfloat16": partial(written, dtype, of_floats)},
        reference=partial(written, dtype, exact),
        truth=partial(written, jnp.float32, exact),
    )


def _convolution(config: QuantizedConv, x, w, precision: Any = None) -> jax.Array:
    letters = "DHW"[-config.axes :]
    return lax.conv_general_dilated(
        x,
        w,
        (config.stride,) * config.axes,
        "SAME",
        rhs_dilation=(config.dilation,) * config.axes,
        dimension_numbers=(f"N{letters}C", f"{letters}IO", f"N{letters}C"),
        precision=precision,
    )
