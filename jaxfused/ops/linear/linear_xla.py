"""linear in plain jax.numpy: the kernels' reference, and `implementation="xla"`."""

import string
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxfused.runtime import resharding
from jaxfused.runtime.activation import ARITHMETIC, activate
from jaxfused.runtime.product_xla import product
from jaxfused.runtime.promotion import accumulator_dtype, along_last_axis

PREACTIVATION = "jaxfused_preactivation"
"""Name that `preactivation` gives its result, for policies of `jax.checkpoint`."""

save_preactivation = jax.checkpoint_policies.save_only_these_names(PREACTIVATION)


def linear(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    activation: str | None,
    precision: Any,
    out_dtype: Any,
) -> jax.Array:
    """Returns act(x @ w + bias) + residual of [..., D] and [D, F], in `out_dtype`.

    The forward saves x, w and the preactivation in x's dtype for the gradient, and nothing in float32.
    """
    if activation is None and bias is None and residual is None:
        return _product_of_rows(x, w, out_dtype=out_dtype, precision=precision)
    if activation is None:
        y = affine(x, w, bias, precision=precision, rounded_to=out_dtype)
        return add_residual(y, residual, out_dtype)

    def with_activation(x, w, bias, residual):
        z = preactivation(x, w, bias, precision=precision)
        y = activate(activation, z.astype(accumulator_dtype(x.dtype)))
        return add_residual(y, residual, out_dtype)

    return jax.checkpoint(with_activation, policy=save_preactivation)(x, w, bias, residual)


def affine(
    x: jax.Array, w: jax.Array, bias: jax.Array | None, *, precision: Any, rounded_to: Any = None
) -> jax.Array:
    """Returns x @ w + bias in float32, for a caller that rounds the sum to `rounded_to`.

    If that is x's dtype, the product is rounded to it too: XLA writes the product to memory before it
    adds the bias, which would take twice as long in float32.
    """
    out_dtype = x.dtype if rounded_to == x.dtype else None
    y = _product_of_rows(x, w, out_dtype=out_dtype, precision=precision)
    y = y.astype(accumulator_dtype(x.dtype))
    return y if bias is None else y + along_last_axis(bias, y)


def _product_of_rows(x: jax.Array, w: jax.Array, *, out_dtype: Any, precision: Any) -> jax.Array:
    """Returns the product of x [..., D] and w [D, F], rounded once to `out_dtype`."""
    rows = letters_of_rows(x)
    subscripts = f"{rows}D,DF->{rows}F"
    return product(subscripts, x, w, out_dtype=out_dtype, precision=precision, of_weights=True)


def letters_of_rows(x: jax.Array) -> str:
    """Returns an einsum letter for each axis of x [..., D] but the last, for `product`."""
    return string.ascii_lowercase[: x.ndim - 1]


def preactivation(
    x: jax.Array, w: jax.Array, bias: jax.Array | None, *, precision: Any
) -> jax.Array:
    """Returns x @ w + bias in x's dtype, which the activation reads and the forward may save.

    The activation reads the rounded values, so that a backward that reads saved ones has the same.
    """
    z = affine(x, w, bias, precision=precision, rounded_to=x.dtype)
    return checkpoint_name(z.astype(x.dtype), PREACTIVATION)


def add_residual(y: jax.Array, residual: jax.Array | None, out_dtype: Any) -> jax.Array:
    """Returns y + residual, added in y's dtype and rounded once to `out_dtype`."""
    if residual is not None:
        y = y + resharding.split_with(residual, y).astype(y.dtype)
    return y.astype(jnp.dtype(out_dtype))


# --- operations of a custom gradient, which XLA may run next to kernels ----------------------------


def layer(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    activation: str | None,
    out_dtype: Any,
    save_preactivation: bool,
    precision: Any,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns `linear`'s y and, with `save_preactivation`, the preactivation in x's dtype."""
    if activation is None and not save_preactivation:
        z = product_and_bias(x, w, bias, rounded_to=out_dtype, precision=precision)
    else:
        z = narrow_preactivation(x, w, bias, precision=precision)
    return activated(activation, z, residual, out_dtype), z if save_preactivation else None


def activated(
    activation: str | None, z: jax.Array, residual: jax.Array | None, out_dtype: Any
) -> jax.Array:
    """Returns activation(z) + residual in `out_dtype`.

    relu rounds nothing in any dtype, and the sum with the residual rounds once. So both are computed in
    z's dtype if out_dtype and the residual have it: then XLA fuses them into its product.
    """
    keeps_dtype = activation in (None, "relu") and sums_in_product(z, None, residual, out_dtype)
    y = activate(activation, z if keeps_dtype else z.astype(accumulator_dtype(z.dtype)))
    return written_first(activation, add_residual(y, residual, out_dtype))


def written_first(activation: str | None, arrays: Any) -> Any:
    """Returns results of gelu_erf behind a barrier, and those of other activations unchanged.

    The barrier makes XLA write the results before products read them. Without it XLA evaluates part of
    gelu_erf again for each of these products, and writes intermediate arrays.
    """
    return jax.lax.optimization_barrier(arrays) if activation == "gelu_erf" else arrays


def sums_in_product(
    x: jax.Array, bias: jax.Array | None, residual: jax.Array | None, out_dtype: Any
) -> bool:
    """Returns whether XLA's product adds bias and residual: if both and the result have x's dtype."""
    added = [a.dtype for a in (bias, residual) if a is not None]
    return all(dtype == x.dtype for dtype in (jnp.dtype(out_dtype), *added))


def finish(
    z: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    activation: str | None,
    out_dtype: Any,
    save_preactivation: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns (y, preactivation or None) [..., F] from the product z = x @ w [..., F] in x's dtype."""
    wide = z.astype(accumulator_dtype(z.dtype))
    if bias is not None:
        wide = wide + along_last_axis(bias, wide)
    # As in `preactivation`, the activation reads the rounded values, which may be saved.
    kept = wide.astype(z.dtype)
    y = activated(activation, wide if activation is None else kept, residual, out_dtype)
    return y, kept if save_preactivation else None


def product_and_bias(
    x: jax.Array, w: jax.Array, bias: jax.Array | None, *, rounded_to: Any, precision: Any
) -> jax.Array:
    """Returns x @ w + bias [..., F] for a caller with a custom gradient; it may be added in x's dtype.

    A bias of x's dtype is added in that dtype if the sum is rounded to it. XLA's product then adds it
    before its one rounding; a separate sum would round twice, and change the sign of some sums near 0.
    JAX's gradient to such a bias would sum in 16 bits, so `linear` calls `affine`.
    """
    if rounded_to != x.dtype or (bias is not None and bias.dtype != x.dtype):
        return affine(x, w, bias, precision=precision, rounded_to=rounded_to)
    y = _product_of_rows(x, w, out_dtype=x.dtype, precision=precision)
    return y if bias is None else y + along_last_axis(bias, y)


def narrow_preactivation(
    x: jax.Array, w: jax.Array, bias: jax.Array | None, *, precision: Any
) -> jax.Array:
    """Returns x @ w + bias in x's dtype, for a caller with a custom gradient."""
    z = product_and_bias(x, w, bias, rounded_to=x.dtype, precision=precision)
    return z.astype(x.dtype)


def activation_gradient(
    activation: str | None, dy: jax.Array, z: jax.Array, *, has_bias: bool
) -> jax.Array:
    """Returns the gradient of the preactivation z from that of activation(z), in float32.

    XLA splits the sums of a small product (split-K), and each operation that reads z adds the partial
    sums. Behind a barrier the backward would add them again in a separate kernel, unless there is a bias
    to add too.
    """
    wide = accumulator_dtype(z.dtype)
    if has_bias or z.size > _SIZE_IN_PARTS:
        z = saved_alone(activation, z)
    _, vjp = jax.vjp(lambda z: activate(activation, z), z.astype(wide))
    return vjp(dy.astype(wide))[0]


_SIZE_IN_PARTS = 2**17
"""Elements of a product's result up to which XLA splits the reduction axis (split-K), because there are
too few tiles for all SMs."""


def saved_alone(activation: str | None, saved: Any) -> Any:
    """Returns the saved operands of an activation, behind a barrier if it has exponentials.

    Without the barrier XLA saves the forward's exponentials for the backward, in float32: twice the
    bytes of 16-bit operands.
    """
    without_exponentials = (None, *ARITHMETIC)
    return saved if activation in without_exponentials else jax.lax.optimization_barrier(saved)
