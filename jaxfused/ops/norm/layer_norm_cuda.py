"""layer_norm and rms_norm by the CUDA kernels of ffi/norm/layer_norm_*.cu.

Forward and backward each have a kernel for few rows, limited by memory latency, and one for many rows,
where a ring buffer in shared memory feeds teams of threads (a team computes one row at a time). Rows
that do not start at multiples of 16 bytes are read in tiles of consecutive rows; long ones, in the
backward, as the aligned 16-byte vectors around them.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfused.runtime import cuda_library

MAX_FEATURES = 65536
MAX_ROWS = 2**30


@dataclass(frozen=True)
class ForwardConfig:
    """Launch parameters of the forward."""

    few_rows: bool = False
    """True for the kernel for few rows, which holds rows of up to 4,096 features, or 8,192 without
    residual, pre_bias and activation.
    """
    threads: int = 128
    """Most threads of a thread block. Fewer warps exchange the sums of a row in less time."""
    run: int = -1
    """Consecutive rows of each team of threads; 0 for alternate rows, -1 if the kernel chooses.
    """

    def __post_init__(self) -> None:
        if not 32 <= self.threads <= 128 or self.threads % 32:
            raise ValueError(
                f"ForwardConfig: threads must be 32, 64, 96 or 128, got {self.threads}"
            )
        if self.run < -1:
            raise ValueError(f"ForwardConfig: run must be -1 or more, got {self.run}")


@dataclass(frozen=True)
class BackwardConfig:
    """Launch parameters of the backward."""

    few_rows: bool = False
    """True for the kernel for few rows, which needs no second launch. It has no gradient of pre_bias and
    takes up to 4,096 features. The other kernel is followed by one that adds up the blocks' sums over
    rows."""
    threads: int = 512
    """Largest number of threads of a block."""
    blocks: int = 1
    """Most thread blocks per SM. Each block writes its own partial sums of the parameters' gradients."""

    def __post_init__(self) -> None:
        if not 32 <= self.threads <= 512 or self.threads % 32:
            raise ValueError(
                f"BackwardConfig: threads must be a multiple of 32 up to 512, got {self.threads}"
            )
        if not 1 <= self.blocks <= 16:
            raise ValueError(f"BackwardConfig: blocks must be 1 to 16, got {self.blocks}")


_FEW_BYTES_FORWARD = 2**19
_FEW_BYTES_PLAIN = 2**21
_FEW_BYTES_BACKWARD = 4 * 2**20
"""Bytes up to which the kernel for few rows is tried first: those read by a forward, by a forward
without residual and with two vectors at most, and of one matrix of a backward, which is then one
launch, not two.
"""
FEW_ROWS_FEATURES = 4096
_COLUMN_ROWS = 8192
_FEW_ODD_ROWS = 3072
"""Largest number of rows, aligned and misaligned, for which the backward for few rows is tried first.
With more rows, its sums over rows take longer than the other kernel's."""


def forward_candidates(
    rows: int, features: int, itemsize: int, matrices: int, vectors: int
) -> list[ForwardConfig]:
    """Returns configs for [rows, features], the best guess first.

    `matrices` arrays of that shape are read (2 with a residual) and `vectors` of [features].
    """
    if features * itemsize % 16:
        # The kernel for rows that do not start at multiples of 16 bytes has no launch parameters.
        return [ForwardConfig()]
    is_plain = matrices == 1 and vectors <= 2
    is_held = features <= (2 if is_plain else 1) * FEW_ROWS_FEATURES
    few_rows = [ForwardConfig(few_rows=True)] if is_held else []
    ring = [ForwardConfig(), ForwardConfig(threads=64)]
    if 2 * matrices * rows * features * itemsize > 50 * 10**6:
        # For arrays larger than the L2, teams get alternate rows (0) or runs of consecutive rows.
        ring += [ForwardConfig(run=run) for run in (0, 1, 2, 4, 8) if run <= rows]
    most = _FEW_BYTES_PLAIN if is_plain else _FEW_BYTES_FORWARD
    first = matrices * rows * features * itemsize <= most
    return [*few_rows, *ring] if first else [*ring, *few_rows]


def backward_candidates(
    rows: int, features: int, itemsize: int, matrices: int, vectors: int
) -> list[BackwardConfig]:
    """Returns configs for [rows, features], the best guess first.

    `matrices` arrays of that shape are read (3 with a residual) and `vectors` of [features].
    """
    del matrices, vectors
    ring = [BackwardConfig()]
    if features <= 512:
        ring += [BackwardConfig(blocks=2), BackwardConfig(threads=256, blocks=3)]
    if features > FEW_ROWS_FEATURES:
        return ring
    few_rows = BackwardConfig(few_rows=True)
    most = _COLUMN_ROWS if features * itemsize % 16 == 0 else _FEW_ODD_ROWS
    first = rows * features * itemsize <= _FEW_BYTES_BACKWARD and rows <= most
    return [few_rows, *ring] if first else [*ring, few_rows]


def why_unsupported(
    *,
    compute_capability: tuple[int, int] | None,
    rows: int,
    features: int,
    dtype: Any,
    residual_dtype: Any = None,
    segments: int = 1,
    round_before_scale: bool = False,
) -> str | None:
    """Returns None if forward and backward can run on x [rows, features], else the reason.

    The rows are those of one shard, and of all entries of a `jax.vmap`. Each entry is one of the
    backward's `segments`.
    """
    if reason := cuda_library.why_unfit(compute_capability, dtype, residual_dtype):
        return reason
    if round_before_scale:
        return "it rounds only the result, and round_before_scale also rounds before the scale"
    if not 1 <= features <= MAX_FEATURES:
        return f"it takes 1 to {MAX_FEATURES} features, and x has {features}"
    if rows > MAX_ROWS:
        return f"it takes at most {MAX_ROWS} rows, and x has {rows}"
    if rows > 0 and (segments < 1 or rows % segments):
        return f"segments must divide the {rows} rows evenly, got {segments}"
    return cuda_library.why_unavailable()


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
    config: ForwardConfig | None = None,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None, jax.Array | None]:
    """Returns (y, next_residual, mean, rstd) for x [rows, D], with None for absent results."""
    cuda_library.register()
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
    parameters = (scale, bias, pre_bias)
    config = (
        config
        or forward_candidates(
            rows, x.shape[1], x.dtype.itemsize, 1 + (residual is not None), _present(*parameters)
        )[0]
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
        few_rows=np.bool_(config.few_rows),
        threads=np.int64(config.threads),
        run=np.int64(config.run),
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
    config: BackwardConfig | None = None,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None, jax.Array | None]:
    """Returns (dx, dscale, dbias, dpre_bias) from dy and h, the norm's input, [rows, D].

    The last three are float32 [segments, D], with one entry for each of `segments` equal runs of rows,
    or None for a parameter that is None. With `dnext_residual`, h is the next residual, which includes
    pre_bias.
    """
    cuda_library.register()
    parameters = (scale, bias, pre_bias)
    shape = (segments, h.shape[1])
    if h.shape[0] == 0:
        zeros = jnp.zeros_like(h, shape=shape, dtype=jnp.float32)
        return h, *_gradients(parameters, [zeros] * 3)
    matrices = 2 + (dnext_residual is not None)
    config = (
        config
        or backward_candidates(
            h.shape[0], h.shape[1], h.dtype.itemsize, matrices, _present(*parameters)
        )[0]
    )
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
        few_rows=np.bool_(config.few_rows),
        threads=np.int64(config.threads),
        blocks=np.int64(config.blocks),
    )
    return dx, *_gradients(parameters, gradients)


def _gradients(
    parameters: tuple[jax.Array | None, ...], gradients: list[jax.Array]
) -> tuple[jax.Array | None, jax.Array | None, jax.Array | None]:
    """Returns (dscale, dbias, dpre_bias), with None for absent parameters."""
    dscale, dbias, dpre_bias = (
        None if parameter is None else gradient
        for parameter, gradient in zip(parameters, gradients, strict=True)
    )
    return dscale, dbias, dpre_bias


def _present(*arrays: jax.Array | None) -> int:
    return sum(array is not None for array in arrays)


_operands = functools.partial(cuda_library.operands, absent_dtype=jnp.float32)


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
