"""A matrix product for Hopper whose epilogue is a traced Python function.

The bare product is not the point: XLA has a good one. What XLA pays for separately, bias, activation,
residual, the derivative of an activation and the sums for a bias gradient, is here a function of the
float32 accumulators and of named operands, traced into the kernel.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import hopper
from pallas_kernels.gemm import cost, weights
from pallas_kernels.gemm.cost import Work
from pallas_kernels.gemm.epilogue import Epilogue, Function, Maximised
from pallas_kernels.gemm.mainloop import SCALED_PIECE, Product
from pallas_kernels.gemm.matmul_config import CONSUMERS, MatmulConfig
from pallas_kernels.gemm.operands import SWIZZLE_BYTES, swizzled_columns
from pallas_kernels.gemm.quantized_weights import Format
from pallas_kernels.gemm.small_m import MAX_PARTS, MAX_ROWS, FewRows, FewRowsConfig
from pallas_kernels.gemm.tiled_product import Block
from pallas_kernels.hopper import SHARED_MEMORY_BYTES

_DTYPES = (jnp.bfloat16, jnp.float16)
_FLOAT8 = (jnp.float8_e4m3fn, jnp.float8_e5m2)
GRAIN = 8
"""Divisor of K and N: rows of 16-bit numbers then begin at multiples of 16 bytes, as TMA requires."""


def candidates(work: Work, multiprocessors: int) -> list[MatmulConfig]:
    """Returns configs of tiles, predicted fastest first; not all of them fit into shared memory."""
    tiles = functools.partial(MatmulConfig, epilogue_columns=32)
    if work.itemsize == 4:
        # No float32 products were measured. Their results are not rounded to 16 bits, so that only
        # smaller tiles leave registers.
        stages = (4, 3, 2)
        small = tiles(tile_m=64, tile_n=128, stages=2)
        return [*(tiles(tile_n=128, stages=stage) for stage in stages), small]
    whole = swizzled_columns(jnp.bfloat16)
    shapes = [tiles(tile_m=tile_m, tile_n=tile_n) for tile_m, tile_n in _PING_PONG_TILES]
    shapes.append(tiles(tile_m=64, tile_n=256, ping_pong=False))
    if work.read_bytes > work.itemsize:
        # Tiles of 64 x 192 leave registers for several matrices, where N is no multiple of 256.
        shapes.append(tiles(tile_m=64))
    if work.products > 1:
        # CTAs of a cluster share b, so that each reads half as much of it.
        shapes = [
            replace(shape, cluster=2)
            for shape in shapes
            if shape.ping_pong and shape.tile_n % (work.products * whole) == 0
        ]
    if work.n % whole and not work.k_last:
        shapes += [replace(shape, pads_columns=True) for shape in shapes]
    slots = [(4, 2, 2), (3, 2, 2)] if work.read_bytes else []
    slots += [(4, 1, 2), (3, 1, 2)] if not work.read_bytes and work.written_bytes <= 4 else []
    slots += [(4, 1, 1), (3, 1, 1), (2, 1, 1)]
    configs = [
        replace(shape, stages=stages, read_slots=read, write_slots=write)
        for stages, read, write in slots
        for shape in shapes
    ]
    return sorted(configs, key=lambda config: cost.kernel(work, config, multiprocessors))


_PING_PONG_TILES = ((128, 192), (128, 128), (64, 256), (64, 128), (128, 64))


def few_rows_candidates(work: Work, multiprocessors: int) -> list[FewRowsConfig]:
    """Returns configs of the small-M kernel, predicted fastest first; none where there are many rows."""
    if work.m > MAX_ROWS or work.itemsize != 2:
        return []
    parts = [parts for parts in (1, 2, 4, MAX_PARTS) if parts <= work.steps]
    configs = [
        FewRowsConfig(tile_n, part, stages)
        for tile_n in (64, 128)
        if tile_n == 64 or tile_n < 2 * work.n
        for part in parts
        for stages in (3, 4, 6, 8)
        if stages == 3 or stages < 2 * work.steps // part
    ]
    return sorted(configs, key=lambda config: cost.few_rows(work, config, multiprocessors))


def predicted_time(work: Work, multiprocessors: int) -> float:
    """Returns the predicted microseconds of the product with its default config."""
    return cost.time(work, fitting(work, multiprocessors)[0], multiprocessors)


def fitting(
    work: Work, multiprocessors: int, *, spare_bytes: int = 0
) -> list[MatmulConfig | FewRowsConfig]:
    """Returns the configs of both kernels that fit into shared memory, predicted fastest first.

    Args:
      spare_bytes: bytes of it that an epilogue takes in addition, such as for further vectors.
    """
    return sorted(
        (
            config
            for config in (
                *candidates(work, multiprocessors),
                *few_rows_candidates(work, multiprocessors),
            )
            if fits(work, config, spare_bytes)
        ),
        key=lambda config: cost.time(work, config, multiprocessors),
    )


def fits(work: Work, config: MatmulConfig | FewRowsConfig, spare_bytes: int = 0) -> bool:
    """Returns whether a config fits into shared memory next to an epilogue's `spare_bytes`."""
    return _shared_bytes(work, config) <= SHARED_MEMORY_BYTES - spare_bytes


def _shared_bytes(work: Work, config: MatmulConfig | FewRowsConfig) -> int:
    """Returns the approximate bytes of shared memory per CTA; `Epilogue.shared_bytes` is exact."""
    if isinstance(config, FewRowsConfig):
        return cost.few_rows_shared_bytes(work, config)
    ring = config.stages * (config.cta_tile_m + config.tile_n) * SWIZZLE_BYTES
    streams = config.read_slots * work.read_bytes + config.write_slots * work.written_bytes
    vectors_and_barriers = 3 * 1024
    return (
        ring + CONSUMERS * config.tile_m * config.epilogue_columns * streams + vectors_and_barriers
    )


def why_unsupported(
    *,
    compute_capability: tuple[int, int] | None,
    dtypes: Mapping[str, Any],
    features: Mapping[str, int],
    allows_tf32: bool = False,
) -> str | None:
    """Returns None where products with epilogues can run, else why not.

    Args:
      dtypes: dtypes of the left operand, "x", and of the epilogue's operands and results, None for
        absent ones.
      features: sizes of the axes that are summed or produced, rows aside.
      allows_tf32: whether float32 may be multiplied with the 10 bits of tf32.
    """
    reason = hopper.why_unfit(compute_capability)
    if reason is not None:
        return reason
    if dtypes["x"] == jnp.float32 and not allows_tf32:
        return (
            "it multiplies float32 as tf32, which is less than x's float32 is to be multiplied with"
        )
    for name, dtype in dtypes.items():
        if dtype is not None and dtype not in (*_DTYPES, jnp.float32):
            return (
                f"it takes float32, bfloat16 and float16, and {name} has dtype {jnp.dtype(dtype)}"
            )
    for name, size in features.items():
        if size % GRAIN:
            return f"it takes multiples of {GRAIN} features, and {name} has {size}"
    return None


def matmul(
    a: jax.Array | Sequence[jax.Array],
    b: jax.Array | Sequence[jax.Array],
    *,
    epilogue: Function,
    outputs: Mapping[str, Any],
    vectors: Mapping[str, jax.Array | None] | None = None,
    matrices: Mapping[str, jax.Array | None] | None = None,
    row_vectors: Mapping[str, jax.Array] | None = None,
    scalars: Mapping[str, jax.Array] | None = None,
    step_scales: Sequence[jax.Array] = (),
    column_sums: Sequence[str] = (),
    column_moments: Sequence[str] = (),
    row_maxima: Mapping[str, Maximised] | None = None,
    promoted_steps: int = 0,
    products: int = 1,
    activations: int = 0,
    a_transposed: bool = False,
    b_transposed: bool = False,
    b_format: Format | None = None,
    b_columns: int | None = None,
    config: MatmulConfig | FewRowsConfig | None = None,
    multiprocessors: int,
    name: str = "matmul",
) -> dict[str, jax.Array]:
    """Returns the results of `epilogue` for a @ b by name: matrices [M, N], their sums and maxima.

    Args:
      a: [M, K] ([K, M] with `a_transposed`), or several, for a sum of products a_i @ b_i.
      b: [K, N] ([N, K] with `b_transposed`) for each a and each of the `products` that are taken in one
        pass over a: in this order in a sequence, or as blocks of one array. The tensor cores take
        float32 only as [N, K], to which [K, N] is copied, and no transposed a. b is rounded to a's
        dtype, without a copy where a has few rows.
      epilogue: takes a float32 tile of each product and, by name and as float32, the same tile of
        what `vectors` and `matrices` hold. Returns tiles by name.
      outputs: dtypes of those tiles that are stored as matrices.
      vectors: [N] each, the same for all rows, or None for one that is absent.
      matrices: [M, N] each, or None.
      row_vectors: [M] each, the same for all columns. Only with a `MatmulConfig`.
      scalars: [1] each, float32, the same for all elements. Only with a `MatmulConfig`.
      step_scales: float32 scales of each step of 128 bytes along K, for the rows of a [K steps, M] and
        for the columns of b [K steps, N], or for runs of a multiple of 64 columns. They multiply the
        step's sums. Only with configs without ping-pong.
      column_sums: outputs that are also summed over the rows, to float32 [N]: before they are rounded,
        but after it with a `FewRowsConfig`.
      column_moments: outputs, as rounded, whose mean and variance over the rows are returned, float32
        [N]. The variance is the mean of squared deviations.
      row_maxima: functions of outputs, as rounded, whose largest value in each row is returned, for each
        of P parts of the columns: float32 [P, M]. They must grow with their argument (or its magnitude).
        Only with a `MatmulConfig`.
      promoted_steps: for float8, steps of 128 numbers along K after which the sums are added to float32
        totals; 0 leaves them to the tensor cores, which keep fewer bits. Only with configs without
        ping-pong.
      activations: how many activations and derivatives the epilogue evaluates for an element, for the
        choice of a config.
      b_format: the format of b, if it is quantised. Then b holds the arrays of each product, in the
        order of `QuantizedTile.copy`: [N, K] with `b_transposed`, where the epilogue applies scales of
        whole columns; else [K, N], where N is `b_columns`, with scales of groups along N. Only with a
        `MatmulConfig`.
      name: the kernel's name in a profile.

    Returns:
      The matrices by name, and "sum_" + name for each of `column_sums`, "mean_" + name and "variance_" +
      name for each of `column_moments`, and "max_" + name for each of `row_maxima`.
    """
    terms = [a] if isinstance(a, jax.Array) else list(a)
    if terms[0].dtype == jnp.float32 and not b_transposed:
        b = b.T if isinstance(b, jax.Array) else [array.T for array in b]
        b_transposed = True
    ks = tuple(term.shape[0 if a_transposed else 1] for term in terms)
    bs, blocks, n = _blocks(b, ks, products, b_transposed)
    n = b_columns or (bs[0].shape[-2] if b_format else n)
    call = _Call(
        terms=tuple(terms),
        bs=tuple(bs),
        blocks=tuple(blocks),
        n=n,
        ks=ks,
        products=products,
        activations=activations,
        a_transposed=a_transposed,
        b_transposed=b_transposed,
        b_format=b_format,
        epilogue=epilogue,
        vectors={name: v for name, v in (vectors or {}).items() if v is not None},
        matrices={name: x for name, x in (matrices or {}).items() if x is not None},
        row_vectors=row_vectors or {},
        scalars=scalars or {},
        step_scales=tuple(step_scales),
        outputs=outputs,
        column_sums=tuple(column_sums),
        column_moments=tuple(column_moments),
        row_maxima=row_maxima or {},
        promoted_steps=promoted_steps,
        multiprocessors=multiprocessors,
        name=name,
    )
    config = call.default_config() if config is None else config
    if isinstance(config, FewRowsConfig):
        return call.run_few_rows(config)
    return call.run_tiles(config)


@dataclass(frozen=True)
class _Call:
    """One call of `matmul`: its operands, its static parameters, and the ways to run it."""

    terms: tuple[jax.Array, ...]
    bs: tuple[jax.Array, ...]
    blocks: tuple[Block, ...]
    n: int
    ks: tuple[int, ...]
    """Length of K of each term."""
    products: int
    activations: int
    a_transposed: bool
    b_transposed: bool
    b_format: Format | None
    epilogue: Function
    vectors: Mapping[str, jax.Array]
    matrices: Mapping[str, jax.Array]
    row_vectors: Mapping[str, jax.Array]
    scalars: Mapping[str, jax.Array]
    step_scales: tuple[jax.Array, ...]
    outputs: Mapping[str, Any]
    column_sums: tuple[str, ...]
    column_moments: tuple[str, ...]
    row_maxima: Mapping[str, Maximised]
    promoted_steps: int
    multiprocessors: int
    name: str

    @property
    def m(self) -> int:
        return self.terms[0].shape[1 if self.a_transposed else 0]

    @property
    def dtype(self) -> Any:
        return self.terms[0].dtype

    @property
    def others(self) -> tuple[jax.Array, ...]:
        """The epilogue's operands, in the order of the kernel's."""
        operands = (self.vectors, self.row_vectors, self.scalars, self.matrices)
        return tuple(array for by_name in operands for array in by_name.values())

    @property
    def work(self) -> Work:
        return Work(
            m=self.m,
            n=self.n,
            k=sum(self.ks),
            products=self.products,
            itemsize=self.dtype.itemsize,
            w_itemsize=self.bs[0].dtype.itemsize,
            read_bytes=sum(x.dtype.itemsize for x in self.matrices.values()),
            written_bytes=sum(jnp.dtype(dtype).itemsize for dtype in self.outputs.values()),
            activations=self.activations,
            k_last=self.b_transposed,
        )

    @property
    def few_rows_convert(self) -> bool:
        """True if the small-M kernel takes b in its own dtype."""
        first = self.bs[0]
        reason = weights.why_unsupported(first.dtype, self.dtype, first.shape[-1])
        return reason is None and all(b.dtype == first.dtype for b in self.bs)

    @property
    def _rounded(self) -> "_Call":
        """The same call with b cast to the product's dtype."""
        return replace(self, bs=tuple(b.astype(self.dtype) for b in self.bs))

    def default_config(self) -> MatmulConfig | FewRowsConfig:
        """Returns the config that is predicted fastest among those that fit into shared memory."""
        of_tiles = self.a_transposed or self.row_vectors or self.scalars
        takes_few_rows = self.few_rows_convert and not of_tiles
        if not self.few_rows_convert and self.b_format is None:
            # XLA converts b, whichever kernel runs.
            rounded = self._rounded
            if rounded.few_rows_convert:
                return rounded.default_config()
        for config in fitting(self.work, self.multiprocessors):
            if isinstance(config, FewRowsConfig):
                fits = takes_few_rows and self.few_rows(config).shared_bytes <= SHARED_MEMORY_BYTES
            else:
                fits = self.tiles(config).shared_bytes <= SHARED_MEMORY_BYTES
            if fits:
                return config
        raise AssertionError("the smallest tiles fit into shared memory")

    def tiles(self, config: MatmulConfig) -> Epilogue:
        pads = config.pads_columns and not self.b_transposed
        product = Product(
            m=self.m,
            n=self.n,
            ks=self.ks,
            dtype=self.dtype,
            blocks=self.blocks,
            config=config,
            multiprocessors=self.multiprocessors,
            products=self.products,
            a_transposed=self.a_transposed,
            b_transposed=self.b_transposed,
            b_columns=self.n + (-self.n % swizzled_columns(self.dtype) if pads else 0),
            scaled_columns=self.n // self.step_scales[1].shape[1] if self.step_scales else 0,
            quantized=self.b_format,
            b_dtype=self.bs[0].dtype if self.mixes_float8 else None,
            promoted_steps=self.promoted_steps,
        )
        return Epilogue(
            product=product,
            function=self.epilogue,
            vectors={name: v.dtype for name, v in self.vectors.items()},
            matrices={name: x.dtype for name, x in self.matrices.items()},
            outputs=dict(self.outputs),
            column_sums=self.column_sums,
            column_moments=self.column_moments,
            row_vectors={name: v.dtype for name, v in self.row_vectors.items()},
            row_maxima=self.row_maxima,
            scalars=tuple(self.scalars),
        )

    @property
    def mixes_float8(self) -> bool:
        """True if a and b have the two different float8 dtypes, which are multiplied as they are."""
        dtypes = {jnp.dtype(self.dtype), jnp.dtype(self.bs[0].dtype)}
        return self.b_format is None and dtypes == {*map(jnp.dtype, _FLOAT8)}

    def run_tiles(self, config: MatmulConfig) -> dict[str, jax.Array]:
        tiles = (*self.matrices.values(), *self.outputs.values())
        _check_config(config, self.dtype, self.products, self.b_transposed, tiles)
        if self.b_format is not None and (config.stages < 3 or config.cluster > 1):
            raise ValueError(
                "matmul: where b is quantised, a config needs at least 3 stages, two of which are filled"
                f" at once, and no cluster, got {config}; pass another config"
            )
        if self.promoted_steps and config.ping_pong:
            raise ValueError(
                f"matmul: promoted_steps want a config without ping_pong, got {config}; pass another one"
            )
        alike = bool(self.step_scales) and self.step_scales[1].shape[1] < self.n
        piece = SCALED_PIECE if alike else 32
        if self.step_scales and (config.ping_pong or config.tile_n % piece):
            raise ValueError(
                "matmul: step_scales want a config without ping_pong, whose tile_n is a multiple of 32,"
                f" or of {SCALED_PIECE} where columns share scales, got {config}; pass another one"
            )
        fused = self.tiles(config)
        product = fused.product
        product.check_shared_bytes(fused.shared_bytes)
        as_it_is = self.b_format is not None or self.mixes_float8
        bs = self.bs if as_it_is else [b.astype(self.dtype) for b in self.bs]
        if product.b_columns > self.n:
            zeros = (0, product.b_columns - self.n)
            bs = [jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [zeros]) for x in bs]
        results = product.launch(
            self.terms,
            bs,
            self.others,
            out_type=(
                *(jax.ShapeDtypeStruct((self.m, self.n), d) for d in self.outputs.values()),
                *(jax.ShapeDtypeStruct(fused.sums_shape, jnp.float32) for _ in self.column_sums),
                *fused.moments_types,
                *(jax.ShapeDtypeStruct(fused.maxima_shape, jnp.float32) for _ in self.row_maxima),
            ),
            scratch=fused.scratch(),
            epilogue=fused.of_tile,
            name=self.name,
            step_scales=self.step_scales,
        )
        remaining = iter(results)
        by_name = {name: next(remaining) for name in self.outputs}
        for name in self.column_sums:
            by_name[f"sum_{name}"] = _sum_rows(next(remaining))[: self.n]
        by_name |= fused.merged_moments(remaining)
        for name in self.row_maxima:
            by_name[f"max_{name}"] = next(remaining)[:, : self.m]
        return by_name

    def few_rows(self, config: FewRowsConfig) -> FewRows:
        return FewRows(
            m=self.m,
            n=self.n,
            ks=self.ks,
            dtype=self.dtype,
            blocks=self.blocks,
            config=config,
            products=self.products,
            w_dtype=self.bs[0].dtype,
            w_transposed=self.b_transposed,
            function=self.epilogue,
            vectors={name: jax.typeof(v) for name, v in self.vectors.items()},
            matrices={name: jax.typeof(x) for name, x in self.matrices.items()},
            outputs=dict(self.outputs),
        )

    def run_few_rows(self, config: FewRowsConfig) -> dict[str, jax.Array]:
        if not self.few_rows_convert:
            return self._rounded.run_few_rows(config)
        launch = self.few_rows(config).launch
        results = launch(self.terms, self.bs, self.others, name=f"{self.name}_few_rows")
        by_name = dict(zip(self.outputs, results, strict=True))
        for name in self.column_moments:
            values = by_name[name].astype(jnp.float32)
            by_name[f"mean_{name}"] = jnp.mean(values, 0)
            by_name[f"variance_{name}"] = jnp.var(values, 0)
        return by_name | {f"sum_{name}": _sum_rows(by_name[name]) for name in self.column_sums}


def _sum_rows(matrix: jax.Array) -> jax.Array:
    return jnp.sum(matrix, axis=0, dtype=jnp.float32)


def _check_config(
    config: MatmulConfig, dtype: Any, products: int, b_transposed: bool, streams: Sequence[Any]
) -> None:
    """Raises a ValueError where a config's tiles do not fit the operands or the epilogue's matrices."""
    if config.tile_n % (products * config.epilogue_columns):
        raise ValueError(
            f"matmul: {products} products share tile_n ({config.tile_n}), and epilogue_columns"
            f" ({config.epilogue_columns}) must divide each one's part"
        )
    columns = swizzled_columns(dtype)
    if not b_transposed and config.tile_n // products % columns:
        raise ValueError(
            f"matmul: {products} products share tile_n ({config.tile_n}), and where b is [K, N] each"
            f" one's part must be a multiple of {columns}; pass another config"
        )
    widest = max(jnp.dtype(getattr(stream, "dtype", stream)).itemsize for stream in streams)
    if config.epilogue_columns * widest > SWIZZLE_BYTES:
        raise ValueError(
            f"matmul: epilogue_columns is {config.epilogue_columns}, but of numbers of {widest} bytes"
            f" at most {SWIZZLE_BYTES // widest} columns are taken at a time; pass another config"
        )


def _blocks(
    b: jax.Array | Sequence[jax.Array], ks: Sequence[int], products: int, transposed: bool
) -> tuple[list[jax.Array], list[Block], int]:
    """Returns the arrays that hold b, the position of each term and product in them, and b's width.

    An array with several b is reshaped so that each ends where an axis does: copies beyond it read
    zeros.
    """
    if not isinstance(b, jax.Array):
        bs = list(b)
        blocks = [Block(index) for index in range(len(bs))]
        return bs, blocks, bs[0].shape[0 if transposed else 1]
    terms = len(ks)
    if len(set(ks)) > 1:
        raise ValueError(f"matmul: terms of one array b must be of one length, got {tuple(ks)}")
    n = b.shape[0 if transposed else 1] // products
    k_axes = (terms, ks[0]) if terms > 1 else (ks[0],)
    n_axes = (products, n) if products > 1 else (n,)
    blocks = [
        Block(0, term if terms > 1 else None, product if products > 1 else None)
        for term in range(terms)
        for product in range(products)
    ]
    return [b.reshape((*n_axes, *k_axes) if transposed else (*k_axes, *n_axes))], blocks, n
