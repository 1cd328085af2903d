"""A matrix product for Hopper whose epilogue is a traced Python function.

The bare product is not the point: XLA has a good one. What XLA pays for separately, bias, activation,
residual, the derivative of an activation and the sums for a bias gradient, is here a function of the
float32 accumulators and of named operands, traced into the kernel.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import hopper
from pallas_kernels.hopper import SHARED_MEMORY_BYTES
from pallas_kernels.product import cost, few_rows, weights
from pallas_kernels.product.cost import Work
from pallas_kernels.product.epilogue import BeforeRounding, Epilogue, Function
from pallas_kernels.product.few_rows import MAX_PARTS, MAX_ROWS, FewRows, FewRowsConfig
from pallas_kernels.product.mainloop import CONSUMERS, Block, MatmulConfig, Product
from pallas_kernels.product.operands import SWIZZLE_BYTES, swizzled_columns

_DTYPES = (jnp.bfloat16, jnp.float16)
GRAIN = 8
"""What K and N must be multiples of: rows of 16-bit numbers then begin at multiples of 16 bytes, as the
copy engine wants."""


def candidates(work: Work, multiprocessors: int) -> list[MatmulConfig]:
    """Configs for a product, the one that is predicted fastest first; not all fit into shared memory."""
    tiles = functools.partial(MatmulConfig, epilogue_columns=32)
    if work.itemsize == 4:
        # Nothing is measured. Nothing is rounded on its way out of the accumulators either, so that a
        # smaller tile leaves registers.
        stages = (4, 3, 2)
        small = tiles(tile_m=64, tile_n=128, stages=2)
        return [*(tiles(tile_n=128, stages=stage) for stage in stages), small]
    whole = swizzled_columns(jnp.bfloat16)
    shapes = [tiles(tile_m=tile_m, tile_n=tile_n) for tile_m, tile_n in _PING_PONG_TILES]
    shapes.append(tiles(tile_m=64, tile_n=256, ping_pong=False))
    if work.read_bytes > work.itemsize:
        # Registers for several matrices, where 256 columns are no whole number of tiles.
        shapes.append(tiles(tile_m=64))
    if work.products > 1:
        # CTAs that share b read half as much of it.
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
    """Configs for a product with few rows, as `candidates` has them for any; none where it has many."""
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
    """Microseconds of the product with the config that it takes by default."""
    return cost.time(work, fitting(work, multiprocessors)[0], multiprocessors)


def fitting(work: Work, multiprocessors: int) -> list[MatmulConfig | FewRowsConfig]:
    """Candidates of both kernels that fit into shared memory, predicted fastest first."""
    return sorted(
        (
            config
            for config in (
                *candidates(work, multiprocessors),
                *few_rows_candidates(work, multiprocessors),
            )
            if _shared_bytes(work, config) <= SHARED_MEMORY_BYTES
        ),
        key=lambda config: cost.time(work, config, multiprocessors),
    )


def _shared_bytes(work: Work, config: MatmulConfig | FewRowsConfig) -> int:
    """About what a CTA takes of shared memory: `Epilogue.shared_bytes` counts the very allocations."""
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
    """None where products with epilogues can run, else why not.

    Args:
      dtypes: of the operand to multiply, "x", and of what else enters the epilogue or leaves it,
        None for what does not.
      features: the sizes of the axes of which a product is taken or made, rows aside.
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
    before_rounding: BeforeRounding | None = None,
    vectors: Mapping[str, jax.Array | None] | None = None,
    matrices: Mapping[str, jax.Array | None] | None = None,
    column_sums: Sequence[str] = (),
    products: int = 1,
    activations: int = 0,
    a_transposed: bool = False,
    b_transposed: bool = False,
    config: MatmulConfig | FewRowsConfig | None = None,
    multiprocessors: int,
    name: str = "matmul",
) -> dict[str, jax.Array]:
    """What `epilogue` makes of a @ b: matrices [M, N], and sums over their rows, by name.

    Args:
      a: [M, K] ([K, M] with `a_transposed`), or several, for a sum of products a_i @ b_i.
      b: [K, N] ([N, K] with `b_transposed`) for each a and each of the `products` that are taken in
        one pass over a: in this order in a sequence, or as blocks of one array. Of float32 the
        tensor cores take [N, K], which [K, N] is copied to, and no transposed a. It is rounded to a's
        dtype, without a copy where a has few rows.
      epilogue: takes a float32 tile of each product and, by name and as float32, the same tile of
        what `vectors` and `matrices` hold. Returns tiles by name.
      outputs: the dtypes of the matrices among them.
      before_rounding: what may be rounded to a's dtype where it leaves the accumulators: takes a tile of
        each product, and the vectors by name, and returns the tiles that `epilogue` takes in their
        place. For an epilogue with much arithmetic: a large tile of accumulators leaves it few
        registers, and is rounded.
      vectors: [N] each, the same for all rows, or None for one that is absent.
      matrices: [M, N] each, or None.
      column_sums: which of the outputs, as rounded, are also summed over the rows, to float32 [N].
      activations: how many activations and derivatives of one the epilogue evaluates for an element,
        for the choice of a config.
      name: of the kernel, in a profile.

    Returns:
      The matrices by name, and for each of `column_sums` its sum by the name "sum_" + name.
    """
    terms = [a] if isinstance(a, jax.Array) else list(a)
    if terms[0].dtype == jnp.float32 and not b_transposed:
        b = b.T if isinstance(b, jax.Array) else [array.T for array in b]
        b_transposed = True
    m = terms[0].shape[1 if a_transposed else 0]
    ks = tuple(term.shape[0 if a_transposed else 1] for term in terms)
    bs, blocks, n = _blocks(b, ks, products, b_transposed)
    present_vectors = {name: v for name, v in (vectors or {}).items() if v is not None}
    present = {name: matrix for name, matrix in (matrices or {}).items() if matrix is not None}
    columns = swizzled_columns(terms[0].dtype)

    def epilogue_of(config: MatmulConfig) -> Epilogue:
        pads = config.pads_columns and not b_transposed
        product = Product(
            m=m,
            n=n,
            ks=ks,
            dtype=terms[0].dtype,
            blocks=tuple(blocks),
            config=config,
            multiprocessors=multiprocessors,
            products=products,
            a_transposed=a_transposed,
            b_transposed=b_transposed,
            b_columns=n + (-n % columns if pads else 0),
        )
        return Epilogue(
            product=product,
            before_rounding=before_rounding,
            function=epilogue,
            vectors={name: v.dtype for name, v in present_vectors.items()},
            matrices={name: x.dtype for name, x in present.items()},
            outputs=dict(outputs),
            column_sums=tuple(column_sums),
        )

    def few_rows_of(config: FewRowsConfig) -> FewRows:
        return FewRows(
            m=m,
            n=n,
            ks=ks,
            dtype=terms[0].dtype,
            blocks=tuple(blocks),
            config=config,
            products=products,
            w_dtype=bs[0].dtype,
            w_transposed=b_transposed,
            before_rounding=before_rounding,
            function=epilogue,
            vectors={name: jax.typeof(v) for name, v in present_vectors.items()},
            matrices={name: jax.typeof(x) for name, x in present.items()},
            outputs=dict(outputs),
        )

    def shared_bytes(config: MatmulConfig | FewRowsConfig) -> int:
        if isinstance(config, FewRowsConfig):
            return few_rows_of(config).shared_bytes
        return epilogue_of(config).shared_bytes

    converts = weights.why_unsupported(bs[0].dtype, terms[0].dtype, bs[0].shape[-1]) is None
    converts = converts and all(b.dtype == bs[0].dtype for b in bs)
    if config is None:
        work = Work(
            m=m,
            n=n,
            k=sum(ks),
            products=products,
            itemsize=terms[0].dtype.itemsize,
            w_itemsize=bs[0].dtype.itemsize,
            read_bytes=sum(x.dtype.itemsize for x in present.values()),
            written_bytes=sum(jnp.dtype(dtype).itemsize for dtype in outputs.values()),
            activations=activations,
            k_last=b_transposed,
        )
        takes_few_rows = converts and not a_transposed
        config = next(
            c
            for c in fitting(work, multiprocessors)
            if (takes_few_rows or isinstance(c, MatmulConfig))
            and shared_bytes(c) <= SHARED_MEMORY_BYTES
        )
    others = (*present_vectors.values(), *present.values())
    if isinstance(config, FewRowsConfig):
        if not converts:
            bs = [b.astype(terms[0].dtype) for b in bs]
        results = few_rows_of(config).launch(terms, bs, others, name=f"{name}_few_rows")
        by_name = dict(zip(outputs, results, strict=True))
        return by_name | {f"sum_{name}": _sum_rows(by_name[name]) for name in column_sums}
    bs = [b.astype(terms[0].dtype) for b in bs]
    _check_config(
        config, terms[0].dtype, products, b_transposed, (*present.values(), *outputs.values())
    )
    fused = epilogue_of(config)
    product = fused.product
    product.check_shared_bytes(fused.shared_bytes)
    if product.b_columns > n:
        bs = [jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, product.b_columns - n)]) for x in bs]
    results = product.launch(
        terms,
        bs,
        others,
        out_type=(
            *(jax.ShapeDtypeStruct((m, n), dtype) for dtype in outputs.values()),
            *(jax.ShapeDtypeStruct(fused.sums_shape, jnp.float32) for _ in column_sums),
        ),
        scratch=fused.scratch(),
        epilogue=fused.of_tile,
        name=name,
    )
    matrices_out, sums = results[: len(outputs)], results[len(outputs) :]
    return dict(zip(outputs, matrices_out, strict=True)) | {
        f"sum_{name}": _sum_rows(partial_sums)[:n]
        for name, partial_sums in zip(column_sums, sums, strict=True)
    }


def _sum_rows(matrix: jax.Array) -> jax.Array:
    return jnp.sum(matrix, axis=0, dtype=jnp.float32)


def _check_config(
    config: MatmulConfig, dtype: Any, products: int, b_transposed: bool, streams: Sequence[Any]
) -> None:
    """Raises where the tiles of a config do not fit the operands or the matrices of the epilogue."""
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
    """The arrays with the b of all terms and products, where each lies, and how wide one is.

    One array with several is reshaped so that each ends where an axis does: beyond it there are zeros.
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
