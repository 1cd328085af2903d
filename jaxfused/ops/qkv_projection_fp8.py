"""The projection of queries, keys and values in float8: its gradient."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxfused.ops import fp8
from jaxfused.ops.kernel_call import Runner
from jaxfused.ops.linear import sum_rows
from jaxfused.semantics.checkpoint_names import named

_OP = "qkv_projection"


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def projections(run: Runner, dtypes, x, weights, biases):
    """x @ w + b, in x's dtype, for each of three w [D, N_i] and b [N_i] or None.

    Args:
      run: the way to run kernels.
      dtypes: of x and of the weights.
      x: [..., D].
      weights: of queries, keys and values, which get one scale.
      biases: of the same.
    """
    xs = fp8.copies(run, x, transposes=False)
    ws = fp8.copies(run, *weights, straight=False)
    return _products(run, dtypes, xs, ws, biases, _ends(weights))


def _ends(weights: Sequence[jax.Array]) -> tuple[int, int]:
    """Where one matrix ends and the next begins, side by side."""
    first, second, _ = (w.shape[1] for w in weights)
    return first, first + second


def _products(run: Runner, dtypes, xs, ws, biases, ends):
    results = []
    for transposed, bias in zip(jnp.split(ws.transposed, ends), biases, strict=True):
        w = fp8.Copies(None, transposed, ws.scale)
        y, _, _ = fp8.layer(run, _OP, xs, w, bias, out_dtype=dtypes[0], narrow_dtype=dtypes[0])
        results.append(y)
    return tuple(results)


def _projections_fwd(run: Runner, dtypes, x, weights, biases):
    xs, ws = fp8.copies(run, x), fp8.copies(run, *weights)
    ys = _products(run, dtypes, xs, ws, biases, _ends(weights))
    ys = named(ys, _OP, "output")
    return ys, (xs._replace(values=None), ws._replace(transposed=None), biases)


def _projections_bwd(run: Runner, dtypes, saved, dys):
    xs, ws, biases = saved
    gradients = fp8.copies(run, *dys, dtype=fp8.GRADIENT)
    x_dtype, w_dtype = dtypes
    dw = fp8.weight_gradient(run, _OP, xs, gradients, w_dtype)
    first, second, _ = (dy.shape[-1] for dy in dys)
    dweights = jnp.split(dw, (first, first + second), axis=1)
    dbiases = [
        None if bias is None else sum_rows(dy, bias.dtype)
        for dy, bias in zip(dys, biases, strict=True)
    ]
    return fp8.input_gradient(run, _OP, gradients, ws, x_dtype), tuple(dweights), tuple(dbiases)


projections.defvjp(_projections_fwd, _projections_bwd)
