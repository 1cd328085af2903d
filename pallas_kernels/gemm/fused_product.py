"""The description of a matrix product for Hopper whose epilogue is a traced Python function.

XLA's products alone are fast, but bias, activation, residual, an activation's derivative and the sums of
a bias gradient often take further kernels. Here they are a function of the float32 accumulators and
of named operands, traced into the product's kernel.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.gemm import cost, weights
from pallas_kernels.gemm.cost import Work
from pallas_kernels.gemm.epilogue import Epilogue, Function, Maximised
from pallas_kernels.gemm.mainloop import SCALED_PIECE, Product
from pallas_kernels.gemm.matmul import fitting
from pallas_kernels.gemm.matmul_config import MatmulConfig
from pallas_kernels.gemm.operands import SWIZZLE_BYTES, swizzled_columns
from pallas_kernels.gemm.quantized_weights import Format
from pallas_kernels.gemm.small_m import FewRows, FewRowsConfig
from pallas_kernels.gemm.tiled_product import Block
from pallas_kernels.hopper import SHARED_MEMORY_BYTES

_FLOAT8 = (jnp.float8_e4m3fn, jnp.float8_e5m2)
_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True, eq=False)
class FusedProduct:
    """Description of a product a @ b with an epilogue: its operands, its function and its results.

    `run` launches its kernel. Everything else needs only the shapes and dtypes of the arrays.
    """

    name: str
    """Name of the kernel in a profile."""
    a: Any
    """Left operand [M, K] ([K, M] with `a_transposed`), or a tuple of them for a sum of products a_i @
    b_i."""
    b: Any
    """Right operand [K, N] ([N, K] with `b_transposed`) for each a and each of the `products` that share
    one pass over a: in this order in a tuple, or as blocks of one array. The tensor cores read float32
    only as [N, K], to which [K, N] is copied, and no transposed a. b is rounded to a's dtype, without a
    copy where a has few rows."""
    epilogue: Function
    """Function of a float32 tile of each product and, as keyword arguments in float32, the same tile
    of each vector and matrix, and the scalars. Returns a dict of tiles."""
    outputs: Mapping[str, Any]
    """Dtypes, keyed by name, of the epilogue's tiles that are stored as matrices [M, N]."""
    vectors: Mapping[str, jax.Array | None] = _NOTHING
    """Vectors [N], the same for all rows; None for an absent one."""
    matrices: Mapping[str, jax.Array | None] = _NOTHING
    """Matrices [M, N]; None for an absent one."""
    row_vectors: Mapping[str, jax.Array] = _NOTHING
    """Vectors [M], the same for all columns. Only with a `MatmulConfig`."""
    scalars: Mapping[str, jax.Array] = _NOTHING
    """Scalars [1] in float32, the same for all elements. Only with a `MatmulConfig`."""
    step_scales: Sequence[jax.Array] = ()
    """Scales in float32 of each step of 128 bytes along K: [K steps, M] for the rows, and [K steps, N]
    for the columns of b, or fewer for runs of a multiple of 64 columns. They multiply the step's sums.
    Only with configs without ping-pong."""
    column_sums: Sequence[str] = ()
    """Outputs that are also summed over the rows, to float32 [N] named "sum_" + name. They are summed
    before their rounding, or after it with a `FewRowsConfig`."""
    column_moments: Sequence[str] = ()
    """Outputs whose mean and variance over the rows are returned, as float32 [N] named "mean_" and
    "variance_" + name. They are computed from the rounded outputs; the variance is the mean of squared
    deviations."""
    row_maxima: Mapping[str, Maximised] = _NOTHING
    """Functions of rounded outputs, whose largest value in each row is returned for each of P columns of
    tiles: float32 [P, M], "max_" + name. They must grow with their argument (or its magnitude). Only
    with a `MatmulConfig`."""
    promoted_steps: int = 0
    """For float8, steps of 128 numbers along K after which the sums are added to float32 totals; 0
    leaves them to the tensor cores, which keep fewer bits. Only with configs without ping-pong."""
    products: int = 1
    activations: int = 0
    """Number of activations and derivatives that the epilogue evaluates per element; it influences the
    config."""
    a_transposed: bool = False
    b_transposed: bool = False
    b_format: Format | None = None
    """Format of a quantised b, else None. If quantised, b holds the arrays of each product, in the order
    of `QuantizedTile.copy`: [N, K] with `b_transposed`, where the epilogue applies scales of whole
    columns; else [K, N], where N is `b_columns`, with scales of groups along N and a `MatmulConfig`."""
    b_columns: int = 0
    """Number of columns N, if b's shape does not tell it (padded or quantised b); else 0."""

    # --- its shapes -------------------------------------------------------------------------------

    @property
    def terms(self) -> Sequence[jax.Array]:
        return self.a if isinstance(self.a, tuple) else (self.a,)

    @property
    def m(self) -> int:
        return self.terms[0].shape[1 if self.a_transposed else 0]

    @property
    def ks(self) -> tuple[int, ...]:
        """Length of K of each term."""
        return tuple(term.shape[0 if self.a_transposed else 1] for term in self.terms)

    @property
    def n(self) -> int:
        """Columns of each product."""
        if self.b_columns:
            return self.b_columns
        if isinstance(self.b, tuple):
            return self.b[0].shape[0 if self.b_transposed else 1]
        return self.b.shape[0 if self.b_transposed else 1] // self.products

    @property
    def dtype(self) -> Any:
        return self.terms[0].dtype

    @property
    def b_dtypes(self) -> set[Any]:
        return {jnp.dtype(b.dtype) for b in (self.b if isinstance(self.b, tuple) else (self.b,))}

    @property
    def few_rows_dtype(self) -> Any:
        """Dtype in which the small-M kernel reads b; XLA converts a b of another dtype first."""
        [dtype, *others] = self.b_dtypes
        last_axis = self.ks[0] if self.b_transposed else self.n
        reason = weights.why_unsupported(dtype, self.dtype, last_axis)
        return jnp.dtype(self.dtype) if others or reason is not None else dtype

    @property
    def mixes_float8(self) -> bool:
        """True if a and b have the two different float8 dtypes, which are multiplied as they are."""
        dtypes = {jnp.dtype(self.dtype), *self.b_dtypes}
        return self.b_format is None and dtypes == {*map(jnp.dtype, _FLOAT8)}

    @property
    def work(self) -> Work:
        b_dtype = self.few_rows_dtype if self.b_format is None else self.b[0].dtype
        return Work(
            m=self.m,
            n=self.n,
            k=sum(self.ks),
            products=self.products,
            itemsize=self.dtype.itemsize,
            w_itemsize=b_dtype.itemsize,
            read_bytes=sum(x.dtype.itemsize for x in present(self.matrices).values()),
            written_bytes=sum(jnp.dtype(dtype).itemsize for dtype in self.outputs.values()),
            activations=self.activations,
            k_last=self.b_transposed or self.dtype == jnp.float32,
        )

    @property
    def work_beside_xla(self) -> Work:
        """Sizes for a comparison with XLA's time, with b's conversion up to `CONVERTED_ROWS` rows."""
        first = self.b[0] if isinstance(self.b, tuple) else self.b
        return replace(
            self.work,
            w_itemsize=first.dtype.itemsize if self.m <= cost.CONVERTED_ROWS else 0,
            terms=len(self.terms),
            k_last=self.b_transposed,
        )

    # --- its launch -------------------------------------------------------------------------------

    def run(
        self,
        *,
        multiprocessors: int,
        config: MatmulConfig | FewRowsConfig | None = None,
        candidates: Sequence[MatmulConfig | FewRowsConfig] = (),
    ) -> dict[str, jax.Array]:
        """Runs the kernel; returns the outputs, sums, moments and maxima, keyed by name.

        Args:
          multiprocessors: the device's SMs.
          config: tiles and pipeline; None for the first of the candidates that fits shared memory.
          candidates: configs, by default those of `fitting`.
        """
        if self.dtype == jnp.float32 and not self.b_transposed:
            b = tuple(array.T for array in self.b) if isinstance(self.b, tuple) else self.b.T
            turned = replace(self, b=b, b_transposed=True)
            return turned.run(multiprocessors=multiprocessors, config=config, candidates=candidates)
        call = _Call(self, *_blocks(self), multiprocessors)
        if config is None:
            config = call.first_that_fits(candidates or fitting(self.work, multiprocessors))
        if isinstance(config, FewRowsConfig):
            return call.run_few_rows(config)
        return call.run_tiles(config)


def present(arrays: Mapping[str, jax.Array | None]) -> dict[str, jax.Array]:
    """Returns the arrays that are not None."""
    return {name: array for name, array in arrays.items() if array is not None}


@dataclass(frozen=True)
class _Call:
    """A launch of a product, with large tiles or as a small-M product."""

    product: FusedProduct
    bs: Sequence[jax.Array]
    """Arrays that hold b, reshaped by `_blocks`."""
    blocks: Sequence[Block]
    multiprocessors: int

    @property
    def others(self) -> tuple[jax.Array, ...]:
        """Operands of the epilogue, in the order of the kernel's arguments."""
        p = self.product
        operands = (present(p.vectors), p.row_vectors, p.scalars, present(p.matrices))
        return tuple(array for by_name in operands for array in by_name.values())

    def first_that_fits(
        self, configs: Sequence[MatmulConfig | FewRowsConfig]
    ) -> MatmulConfig | FewRowsConfig:
        """Returns the first config that can run the product and fits into shared memory."""
        p = self.product
        of_tiles = p.a_transposed or p.row_vectors or p.scalars
        for config in configs:
            if isinstance(config, FewRowsConfig):
                fits = not of_tiles and self.few_rows(config).shared_bytes <= SHARED_MEMORY_BYTES
            else:
                fits = self.tiles(config).shared_bytes <= SHARED_MEMORY_BYTES
            if fits:
                return config
        raise AssertionError("the smallest tiles fit into shared memory")

    def tiles(self, config: MatmulConfig) -> Epilogue:
        p = self.product
        pads = config.pads_columns and not p.b_transposed
        product = Product(
            m=p.m,
            n=p.n,
            ks=p.ks,
            dtype=p.dtype,
            blocks=tuple(self.blocks),
            config=config,
            multiprocessors=self.multiprocessors,
            products=p.products,
            a_transposed=p.a_transposed,
            b_transposed=p.b_transposed,
            b_columns=p.n + (-p.n % swizzled_columns(p.dtype) if pads else 0),
            scaled_columns=p.n // p.step_scales[1].shape[1] if p.step_scales else 0,
            quantized=p.b_format,
            b_dtype=self.bs[0].dtype if p.mixes_float8 else None,
            promoted_steps=p.promoted_steps,
        )
        return Epilogue(
            product=product,
            function=p.epilogue,
            vectors={name: v.dtype for name, v in present(p.vectors).items()},
            matrices={name: x.dtype for name, x in present(p.matrices).items()},
            outputs=dict(p.outputs),
            column_sums=tuple(p.column_sums),
            column_moments=tuple(p.column_moments),
            row_vectors={name: v.dtype for name, v in p.row_vectors.items()},
            row_maxima=p.row_maxima,
            scalars=tuple(p.scalars),
        )

    def run_tiles(self, config: MatmulConfig) -> dict[str, jax.Array]:
        p = self.product
        _check_config(p, config)
        fused = self.tiles(config)
        product = fused.product
        product.check_shared_bytes(fused.shared_bytes)
        as_it_is = p.b_format is not None or p.mixes_float8
        bs = self.bs if as_it_is else [b.astype(p.dtype) for b in self.bs]
        if product.b_columns > p.n:
            zeros = (0, product.b_columns - p.n)
            bs = [jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [zeros]) for x in bs]
        results = product.launch(
            p.terms,
            bs,
            self.others,
            out_type=(
                *(jax.ShapeDtypeStruct((p.m, p.n), d) for d in p.outputs.values()),
                *(jax.ShapeDtypeStruct(fused.sums_shape, jnp.float32) for _ in p.column_sums),
                *fused.moments_types,
                *(jax.ShapeDtypeStruct(fused.maxima_shape, jnp.float32) for _ in p.row_maxima),
            ),
            scratch=fused.scratch(),
            epilogue=fused.of_tile,
            name=p.name,
            step_scales=p.step_scales,
        )
        remaining = iter(results)
        by_name = {name: next(remaining) for name in p.outputs}
        for name in p.column_sums:
            by_name[f"sum_{name}"] = _sum_rows(next(remaining))[: p.n]
        by_name |= fused.merged_moments(remaining)
        for name in p.row_maxima:
            by_name[f"max_{name}"] = next(remaining)[:, : p.m]
        return by_name

    def few_rows(self, config: FewRowsConfig) -> FewRows:
        p = self.product
        return FewRows(
            m=p.m,
            n=p.n,
            ks=p.ks,
            dtype=p.dtype,
            blocks=tuple(self.blocks),
            config=config,
            products=p.products,
            w_dtype=self.bs[0].dtype if p.b_format is not None else p.few_rows_dtype,
            w_transposed=p.b_transposed,
            function=p.epilogue,
            vectors={name: jax.typeof(v) for name, v in present(p.vectors).items()},
            matrices={name: jax.typeof(x) for name, x in present(p.matrices).items()},
            outputs=dict(p.outputs),
            quantized=p.b_format,
        )

    def run_few_rows(self, config: FewRowsConfig) -> dict[str, jax.Array]:
        p, launch = self.product, self.few_rows(config).launch
        bs = self.bs
        if p.b_format is None:
            bs = [b.astype(p.few_rows_dtype) for b in bs]
        results = launch(p.terms, bs, self.others, name=f"{p.name}_few_rows")
        by_name = dict(zip(p.outputs, results, strict=True))
        for name in p.column_moments:
            values = by_name[name].astype(jnp.float32)
            by_name[f"mean_{name}"] = jnp.mean(values, 0)
            by_name[f"variance_{name}"] = jnp.var(values, 0)
        return by_name | {f"sum_{name}": _sum_rows(by_name[name]) for name in p.column_sums}


def _sum_rows(matrix: jax.Array) -> jax.Array:
    return jnp.sum(matrix, axis=0, dtype=jnp.float32)


def _check_config(p: FusedProduct, config: MatmulConfig) -> None:
    """Raises a ValueError if a config does not fit the operands or the epilogue's matrices."""
    if config.tile_n % (p.products * config.epilogue_columns):
        raise ValueError(
            f"matmul: {p.products} products share tile_n ({config.tile_n}), and epilogue_columns"
            f" ({config.epilogue_columns}) must divide each one's part"
        )
    columns = swizzled_columns(p.dtype)
    if not p.b_transposed and config.tile_n // p.products % columns:
        raise ValueError(
            f"matmul: {p.products} products share tile_n ({config.tile_n}), and where b is [K, N] each"
            f" one's part must be a multiple of {columns}; pass another config"
        )
    stored = (*(x.dtype for x in present(p.matrices).values()), *p.outputs.values())
    widest = max(jnp.dtype(dtype).itemsize for dtype in stored)
    if config.epilogue_columns * widest > SWIZZLE_BYTES:
        raise ValueError(
            f"matmul: epilogue_columns is {config.epilogue_columns}, but of numbers of {widest} bytes"
            f" at most {SWIZZLE_BYTES // widest} columns are taken at a time; pass another config"
        )
    if p.b_format is not None and (config.stages < 3 or config.cluster > 1):
        raise ValueError(
            "matmul: where b is quantised, a config needs at least 3 stages, two of which are filled"
            f" at once, and no cluster, got {config}; pass another config"
        )
    if p.promoted_steps and config.ping_pong:
        raise ValueError(
            f"matmul: promoted_steps want a config without ping_pong, got {config}; pass another one"
        )
    alike = bool(p.step_scales) and p.step_scales[1].shape[1] < p.n
    piece = SCALED_PIECE if alike else 32
    if p.step_scales and (config.ping_pong or config.tile_n % piece):
        raise ValueError(
            "matmul: step_scales want a config without ping_pong, whose tile_n is a multiple of 32,"
            f" or of {SCALED_PIECE} where columns share scales, got {config}; pass another one"
        )


def _blocks(p: FusedProduct) -> tuple[list[jax.Array], list[Block]]:
    """Returns the arrays that hold b, and the position in them of each term's and product's b.

    An array that holds several matrices b gets an axis over them, so that a copy that crosses the end of
    a matrix reads zeros.
    """
    if isinstance(p.b, tuple):
        return list(p.b), [Block(index) for index in range(len(p.b))]
    terms = len(p.ks)
    if len(set(p.ks)) > 1:
        raise ValueError(f"matmul: terms of one array b must be of one length, got {p.ks}")
    k_axes = (terms, p.ks[0]) if terms > 1 else (p.ks[0],)
    n_axes = (p.products, p.n) if p.products > 1 else (p.n,)
    blocks = [
        Block(0, term if terms > 1 else None, product if p.products > 1 else None)
        for term in range(terms)
        for product in range(p.products)
    ]
    return [p.b.reshape((*n_axes, *k_axes) if p.b_transposed else (*k_axes, *n_axes))], blocks
