"""Products of one to four rows with weights of 4 bits on Hopper: ffi/quantized/few_rows.cu.

x is [M, K], the weights [N, K], bias [N], residual and y [M, N]. Two weights make a gated unit in one
pass over x.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfused.runtime import cuda_library
from pallas_kernels import hopper
from pallas_kernels.gemm.quantized import Packed

_MOST_ROWS, _MOST_COLUMNS = 4, 2**19
_UNIT = 16
"""Columns that a warp multiplies at a time, and bytes of an aligned row of scales or zero points."""


@dataclass(frozen=True)
class Config:
    """Names the kernel among the configs of "cuda". It divides its work itself."""


def why_unsupported(
    compute_capability: tuple[int, int] | None, x_shape: tuple[int, int], w: Packed
) -> str | None:
    """Returns None if 16-bit x [M, K] can be multiplied with the weights, else the reason."""
    reason = hopper.why_unfit(compute_capability)
    if reason is not None:
        return reason
    if w.values.dtype != (jnp.int32 if w.codebook is None else jnp.uint8):
        return f"it reads int4 in words and codes of 4 bits, and the weights are {w.values.dtype}"
    rows, features = x_shape
    if rows > _MOST_ROWS:
        return f"it takes at most {_MOST_ROWS} rows, and there are {rows}"
    if features % 32:
        return f"it copies rows of whole multiples of 32 numbers, and they have {features}"
    has_exponents = w.scale.dtype == jnp.uint8
    group = features // w.groups
    if has_exponents and group != 32:
        return f"it takes E8M0 scales of groups of 32, and they have {group}"
    if w.groups > 1 and group not in (32, 64) and group % 128:
        return f"it takes groups of 32, 64 and multiples of 128, and they have {group}"
    grain = _UNIT if has_exponents or w.zero_point is not None else _UNIT // 4
    if not _UNIT <= w.n <= _MOST_COLUMNS or w.n % grain:
        return (
            f"it takes {_UNIT} to {_MOST_COLUMNS} columns, in multiples of {grain} beside these"
            f" scales, and there are {w.n}"
        )
    return cuda_library.why_not_built_from((9, 0), compute_capability)


def product(
    x: jax.Array,
    ws: list[Packed],
    biases: list[jax.Array | None],
    residual: jax.Array | None,
    activation: str | None,
    saves: bool,
    out_dtype: Any,
) -> tuple[jax.Array, jax.Array]:
    """Returns (y, x w + bias); if `saves` is False, the second array has no elements.

    y is activation(x w + bias) + residual, with two weights activation(x w + bias) * (x w2 + bias2).
    """
    cuda_library.register()
    shape = (x.shape[0], ws[0].n)
    call = jax.ffi.ffi_call(
        "jaxfused_few_rows",
        (
            jax.ShapeDtypeStruct(shape, out_dtype),
            jax.ShapeDtypeStruct(shape if saves else (0,), x.dtype),
        ),
    )
    y, preactivation = call(
        x,
        *operands(x, ws, biases, residual),
        activation=activation or "none",
        codebook=np.asarray(ws[0].codebook or (), np.float32),
    )
    return y, preactivation


def operands(
    x: jax.Array, ws: list[Packed], biases: list[jax.Array | None], residual: jax.Array | None
) -> list[jax.Array]:
    """Returns the operands behind x of a handler of one or two weights; a second may be missing."""
    missing: list[Any] = [None] * (2 - len(ws))
    arrays = [array for w in ws for array in w[:3]] + 3 * missing
    return cuda_library.operands(
        x, *arrays, *map(cuda_library.readable, biases), *missing, residual
    )
