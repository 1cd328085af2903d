"""qkv_projection on the Hopper product: queries, keys and values leave as attention reads them.

One product whose columns go to three outputs, so that nothing is split afterwards. An output tile
lies across them as it comes, but what it is stored by, its units, each lie in one. Where there is a norm
or a rotation a unit is a head: its two halves are in the same registers, and its mean square is a sum
within a warp.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import matmul
from pallas_kernels.product import (
    CONSUMERS,
    SHARED_MEMORY_BYTES,
    Block,
    MatmulConfig,
    Product,
    TilePlace,
    tile_cost,
    tiled,
    widest_swizzle,
)

_PIECE = 16
"""Features of a head that the epilogue takes at a time, of either half: more would not fit registers."""
_VALUES = 2
"""Of the three outputs the one without norm and rotation."""
_WIDEST_HEAD = 256
"""Columns of the widest tile."""


def why_unsupported(
    *,
    compute_capability: tuple[int, int] | None,
    dtype: Any,
    features: int,
    heads: int,
    key_heads: int,
    head_size: int,
    norm: bool,
    rotary_dim: int,
    interleaved: bool,
) -> str | None:
    """None where it can run, forward and back, else the rule that stands in the way."""
    if dtype == jnp.float32:
        return "it takes bfloat16 and float16, and x has dtype float32"
    reason = matmul.why_unsupported(
        compute_capability=compute_capability,
        dtypes={"x": dtype},
        features={
            "x": features,
            "the queries": heads * head_size,
            "the keys": key_heads * head_size,
        },
    )
    if reason is not None or not (norm or rotary_dim):
        return reason
    if head_size > _WIDEST_HEAD:
        return f"norm and rotation take heads of up to {_WIDEST_HEAD} features, got {head_size}"
    if rotary_dim and interleaved:
        return "a pair must be two halves of the rotating features, got interleaved pairs"
    for name, size in (
        ("half of the rotating", rotary_dim // 2),
        ("the other", head_size - rotary_dim),
    ):
        if size % _PIECE:
            return f"norm and rotation take multiples of {_PIECE} features, and {name} are {size}"
    return None


def default_config(
    *,
    widths: Sequence[int],
    dtype: Any,
    head_size: int,
    norm: bool,
    rotary_dim: int,
    bias: bool,
) -> MatmulConfig:
    """Tiles of whole units, of few columns beyond the end.

    A second slot to write is worth more than a fourth stage: 50432 x 768 to 3 x 12 heads of 64 with
    rotation 295 us on an H200, 322 without it; with norm and rotation 365, 480. And what shared memory
    four stages take, the tables of angles lack in the L1 cache: 385 us with both.
    """
    whole_heads = norm or rotary_dim > 0
    unit = head_size if whole_heads else math.gcd(32, *widths)
    tile_m = 128 if unit <= 192 else 64

    widest = 192 if unit <= 192 else 256
    candidates = {limit // unit * unit for limit in (128, widest)} - {0}
    tile_n = min(candidates, key=lambda tile_n: tile_cost(sum(widths), tile_n))

    def shared_memory_bytes(c: MatmulConfig) -> int:
        item = jnp.dtype(dtype).itemsize
        streams = c.write_slots * c.tile_m * unit * item
        # What follows the bias begins at a multiple of 1024 bytes.
        biases = (CONSUMERS * 4 * c.tile_n + 2 * 1024) if bias else 0
        return c.ring_bytes(dtype) + CONSUMERS * streams + biases

    candidates = [(3, 2), (4, 1), (3, 1), (2, 1)]
    if not rotary_dim:
        candidates.insert(0, (4, 2))
    return next(
        config
        for stages, write_slots in candidates
        if shared_memory_bytes(
            config := MatmulConfig(
                tile_m=tile_m,
                tile_n=tile_n,
                stages=stages,
                write_slots=write_slots,
                epilogue_columns=_PIECE if whole_heads else unit,
            )
        )
        <= SHARED_MEMORY_BYTES
    )


def forward(
    x: jax.Array,
    weights: Sequence[jax.Array],
    biases: Sequence[jax.Array] | None,
    scales: Sequence[jax.Array | None],
    cos: jax.Array | None,
    sin: jax.Array | None,
    *,
    head_size: int,
    epsilon: float,
    scale_offset: float,
    save_projections: bool,
    multiprocessors: int,
    config: MatmulConfig | None = None,
) -> tuple[jax.Array | None, ...]:
    """Queries, keys and values [M, heads * H], and the former two before their norms if to be saved.

    Args:
      x: [M, D].
      weights: [D, heads * H] of the queries, keys and values.
      biases: [heads * H] of each, of one dtype.
      scales: [H] of the norms of queries and keys.
      cos: [P, R/2] of float32: row m of the result turns by row m % P.
      sin: like `cos`.
    """
    m, k = x.shape
    widths = tuple(w.shape[1] for w in weights)
    w = jnp.concatenate(weights, axis=1)
    bias = None if biases is None else jnp.concatenate(biases)
    rotary_dim = 0 if cos is None else 2 * cos.shape[-1]
    has_norms = [scale is not None for scale in scales]
    if config is None:
        config = default_config(
            widths=widths,
            dtype=x.dtype,
            head_size=head_size,
            norm=any(has_norms),
            rotary_dim=rotary_dim,
            bias=biases is not None,
        )
    # As in `matmul`: whole groups of 8 rows, and more than one.
    padding = max(-m % 8, 16 - m)
    if padding:
        x = jnp.pad(x, ((0, padding), (0, 0)))
    tables: tuple[jax.Array, ...] = ()
    period = 0
    if cos is not None and sin is not None:
        period = cos.shape[0]
        tables = (cos, sin)
        if period % config.tile_m:
            # A tile of rows goes on from the last position to the first.
            beyond = ((0, config.tile_m), (0, 0))
            tables = tuple(jnp.pad(table, beyond, mode="wrap") for table in tables)
    all_scales: list[jax.Array] = []
    if any(has_norms):
        ones = jnp.ones(head_size, jnp.float32)
        rows = [ones if s is None else s.astype(jnp.float32) + scale_offset for s in scales]
        all_scales = [jnp.stack([*rows, ones])]
    epilogue = _Epilogue(
        product=Product(
            m=m,
            n=sum(widths),
            ks=(k,),
            dtype=x.dtype,
            blocks=(Block(0, 0, 0),),
            config=config,
            multiprocessors=multiprocessors,
        ),
        widths=widths,
        head_size=head_size,
        rotary_dim=rotary_dim,
        period=period,
        bias_dtype=None if bias is None else bias.dtype,
        has_norms=tuple(has_norms),
        epsilon=epsilon,
    )
    saved = widths[:2] if save_projections else ()
    results = epilogue.product.launch(
        (x,),
        (w,),
        (*(() if bias is None else (bias,)), *all_scales, *tables),
        out_type=[jax.ShapeDtypeStruct((m + padding, n), x.dtype) for n in (*widths, *saved)],
        scratch=epilogue.scratch(),
        epilogue=epilogue.of_tile,
        name="qkv_projection",
    )
    q, k, v, *projections = (result[:m] for result in results)
    return (q, k, v, *(projections or (None, None)))


def input_gradient(
    dys: Sequence[jax.Array],
    weights: Sequence[jax.Array],
    *,
    multiprocessors: int,
    config: MatmulConfig | None = None,
) -> tuple[jax.Array]:
    """The sum of dy [M, heads * H] times the transpose of w [D, heads * H] over all three."""
    results = matmul.matmul(
        dys,
        weights,
        b_transposed=True,
        epilogue=lambda dx: {"dx": dx},
        outputs={"dx": dys[0].dtype},
        config=config,
        multiprocessors=multiprocessors,
        name="qkv_input_gradient",
    )
    return (results["dx"],)


@dataclass(frozen=True)
class _Epilogue:
    """The epilogue of a launch: its static facts, and its shared memory."""

    product: Product
    widths: tuple[int, ...]
    """Columns of each output."""
    head_size: int
    rotary_dim: int
    period: int
    """Rows after which the angles begin anew."""
    bias_dtype: Any
    """None where there are no biases."""
    has_norms: tuple[bool, ...]
    """For queries and keys."""
    epsilon: float

    @property
    def whole_heads(self) -> bool:
        return any(self.has_norms) or self.rotary_dim > 0

    @property
    def piece(self) -> int:
        return self.product.config.epilogue_columns

    @property
    def unit(self) -> int:
        """Columns that are stored together: a head, where heads matter."""
        return self.head_size if self.whole_heads else self.piece

    @property
    def units(self) -> int:
        """Of a tile; as few as `matmul` takes chunks, and for the same reason."""
        return pl.cdiv(min(self.product.n, self.product.part_n), self.unit)

    def first_column(self, output: int) -> int:
        """Where the columns of an output begin in the product."""
        return sum(self.widths[:output])

    def scratch(self) -> dict[str, Any]:
        c, dtype = self.product.config, self.product.dtype
        swizzle = widest_swizzle(dtype, *self.widths, self.piece)
        scratch: dict[str, Any] = {
            "out_smem": tiled((CONSUMERS, c.write_slots, c.tile_m, self.unit), dtype, swizzle)
        }
        if self.bias_dtype is not None:
            scratch["bias_smem"] = plgpu.SMEM((CONSUMERS, self.product.part_n), self.bias_dtype)
            scratch["bias_full"] = plgpu.Barrier(num_barriers=CONSUMERS)
        return scratch

    def of_tile(
        self, refs: Sequence[Any], smem: Mapping[str, Any], place: TilePlace
    ) -> "_HeadsOfTile":
        return _HeadsOfTile(self, _Refs(self, refs), smem, place)


class _Refs:
    """The arrays of an epilogue in global memory, by their roles."""

    def __init__(self, epilogue: _Epilogue, refs: Sequence[Any]):
        remaining = iter(refs)
        self.bias = next(remaining) if epilogue.bias_dtype is not None else None
        self.scales = next(remaining) if any(epilogue.has_norms) else None
        self.tables = [next(remaining) for _ in range(2)] if epilogue.rotary_dim else []
        self.outputs = [next(remaining) for _ in epilogue.widths]
        self.projections = list(remaining)


@dataclass(frozen=True)
class _HeadsOfTile:
    """The epilogue of a tile, head by head."""

    launch: _Epilogue
    gmem: _Refs
    smem: Mapping[str, Any]
    place: TilePlace

    def column(self, unit: int) -> jax.Array:
        """Where a unit of the tile begins in the product."""
        launch = self.launch
        return self.place.n_idx * launch.product.part_n + unit * launch.unit

    def prefetch(self) -> None:
        if self.gmem.bias is not None:
            plgpu.copy_gmem_to_smem(
                self.gmem.bias.at[pl.ds(self.column(0), self.launch.product.part_n)],
                self.smem["bias_smem"].at[self.place.wg_idx],
                self.smem["bias_full"].at[self.place.wg_idx],
            )

    def run(self, acc: jax.Array) -> None:
        launch = self.launch
        starts = range(0, launch.product.part_n, launch.piece)
        pieces = [acc[:, start : start + launch.piece] for start in starts]
        if self.gmem.bias is not None:
            plgpu.barrier_wait(self.smem["bias_full"].at[self.place.wg_idx])
            bias = self.smem["bias_smem"].at[self.place.wg_idx]
            pieces = [
                piece + self._row(bias, start) for piece, start in zip(pieces, starts, strict=True)
            ]
        # As in `matmul`: what is rounded leaves registers for the arithmetic.
        pieces = lax.optimization_barrier([p.astype(launch.product.dtype) for p in pieces])
        number = 0
        per_unit = launch.unit // launch.piece
        for unit in range(launch.units):
            projected = pieces[unit * per_unit : (unit + 1) * per_unit]
            if self.gmem.projections:
                self._store(number, unit, enumerate(projected), self.gmem.projections)
                number += 1
            finished = (
                self._finished(unit, projected) if launch.whole_heads else enumerate(projected)
            )
            self._store(number, unit, finished, self.gmem.outputs)
            number += 1

    def _store(
        self, number: int, unit: int, pieces: Iterable[tuple[int, jax.Array]], arrays: Sequence[Any]
    ) -> None:
        """Has the pieces of a unit, each with its index, copied out through the next slot.

        Args:
          number: of this store in the tile.
          unit: where in the tile.
          pieces: what to store.
          arrays: of each output; the unit is in one of them, or beyond the last.
        """
        launch, config = self.launch, self.launch.product.config
        slot = self.smem["out_smem"].at[self.place.wg_idx, number % config.write_slots]
        # As in `matmul`: whatever slot the last tile ended with has been read long since. Where some
        # stores have nothing to copy, what is under way is not to be told by counting.
        skips = bool(self.gmem.projections) or launch.product.n % launch.product.part_n
        pending = config.write_slots - 1 if number and not skips else 0
        plgpu.wait_smem_to_gmem(pending, wait_read_only=True)
        for index, piece in pieces:
            slot.at[:, pl.ds(index * launch.piece, launch.piece)][...] = piece
        plgpu.commit_smem()

        column = self.column(unit)
        for output, array in enumerate(arrays):
            start = column - launch.first_column(output)

            @pl.when((start >= 0) & (start < launch.widths[output]))
            def _(array=array, start=start):
                rows = pl.ds(self.place.m_start, config.tile_m)
                block = array.at[rows, pl.ds(start, launch.unit)]
                plgpu.copy_smem_to_gmem(slot, block, commit_group=False)

        plgpu.commit_smem_to_gmem_group()

    def _finished(
        self, unit: int, projected: Sequence[jax.Array]
    ) -> Iterator[tuple[int, jax.Array]]:
        """The pieces of a head after norm and rotation, each with its index.

        All heads go through the same code, in which the norm and the angle of a value are 1 and 0.
        In code of their own the compiler converts pieces for several of them ahead of any, and
        spills; and a choice between results is made of single 16-bit numbers, not of pairs.
        """
        launch = self.launch
        column = self.column(unit)
        is_value = column >= launch.first_column(_VALUES)
        kind = (column >= launch.first_column(1)).astype(jnp.int32) + is_value.astype(jnp.int32)
        factor = None
        if any(launch.has_norms):
            squares = [jnp.sum(jnp.square(p.astype(jnp.float32)), axis=1) for p in projected]
            mean_square = sum(squares[1:], squares[0]) * (1.0 / launch.head_size)
            factor = lax.rsqrt(mean_square + launch.epsilon)
            for plain in (_VALUES, *(i for i, has in enumerate(launch.has_norms) if not has)):
                factor = jnp.where(jnp.broadcast_to(kind == plain, factor.shape), 1.0, factor)

        def normed(index):
            piece = projected[index].astype(jnp.float32)
            if factor is None:
                return piece
            scale = self._row(self.gmem.scales.at[kind], index * launch.piece)
            return piece * lax.broadcast_in_dim(factor, piece.shape, (0,)) * scale

        def angles(table, pair, of_value):
            values = self._angles(table, pair)
            return jnp.where(jnp.broadcast_to(is_value, values.shape), of_value, values)

        half = launch.rotary_dim // 2 // launch.piece
        dtype = launch.product.dtype
        for pair in range(half):
            first, second = normed(pair), normed(half + pair)
            cos, sin = (
                angles(table, pair, of_value)
                for table, of_value in zip(self.gmem.tables, (1.0, 0.0), strict=True)
            )
            yield pair, (first * cos - second * sin).astype(dtype)
            yield half + pair, (second * cos + first * sin).astype(dtype)
        for index in range(2 * half, len(projected)):
            yield index, normed(index).astype(dtype)

    def _angles(self, table, pair: int) -> jax.Array:
        """Cosines or sines of some pairs, for the rows of the tile."""
        launch = self.launch
        first = lax.rem(self.place.m_start, jnp.int32(launch.period))
        rows = pl.ds(first, launch.product.config.tile_m)
        columns = pl.ds(pair * launch.piece, launch.piece)
        return plgpu.load(table.at[rows, columns], layout=plgpu.Layout.WGMMA, optimized=False)

    def _row(self, ref, start: int) -> jax.Array:
        """Some columns of a row, over all rows of the tile."""
        launch = self.launch
        row = plgpu.load(
            ref.at[pl.ds(start, launch.piece)],
            layout=plgpu.Layout.WGMMA.reduce(0),
            optimized=False,
        ).astype(jnp.float32)
        return lax.broadcast_in_dim(row, (launch.product.config.tile_m, launch.piece), (1,))
