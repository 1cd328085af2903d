"""gated_unit: activation(x w_gate) * (x w_up), which `fuse` finds where no product follows it.

`gate` is the same with another array in place of the product x w_up, such as an attention's output.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxfused import dispatch
from jaxfused.ops.linear import linear_xla, mlp_xla
from jaxfused.ops.linear.gated_mlp import Layers, check_first_layers
from jaxfused.ops.linear.gated_mlp_stages import GatedUnitGradient, gate_axis_of
from jaxfused.ops.linear.hidden_layer import Options
from jaxfused.ops.linear.input_gradient import input_gradient
from jaxfused.ops.linear.linear import check_affine, check_residual
from jaxfused.ops.linear.linear_stages import Layer
from jaxfused.ops.linear.weight_gradient import weight_and_bias_gradients, weight_gradients
from jaxfused.runtime import sharding
from jaxfused.runtime.activation import activate
from jaxfused.runtime.checkpoint_names import named
from jaxfused.runtime.checks import as_arrays, check_activation, check_floating
from jaxfused.runtime.gate import takes_reference
from jaxfused.runtime.kernel_gradient import kernel_gradient
from jaxfused.runtime.promotion import accumulator_dtype
from jaxfused.runtime.runner import Runner

_OP = "gated_unit"


def gated_unit(
    x: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array | None,
    *,
    b_gate: jax.Array | None = None,
    b_up: jax.Array | None = None,
    activation: str | None = "sigmoid",
    precision: jax.lax.PrecisionLike = None,
    implementation: dispatch.Implementation | None = None,
) -> jax.Array:
    """Returns activation(x @ w_gate + b_gate) * (x @ w_up + b_up), [..., F] in x's dtype.

    It is the hidden layer of `gated_mlp`, whose arguments of these names it takes. The backward reads
    both products, which the forward saves in x's dtype.

    Raises:
      ValueError: shapes or dtypes do not fit, or the named implementation cannot run.
    """
    x, w_gate, w_up, b_gate, b_up = as_arrays(x, w_gate, w_up, b_gate, b_up)
    check_floating(_OP, dict(x=x, w_gate=w_gate, w_up=w_up, b_gate=b_gate, b_up=b_up))
    check_first_layers(_OP, x, w_gate, b_gate, w_up, b_up)
    check_activation(_OP, activation)
    device = dispatch.current_device(x)
    if takes_reference(_OP, implementation, device, x):
        h, _, _ = mlp_xla.gated_unit(
            x,
            w_gate.astype(x.dtype),
            None if w_up is None else w_up.astype(x.dtype),
            b_gate,
            b_up,
            activation=activation,
            save_preactivations=False,
            precision=precision,
        )
        return named(h, _OP, "output")
    options = Options.of(_OP, activation, "preactivation", x.dtype, None, precision)
    rows, gate_axis = sharding.leading_axes(x.ndim - 1), gate_axis_of(w_up)
    operands = sharding.align(
        (x, w_gate, b_gate, w_up, b_up),
        operand_axes=(rows + "d", "d" + gate_axis, gate_axis, "df", "f"),
        whole="d" if w_up is not None else "dfg",
    )
    return _gated_unit(Runner(implementation, device), options, *operands)


class _Residuals(NamedTuple):
    x: jax.Array
    weights: tuple[Any, ...]
    gate: jax.Array
    up: jax.Array


@functools.partial(kernel_gradient, nondiff_argnums=(0, 1), op=_OP)
def _gated_unit(run: Runner, options: Options, x, w_gate, b_gate, w_up, b_up):
    h, _ = Layers(run, options).hidden(x, (w_gate, b_gate, w_up, b_up), saves=False)
    return h


def _gated_unit_fwd(run: Runner, options: Options, x, w_gate, b_gate, w_up, b_up):
    weights = (w_gate, b_gate, w_up, b_up)
    h, hidden = Layers(run, options).hidden(x, weights, saves=True)
    assert hidden.gate is not None and hidden.up is not None
    return named(h, _OP, "output"), _Residuals(x, weights, hidden.gate, hidden.up)


def _gated_unit_bwd(run: Runner, options: Options, saved: _Residuals, dh):
    x, weights, gate, up = saved
    layers = Layers(run, options)
    w_gate, b_gate, w_up, b_up = weights
    dzs = run(GatedUnitGradient(options.activation), dh.astype(x.dtype), gate, up)
    dx = layers.input_gradient(dzs, weights, x.dtype)
    # The kernel of wgrad sums dgate and dup over the rows while it reads them.
    dtype = w_gate.dtype if w_up is None else jnp.promote_types(w_gate.dtype, w_up.dtype)
    dws, sums = weight_gradients(
        *(run, _OP, x, dzs, dtype, options.precision),
        sums_rows=b_gate is not None or b_up is not None,
        joined=w_up is None,
    )

    def of(arrays, place: int, parameter):
        return None if parameter is None else arrays[place].astype(parameter.dtype)

    return dx, of(dws, 0, w_gate), of(sums, 0, b_gate), of(dws, 1, w_up), of(sums, 1, b_up)


_gated_unit.defvjp(_gated_unit_fwd, _gated_unit_bwd)


# --- a gate of another array ----------------------------------------------------------------------


def gate(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    y: jax.Array,
    *,
    activation: str | None = "sigmoid",
    precision: jax.lax.PrecisionLike = None,
    implementation: dispatch.Implementation | None = None,
) -> jax.Array:
    """Returns activation(x @ w + bias) * y, [..., F] in x's dtype, for y [..., F].

    XLA multiplies, in a pass that it may join with the operations around; the backward evaluates the
    gradients of the product and of y in one pass.

    Raises:
      ValueError: shapes or dtypes do not fit, or the named implementation cannot run.
    """
    op = "gate"
    x, w, bias, y = as_arrays(x, w, bias, y)
    check_floating(op, dict(x=x, w=w, bias=bias, y=y))
    check_affine(op, x, "w", w, "bias", bias)
    check_residual(op, y, x, w.shape[1])
    check_activation(op, activation)
    device = dispatch.current_device(x)
    if takes_reference(op, implementation, device, x):
        z = linear_xla.linear(
            x, w, bias, None, activation=None, precision=precision, out_dtype=x.dtype
        )
        return named(_multiplied(activation, z, y), op, "output")
    rows = sharding.leading_axes(x.ndim - 1)
    operands = sharding.align(
        (x, w, bias, y), operand_axes=(rows + "d", "df", "f", rows + "f"), whole="d"
    )
    options = Options.of(op, activation, "preactivation", x.dtype, None, precision)
    return _gate(Runner(implementation, device), options, *operands)


def _multiplied(activation: str | None, z: jax.Array, y: jax.Array) -> jax.Array:
    wide = accumulator_dtype(z.dtype)
    return (activate(activation, z.astype(wide)) * y.astype(wide)).astype(z.dtype)


@functools.partial(kernel_gradient, nondiff_argnums=(0, 1), op="gate")
def _gate(run: Runner, options: Options, x, w, bias, y):
    return _gate_fwd(run, options, x, w, bias, y)[0]


def _gate_fwd(run: Runner, options: Options, x, w, bias, y):
    layer = Layer("gate forward", None, x.dtype, False, options.precision)
    z, _ = run(layer, x, w, bias, None)
    z = named(z, "gate", "preactivation")
    return named(_multiplied(options.activation, z, y), "gate", "output"), (x, w, bias, z, y)


def _gate_bwd(run: Runner, options: Options, saved, dh):
    x, w, bias, z, y = saved
    dz, dy = run(GatedUnitGradient(options.activation), dh.astype(z.dtype), z, y.astype(z.dtype))
    dw, dbias = weight_and_bias_gradients(run, "gate", x, dz, w.dtype, bias, options.precision)
    dx = input_gradient(run, dz, w, x.dtype, options.precision)
    return dx, dw, dbias, dy.astype(y.dtype)


_gate.defvjp(_gate_fwd, _gate_bwd)
