"""Tensor parallel products: an all-gather during a product, and a reduce-scatter during a product."""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxfused.ops.linear.input_gradient import input_gradient
from jaxfused.ops.linear.linear_stages import ActivationGradient, Layer
from jaxfused.ops.linear.weight_gradient import weight_and_bias_gradients, weight_gradient
from jaxfused.parallel import parts, ring
from jaxfused.runtime import sharding
from jaxfused.runtime.checkpoint_names import named
from jaxfused.runtime.kernel_gradient import kernel_gradient
from jaxfused.runtime.runner import Runner
from jaxfused.runtime.sharding import AxisName


@dataclass(frozen=True)
class Options:
    """Static arguments of a tensor parallel product, except for the Runner."""

    op: str
    axis_name: AxisName
    activation: str | None
    precision: Any

    def layer(self, dtype: Any, *, saves: bool = False) -> Layer:
        return Layer("parallel linear", self.activation, dtype, saves, self.precision)


def gathered_product(run: Runner, options: Options, x, w, bias) -> jax.Array:
    """Returns activation(x w + bias), [..., n T, F], of the rows x [..., T, D] of all n devices.

    Each device has its own columns of w [D, F] and bias [F].
    """
    rows = sharding.leading_axes(x.ndim - 1)
    aligned = sharding.align((x, w, bias), operand_axes=(rows + "d", "df", "f"), whole="df")
    return _gathered_product(run, options, *aligned)


def product_scattered(run: Runner, options: Options, x, w) -> jax.Array:
    """Returns a device's own rows, [..., T, F], of the sum over n devices of x w.

    Each device has its own summed features D, of x [..., n T, D] and of w [D, F].
    """
    rows = sharding.leading_axes(x.ndim - 1)
    aligned = sharding.align((x, w), operand_axes=(rows + "d", "df"), whole="df")
    return _product_scattered(run, options, *aligned)


def product_in_parts(run: Runner, options: Options, x, w) -> tuple[jax.Array, ...]:
    """Returns x w, [..., T, F], cut along the tokens into parts for `parts.added_up`."""
    rows = sharding.leading_axes(x.ndim - 1)
    aligned = sharding.align((x, w), operand_axes=(rows + "d", "df"), whole="df")
    return _product_in_parts(run, options, *aligned)


class _Gathered(NamedTuple):
    x: jax.Array
    """Rows of all devices, [..., n T, D]."""
    w: jax.Array
    bias: jax.Array | None
    preactivation: jax.Array | None


@functools.partial(kernel_gradient, nondiff_argnums=(0, 1))
def _gathered_product(run: Runner, options: Options, x, w, bias):
    layer = options.layer(x.dtype)
    turns = ring.travelling(options.axis_name, x)
    results = ring.each(turns, lambda rows: run(layer, rows, w, bias, None)[0])
    return ring.in_order(options.axis_name, results)


def _gathered_product_fwd(run: Runner, options: Options, x, w, bias):
    layer = options.layer(x.dtype, saves=options.activation is not None)
    turns = ring.travelling(options.axis_name, x)
    results = ring.each(turns, lambda rows: run(layer, rows, w, bias, None))
    y, z = (
        None
        if results[0][0][i] is None
        else ring.in_order(options.axis_name, [[pair[i] for pair in one] for one in results])
        for i in range(2)
    )
    z = named(z, "linear", "preactivation")
    return named(y, "linear", "output"), _Gathered(
        ring.in_order(options.axis_name, turns), w, bias, z
    )


def _gathered_product_bwd(run: Runner, options: Options, saved: _Gathered, dy):
    every, w, bias, z = saved
    dz, sums = dy.astype(every.dtype), None
    if z is not None:
        gradient = ActivationGradient(str(options.activation), bias is not None)
        dz, sums = run(gradient, dy, z)

    def step(rows, arrived):
        dx = input_gradient(run, rows, w, every.dtype, options.precision)
        return dx if arrived is None else dx + arrived, None

    turns = ring.standing(options.axis_name, dz)
    dx, _, (every, dz) = ring.summed(options.axis_name, turns, step, then=(every, dz))
    if bias is not None and sums is not None:
        dw = weight_gradient(run, "linear", every, dz, w.dtype, options.precision)
        return dx, dw, sums.astype(bias.dtype)
    dw, dbias = weight_and_bias_gradients(
        run, "linear", every, dz, w.dtype, bias, options.precision
    )
    return dx, dw, dbias


_gathered_product.defvjp(_gathered_product_fwd, _gathered_product_bwd)


@functools.partial(kernel_gradient, nondiff_argnums=(0, 1))
def _product_scattered(run: Runner, options: Options, x, w):
    layer = options.layer(x.dtype)

    def step(rows, arrived):
        return run(layer, rows, w, None, arrived)[0], None

    y, _, _ = ring.summed(options.axis_name, ring.standing(options.axis_name, x), step)
    return y


def _product_scattered_fwd(run: Runner, options: Options, x, w):
    y = named(_product_scattered(run, options, x, w), "linear", "output")
    return y, (x, w)


def _product_scattered_bwd(run: Runner, options: Options, saved, dy):
    x, w = saved
    turns = ring.travelling(options.axis_name, dy.astype(x.dtype))
    dx = ring.each(turns, lambda rows: input_gradient(run, rows, w, x.dtype, options.precision))
    every = ring.in_order(options.axis_name, turns)
    dw = weight_gradient(run, "linear", x, every, w.dtype, options.precision)
    return ring.in_order(options.axis_name, dx), dw


_product_scattered.defvjp(_product_scattered_fwd, _product_scattered_bwd)


@functools.partial(kernel_gradient, nondiff_argnums=(0, 1))
def _product_in_parts(run: Runner, options: Options, x, w):
    layer = options.layer(x.dtype)
    return parts.multiplied(lambda part: run(layer, part, w, None, None)[0], x)


def _product_in_parts_bwd(run: Runner, options: Options, saved, dys):
    x, w = saved
    dy = jnp.concatenate(dys, axis=-2).astype(x.dtype)
    dx = input_gradient(run, dy, w, x.dtype, options.precision)
    return dx, weight_gradient(run, "linear", x, dy, w.dtype, options.precision)


_product_in_parts.defvjp(
    lambda run, options, x, w: (_product_in_parts(run, options, x, w), (x, w)),
    _product_in_parts_bwd,
)
