"""Products of few rows with weights of 4-bit codes: ffi/quantized/codes_matmul.cu.

All functions are over rows: x [M, K], codes [N, K / 2], bias [N], residual and y [M, N].
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfused.runtime import cuda_library
from pallas_kernels.gemm.quantized import Packed

MAX_ROWS = 16
"""Largest number of rows of x."""
_RUN = 32
"""Features (elements along K) that a warp multiplies by one scale."""
_UNIT = 16
"""Columns that a warp multiplies at a time."""
_MAX_UNITS = 9
_UNITS_OF_A_BLOCK = 1
"""Units whose time a block takes in addition: it writes its table, reads x and adds up its sums."""
_LEAST = (9, 0)
"""Compute capability of the first GPU whose blocks have the shared memory."""


@dataclass(frozen=True)
class Config:
    """Columns of a block, of which an SM runs one."""

    units: int
    """Number of units of 16 columns, 1 to 9."""


def why_unsupported(
    *,
    compute_capability: tuple[int, int] | None,
    x_dtype: Any,
    out_dtype: Any,
    residual_dtype: Any,
    x_shape: tuple[int, int],
    w: Packed,
) -> str | None:
    """Returns None if x [M, K] can be multiplied with the codes, else the reason."""
    reason = cuda_library.why_unfit(compute_capability)
    if reason is not None:
        return reason
    if compute_capability is not None and compute_capability < _LEAST:
        major, minor = compute_capability
        return f"it reads codes from compute capability 9.0 on, and this GPU has {major}.{minor}"
    if x_dtype != jnp.bfloat16:
        return f"it multiplies codes by bfloat16, and x is {jnp.dtype(x_dtype)}"
    for name, dtype in (("the result", out_dtype), ("residual", residual_dtype)):
        if dtype is not None and dtype not in cuda_library.DTYPES:
            return f"it takes float32, bfloat16 and float16, and {name} is {jnp.dtype(dtype)}"
    rows, features = x_shape
    if rows > MAX_ROWS:
        return f"it takes codes with at most {MAX_ROWS} rows, and there are {rows}"
    if features % _RUN or w.n % _UNIT:
        return (
            f"it takes codes of multiples of {_RUN} features and {_UNIT} columns, and there are"
            f" {features} and {w.n}"
        )
    runs = features // w.groups // _RUN
    if w.groups > 1 and (features // w.groups % _RUN or runs & (runs - 1)):
        return (
            f"it takes groups of {_RUN} features times a power of two, and they have"
            f" {features // w.groups}"
        )
    return cuda_library.why_not_built_from(_LEAST, compute_capability)


def candidates(w: Packed, *, multiprocessors: int) -> Sequence[Config]:
    """Returns the configs for a product, predicted fastest first: those of the fewest columns an SM."""
    units = -(-w.n // _UNIT)

    def of_an_sm(config: Config) -> int:
        blocks = -(-units // config.units)
        return -(-blocks // multiprocessors) * (config.units + _UNITS_OF_A_BLOCK)

    return sorted(map(Config, range(_MAX_UNITS, 0, -1)), key=of_an_sm)


def forward(
    x: jax.Array,
    w: Packed,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    activation: str | None,
    save_preactivation: bool,
    out_dtype: Any,
    config: Config,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns (activation(x w + bias) + residual, x w + bias in x's dtype if it is to be saved)."""
    cuda_library.register()
    shape = (x.shape[0], w.n)
    saved = jax.ShapeDtypeStruct(shape if save_preactivation else (0,), x.dtype)
    call = jax.ffi.ffi_call(
        "jaxfused_codes_matmul", (jax.ShapeDtypeStruct(shape, out_dtype), saved)
    )
    y, preactivation = call(
        x,
        w.values,
        w.scale,
        *cuda_library.operands(x, cuda_library.readable(bias), residual),
        activation=activation or "none",
        codebook=np.asarray(w.codebook, np.float32),
        units=np.int64(config.units),
    )
    return y, preactivation if save_preactivation else None
