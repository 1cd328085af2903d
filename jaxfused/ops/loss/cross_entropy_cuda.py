"""softmax_cross_entropy by the CUDA kernels of ffi/loss/cross_entropy.cu.

All functions take rows: logits [N, V], and either classes int32 [N] or soft labels [N, V] of any float
dtype that kernels support. `statistics`, float32 [N, 5], are the fields of Statistics in
ops/loss/cross_entropy_xla.py.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfused.runtime import cuda_library

MAX_SIZE = 2**30
"""Largest size of either axis of the logits; kernels index elements in 64 bits."""
STATISTICS = 5


@dataclass(frozen=True)
class ForwardConfig:
    """Launch parameters of the forward that writes a gradient."""

    cluster: int = 0
    """CTAs that share a row in shared memory: 1, 2, 4 or 8; 0 if the kernel chooses, -1 to read rows
    twice."""
    threads: int = 512
    """Largest number of threads of a block."""

    def __post_init__(self) -> None:
        if self.cluster not in (-1, 0, 1, 2, 4, 8):
            raise ValueError(
                f"ForwardConfig: cluster must be -1, 0, 1, 2, 4 or 8, got {self.cluster}"
            )
        if not 64 <= self.threads <= 512 or self.threads % 32:
            raise ValueError(
                f"ForwardConfig: threads must be a multiple of 32 from 64 to 512, got {self.threads}"
            )


def why_unsupported(
    *,
    compute_capability: tuple[int, int] | None,
    rows: int,
    features: int,
    dtype: Any,
    soft_dtype: Any = None,
) -> str | None:
    """Returns None if forward and backward can run, else the reason."""
    if reason := cuda_library.why_unfit(compute_capability, dtype, whose="logits have"):
        return reason
    if soft_dtype is not None:
        reason = cuda_library.why_dtype_unfit(soft_dtype, "labels have")
        if reason is not None:
            return reason
    if max(rows, features) > MAX_SIZE:
        return (
            f"it takes at most {MAX_SIZE} rows and classes, and logits have {rows} and {features}"
        )
    return cuda_library.why_unavailable()


def forward(
    logits: jax.Array,
    classes: jax.Array | None,
    soft: jax.Array | None,
    coefficients: jax.Array | None,
    *,
    label_smoothing: float,
    z_loss: float,
    soft_cap: float | None,
    in_place: bool = False,
    config: ForwardConfig | None = None,
) -> tuple[jax.Array | None, jax.Array]:
    """Returns (dlogits, statistics), with dlogits the gradient of `sum(coefficients * losses)`.

    Without `coefficients`, float32 [N], there is no gradient. With `in_place` it overwrites the logits.
    """
    cuda_library.register()
    config = config or ForwardConfig()
    rows = logits.shape[0]
    wanted = coefficients is not None
    call = jax.ffi.ffi_call(
        "jaxfused_cross_entropy_forward",
        (
            jax.ShapeDtypeStruct(logits.shape if wanted else (0,), logits.dtype),
            jax.ShapeDtypeStruct((rows, STATISTICS), jnp.float32),
        ),
        input_output_aliases={0: 0} if in_place and wanted else None,
    )
    dlogits, statistics = call(
        logits,
        *_operands(logits, classes, soft, coefficients),
        label_smoothing=np.float32(label_smoothing),
        z_loss=np.float32(z_loss),
        soft_cap=np.float32(soft_cap or 0.0),
        cluster=np.int64(config.cluster),
        threads=np.int64(config.threads),
    )
    return dlogits if wanted else None, statistics


def backward(
    logits: jax.Array,
    classes: jax.Array | None,
    soft: jax.Array | None,
    statistics: jax.Array,
    pulls: jax.Array,
    *,
    soft_cap: float | None,
    in_place: bool = False,
) -> jax.Array:
    """Returns dlogits from float32 `pulls` [N, 3], each row's coefficients (cross_entropy_xla.Pulls)."""
    cuda_library.register()
    call = jax.ffi.ffi_call(
        "jaxfused_cross_entropy_backward",
        jax.ShapeDtypeStruct(logits.shape, logits.dtype),
        input_output_aliases={0: 0} if in_place else None,
    )
    return call(
        logits,
        *_operands(logits, classes, soft),
        statistics,
        pulls,
        soft_cap=np.float32(soft_cap or 0.0),
    )


def scale_rows(x: jax.Array, factors: jax.Array) -> jax.Array:
    """Multiplies rows of x [N, V] by float32 factors [N] in place; if all are 1, x is not read."""
    cuda_library.register()
    call = jax.ffi.ffi_call(
        "jaxfused_scale_rows",
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        input_output_aliases={0: 0},
    )
    return call(x, factors)


_operands = functools.partial(cuda_library.operands, absent_dtype=jnp.float32)
