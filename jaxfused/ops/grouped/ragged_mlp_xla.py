"""The perceptrons of groups of rows in XLA, and the operations of their gradient."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxfused.ops.grouped import ragged_dot_xla
from jaxfused.runtime.activation import activate, value_and_slope
from jaxfused.runtime.promotion import accumulator_dtype


@dataclass(frozen=True)
class Options:
    """Static arguments of ragged_mlp."""

    op: str
    activation: str | None
    gated: bool
    transposed: bool
    """True if weights are [E, out, in]."""
    precision: Any

    def product(self, dtype: Any, *, back: bool = False) -> ragged_dot_xla.Options:
        """Returns the options of a product with weights, or with their transposes if `back`."""
        return ragged_dot_xla.Options(self.transposed != back, dtype, dtype, self.precision)


def ragged_mlp(options: Options, x, w_first, w_second, w_down, sizes, offset) -> jax.Array:
    """Computes `ragged_mlp`, with gradients in forward and reverse mode and of any order."""
    of_rows = options.product(x.dtype)

    def product(rows: jax.Array, w: jax.Array) -> jax.Array:
        return ragged_dot_xla.ragged_dot(of_rows, rows, w, sizes, offset)

    h, *_ = _activated(options, _preactivations(options, product, x, w_first, w_second))
    return product(h, w_down)


def _preactivations(options: Options, product, x, w_first, w_second) -> list[jax.Array]:
    if options.gated and w_second is None:
        return jnp.split(product(x, w_first), 2, axis=-1)
    return [product(x, w) for w in (w_first, w_second) if w is not None]


def _activated(options: Options, z: list[jax.Array]) -> tuple[jax.Array, ...]:
    """Returns (h, *z): the hidden layer h [M, F], in the dtype of its preactivations z."""
    wide = accumulator_dtype(z[0].dtype)
    h = activate(options.activation, z[0].astype(wide))
    h = h * z[1].astype(wide) if options.gated else h
    return h.astype(z[0].dtype), *z


# --- operations, which XLA may run next to kernels ------------------------------------------------


def hidden_layer(
    options: Options, x, w_first, w_second, sizes, offset
) -> tuple[jax.Array | None, ...]:
    """Returns (h, preactivation, None), or with a gate (h, gate, up), each [M, F]."""
    of_rows = options.product(x.dtype)

    def product(rows: jax.Array, w: jax.Array) -> jax.Array:
        return ragged_dot_xla.rows_product(of_rows, rows, w, sizes, offset)

    h, *saved = _activated(options, _preactivations(options, product, x, w_first, w_second))
    h = ragged_dot_xla.cleared(h, w_first.shape[0], sizes, offset)
    return (h, *saved, None)[:3]


def hidden_gradient(
    options: Options, dh: jax.Array, first: jax.Array, second: jax.Array | None
) -> tuple[jax.Array, Any, jax.Array]:
    """Returns (dz, None, h) or (dgate, dup, h), [M, F], from the hidden layer's cotangent."""
    dtype = dh.dtype
    wide = accumulator_dtype(dtype)
    dh = dh.astype(wide)
    activated, slope = value_and_slope(options.activation, first.astype(wide))
    if second is None:
        return (dh * slope).astype(dtype), None, activated.astype(dtype)
    up = second.astype(wide)
    dgate, dup, h = dh * up * slope, dh * activated, activated * up
    return dgate.astype(dtype), dup.astype(dtype), h.astype(dtype)


def input_gradient(
    options: Options, out_dtype: Any, dgate, dup, w_gate, w_up, sizes, offset
) -> jax.Array:
    """Returns dgate @ w_gate^T + dup @ w_up^T, [M, D], rounded once."""
    wide = accumulator_dtype(dgate.dtype)
    back = ragged_dot_xla.Options(not options.transposed, dgate.dtype, wide, options.precision)
    products = (
        ragged_dot_xla.rows_product(back, dz, w, sizes, offset)
        for dz, w in ((dgate, w_gate), (dup, w_up))
    )
    return sum(products, jnp.zeros((), wide)).astype(out_dtype)
