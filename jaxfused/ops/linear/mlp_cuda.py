"""CUDA C implementation of mlp and gated_mlp: the gated unit, and gradients of the hidden layer.

A backward recomputes the hidden layer h in the same pass that multiplies by the activation's derivative
and sums the gradients of the biases. This pass reads preactivations and dh, and writes gradients and h.

All functions are over rows: x [M, D], w [D, F], z and h [M, F], dy [M, E]. Weights have x's dtype.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxfused.ops.linear import bias_activation_cuda
from jaxfused.ops.linear.linear_cuda import add_input_gradient, product


def hidden_gradient(
    dy: jax.Array,
    w2: jax.Array,
    z: jax.Array,
    *,
    activation: str | None,
    sum_rows: bool,
    precision: Any,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns dz and activation(z) [M, F], and dz summed over rows [F], for dy [M, E], w2 [F, E]."""
    dh = product(dy, w2, "me,fe->mf", z.dtype, precision)
    dz, _, h, sums = bias_activation_cuda.backward(
        dh, z, None, activation=activation, want_y=activation is not None, want_sums=sum_rows
    )
    return dz, z if h is None else h, None if sums is None else sums[0]


def gated_forward(
    x: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array | None,
    b_gate: jax.Array | None,
    b_up: jax.Array | None,
    *,
    activation: str | None,
    save_preactivations: bool,
    precision: Any,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Returns (activation(gate) * up, gate, up) for x [M, D]; gate and up only if they are saved.

    Without `w_up`, w_gate [D, 2 F] and b_gate [2 F] hold the weights and biases of both.
    """
    if w_up is None:
        w_gate, w_up = jnp.split(w_gate, 2, axis=1)
        b_gate, b_up = (None, None) if b_gate is None else jnp.split(b_gate, 2)
    gate, up = (product(x, w, "md,df->mf", x.dtype, precision) for w in (w_gate, w_up))
    return bias_activation_cuda.forward(
        gate,
        up,
        b_gate,
        b_up,
        None,
        activation=activation,
        out_dtype=x.dtype,
        save_preactivation=save_preactivations,
    )


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
) -> tuple[jax.Array, jax.Array | None, jax.Array | None, jax.Array | None, jax.Array | None]:
    """Returns dgate, dup, activation(gate) * up [M, F], and dgate and dup summed over rows [F].

    dy is [M, E] and w_down [F, E]. The third result is None unless `returns_hidden`, and each sum is
    None unless its `sum_rows` is True.
    """
    dgate, dup, h, sums = bias_activation_cuda.backward(
        product(dy, w_down, "me,fe->mf", gate.dtype, precision),
        gate,
        up,
        activation=activation,
        want_y=returns_hidden,
        want_sums=any(sum_rows),
    )
    db_gate, db_up = (
        sums[i] if sums is not None and wanted else None for i, wanted in enumerate(sum_rows)
    )
    return dgate, dup, h, db_gate, db_up


def gated_unit_gradient(
    dh: jax.Array, gate: jax.Array, up: jax.Array, *, activation: str | None
) -> tuple[jax.Array, jax.Array]:
    """Returns dgate and dup [M, F] of activation(gate) * up, whose cotangent is dh [M, F]."""
    dgate, dup, _, _ = bias_activation_cuda.backward(
        dh, gate, up, activation=activation, want_y=False, want_sums=False
    )
    assert dup is not None
    return dgate, dup


def gated_input_gradient(
    dgate: jax.Array,
    dup: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array | None,
    *,
    precision: Any,
) -> tuple[jax.Array]:
    """Returns (dgate @ w_gate^T + dup @ w_up^T,) [M, D]; the first product is rounded before the sum."""
    if w_up is None:
        w_gate, w_up = jnp.split(w_gate, 2, axis=1)
    dx = product(dgate, w_gate, "mf,df->md", dgate.dtype, precision)
    return (add_input_gradient(dx, dup, w_up, precision=precision),)
