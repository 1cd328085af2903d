"""linear in float8, with its gradient."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxfused.ops.fp8 import fp8, fp8_operands, fp8_products
from jaxfused.ops.linear.linear_stages import ActivationGradient
from jaxfused.runtime.checkpoint_names import named
from jaxfused.runtime.kernel_gradient import kernel_gradient
from jaxfused.runtime.runner import Runner


class Options(NamedTuple):
    """Static arguments of a call of linear in float8."""

    activation: str | None
    out_dtype: Any
    residual_dtype: Any


class _Residuals(NamedTuple):
    x: fp8_operands.Copies
    w: fp8_operands.Copies
    bias: jax.Array | None
    preactivation: jax.Array | None
    state: fp8.Fp8State | None
    no_x: jax.Array
    """Array without elements that has x's dtype."""
    no_w: jax.Array


@functools.partial(kernel_gradient, nondiff_argnums=(0, 1), op="linear", in_float8=True)
def linear(run: Runner, options: Options, x, w, bias, residual, state):
    """Computes `jaxfused.linear` in float8."""
    xs = fp8_operands.copies_of(run, state, "linear", "x", x, transposes=False)
    ws = fp8_operands.copies_of(run, state, "linear", "w", w, straight=False)
    return _layer(run, options, xs, ws, bias, residual, x.dtype, saves=False)[0]


def _layer(run: Runner, options: Options, xs, ws, bias, residual, dtype, *, saves: bool):
    return fp8_products.layer(
        run,
        "linear",
        xs,
        ws,
        bias,
        residual,
        activation=options.activation,
        out_dtype=options.out_dtype,
        narrow_dtype=dtype,
        saves=saves,
    )


def _linear_fwd(run: Runner, options: Options, x, w, bias, residual, state):
    xs, ws = (
        fp8_operands.copies_of(run, state, "linear", "x", x),
        fp8_operands.copies_of(run, state, "linear", "w", w),
    )
    saves = options.activation is not None
    y, z, _ = _layer(run, options, xs, ws, bias, residual, x.dtype, saves=saves)
    y, z = named(y, "linear", "output"), named(z, "linear", "preactivation")
    no_x, no_w = (jnp.zeros((0,), array.dtype) for array in (x, w))
    xs, ws = xs.kept("transposed"), ws.kept("values")
    return y, _Residuals(xs, ws, bias, z, state, no_x, no_w)


def _linear_bwd(run: Runner, options: Options, saved: _Residuals, dy):
    bias, state, dz = saved.bias, saved.state, dy
    if saved.preactivation is not None:
        dz, _ = run(ActivationGradient(str(options.activation), False), dy, saved.preactivation)
    dzs = fp8_operands.copies_of(
        run, state, "linear", "dy", dz, dtype=fp8_operands.GRADIENT, sums=bias is not None
    )
    found = dict(x=saved.x.found, w=saved.w.found, dy=dzs.found)
    return (
        fp8_products.input_gradient(run, "linear", dzs, saved.w, saved.no_x.dtype),
        fp8_products.weight_gradient(run, "linear", saved.x, dzs, saved.no_w.dtype),
        None if bias is None else dzs.sums.astype(bias.dtype),
        None if options.residual_dtype is None else dy.astype(options.residual_dtype),
        None if state is None else state.after("linear", found),
    )


linear.defvjp(_linear_fwd, _linear_bwd)
