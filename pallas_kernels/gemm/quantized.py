"""Products with quantised weights on Hopper: linear's epilogue, and a gated unit in one launch.

Weights are stored as [N, K]. The kernel applies scales of groups along K (`quantized_weights`); a scale
for each column is a further vector of the epilogue.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import hopper
from pallas_kernels.activation import activation as activate
from pallas_kernels.gemm import cost, dequantize, quantized_tiles, quantized_weights
from pallas_kernels.gemm.cost import Work
from pallas_kernels.gemm.fused_product import FusedProduct
from pallas_kernels.gemm.linear import layer_epilogue
from pallas_kernels.gemm.mainloop import SCALED_PIECE
from pallas_kernels.gemm.matmul import GRAIN, fitting
from pallas_kernels.gemm.matmul_config import MatmulConfig
from pallas_kernels.gemm.quantized_tiles import QuantizedTiles, QuantizedTilesConfig
from pallas_kernels.gemm.quantized_weights import Format
from pallas_kernels.gemm.small_m import MAX_PARTS, MAX_ROWS, MAX_ROWS_QUANTIZED, QuantizedConfig
from pallas_kernels.hopper import SHARED_MEMORY_BYTES, THREAD_REGISTERS

STEP = 128
"""Elements along K in the shortest step of a kernel."""
_X_DTYPES = (jnp.bfloat16, jnp.float16)
_BOTH_DTYPES = (jnp.int8, jnp.float8_e4m3fn, jnp.float8_e5m2)


Config = MatmulConfig | QuantizedConfig | QuantizedTilesConfig


class Packed(NamedTuple):
    """Weights of one product: scale * (values - zero_point), or scale * codebook[values]."""

    values: jax.Array
    """Values [N, K] in int8, int4 or float8; int32 [N, K / 8] for int4 packed in words; or uint8
    [N, K / 2] for two codes in a byte."""
    scale: jax.Array
    """Scales, float32 [G, N] for G groups along K, [1, N] or [1, 1]; with a codebook they may also be
    uint8, the bytes of E8M0."""
    zero_point: jax.Array | None = None
    """Zero points in int8, in the scale's shape; None if they are 0."""
    codebook: tuple[float, ...] | None = None
    """The 16 numbers that the values index; None if the values are the numbers themselves."""

    @property
    def n(self) -> int:
        return self.values.shape[-2]

    @property
    def groups(self) -> int:
        return self.scale.shape[0]

    @property
    def in_words(self) -> bool:
        return self.values.dtype == jnp.int32

    @property
    def dtype(self) -> Any:
        if self.codebook is not None:
            return jnp.dtype(jnp.uint4)
        return jnp.dtype(jnp.int4 if self.in_words else self.values.dtype)

    def format(self, k: int) -> Format:
        """Returns the format of the weights, for sums of length k."""
        group = k // self.groups if self.groups > 1 else 0
        return Format(
            self.dtype,
            group,
            self.zero_point is not None,
            self.codebook,
            self.scale.dtype == jnp.uint8,
        )

    def spread(self) -> "Packed":
        """Returns weights whose scales and zero points are [G, N], N padded to a multiple of `grain`."""

        def of_columns(numbers):
            numbers = jnp.broadcast_to(numbers, (self.groups, self.n))
            return _padded(numbers, self.grain)

        zero_point = None if self.zero_point is None else of_columns(self.zero_point)
        scale = self.scale
        if self.groups == 1 and scale.dtype == jnp.uint8:
            exponents = jax.lax.bitcast_convert_type(scale, jnp.float8_e8m0fnu)
            scale = exponents.astype(jnp.float32)
        return self._replace(scale=of_columns(scale), zero_point=zero_point)

    @property
    def grain(self) -> int:
        """Divisor of the columns, so that TMA can copy rows of scales and zero points."""
        of_bytes = self.zero_point is not None or self.scale.dtype == jnp.uint8
        return COPIED_BYTES if of_bytes else GRAIN


COPIED_BYTES = 16
"""Divisor of the bytes of a row that TMA copies."""


def _padded(array: jax.Array, grain: int) -> jax.Array:
    """Returns the array with zeros at the end of its last axis, up to a multiple of `grain`."""
    missing = -array.shape[-1] % grain
    return jnp.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, missing)]) if missing else array


def why_unsupported(
    *,
    compute_capability: tuple[int, int] | None,
    x_dtype: Any,
    out_dtype: Any,
    residual_dtype: Any,
    x_shape: tuple[int, int],
    w: Packed,
    products: int = 1,
) -> str | None:
    """Returns None if x [M, K] can be multiplied with quantised weights, else why not.

    Args:
      products: number of weights of one format that are multiplied in one pass over x.
    """
    reason = hopper.why_unfit(compute_capability)
    if reason is not None:
        return reason
    if x_dtype not in _X_DTYPES:
        return f"it multiplies x of bfloat16 and float16, and x is {jnp.dtype(x_dtype)}"
    reason = _why_results_unfit(out_dtype, residual_dtype)
    if reason is not None:
        return reason
    rows, k = x_shape
    layout = w.format(k)
    whole = multiplies_tiles(products, (out_dtype, residual_dtype))
    if rows > MAX_ROWS and not whole and (layout.group == 32 or layout.codebook is not None):
        return (
            f"it takes groups of 32 and codes of a codebook with more than {MAX_ROWS} rows for one"
            f" product, whose results and residual have 16 bits, and there are {rows}"
        )
    if k < STEP:
        return f"it takes sums of at least {STEP} numbers (K), and they have {k}"
    return quantized_weights.why_unsupported(dtype=w.dtype, group=layout.group, k=k, step=STEP)


def multiplies_tiles(products: int, dtypes: Iterable[Any]) -> bool:
    """Returns whether `QuantizedTiles` runs so many products, with results and residual of `dtypes`."""
    return products == 1 and all(jnp.dtype(d).itemsize == 2 for d in dtypes if d is not None)


def _why_results_unfit(out_dtype: Any, residual_dtype: Any) -> str | None:
    for name, dtype in (("the result", out_dtype), ("residual", residual_dtype)):
        if dtype is not None and dtype not in (*_X_DTYPES, jnp.float32):
            return f"it takes float32, bfloat16 and float16, and {name} is {jnp.dtype(dtype)}"
    return None


def forward(
    x: jax.Array,
    w: Packed,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    activation: str | None,
    save_preactivation: bool,
    out_dtype: Any,
    multiprocessors: int,
    config: Config | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns activation(x @ w + bias) + residual of x [M, K], and x @ w + bias if it is to be saved."""
    results = _run(
        x,
        [w],
        epilogue=layer_epilogue(activation, out_dtype),
        vectors={"bias": bias},
        scales=("w_scale",),
        matrices={"residual": residual},
        outputs={"y": out_dtype} | ({"preactivation": x.dtype} if save_preactivation else {}),
        config=config,
        multiprocessors=multiprocessors,
        name="quantized_linear",
    )
    return results["y"], results.get("preactivation")


def why_both_unsupported(
    *,
    compute_capability: tuple[int, int] | None,
    out_dtype: Any,
    residual_dtype: Any,
    x: jax.Array,
    x_scale: jax.Array,
    w: Packed,
) -> str | None:
    """Returns None if quantised x [M, K] and w can be multiplied without dequantisation, else why not.

    Args:
      x_scale: [M, 1], or [M, G] for G groups along K.
    """
    reason = hopper.why_unfit(compute_capability)
    if reason is not None:
        return reason
    if x.dtype != w.values.dtype or x.dtype not in _BOTH_DTYPES:
        names = f"{x.dtype} and {w.dtype}"
        return (
            f"it multiplies int8 with int8 and float8 with the same float8, and these are {names}"
        )
    if w.zero_point is not None:
        return "it takes symmetric weights, and they have zero points"
    k = x.shape[1]
    groups = {x_scale.shape[1], w.groups}
    if groups != {1} and not (groups == {k // STEP} and k % STEP == 0):
        return (
            f"it takes one scale a row and a column, or one for each {STEP} numbers of both, and these"
            f" have {x_scale.shape[1]} and {w.groups} along {k}"
        )
    return _why_results_unfit(out_dtype, residual_dtype)


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
    multiprocessors: int,
    columns_alike: int = 1,
    config: MatmulConfig | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns `forward`'s results for quantised x [M, K] and w; the preactivation is float32.

    Args:
      x_scale: [M, G], for G groups along K.
      columns_alike: number of adjacent columns of w that have the same scales.
    """
    in_groups = w.groups > 1
    outputs = {"y": out_dtype} | ({"preactivation": jnp.float32} if save_preactivation else {})
    read_bytes = 0 if residual is None else residual.dtype.itemsize
    written_bytes = sum(jnp.dtype(dtype).itemsize for dtype in outputs.values())
    if config is None:
        work = both_work(x, w, read_bytes, written_bytes, int(activation is not None))
        config = both_candidates(w, work, multiprocessors)[0]
    n, grain, w = w.n, w.grain, w.spread()
    of_columns = w.scale
    columns = of_columns.shape[1]
    if columns_alike % SCALED_PIECE == 0 and columns % columns_alike == 0:
        of_columns = w.scale[:, ::columns_alike]
    product = FusedProduct(
        name="quantized_product",
        # K is padded with zeros, which add nothing to the sums.
        a=_padded(x, COPIED_BYTES),
        b=(_padded(w.values, COPIED_BYTES),),
        epilogue=layer_epilogue(activation, out_dtype),
        vectors={
            "w_scale": None if in_groups else w.scale[0],
            "bias": None if bias is None else _padded(bias, grain),
        },
        row_vectors={} if in_groups else {"x_scale": x_scale[:, 0]},
        step_scales=(_padded(x_scale.T, COPIED_BYTES // 4), of_columns) if in_groups else (),
        matrices={"residual": None if residual is None else _padded(residual, grain)},
        outputs=outputs,
        b_transposed=True,
        b_columns=columns,
    )
    results = product.run(multiprocessors=multiprocessors, config=config)
    results = {name: matrix[:, :n] for name, matrix in results.items()}
    return results["y"], results.get("preactivation")


def both_work(
    x: jax.Array, w: Packed, read_bytes: int, written_bytes: int, activations: int
) -> Work:
    """Returns the sizes, for cost models, of quantised x [M, K] times w and of the epilogue."""
    m, k = x.shape
    return Work(
        m,
        w.n,
        k,
        itemsize=1,
        read_bytes=read_bytes,
        written_bytes=written_bytes,
        activations=activations,
        k_last=True,
    )


def both_candidates(w: Packed, work: Work, multiprocessors: int) -> list[MatmulConfig]:
    """Returns configs for a product with quantised x, predicted fastest first."""
    if w.groups > 1:
        # The sums of one K step and the totals of all steps must both fit into the registers, so a
        # warpgroup's tile has 64 rows.
        return [
            MatmulConfig(64, tile_n, stages, False, epilogue_columns=32)
            for tile_n, stages in ((192, 4), (192, 3), (128, 4), (128, 3), (64, 3))
        ]
    found = fitting(work, multiprocessors, spare_bytes=_SCALES_BYTES)
    return [config for config in found if isinstance(config, MatmulConfig)]


_SCALES_BYTES = 2048
"""Bytes of shared memory for the scales of a tile's rows and columns, in addition to a bias."""


def why_gradient_unsupported(
    *, compute_capability: tuple[int, int] | None, dtype: Any, k: int, w: Packed
) -> str | None:
    """Returns None if the gradient of x [M, k] can be taken from quantised weights, else why not."""
    reason = hopper.why_unfit(compute_capability)
    if reason is not None:
        return reason
    if dtype not in _X_DTYPES:
        return f"it multiplies bfloat16 and float16, and the gradient is {jnp.dtype(dtype)}"
    layout = w.format(k)
    if layout.codebook is not None:
        return "it reads no codes of a codebook"
    if layout.group and layout.group != 64 and layout.group % STEP:
        return f"it takes groups of 64 and multiples of {STEP}, and they have {layout.group}"
    if layout.has_zero_point and w.n % 16:
        return f"it copies zero points of a multiple of 16 columns, and there are {w.n}"
    if w.n % GRAIN or k % 16:
        return f"it takes multiples of 16 x {GRAIN} weights, and there are {k} x {w.n}"
    return None


def input_gradient(
    dz: jax.Array,
    w: Packed,
    k: int,
    *,
    multiprocessors: int,
    config: MatmulConfig | None = None,
) -> jax.Array:
    """Returns the gradient dz @ w^T [M, k] of x, from dz [M, N], without a float copy of the weights."""
    w = w.spread()
    layout = w.format(k)
    if not layout.group:
        # The sums run over w's columns, so that the columns' scales cannot multiply the sums; they
        # multiply the weights, as scales of one group of all k do.
        layout = replace(layout, group=-(-k // STEP) * STEP)
    arrays = [w.values, w.scale] + ([] if w.zero_point is None else [w.zero_point])
    config = config or gradient_candidates(dz, k, multiprocessors)[0]
    product = FusedProduct(
        name="quantized_input_gradient",
        a=dz,
        b=tuple(arrays),
        b_format=layout,
        b_columns=k,
        epilogue=lambda dx: {"dx": dx},
        outputs={"dx": dz.dtype},
    )
    return product.run(multiprocessors=multiprocessors, config=config)["dx"]


def gradient_candidates(dz: jax.Array, k: int, multiprocessors: int) -> list[MatmulConfig]:
    """Returns configs for the gradient of x [M, k], predicted fastest first."""
    work = Work(*dz.shape[:1], k, dz.shape[1], k_last=True)
    return sorted(
        (
            MatmulConfig(128, 128, 3, False, epilogue_columns=32),
            MatmulConfig(64, 128, 3, False, epilogue_columns=32),
            MatmulConfig(64, 128, 4, epilogue_columns=32),
        ),
        key=lambda config: cost.kernel(work, config, multiprocessors),
    )


def gated_forward(
    x: jax.Array,
    w_gate: Packed,
    w_up: Packed,
    b_gate: jax.Array | None,
    b_up: jax.Array | None,
    *,
    activation: str | None,
    multiprocessors: int,
    config: Config | None = None,
) -> jax.Array:
    """Returns activation(x @ w_gate + b_gate) * (x @ w_up + b_up); both w have one format."""

    def epilogue(gate, up, *, scale_gate=None, scale_up=None, b_gate=None, b_up=None):
        gate, up = (
            part if scale is None else part * scale
            for part, scale in ((gate, scale_gate), (up, scale_up))
        )
        gate, up = (
            part if bias is None else part + bias for part, bias in ((gate, b_gate), (up, b_up))
        )
        return {"h": activate(activation, gate, x.dtype) * up}

    results = _run(
        x,
        [w_gate, w_up],
        epilogue=epilogue,
        vectors={"b_gate": b_gate, "b_up": b_up},
        scales=("scale_gate", "scale_up"),
        matrices={},
        outputs={"h": x.dtype},
        config=config,
        multiprocessors=multiprocessors,
        name="quantized_gated_unit",
    )
    return results["h"]


def _run(
    x: jax.Array,
    ws: Sequence[Packed],
    *,
    epilogue: Any,
    vectors: dict[str, jax.Array | None],
    scales: Sequence[str],
    matrices: dict[str, jax.Array | None],
    outputs: dict[str, Any],
    config: Config | None,
    multiprocessors: int,
    name: str,
) -> dict[str, jax.Array]:
    """Launches the kernel on x [M, K], and returns its outputs [M, N], keyed by name.

    `scales` has, for each w, the name of the epilogue's operand for the scales of w's columns.
    """
    n, grain = ws[0].n, ws[0].grain
    ws = [w.spread() for w in ws]
    columns = ws[0].scale.shape[1]
    layout = ws[0].format(x.shape[1])
    present = {name: _padded(v, grain) for name, v in vectors.items() if v is not None}
    if not layout.group:
        present |= {scale: w.scale[0] for scale, w in zip(scales, ws, strict=True)}
    read = {name: _padded(matrix, grain) for name, matrix in matrices.items() if matrix is not None}

    found = candidates(
        x,
        ws[0],
        products=len(ws),
        written=outputs.values(),
        read=read.values(),
        multiprocessors=multiprocessors,
    )
    if config is None and isinstance(found[0], QuantizedTilesConfig):
        config = found[0]
    if isinstance(config, QuantizedTilesConfig):
        tiles = QuantizedTiles(
            *x.shape[:1],
            columns,
            x.shape[1],
            x.dtype,
            config,
            layout,
            epilogue,
            vectors={name: jax.typeof(v) for name, v in present.items()},
            matrices={name: jax.typeof(matrix) for name, matrix in read.items()},
            outputs=outputs,
            multiprocessors=multiprocessors,
        )
        others = (*present.values(), *read.values())
        results = tiles.launch(x, _operands(ws, layout, x.dtype), others, name=f"{name}_tiles")
        return {name: matrix[:, :n] for name, matrix in results.items()}
    product = FusedProduct(
        name=name,
        a=x,
        b=tuple(_operands(ws, layout, x.dtype)),
        products=len(ws),
        b_transposed=True,
        b_format=layout,
        b_columns=columns,
        epilogue=epilogue,
        vectors=present,
        matrices=read,
        outputs=outputs,
    )
    results = product.run(
        multiprocessors=multiprocessors,
        config=config,
        candidates=[c for c in found if not isinstance(c, QuantizedTilesConfig)],
    )
    return {name: matrix[:, :n] for name, matrix in results.items()}


def _operands(ws: Sequence[Packed], layout: Format, x_dtype: Any) -> list[jax.Array]:
    """Returns each product's arrays for the main loop: values, scales, zero points and table."""
    arrays: list[jax.Array] = []
    for w in ws:
        arrays.append(w.values)
        if layout.group:
            arrays.append(w.scale)
        if w.zero_point is not None:
            arrays.append(w.zero_point)
        if layout.has_table:
            arrays.append(jnp.asarray(dequantize.table(w.codebook, x_dtype)))
    return arrays


def candidates(
    x: jax.Array,
    w: Packed,
    *,
    products: int = 1,
    written: Iterable[Any],
    read: Iterable[jax.Array],
    multiprocessors: int,
) -> list[Config]:
    """Returns configs for a product with quantised weights, predicted fastest first.

    Args:
      written: dtypes of the results.
      read: matrices that the epilogue reads.
    """
    written, read = list(written), list(read)
    read_bytes = sum(matrix.dtype.itemsize for matrix in read)
    written_bytes = sum(jnp.dtype(dtype).itemsize for dtype in written)
    configs: list[Config] = []
    work = _work(x, w, products, read_bytes, written_bytes)
    (m, k), layout = x.shape, w.format(x.shape[1])
    dtypes = (*written, *(matrix.dtype for matrix in read))
    only_tiles = layout.group == 32 or layout.codebook is not None
    if m <= MAX_ROWS or (m <= MAX_ROWS_QUANTIZED and not only_tiles):
        configs += _of_few_rows(work, layout, multiprocessors)
    if m > MAX_ROWS and multiplies_tiles(products, dtypes):
        streams = len(written), len(read)
        configs += quantized_tiles.candidates(m, w.n, k, layout, *streams, multiprocessors)
        configs.sort(key=lambda config: _time(work, config, multiprocessors))
    if m > MAX_ROWS and not only_tiles:
        work = Work(
            m, w.n, k, products, read_bytes=read_bytes, written_bytes=written_bytes, k_last=True
        )
        configs += _of_tiles(work, multiprocessors)
    return configs


def _of_tiles(work: Work, multiprocessors: int) -> list[MatmulConfig]:
    """Returns configs for a product of many rows, predicted fastest first."""
    configs = [
        MatmulConfig(tile_m, tile_n, stages, ping_pong, epilogue_columns=32)
        for tile_m, tile_n, stages, ping_pong in _TILES
        if tile_n % (64 * work.products) == 0
    ]
    return sorted(configs, key=lambda config: cost.kernel(work, config, multiprocessors))


_TILES = ((128, 128, 3, False), (64, 128, 3, False), (64, 128, 4, True))
"""Rows and columns of accumulators, pipeline stages, and ping-pong. With two warpgroups on one tile (no
ping-pong), a dequantised weight is multiplied by twice as many rows."""


def _time(work: Work, config: Config, multiprocessors: int) -> float:
    """Returns the predicted microseconds of a product."""
    if isinstance(config, QuantizedTilesConfig):
        return quantized_tiles.microseconds(work.m, work.n, work.k, config, multiprocessors)
    assert isinstance(config, QuantizedConfig)
    return cost.quantized_few_rows(work, config, multiprocessors)


def _work(x: jax.Array, w: Packed, products: int, read_bytes: int, written_bytes: int) -> Work:
    m, k = x.shape
    layout = w.format(k)
    of_group = w.scale.dtype.itemsize + int(layout.has_zero_point)
    return Work(
        m,
        w.n,
        k,
        products,
        w_itemsize=layout.bits / 8 + (of_group / layout.group if layout.group else 0),
        read_bytes=read_bytes,
        written_bytes=written_bytes,
        k_last=True,
    )


def _of_few_rows(work: Work, layout: Format, multiprocessors: int) -> list[QuantizedConfig]:
    """Returns configs for a small-M product that fit, predicted fastest first.

    Products of codebook weights take a seventh less time with steps of twice the length, and without a
    table a tenth less with several CTAs an SM (H200, 2026-11-28). The cost model predicts neither.
    """
    codes = layout.codebook is not None
    step = 2 * STEP if codes else STEP
    configs = [
        QuantizedConfig(tile_n, parts, stages, step)
        for tile_n in (64, 128)
        if tile_n == 64 or (tile_n < 2 * work.n and not codes)
        for parts in (1, 2, 4, MAX_PARTS)
        if parts <= -(-work.k // step)
        for stages in ((3,) if codes else (4, 3))
    ]
    fitting = [
        config
        for config in configs
        if cost.quantized_few_rows_shared_bytes(work, config) <= SHARED_MEMORY_BYTES
        and cost.quantized_few_rows_registers(work, config) <= THREAD_REGISTERS
    ]
    wanted = min(4, _CTAS_OF_CODES * multiprocessors // -(-work.n // 64))

    def time(config: QuantizedConfig) -> float:
        if codes and not layout.has_table and work.m <= _ROWS_OF_CODES:
            return abs(config.parts - wanted)
        return cost.quantized_few_rows(work, config, multiprocessors)

    return sorted(fitting, key=time)


_CTAS_OF_CODES, _ROWS_OF_CODES = 7, 16
"""CTAs per SM into which products of codes without a table are split, up to so many rows of x."""
