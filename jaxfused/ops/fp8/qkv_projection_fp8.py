"""The projection of queries, keys and values in float8, with its gradient."""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxfused.ops.fp8 import fp8_operands, fp8_products
from jaxfused.runtime.checkpoint_names import named
from jaxfused.runtime.kernel_gradient import kernel_gradient
from jaxfused.runtime.runner import Runner

_OP = "qkv_projection"


class Options(NamedTuple):
    """Static arguments of `projections`, except for the Runner."""

    widths: tuple[int, int, int]
    """Numbers of columns of queries, keys and values."""
    x_dtype: Any
    w_dtype: Any
    in_one: bool
    """True if one matrix holds the weights of queries, keys and values."""

    @property
    def ends(self) -> tuple[int, int]:
        """Column indices at which queries and keys end in the concatenated projection."""
        return self.widths[0], self.widths[0] + self.widths[1]


@functools.partial(
    kernel_gradient,
    nondiff_argnums=(0, 1),
    op="qkv_projection",
    in_float8=True,
)
def projections(run: Runner, options: Options, x, weights, biases, state):
    """Returns x @ w + b in x's dtype, for the columns of queries, of keys and of values.

    Args:
      run: the Runner.
      options: the static arguments.
      x: [..., D].
      weights: one matrix [D, C], or one each for queries, keys and values; they get one scale.
      biases: biases of queries, keys and values, or None three times.
      state: the operator's state, or None.
    """
    xs = fp8_operands.copies_of(run, state, _OP, "x", x, transposes=False)
    ws = fp8_operands.copies_of(run, state, _OP, "w", *weights, straight=False)
    return _products(run, options, xs, ws, biases)


def _products(run: Runner, options: Options, xs, ws, biases):
    results = []
    dtype = options.x_dtype
    for transposed, bias in zip(jnp.split(ws.transposed, options.ends), biases, strict=True):
        w = ws._replace(transposed=transposed)
        y, _, _ = fp8_products.layer(run, _OP, xs, w, bias, out_dtype=dtype, narrow_dtype=dtype)
        results.append(y)
    return tuple(results)


def _projections_fwd(run: Runner, options: Options, x, weights, biases, state):
    xs, ws = (
        fp8_operands.copies_of(run, state, _OP, "x", x),
        fp8_operands.copies_of(run, state, _OP, "w", *weights),
    )
    ys = named(_products(run, options, xs, ws, biases), _OP, "output")
    return ys, (xs.kept("transposed"), ws.kept("values"), biases, state)


def _projections_bwd(run: Runner, options: Options, saved, dys):
    xs, ws, biases, state = saved
    sums = any(bias is not None for bias in biases)
    gradients = fp8_operands.copies_of(
        run, state, _OP, "dy", *dys, dtype=fp8_operands.GRADIENT, sums=sums
    )
    dw = fp8_products.weight_gradient(run, _OP, xs, gradients, options.w_dtype)
    dweights = [dw] if options.in_one else jnp.split(dw, options.ends, axis=1)
    dbiases = jnp.split(gradients.sums, options.ends) if sums else biases
    dbiases = [
        None if bias is None else db.astype(bias.dtype)
        for db, bias in zip(dbiases, biases, strict=True)
    ]
    dx = fp8_products.input_gradient(run, _OP, gradients, ws, options.x_dtype)
    found = dict(x=xs.found, w=ws.found, dy=gradients.found)
    after = None if state is None else state.after(_OP, found)
    return dx, tuple(dweights), tuple(dbiases), after


projections.defvjp(_projections_fwd, _projections_bwd)
