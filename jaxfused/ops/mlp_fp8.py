"""mlp and gated_mlp in float8: their gradient.

The first product writes what the activation is of and finds the largest of it on the way, of which a
bound of the activation's magnitude follows. The pass that quantises the hidden layer evaluates the
activation, so that the hidden layer itself is nowhere written.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxfused.ops import fp8
from jaxfused.ops.kernel_call import Runner
from jaxfused.semantics.checkpoint_names import named


@dataclass(frozen=True)
class Options:
    """What is static in a call besides the way to run kernels."""

    activation: str | None
    save: str
    out_dtype: Any
    dtypes: tuple[Any, ...]
    """Of x, of the first layer's weights, of the last one's, and of residual, or None."""


class _MlpResiduals(NamedTuple):
    x: fp8.Copies
    w1: fp8.Copies
    b1: jax.Array | None
    w2: fp8.Copies
    b2: jax.Array | None
    hidden: fp8.Copies
    """Its transposed copy where that is saved; the scale in any case."""
    preactivation: jax.Array | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def mlp(run: Runner, options: Options, x, w1, b1, w2, b2, residual):
    """`jaxfused.mlp` in float8."""
    xs = fp8.copies(run, x, transposes=False)
    z, largest = _first_layer(run, options, xs, fp8.copies(run, w1, straight=False), b1)
    hs = _hidden(run, options, z, largest, transposes=False)
    w2s = fp8.copies(run, w2, straight=False)
    return _last_layer(run, "mlp", options, hs, w2s, b2, residual)


def _first_layer(run: Runner, options: Options, xs, w1s, b1):
    _, z, maxima = fp8.layer(
        run,
        "mlp first layer",
        xs,
        w1s,
        b1,
        narrow_dtype=options.dtypes[0],
        saves=True,
        maximised=fp8.maximised_of(options.activation),
    )
    return z, fp8.hidden_magnitude(options.activation, maxima)


def _hidden(run: Runner, options: Options, z, largest, **wanted) -> fp8.Copies:
    return fp8.copies(run, z, activation=options.activation, largest=largest, **wanted)


def _last_layer(run: Runner, op: str, options: Options, hs, w2s, b2, residual) -> jax.Array:
    y, _, _ = fp8.layer(
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


def _mlp_fwd(run: Runner, options: Options, x, w1, b1, w2, b2, residual):
    xs, w1s, w2s = (fp8.copies(run, array) for array in (x, w1, w2))
    z, largest = _first_layer(run, options, xs, w1s, b1)
    z = named(z, "mlp", "preactivation")
    hs = _hidden(run, options, z, largest, transposes=options.save == "hidden")
    y = _last_layer(run, "mlp", options, hs, w2s, b2, residual)
    hs, w2s = hs._replace(values=None), w2s._replace(transposed=None)
    if options.save == "inputs":
        # The product is taken again, of the very operands.
        z = None
    else:
        xs, w1s = xs._replace(values=None), w1s._replace(transposed=None)
    return y, _MlpResiduals(xs, w1s, b1, w2s, b2, hs, z)


def _mlp_bwd(run: Runner, options: Options, saved: _MlpResiduals, dy):
    xs, w1s, b1, w2s, b2, hs, z = saved
    x_dtype, w1_dtype, w2_dtype, residual_dtype = options.dtypes
    dys = fp8.copies(run, dy, dtype=fp8.GRADIENT, sums=b2 is not None)
    if z is None:
        _, z, _ = fp8.layer(run, "mlp first layer", xs, w1s, b1, narrow_dtype=x_dtype, saves=True)
    gradient = fp8.hidden_gradient(
        run,
        "mlp",
        dys,
        w2s,
        z,
        None,
        activation=options.activation,
    )
    dzs = fp8.copies(
        run, gradient.dz, dtype=fp8.GRADIENT, sums=b1 is not None, largest=gradient.largest
    )
    if hs.transposed is None:
        hs = _hidden(run, options, z, hs.largest, straight=False)
    return (
        fp8.input_gradient(run, "mlp", dzs, w1s, x_dtype),
        fp8.weight_gradient(run, "mlp first layer", xs, dzs, w1_dtype),
        None if b1 is None else dzs.sums.astype(b1.dtype),
        fp8.weight_gradient(run, "mlp last layer", hs, dys, w2_dtype),
        None if b2 is None else dys.sums.astype(b2.dtype),
        None if residual_dtype is None else dy.astype(residual_dtype),
    )


mlp.defvjp(_mlp_fwd, _mlp_bwd)


class _GatedResiduals(NamedTuple):
    x: fp8.Copies
    w1: fp8.Copies
    """Of both layers before the activation, side by side."""
    biases: tuple[jax.Array | None, jax.Array | None]
    w_down: fp8.Copies
    b_down: jax.Array | None
    hidden: fp8.Copies
    preactivations: tuple[jax.Array | None, jax.Array | None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def gated_mlp(
    run: Runner, options: Options, x, w_gate, b_gate, w_up, b_up, w_down, b_down, residual
):
    """`jaxfused.gated_mlp` in float8, of weights apart."""
    xs = fp8.copies(run, x, transposes=False)
    ws = fp8.copies(run, w_gate, w_up, straight=False)
    gate, up, largest = _gate_and_up(run, options, xs, ws, (b_gate, b_up))
    hs = _gated_hidden(run, options, gate, up, largest, transposes=False)
    w_downs = fp8.copies(run, w_down, straight=False)
    return _last_layer(run, "gated_mlp", options, hs, w_downs, b_down, residual)


def _gate_and_up(run: Runner, options: Options, xs, ws, biases) -> tuple[Any, Any, jax.Array]:
    """(gate, up, a bound of the hidden layer's magnitudes)."""
    of_gate = fp8.maximised_of(options.activation)
    halves = zip(jnp.split(ws.transposed, 2), biases, (of_gate, "magnitude"), strict=True)
    (gate, gate_maxima), (up, up_maxima) = (
        fp8.layer(
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
    return gate, up, fp8.hidden_magnitude(options.activation, gate_maxima, up_maxima)


def _gated_hidden(run: Runner, options: Options, gate, up, largest, **wanted) -> fp8.Copies:
    keywords: dict[str, Any] = dict(activation=options.activation, gated=True, largest=largest)
    return fp8.copies(run, gate, up, **keywords, **wanted)


def _gated_mlp_fwd(
    run: Runner, options: Options, x, w_gate, b_gate, w_up, b_up, w_down, b_down, residual
):
    xs, ws, w_downs = fp8.copies(run, x), fp8.copies(run, w_gate, w_up), fp8.copies(run, w_down)
    biases = (b_gate, b_up)
    gate, up, largest = _gate_and_up(run, options, xs, ws, biases)
    gate, up = named((gate, up), "gated_mlp", "preactivation")
    hs = _gated_hidden(run, options, gate, up, largest, transposes=options.save == "hidden")
    y = _last_layer(run, "gated_mlp", options, hs, w_downs, b_down, residual)
    hs, w_downs = hs._replace(values=None), w_downs._replace(transposed=None)
    if options.save == "inputs":
        gate = up = None
    else:
        xs, ws = xs._replace(values=None), ws._replace(transposed=None)
    return y, _GatedResiduals(xs, ws, biases, w_downs, b_down, hs, (gate, up))


def _gated_mlp_bwd(run: Runner, options: Options, saved: _GatedResiduals, dy):
    xs, ws, (b_gate, b_up), w_downs, b_down, hs, (gate, up) = saved
    x_dtype, w1_dtype, w2_dtype, residual_dtype = options.dtypes
    dys = fp8.copies(run, dy, dtype=fp8.GRADIENT, sums=b_down is not None)
    if gate is None:
        gate, up, _ = _gate_and_up(run, options, xs, ws, (b_gate, b_up))
    gradient = fp8.hidden_gradient(
        run,
        "gated_mlp",
        dys,
        w_downs,
        gate,
        up,
        activation=options.activation,
    )
    dzs = fp8.copies(
        run,
        gradient.dz,
        gradient.dup,
        dtype=fp8.GRADIENT,
        sums=b_gate is not None or b_up is not None,
        largest=gradient.largest,
    )
    if hs.transposed is None:
        hs = _gated_hidden(run, options, gate, up, hs.largest, straight=False)
    dw = fp8.weight_gradient(run, "gated_mlp gated unit", xs, dzs, w1_dtype)
    dw_gate, dw_up = jnp.split(dw, 2, axis=1)
    return (
        fp8.input_gradient(run, "gated_mlp", dzs, ws, x_dtype),
        dw_gate,
        None if b_gate is None else jnp.split(dzs.sums, 2)[0].astype(b_gate.dtype),
        dw_up,
        None if b_up is None else jnp.split(dzs.sums, 2)[1].astype(b_up.dtype),
        fp8.weight_gradient(run, "gated_mlp last layer", hs, dys, w2_dtype),
        None if b_down is None else dys.sums.astype(b_down.dtype),
        None if residual_dtype is None else dy.astype(residual_dtype),
    )


gated_mlp.defvjp(_gated_mlp_fwd, _gated_mlp_bwd)
