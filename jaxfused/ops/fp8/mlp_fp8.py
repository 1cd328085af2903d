"""mlp and gated_mlp in float8: their gradient.

The first product writes the preactivation and its maxima, from which a bound of the activation's
magnitude follows. The pass that quantises the hidden layer evaluates the activation, so that the hidden
layer is written in float8 only. The same pass writes the activation's derivative as int8, which the
backward reads instead of the preactivation.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxfused.ops.fp8 import fp8, fp8_operands, fp8_products
from jaxfused.runtime.checkpoint_names import named
from jaxfused.runtime.kernel_gradient import kernel_gradient
from jaxfused.runtime.runner import Runner

SLOPES = ("relu", "gelu_tanh", "gelu_erf", "quick_gelu", "silu")
"""Activations whose derivative fits into an int8. That of relu2 is unbounded, and cheap to compute."""


@dataclass(frozen=True)
class Options:
    """Static arguments of a call, except for the Runner."""

    activation: str | None
    save: str
    out_dtype: Any
    dtypes: tuple[Any, ...]
    """Dtypes of x, the first layer's weights, the last layer's weights, and residual (or None)."""
    keeps_slope: bool = False
    """True if the activation's derivative is kept for the backward instead of the preactivation."""

    @classmethod
    def of_mlp(cls, activation: str | None, save: str, out_dtype: Any, dtypes: Any) -> "Options":
        """Returns the options of `mlp`, with the saved arrays that were measured to be fastest."""
        # Hidden layer and derivative in 8 bits take as much memory as a preactivation of 16 bits, and
        # the gradient that reads them is faster.
        keeps_slope = save != "inputs" and activation in SLOPES
        return cls(activation, save, out_dtype, dtypes, keeps_slope)


class _MlpResiduals(NamedTuple):
    x: fp8_operands.Copies
    w1: fp8_operands.Copies
    b1: jax.Array | None
    w2: fp8_operands.Copies
    b2: jax.Array | None
    hidden: fp8_operands.Copies
    """Scale of the hidden layer, with its transposed copy if that is saved."""
    preactivation: jax.Array | None
    slope: jax.Array | None
    """Derivative of the activation, saved in place of the preactivation."""
    state: fp8.Fp8State | None


@functools.partial(kernel_gradient, nondiff_argnums=(0, 1), op="mlp", in_float8=True)
def mlp(run: Runner, options: Options, x, w1, b1, w2, b2, residual, state):
    """Computes `jaxfused.mlp` in float8."""
    copies = functools.partial(fp8_operands.copies_of, run, state, "mlp")
    xs, w1s = copies("x", x, transposes=False), copies("w1", w1, straight=False)
    z, largest = _first_layer(run, options, xs, w1s, b1)
    hs = copies("hidden", z, largest=largest, activation=options.activation, transposes=False)
    w2s = copies("w2", w2, straight=False)
    return _last_layer(run, "mlp", options, hs, w2s, b2, residual)


def _first_layer(run: Runner, options: Options, xs, w1s, b1):
    _, z, maxima = fp8_products.layer(
        run,
        "mlp first layer",
        xs,
        w1s,
        b1,
        narrow_dtype=options.dtypes[0],
        saves=True,
        maximised=fp8_products.maximised_of(options.activation),
    )
    return z, fp8_products.hidden_magnitude(run, options.activation, maxima)


def _last_layer(run: Runner, op: str, options: Options, hs, w2s, b2, residual) -> jax.Array:
    y, _, _ = fp8_products.layer(
        run,
        f"{op} last layer",
        hs,
        w2s,
        b2,
        residual,
        out_dtype=options.out_dtype,
        narrow_dtype=options.dtypes[0],
    )
    return named(y, op, "output")


def _mlp_fwd(run: Runner, options: Options, x, w1, b1, w2, b2, residual, state):
    copies = functools.partial(fp8_operands.copies_of, run, state, "mlp")
    xs, w1s, w2s = copies("x", x), copies("w1", w1), copies("w2", w2)
    z, largest = _first_layer(run, options, xs, w1s, b1)
    if not options.keeps_slope:
        z = named(z, "mlp", "preactivation")
    hs = copies(
        "hidden",
        z,
        activation=options.activation,
        largest=largest,
        transposes=options.keeps_slope or options.save == "hidden",
        slope=options.keeps_slope,
    )
    y = _last_layer(run, "mlp", options, hs, w2s, b2, residual)
    slope = hs.slope
    hs, w2s = hs.kept("transposed"), w2s.kept("values")
    if options.keeps_slope:
        what: Any = options.save
        slope, hs = named((slope, hs), "mlp", what)
    if options.save == "inputs" or options.keeps_slope:
        # The backward reads the derivative, or computes z again from the same operands.
        z = None
    if options.save != "inputs":
        xs, w1s = xs.kept("transposed"), w1s.kept("values")
    return y, _MlpResiduals(xs, w1s, b1, w2s, b2, hs, z, slope, state)


def _mlp_bwd(run: Runner, options: Options, saved: _MlpResiduals, dy):
    xs, w1s, b1, w2s, b2, hs, z, slope, state = saved
    x_dtype, w1_dtype, w2_dtype, residual_dtype = options.dtypes
    copies = functools.partial(
        fp8_operands.copies_of, run, state, "mlp", dtype=fp8_operands.GRADIENT
    )
    dys = copies("dy", dy, sums=b2 is not None)
    activation: Any = options.activation
    if slope is not None:
        gradient = fp8_products.hidden_gradient_by_slope(
            run, "mlp", dys, w2s, slope, hs, dtype=x_dtype
        )
    else:
        if z is None:
            _, z, _ = fp8_products.layer(
                run, "mlp first layer", xs, w1s, b1, narrow_dtype=x_dtype, saves=True
            )
        gradient = fp8_products.hidden_gradient(
            run, "mlp", dys, w2s, z, None, activation=activation
        )
    dzs = copies("dhidden", gradient.dz, sums=b1 is not None, largest=gradient.largest)
    found = _found(xs, w1s, hs, w2s, dys, dzs)
    if hs.transposed is None:
        assert z is not None
        hidden: dict[str, Any] = dict(activation=activation, largest=hs.largest)
        hs = fp8_operands.copies(run, z, **hidden, straight=False)
    return (
        fp8_products.input_gradient(run, "mlp", dzs, w1s, x_dtype),
        fp8_products.weight_gradient(run, "mlp first layer", xs, dzs, w1_dtype),
        None if b1 is None else dzs.sums.astype(b1.dtype),
        fp8_products.weight_gradient(run, "mlp last layer", hs, dys, w2_dtype),
        None if b2 is None else dys.sums.astype(b2.dtype),
        None if residual_dtype is None else dy.astype(residual_dtype),
        None if state is None else state.after("mlp", found),
    )


def _found(*copies: fp8_operands.Copies) -> dict[str, Any]:
    """Returns the largest magnitudes of x, w1, hidden, w2, dy and dhidden."""
    return {name: c.found for name, c in zip(fp8.MATRICES["mlp"], copies, strict=True)}


mlp.defvjp(_mlp_fwd, _mlp_bwd)


class _GatedResiduals(NamedTuple):
    x: fp8_operands.Copies
    w1: fp8_operands.Copies
    """Weights of gate and up, concatenated."""
    biases: tuple[jax.Array | None, jax.Array | None]
    w_down: fp8_operands.Copies
    b_down: jax.Array | None
    hidden: fp8_operands.Copies
    preactivations: tuple[jax.Array | None, jax.Array | None]
    state: fp8.Fp8State | None


@functools.partial(kernel_gradient, nondiff_argnums=(0, 1), op="gated_mlp", in_float8=True)
def gated_mlp(
    run: Runner, options: Options, x, w_gate, b_gate, w_up, b_up, w_down, b_down, residual, state
):
    """Computes `jaxfused.gated_mlp` in float8, with separate weights of gate and up."""
    copies = functools.partial(fp8_operands.copies_of, run, state, "gated_mlp")
    xs, ws = copies("x", x, transposes=False), copies("w1", w_gate, w_up, straight=False)
    gate, up, largest = _gate_and_up(run, options, xs, ws, (b_gate, b_up))
    hidden: dict[str, Any] = dict(activation=options.activation, gated=True, largest=largest)
    hs = copies("hidden", gate, up, **hidden, transposes=False)
    w_downs = copies("w2", w_down, straight=False)
    return _last_layer(run, "gated_mlp", options, hs, w_downs, b_down, residual)


def _gate_and_up(run: Runner, options: Options, xs, ws, biases) -> tuple[Any, Any, jax.Array]:
    """Returns gate, up and a bound of the hidden layer's magnitudes."""
    of_gate = fp8_products.maximised_of(options.activation)
    halves = zip(jnp.split(ws.transposed, 2), biases, (of_gate, "magnitude"), strict=True)
    (gate, gate_maxima), (up, up_maxima) = (
        fp8_products.layer(
            run,
            "gated_mlp gated unit",
            xs,
            ws._replace(transposed=half),
            bias,
            narrow_dtype=options.dtypes[0],
            saves=True,
            maximised=maximised,
        )[1:]
        for half, bias, maximised in halves
    )
    largest = fp8_products.hidden_magnitude(run, options.activation, gate_maxima, up_maxima)
    return gate, up, largest


def _gated_mlp_fwd(
    run: Runner, options: Options, x, w_gate, b_gate, w_up, b_up, w_down, b_down, residual, state
):
    copies = functools.partial(fp8_operands.copies_of, run, state, "gated_mlp")
    xs, ws, w_downs = copies("x", x), copies("w1", w_gate, w_up), copies("w2", w_down)
    biases = (b_gate, b_up)
    gate, up, largest = _gate_and_up(run, options, xs, ws, biases)
    gate, up = named((gate, up), "gated_mlp", "preactivation")
    hidden: dict[str, Any] = dict(activation=options.activation, gated=True, largest=largest)
    hs = copies("hidden", gate, up, **hidden, transposes=options.save == "hidden")
    y = _last_layer(run, "gated_mlp", options, hs, w_downs, b_down, residual)
    hs, w_downs = hs.kept("transposed"), w_downs.kept("values")
    if options.save == "inputs":
        gate = up = None
    else:
        xs, ws = xs.kept("transposed"), ws.kept("values")
    return y, _GatedResiduals(xs, ws, biases, w_downs, b_down, hs, (gate, up), state)


def _gated_mlp_bwd(run: Runner, options: Options, saved: _GatedResiduals, dy):
    xs, ws, (b_gate, b_up), w_downs, b_down, hs, (gate, up), state = saved
    x_dtype, w1_dtype, w2_dtype, residual_dtype = options.dtypes
    copies = functools.partial(
        fp8_operands.copies_of, run, state, "gated_mlp", dtype=fp8_operands.GRADIENT
    )
    dys = copies("dy", dy, sums=b_down is not None)
    if gate is None:
        gate, up, _ = _gate_and_up(run, options, xs, ws, (b_gate, b_up))
    gradient = fp8_products.hidden_gradient(
        run,
        "gated_mlp",
        dys,
        w_downs,
        gate,
        up,
        activation=options.activation,
    )
    dzs = copies(
        "dhidden",
        gradient.dz,
        gradient.dup,
        sums=b_gate is not None or b_up is not None,
        largest=gradient.largest,
    )
    found = _found(xs, ws, hs, w_downs, dys, dzs)
    if hs.transposed is None:
        hidden: dict[str, Any] = dict(activation=options.activation, gated=True, largest=hs.largest)
        assert gate is not None and up is not None
        hs = fp8_operands.copies(run, gate, up, **hidden, straight=False)
    dw = fp8_products.weight_gradient(run, "gated_mlp gated unit", xs, dzs, w1_dtype)
    dw_gate, dw_up = jnp.split(dw, 2, axis=1)
    return (
        fp8_products.input_gradient(run, "gated_mlp", dzs, ws, x_dtype),
        dw_gate,
        None if b_gate is None else jnp.split(dzs.sums, 2)[0].astype(b_gate.dtype),
        dw_up,
        None if b_up is None else jnp.split(dzs.sums, 2)[1].astype(b_up.dtype),
        fp8_products.weight_gradient(run, "gated_mlp last layer", hs, dys, w2_dtype),
        None if b_down is None else dys.sums.astype(b_down.dtype),
        None if residual_dtype is None else dy.astype(residual_dtype),
        None if state is None else state.after("gated_mlp", found),
    )


gated_mlp.defvjp(_gated_mlp_fwd, _gated_mlp_bwd)
