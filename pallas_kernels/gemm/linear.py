"""linear on the Hopper product: bias, activation and residual in its epilogue."""

from typing import Any

import jax

from pallas_kernels.activation import activation as activate
from pallas_kernels.gemm.matmul import MatmulConfig, matmul
from pallas_kernels.gemm.small_m import FewRowsConfig


def forward(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    activation: str | None,
    save_preactivation: bool,
    out_dtype: Any,
    multiprocessors: int,
    config: MatmulConfig | FewRowsConfig | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns activation(x @ w + bias) + residual, [M, D] @ [D, F], and x @ w + bias if saved."""

    def epilogue(z, *, bias=None, residual=None):
        z = z if bias is None else z + bias
        y = activate(activation, z, out_dtype)
        return {"y": y if residual is None else y + residual, "preactivation": z}

    results = matmul(
        x,
        w,
        epilogue=epilogue,
        vectors={"bias": bias},
        matrices={"residual": residual},
        outputs={"y": out_dtype} | ({"preactivation": x.dtype} if save_preactivation else {}),
        activations=0 if activation is None else 1,
        config=config,
        multiprocessors=multiprocessors,
        name="linear",
    )
    return results["y"], results.get("preactivation")


def input_gradient(
    dy: jax.Array,
    w: jax.Array,
    *,
    multiprocessors: int,
    config: MatmulConfig | FewRowsConfig | None = None,
) -> jax.Array:
    """Returns dy @ w^T, the gradient of x (dgrad), for dy [M, F] and w [D, F]."""
    results = matmul(
        dy,
        w,
        b_transposed=True,
        epilogue=lambda dx: {"dx": dx},
        outputs={"dx": dy.dtype},
        config=config,
        multiprocessors=multiprocessors,
        name="input_gradient",
    )
    return results["dx"]
