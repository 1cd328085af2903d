"""linear: validation and choice of implementation."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxfused import dispatch, reference
from jaxfused.ops.validation import check_activation, check_floating, check_shape


def linear(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None = None,
    *,
    activation: str | None = None,
    residual: jax.Array | None = None,
    precision: jax.lax.PrecisionLike = None,
    out_dtype: Any = None,
    implementation: dispatch.Implementation | None = None,
) -> jax.Array:
    r"""A linear layer with its activation and the residual stream that it is added to.

    .. math::
        y = \text{activation}(x w + \text{bias}) + \text{residual}

    The product is taken in x's dtype and accumulated in float32 (float64 for float64). So are the
    gradients, and each is rounded once, to the dtype of its operand: a float32 `w` under
    bfloat16 `x` receives the float32 sums. The activation reads its argument as rounded to x's
    dtype; bias and residual are added in float32.

    Args:
      x: [..., D], float32, bfloat16 or float16 (float64 with implementation "xla").
      w: [D, F], of any float dtype, as are bias and residual.
      bias: [F].
      activation: None, "relu", "relu2", "gelu_tanh", "gelu_erf" or "silu".
      residual: [..., F], is added after the activation.
      precision: of the product, as in `jax.numpy.matmul`.
      out_dtype: of y; by default the residual's dtype, or x's where there is no residual.
      implementation: None for the fastest that can run, or "pallas", "cuda", "xla".

    Returns:
      y, [..., F].

    Raises:
      ValueError: shapes or dtypes do not fit, or the named implementation cannot run.

    Example:
      >>> import jax.numpy as jnp, jaxfused
      >>> x, w = jnp.array([[1.0, 2.0]]), jnp.array([[1.0, -1.0], [1.0, 0.0]])
      >>> jaxfused.linear(x, w, jnp.ones(2), activation="relu", residual=jnp.ones((1, 2)))
      Array([[5., 1.]], dtype=float32)

    Source: the affine layer, as `flax.linen.Dense` has it.
    """
    op = "linear"
    x, w, bias, residual = jax.tree.map(jnp.asarray, (x, w, bias, residual))
    check_floating(op, dict(x=x, w=w, bias=bias, residual=residual))
    check_activation(op, activation)
    check_affine(op, x, "w", w, "bias", bias)
    check_residual(op, residual, x, w.shape[1])
    dispatch.choose(op, implementation, implementations(dispatch.current_device(x)))
    return reference.linear.linear(
        x,
        w,
        bias,
        residual,
        activation=activation,
        precision=precision,
        out_dtype=default_out_dtype(out_dtype, x, residual),
    )


def implementations(device: dispatch.Device) -> dict[str, str | None]:
    """For each implementation, fastest first, None or why it cannot run on `device`."""
    del device
    return {
        "pallas": "there is no Pallas kernel of linear yet",
        "cuda": "there is no CUDA kernel of linear yet",
        "xla": None,
    }


def check_affine(
    op: str, x: jax.Array, w_name: str, w: jax.Array, bias_name: str, bias: jax.Array | None
) -> None:
    """Checks that x [..., D], w [D, F] and bias [F] fit together."""
    if x.ndim == 0:
        raise ValueError(
            f"{op}: x has shape (), but its last axis is multiplied;"
            " pass x of shape [..., features]."
        )
    if w.ndim != 2 or w.shape[0] != x.shape[-1]:
        raise ValueError(
            f"{op}: {w_name} has shape {w.shape}, but x has {x.shape[-1]} features in its last"
            f" axis; pass {w_name} of shape ({x.shape[-1]}, features)."
        )
    check_shape(
        op, bias_name, bias, (w.shape[1],), f"{w_name} has {w.shape[1]} features in its last axis"
    )


def check_residual(op: str, residual: jax.Array | None, x: jax.Array, features: int) -> None:
    """Checks that the residual, where there is one, has the shape of the result."""
    rule = f"x has shape {x.shape} and the result has {features} features"
    check_shape(op, "residual", residual, (*x.shape[:-1], features), rule)


def default_out_dtype(out_dtype: Any, x: jax.Array, residual: jax.Array | None) -> Any:
    """What the caller asked for, else the residual stream's dtype, else x's."""
    if out_dtype is not None:
        return out_dtype
    return x.dtype if residual is None else residual.dtype
