"""linear as implementation "cuda": XLA's product with one CUDA pass around it.

If cuBLASLt has the epilogue, it computes the product and the epilogue at once (ffi/linear/linear.cu).
Otherwise XLA computes the product and ffi/linear/bias_activation.cu the rest, forward and backward.
That pass needs no library but the CUDA driver, and supports every shape.

All functions are over rows: x [M, D], w [D, F], bias [F], residual, y and z [M, F].
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfused.ops.linear import bias_activation_cuda, cublaslt
from jaxfused.runtime import cuda_library

WORKSPACE_BYTES = 32 * 2**20
"""Bytes of workspace that NVIDIA recommends for cuBLASLt on Hopper."""

why_unsupported = bias_activation_cuda.why_unsupported


def forward(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    activation: str | None,
    save_preactivation: bool,
    out_dtype: Any,
    precision: Any,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns (y, z): y = activation(z) + residual and, if `save_preactivation`, z = x w + bias.

    z has x's dtype; the caller passes w in x's dtype too.
    """
    if bias is None and residual is None and activation is None and not save_preactivation:
        return product(x, w, "md,df->mf", out_dtype, precision), None
    if not (save_preactivation and activation is None) and in_one_product(
        dtype=x.dtype,
        w_shape=w.shape,
        activation=activation,
        residual_dtype=None if residual is None else residual.dtype,
        out_dtype=out_dtype,
    ):
        return _cublaslt(x, w, bias, residual, activation=activation, saves=save_preactivation)
    # The kernel adds the residual in the dtype of y that it writes: x's, or else float32.
    dtypes = {jnp.dtype(out_dtype)} | ({residual.dtype} if residual is not None else set())
    dtype = x.dtype if dtypes == {x.dtype} else jnp.dtype(jnp.float32)
    # z is rounded to x's dtype before the activation is applied.
    has_z = save_preactivation or activation is not None
    y, z, _ = bias_activation_cuda.forward(
        product(x, w, "md,df->mf", x.dtype if has_z else dtype, precision),
        None,
        bias,
        None,
        None if residual is None else residual.astype(dtype),
        activation=activation,
        out_dtype=dtype,
        save_preactivation=save_preactivation,
    )
    return y.astype(out_dtype), z


def add_input_gradient(dx: jax.Array, dy: jax.Array, w: jax.Array, *, precision: Any) -> jax.Array:
    """Returns dx [M, D] + dy w^T for dy [M, F] and w [D, F]; dx is the dgrad of another product of x."""
    if in_one_product(
        dtype=dy.dtype,
        w_shape=w.shape,
        activation=None,
        residual_dtype=dx.dtype,
        out_dtype=dx.dtype,
    ):
        return _cublaslt(dy, w, None, dx, transpose_w=True)[0]
    return dx + product(dy, w, "mf,df->md", dx.dtype, precision)


def add_weight_gradient(dw: jax.Array, x: jax.Array, dy: jax.Array) -> jax.Array:
    """Returns dw [D, F] + x^T dy for x [M, D] and dy [M, F], rounded once and written over dw.

    XLA would need a separate pass to add dw, which is itself the result of a product.
    """
    sizes = (*dw.shape, len(x))
    if (
        x.dtype in (jnp.bfloat16, jnp.float16)
        and dw.dtype in (x.dtype, jnp.float32)
        and all(size % 8 == 0 for size in sizes)
        and min(sizes) > 0
        and cublaslt.why_unavailable() is None
    ):
        return _cublaslt(x, dy, None, dw, transpose_x=True, in_place=True)[0]
    return dw + product(x, dy, "md,mf->df", dw.dtype, None)


def activation_gradient(
    dy: jax.Array, z: jax.Array, *, activation: str, sum_rows: bool
) -> tuple[jax.Array, jax.Array | None]:
    """Returns dz [M, F] in z's dtype and, if `sum_rows`, dz summed over rows, float32 [F].

    y = activation(z), and dy is [M, F].
    """
    dz, _, _, sums = bias_activation_cuda.backward(
        dy if dy.dtype == z.dtype else dy.astype(jnp.float32),
        z,
        None,
        activation=activation,
        want_y=False,
        want_sums=sum_rows,
    )
    return dz, None if sums is None else sums[0]


def product(
    a: jax.Array, b: jax.Array, subscripts: str, out_dtype: Any, precision: Any
) -> jax.Array:
    """Returns XLA's product of two matrices of one dtype, accumulated in float32 and rounded once."""
    leaving = a.dtype if jnp.dtype(out_dtype) == a.dtype else jnp.float32
    y = jnp.einsum(subscripts, a, b, precision=precision, preferred_element_type=leaving)
    return y.astype(out_dtype)


def in_one_product(
    *,
    dtype: Any,
    w_shape: tuple[int, ...],
    activation: str | None,
    residual_dtype: Any = None,
    out_dtype: Any = None,
) -> bool:
    """Returns whether cuBLASLt is available and can fuse the epilogue into a product of `dtype`."""
    others = {jnp.dtype(other) for other in (residual_dtype, out_dtype) if other is not None}
    return (
        dtype in (jnp.bfloat16, jnp.float16)
        and others <= {jnp.dtype(dtype)}
        and (activation is None or (activation == "gelu_tanh" and residual_dtype is None))
        and all(
            size * jnp.dtype(dtype).itemsize % cuda_library.VECTOR_BYTES == 0 for size in w_shape
        )
        and cublaslt.why_unavailable() is None
    )


def _cublaslt(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    activation: str | None = None,
    saves: bool = False,
    transpose_w: bool = False,
    transpose_x: bool = False,
    in_place: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns (y [M, F], preactivation [M, F] or None without `saves`) of x [M, D] and w [D, F].

    With `transpose_w`, w is [F, D], and with `transpose_x`, x is [D, M]. With `in_place`, y overwrites
    the residual.
    """
    cuda_library.register()
    result = jax.ShapeDtypeStruct(
        (x.shape[1 if transpose_x else 0], w.shape[0 if transpose_w else 1]),
        residual.dtype if residual is not None else x.dtype,
    )
    absent = jnp.zeros_like(x, shape=(0,))
    call = jax.ffi.ffi_call(
        "jaxfused_linear",
        (
            result,
            result if saves else jax.ShapeDtypeStruct((0,), x.dtype),
            jax.ShapeDtypeStruct((WORKSPACE_BYTES,), jnp.uint8),
        ),
        input_output_aliases={3: 0} if in_place else None,
    )
    y, preactivation, _ = call(
        x,
        w,
        # cuBLASLt accepts no float32 bias with 16-bit operands.
        absent if bias is None else bias.astype(x.dtype),
        absent if residual is None else residual,
        activation=activation or "none",
        transpose_w=np.bool_(transpose_w),
        transpose_x=np.bool_(transpose_x),
    )
    return y, preactivation if saves else None
