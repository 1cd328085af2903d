"""mlp and gated_mlp in plain jax.numpy: the kernels' reference, and `implementation="xla"`.

Each of the two is one `jax.checkpoint`. Its policy decides what the forward saves besides the inputs.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxfused.ops.linear.linear_xla import (
    add_residual,
    affine,
    letters_of_rows,
    narrow_preactivation,
    preactivation,
    save_preactivation,
    saved_alone,
    written_first,
)
from jaxfused.runtime import resharding
from jaxfused.runtime.activation import activate, value_and_slope
from jaxfused.runtime.dropout import keep_probability, keep_rows
from jaxfused.runtime.product_xla import product, side_by_side, sum_written_rows, unshared
from jaxfused.runtime.promotion import accumulator_dtype

SAVE_POLICIES = {
    "hidden": save_preactivation,
    "preactivation": save_preactivation,
    "inputs": jax.checkpoint_policies.nothing_saveable,
}


def mlp(
    x: jax.Array,
    w1: jax.Array,
    b1: jax.Array | None,
    w2: jax.Array,
    b2: jax.Array | None,
    residual: jax.Array | None,
    dropout_words: jax.Array | None,
    *,
    activation: str | None,
    dropout_rate: float,
    save: str,
    precision: Any,
    out_dtype: Any,
) -> jax.Array:
    """Returns dropout(act(x @ w1 + b1)) @ w2 + b2 + residual, in `out_dtype`."""

    def f(x, w1, b1, w2, b2, residual, words):
        z = preactivation(x, w1, b1, precision=precision)
        h = activate(activation, z.astype(accumulator_dtype(x.dtype)))
        h = dropped(h, words, dropout_rate).astype(x.dtype)
        y = affine(h, w2, b2, precision=precision, rounded_to=out_dtype)
        return add_residual(y, residual, out_dtype)

    return jax.checkpoint(f, policy=SAVE_POLICIES[save])(x, w1, b1, w2, b2, residual, dropout_words)


def gated_mlp(
    x: jax.Array,
    w_gate: jax.Array,
    b_gate: jax.Array | None,
    w_up: jax.Array | None,
    b_up: jax.Array | None,
    w_down: jax.Array,
    b_down: jax.Array | None,
    residual: jax.Array | None,
    dropout_words: jax.Array | None,
    *,
    activation: str | None,
    dropout_rate: float,
    save: str,
    precision: Any,
    out_dtype: Any,
) -> jax.Array:
    """Returns dropout(act(x @ w_gate + b_gate) * (x @ w_up + b_up)) @ w_down + b_down + residual.

    The result is in `out_dtype`. Without `w_up`, w_gate and b_gate hold both: the gate's features, then
    those of `up`.
    """

    def f(x, w_gate, b_gate, w_up, b_up, w_down, b_down, residual, words):
        wide = accumulator_dtype(x.dtype)
        gate = preactivation(x, w_gate, b_gate, precision=precision).astype(wide)
        if w_up is None:
            gate, up = jnp.split(gate, 2, axis=-1)
        else:
            up = preactivation(x, w_up, b_up, precision=precision).astype(wide)
            up = resharding.split_with(up, gate)
        h = dropped(activate(activation, gate) * up, words, dropout_rate).astype(x.dtype)
        y = affine(h, w_down, b_down, precision=precision, rounded_to=out_dtype)
        return add_residual(y, residual, out_dtype)

    return jax.checkpoint(f, policy=SAVE_POLICIES[save])(
        x, w_gate, b_gate, w_up, b_up, w_down, b_down, residual, dropout_words
    )


def dropped(h: jax.Array, words: jax.Array | None, rate: float) -> jax.Array:
    """Returns the hidden layer h [..., F] after dropout by seed `words`; h itself without words."""
    if words is None:
        return h
    return jnp.where(keep_rows(words, h.shape, rate), h / keep_probability(rate), 0)


# --- operations of a custom gradient, which XLA may run next to kernels ----------------------------
#
# The shapes are: rows x [..., D], dy [..., E], z, gate and up [..., F]; weights w1 [D, F] and w2 [F, E].
# Leading axes are not flattened to one axis of rows: with the same shapes in forward and backward, XLA
# finds common subexpressions, and computes values that several operations read in one pass.


def hidden_and_slope(
    x: jax.Array, w1: jax.Array, b1: jax.Array | None, *, activation: str | None, precision: Any
) -> tuple[jax.Array, jax.Array]:
    """Returns activation(z) and activation'(z) of z = x @ w1 + b1, both [..., F] in x's dtype."""
    z = narrow_preactivation(x, w1, b1, precision=precision)
    h, slope = value_and_slope(activation, z.astype(accumulator_dtype(z.dtype)))
    return h.astype(x.dtype), slope.astype(x.dtype)


def hidden_gradient_by_slope(
    dy: jax.Array, w2: jax.Array, slope: jax.Array, *, sum_rows: bool, precision: Any
) -> tuple[jax.Array, jax.Array | None]:
    """Returns dz [..., F] = (dy @ w2^T) * slope, and dz summed over rows [F].

    `slope` [..., F] is the activation's derivative.
    """
    dz = _gradient_of_hidden(dy, w2, precision) * slope.astype(accumulator_dtype(slope.dtype))
    narrow = dz.astype(slope.dtype)
    return narrow, sum_written_rows(narrow) if sum_rows else None


def hidden_gradient(
    dy: jax.Array,
    w2: jax.Array,
    z: jax.Array,
    *,
    activation: str | None,
    sum_rows: bool,
    precision: Any,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns dz, activation(z), and dz summed over the rows."""
    z = saved_alone(activation, z)
    h, slope = value_and_slope(activation, z.astype(accumulator_dtype(z.dtype)))
    dz = _gradient_of_hidden(dy, w2, precision) * slope
    narrow, h = written_first(activation, (dz.astype(z.dtype), h.astype(z.dtype)))
    sums = sum_written_rows(narrow, of_relu=activation == "relu") if sum_rows else None
    return narrow, h, sums


def gated_unit(
    x: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array | None,
    b_gate: jax.Array | None,
    b_up: jax.Array | None,
    *,
    activation: str | None,
    save_preactivations: bool,
    precision: Any,
    converted: bool = False,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Returns (activation(gate) * up, gate, up), the last two only if they are to be saved.

    `converted` is True if the weights were converted from another dtype. It changes no result.
    """
    gate = narrow_preactivation(x, w_gate, b_gate, precision=precision)
    if w_up is None:
        gate, up = jnp.split(gate, 2, axis=-1)
    else:
        operands = unshared(x, w_up, converted=converted)
        up = narrow_preactivation(*operands, b_up, precision=precision)
    wide = accumulator_dtype(x.dtype)
    h = (activate(activation, gate.astype(wide)) * up.astype(wide)).astype(x.dtype)
    return (h, gate, up) if save_preactivations else (h, None, None)


def gated_unit_gradient(
    dh: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    *,
    activation: str | None,
    returns_hidden: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns dgate, dup and, if `returns_hidden`, h = activation(gate) * up, whose cotangent dh is.

    All are [..., F], and the results in gate's dtype.
    """
    wide = accumulator_dtype(gate.dtype)
    activated, slope = value_and_slope(activation, gate.astype(wide))
    wide_up, dh = up.astype(wide), dh.astype(wide)
    dgate, dup = dh * wide_up * slope, dh * activated
    h = (activated * wide_up).astype(gate.dtype) if returns_hidden else None
    return dgate.astype(gate.dtype), dup.astype(gate.dtype), h


def gated_hidden_gradient(
    dy: jax.Array,
    w_down: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    *,
    activation: str | None,
    sum_rows: tuple[bool, bool],
    returns_hidden: bool,
    precision: Any,
    joined: bool = False,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None, jax.Array | None, jax.Array | None]:
    """Returns dgate, dup, activation(gate) * up if `returns_hidden`, and the sums of dgate and dup.

    The first three are [..., F], the sums over rows [F]. If `joined`, dgate and dup are one array
    [..., 2 F] in dgate's place, their sums one [2 F], and the results for dup are None.
    """
    dh = _gradient_of_hidden(dy, w_down, precision)
    dgate, dup, h = gated_unit_gradient(
        dh, gate, up, activation=activation, returns_hidden=returns_hidden
    )
    cotangents = (side_by_side([dgate, dup]), None) if joined else (dgate, dup)
    *cotangents, h = written_first(activation, (*cotangents, h))
    sums = (
        sum_written_rows(d) if wanted and d is not None else None
        for d, wanted in zip(cotangents, sum_rows, strict=True)
    )
    return (*cotangents, h, *sums)


def gated_input_gradient(
    dgate: jax.Array,
    dup: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array | None,
    *,
    precision: Any,
) -> tuple[jax.Array]:
    """Returns dgate @ w_gate^T + dup @ w_up^T; w_gate holds both weights if there is no w_up."""
    rows = letters_of_rows(dgate)

    def gradient(d: jax.Array, w: jax.Array) -> jax.Array:
        return product(f"{rows}F,DF->{rows}D", d, w, out_dtype=d.dtype, precision=precision)

    if w_up is None:
        return (gradient(side_by_side([dgate, dup]), w_gate),)
    # Both products are rounded before they are added: then the kernel of XLA's second product adds the
    # first product's result.
    return (gradient(dgate, w_gate) + gradient(dup, w_up),)


def _gradient_of_hidden(dy: jax.Array, w2: jax.Array, precision: Any) -> jax.Array:
    """Returns dy @ w2^T, rounded to dy's dtype, as float32 for the arithmetic that follows."""
    rows = letters_of_rows(dy)
    subscripts = f"{rows}E,FE->{rows}F"
    dh = product(subscripts, dy, w2, out_dtype=dy.dtype, precision=precision)
    return dh.astype(accumulator_dtype(dh.dtype))
