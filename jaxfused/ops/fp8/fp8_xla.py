"""Products of float8 matrices with one scale each, in plain JAX: the kernels' reference."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxfused.runtime.activation import BOUNDED_FROM_ABOVE, activate, value_and_slope
from jaxfused.runtime.product_xla import product
from jaxfused.runtime.quantized_array import FORMATS
from pallas_kernels.gemm.fused_product import FusedProduct, present

PITCH = 16
"""Multiple to which a float8 matrix's rows are padded: TMA copies need strides of 16 bytes."""


def padded(length: int) -> int:
    """Returns `length` rounded up to a multiple of `PITCH`."""
    return -(-length // PITCH) * PITCH


def of_length(values: jax.Array, length: int) -> jax.Array:
    """Returns values [..., K] padded with zeros to [..., length]."""
    if values.shape[-1] == length:
        return values
    return jnp.pad(values, [*[(0, 0)] * (values.ndim - 1), (0, length - values.shape[-1])])


def largest_magnitude(*arrays: jax.Array) -> jax.Array:
    """Returns the largest magnitude of all arrays, a float32 scalar; NaN if there is a NaN.

    Without their signs, floats are ordered as their bits are, with NaN after infinity. On a CPU, XLA's
    maximum of floats may ignore NaN (jax 0.11.2).
    """
    maxima = []
    for array in arrays:
        bits = jnp.dtype(f"int{8 * array.dtype.itemsize}")
        magnitude = lax.bitcast_convert_type(array, bits) & jnp.iinfo(bits).max
        largest = jnp.max(magnitude, initial=0)
        maxima.append(lax.bitcast_convert_type(largest, array.dtype).astype(jnp.float32))
    total = maxima[0]
    for other in maxima[1:]:
        total = jnp.maximum(total, other)
    return total


def scale_for(largest: jax.Array, dtype: Any) -> jax.Array:
    """Returns the scale that maps `largest` to the largest number of a float8; NaN if not finite."""
    scale = largest * FORMATS[jnp.dtype(dtype).name].unit
    scale = jnp.maximum(scale, jnp.finfo(jnp.float32).tiny)
    return jnp.where(jnp.isfinite(scale), scale, jnp.nan)


def quantize(
    matrices: Sequence[jax.Array],
    largest: jax.Array,
    *,
    dtype: Any,
    activation: str | None,
    gated: bool,
    straight: bool,
    transposes: bool,
    sums: bool,
    slope_steps: float | None = None,
    pads: bool = True,
) -> tuple[jax.Array | None, ...]:
    """Returns (values, values^T, scale [1], sums over rows [N], the activation's derivative [M, N]).

    Without `pads`, values, their transpose and the derivative are not padded.
    """
    parts = [matrix.astype(jnp.float32) for matrix in matrices]
    slope = None
    if slope_steps is not None:
        values, derivative = value_and_slope(activation, parts[0])
        slope = jnp.round(derivative * slope_steps).astype(jnp.int8)
    elif gated:
        values = activate(activation, parts[0]) * parts[1]
    else:
        values = activate(activation, jnp.concatenate(parts, axis=-1))
    limit = FORMATS[jnp.dtype(dtype).name].largest
    # A conversion alone would turn numbers that are too large into NaN or Inf. The barrier keeps the
    # rounding, which XLA may leave out if the values are widened again.
    scale = scale_for(largest_magnitude(largest), dtype)
    units = values * (1.0 / scale)
    values = lax.optimization_barrier(jnp.clip(units, -limit, limit).astype(dtype))
    total = jnp.sum(jnp.concatenate(parts, axis=-1), axis=0) if sums else None
    forms = [values if straight else None, values.T if transposes else None, slope]
    if pads:
        forms = [
            None if form is None else of_length(form, padded(form.shape[-1])) for form in forms
        ]
    return *forms[:2], scale[None], total, forms[2]


def sums(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns the product of float8 operands, accumulated in float32."""
    # bfloat16 holds every float8. If XLA sees scaled float8, it may call cuBLASLt's scaled product,
    # whose accumulators have fewer bits.
    a, b = lax.optimization_barrier((a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)))
    return product(subscripts, a, b, out_dtype=jnp.float32)


def run(product: FusedProduct) -> dict[str, jax.Array]:
    """Computes a FusedProduct of a [M, K] and b [N, K] in jax.numpy; returns a dict of its results."""
    [b] = product.b
    total = sums("mk,nk->mn", product.a, b)
    operands = present(product.vectors) | present(product.matrices)
    results = product.epilogue(total, **product.scalars, **operands)
    found = {name: results[name].astype(dtype) for name, dtype in product.outputs.items()}
    maxima = {
        f"max_{name}": _row_maxima(maximised(found[name].astype(jnp.float32)))
        for name, maximised in product.row_maxima.items()
    }
    return found | maxima


def _row_maxima(values: jax.Array) -> jax.Array:
    """Returns the rows' maxima [1, M]. A kernel returns several per row, each of some columns."""
    largest = jnp.max(values, axis=1, initial=-jnp.inf)
    # On a CPU, XLA's maximum may ignore NaN (jax 0.11.2).
    return jnp.where(jnp.any(jnp.isnan(values), axis=1), jnp.nan, largest)[None]


def largest_activation(activation: str | None, maxima: jax.Array) -> jax.Array:
    """Returns a bound of an activation's magnitude, given maxima of its arguments; NaN if one is NaN.

    The bound is exact if some argument is larger than a few tenths. Below 0 most activations have a
    constant bound. An activation without one, and no activation, need maxima of magnitudes.
    """
    largest = jnp.max(maxima, initial=0.0)
    largest = jnp.where(jnp.any(jnp.isnan(maxima)), jnp.nan, largest)
    bound = activate(activation, largest)
    return jnp.maximum(bound, BOUNDED_FROM_ABOVE.get(str(activation), 0.0))
