"""Bias and activation around a matrix product of XLA, by the kernels of bias_activation.cu.

A plain activation is applied to one product. A gated activation is also multiplied by a second product,
`up`.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxfused.runtime import cuda_library


def why_unsupported(*, compute_capability: tuple[int, int] | None, dtype: Any) -> str | None:
    """Returns None if forward and backward can run, else the reason."""
    if reason := cuda_library.why_unfit(compute_capability, dtype):
        return reason
    return cuda_library.why_unavailable()


def forward(
    product: jax.Array,
    up: jax.Array | None,
    bias: jax.Array | None,
    up_bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    activation: str | None,
    out_dtype: Any,
    save_preactivation: bool,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Returns (y, z, up_z) for rows [M, F]: y = activation(z) [* up_z] [+ residual].

    z = product + bias and up_z = up + up_bias are returned if `save_preactivation`, in the product's
    dtype. The activation is applied to these rounded values. `out_dtype` is the product's dtype or
    float32; the residual has the same dtype.
    """
    cuda_library.register()
    # Without a bias, z is the product itself, which the kernel need not write again.
    writes_z = save_preactivation and (bias is not None or up_bias is not None)
    call = jax.ffi.ffi_call(
        "jaxfused_bias_activation",
        (
            jax.ShapeDtypeStruct(product.shape, out_dtype),
            *(_result(z, product.dtype, writes_z) for z in (product, up)),
        ),
    )
    y, z, up_z = call(
        product,
        *cuda_library.operands(
            product, up, cuda_library.readable(bias), cuda_library.readable(up_bias), residual
        ),
        activation=activation or "none",
    )
    if not save_preactivation:
        return y, None, None
    return (y, z, None if up is None else up_z) if writes_z else (y, product, up)


def backward(
    dy: jax.Array,
    z: jax.Array,
    up_z: jax.Array | None,
    *,
    activation: str | None,
    want_y: bool,
    want_sums: bool,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None, jax.Array | None]:
    """Returns (dz, dup_z, y, sums) for `forward` without a residual; the first three have z's dtype.

    `y` is the result of the forward, if `want_y`. With `want_sums`, `sums` are the sums of dz and dup_z
    over the rows, which are the gradients of the biases, in float32 [1 or 2, F]. dy has z's dtype or
    float32.
    """
    cuda_library.register()
    rows, features = z.shape
    partials = (1 if up_z is None else 2, _blocks(rows, features), features)
    call = jax.ffi.ffi_call(
        "jaxfused_bias_activation_backward",
        (
            _result(z, z.dtype, True),
            _result(up_z, z.dtype, True),
            _result(z, z.dtype, want_y),
            jax.ShapeDtypeStruct(partials if want_sums else (0,), jnp.float32),
        ),
    )
    dz, dup_z, y, parts = call(
        dy, z, *cuda_library.operands(z, up_z), activation=activation or "none"
    )
    return (
        dz,
        None if up_z is None else dup_z,
        y if want_y else None,
        jnp.sum(parts, axis=1) if want_sums else None,
    )


def _blocks(rows: int, features: int) -> int:
    """Returns the number of partial sums over rows of each column of dz [rows, features].

    A partial sum covers 128 rows, or 64 or 32 if there would be too few thread blocks to fill a GPU.
    """
    columns = -(-features // _BLOCK_COLUMNS)
    rows_each = next(n for n in (128, 64, 32) if n == 32 or -(-rows // n) * columns >= _MANY_BLOCKS)
    return max(1, min(-(-rows // rows_each), 4096))


_BLOCK_COLUMNS = 256
"""Columns of z [M, F] that a thread block of bias_activation.cu covers if z has 16 bits."""
_MANY_BLOCKS = 512


def _result(like: jax.Array | None, dtype: Any, wanted: bool) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(like.shape if wanted and like is not None else (0,), dtype)
