"""quantized_matmul: validation and choice of implementation."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxfused import dispatch, reference
from jaxfused.ops.kernel_call import reference_only
from jaxfused.ops.linear import check_affine, check_residual, resolve_out_dtype
from jaxfused.ops.validation import check_activation, check_floating
from jaxfused.quantization.quantized_array import QuantizedArray


def quantized_matmul(
    x: jax.Array | QuantizedArray,
    w: QuantizedArray,
    bias: jax.Array | None = None,
    *,
    activation: str | None = None,
    residual: jax.Array | None = None,
    out_dtype: Any = None,
    implementation: dispatch.Implementation | None = None,
) -> jax.Array:
    r"""A linear layer with quantised weights and, optionally, quantised inputs.

    .. math::
        y = \text{activation}(x w + \text{bias}) + \text{residual}

    Float x: the weights are dequantised to x's dtype, and the product is accumulated in float32.
    Quantised x: with one scale a row of x and a column of w (or one for all) the values themselves are
    multiplied, integers with exact sums in int32 and float8 with sums in float32; otherwise both are
    dequantised to float32. Bias and residual are added in float32.

    The weights are frozen: gradients go to x (where it is float), bias and residual, and the scales'
    are zero. Gradients are of reverse mode, to any order.

    Args:
      x: [..., D], float32, bfloat16 or float16 (float64 with implementation "xla"); or a
        `QuantizedArray` of that shape with axis -1, as `quantize_rows` makes it.
      w: a `QuantizedArray` of shape [D, F] with axis -2, as `quantize` makes it.
      bias: [F], of any float dtype, as is residual.
      activation: None, "relu", "relu2", "gelu_tanh", "gelu_erf" or "silu".
      residual: [..., F], is added after the activation.
      out_dtype: of y; by default the residual's dtype, else x's, else float32.
      implementation: None for the fastest that can run, or "pallas", "cuda", "xla".

    Returns:
      y, [..., F].

    Raises:
      ValueError: shapes or dtypes do not fit, D is so large that int32 could overflow, or the named
        implementation cannot run.

    Example:
      >>> import jax.numpy as jnp, jaxfused
      >>> x, w = jnp.array([[1.0, 2.0]]), jnp.array([[127.0, 0.0], [1.0, -127.0]])
      >>> jaxfused.quantized_matmul(x, jaxfused.quantize(w), activation="relu")
      Array([[129.,   0.]], dtype=float32)
      >>> jaxfused.quantized_matmul(jaxfused.quantize_rows(x), jaxfused.quantize(w)).shape
      (1, 2)

    Source: Dettmers et al., "LLM.int8()", 2022, https://arxiv.org/abs/2208.07339
    """
    op = "quantized_matmul"
    bias, residual = jax.tree.map(jnp.asarray, (bias, residual))
    check_floating(op, dict(bias=bias, residual=residual))
    check_activation(op, activation)
    _check_quantized(op, "w", w, -2, "quantize(w)")
    if isinstance(x, QuantizedArray):
        _check_quantized(op, "x", x, -1, "quantize_rows(x)")
        values, array = x.values, jax.eval_shape(x.dequantize)
    else:
        x = values = array = jnp.asarray(x)
        check_floating(op, dict(x=x))
    check_affine(op, array, "w", jax.eval_shape(w.dequantize), "bias", bias)
    check_residual(op, residual, array, w.shape[1])
    _check_sums_fit(op, x, w)
    reference_only(op, implementation, values)
    return reference.quantized_matmul.matmul(
        x,
        w,
        bias,
        residual,
        activation=activation,
        out_dtype=resolve_out_dtype(op, out_dtype, array, residual),
    )


def _check_quantized(op: str, name: str, array: Any, axis: int, remedy: str) -> None:
    if not isinstance(array, QuantizedArray):
        raise ValueError(
            f"{op}: {name} is a {type(array).__name__}, but it has to be a QuantizedArray;"
            f" pass jaxfused.{remedy}."
        )
    if array.axis != axis:
        raise ValueError(
            f"{op}: {name} was quantised along axis {array.axis}, but the product sums over axis"
            f" {axis}; pass jaxfused.{remedy}."
        )


def _check_sums_fit(op: str, x: jax.Array | QuantizedArray, w: QuantizedArray) -> None:
    """Checks that int32 can hold the sums of integer products without wrapping around."""
    if not (isinstance(x, QuantizedArray) and {x.dtype, w.dtype} <= {"int8", "int4"}):
        return
    largest = 1
    for q in (x, w):
        largest *= 128 if q.zero_point is None else 255
    limit = (2**31 - 1) // largest
    if w.shape[0] > limit:
        raise ValueError(
            f"{op}: w has {w.shape[0]} input features, but sums of more than {limit} products of"
            " these integers may not fit into int32; pass x as floats, or split the features."
        )
