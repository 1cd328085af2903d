"""qkv_projection on the Hopper product: queries, keys and values are stored as attention reads them.

One product writes its columns to three outputs, so that nothing is split afterwards. An output tile may
lie across them, but its units, which are stored one by one, each lie in one output. With a norm or rope
a unit is a head: its two halves are in the same registers, and its mean square is a sum within a warp. A
wide head with rope alone is cut into units of as many features of either half, for which the columns of
the weights are reordered: tiles of any width then hold whole units. With interleaved pairs any cut
between pairs will do, and the columns stay in their order.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import store
from pallas_kernels.gemm import cost, interleaved_rope, matmul, qkv_small_m, xla_cost
from pallas_kernels.gemm.mainloop import Product
from pallas_kernels.gemm.matmul_config import CONSUMERS, MatmulConfig
from pallas_kernels.gemm.operands import SWIZZLE_BYTES, block, swizzled_columns
from pallas_kernels.gemm.small_m import FewRowsConfig
from pallas_kernels.gemm.tiled_product import Block, TilePlace
from pallas_kernels.hopper import SHARED_MEMORY_BYTES, row_of_copies

_GRAIN = 16
"""Divisor of an output's columns, and in a head with a norm or rope of the rotated features (of each
half, if halves are the pairs) and of the others: the narrowest piece that is swizzled."""
_STRIP = 32
"""Features of either half that the epilogue processes at a time, where it can."""
_ANGLES_AHEAD = 128
"""Limit on the angles of a row to read ahead, 16 bits each: for 128 rows, 64 registers of a thread."""
_ROUNDS_ANGLES = jnp.bfloat16
"""Dtype of x for which angles are rounded to float16."""
_VALUES = 2
"""Index of the output without norm and rotation."""
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
    """Returns None where forward and backward can run, else the rule that is broken."""
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
    if reason is not None:
        return reason
    for name, size in (("queries", heads * head_size), ("keys", key_heads * head_size)):
        if size % _GRAIN:
            return (
                f"it takes multiples of {_GRAIN} features in all heads, and the {name} have {size}"
            )
    if not (norm or rotary_dim):
        return None
    if head_size > _WIDEST_HEAD:
        return f"norm and rotation take heads of up to {_WIDEST_HEAD} features, got {head_size}"
    rotating = ("half of the rotating", rotary_dim // 2)
    if interleaved:
        rotating = ("the rotating", rotary_dim)
    for name, size in (rotating, ("the other", head_size - rotary_dim)):
        if size % _GRAIN:
            return f"norm and rotation take multiples of {_GRAIN} features, and {name} are {size}"
    return None


def candidates(
    *,
    rows: int,
    features: int,
    widths: Sequence[int],
    head_size: int,
    norm: bool,
    rotary_dim: int,
    interleaved: bool,
    multiprocessors: int,
) -> list[MatmulConfig]:
    """Returns tiles of whole units with few columns past the end, the likely fastest first."""
    unit = piece = math.gcd(_STRIP, *widths)
    if norm or rotary_dim:
        unit = 2 * _STRIP if _splits_heads(head_size, norm, rotary_dim) else head_size
        turning = rotary_dim if interleaved else rotary_dim // 2
        piece = math.gcd(_STRIP, turning, head_size - rotary_dim)
    tile_m = 128 if unit <= 192 else 64

    widest = 192 if unit <= 192 else 256
    by_limit = {limit // unit * unit for limit in (128, widest)} - {0}
    sizes = [(4, 2), (3, 2), (4, 1), (3, 1), (2, 1)]
    if norm:
        # 50432 x 768 to 3 x 12 heads of 64 with rotation: 267 us with three stages, 283 with four.
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
    work = _work(rows, features, widths, norm=norm, rotary_dim=rotary_dim)
    order = {size: index for index, size in enumerate(sizes)}

    def time(config: MatmulConfig) -> tuple[float, int]:
        # The measured order of stages above decides, and not the model's estimates of them.
        as_measured = replace(config, stages=4)
        return (
            cost.kernel(work, as_measured, multiprocessors),
            order[config.stages, config.write_slots],
        )

    return sorted(configs, key=time)


def fitting(
    *,
    rows: int,
    features: int,
    widths: Sequence[int],
    head_size: int,
    norm: bool,
    rotary_dim: int,
    interleaved: bool,
    multiprocessors: int,
) -> list[MatmulConfig | FewRowsConfig]:
    """Returns the candidates of both kernels that fit into shared memory, the default one first."""
    whole = dict(head_size=head_size, norm=norm, rotary_dim=rotary_dim)
    heads = whole | dict(interleaved=interleaved)

    def shared_bytes(config: MatmulConfig) -> int:
        """Returns the approximate bytes per CTA; `_Epilogue.shared_bytes` is exact."""
        unit = config.epilogue_columns
        if norm or rotary_dim:
            unit = 2 * _STRIP if _splits_heads(**whole) else head_size
        ring = config.stages * (config.cta_tile_m + config.tile_n) * SWIZZLE_BYTES
        stored = CONSUMERS * config.write_slots * config.tile_m * unit * 2
        vectors_and_barriers = 4 * 1024
        return ring + stored + vectors_and_barriers

    work = _work(rows, features, widths, norm=norm, rotary_dim=rotary_dim)
    # Whether projections are saved is not known here: their memory is counted, and that of angles.
    most = replace(work, written_bytes=2 * work.written_bytes, read_bytes=4)
    few_rows = [
        config
        for config in qkv_small_m.candidates(
            work, widths=widths, multiprocessors=multiprocessors, **whole
        )
        if cost.few_rows_shared_bytes(most, config) <= SHARED_MEMORY_BYTES
    ]
    of_many = candidates(
        rows=rows, features=features, widths=widths, multiprocessors=multiprocessors, **heads
    )
    of_many = [config for config in of_many if shared_bytes(config) <= SHARED_MEMORY_BYTES]
    if few_rows and cost.time(work, few_rows[0], multiprocessors) < cost.time(
        work, of_many[0], multiprocessors
    ):
        return [*few_rows, *of_many]
    return [*of_many, *few_rows]


def predicted_time(
    rows: int,
    features: int,
    widths: Sequence[int],
    *,
    head_size: int,
    norm: bool,
    rotary_dim: int,
    interleaved: bool,
    w_itemsize: int,
    multiprocessors: int,
) -> float:
    """Returns the predicted microseconds of `forward` with its default config.

    They include XLA's conversion of weights of `w_itemsize` bytes each, or their copy into the order
    that the kernel reads. The weights are assumed to be concatenated already.
    """
    work = _work(rows, features, widths, norm=norm, rotary_dim=rotary_dim)
    config = fitting(
        rows=rows,
        features=features,
        widths=widths,
        head_size=head_size,
        norm=norm,
        rotary_dim=rotary_dim,
        interleaved=interleaved,
        multiprocessors=multiprocessors,
    )[0]
    time = cost.time(work, config, multiprocessors)
    if isinstance(config, FewRowsConfig):
        return time
    columns = SWIZZLE_BYTES // 2
    reorders = config.tile_n % columns > 0 or sum(widths) % columns > 0
    reorders = reorders or _orders_columns(head_size, norm, rotary_dim, interleaved)
    if reorders or w_itemsize != 2:
        time += xla_cost.xla_pass(features * sum(widths), w_itemsize + 2)
    return time


def _work(
    rows: int, features: int, widths: Sequence[int], *, norm: bool, rotary_dim: int
) -> cost.Work:
    # A norm or rope takes about as many instructions as an activation. `k_last` stands for a padded b.
    arithmetic = int(norm) + int(rotary_dim > 0)
    return cost.Work(rows, sum(widths), features, activations=arithmetic, k_last=True)


def _splits_heads(head_size: int, norm: bool, rotary_dim: int) -> bool:
    """Returns whether a unit is a part of a head: a strip of each half, or 64 adjacent features.

    Tiles of whole heads of 128 have 128 or 256 columns: 32768 x 4096 to 48 heads 2.24 and 2.12 ms on
    an H200, 2.06 in tiles of 192 of such units.
    """
    unit = 2 * _STRIP
    return not norm and head_size == rotary_dim > unit and head_size % unit == 0


def _orders_columns(head_size: int, norm: bool, rotary_dim: int, interleaved: bool) -> bool:
    """Returns whether `forward` reorders the columns of the weights."""
    return _splits_heads(head_size, norm, rotary_dim) and not interleaved


def _in_strips(columns: jax.Array, head_size: int) -> jax.Array:
    """Returns [..., heads * H] with the strips of a head's halves alternating, a pair for each unit."""
    halves = columns.reshape(*columns.shape[:-1], -1, 2, head_size // (2 * _STRIP), _STRIP)
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
      scales: [H] of the norms of queries and keys.
      cos: [P, R/2] of float32: row m of the result is rotated by row m % P.
      sin: like `cos`.
      interleaved: whether features 2 i and 2 i + 1 are a pair, else features i of both halves.
    """
    m, k = x.shape
    widths = tuple(w.shape[1] for w in weights)
    rotary_dim = 0 if cos is None else 2 * cos.shape[-1]
    has_norms = [scale is not None for scale in scales]
    w = jnp.concatenate(weights, axis=1)
    bias = None if biases is None else jnp.concatenate(biases)
    all_scales: list[jax.Array] = []
    if any(has_norms):
        ones = jnp.ones(head_size, jnp.float32)
        rows = [ones if s is None else s.astype(jnp.float32) + scale_offset for s in scales]
        all_scales = [jnp.stack([*rows, ones])]
    if config is None:
        config = fitting(
            rows=m,
            features=k,
            widths=widths,
            head_size=head_size,
            norm=any(has_norms),
            rotary_dim=rotary_dim,
            interleaved=interleaved,
            multiprocessors=multiprocessors,
        )[0]
    if isinstance(config, FewRowsConfig):
        q, k, v, *projections = qkv_small_m.forward(
            *(x, w, bias, all_scales[0] if all_scales else None, cos, sin),
            interleaved=interleaved,
            widths=widths,
            has_norms=has_norms,
            head_size=head_size,
            epsilon=epsilon,
            save_projections=save_projections,
            config=config,
        )
        return (q, k, v, *(projections or (None, None)))
    splits_heads = _splits_heads(head_size, any(has_norms), rotary_dim)
    if _orders_columns(head_size, any(has_norms), rotary_dim, interleaved):
        w = _in_strips(w, head_size)
        bias = None if bias is None else _in_strips(bias, head_size)
    n = w.shape[1]
    columns = swizzled_columns(x.dtype)

    def epilogue_of(config: MatmulConfig) -> _Epilogue:
        b_transposed = config.tile_n % columns != 0
        return _Epilogue(
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
            widths=widths,
            head_size=head_size,
            splits_heads=splits_heads,
            rotary_dim=rotary_dim,
            interleaved=interleaved,
            period=0 if cos is None else cos.shape[0],
            bias_dtype=None if bias is None else bias.dtype,
            has_norms=tuple(has_norms),
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
        if interleaved:
            table = interleaved_rope.table(cos, sin)
        else:
            table = jnp.concatenate((cos, sin), axis=1)
        if x.dtype == _ROUNDS_ANGLES:
            # float16 takes half the registers, and its rounding is 8 times finer than the result's.
            table = table.astype(jnp.float16)
        if epilogue.period % config.tile_m:
            # A tile of rows may go on from the last position to the first.
            table = jnp.pad(table, ((0, config.tile_m), (0, 0)), mode="wrap")
        tables = (table,)
    saved = widths[:2] if save_projections else ()
    results = epilogue.product.launch(
        (x,),
        (w,),
        (*(() if bias is None else (bias,)), *all_scales, *tables),
        out_type=[jax.ShapeDtypeStruct((m, width), x.dtype) for width in (*widths, *saved)],
        scratch=epilogue.scratch(),
        epilogue=epilogue.of_tile,
        name="qkv_projection",
    )
    q, k, v, *projections = results
    return (q, k, v, *(projections or (None, None)))


def input_gradient(
    dys: Sequence[jax.Array],
    weights: Sequence[jax.Array],
    *,
    multiprocessors: int,
    config: MatmulConfig | FewRowsConfig | None = None,
) -> tuple[jax.Array]:
    """Returns the sum of dy [M, heads * H] @ w^T of w [D, heads * H] over all three."""
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
    """The epilogue of a launch: its static parameters and its shared memory."""

    product: Product
    widths: tuple[int, ...]
    """Columns of each output."""
    head_size: int
    splits_heads: bool
    rotary_dim: int
    interleaved: bool
    """True if pairs are interleaved, so that one piece has both features of a pair."""
    period: int
    """Rows after which the angles repeat."""
    bias_dtype: Any
    """Dtype of the biases; None where there are none."""
    has_norms: tuple[bool, ...]
    """True if there are norms of queries and of keys."""
    epsilon: float

    @property
    def whole_heads(self) -> bool:
        return any(self.has_norms) or self.rotary_dim > 0

    @property
    def piece(self) -> int:
        return self.product.config.epilogue_columns

    @property
    def unit(self) -> int:
        """Columns of a unit, which are stored together."""
        if self.splits_heads:
            return 2 * _STRIP
        return self.head_size if self.whole_heads else self.piece

    @property
    def run(self) -> int:
        """Columns of a unit that are adjacent in an output."""
        return _STRIP if self.splits_heads and not self.interleaved else self.unit

    @property
    def turning(self) -> int:
        """Rotated features of a unit, which are its first ones."""
        return min(self.rotary_dim, self.unit)

    @property
    def turning_pieces(self) -> list[tuple[int, ...]]:
        """Indices of pieces that are rotated together: single ones, or one of each half."""
        count = self.turning // self.piece
        if self.interleaved:
            return [(index,) for index in range(count)]
        return [(index, count // 2 + index) for index in range(count // 2)]

    @property
    def units(self) -> int:
        """Units in a tile; fewer where the product is narrower than a tile."""
        return pl.cdiv(min(self.product.n, self.product.part_n), self.unit)

    def first_column(self, output: int) -> int:
        """Returns the product's column at which an output begins."""
        return sum(self.widths[:output])

    def first_pair(self, column: jax.Array) -> jax.Array | int:
        """Returns the index, in its head, of the first pair of the unit that begins at a column."""
        if not self.splits_heads:
            return 0
        within = lax.rem(column, jnp.int32(self.head_size))
        return pl.multiple_of(lax.div(within, jnp.int32(2)), _STRIP)

    def runs(self, column: jax.Array) -> tuple[jax.Array, ...]:
        """Returns an output's columns at which a unit's runs begin; a single one begins at `column`."""
        if self.run == self.unit:
            return (column,)
        first = column - self.first_pair(column)
        return first, first + self.head_size // 2

    def scratch(self) -> dict[str, Any]:
        c, dtype = self.product.config, self.product.dtype
        leading = (CONSUMERS, c.write_slots, self.unit // self.piece)
        scratch: dict[str, Any] = {"out_smem": block(leading, c.tile_m, self.piece, dtype)}
        if self.bias_dtype is not None:
            row = row_of_copies(self.product.part_n, self.bias_dtype)
            scratch["bias_smem"] = plgpu.SMEM((CONSUMERS, row), self.bias_dtype)
            scratch["bias_full"] = plgpu.Barrier(num_barriers=CONSUMERS)
        return scratch

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory per CTA."""
        return self.product.shared_bytes(self.scratch(), sums=any(self.has_norms))

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
        self.table: Any = next(remaining) if epilogue.rotary_dim else None
        self.outputs = [next(remaining) for _ in epilogue.widths]
        self.projections = list(remaining)


@dataclass(frozen=True)
class _HeadsOfTile:
    """The epilogue of a tile, unit by unit."""

    launch: _Epilogue
    gmem: _Refs
    smem: Mapping[str, Any]
    place: TilePlace

    def column(self, unit: int) -> jax.Array:
        """Returns the product's column at which a unit of the tile begins."""
        launch = self.launch
        return self.place.n_idx * launch.product.part_n + unit * launch.unit

    def prefetch(self) -> None:
        if self.gmem.bias is not None:
            row = self.smem["bias_smem"].at[self.place.wg_idx]
            plgpu.copy_gmem_to_smem(
                self.gmem.bias.at[pl.ds(self.column(0), row.shape[0])],
                row,
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
        # Rounded pieces leave registers for the arithmetic.
        pieces = lax.optimization_barrier([p.astype(launch.product.dtype) for p in pieces])
        store.store_in_turn(
            self._results(pieces),
            count=launch.units * len(self._stored),
            slots=launch.product.config.write_slots,
            store=self._store,
            send=self._send,
        )

    @property
    def _stored(self) -> tuple[Sequence[Any], ...]:
        """Groups of arrays; each unit is stored to one array of each group."""
        return tuple(filter(None, (self.gmem.projections, self.gmem.outputs)))

    def _results(self, pieces: Sequence[jax.Array]) -> Iterator[Sequence[tuple[int, jax.Array]]]:
        """Yields each unit's pieces with their indices, for each group of arrays."""
        launch = self.launch
        per_unit = launch.unit // launch.piece
        angles: list[Sequence[jax.Array]] = []
        for unit in range(launch.units):
            projected = pieces[unit * per_unit : (unit + 1) * per_unit]
            if self.gmem.projections:
                yield list(enumerate(projected))
            finished: Iterable[tuple[int, jax.Array]] = enumerate(projected)
            if launch.whole_heads:
                if self._reads_ahead and (launch.splits_heads or not unit):
                    angles = [self._angles(unit, s) for s in range(len(launch.turning_pieces))]
                finished = self._finished(unit, projected, angles)
            yield list(finished)

    @property
    def _reads_ahead(self) -> bool:
        """True if a unit's angles are all read at once, and reused for further units where possible.

        Angles that are read again for each head and piece come from L2, for which a warpgroup waits:
        50432 x 768 to 3 x 12 heads of 64 took 270 us on an H200, 240 read ahead, and 231 without
        rotation.
        """
        launch = self.launch
        if launch.product.dtype != _ROUNDS_ANGLES:
            return False
        return launch.turning <= _ANGLES_AHEAD

    def _store(self, number: int, pieces: Sequence[tuple[int, jax.Array]]) -> None:
        """Writes the pieces of a result, each with its index, to their stage in shared memory."""
        registers, _ = self.smem["out_smem"]
        for index, piece in pieces:
            store.store_piece(registers.at[*self._slot(number), index], piece)

    def _slot(self, number: int) -> tuple[jax.Array, int]:
        """Returns the indices of a result's stage in shared memory."""
        return self.place.wg_idx, number % self.launch.product.config.write_slots

    def _send(self, number: int) -> None:
        """Starts the copy of a result from its stage to the array that has its unit, if one does."""
        launch, config = self.launch, self.launch.product.config
        place = self._slot(number)
        _, copies = self.smem["out_smem"]
        unit, group = divmod(number, len(self._stored))
        arrays, column = self._stored[group], self.column(unit)
        for output, array in enumerate(arrays):
            start = column - launch.first_column(output)

            @pl.when((start >= 0) & (start < launch.widths[output]))
            def _(array=array, start=start):
                rows = pl.ds(self.place.m_start, config.tile_m)
                runs = launch.runs(start)
                for index in range(launch.unit // launch.piece):
                    run, within = divmod(index * launch.piece, launch.run)
                    columns = pl.ds(runs[run] + within, launch.piece)
                    plgpu.copy_smem_to_gmem(
                        copies.at[*place, index], array.at[rows, columns], commit_group=False
                    )

        plgpu.commit_smem_to_gmem_group()

    def _finished(
        self,
        unit: int,
        projected: Sequence[jax.Array],
        angles: Sequence[Sequence[jax.Array]],
    ) -> Iterator[tuple[int, jax.Array]]:
        """Yields the pieces of a unit after norm and rotation, each with its index.

        All heads run the same code, in which values have a norm factor of 1 and an angle of 0. With
        separate code the compiler converts pieces for several cases ahead of any, and spills registers;
        and a selection takes single 16-bit numbers, where a product takes pairs.
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

        dtype = launch.product.dtype
        for step, indices in enumerate(launch.turning_pieces):
            before = [normed(index) for index in indices]
            turns = angles[step] if angles else self._angles(unit, step)
            turned = self._turned(before, turns, is_value)
            for index, piece in zip(indices, turned, strict=True):
                yield index, piece.astype(dtype)
        for index in range(launch.turning // launch.piece, len(projected)):
            yield index, normed(index).astype(dtype)

    def _turned(
        self, pieces: Sequence[jax.Array], angles: Sequence[jax.Array], is_value: jax.Array
    ) -> Iterator[jax.Array]:
        """Yields the pieces of some pairs after their rotation, which leaves values as they are."""
        value = is_value.astype(angles[0].dtype)
        if self.launch.interleaved:
            yield interleaved_rope.turned(pieces[0], angles[0], value)
            return
        first, second = pieces
        cos, sin = angles
        cos, sin = (
            angle.astype(jnp.float32) for angle in (cos * (1 - value) + value, sin * (1 - value))
        )
        yield first * cos - second * sin
        yield second * cos + first * sin

    def _angles(self, unit: int, step: int) -> Sequence[jax.Array]:
        """Loads the angles of some pieces of a unit, for the rows of the tile.

        They are cosines and sines, or for interleaved pairs one array in which these alternate.
        """
        launch = self.launch
        first_row = lax.rem(self.place.m_start, jnp.int32(launch.period))
        rows = pl.ds(first_row, launch.product.config.tile_m)
        first_pair, within = launch.first_pair(self.column(unit)), step * launch.piece
        if launch.interleaved:
            starts = [2 * first_pair + within]
        else:
            starts = [half + first_pair + within for half in (0, launch.rotary_dim // 2)]
        return [
            plgpu.load(
                self.gmem.table.at[rows, pl.ds(start, launch.piece)],
                layout=plgpu.Layout.WGMMA,
                optimized=False,
            )
            for start in starts
        ]

    def _row(self, ref, start: int) -> jax.Array:
        """Loads some columns of a row, and broadcasts them over all rows of the tile."""
        launch = self.launch
        row = plgpu.load(
            ref.at[pl.ds(start, launch.piece)],
            layout=plgpu.Layout.WGMMA.reduce(0),
            optimized=False,
        ).astype(jnp.float32)
        return lax.broadcast_in_dim(row, (launch.product.config.tile_m, launch.piece), (1,))
