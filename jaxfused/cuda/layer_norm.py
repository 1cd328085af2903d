"""layer_norm and rms_norm by the CUDA kernels of ffi/layer_norm_fwd.cu and ffi/layer_norm_bwd.cu.

The kernels take a row in pieces of 16 bytes where the number of features allows it, and value by value
elsewhere, so they refuse no shape for its divisibility.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfused.cuda import library

MAX_FEATURES = 65536
MAX_ROWS = 2**30
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def why_unsupported(
    *,
    compute_capability: tuple[int, int] | None,
    rows: int,
    features: int,
    dtype: Any,
    residual_dtype: Any = None,
    segments: int = 1,
) -> str | None:
    """None where forward and backward can run, else the reason.

    The shapes are those that the kernels see: of one shard, and of all entries that a `vmap` folds into
    the rows, each of which is one of the backward's `segments`.
    """
    reason = library.why_unfit(compute_capability)
    if reason is not None:
        return reason
    if dtype not in DTYPES:
        return f"it takes float32, bfloat16 and float16, and x has dtype {jnp.dtype(dtype)}"
    if residual_dtype is not None and residual_dtype != dtype:
        return (
            f"it takes a residual of x's dtype, and x has {jnp.dtype(dtype)},"
            f" residual {jnp.dtype(residual_dtype)}"
        )
    if not 1 <= features <= MAX_FEATURES:
        return f"it takes 1 to {MAX_FEATURES} features, and x has {features}"
    if rows > MAX_ROWS:
        return f"it takes at most {MAX_ROWS} rows, and x has {rows}"
    if rows > 0 and (segments < 1 or rows % segments):
        return f"segments must divide the {rows} rows evenly, got {segments}"
    return library.why_unavailable()


def forward(
    x: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    residual: jax.Array | None,
    pre_bias: jax.Array | None,
    *,
    save_statistics: bool,
    subtract_mean: bool,
    epsilon: float,
    scale_offset: float,
    pre_activation: str | None,
    activation: str | None,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None, jax.Array | None]:
    """(y, next_residual, mean, rstd) over the rows of x [M, D]; what does not exist is None."""
    library.register()
    rows = x.shape[0]
    save_mean = save_statistics and subtract_mean
    if rows == 0:
        statistic = jnp.zeros_like(x, shape=(0,), dtype=jnp.float32)
        return (
            x,
            residual,
            statistic if save_mean else None,
            statistic if save_statistics else None,
        )
    call = jax.ffi.ffi_call(
        "jaxfused_layer_norm_forward",
        (
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            _result(x.shape, x.dtype, residual is not None),
            _result((rows,), jnp.float32, save_mean),
            _result((rows,), jnp.float32, save_statistics),
        ),
    )
    y, next_residual, mean, rstd = call(
        x,
        *_operands(x, scale, bias, residual, pre_bias),
        **_attributes(subtract_mean, epsilon, scale_offset, pre_activation, activation),
    )
    return (
        y,
        None if residual is None else next_residual,
        mean if save_mean else None,
        rstd if save_statistics else None,
    )


def backward(
    dy: jax.Array,
    dnext_residual: jax.Array | None,
    h: jax.Array,
    mean: jax.Array | None,
    rstd: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    pre_bias: jax.Array | None,
    *,
    segments: int,
    subtract_mean: bool,
    epsilon: float,
    scale_offset: float,
    pre_activation: str | None,
    activation: str | None,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None, jax.Array | None]:
    """(dx, dscale, dbias, dpre_bias) over the rows of h [M, D].

    The last three are float32 [segments, D], one entry for each of `segments` equal runs of rows, and
    None for a parameter that is None. With `dnext_residual`, h is the next residual, and pre_bias is in
    it already.
    """
    library.register()
    parameters = (scale, bias, pre_bias)
    shape = (segments, h.shape[1])
    if h.shape[0] == 0:
        zeros = jnp.zeros_like(h, shape=shape, dtype=jnp.float32)
        return h, *_gradients(parameters, [zeros] * 3)
    call = jax.ffi.ffi_call(
        "jaxfused_layer_norm_backward",
        (
            jax.ShapeDtypeStruct(h.shape, h.dtype),
            *(_result(shape, jnp.float32, parameter is not None) for parameter in parameters),
        ),
    )
    dx, *gradients = call(
        dy,
        *_operands(h, dnext_residual),
        h,
        *_operands(h, mean),
        rstd,
        *_operands(h, *parameters),
        segments=np.int64(segments),
        **_attributes(subtract_mean, epsilon, scale_offset, pre_activation, activation),
    )
    return dx, *_gradients(parameters, gradients)


def _gradients(
    parameters: tuple[jax.Array | None, ...], gradients: list[jax.Array]
) -> tuple[jax.Array | None, jax.Array | None, jax.Array | None]:
    """(dscale, dbias, dpre_bias) of what exists."""
    dscale, dbias, dpre_bias = (
        None if parameter is None else gradient
        for parameter, gradient in zip(parameters, gradients, strict=True)
    )
    return dscale, dbias, dpre_bias


def _operands(x: jax.Array, *arrays: jax.Array | None) -> list[jax.Array]:
    """The arrays as a handler takes them: one that is absent travels without elements.

    It is made like `x`, because in a `jax.shard_map` all operands must vary over the same axes.
    """
    absent = jnp.zeros_like(x, shape=(0,), dtype=jnp.float32)
    return [absent if a is None else a for a in arrays]


def _result(shape: tuple[int, ...], dtype: Any, wanted: bool) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape if wanted else (0,), dtype)


def _attributes(
    subtract_mean: bool,
    epsilon: float,
    scale_offset: float,
    pre_activation: str | None,
    activation: str | None,
) -> dict[str, Any]:
    return dict(
        subtract_mean=np.bool_(subtract_mean),
        epsilon=np.float32(epsilon),
        scale_offset=np.float32(scale_offset),
        pre_activation=pre_activation or "none",
        activation=activation or "none",
    )
