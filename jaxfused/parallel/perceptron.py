"""The MLP with its hidden features split over devices; collectives run during its products.

If each device has all rows, the last product is computed in parts of the rows: the sum of one part
over devices runs while the next part is multiplied. If rows are split over devices, they are sent
round a ring, together with the sums of the result. The backward computes the weights' gradients last,
while the last sums are sent.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxfused.ops.linear import gated_mlp, linear_xla, mlp
from jaxfused.ops.linear.hidden_layer import Save, check_save
from jaxfused.ops.linear.weight_gradient import weight_gradient
from jaxfused.parallel import parts, ring
from jaxfused.parallel.placement import check_rows
from jaxfused.runtime import sharding
from jaxfused.runtime.checkpoint_names import named
from jaxfused.runtime.checks import as_arrays, check_activation, check_floating
from jaxfused.runtime.kernel_gradient import kernel_gradient
from jaxfused.runtime.runner import Runner
from jaxfused.runtime.sharding import AxisName

Layers = mlp.Layers | gated_mlp.Layers


def checked(op: str, activation: str | None, save: Save, **operands: Any) -> tuple[Any, ...]:
    """Returns the operands as arrays, after the checks that concern one of them; x is the first."""
    arrays = as_arrays(*operands.values())
    check_floating(op, dict(zip(operands, arrays, strict=True)))
    check_activation(op, activation)
    check_save(op, save)
    check_rows(op, arrays[0])
    return arrays


def perceptron(
    layers: Layers,
    axis_name: AxisName,
    sequence_parallel: bool,
    x,
    weights,
    w_down,
    b_down,
    residual,
) -> jax.Array:
    """Returns y [..., T, E], summed over devices; residual and b_down are added once.

    Args:
      layers: the layers before the last product.
      axis_name: the mapped axis.
      sequence_parallel: whether x and the residual have the device's own tokens only.
      x: [..., T, D].
      weights: weights and biases of `layers`, for the device's own hidden features F.
      w_down: [F, E], of the same features.
      b_down: [E], or None.
      residual: [..., T, E], or None.
    """
    rows = sharding.leading_axes(x.ndim - 1)
    axes = [rows + "d", *(None if w is None else "df"[-w.ndim :] for w in weights), "fe"]
    x, *weights, w_down = sharding.align(
        (x, *weights, w_down), operand_axes=[a or "" for a in axes], whole="dfe"
    )
    operands = (x, tuple(weights), w_down)
    if sequence_parallel:
        y = _in_ring(layers.run, layers, axis_name, *operands)
    else:
        y = parts.added_up(axis_name, _in_parts(layers.run, layers, *operands))
    y, _ = linear_xla.finish(
        y,
        b_down,
        residual,
        activation=None,
        out_dtype=x.dtype if residual is None else residual.dtype,
        save_preactivation=False,
    )
    return named(y, layers.op, "output")


class _Saved(NamedTuple):
    x: Any
    weights: tuple[jax.Array | None, ...]
    w_down: jax.Array
    hidden: Any


# --- all rows on each device ----------------------------------------------------------------------


@functools.partial(kernel_gradient, nondiff_argnums=(0, 1))
def _in_parts(run: Runner, layers: Layers, x, weights, w_down):
    h, _ = layers.hidden(x, weights, saves=False)
    return _last(run, layers, h, w_down)


def _last(run: Runner, layers: Layers, h, w_down) -> tuple[jax.Array, ...]:
    last = layers.options.last_layer
    return parts.multiplied(lambda part: run(last, part, w_down, None, None)[0], h)


def _in_parts_fwd(run: Runner, layers: Layers, x, weights, w_down):
    h, hidden = layers.hidden(x, weights, saves=True)
    return _last(run, layers, h, w_down), _Saved(x, weights, w_down, hidden)


def _in_parts_bwd(run: Runner, layers: Layers, saved: _Saved, dys):
    x, weights, w_down, hidden = saved
    dy = jnp.concatenate(dys, axis=-2).astype(x.dtype)
    dzs, h, dbs = layers.hidden_gradient(x, weights, w_down, hidden, dy)
    dx = layers.input_gradient(dzs, weights, x.dtype)
    dx, (x, dzs, h, dy) = lax.optimization_barrier((dx, (x, dzs, h, dy)))
    return dx, *_weight_gradients(layers, x, weights, w_down, dzs, dbs, h, dy)


_in_parts.defvjp(_in_parts_fwd, _in_parts_bwd)


def _weight_gradients(layers: Layers, x, weights, w_down, dzs, dbs, h, dy):
    dweights = layers.weight_gradients(x, dzs, weights, dbs)
    precision = layers.options.precision
    dw_down = weight_gradient(layers.run, layers.op, h, dy, w_down.dtype, precision)
    return dweights, dw_down


# --- rows in a ring -------------------------------------------------------------------------------


@functools.partial(kernel_gradient, nondiff_argnums=(0, 1, 2))
def _in_ring(run: Runner, layers: Layers, axis_name: AxisName, x, weights, w_down):
    return _around(run, layers, axis_name, x, weights, w_down, saves=False)[0]


def _around(run: Runner, layers: Layers, axis_name: AxisName, x, weights, w_down, *, saves: bool):
    last = layers.options.last_layer

    def step(rows, arrived):
        h, hidden = layers.hidden(rows, weights, saves=saves)
        y, _ = run(last, h, w_down, None, arrived)
        return y, (rows, hidden) if saves else None

    y, kept, _ = ring.summed(axis_name, ring.travelling(axis_name, x), step)
    return y, kept


def _in_ring_fwd(run: Runner, layers: Layers, axis_name: AxisName, x, weights, w_down):
    y, kept = _around(run, layers, axis_name, x, weights, w_down, saves=True)
    rows, hidden = ([[pair[i] for pair in one] for one in kept] for i in range(2))
    return y, _Saved(rows, weights, w_down, hidden)


def _in_ring_bwd(run: Runner, layers: Layers, axis_name: AxisName, saved: _Saved, dy):
    every, weights, w_down, hidden = saved
    dtype = every[0][0].dtype
    cotangents = ring.travelling(axis_name, dy.astype(dtype))
    turns = [[*zip(*of_one, strict=True)] for of_one in zip(every, hidden, cotangents, strict=True)]

    def step(here, arrived):
        x, hidden, dy = here
        dzs, h, dbs = layers.hidden_gradient(x, weights, w_down, hidden, dy)
        dx = layers.input_gradient(dzs, weights, dtype)
        return dx if arrived is None else dx + arrived, ((x, dzs, h, dy), dbs)

    dx, kept, _ = ring.summed(axis_name, turns, step)
    steps = [keep for one in kept for keep in one]
    x, dzs, h, dy = jax.tree.map(
        lambda *rows: jnp.concatenate(rows, axis=-2), *(rows for rows, _ in steps)
    )
    dbs = jax.tree.map(lambda *sums: sum(sums[1:], sums[0]), *(dbs for _, dbs in steps))
    return dx, *_weight_gradients(layers, x, weights, w_down, dzs, dbs, h, dy)


_in_ring.defvjp(_in_ring_fwd, _in_ring_bwd)
