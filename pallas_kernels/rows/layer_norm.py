"""layer_norm and rms_norm on Hopper: configs, limits, forward and backward kernels.

Both read every operand once and write every result once; statistics stay in float32 registers. The
forward saves mean and 1/std of each row, so that the backward needs one exchange between warps for
a row. The backward carries the parameter gradients in registers over all rows of a CTA and writes
one partial sum a CTA; XLA adds those up in a fixed order.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper
from pallas_kernels.activation import activation as activate
from pallas_kernels.activation import derivative
from pallas_kernels.hopper import LANES, SHARED_MEMORY_BYTES, WARPS
from pallas_kernels.rows.rounding import RowRounding
from pallas_kernels.rows.tiles import Place, RowConfig, RowTiles

_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)

_LARGEST_FEATURES = 16384
"""Features up to which the backward's sums fit into the registers of one CTA."""


# --- configs --------------------------------------------------------------------------------------
#
# benchmarks/LAB.md has the trials behind the first guesses.

_DIRECT_BYTES = 78 * 10**6
"""Bytes read and written from which the forward needs no ring; well over the L2's 50 MB."""


def forward_candidates(
    rows: int, features: int, itemsize: int, matrices: int, vectors: int
) -> list[RowConfig]:
    """Returns configs for [rows, features], the best guess first; none if no config can run.

    The forward reads `matrices` arrays of that shape (2 with a residual) and `vectors` of [features].
    """
    element_bytes = matrices * itemsize
    guesses = _forward_guesses(rows, features, itemsize, matrices, vectors)
    return _legal(guesses, rows, features, element_bytes, sums=False)


def _forward_guesses(
    rows: int,
    features: int,
    itemsize: int,
    matrices: int,
    vectors: int,
    all_rows: int | None = None,
) -> list[RowConfig]:
    """Returns the configs of `forward_candidates` without checking them.

    `rows` may be a segment of `all_rows`.
    """
    row_bytes = features * itemsize * matrices
    narrow = _direct(row_per_warp=True, lines=2 * WARPS, chunks=max(1, features // 256))
    short = _direct(row_per_warp=True, lines=WARPS, chunks=max(1, features // 512))
    wide = _direct(row_per_warp=False, lines=WARPS, chunks=4)
    rings = [_forward_ring(rows, features, itemsize, matrices, vectors)]
    in_segments = all_rows is not None and all_rows != rows
    if in_segments and matrices == 1 and 1024 < features <= 1536 and rows >= 2 * WARPS:
        # A CTA has few rows of its segment: larger copies keep as many bytes in flight.
        rings.insert(0, _ring_of_warps(features, matrices * itemsize, 2 * WARPS, 2))
    if features <= 2048:
        # Tiles of more rows make larger copies; tiles of fewer rows leave room for more CTAs.
        for lines in (1, 2, 4):
            for ctas in (2, 4, 8):
                rings.append(_ring_of_warps(features, matrices * itemsize, lines * WARPS, ctas))
    else:
        for warpgroups in (1, 2, 4):
            for ctas in (1, 2, 4, 8):
                rings.append(_ring_of_ctas(row_bytes, warpgroups, ctas))
    if matrices > 1 or 2 * (all_rows or rows) * row_bytes < _DIRECT_BYTES:
        return [*rings, short]
    if features <= 1024 and features % 256 == 0:
        return [narrow, *rings]
    # Without a ring each row reads the vectors again, and a third one costs too much.
    if (features == 8192 and vectors <= 2) or (features == 4096 and vectors == 1):
        return [wide, *rings]
    return [*rings, narrow, wide]


def _forward_ring(
    rows: int, features: int, itemsize: int, matrices: int, vectors: int
) -> RowConfig:
    row_bytes = features * itemsize * matrices
    if _row_per_warp(rows, features):
        lines = _lines(rows, 4096 // (features * itemsize))
        ctas = 8 if features <= 512 else 4
        if features > 768 and vectors == 3:
            # Three vectors leave registers for only three CTAs.
            ctas = 3
        return _ring_of_warps(features, matrices * itemsize, lines, ctas)
    warpgroups = 1 if features <= 4096 or features % 512 else 2
    # For long rows, more CTAs are better than a third stage.
    ctas = max(1, _slots(8 // warpgroups, (3 if row_bytes < 32768 else 2) * row_bytes))
    return _ring_of_ctas(row_bytes, warpgroups, ctas)


def _ring_of_warps(features: int, element_bytes: int, lines: int, ctas: int) -> RowConfig:
    """Returns a forward's config with a row for each warp, and with as many stages as fit."""
    tile_bytes = lines * features * element_bytes
    ctas = _slots(ctas, 3 * tile_bytes)
    slots = _slots(4, ctas * tile_bytes)
    return RowConfig(True, 1, slots, ctas_per_multiprocessor=ctas, lines=lines)


def _ring_of_ctas(row_bytes: int, warpgroups: int, ctas: int) -> RowConfig:
    """Returns a forward's config with a row for each CTA, and with as many stages as fit."""
    slots = _slots(4, ctas * row_bytes)
    return RowConfig(False, warpgroups, slots, ctas_per_multiprocessor=ctas)


def backward_candidates(
    rows: int, features: int, itemsize: int, matrices: int, vectors: int
) -> list[RowConfig]:
    """Returns configs for [rows, features], the best guess first; none if no config can run.

    The backward reads `matrices` arrays of that shape (3 with a residual) and `vectors` of [features].
    """
    guesses = _backward_guesses(rows, features, itemsize, matrices, vectors)
    return _legal(guesses, rows, features, matrices * itemsize, sums=True)


def _balanced(guesses: list[RowConfig], segments: int, multiprocessors: int) -> list[RowConfig]:
    """Returns the guesses, first those that leave few SMs idle if no CTA has rows of two segments.

    One CTA an SM is the best guess for one long segment; with a hundred segments it leaves every fourth
    SM idle.
    """

    def busy(config: RowConfig) -> float:
        room = multiprocessors * config.ctas_per_multiprocessor
        rounds = -(-segments // room)
        return segments * max(1, room // segments) / (rounds * room)

    return sorted(guesses, key=lambda config: -min(busy(config), _BUSY_ENOUGH))


def _best(
    guesses: list[RowConfig],
    rows: int,
    features: int,
    element_bytes: int,
    segments: int,
    multiprocessors: int,
) -> RowConfig:
    """Returns the backward's config: the first guess for one segment, else a well-balanced legal one."""
    if segments == 1:
        return guesses[0]
    legal = _legal(guesses, rows, features, element_bytes, sums=True)
    # With a row for each warp, two small CTAs hide waits better than a large one.
    preferred = sorted(
        legal,
        key=lambda config: (
            config.row_per_warp and (config.warpgroups, config.ctas_per_multiprocessor) != (1, 2)
        ),
    )
    return _balanced(preferred or guesses, segments, multiprocessors)[0]


_BUSY_ENOUGH = 0.9
"""Fraction of the CTAs that fit the GPU from which a launch counts as well balanced."""


def _backward_guesses(
    rows: int, features: int, itemsize: int, matrices: int, vectors: int
) -> list[RowConfig]:
    """Returns the configs of `backward_candidates` without checking them."""
    row_bytes = features * itemsize * matrices
    if _row_per_warp(rows, features):
        lines = _lines(rows, 8192 // (features * itemsize))
        # More than 2 warpgroups an SM spill registers, unless rows are narrow. One CTA of 2 writes
        # half the partial sums of 2 CTAs.
        shapes = [(1, 4, lines)] if features <= 128 else [(2, max(1, 256 // features), lines)]
        shapes += [(wgs, ctas, lines) for wgs, ctas in ((2, 1), (2, 2), (1, 2), (1, 4), (2, 4))]
        shapes += [(1, 6, 2 * WARPS), (2, 1, WARPS)]
        return [
            _backward_ring_of_warps(features, matrices * itemsize, vectors, *shape)
            for shape in shapes
        ]
    if features > 8192 and features % 2048 == 0:
        # A row and its sums do not both fit into the registers: each pass reads the tile from shared
        # memory.
        slots = _slots(2, row_bytes)
        return [
            RowConfig(
                False,
                warpgroups=4,
                slots=slots,
                ctas_per_multiprocessor=1,
                chunks=features // 2048,
                keeps_tile=False,
                keeps_vectors=False,
            )
        ]
    warpgroups = 1 if features <= 4096 or features % 512 else 2
    ctas = 4 if features <= 2048 else 2 if features <= 4096 else 1
    most_slots = 4 if features <= 2048 else 3
    # With few rows, fewer CTAs write fewer partial sums to add up.
    shapes = [(warpgroups, ctas), (warpgroups, 1), (warpgroups, 2), (2, 1), (1, 4)]
    return [
        _backward_ring_of_ctas(features, row_bytes, vectors, *shape, most_slots) for shape in shapes
    ]


def _backward_ring_of_warps(
    features: int, element_bytes: int, vectors: int, warpgroups: int, ctas: int, lines: int
) -> RowConfig:
    """Returns a backward's config with a row for each warp, and with as many stages as fit."""
    tile_bytes = warpgroups * lines * features * element_bytes
    sums_bytes = warpgroups * lines * features * 4
    return RowConfig(
        True,
        warpgroups,
        slots=_slots(3, ctas * tile_bytes, reserved=ctas * sums_bytes),
        ctas_per_multiprocessor=ctas,
        lines=lines,
        keeps_vectors=_room_for(vectors, lines * features // (WARPS * LANES)),
    )


def _backward_ring_of_ctas(
    features: int, row_bytes: int, vectors: int, warpgroups: int, ctas: int, most_slots: int
) -> RowConfig:
    """Returns a backward's config with a row for each CTA, and with as many stages as fit."""
    return RowConfig(
        False,
        warpgroups,
        slots=_slots(most_slots, ctas * row_bytes),
        ctas_per_multiprocessor=ctas,
        keeps_vectors=_room_for(vectors, features // (warpgroups * WARPS * LANES)),
    )


def _direct(row_per_warp: bool, lines: int, chunks: int) -> RowConfig:
    return RowConfig(
        row_per_warp,
        warpgroups=1,
        slots=0,
        ctas_per_multiprocessor=1,
        lines=lines,
        chunks=chunks,
        keeps_vectors=False,
    )


def _legal(
    guesses: list[RowConfig], rows: int, features: int, element_bytes: int, sums: bool
) -> list[RowConfig]:
    """Returns the guesses that can run, each once, in order."""
    return [
        config
        for config in dict.fromkeys(guesses)
        if config.why_unfit(rows, features, element_bytes, sums) is None
    ]


def _room_for(vectors: int, values: int) -> bool:
    """Returns whether the backward can keep the vectors in registers, `values` of each in a thread.

    Next to the tile and the sums there is room for 48 values; with more the registers spill.
    """
    return vectors * values <= 48


def _lines(rows: int, wanted: int) -> int:
    """Returns the rows of a tile: more for few features, or copies would be small and sums wait."""
    if rows < 4 * WARPS:
        return WARPS
    return min(4, max(1, wanted // WARPS)) * WARPS


def _row_per_warp(rows: int, features: int) -> bool:
    if features % (2 * LANES * WARPS):
        return features <= 2048
    # A tile with a row for each warp needs four rows at least; one with a row for each CTA, one.
    return features <= 1024 and rows >= WARPS


def _slots(wanted: int, slot_bytes: int, reserved: int = 0) -> int:
    """Returns `wanted` stages, or as many as fit into an SM's shared memory, but at least one.

    If not even one fits, `RowConfig.why_unfit` says so.
    """
    return max(1, min(wanted, (SHARED_MEMORY_BYTES - 4096 - reserved) // slot_bytes))


# --- limits ---------------------------------------------------------------------------------------


def why_unsupported(
    *,
    compute_capability: tuple[int, int] | None,
    rows: int,
    features: int,
    dtype: Any,
    residual_dtype: Any = None,
    segments: int = 1,
    vectors_of_segments: bool = False,
    gated: bool = False,
) -> str | None:
    """Returns None if forward and backward can run, else the rule that they break.

    The shapes are those that the kernels see: of one shard, with all entries of a `vmap` folded into the
    rows. Each entry is one of the backward's `segments`.

    Args:
      vectors_of_segments: whether each segment has its own scale, bias, pre_bias and gate.
      gated: whether a gate multiplies the branch that is added to the residual.
    """
    reason = hopper.why_unfit(compute_capability)
    if reason is not None:
        return reason
    if dtype not in _DTYPES:
        return f"x must be float32, bfloat16 or float16, got {dtype}"
    if residual_dtype is not None and residual_dtype != dtype:
        return f"residual must have x's dtype {dtype}, got {residual_dtype}"
    if features > _LARGEST_FEATURES:
        return f"the number of features must be at most {_LARGEST_FEATURES}, got {features}"
    if rows == 0:
        return None
    if segments < 1 or rows % segments:
        return f"segments must divide the {rows} rows evenly, got {segments}"
    itemsize = jnp.dtype(dtype).itemsize
    residual = 0 if residual_dtype is None else 1
    tiled = rows // segments if vectors_of_segments else rows
    for guesses, matrices, sums in (
        (_forward_guesses, 1 + residual, False),
        (_backward_guesses, 2 + residual + gated, True),
    ):
        guess = guesses(tiled, features, itemsize, matrices, 1)[0]
        reason = guess.why_unfit(tiled, features, matrices * itemsize, sums)
        if reason is not None:
            return reason if tiled == rows else f"{reason} with parameters of their own"
    return None


def _check_config(
    config: RowConfig, rows: int, features: int, element_bytes: int, sums: bool
) -> None:
    reason = config.why_unfit(rows, features, element_bytes, sums)
    if reason is not None:
        raise ValueError(f"layer_norm: {config} does not fit: {reason}")


# --- forward --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Norm:
    """Static options of a norm."""

    subtract_mean: bool
    epsilon: float
    scale_offset: float
    pre_activation: str | None
    activation: str | None
    round_before_scale: bool

    def scaled(self, normalised: jax.Array, dtype: Any) -> jax.Array:
        """Returns the values that the scale multiplies, rounded to x's dtype if asked for."""
        if not self.round_before_scale:
            return normalised
        return normalised.astype(dtype).astype(jnp.float32)


class ForwardResults(NamedTuple):
    """Results of the forward; those that were not asked for are None."""

    y: jax.Array
    next_residual: jax.Array | None
    mean: jax.Array | None
    """Row means [M] in float32, as are the following."""
    rstd: jax.Array | None
    row_scale: jax.Array | None
    """Scale that dequantises each row of y, where y has 8 bits."""


def forward(
    x: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    residual: jax.Array | None,
    pre_bias: jax.Array | None,
    **keywords: Any,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None, jax.Array | None]:
    """Returns (y, next_residual, mean, rstd) of `forward_results`, without a rounding."""
    return forward_results(x, scale, bias, residual, pre_bias, **keywords)[:4]


def forward_results(
    x: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    residual: jax.Array | None,
    pre_bias: jax.Array | None,
    *,
    save_statistics: bool,
    subtract_mean: bool,
    epsilon: float,
    scale_offset: float,
    pre_activation: str | None,
    activation: str | None,
    multiprocessors: int,
    round_before_scale: bool = False,
    gate: jax.Array | None = None,
    segments: int = 1,
    rounding: RowRounding | None = None,
    config: RowConfig | None = None,
) -> ForwardResults:
    """Returns the norm of rows [M, D]; results that were not asked for are None.

    The vectors are [D], or [segments, D] for as many equal runs of rows. A gate multiplies the branch
    that is added to the residual. With a rounding, y has 8 bits and a scale for each row.
    """
    rows, features = x.shape
    if rows == 0:
        statistic = jnp.zeros_like(x, shape=(0,), dtype=jnp.float32)
        return ForwardResults(
            x if rounding is None else x.astype(rounding.dtype),
            residual,
            statistic if save_statistics and subtract_mean else None,
            statistic if save_statistics else None,
            None if rounding is None else statistic,
        )
    matrices = _present(x=x, residual=residual)
    vectors = _present(scale=scale, bias=bias, pre_bias=pre_bias, gate=gate)
    itemsize = x.dtype.itemsize
    tiled = rows // segments
    if config is None:
        config = _forward_guesses(tiled, features, itemsize, len(matrices), len(vectors), rows)[0]
    _check_config(config, tiled, features, len(matrices) * itemsize, sums=False)
    tiles = RowTiles.plan(config, rows, features, segments, multiprocessors)

    matrix = jax.ShapeDtypeStruct(tiles.matrix_shape, x.dtype)
    statistic = jax.ShapeDtypeStruct((rows,), jnp.float32)
    outputs = _present(
        y=matrix if rounding is None else jax.ShapeDtypeStruct(matrix.shape, rounding.dtype),
        next_residual=None if residual is None else matrix,
        mean=statistic if save_statistics and subtract_mean else None,
        rstd=statistic if save_statistics else None,
        row_scale=None if rounding is None else statistic,
    )
    norm = _Norm(
        subtract_mean, epsilon, scale_offset, pre_activation, activation, round_before_scale
    )
    names = tuple(matrices), tuple(vectors), tuple(outputs)
    kernel = _ForwardKernel(norm, tiles, x.dtype, *names, rounding)
    results = plgpu.kernel(
        kernel.layer_norm_forward if rounding is None else kernel.layer_norm_quantized_forward,
        out_type=tuple(outputs.values()),
        scratch_types=dict(
            **tiles.ring_scratch({name: m.dtype for name, m in matrices.items()}),
            **tiles.exchange_scratch(1),
        ),
        **tiles.launch,
    )(
        *(tiles.matrix_view(m) for m in matrices.values()),
        *(tiles.vector_view(v) for v in vectors.values()),
    )
    named = dict(zip(outputs, results, strict=True))
    next_residual = named.get("next_residual")
    return ForwardResults(
        named["y"].reshape(x.shape),
        None if next_residual is None else next_residual.reshape(x.shape),
        named.get("mean"),
        named.get("rstd"),
        named.get("row_scale"),
    )


@dataclass(frozen=True)
class _ForwardKernel:
    """The forward over `tiles`, and the names of its operands and results in global memory."""

    norm: _Norm
    tiles: RowTiles
    dtype: Any
    matrices: tuple[str, ...]
    vectors: tuple[str, ...]
    outputs: tuple[str, ...]
    rounding: RowRounding | None

    def layer_norm_quantized_forward(self, *refs, **scratch) -> None:
        """Runs `layer_norm_forward` under another name in profiles."""
        self.layer_norm_forward(*refs, **scratch)

    def layer_norm_forward(
        self, *refs, exchange_smem, exchange_barrier, ring_barriers=None, **ring
    ) -> None:
        tiles = self.tiles
        gmem = dict(zip((*self.matrices, *self.vectors, *self.outputs), refs, strict=True))
        place = tiles.place()
        layout = tiles.layout(self.dtype.itemsize)
        parameters = {name: tiles.vector(gmem[name], place, layout) for name in self.vectors}
        warpgroup = _ForwardWarpgroup(
            self, gmem, place, layout, parameters, exchange_smem, exchange_barrier
        )
        tiles.for_each_tile(
            place,
            [(gmem[name], ring.get(f"{name}_smem")) for name in self.matrices],
            ring_barriers,
            warpgroup.norm_tile,
            None,
        )


@dataclass(frozen=True)
class _ForwardWarpgroup:
    """State of a warpgroup of the forward that all of its tiles share."""

    kernel: _ForwardKernel
    gmem: Mapping[str, Any]
    place: Place
    layout: plgpu.Layout
    parameters: Mapping[str, Callable[[int], jax.Array]]
    exchange_smem: Any
    exchange_barrier: Any

    def norm_tile(self, step_idx, row, tile_refs, _) -> None:
        kernel, tiles, norm = self.kernel, self.kernel.tiles, self.kernel.norm
        parities = self._parities(step_idx)
        chunks = range(tiles.config.chunks)
        summed = tiles.per_chunk(lambda chunk: self._summed(tile_refs, chunk))
        u = tiles.per_chunk(
            lambda chunk: activate(norm.pre_activation, summed(chunk).astype(jnp.float32))
        )
        if "next_residual" in kernel.outputs:
            for chunk in chunks:
                tiles.store(self.gmem["next_residual"], self.place, row, chunk, summed(chunk))

        centred = u
        if norm.subtract_mean:
            mean = self._total(tiles.line_sum(u), parities["mean"]) * (1.0 / tiles.features)
            centred = tiles.per_chunk(lambda chunk: u(chunk) - tiles.across_columns(mean))
        squares = self._total(
            tiles.line_sum(lambda chunk: centred(chunk) * centred(chunk)), parities["squares"]
        )
        rstd = lax.rsqrt(squares * (1.0 / tiles.features) + norm.epsilon)

        def y(chunk: int) -> jax.Array:
            return self._scaled(centred(chunk) * tiles.across_columns(rstd), chunk)

        if kernel.rounding is not None:
            # y is rounded to x's dtype first, so that the bits are those of two separate kernels.
            kernel.rounding.store(
                tiles,
                self.place,
                row,
                parities["largest"],
                tiles.per_chunk(lambda chunk: y(chunk).astype(jnp.float32)),
                self.gmem["y"],
                self.gmem["row_scale"],
                self.exchange_smem,
                self.exchange_barrier,
            )
        else:
            for chunk in chunks:
                tiles.store(self.gmem["y"], self.place, row, chunk, y(chunk))
        if "mean" in kernel.outputs:
            tiles.store_statistic(self.gmem["mean"], self.place, row, mean)
        if "rstd" in kernel.outputs:
            tiles.store_statistic(self.gmem["rstd"], self.place, row, rstd)

    def _parities(self, step_idx) -> Mapping[str, Any]:
        """Returns the parities of a row's exchanges: consecutive ones alternate, also across rows."""
        exchanges = ["mean"] if self.kernel.norm.subtract_mean else []
        exchanges += ["squares"] if self.kernel.rounding is None else ["squares", "largest"]
        first = lax.rem(step_idx, jnp.int32(2)) if len(exchanges) % 2 else 0
        return {name: 1 - first if i % 2 else first for i, name in enumerate(exchanges)}

    def _summed(self, tile_refs, chunk: int) -> jax.Array:
        """Returns the sum that is normalised; with a residual, rounded as the next residual is."""
        tiles = self.kernel.tiles
        h = tiles.load(tile_refs[0], chunk, self.layout)
        if "pre_bias" in self.parameters:
            h += self.parameters["pre_bias"](chunk)
        if "gate" in self.parameters:
            h *= self.parameters["gate"](chunk)
        if "residual" in self.kernel.matrices:
            h = (h + tiles.load(tile_refs[1], chunk, self.layout)).astype(self.kernel.dtype)
        return h

    def _total(self, line: jax.Array, parity) -> jax.Array:
        """Returns sums over whole rows, given sums over lines."""
        return self.kernel.tiles.total(
            [line], self.exchange_smem, self.exchange_barrier, parity, self.place
        )[0]

    def _scaled(self, y: jax.Array, chunk: int) -> jax.Array:
        """Returns y, given the normalised values."""
        norm = self.kernel.norm
        y = norm.scaled(y, self.kernel.dtype)
        if "scale" in self.parameters:
            y *= self.parameters["scale"](chunk) + norm.scale_offset
        if "bias" in self.parameters:
            y += self.parameters["bias"](chunk)
        return activate(norm.activation, y).astype(self.kernel.dtype)


# --- backward -------------------------------------------------------------------------------------


class Gradients(NamedTuple):
    """Results of the backward; gradients of absent operands are None."""

    x: jax.Array
    residual: jax.Array | None
    """Gradient of the residual; None where it equals the gradient of x."""
    scale: jax.Array | None
    """Gradients [segments, D] in float32, as are the following."""
    bias: jax.Array | None
    pre_bias: jax.Array | None
    gate: jax.Array | None


def backward(
    dy: jax.Array,
    dnext_residual: jax.Array | None,
    h: jax.Array,
    mean: jax.Array | None,
    rstd: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    pre_bias: jax.Array | None,
    **keywords: Any,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None, jax.Array | None]:
    """Returns (dx, dscale, dbias, dpre_bias) of `gradients`, without a gate."""
    found = gradients(
        dy, dnext_residual, h, mean, rstd, None, scale, bias, pre_bias, None, **keywords
    )
    return found.x, found.scale, found.bias, found.pre_bias


def gradients(
    dy: jax.Array,
    dnext_residual: jax.Array | None,
    h: jax.Array,
    mean: jax.Array | None,
    rstd: jax.Array,
    x: jax.Array | None,
    scale: jax.Array | None,
    bias: jax.Array | None,
    pre_bias: jax.Array | None,
    gate: jax.Array | None,
    *,
    segments: int,
    subtract_mean: bool,
    epsilon: float,
    scale_offset: float,
    pre_activation: str | None,
    activation: str | None,
    multiprocessors: int,
    round_before_scale: bool = False,
    config: RowConfig | None = None,
) -> Gradients:
    """Returns the gradients, those of the vectors summed over each of `segments` equal runs of rows.

    With `dnext_residual`, `h` is the next residual; without it, `h` is x before pre_bias is added. The
    vectors are [D], or [segments, D] with one for each run of rows. `x` is needed only with a gate.
    """
    rows, features = h.shape
    if rows == 0:
        zeros = jnp.zeros_like(h, shape=(segments, features), dtype=jnp.float32)
        return Gradients(
            h,
            None if gate is None else h,
            *(None if v is None else zeros for v in (scale, bias, pre_bias, gate)),
        )
    matrices = _present(h=h, dy=dy, dnext_residual=dnext_residual, x=None if gate is None else x)
    statistics = _present(mean=mean if subtract_mean else None, rstd=rstd)
    vectors = _present(
        scale=scale,
        bias=None if activation is None else bias,
        pre_bias=None if dnext_residual is not None and gate is None else pre_bias,
        gate=gate,
    )
    sums = tuple(_present(scale=scale, bias=bias, pre_bias=pre_bias, gate=gate))
    itemsize = h.dtype.itemsize
    of_segments = any(
        vector.ndim == 2 for vector in (scale, bias, pre_bias, gate) if vector is not None
    )
    tiled = rows // segments if of_segments else rows
    if config is None:
        config = _best(
            _backward_guesses(tiled, features, itemsize, len(matrices), len(vectors)),
            tiled,
            features,
            len(matrices) * itemsize,
            segments if of_segments else 1,
            multiprocessors,
        )
    _check_config(config, tiled, features, len(matrices) * itemsize, sums=True)
    tiles = RowTiles.plan(config, rows, features, segments, multiprocessors)

    matrix = jax.ShapeDtypeStruct(tiles.matrix_shape, h.dtype)
    outputs = _present(
        dx=matrix,
        dresidual=None if gate is None else matrix,
        partials=jax.ShapeDtypeStruct(tiles.partials_shape(len(sums)), jnp.float32)
        if sums
        else None,
    )
    norm = _Norm(
        subtract_mean, epsilon, scale_offset, pre_activation, activation, round_before_scale
    )
    kernel = _BackwardKernel(
        norm,
        tiles,
        h.dtype,
        tuple(matrices),
        tuple(statistics),
        tuple(vectors),
        sums,
        tuple(outputs),
    )
    results = plgpu.kernel(
        kernel.layer_norm_backward,
        out_type=tuple(outputs.values()),
        scratch_types=dict(
            **tiles.ring_scratch({name: m.dtype for name, m in matrices.items()}),
            **tiles.exchange_scratch(2),
            **tiles.partial_scratch(),
        ),
        **tiles.launch,
    )(
        *(tiles.matrix_view(m) for m in matrices.values()),
        *statistics.values(),
        *(tiles.vector_view(v) for v in vectors.values()),
    )
    named = dict(zip(outputs, results, strict=True))
    summed: dict[str, jax.Array] = {}
    if sums:
        partials = named["partials"].reshape(len(sums), segments, tiles.ctas_per_segment, features)
        given = (v for v in (scale, bias, pre_bias, gate) if v is not None)
        are_rounded = any(vector.dtype.itemsize < 4 for vector in given)
        summed = dict(zip(sums, _over_ctas(partials, are_rounded), strict=True))
    return Gradients(
        named["dx"].reshape(h.shape),
        None if gate is None else named["dresidual"].reshape(h.shape),
        *(summed.get(name) for name in ("scale", "bias", "pre_bias", "gate")),
    )


_FEW_CTAS = 16
"""Limit on the CTAs whose partial sums XLA adds up element by element, without a reduction kernel."""


def _over_ctas(partials: jax.Array, are_rounded: bool) -> Sequence[jax.Array]:
    """Sums [quantities, segments, CTAs, features] over the CTAs, in the fewest kernels of XLA.

    A joint reduction of several arrays is one kernel, unless rounding follows: then each quantity takes
    another, as it does after a reduction of one array of all quantities. With few CTAs, XLA fuses the
    sum, the rounding and the slices into one kernel.
    """
    if partials.shape[2] <= _FEW_CTAS:
        return list(jnp.sum(partials, axis=2))
    if are_rounded:
        return [jnp.sum(quantity, axis=1) for quantity in partials]

    def add(totals, values):
        return tuple(map(jnp.add, totals, values))

    zeros = (jnp.float32(0),) * len(partials)
    return lax.reduce(tuple(partials), zeros, add, (1,))


@dataclass(frozen=True)
class _BackwardKernel:
    """The backward over `tiles`, and the names of its operands and results in global memory."""

    norm: _Norm
    tiles: RowTiles
    dtype: Any
    matrices: tuple[str, ...]
    statistics: tuple[str, ...]
    vectors: tuple[str, ...]
    sums: tuple[str, ...]
    """Parameters with a gradient, each of which is a sum over rows."""
    outputs: tuple[str, ...]

    def layer_norm_backward(
        self, *refs, ring_barriers, exchange_smem, exchange_barrier, **smem
    ) -> None:
        tiles = self.tiles
        names = (*self.matrices, *self.statistics, *self.vectors, *self.outputs)
        gmem = dict(zip(names, refs, strict=True))
        place = tiles.place()
        layout = tiles.layout(self.dtype.itemsize)
        parameters = {name: tiles.vector(gmem[name], place, layout) for name in self.vectors}
        zero = plgpu.layout_cast(jnp.zeros(tiles.shape, jnp.float32), layout)
        last_step = tiles.tile_count(place) - 1
        start = tiles.first_row(place, 0)
        warpgroup = _BackwardWarpgroup(
            self, gmem, place, layout, parameters, exchange_smem, exchange_barrier, last_step
        )
        totals, _ = tiles.for_each_tile(
            place,
            [(gmem[name], smem[f"{name}_smem"]) for name in self.matrices],
            ring_barriers,
            warpgroup.gradient_tile,
            (
                {name: [zero] * tiles.config.chunks for name in self.sums},
                {n: tiles.load_statistic(gmem[n], start) for n in self.statistics},
            ),
        )
        for index, name in enumerate(self.sums):
            tiles.store_partial(
                gmem["partials"].at[index, place.cta_idx],
                totals[name],
                smem.get("partial_smem"),
                exchange_barrier,
                place,
            )


@dataclass(frozen=True)
class _BackwardWarpgroup:
    """State of a warpgroup of the backward that all of its tiles share."""

    kernel: _BackwardKernel
    gmem: Mapping[str, Any]
    place: Place
    layout: plgpu.Layout
    parameters: Mapping[str, Callable[[int], jax.Array]]
    exchange_smem: Any
    exchange_barrier: Any
    last_step: Any

    def gradient_tile(self, step_idx, row, tile_refs, carry):
        """Computes a tile's gradient; the carry holds the sums over rows and this tile's statistics."""
        kernel, tiles, norm = self.kernel, self.kernel.tiles, self.kernel.norm
        sums_so_far, row_statistics = carry
        # Loaded one tile ahead, so that this tile's work hides the latency.
        next_row = tiles.first_row(self.place, jnp.minimum(step_idx + 1, self.last_step))
        next_statistics = {
            n: tiles.load_statistic(self.gmem[n], next_row) for n in kernel.statistics
        }
        rstd_tile = tiles.across_columns(row_statistics["rstd"])
        own = tiles.counted(self.place, step_idx, self.layout) if tiles.ragged else None
        new_sums = {name: list(so_far) for name, so_far in sums_so_far.items()}

        def add(name, chunk, value):
            if name in kernel.sums:
                value = value if own is None else jnp.where(own, value, 0.0)
                new_sums[name][chunk] += value

        block = tiles.per_chunk(
            lambda chunk: self._block(tile_refs, row_statistics, rstd_tile, chunk)
        )
        products, gradients = [], []
        for chunk in range(tiles.config.chunks):
            _, v, dz, g = block(chunk)
            add("scale", chunk, dz * norm.scaled(v, kernel.dtype))
            add("bias", chunk, dz)
            products.append(g * v)
            gradients.append(g)
        means = self._means(step_idx, products, gradients)
        for chunk in range(tiles.config.chunks):
            pre_slope, v, _, g = block(chunk)
            dh = g - v * means[0]
            if norm.subtract_mean:
                dh -= means[1]
            dh *= rstd_tile
            if norm.pre_activation is not None:
                dh *= pre_slope
            if "dnext_residual" in kernel.matrices:
                dh += tiles.load(tile_refs[2], chunk, self.layout)
            if "gate" in self.parameters:
                tiles.store(self.gmem["dresidual"], self.place, row, chunk, dh.astype(kernel.dtype))
                x = tiles.load(tile_refs[3], chunk, self.layout)
                if "pre_bias" in self.parameters:
                    x += self.parameters["pre_bias"](chunk)
                add("gate", chunk, dh * x)
                dh *= self.parameters["gate"](chunk)
            add("pre_bias", chunk, dh)
            tiles.store(self.gmem["dx"], self.place, row, chunk, dh.astype(kernel.dtype))
        return new_sums, next_statistics

    def _block(self, tile_refs, row_statistics, rstd_tile, chunk: int):
        """Returns pre_activation's derivative, the normalised values, dz, and their gradient."""
        tiles, norm, parameters = self.kernel.tiles, self.kernel.norm, self.parameters
        v = tiles.load(tile_refs[0], chunk, self.layout)
        if "pre_bias" in parameters and "dnext_residual" not in self.kernel.matrices:
            v += parameters["pre_bias"](chunk)
        pre_slope = derivative(norm.pre_activation, v)
        v = activate(norm.pre_activation, v)
        if norm.subtract_mean:
            v -= tiles.across_columns(row_statistics["mean"])
        v *= rstd_tile
        dz = tiles.load(tile_refs[1], chunk, self.layout)
        gain = None
        if "scale" in parameters:
            gain = parameters["scale"](chunk) + norm.scale_offset
        if norm.activation is not None:
            z = norm.scaled(v, self.kernel.dtype)
            z = z if gain is None else z * gain
            if "bias" in parameters:
                z += parameters["bias"](chunk)
            dz *= derivative(norm.activation, z)
        return pre_slope, v, dz, dz if gain is None else dz * gain

    def _means(
        self, step_idx, products: Sequence[jax.Array], gradients: Sequence[jax.Array]
    ) -> list[jax.Array]:
        """Returns each row's mean of the products and, if a mean is subtracted, of the gradients."""
        tiles = self.kernel.tiles
        lines = [tiles.line_sum(products.__getitem__)]
        if self.kernel.norm.subtract_mean:
            lines.append(tiles.line_sum(gradients.__getitem__))
        parity = lax.rem(step_idx, jnp.int32(2))
        totals = tiles.total(lines, self.exchange_smem, self.exchange_barrier, parity, self.place)
        return [tiles.across_columns(total * (1.0 / tiles.features)) for total in totals]


def _present(**values: Any) -> dict[str, Any]:
    """Returns the values that are not None, in order."""
    return {name: value for name, value in values.items() if value is not None}
