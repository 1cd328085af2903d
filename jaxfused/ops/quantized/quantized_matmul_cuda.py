"""Products with quantised weights: ffi/quantized/quantized_matmul.cu, and w8a8_matmul.cu if x is too.

They are for GPUs from Turing on that have no Pallas kernel, and read the same layout "columns". All
functions are over rows: x [M, K], weights [N, K], bias [N], residual and y [M, N].
"""

import itertools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfused.ops.quantized import few_rows_cuda
from jaxfused.runtime import cuda_library
from pallas_kernels.gemm.quantized import Packed

STEP = 128
"""Features (elements along K) of the weights that a warp copies at a time."""
_WARPS = 8
_WARP_COLUMNS = 16
_TILE_ROWS = 8
_MOST_TILES = 65535
_MOST_ROWS = 2**30
_PARTS = (1, 2, 4, 8, 16)
_FEW_ROWS = 64
"""Number of rows of x up to which K is split among blocks (split-K). More rows make enough blocks."""
_BOTH_TILE = 128
"""Rows and columns of a CTA's tile of the W8A8 kernel, and features of a K step."""
_FLOAT8 = (jnp.float8_e4m3fn, jnp.float8_e5m2)


@dataclass(frozen=True)
class Config:
    """Split of a product over warps and blocks."""

    row_tiles: int
    """Number of a block's tiles, of 8 rows of x each: 1, 2, 4 or 8."""
    sum_warps: int
    """How many of a block's 8 warps split the summed axis K of a column. The other warps compute other
    columns."""
    parts: int
    """Number of blocks that split the summed axis K of a column (split-K)."""


# --- supported operands ---------------------------------------------------------------------------


def why_unsupported(
    *,
    compute_capability: tuple[int, int] | None,
    x_dtype: Any,
    out_dtype: Any,
    residual_dtype: Any,
    x_shape: tuple[int, int],
    w: Packed,
) -> str | None:
    """Returns None if float x [M, K] can be multiplied with quantised weights, else the reason."""
    reason = cuda_library.why_unfit(compute_capability)
    if reason is not None:
        return reason
    if x_dtype not in (jnp.bfloat16, jnp.float16):
        return f"it multiplies x of bfloat16 and float16, and x is {jnp.dtype(x_dtype)}"
    if x_dtype == jnp.bfloat16 and compute_capability is not None and compute_capability < (8, 0):
        return _needs("bfloat16", (8, 0), compute_capability)
    unfit = _why_results_unfit(out_dtype, residual_dtype)
    if unfit is None and w.codebook is not None:
        return few_rows_cuda.why_unsupported(compute_capability, x_shape, w)
    rows, features = x_shape
    group = features // w.groups if w.groups > 1 else STEP
    if group not in (32, 64) and group % STEP:
        return f"it takes groups of 32, 64 and multiples of {STEP}, and they have {group}"
    return (
        unfit
        or _why_shapes_unfit(rows, features, w.n, w.values.dtype, _WARP_COLUMNS)
        or cuda_library.why_not_built_from(
            (8, 0) if x_dtype == jnp.bfloat16 else (7, 5), compute_capability
        )
    )


def why_both_unsupported(
    *,
    compute_capability: tuple[int, int] | None,
    out_dtype: Any,
    residual_dtype: Any,
    x: jax.Array,
    x_scale: jax.Array,
    w: Packed,
) -> str | None:
    """Returns None if quantised x [M, K] can be multiplied with the weights, else the reason."""
    reason = cuda_library.why_unfit(compute_capability)
    if reason is not None:
        return reason
    if x.dtype != w.values.dtype or x.dtype not in (jnp.int8, *_FLOAT8):
        weights = "int4" if w.values.dtype == jnp.int32 else w.values.dtype
        return (
            "it multiplies int8 with int8 and float8 with the same float8, and these are"
            f" {x.dtype} and {weights}"
        )
    if x.dtype in _FLOAT8 and compute_capability is not None and compute_capability < (8, 9):
        return _needs("float8", (8, 9), compute_capability)
    if w.zero_point is not None:
        return "it takes symmetric weights, and they have zero points"
    features = x.shape[1]
    groups = {x_scale.shape[1], w.groups}
    if groups != {1} and groups != {features / _BOTH_TILE}:
        return (
            f"it takes one scale a row and a column, or one for each {_BOTH_TILE} features of both, and"
            f" these have {x_scale.shape[1]} and {w.groups} along {features}"
        )
    return (
        _why_results_unfit(out_dtype, residual_dtype)
        or _why_shapes_unfit(x.shape[0], features, w.n, x.dtype, _BOTH_TILE)
        or cuda_library.why_not_built_from(
            (8, 9) if x.dtype in _FLOAT8 else (7, 5), compute_capability
        )
    )


def _needs(what: str, least: tuple[int, int], has: tuple[int, int]) -> str:
    return (
        f"it multiplies {what} from compute capability {least[0]}.{least[1]} on, and this GPU has"
        f" {has[0]}.{has[1]}"
    )


def _why_results_unfit(out_dtype: Any, residual_dtype: Any) -> str | None:
    for name, dtype in (("the result", out_dtype), ("residual", residual_dtype)):
        if dtype is not None and dtype not in cuda_library.DTYPES:
            return f"it takes float32, bfloat16 and float16, and {name} is {jnp.dtype(dtype)}"
    return None


def _why_shapes_unfit(
    rows: int, features: int, columns: int, dtype: Any, tile_columns: int
) -> str | None:
    if dtype != jnp.int32 and features % 16:
        return f"it copies rows of whole multiples of 16 bytes, and they have {features}"
    if columns > _MOST_TILES * tile_columns or max(rows, features) > _MOST_ROWS:
        return (
            f"it takes at most {_MOST_TILES * tile_columns} columns, and {_MOST_ROWS} rows and"
            f" features; there are {columns}, {rows} and {features}"
        )
    return None


# --- configs --------------------------------------------------------------------------------------

_LITTLE_MEMORY_ROWS, _MEMORY_ROWS = 32, 64
"""Largest product of x's rows and `sum_warps` for which two pipeline stages fit into a block's shared
memory, on Turing and on later GPUs."""
_BUSY_BLOCKS = 1.5
"""Blocks per SM needed to convert weights as fast as memory delivers them."""
_LAUNCH_BYTES = 8e6
"""Bytes that a GPU reads while split-K's second kernel starts. A block starts in half that time."""


def candidates(
    x_shape: tuple[int, int],
    w: Packed,
    *,
    products: int,
    compute_capability: tuple[int, int] | None,
    multiprocessors: int,
) -> list[Config]:
    """Returns the configs for a product, predicted fastest first."""
    rows, features = x_shape
    is_turing = compute_capability is not None and compute_capability < (8, 0)
    most_rows = _LITTLE_MEMORY_ROWS if is_turing else _MEMORY_ROWS
    row_tiles = next(
        (tiles for tiles in (1, 2, 4) if rows <= tiles * _TILE_ROWS), most_rows // _TILE_ROWS
    )
    steps = -(-features // STEP)
    fitting = [
        Config(row_tiles, sum_warps, parts)
        for sum_warps, parts in itertools.product((1, 2, 4, 8), _PARTS)
        if sum_warps * row_tiles * _TILE_ROWS <= most_rows
        and sum_warps <= min(steps, _WARPS // products)
        and (parts == 1 or (rows <= _FEW_ROWS and 2 * parts * sum_warps <= steps))
    ]
    row_bytes = w.values.shape[1] * w.values.dtype.itemsize
    resident = 1 if row_tiles == 8 else 2
    slots = multiprocessors * resident

    def cost(config: Config) -> float:
        """Returns a config's time in bytes read from memory; bytes read from the L2 count half."""
        columns = _WARPS // config.sum_warps * _WARP_COLUMNS // products
        row_blocks = -(-rows // (row_tiles * _TILE_ROWS))
        blocks = -(-w.n // columns) * row_blocks
        all_blocks = blocks * config.parts
        waves = -(-all_blocks // slots)
        busy = min(_BUSY_BLOCKS, resident) * multiprocessors
        idle = max(busy / all_blocks, waves * slots / all_blocks if waves > 1 else 1.0)
        weights = products * w.n * row_bytes * row_blocks
        x = 2 * blocks * min(rows, row_tiles * _TILE_ROWS) * features
        starts = _LAUNCH_BYTES * (waves / 2 + (config.parts > 1))
        sums = 8 * products * rows * w.n * config.parts if config.parts > 1 else 0
        return weights * idle + starts + (x + sums) / 2

    return sorted(fitting, key=cost)


# --- launches -------------------------------------------------------------------------------------


def forward(
    x: jax.Array,
    w: Packed,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    activation: str | None,
    save_preactivation: bool,
    out_dtype: Any,
    config: Config | few_rows_cuda.Config,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns (activation(x w + bias) + residual, x w + bias in x's dtype if it is to be saved)."""
    y, z = _product(x, [w], [bias], residual, activation, save_preactivation, out_dtype, config)
    return y, z if save_preactivation else None


def gated_forward(
    x: jax.Array,
    gate: Packed,
    up: Packed,
    b_gate: jax.Array | None,
    b_up: jax.Array | None,
    *,
    activation: str | None,
    config: Config | few_rows_cuda.Config,
) -> jax.Array:
    """Returns activation(x gate + b_gate) * (x up + b_up) in x's dtype."""
    return _product(x, [gate, up], [b_gate, b_up], None, activation, False, x.dtype, config)[0]


def _product(
    x: jax.Array,
    ws: list[Packed],
    biases: list[jax.Array | None],
    residual: jax.Array | None,
    activation: str | None,
    saves: bool,
    out_dtype: Any,
    config: Config | few_rows_cuda.Config,
) -> tuple[jax.Array, jax.Array]:
    """Returns the results of `few_rows_cuda.product`, by the kernel that `config` belongs to."""
    if isinstance(config, few_rows_cuda.Config):
        return few_rows_cuda.product(x, ws, biases, residual, activation, saves, out_dtype)
    cuda_library.register()
    shape = (x.shape[0], ws[0].n)
    sums = (config.parts, len(ws), *shape) if config.parts > 1 else (0,)
    call = jax.ffi.ffi_call(
        "jaxfused_quantized_matmul",
        (
            jax.ShapeDtypeStruct(shape, out_dtype),
            jax.ShapeDtypeStruct(shape if saves else (0,), x.dtype),
            jax.ShapeDtypeStruct(sums, jnp.float32),
        ),
    )
    y, preactivation, _ = call(
        x,
        *few_rows_cuda.operands(x, ws, biases, residual),
        activation=activation or "none",
        row_tiles=np.int64(config.row_tiles),
        sum_warps=np.int64(config.sum_warps),
    )
    return y, preactivation


def both_forward(
    x: jax.Array,
    x_scale: jax.Array,
    w: Packed,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    activation: str | None,
    save_preactivation: bool,
    out_dtype: Any,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns the results of `forward` for quantised x with scales [M, groups]; it saves float32."""
    cuda_library.register()
    shape = (x.shape[0], w.n)
    call = jax.ffi.ffi_call(
        "jaxfused_quantized_matmul_both",
        (
            jax.ShapeDtypeStruct(shape, out_dtype),
            jax.ShapeDtypeStruct(shape if save_preactivation else (0,), jnp.float32),
        ),
    )
    y, preactivation = call(
        x,
        x_scale,
        w.values,
        w.scale,
        *cuda_library.operands(x, cuda_library.readable(bias), residual),
        activation=activation or "none",
    )
    return y, preactivation if save_preactivation else None
