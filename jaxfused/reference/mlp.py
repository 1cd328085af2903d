"""mlp and gated_mlp in plain jax.numpy: the truth for the kernels, and `implementation="xla"`.

Either is one `jax.checkpoint`: its policy says what the backward keeps besides the inputs.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxfused.reference.activation import activate
from jaxfused.reference.linear import add_residual, affine, preactivation, save_preactivation
from jaxfused.reference.product import accumulator_dtype

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
    *,
    activation: str | None,
    save: str,
    precision: Any,
    out_dtype: Any,
) -> jax.Array:
    """act(x @ w1 + b1) @ w2 + b2 + residual, in `out_dtype`."""

    def f(x, w1, b1, w2, b2, residual):
        z = preactivation(x, w1, b1, precision=precision)
        h = activate(activation, z.astype(accumulator_dtype(x.dtype))).astype(x.dtype)
        y = affine(h, w2, b2, precision=precision, rounded_to=out_dtype)
        return add_residual(y, residual, out_dtype)

    return jax.checkpoint(f, policy=SAVE_POLICIES[save])(x, w1, b1, w2, b2, residual)


def gated_mlp(
    x: jax.Array,
    w_gate: jax.Array,
    b_gate: jax.Array | None,
    w_up: jax.Array | None,
    b_up: jax.Array | None,
    w_down: jax.Array,
    b_down: jax.Array | None,
    residual: jax.Array | None,
    *,
    activation: str | None,
    save: str,
    precision: Any,
    out_dtype: Any,
) -> jax.Array:
    """(act(x @ w_gate + b_gate) * (x @ w_up + b_up)) @ w_down + b_down + residual, in `out_dtype`.

    Without `w_up`, w_gate and b_gate hold both: the gate's features, then the others.
    """

    def f(x, w_gate, b_gate, w_up, b_up, w_down, b_down, residual):
        wide = accumulator_dtype(x.dtype)
        gate = preactivation(x, w_gate, b_gate, precision=precision).astype(wide)
        if w_up is None:
            gate, up = jnp.split(gate, 2, axis=-1)
        else:
            up = preactivation(x, w_up, b_up, precision=precision).astype(wide)
        h = (activate(activation, gate) * up).astype(x.dtype)
        y = affine(h, w_down, b_down, precision=precision, rounded_to=out_dtype)
        return add_residual(y, residual, out_dtype)

    return jax.checkpoint(f, policy=SAVE_POLICIES[save])(
        x, w_gate, b_gate, w_up, b_up, w_down, b_down, residual
    )
