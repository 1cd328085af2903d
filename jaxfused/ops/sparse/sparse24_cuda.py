"""Products with a matrix that keeps two of each four numbers, by ffi/sparse/sparse24_matmul.cu."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxfused.runtime import cuda_library
from pallas_kernels import hopper


def why_unsupported(
    *, compute_capability: tuple[int, int] | None, dtype: Any, depth: int, features: int
) -> str | None:
    """Returns None if the kernel can run, else the reason.

    Args:
      compute_capability: of the GPU, or None where there is none.
      dtype: of x and of the weight.
      depth: columns of x.
      features: of the result.
    """
    if reason := hopper.why_unfit(compute_capability):
        return reason
    if dtype != jnp.bfloat16:
        return f"it takes bfloat16, and x has dtype {jnp.dtype(dtype)}"
    if depth % 16 or features % 8:
        return (
            "it takes a multiple of 16 columns of x and of 8 of the result, and they are"
            f" {depth} and {features}"
        )
    return cuda_library.why_unavailable()


def matmul(x: jax.Array, values: jax.Array, metadata: jax.Array) -> jax.Array:
    """Returns x [M, D] times the matrix of `values` [F, D / 2] and metadata: [M, F]."""
    cuda_library.register()
    out = jax.ShapeDtypeStruct((x.shape[0], values.shape[0]), x.dtype)
    return jax.ffi.ffi_call("jaxfused_sparse24_matmul", out)(x, values, metadata)
