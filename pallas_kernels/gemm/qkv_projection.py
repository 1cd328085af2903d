"""qkv_projection on the Hopper product: queries, keys and values are stored as attention reads them.

The epilogue of one product, in `qkv_epilogue`, stores the three outputs, so that nothing is split
afterwards.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.gemm import cost, interleaved_rope, matmul, qkv_small_m
from pallas_kernels.gemm.fused_product import FusedProduct
from pallas_kernels.gemm.mainloop import Product
from pallas_kernels.gemm.matmul_config import CONSUMERS, MatmulConfig
from pallas_kernels.gemm.operands import SWIZZLE_BYTES, swizzled_columns
from pallas_kernels.gemm.qkv_epilogue import ROUNDS_ANGLES, QkvEpilogue
from pallas_kernels.gemm.qkv_heads import STRIP, VALUES, Heads
from pallas_kernels.gemm.small_m import FewRowsConfig
from pallas_kernels.gemm.tiled_product import Block
from pallas_kernels.hopper import SHARED_MEMORY_BYTES

_GRAIN = 16
"""Columns of the narrowest swizzled piece. It divides an output's columns and, in heads with a norm or
rope, the rotated features (without interleaving each half of them) and those that are not rotated."""
_WIDEST_HEAD = 256
"""Largest size of a head with a norm or rope: the columns of the widest tile."""


def why_unsupported(
    *, compute_capability: tuple[int, int] | None, dtype: Any, features: int, heads: Heads
) -> str | None:
    """Returns None if forward and backward can run, else the rule that is broken."""
    if dtype == jnp.float32:
        return "it takes bfloat16 and float16, and x has dtype float32"
    queries, keys, *_ = heads.widths
    reason = matmul.why_unsupported(
        compute_capability=compute_capability,
        dtypes={"x": dtype},
        features={"x": features, "the queries": queries, "the keys": keys},
    )
    if reason is not None:
        return reason
    for name, size in (("queries", queries), ("keys", keys)):
        if size % _GRAIN:
            return (
                f"it takes multiples of {_GRAIN} features in all heads, and the {name} have {size}"
            )
    if not heads.finishes:
        return None
    if heads.size > _WIDEST_HEAD:
        return f"norm and rotation take heads of up to {_WIDEST_HEAD} features, got {heads.size}"
    rotating = ("half of the rotating", heads.rotary_dim // 2)
    if heads.interleaved:
        rotating = ("the rotating", heads.rotary_dim)
    for name, size in (rotating, ("the other", heads.size - heads.rotary_dim)):
        if size % _GRAIN:
            return f"norm and rotation take multiples of {_GRAIN} features, and {name} are {size}"
    return None


def candidates(rows: int, features: int, heads: Heads, multiprocessors: int) -> list[MatmulConfig]:
    """Returns configs whose tiles are whole units (heads or parts of heads), predicted fastest first."""
    unit = piece = math.gcd(STRIP, *heads.widths)
    if heads.finishes:
        unit = heads.unit
        turning = heads.rotary_dim if heads.interleaved else heads.rotary_dim // 2
        piece = math.gcd(STRIP, turning, heads.size - heads.rotary_dim)
    tile_m = 128 if unit <= 192 else 64

    widest = 192 if unit <= 192 else 256
    by_limit = {limit // unit * unit for limit in (128, widest)} - {0}
    sizes = [(4, 2), (3, 2), (4, 1), (3, 1), (2, 1)]
    if heads.norm:
        # x of 50432 x 768 to 3 x 12 heads of 64, rotated: 267 us with three stages, 283 with four.
        sizes.remove((4, 2))
    configs = [
        MatmulConfig(
            tile_m=tile_m,
            tile_n=tile_n,
            stages=stages,
            write_slots=write_slots,
            epilogue_columns=piece,
        )
        for tile_n in by_limit
        for stages, write_slots in sizes
    ]
    work = _work(rows, features, heads)
    order = {size: index for index, size in enumerate(sizes)}

    def time(config: MatmulConfig) -> tuple[float, int]:
        # Among configs with equal tiles the order of `sizes`, which was measured, decides: the model
        # does not predict the effect of pipeline stages here.
        as_measured = replace(config, stages=4)
        return (
            cost.kernel(work, as_measured, multiprocessors),
            order[config.stages, config.write_slots],
        )

    return sorted(configs, key=time)


def fitting(
    rows: int, features: int, heads: Heads, multiprocessors: int
) -> list[MatmulConfig | FewRowsConfig]:
    """Returns the candidates of both kernels that fit into shared memory, the default one first."""

    def shared_bytes(config: MatmulConfig) -> int:
        """Returns the approximate bytes per CTA; `QkvEpilogue.shared_bytes` is exact."""
        unit = heads.unit if heads.finishes else config.epilogue_columns
        ring = config.stages * (config.cta_tile_m + config.tile_n) * SWIZZLE_BYTES
        stored = CONSUMERS * config.write_slots * config.tile_m * unit * 2
        vectors_and_barriers = 4 * 1024
        return ring + stored + vectors_and_barriers

    work = _work(rows, features, heads)
    # Memory for angles and for saved projections is counted, although a call may need neither.
    most = replace(work, written_bytes=2 * work.written_bytes, read_bytes=4)
    few_rows = [
        config
        for config in qkv_small_m.candidates(work, heads, multiprocessors)
        if cost.few_rows_shared_bytes(most, config) <= SHARED_MEMORY_BYTES
    ]
    of_many = [
        config
        for config in candidates(rows, features, heads, multiprocessors)
        if shared_bytes(config) <= SHARED_MEMORY_BYTES
    ]
    if few_rows and cost.time(work, few_rows[0], multiprocessors) < cost.time(
        work, of_many[0], multiprocessors
    ):
        return [*few_rows, *of_many]
    return [*of_many, *few_rows]


def _work(rows: int, features: int, heads: Heads) -> cost.Work:
    # A norm or rope takes about as many instructions as an activation. `k_last`: a WGMMA reads any
    # number of b's columns, because b is padded.
    arithmetic = int(heads.norm) + int(heads.rotary_dim > 0)
    return cost.Work(rows, sum(heads.widths), features, activations=arithmetic, k_last=True)


def _in_strips(columns: jax.Array, head_size: int) -> jax.Array:
    """Reorders columns [..., heads * H]: strips of `STRIP` columns of a head's two halves alternate."""
    halves = columns.reshape(*columns.shape[:-1], -1, 2, head_size // (2 * STRIP), STRIP)
    return jnp.swapaxes(halves, -2, -3).reshape(columns.shape)


def forward(
    x: jax.Array,
    weights: Sequence[jax.Array],
    biases: Sequence[jax.Array] | None,
    scales: Sequence[jax.Array | None],
    cos: jax.Array | None,
    sin: jax.Array | None,
    *,
    interleaved: bool,
    head_size: int,
    epsilon: float,
    scale_offset: float,
    save_projections: bool,
    multiprocessors: int,
    config: MatmulConfig | FewRowsConfig | None = None,
) -> tuple[jax.Array | None, ...]:
    """Returns queries, keys and values [M, heads * H], and the first two before their norms if saved.

    Args:
      x: [M, D].
      weights: [D, heads * H] of the queries, keys and values.
      biases: [heads * H] of each, of one dtype.
      scales: [H] of the norms of queries and keys, to which `scale_offset` is added.
      cos: [P, R/2] of float32: row m of the result is rotated by row m % P.
      sin: like `cos`.
      interleaved: whether features 2 i and 2 i + 1 are a pair, else features i of both halves.
    """
    m, k = x.shape
    heads = Heads(
        widths=tuple(w.shape[1] for w in weights),
        size=head_size,
        has_norms=tuple(scale is not None for scale in scales),
        rotary_dim=0 if cos is None else 2 * cos.shape[-1],
        interleaved=interleaved,
    )
    w = jnp.concatenate(weights, axis=1)
    bias = None if biases is None else jnp.concatenate(biases)
    all_scales = None
    if heads.norm:
        ones = jnp.ones(head_size, jnp.float32)
        rows = [ones if s is None else s.astype(jnp.float32) + scale_offset for s in scales]
        all_scales = jnp.stack([*rows, ones])
    if config is None:
        config = fitting(m, k, heads, multiprocessors)[0]
    operands = (x, w, bias, all_scales, cos, sin, heads)
    options: dict[str, Any] = dict(epsilon=epsilon, save_projections=save_projections)
    if isinstance(config, FewRowsConfig):
        results = qkv_small_m.forward(*operands, **options, config=config)
    else:
        results = _in_tiles(*operands, **options, multiprocessors=multiprocessors, config=config)
    q, k, v, *projections = results
    return (q, k, v, *(projections or (None, None)))


def _in_tiles(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    scales: jax.Array | None,
    cos: jax.Array | None,
    sin: jax.Array | None,
    heads: Heads,
    *,
    epsilon: float,
    save_projections: bool,
    multiprocessors: int,
    config: MatmulConfig,
) -> Sequence[jax.Array]:
    """Returns the results of `forward`, computed with large tiles, not by the small-M kernel."""
    m, k = x.shape
    if heads.reorders:
        w = _in_strips(w, heads.size)
        bias = None if bias is None else _in_strips(bias, heads.size)
    n = w.shape[1]
    columns = swizzled_columns(x.dtype)

    def epilogue_of(config: MatmulConfig) -> QkvEpilogue:
        b_transposed = config.tile_n % columns != 0
        return QkvEpilogue(
            product=Product(
                m=m,
                n=n,
                ks=(k,),
                dtype=x.dtype,
                blocks=(Block(0),),
                config=config,
                multiprocessors=multiprocessors,
                b_transposed=b_transposed,
                b_columns=n + -n % columns,
            ),
            heads=heads,
            period=0 if cos is None else cos.shape[0],
            bias_dtype=None if bias is None else bias.dtype,
            epsilon=epsilon,
        )

    epilogue = epilogue_of(config)
    epilogue.product.check_shared_bytes(epilogue.shared_bytes)
    if epilogue.product.b_transposed:
        w = w.T
    else:
        w = jnp.pad(w, ((0, 0), (0, -n % columns)))
    tables: tuple[jax.Array, ...] = ()
    if cos is not None and sin is not None:
        tables = (_table(cos, sin, heads.interleaved, x.dtype, config.tile_m),)
    saved = heads.widths[:VALUES] if save_projections else ()
    vectors = [vector for vector in (bias, scales) if vector is not None]
    return epilogue.product.launch(
        (x,),
        (w,),
        (*vectors, *tables),
        out_type=[jax.ShapeDtypeStruct((m, width), x.dtype) for width in (*heads.widths, *saved)],
        scratch=epilogue.scratch(),
        epilogue=epilogue.of_tile,
        name="qkv_projection",
    )


def _table(cos: jax.Array, sin: jax.Array, interleaved: bool, dtype: Any, tile_m: int) -> jax.Array:
    """Returns cosines and sines [P, R/2] as the epilogue reads them: one table [P or P + tile_m, R]."""
    period = cos.shape[0]
    table = interleaved_rope.table(cos, sin) if interleaved else jnp.concatenate((cos, sin), axis=1)
    if dtype == ROUNDS_ANGLES:
        # float16 needs half as many registers as float32, and rounds 8 times finer than bfloat16.
        table = table.astype(jnp.float16)
    if period % tile_m:
        # The rows of a tile may go past the last position, and continue with the first one.
        table = jnp.pad(table, ((0, tile_m), (0, 0)), mode="wrap")
    return table


def input_gradient(
    dys: Sequence[jax.Array],
    weights: Sequence[jax.Array],
    *,
    multiprocessors: int,
    config: MatmulConfig | FewRowsConfig | None = None,
) -> tuple[jax.Array]:
    """Returns dx [M, D]: the sum over queries, keys and values of dy [M, heads * H] @ w^T."""
    product = FusedProduct(
        name="qkv_input_gradient",
        a=tuple(dys),
        b=tuple(weights),
        b_transposed=True,
        epilogue=lambda dx: {"dx": dx},
        outputs={"dx": dys[0].dtype},
    )
    return (product.run(multiprocessors=multiprocessors, config=config)["dx"],)
