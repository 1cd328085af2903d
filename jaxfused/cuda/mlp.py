"""mlp and gated_mlp where the Pallas kernels do not serve, from the parts of jaxfused/cuda/linear.py.

Their backward makes the hidden layer again in the pass that multiplies by the activation's derivative
and sums up the gradients of the biases: it reads z and dh, and writes dz and h.

All functions are over rows: x [M, D], w1 [D, F], w2 [F, E], residual and y [M, E].
"""

from typing import Any

import jax

from jaxfused.cuda import bias_activation, linear
from jaxfused.cuda.linear import column_sums, product

why_unsupported = bias_activation.why_unsupported


def forward(
    x: jax.Array,
    w1: jax.Array,
    b1: jax.Array | None,
    w2: jax.Array,
    b2: jax.Array | None,
    residual: jax.Array | None,
    *,
    activation: str | None,
    save_preactivation: bool,
    precision: Any,
    out_dtype: Any,
) -> tuple[jax.Array, jax.Array | None]:
    """(y, z): y = activation(z) w2 + b2 + residual, and with `save_preactivation` z = x w1 + b1."""
    h, z = linear.forward(
        x,
        w1,
        b1,
        None,
        activation=activation,
        save_preactivation=save_preactivation,
        precision=precision,
        out_dtype=x.dtype,
    )
    return _second_layer(h, w2, b2, residual, precision, out_dtype), z


def backward(
    dy: jax.Array,
    x: jax.Array,
    w1: jax.Array,
    b1: jax.Array | None,
    w2: jax.Array,
    b2: jax.Array | None,
    z: jax.Array | None,
    *,
    activation: str | None,
    precision: Any,
) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array, jax.Array | None]:
    """(dx, dw1, db1, dw2, db2), each of its operand's dtype. Without `z` it is made again."""
    if z is None:
        z, _ = linear.forward(
            x,
            w1,
            b1,
            None,
            activation=None,
            save_preactivation=False,
            precision=precision,
            out_dtype=x.dtype,
        )
    narrow_dy = dy.astype(x.dtype)
    dz, _, h, sums = bias_activation.backward(
        product(narrow_dy, w2.astype(x.dtype), "me,fe->mf", x.dtype, precision),
        z,
        None,
        activation=activation,
        gated=False,
        want_y=True,
        want_sums=b1 is not None,
    )
    assert h is not None
    return (
        product(dz, w1.astype(x.dtype), "mf,df->md", x.dtype, precision),
        product(x, dz, "md,mf->df", w1.dtype, precision),
        _of(sums, slice(0, 1), b1),
        product(h, narrow_dy, "mf,me->fe", w2.dtype, precision),
        column_sums(dy, b2),
    )


Preactivations = tuple[jax.Array, jax.Array | None]
"""Those of the gate and of the other features; None for the latter where the first array holds both."""


def gated_forward(
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
    save_preactivation: bool,
    precision: Any,
    out_dtype: Any,
) -> tuple[jax.Array, Preactivations | None]:
    """(y, saved): y = (activation(x w_gate + b_gate) * (x w_up + b_up)) w_down + b_down + residual.

    Without `w_up`, w_gate and b_gate hold both: the gate's features, then the others.
    """
    h, z, up_z = _gated_unit(
        x, w_gate, b_gate, w_up, b_up, activation, save_preactivation, precision
    )
    y = _second_layer(h, w_down, b_down, residual, precision, out_dtype)
    return y, None if z is None else (z, up_z)


def gated_backward(
    dy: jax.Array,
    x: jax.Array,
    w_gate: jax.Array,
    b_gate: jax.Array | None,
    w_up: jax.Array | None,
    b_up: jax.Array | None,
    w_down: jax.Array,
    b_down: jax.Array | None,
    saved: Preactivations | None,
    *,
    activation: str | None,
    precision: Any,
) -> tuple[
    jax.Array,
    jax.Array,
    jax.Array | None,
    jax.Array | None,
    jax.Array | None,
    jax.Array,
    jax.Array | None,
]:
    """(dx, dw_gate, db_gate, dw_up, db_up, dw_down, db_down); what is absent has None."""
    if saved is None:
        _, z, up_z = _gated_unit(x, w_gate, b_gate, w_up, b_up, activation, True, precision)
        assert z is not None
    else:
        z, up_z = saved
    narrow_dy = dy.astype(x.dtype)
    dgate, dup, h, sums = bias_activation.backward(
        product(narrow_dy, w_down.astype(x.dtype), "me,fe->mf", x.dtype, precision),
        z,
        up_z,
        activation=activation,
        gated=True,
        want_y=True,
        want_sums=b_gate is not None or b_up is not None,
    )
    assert h is not None
    if w_up is None or dup is None:
        dx = product(dgate, w_gate.astype(x.dtype), "mf,df->md", x.dtype, precision)
        dw_up = None
    else:
        of_gate, of_up = (
            product(dz, w.astype(x.dtype), "mf,df->md", x.dtype, precision)
            for dz, w in ((dgate, w_gate), (dup, w_up))
        )
        # Sums of float32 products would be rounded once, but cost 30 us more at [16384, 768].
        dx = of_gate + of_up
        dw_up = product(x, dup, "md,mf->df", w_up.dtype, precision)
    return (
        dx,
        product(x, dgate, "md,mf->df", w_gate.dtype, precision),
        _of(sums, slice(0, 2 if w_up is None else 1), b_gate),
        dw_up,
        _of(sums, slice(1, 2), b_up),
        product(h, narrow_dy, "mf,me->fe", w_down.dtype, precision),
        column_sums(dy, b_down),
    )


def _gated_unit(
    x, w_gate, b_gate, w_up, b_up, activation, save_preactivation, precision
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """(h, z, up_z), the last two with `save_preactivation`."""
    gate, up = (
        None if w is None else product(x, w.astype(x.dtype), "md,df->mf", x.dtype, precision)
        for w in (w_gate, w_up)
    )
    assert gate is not None
    return bias_activation.forward(
        gate,
        up,
        b_gate,
        b_up,
        None,
        activation=activation,
        gated=True,
        out_dtype=x.dtype,
        save_preactivation=save_preactivation,
    )


def _second_layer(h, w, bias, residual, precision, out_dtype) -> jax.Array:
    y, _ = linear.forward(
        h,
        w,
        bias,
        residual,
        activation=None,
        save_preactivation=False,
        precision=precision,
        out_dtype=out_dtype,
    )
    return y


def _of(sums, entries: slice, bias) -> jax.Array | None:
    """The gradient of a bias out of the sums of `bias_activation.backward`."""
    return None if bias is None else sums[entries].reshape(-1).astype(bias.dtype)
