"""Rounding with error feedback: later weights compensate for the rounding errors of earlier ones.

The squared error of a layer's result over its input rows x is `tr(E^T H E)`, with E the error of the
weights and H the sum of x^T x. Input features are rounded one after the other. The error of each is
spread over the features that are not rounded yet, such that the error of the result becomes smallest.
The factors for this are rows of the Cholesky factor of the inverse of H.

Scales are computed from the original weights before, so that the features can be rounded in any order:
those with the largest inputs first, while many others can still compensate for their errors.

Source: Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers", 2022, https://arxiv.org/abs/2210.17323
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxfused.runtime import rounding
from jaxfused.runtime.scale_groups import spread

_BLOCK = 128
"""Input features in a block, after which one product spreads the block's errors over all later ones."""


def rounded_weights(
    w: jax.Array,
    gram: np.ndarray,
    dtype: str,
    scale: jax.Array,
    zero_point: jax.Array | None,
    *,
    damping: float,
) -> jax.Array:
    """Returns the weights [D, F], rounded to multiples of their scales with error feedback.

    Where rounding to nearest gives a column's result a smaller error, the column is rounded to nearest.

    Args:
      w: [D, F], finite.
      gram: [D, D], the sum of x^T x over the rows that the layer reads.
      dtype: one of FORMATS.
      scale: [G, F], [G, 1] or [1, 1], as is zero_point.
      damping: number to add to the diagonal of gram, in units of the diagonal's mean. It is raised
        until the sum has a Cholesky factor.
    """
    w = w.astype(jnp.float32)
    order = np.argsort(-np.diag(gram), kind="stable")
    factor = _inverse_factor(gram[np.ix_(order, order)], damping)
    scales = jnp.broadcast_to(spread(scale, w.shape), w.shape)
    zeros = None
    if zero_point is not None:
        zeros = jnp.broadcast_to(spread(zero_point, w.shape), w.shape)[order]
    feedback = _with_feedback(w[order], factor, scales[order], zeros, dtype)
    feedback = feedback[np.argsort(order)]
    nearest = rounding.encode(w, dtype, scale, zero_point, -2).dequantize()
    errors = [_error(w - candidate, gram) for candidate in (feedback, nearest)]
    return jnp.where(jnp.asarray(errors[0] < errors[1]), feedback, nearest)


def _error(error: jax.Array, gram: np.ndarray) -> np.ndarray:
    """Returns the squared error [F] of the layer's result, given the weights' error [D, F].

    `gram` [D, D] is the Gram matrix of the layer's inputs.
    """
    wide = np.asarray(error, np.float64)
    return np.einsum("df,df->f", wide, gram @ wide)


def _inverse_factor(gram: np.ndarray, damping: float) -> jax.Array:
    """Returns an upper triangular U such that U^T U is the inverse of the damped Gram matrix."""
    diagonal = np.diagonal(gram)
    mean = float(np.mean(diagonal))
    if not np.isfinite(mean):
        raise ValueError(
            "quantize_params: a layer reads numbers that are not finite, or whose squares are not, in"
            " the calibration; pass batches on which the model's activations are finite."
        )
    # A feature whose inputs were all 0 gets the mean on the diagonal: its weights are rounded to
    # nearest.
    mean = mean if mean > 0 else 1.0
    damped = np.array(gram, np.float64)
    damped[np.diag_indices_from(damped)] = np.where(diagonal > 0, diagonal, mean)
    share = max(damping, float(np.finfo(np.float32).eps))
    while True:
        # The lower Cholesky factor of gram with both axes reversed, reversed again, is an upper R
        # with gram = R R^T, and the inverse of gram is R^-T R^-1.
        turned = damped[::-1, ::-1] + share * mean * np.eye(len(damped))
        with jax.enable_x64(True):
            lower = jnp.linalg.cholesky(jnp.asarray(turned, jnp.float64))
            if bool(jnp.isfinite(lower).all()):
                eye = jnp.eye(len(damped), dtype=jnp.float64)
                upper = lower[::-1, ::-1]
                inverse = jax.scipy.linalg.solve_triangular(upper, eye, lower=False)
                return jnp.asarray(np.asarray(inverse), jnp.float32)
        share *= 10.0


@functools.partial(jax.jit, static_argnames="dtype")
def _with_feedback(
    w: jax.Array, factor: jax.Array, scales: jax.Array, zeros: jax.Array | None, dtype: str
) -> jax.Array:
    """Returns the weights [D, F] rounded row by row from the first; scales and zeros are [D, F] too."""
    features = w.shape[0]
    block = min(_BLOCK, features)
    padding = -features % block
    # Padding with rows of zeros at the end changes no other row: errors spread to later rows only.
    w = jnp.pad(w, ((0, padding), (0, 0)))
    scales = jnp.pad(scales, ((0, padding), (0, 0)), constant_values=1.0)
    zeros = None if zeros is None else jnp.pad(zeros, ((0, padding), (0, 0)))
    factor = jnp.pad(factor, (0, padding))
    diagonal = jnp.diag(factor)
    diagonal = jnp.where(diagonal > 0, diagonal, 1.0)
    index = jnp.arange(features + padding)

    def rounds(row, scale, zero):
        units = row / scale + (0.0 if zero is None else zero.astype(jnp.float32))
        value = rounding.codes(units, dtype, symmetric=zero is None).astype(jnp.float32)
        return (value if zero is None else value - zero.astype(jnp.float32)) * scale

    def round_block(start, w):
        def of(a):
            return None if a is None else jax.lax.dynamic_slice_in_dim(a, start, block)

        rows, scale, zero, triangle, size = of(w), of(scales), of(zeros), of(factor), of(diagonal)
        inner = jax.lax.dynamic_slice_in_dim(triangle, start, block, axis=1)

        def round_row(i, carry):
            rows, errors = carry
            value = rounds(rows[i], scale[i], None if zero is None else zero[i])
            error = (rows[i] - value) / size[i]
            later = jnp.where(jnp.arange(block) > i, inner[i], 0.0)
            rows = (rows - later[:, None] * error).at[i].set(value)
            return rows, errors.at[i].set(error)

        rows, errors = jax.lax.fori_loop(0, block, round_row, (rows, jnp.zeros_like(rows)))
        later = jnp.where(index >= start + block, triangle, 0.0)
        w = w - jnp.matmul(later.T, errors, precision="highest")
        return jax.lax.dynamic_update_slice_in_dim(w, rows, start, axis=0)

    blocks = (features + padding) // block
    w = jax.lax.fori_loop(0, blocks, lambda i, w: round_block(i * block, w), w)
    return w[:features]
