"""Layers that multiply in float8, ours and stock, forward and with gradients.

Stock is the same layer in bfloat16, and with XLA's float8 products in the two forms that users write.
The truth has no rounding. A result may differ from the truth twice as much as the exact product of the
same float8 numbers.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import jaxfused
from benchmarks.run.case import Arrays, Function
from benchmarks.sweep.program_parts import (
    ACTIVATIONS,
    Programs,
    RandomArrays,
    dense,
    split_operands,
)
from benchmarks.sweep.quantized_configs import Fp8Linear, Fp8MLP
from benchmarks.sweep.quantized_programs import narrow_sums, quantised


def fp8_linear(config: Fp8Linear) -> Programs:
    dtype, shape = jnp.dtype(config.dtype), (config.rows, config.out)
    param_dtype = jnp.dtype(config.dtype if config.param_dtype == "same" else config.param_dtype)

    def make_inputs(key: jax.Array) -> Arrays:
        random = RandomArrays(key)
        operands = [random.normal((config.rows, config.width), dtype)]
        operands.append(random.weight((config.width, config.out), param_dtype))
        operands += [random.small(config.out, param_dtype) for _ in range(config.bias)]
        return (*operands, *(random.normal(shape, dtype) for _ in range(1 + config.residual)))

    def ours(*args: jax.Array) -> Any:
        x, w, bias, residual = split_operands(config, args)
        options: Any = dict(activation=config.activation, residual=residual, precision="fp8")
        return jaxfused.linear(x, w, bias, **options)

    def written(product: Function, *args: jax.Array) -> Any:
        x, w, bias, residual = split_operands(config, args)
        y = ACTIVATIONS[config.activation](dense(x, w, bias, product))
        return y if residual is None else y + residual

    return _fp8_programs(
        make_inputs, ours, written, differentiable=2 + config.bias + config.residual
    )


def fp8_mlp(config: Fp8MLP) -> Programs:
    dtype, shape = jnp.dtype(config.dtype), (config.rows, config.width)
    param_dtype = jnp.dtype(config.dtype if config.param_dtype == "same" else config.param_dtype)

    def make_inputs(key: jax.Array) -> Arrays:
        random = RandomArrays(key)
        operands = [random.normal(shape, dtype)]
        for weight in ((config.width, config.hidden), (config.hidden, config.width)):
            operands.append(random.weight(weight, param_dtype))
            operands += [random.small(weight[1], param_dtype) for _ in range(config.bias)]
        return (*operands, *(random.normal(shape, dtype) for _ in range(1 + config.residual)))

    def split(args: Arrays) -> tuple[Any, ...]:
        x, *rest = args
        residual = rest.pop() if config.residual else None
        layers = rest if config.bias else [rest[0], None, rest[1], None]
        return x, *layers, residual

    def ours(*args: jax.Array) -> Any:
        *operands, residual = split(args)
        options: Any = dict(activation=config.activation, residual=residual, save=config.save)
        return jaxfused.mlp(*operands, precision="fp8", **options)

    def written(product: Function, *args: jax.Array) -> Any:
        x, w1, b1, w2, b2, residual = split(args)
        y = dense(ACTIVATIONS[config.activation](dense(x, w1, b1, product)), w2, b2, product)
        return y if residual is None else y + residual

    differentiable = 1 + 2 * (1 + config.bias) + config.residual
    return _fp8_programs(make_inputs, ours, written, differentiable=differentiable)


def _fp8_programs(
    make_inputs: Callable[[jax.Array], Arrays],
    ours: Function,
    written: Function,
    *,
    differentiable: int,
) -> Programs:
    """Builds the programs; stock is `written` with XLA's products of bfloat16 and of float8."""
    stock = {
        "bfloat16": partial(written, jnp.matmul),
        "float8 scaled first": partial(written, _fp8_product(_scaled_first)),
        "float8 scaled last": partial(written, _fp8_product(_scaled_after)),
    }
    return Programs(
        make_inputs,
        ours,
        stock,
        differentiable=differentiable,
        reference=partial(written, _fp8_product(_in_bfloat16)),
        truth=stock["bfloat16"],
    )


_Fp8 = tuple[jax.Array, jax.Array]
"""Quantised numbers and the scale that they share."""


def _fp8_product(multiply: Callable[[str, _Fp8, _Fp8, Any], jax.Array]) -> Function:
    """Returns x @ w with a gradient, of matrices that are quantised by their largest magnitude.

    x and w become e4m3 and the cotangent e5m2 as in Flax, which however takes scales from earlier steps.
    """

    @jax.custom_vjp
    def product(x, w):
        return forward(x, w)[0]

    def forward(x, w):
        of_x, of_w = (quantised(a, "float8_e4m3fn", None) for a in (x, w))
        return multiply("md,df->mf", of_x, of_w, x.dtype), (of_x, of_w)

    def backward(saved, dy):
        (of_x, of_w), of_dy = saved, quantised(dy, "float8_e5m2", None)
        dx = multiply("mf,df->md", of_dy, of_w, dy.dtype)
        return dx, multiply("md,mf->df", of_x, of_dy, dy.dtype)

    product.defvjp(forward, backward)
    return product


def _scaled_first(terms: str, a: _Fp8, b: _Fp8, dtype: Any) -> jax.Array:
    """Multiplies as Flax does: XLA recognises float8 operands and passes their scales to cuBLASLt."""
    operands = (numbers.astype(dtype) * scale.astype(dtype) for numbers, scale in (a, b))
    return jnp.einsum(terms, *operands)


def _scaled_after(terms: str, a: _Fp8, b: _Fp8, dtype: Any) -> jax.Array:
    sums = _contraction(terms, a[0], b[0], narrow_sums(dtype))
    return (sums * (a[1] * b[1])).astype(dtype)


def _in_bfloat16(terms: str, a: _Fp8, b: _Fp8, dtype: Any) -> jax.Array:
    """Multiplies the same numbers in bfloat16; without the barrier XLA would multiply float8."""
    numbers = lax.optimization_barrier((a[0].astype(jnp.bfloat16), b[0].astype(jnp.bfloat16)))
    return (_contraction(terms, *numbers, jnp.float32) * (a[1] * b[1])).astype(dtype)


def _contraction(terms: str, a: jax.Array, b: jax.Array, dtype: Any) -> jax.Array:
    """Returns the einsum of two matrices, whose float8 formats may differ."""
    (of_a, of_b) = terms.split("->")[0].split(",")
    (shared,) = set(of_a) & set(of_b)
    axes = ((of_a.index(shared),), (of_b.index(shared),))
    return lax.dot_general(a, b, (axes, ((), ())), preferred_element_type=dtype)
