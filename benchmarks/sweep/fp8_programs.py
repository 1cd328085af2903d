"""Layers that multiply in float8, ours and stock, forward and with gradients.

Stock is the same layer in bfloat16, and with XLA's float8 products in the two forms that users write.
The truth does not quantise. A result's error may be twice that of the exact product of the same float8
numbers.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.fuzz import products
from benchmarks.fuzz.problem import Problem
from benchmarks.run.case import Function
from benchmarks.sweep.program_parts import (
    ACTIVATIONS,
    Programs,
    dense,
    of_problem,
    split_operands,
)
from benchmarks.sweep.quantized_configs import Fp8Linear, Fp8MLP
from benchmarks.sweep.quantized_programs import narrow_sums, quantised


def _layer(config: Fp8Linear | Fp8MLP) -> dict[str, Any]:
    """Returns the options with which `benchmarks.fuzz` builds a layer over [rows, width]."""
    return dict(
        rows=(config.rows,),
        width=config.width,
        dtype=config.dtype,
        param_dtype=config.dtype if config.param_dtype == "same" else config.param_dtype,
        bias=config.bias,
        activation=config.activation,
        residual=config.dtype if config.residual else None,
        precision="fp8",
    )


def fp8_linear(config: Fp8Linear) -> Programs:
    def written(product: Function, *args: jax.Array) -> Any:
        x, w, bias, residual = split_operands(config, args)
        y = ACTIVATIONS[config.activation](dense(x, w, bias, product))
        return y if residual is None else y + residual

    return _fp8_programs(products.linear(_layer(config) | dict(out=config.out)), written)


def fp8_mlp(config: Fp8MLP) -> Programs:
    problem = products.mlp(
        _layer(config)
        | dict(hidden=config.hidden, out=config.width, out_bias=config.bias, save=config.save)
    )

    def written(product: Function, *args: jax.Array) -> Any:
        layers = dict(zip(problem.operands, args, strict=True))
        h = dense(layers["x"], layers["w1"], layers.get("b1"), product)
        y = dense(ACTIVATIONS[config.activation](h), layers["w2"], layers.get("b2"), product)
        return y + layers["residual"] if config.residual else y

    return _fp8_programs(problem, written)


def _fp8_programs(problem: Problem, written: Function) -> Programs:
    """Returns a layer's programs: ours, and `written` with XLA's products of bfloat16 and float8."""
    stock = {
        "bfloat16": partial(written, jnp.matmul),
        "float8 scaled first": partial(written, _fp8_product(_scaled_first)),
        "float8 scaled last": partial(written, _fp8_product(_scaled_after)),
    }
    reference = partial(written, _fp8_product(_in_bfloat16))
    return of_problem(problem, stock, reference=reference, truth=stock["bfloat16"])


_Fp8 = tuple[jax.Array, jax.Array]
"""Float8 numbers of a matrix, and the scale of all of them."""


def _fp8_product(multiply: Callable[[str, _Fp8, _Fp8, Any], jax.Array]) -> Function:
    """Returns a function x @ w with a gradient, which quantises matrices by their largest magnitude.

    x and w become e4m3 and the cotangent e5m2. Flax does the same, but takes scales from earlier steps.
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
