"""mlp and gated_mlp: validation and choice of implementation."""

from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxfused import dispatch, reference
from jaxfused.ops.linear import check_affine, check_residual, default_out_dtype
from jaxfused.ops.validation import check_activation, check_floating, check_shape

Save = Literal["preactivation", "inputs"]


def mlp(
    x: jax.Array,
    w1: jax.Array,
    b1: jax.Array | None,
    w2: jax.Array,
    b2: jax.Array | None = None,
    *,
    activation: str | None = "gelu_tanh",
    residual: jax.Array | None = None,
    save: Save = "preactivation",
    precision: jax.lax.PrecisionLike = None,
    out_dtype: Any = None,
    implementation: dispatch.Implementation | None = None,
) -> jax.Array:
    r"""The two-layer perceptron of a Transformer block, with the residual stream it is added to.

    .. math::
        y = \text{activation}(x w_1 + b_1) w_2 + b_2 + \text{residual}

    Products are taken in x's dtype and accumulated in float32 (float64 for float64), as are the
    gradients; each gradient is rounded once, to the dtype of its operand.

    Args:
      x: [..., D], float32, bfloat16 or float16 (float64 with implementation "xla").
      w1: [D, F], of any float dtype, as are the other parameters and residual.
      b1: [F] or None.
      w2: [F, E].
      b2: [E] or None.
      activation: None, "relu", "relu2", "gelu_tanh", "gelu_erf" or "silu".
      residual: [..., E], is added last.
      save: what is kept for the backward besides the inputs: "preactivation" keeps x w1 + b1
        ([..., F] in x's dtype); "inputs" keeps nothing and takes that product again.
      precision: of the products, as in `jax.numpy.matmul`.
      out_dtype: of y; by default the residual's dtype, or x's where there is no residual.
      implementation: None for the fastest that can run, or "pallas", "cuda", "xla".

    Returns:
      y, [..., E].

    Raises:
      ValueError: shapes or dtypes do not fit, `save` is not known, or the named implementation
        cannot run.

    Example:
      >>> import jax.numpy as jnp, jaxfused
      >>> x = jnp.array([[1.0, -2.0]])
      >>> jaxfused.mlp(x, jnp.eye(2), jnp.zeros(2), jnp.ones((2, 1)), activation="relu")
      Array([[1.]], dtype=float32)

    Source: Vaswani et al., "Attention Is All You Need", 2017, section 3.3,
    https://arxiv.org/abs/1706.03762
    """
    op = "mlp"
    x, w1, b1, w2, b2, residual = jax.tree.map(jnp.asarray, (x, w1, b1, w2, b2, residual))
    check_floating(op, dict(x=x, w1=w1, b1=b1, w2=w2, b2=b2, residual=residual))
    check_affine(op, x, "w1", w1, "b1", b1)
    _check_second_layer(op, x, w1.shape[1], "w2", w2, "b2", b2, residual)
    check_activation(op, activation)
    _check_save(op, save)
    dispatch.choose(op, implementation, implementations(dispatch.current_device(x)))
    return reference.mlp.mlp(
        x,
        w1,
        b1,
        w2,
        b2,
        residual,
        activation=activation,
        save=save,
        precision=precision,
        out_dtype=default_out_dtype(out_dtype, x, residual),
    )


def gated_mlp(
    x: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array | None,
    w_down: jax.Array,
    *,
    b_gate: jax.Array | None = None,
    b_up: jax.Array | None = None,
    b_down: jax.Array | None = None,
    activation: str | None = "silu",
    residual: jax.Array | None = None,
    save: Save = "preactivation",
    precision: jax.lax.PrecisionLike = None,
    out_dtype: Any = None,
    implementation: dispatch.Implementation | None = None,
) -> jax.Array:
    r"""The gated perceptron: SwiGLU with "silu", GeGLU with a gelu, ReGLU with "relu".

    .. math::
        y = \bigl(\text{activation}(x w_\text{gate} + b_\text{gate})
            \odot (x w_\text{up} + b_\text{up})\bigr) w_\text{down} + b_\text{down}
            + \text{residual}

    Args:
      x: [..., D], float32, bfloat16 or float16 (float64 with implementation "xla").
      w_gate: [D, F]; or [D, 2 F] with `w_up=None`: the gate's columns, then those of w_up.
      w_up: [D, F], or None where w_gate holds both.
      w_down: [F, E].
      b_gate: of w_gate's last axis.
      b_up: [F], only with w_up.
      b_down: [E].
      activation: of the gate; None for the bilinear form.
      save: what is kept for the backward besides the inputs: "preactivation" keeps both products
        with x (2 F features in x's dtype); "inputs" keeps nothing and takes them again.

    The other arguments, the result and the errors are those of `mlp`.

    Example:
      >>> import jax.numpy as jnp, jaxfused
      >>> x, w = jnp.array([[2.0]]), jnp.array([[1.0, 3.0]])
      >>> jaxfused.gated_mlp(x, w, None, jnp.ones((1, 1)), activation="relu")
      Array([[12.]], dtype=float32)

    Source: Shazeer, "GLU Variants Improve Transformer", 2020, https://arxiv.org/abs/2002.05202
    """
    op = "gated_mlp"
    x, w_gate, w_up, w_down, b_gate, b_up, b_down, residual = jax.tree.map(
        jnp.asarray, (x, w_gate, w_up, w_down, b_gate, b_up, b_down, residual)
    )
    arrays = dict(x=x, w_gate=w_gate, w_up=w_up, w_down=w_down)
    check_floating(op, arrays | dict(b_gate=b_gate, b_up=b_up, b_down=b_down, residual=residual))
    check_affine(op, x, "w_gate", w_gate, "b_gate", b_gate)
    if w_up is None:
        if w_gate.shape[1] % 2:
            raise ValueError(
                f"{op}: w_gate has shape {w_gate.shape}, but without w_up it holds two matrices of"
                " one width; pass w_gate of shape (features, 2 * hidden), or pass w_up."
            )
        if b_up is not None:
            raise ValueError(
                f"{op}: b_up was passed without w_up; append it to b_gate, as w_gate holds both."
            )
        hidden = w_gate.shape[1] // 2
    else:
        hidden = w_gate.shape[1]
        check_shape(op, "w_up", w_up, w_gate.shape, f"w_gate has shape {w_gate.shape}")
        check_affine(op, x, "w_up", w_up, "b_up", b_up)
    _check_second_layer(op, x, hidden, "w_down", w_down, "b_down", b_down, residual)
    check_activation(op, activation)
    _check_save(op, save)
    dispatch.choose(op, implementation, implementations(dispatch.current_device(x)))
    return reference.mlp.gated_mlp(
        x,
        w_gate,
        b_gate,
        w_up,
        b_up,
        w_down,
        b_down,
        residual,
        activation=activation,
        save=save,
        precision=precision,
        out_dtype=default_out_dtype(out_dtype, x, residual),
    )


def implementations(device: dispatch.Device) -> dict[str, str | None]:
    """For each implementation, fastest first, None or why it cannot run on `device`."""
    del device
    return {
        "pallas": "there is no Pallas kernel of mlp and gated_mlp yet",
        "cuda": "there is no CUDA kernel of mlp and gated_mlp yet",
        "xla": None,
    }


def _check_second_layer(op, x, hidden, w_name, w, bias_name, bias, residual) -> None:
    if w.ndim != 2 or w.shape[0] != hidden:
        raise ValueError(
            f"{op}: {w_name} has shape {w.shape}, but the hidden layer has {hidden} features;"
            f" pass {w_name} of shape ({hidden}, features)."
        )
    features = w.shape[1]
    check_shape(op, bias_name, bias, (features,), f"{w_name} has {features} features")
    check_residual(op, residual, x, features)


def _check_save(op: str, save: str) -> None:
    if save not in reference.mlp.SAVE_POLICIES:
        names = " or ".join(repr(n) for n in reference.mlp.SAVE_POLICIES)
        raise ValueError(f"{op}: save={save!r} is not known; pass {names}.")
