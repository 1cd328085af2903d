"""Matrices in float8 and their transposes, by the kernel of ffi/quantize.cu."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxfused.cuda import library

GRAIN = 16
"""What rows and columns must be multiples of: rows of a result then begin at multiples of 16 bytes."""
_TILE = (128, 64)
_MOST_COLUMNS = 64 * 65535


def why_unsupported(
    *,
    compute_capability: tuple[int, int] | None,
    dtype: Any,
    rows: int,
    widths: Sequence[int],
    transposes: bool,
) -> str | None:
    """Returns None where matrices [rows, width] of a dtype can be quantised, else the reason."""
    reason = library.why_unfit(compute_capability) or library.why_dtype_unfit(dtype)
    if reason is not None:
        return reason
    for width in widths:
        if width % GRAIN:
            return f"it takes a multiple of {GRAIN} columns, and a matrix has {width}"
    if transposes and rows % GRAIN:
        return f"it transposes a multiple of {GRAIN} rows, and there are {rows}"
    if sum(widths) > _MOST_COLUMNS:
        return f"it takes at most {_MOST_COLUMNS} columns, and there are {sum(widths)}"
    return library.why_unavailable()


def quantize(
    matrices: Sequence[jax.Array],
    inverse: jax.Array,
    *,
    dtype: Any,
    activation: str | None,
    gated: bool,
    straight: bool,
    transposes: bool,
    maximises: bool,
) -> tuple[jax.Array | None, jax.Array | None, jax.Array | None]:
    """(values [M, N], values^T [N, M], largest magnitudes): each None unless it is wanted.

    Args:
      matrices: up to three [M, N_i], which lie side by side in the results; or with `gated` two [M, N],
        of which the activation of the first is multiplied by the second.
      inverse: [1], float32, by which the values are multiplied.
      dtype: of the results, float8_e4m3fn or float8_e5m2.
      activation: of the matrices.
      gated: as above.
      straight: whether the values as they lie are wanted.
      transposes: whether their transpose is.
      maximises: whether the magnitudes are, of parts of the values before they are scaled.
    """
    library.register()
    rows = matrices[0].shape[0]
    columns = matrices[0].shape[1] if gated else sum(matrix.shape[1] for matrix in matrices)
    blocks = -(-rows // _TILE[0]) * -(-columns // _TILE[1])
    wanted = (straight, transposes, maximises)
    types = (
        jax.ShapeDtypeStruct((rows, columns) if straight else (0,), dtype),
        jax.ShapeDtypeStruct((columns, rows) if transposes else (0,), dtype),
        jax.ShapeDtypeStruct((blocks,) if maximises else (0,), jnp.float32),
    )
    absent = jnp.zeros_like(matrices[0], shape=(0,))
    results = jax.ffi.ffi_call("jaxfused_quantize", types)(
        *matrices,
        *[absent] * (3 - len(matrices)),
        inverse,
        activation=activation or "none",
        gated=gated,
    )
    values, transposed, maxima = (
        result if want else None for result, want in zip(results, wanted, strict=True)
    )
    return values, transposed, maxima
