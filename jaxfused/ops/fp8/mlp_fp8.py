"""mlp and gated_mlp in float8, with their gradient.

The first product writes the preactivation and its maxima, from which a bound of the activation's
magnitude follows. The pass that quantises the hidden layer evaluates the activation, so that the hidden
layer is written in float8 only. The same pass writes the activation's derivative as int8, which the
backward reads instead of the preactivation.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxfused.ops.fp8 import fp8, fp8_operands, fp8_products
from jaxfused.runtime.checkpoint_names import named
from jaxfused.runtime.kernel_gradient import kernel_gradient
from jaxfused.runtime.runner import Runner

SLOPES = ("relu", "gelu_tanh", "gelu_erf", "quick_gelu", "silu")
"""Activations whose derivative is saved as int8. relu2's is unbounded, and cheap to recompute."""


@dataclass(frozen=True)
class Options:
    """Static arguments of `mlp` below, except for the Runner."""

    op: str
    """"mlp" or "gated_mlp", whose hidden layer is activation(gate) * up."""
    activation: str | None
    save: str
    out_dtype: Any
    dtypes: tuple[Any, ...]
    """Dtypes of x, the first layer's weights, the last layer's weights, and residual (or None)."""

    @property
    def gated(self) -> bool:
        return self.op == "gated_mlp"

    @property
    def first_layer(self) -> str:
        """Name of the first layer's kernel calls in `jaxfused.explain`."""
        return "gated_mlp gated unit" if self.gated else "mlp first layer"

    @property
    def keeps_slope(self) -> bool:
        """True if the activation's derivative is saved for the backward instead of the preactivation.

        Hidden layer and derivative in 8 bits take as much memory as a preactivation of 16 bits, and the
        gradient that reads them was measured to be faster.
        """
        return not self.gated and self.save != "inputs" and self.activation in SLOPES


def by_layers(operands: Sequence[Any]) -> Sequence[Any]:
    """Groups the first layer's alternating weights and biases into two tuples, as `mlp` expects them."""
    x, *layers, last, last_bias, residual = operands
    return x, tuple(layers[::2]), tuple(layers[1::2]), last, last_bias, residual


class _Residuals(NamedTuple):
    x: fp8_operands.Copies
    first: fp8_operands.Copies
    """Quantised weights of the first layer; gate's and up's are concatenated."""
    biases: tuple[jax.Array | None, ...]
    last: fp8_operands.Copies
    last_bias: jax.Array | None
    hidden: fp8_operands.Copies
    """Scale of the quantised hidden layer, and its transposed values if these are saved."""
    preactivations: tuple[jax.Array, ...] | None
    slope: jax.Array | None
    """Derivative of the activation, saved in place of the preactivation."""
    state: fp8.Fp8State | None


@functools.partial(kernel_gradient, nondiff_argnums=(0, 1), in_float8=True)
def mlp(run: Runner, options: Options, x, weights, biases, last, last_bias, residual, state):
    """Computes `jaxfused.mlp`, or `gated_mlp` with separate weights of gate and up, in float8.

    `weights` and `biases` are tuples of those of the first layer: one of each, or gate's and up's.
    """
    copies = functools.partial(fp8_operands.copies_of, run, state, options.op)
    xs, firsts = copies("x", x, transposes=False), copies("w1", *weights, straight=False)
    z, maxima = _first_layer(run, options, xs, firsts, biases)
    hs = copies("hidden", *z, **_hidden(run, options, maxima), transposes=False)
    return _last_layer(run, options, hs, copies("w2", last, straight=False), last_bias, residual)


def _first_layer(
    run: Runner, options: Options, xs, firsts, biases
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Returns the preactivations and maxima of their rows.

    A backward that needs only the preactivations runs the same kernel, which is compiled already.
    """
    whole = firsts.transposed
    parts = jnp.split(whole, len(biases)) if options.gated else [whole]
    maximised: Any = (fp8_products.maximised_of(options.activation), "magnitude")
    results = [
        fp8_products.layer(
            run,
            options.first_layer,
            xs,
            firsts._replace(transposed=part),
            bias,
            narrow_dtype=options.dtypes[0],
            saves=True,
            maximised=of_rows,
        )
        for part, bias, of_rows in zip(parts, biases, maximised, strict=False)
    ]
    return tuple(z for _, z, _ in results), tuple(maxima for *_, maxima in results)


def _hidden(run: Runner, options: Options, maxima: tuple[Any, ...]) -> dict[str, Any]:
    """Returns arguments for `copies`, which then applies the activation before it quantises."""
    largest = fp8_products.hidden_magnitude(run, options.activation, *maxima)
    return dict(activation=options.activation, gated=options.gated, largest=largest)


def _last_layer(run: Runner, options: Options, hs, lasts, last_bias, residual) -> jax.Array:
    y, _, _ = fp8_products.layer(
        run,
        f"{options.op} last layer",
        hs,
        lasts,
        last_bias,
        residual,
        out_dtype=options.out_dtype,
        narrow_dtype=options.dtypes[0],
    )
    return named(y, options.op, "output")


def _mlp_fwd(run: Runner, options: Options, x, weights, biases, last, last_bias, residual, state):
    copies = functools.partial(fp8_operands.copies_of, run, state, options.op)
    xs, firsts, lasts = copies("x", x), copies("w1", *weights), copies("w2", last)
    z: Any
    z, maxima = _first_layer(run, options, xs, firsts, biases)
    hidden = _hidden(run, options, maxima)
    if not options.keeps_slope:
        z = named(z, options.op, "preactivation")
    hs = copies(
        "hidden",
        *z,
        **hidden,
        transposes=options.keeps_slope or options.save == "hidden",
        slope=options.keeps_slope,
    )
    y = _last_layer(run, options, hs, lasts, last_bias, residual)
    slope = hs.slope
    hs, lasts = hs.kept("transposed"), lasts.kept("values")
    if options.keeps_slope:
        what: Any = options.save
        slope, hs = named((slope, hs), options.op, what)
    if options.save == "inputs" or options.keeps_slope:
        # The backward reads the derivative, or computes the preactivation z again.
        z = None
    if options.save != "inputs":
        xs, firsts = xs.kept("transposed"), firsts.kept("values")
    return y, _Residuals(xs, firsts, biases, lasts, last_bias, hs, z, slope, state)


def _mlp_bwd(run: Runner, options: Options, saved: _Residuals, dy):
    xs, firsts, biases, lasts, last_bias, hs, z, slope, state = saved
    op, (x_dtype, first_dtype, last_dtype, residual_dtype) = options.op, options.dtypes
    copies = functools.partial(fp8_operands.copies_of, run, state, op, dtype=fp8_operands.GRADIENT)
    dys = copies("dy", dy, sums=last_bias is not None)
    if slope is not None:
        gradient = fp8_products.hidden_gradient_by_slope(
            run, op, dys, lasts, slope, hs, dtype=x_dtype
        )
    else:
        if z is None:
            z, _ = _first_layer(run, options, xs, firsts, biases)
        gradient = fp8_products.hidden_gradient(
            run,
            op,
            dys,
            lasts,
            z[0],
            z[-1] if options.gated else None,
            activation=options.activation,
        )
    dz = (gradient.dz, gradient.dup) if options.gated else (gradient.dz,)
    has_bias = any(bias is not None for bias in biases)
    dzs = copies("dhidden", *dz, sums=has_bias, largest=gradient.largest)
    matrices = (xs, firsts, hs, lasts, dys, dzs)
    found = {name: c.found for name, c in zip(fp8.MATRICES[op], matrices, strict=True)}
    if hs.transposed is None:
        assert z is not None
        hidden: Any = dict(activation=options.activation, gated=options.gated, largest=hs.largest)
        hs = fp8_operands.copies(run, *z, **hidden, straight=False)
    dx = fp8_products.input_gradient(run, op, dzs, firsts, x_dtype)
    dw = fp8_products.weight_gradient(run, options.first_layer, xs, dzs, first_dtype)
    sums = dzs.sums
    return (
        dx,
        tuple(jnp.split(dw, 2, axis=1)) if options.gated else (dw,),
        tuple(
            None if bias is None else part.astype(bias.dtype)
            for bias, part in zip(biases, _parts(sums, len(biases)), strict=True)
        ),
        fp8_products.weight_gradient(run, f"{op} last layer", hs, dys, last_dtype),
        None if last_bias is None else dys.sums.astype(last_bias.dtype),
        None if residual_dtype is None else dy.astype(residual_dtype),
        None if state is None else state.after(op, found),
    )


def _parts(sums: jax.Array | None, count: int) -> Any:
    """Splits bias gradients, concatenated in `sums`, into `count` arrays; all None without biases."""
    if sums is None or count == 1:
        return [sums] * count
    return jnp.split(sums, count)


mlp.defvjp(_mlp_fwd, _mlp_bwd)
