"""linear on the Hopper product of `fused_product`: bias, activation and residual in its epilogue."""

from typing import Any

import jax

from pallas_kernels.activation import activation as activate
from pallas_kernels.gemm.epilogue import Function
from pallas_kernels.gemm.fused_product import FusedProduct


def layer(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    activation: str | None,
    save_preactivation: bool,
    out_dtype: Any,
) -> FusedProduct:
    """Returns y = activation(x @ w + bias) + residual, [M, D] @ [D, F], and x @ w + bias if saved."""
    return FusedProduct(
        name="linear",
        a=x,
        b=w,
        epilogue=layer_epilogue(activation, out_dtype),
        vectors={"bias": bias},
        matrices={"residual": residual},
        outputs={"y": out_dtype} | ({"preactivation": x.dtype} if save_preactivation else {}),
        activations=int(activation is not None),
    )


def layer_epilogue(activation: str | None, out_dtype: Any) -> Function:
    """Returns a layer's epilogue, which also applies scales [M] and [N] of quantised operands."""

    def epilogue(z, *, x_scale=None, w_scale=None, bias=None, residual=None):
        z = z if x_scale is None else z * x_scale
        z = z if w_scale is None else z * w_scale
        z = z if bias is None else z + bias
        y = activate(activation, z, out_dtype)
        return {"y": y if residual is None else y + residual, "preactivation": z}

    return epilogue


def input_gradient(dy: jax.Array, w: jax.Array) -> FusedProduct:
    """Returns dx = dy @ w^T, the gradient of x (dgrad), for dy [M, F] and w [D, F]."""
    return FusedProduct(
        name="input_gradient",
        a=dy,
        b=w,
        b_transposed=True,
        epilogue=lambda dx: {"dx": dx},
        outputs={"dx": dy.dtype},
    )
