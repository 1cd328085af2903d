"""Quantises matrices to float8 and transposes them, by the kernel of ffi/quantized/quantize.cu."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfused.ops.fp8 import fp8_xla
from jaxfused.runtime import cuda_library

_GRAIN = 8
"""Number of values that a thread reads at once; it must divide a matrix's columns."""
_TILE_ROWS = 128
_TILE_COLUMNS = 64
_MOST_COLUMNS = 64 * 65535


def why_unsupported(
    *,
    compute_capability: tuple[int, int] | None,
    dtype: Any,
    widths: Sequence[int],
) -> str | None:
    """Returns None if matrices [M, width] of a dtype can be quantised, else the reason."""
    reason = cuda_library.why_unfit(compute_capability, dtype)
    if reason is not None:
        return reason
    for width in widths:
        if width % _GRAIN:
            return f"it takes a multiple of {_GRAIN} columns, and a matrix has {width}"
    if sum(widths) > _MOST_COLUMNS:
        return f"it takes at most {_MOST_COLUMNS} columns, and there are {sum(widths)}"
    return cuda_library.why_unavailable()


def quantize(
    matrices: Sequence[jax.Array],
    largest: jax.Array,
    *,
    dtype: Any,
    activation: str | None,
    gated: bool,
    straight: bool,
    transposes: bool,
    sums: bool,
    slope_steps: float | None = None,
    observes: bool = False,
    from_end: bool = False,
) -> tuple[jax.Array | None, ...]:
    """Returns values [M, N'], values^T [N, M'], scale [1], sums [N], derivative [M, N'], maxima [tiles].

    N' and M' are N and M rounded up to a multiple of `fp8_xla.PITCH`; zeros pad the values. Results that
    the caller does not ask for are None.

    Args:
      matrices: up to three [M, N_i], which are concatenated in the results; or two [M, N] if `gated`.
      largest: magnitudes [P], whose maximum becomes the largest number of `dtype`.
      dtype: dtype of the results, float8_e4m3fn or float8_e5m2.
      activation: an activation that is applied to the matrices first.
      gated: whether the activation of the first matrix is multiplied by the second.
      straight: whether to return the values.
      transposes: whether to return their transpose.
      sums: whether to return the matrices' sums over their rows, in float32.
      slope_steps: the integer that represents 1 in the activation's derivative, returned as int8; None
        for no derivative. It needs one matrix, and no sums.
      observes: whether to return each tile's largest magnitude before scaling.
      from_end: whether the last rows are read first, which the L2 may still hold.
    """
    cuda_library.register()
    rows = matrices[0].shape[0]
    columns = matrices[0].shape[1] if gated else sum(matrix.shape[1] for matrix in matrices)

    def wanted(is_wanted: bool, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Any:
        return jax.ShapeDtypeStruct(shape if is_wanted else (0,), dtype)

    types = (
        wanted(straight, (rows, fp8_xla.padded(columns)), dtype),
        wanted(transposes, (columns, fp8_xla.padded(rows)), dtype),
        wanted(True, (1,)),
        wanted(sums, (-(-rows // _TILE_ROWS), columns)),
        wanted(observes, (tiles(rows, columns),)),
        wanted(slope_steps is not None, (rows, fp8_xla.padded(columns)), jnp.int8),
    )
    call = jax.ffi.ffi_call("jaxfused_quantize", types)
    values, transposed, scale, parts, found, slope = call(
        *_three(matrices),
        largest,
        activation=activation or "none",
        gated=gated,
        from_end=from_end,
        slope_steps=np.float32(slope_steps or 0.0),
    )
    return (
        values if straight else None,
        transposed if transposes else None,
        scale,
        jnp.sum(parts, axis=0) if sums else None,
        slope if slope_steps is not None else None,
        found if observes else None,
    )


def tiles(rows: int, columns: int) -> int:
    """Returns the tiles of a matrix; with `observes`, `quantize` returns the maximum of each."""
    return -(-rows // _TILE_ROWS) * -(-columns // _TILE_COLUMNS)


def largest(
    arrays: Sequence[jax.Array], blocks: int, activation: str | None = None, least: float = 0.0
) -> jax.Array:
    """Returns the largest magnitude that each block reads, [blocks], of up to three arrays of one dtype.

    With an activation, the results bound its magnitude at arguments up to the arrays' values. The
    activation must increase above 0, and never be below -`least`.
    """
    cuda_library.register()
    call = jax.ffi.ffi_call("jaxfused_largest", jax.ShapeDtypeStruct((blocks,), jnp.float32))
    return call(*_three(arrays), activation=activation or "none", least=np.float32(least))


def _three(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns three arrays, with empty ones in place of missing ones."""
    return [*arrays, *[jnp.zeros_like(arrays[0], shape=(0,))] * (3 - len(arrays))]
