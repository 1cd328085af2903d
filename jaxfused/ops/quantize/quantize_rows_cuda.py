"""Rows quantised by their largest magnitude, by the kernel of ffi/quantized/quantize_rows.cu."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxfused.runtime import cuda_library

_MOST = 2**30


def why_unsupported(
    *, compute_capability: tuple[int, int] | None, rows: int, features: int, dtype: Any
) -> str | None:
    """Returns None if x [rows, features] of a dtype can be quantised, else the reason."""
    reason = cuda_library.why_unfit(compute_capability, dtype)
    if reason is not None:
        return reason
    if max(rows, features) > _MOST:
        return f"it takes at most {_MOST} rows and features, and x has {rows} and {features}"
    return cuda_library.why_unavailable()


def forward(x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Returns (values [M, D] of int8 or float8, scale [M]) of x [M, D]."""
    cuda_library.register()
    call = jax.ffi.ffi_call(
        "jaxfused_quantize_rows",
        (
            jax.ShapeDtypeStruct(x.shape, dtype),
            jax.ShapeDtypeStruct(x.shape[:1], jnp.float32),
        ),
    )
    values, scale = call(x)
    return values, scale
