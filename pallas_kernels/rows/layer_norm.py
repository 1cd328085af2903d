"""layer_norm and rms_norm on Hopper: limits, forward and backward kernels.

Both read every operand once and write every result once; statistics stay in float32 registers. The
forward saves mean and 1/std of each row, so that the backward needs one exchange between warps for
a row. The backward carries the parameter gradients in registers over all rows of a CTA and writes
one partial sum a CTA; XLA adds those up in a fixed order.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper
from pallas_kernels.activation import activation as activate
from pallas_kernels.activation import derivative
from pallas_kernels.hopper import LANES, SHARED_MEMORY_BYTES, WARPS
from pallas_kernels.rows.tiles import RowConfig, RowTiles

_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


_LARGEST_FEATURES = 16384
"""Beyond it the backward's sums no longer fit into the registers of one CTA."""

_DIRECT_BYTES = 78 * 10**6
"""Bytes read and written from which the forward can do without a ring: well over the L2's 50 MB.

In bfloat16 a thousand rows of 768 take 0.83 us through the ring. Straight from memory, by CTAs that
start in turn wherever a multiprocessor is free, they take 0.69, but 3.6 us more to begin with: both
take the same at 25,600 rows.
"""


def default_forward_config(
    rows: int, features: int, itemsize: int, matrices: int, vectors: int
) -> RowConfig:
    """The measured choice for [rows, features].

    It reads `matrices` arrays of that shape (2 with a residual) and `vectors` of [features].
    """
    row_bytes = features * itemsize * matrices
    if matrices == 1 and 2 * rows * row_bytes >= _DIRECT_BYTES:
        # [50432, 768]: 38.8 us, 42.3 through the ring; after bias and relu 39.1 and 42.8.
        if features <= 1024 and features % 256 == 0:
            return _direct(row_per_warp=True, lines=2 * WARPS, chunks=features // 256)
        # [16384, 8192]: 142 us, 146 through the ring; rms_norm 130 and 141. A third vector is too
        # much to read for each row: 156 and 146 after bias and relu. [8192, 4096]: rms_norm 35.1 us,
        # 36.3 through the ring, and layer_norm 37.8 and 36.7. [4096, 16384] is slower without a ring.
        if (features == 8192 and vectors <= 2) or (features == 4096 and vectors == 1):
            return _direct(row_per_warp=False, lines=WARPS, chunks=4)
    if _row_per_warp(rows, features):
        lines = _lines(rows, 4096 // (features * itemsize))
        ctas = 8 if features <= 512 else 4
        if features > 768 and vectors == 3:
            # They leave registers to three CTAs: 19.0 us at [16384, 1024], 20.2 for four.
            ctas = 3
        ctas = _slots(ctas, 3 * lines * row_bytes)
        slots = _slots(4, ctas * lines * row_bytes)
        return RowConfig(True, 1, slots, ctas_per_multiprocessor=ctas, lines=lines)
    # [8192, 4096]: 36.5 us with 8 CTAs, 38.0 with 4; [4096, 16384]: 72.6 us with 2 slots and
    # 3 CTAs, 76.1 with 3 and 2, 78.3 with one CTA of 4 warpgroups.
    warpgroups = 1 if features <= 4096 or features % 512 else 2
    ctas = max(1, _slots(8 // warpgroups, (3 if row_bytes < 32768 else 2) * row_bytes))
    slots = _slots(4, ctas * row_bytes)
    return RowConfig(False, warpgroups, slots, ctas_per_multiprocessor=ctas)


def default_backward_config(
    rows: int, features: int, itemsize: int, matrices: int, vectors: int
) -> RowConfig:
    """The measured choice for [rows, features].

    It reads `matrices` arrays of that shape (3 with a residual) and `vectors` of [features].
    """
    row_bytes = features * itemsize * matrices
    if _row_per_warp(rows, features):
        # [16384, 1024]: 29.3 us with 2 warpgroups a multiprocessor, 49.8 with 3, whose registers
        # spill. One CTA with 2 leaves half the partial sums of 2 CTAs.
        lines = _lines(rows, 8192 // (features * itemsize))
        ctas = max(1, 256 // features)
        sums_bytes = 2 * lines * features * 4
        slots = _slots(3, ctas * 2 * lines * row_bytes, reserved=ctas * sums_bytes)
        return RowConfig(
            True,
            warpgroups=2,
            slots=slots,
            ctas_per_multiprocessor=ctas,
            lines=lines,
            keeps_vectors=_room_for(vectors, lines * features // (WARPS * LANES)),
        )
    if features > 8192 and features % 2048 == 0:
        # A row and its sums do not fit into the registers together: 174 us for [4096, 16384] when
        # the tile is read again from shared memory, 326 when registers spill.
        slots = _slots(2, row_bytes)
        return RowConfig(
            False,
            warpgroups=4,
            slots=slots,
            ctas_per_multiprocessor=1,
            chunks=features // 2048,
            keeps_tile=False,
            keeps_vectors=False,
        )
    # [8192, 2048]: 36.3 us with 4 CTAs, 40.4 with 2; [8192, 4096]: 55.4 us with 1 warpgroup and
    # 2 CTAs; [16384, 8192]: 201 us with 2 and 1.
    warpgroups = 1 if features <= 4096 or features % 512 else 2
    ctas = 4 if features <= 2048 else 2 if features <= 4096 else 1
    slots = _slots(4 if features <= 2048 else 3, ctas * row_bytes)
    return RowConfig(
        False,
        warpgroups,
        slots,
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


def _room_for(vectors: int, values: int) -> bool:
    """Whether the backward can keep the vectors in registers, `values` of each in a thread.

    Beside the tile and the sums there is room for 48: with 64 the compiler spills 200 to 350 bytes,
    and [16384, 1024] after bias and relu took 54.5 us, 35.8 with one vector and a residual.
    """
    return vectors * values <= 48


def _lines(rows: int, wanted: int) -> int:
    """Rows of a tile: with few features more of them, or the copies are small and the sums wait."""
    if rows < 4 * WARPS:
        return WARPS
    return min(4, max(1, wanted // WARPS)) * WARPS


def _row_per_warp(rows: int, features: int) -> bool:
    if features % (2 * LANES * WARPS):
        return features <= 2048
    # A tile of a row for each warp takes four rows at least; all warps together take one.
    return features <= 1024 and rows >= WARPS


def _slots(wanted: int, slot_bytes: int, reserved: int = 0) -> int:
    """As many slots as wanted, or as fit into a multiprocessor's shared memory, but at least one.

    Where not even one fits, `RowConfig.why_unfit` says so.
    """
    return max(1, min(wanted, (SHARED_MEMORY_BYTES - 4096 - reserved) // slot_bytes))


def why_unsupported(
    *,
    compute_capability: tuple[int, int] | None,
    rows: int,
    features: int,
    dtype: Any,
    residual_dtype: Any = None,
    segments: int = 1,
) -> str | None:
    """None where forward and backward can run, else the rule that stands in the way.

    The shapes are those that the kernels see: of one shard, and of all entries that a `vmap` folds into
    the rows, each of which is one of the backward's `segments`.
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
    for default_config, matrices, sums in (
        (default_forward_config, 1 + residual, False),
        (default_backward_config, 2 + residual, True),
    ):
        config = default_config(rows, features, itemsize, matrices, vectors=1)
        reason = config.why_unfit(rows, features, matrices * itemsize, sums)
        if reason is not None:
            return reason
    return None


def _check_config(
    config: RowConfig, rows: int, features: int, element_bytes: int, sums: bool
) -> None:
    reason = config.why_unfit(rows, features, element_bytes, sums)
    if reason is not None:
        raise ValueError(f"layer_norm: {config} does not fit: {reason}")


def forward(
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
    config: RowConfig | None = None,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None, jax.Array | None]:
    """(y, next_residual, mean, rstd) of [M, D] rows; what was not asked for is None."""
    rows, features = x.shape
    if rows == 0:
        statistic = jnp.zeros_like(x, shape=(0,), dtype=jnp.float32)
        return (
            x,
            residual,
            statistic if save_statistics and subtract_mean else None,
            statistic if save_statistics else None,
        )
    matrices = {"x": x} | ({} if residual is None else {"residual": residual})
    vectors = {"scale": scale, "bias": bias, "pre_bias": pre_bias}
    vectors = {name: vector for name, vector in vectors.items() if vector is not None}
    config = config or default_forward_config(
        rows, features, x.dtype.itemsize, len(matrices), len(vectors)
    )
    _check_config(config, rows, features, len(matrices) * x.dtype.itemsize, sums=False)
    tiles = RowTiles.plan(config, rows, features, 1, multiprocessors)
    layout = tiles.layout(x.dtype.itemsize)

    matrix = jax.ShapeDtypeStruct(tiles.matrix_shape, x.dtype)
    statistic = jax.ShapeDtypeStruct((rows,), jnp.float32)
    outputs = {"y": matrix}
    if residual is not None:
        outputs["next_residual"] = matrix
    if save_statistics:
        if subtract_mean:
            outputs["mean"] = statistic
        outputs["rstd"] = statistic
    names = (*matrices, *vectors, *outputs)

    def layer_norm_forward(*refs, exchange_smem, exchange_barrier, ring_barriers=None, **ring):
        gmem = dict(zip(names, refs, strict=True))
        place = tiles.place()
        parameters = {name: tiles.vector(gmem[name], place, layout) for name in vectors}

        def norm_tile(step_idx, row, tile_refs, _):
            def total(line, parity):
                return tiles.total([line], exchange_smem, exchange_barrier, parity, place)[0]

            @tiles.per_chunk
            def summed(chunk):
                h = tiles.load(tile_refs[0], chunk, layout)
                if pre_bias is not None:
                    h += parameters["pre_bias"](chunk)
                if residual is not None:
                    h = (h + tiles.load(tile_refs[1], chunk, layout)).astype(x.dtype)
                return h

            @tiles.per_chunk
            def u(chunk):
                return activate(pre_activation, summed(chunk).astype(jnp.float32))

            if residual is not None:
                for chunk in range(config.chunks):
                    tiles.store(gmem["next_residual"], place, row, chunk, summed(chunk))

            centred = u
            if subtract_mean:
                mean = total(tiles.line_sum(u), 0) * (1.0 / features)
                centred = tiles.per_chunk(lambda chunk: u(chunk) - tiles.across_columns(mean))
            # Consecutive exchanges must alternate: within the row after a mean, else from row to row.
            parity = 1 if subtract_mean else lax.rem(step_idx, jnp.int32(2))
            squares = total(tiles.line_sum(lambda chunk: centred(chunk) * centred(chunk)), parity)
            rstd = lax.rsqrt(squares * (1.0 / features) + epsilon)

            for chunk in range(config.chunks):
                y = centred(chunk) * tiles.across_columns(rstd)
                if scale is not None:
                    y *= parameters["scale"](chunk) + scale_offset
                if bias is not None:
                    y += parameters["bias"](chunk)
                y = activate(activation, y).astype(x.dtype)
                tiles.store(gmem["y"], place, row, chunk, y)
            if save_statistics:
                if subtract_mean:
                    tiles.store_statistic(gmem["mean"], place, row, mean)
                tiles.store_statistic(gmem["rstd"], place, row, rstd)

        tiles.for_each_tile(
            place,
            [(gmem[name], ring.get(f"{name}_smem")) for name in matrices],
            ring_barriers,
            norm_tile,
            None,
        )

    results = plgpu.kernel(
        layer_norm_forward,
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
    return (
        named["y"].reshape(x.shape),
        None if next_residual is None else next_residual.reshape(x.shape),
        named.get("mean"),
        named.get("rstd"),
    )


def backward(
    dy: jax.Array,
    dnext_residual: jax.Array | None,
    h: jax.Array,
    mean: jax.Array | None,
    rstd: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    pre_bias: jax.Array | None,
    *,
    segments: int,
    subtract_mean: bool,
    epsilon: float,
    scale_offset: float,
    pre_activation: str | None,
    activation: str | None,
    multiprocessors: int,
    config: RowConfig | None = None,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None, jax.Array | None]:
    """(dx, dscale, dbias, dpre_bias), the last three float32 [segments, D] for `segments` row runs.

    With `dnext_residual`, `h` is the next residual; without it, x, to which pre_bias is still added.
    """
    del epsilon
    rows, features = h.shape
    if rows == 0:
        zeros = jnp.zeros_like(h, shape=(segments, features), dtype=jnp.float32)
        return h, *(None if v is None else zeros for v in (scale, bias, pre_bias))
    matrices = {"h": h, "dy": dy}
    if dnext_residual is not None:
        matrices["dnext_residual"] = dnext_residual
    statistics = ({"mean": mean} if subtract_mean else {}) | {"rstd": rstd}
    vectors = {}
    if scale is not None:
        vectors["scale"] = scale
    if bias is not None and activation is not None:
        vectors["bias"] = bias
    if pre_bias is not None and dnext_residual is None:
        vectors["pre_bias"] = pre_bias
    sums = [
        name
        for name, vector in {"scale": scale, "bias": bias, "pre_bias": pre_bias}.items()
        if vector is not None
    ]
    config = config or default_backward_config(
        rows, features, h.dtype.itemsize, len(matrices), len(vectors)
    )
    _check_config(config, rows, features, len(matrices) * h.dtype.itemsize, sums=True)
    tiles = RowTiles.plan(config, rows, features, segments, multiprocessors)
    layout = tiles.layout(h.dtype.itemsize)

    outputs = {"dx": jax.ShapeDtypeStruct(tiles.matrix_shape, h.dtype)}
    if sums:
        outputs["partials"] = jax.ShapeDtypeStruct(tiles.partials_shape(len(sums)), jnp.float32)
    names = (*matrices, *statistics, *vectors, *outputs)

    def layer_norm_backward(*refs, ring_barriers, exchange_smem, exchange_barrier, **smem):
        gmem = dict(zip(names, refs, strict=True))
        place = tiles.place()
        parameters = {name: tiles.vector(gmem[name], place, layout) for name in vectors}

        def gradient_tile(step_idx, row, tile_refs, carry):
            sums_so_far, row_statistics = carry
            # Loaded now, used for the next tile: the latency of a lone load hides behind this one.
            next_row = tiles.first_row(place, jnp.minimum(step_idx + 1, last_step))
            next_statistics = {n: tiles.load_statistic(gmem[n], next_row) for n in statistics}
            rstd_tile = tiles.across_columns(row_statistics["rstd"])
            own = tiles.counted(place, step_idx, layout) if tiles.ragged else None
            new_sums = {name: list(so_far) for name, so_far in sums_so_far.items()}

            def add(name, chunk, value):
                if name in sums:
                    value = value if own is None else jnp.where(own, value, 0.0)
                    new_sums[name][chunk] += value

            @tiles.per_chunk
            def block(chunk):
                """Slope of pre_activation, normalised values, dz, gradient of the normalised."""
                v = tiles.load(tile_refs[0], chunk, layout)
                if "pre_bias" in vectors:
                    v += parameters["pre_bias"](chunk)
                pre_slope = derivative(pre_activation, v)
                v = activate(pre_activation, v)
                if subtract_mean:
                    v -= tiles.across_columns(row_statistics["mean"])
                v *= rstd_tile
                dz = tiles.load(tile_refs[1], chunk, layout)
                gain = None if scale is None else parameters["scale"](chunk) + scale_offset
                if activation is not None:
                    z = v if gain is None else v * gain
                    if bias is not None:
                        z += parameters["bias"](chunk)
                    dz *= derivative(activation, z)
                return pre_slope, v, dz, dz if gain is None else dz * gain

            products, gradients = [], []
            for chunk in range(config.chunks):
                _, v, dz, g = block(chunk)
                add("scale", chunk, dz * v)
                add("bias", chunk, dz)
                products.append(g * v)
                gradients.append(g)
            lines = [tiles.line_sum(products.__getitem__)]
            if subtract_mean:
                lines.append(tiles.line_sum(gradients.__getitem__))
            means = [
                tiles.across_columns(total * (1.0 / features))
                for total in tiles.total(
                    lines, exchange_smem, exchange_barrier, lax.rem(step_idx, jnp.int32(2)), place
                )
            ]
            for chunk in range(config.chunks):
                pre_slope, v, _, g = block(chunk)
                dh = g - v * means[0]
                if subtract_mean:
                    dh -= means[1]
                dh *= rstd_tile
                if pre_activation is not None:
                    dh *= pre_slope
                if dnext_residual is not None:
                    dh += tiles.load(tile_refs[2], chunk, layout)
                add("pre_bias", chunk, dh)
                tiles.store(gmem["dx"], place, row, chunk, dh.astype(h.dtype))
            return new_sums, next_statistics

        zero = plgpu.layout_cast(jnp.zeros(tiles.shape, jnp.float32), layout)
        last_step = tiles.tile_count(place) - 1
        start = tiles.first_row(place, 0)
        totals, _ = tiles.for_each_tile(
            place,
            [(gmem[name], smem[f"{name}_smem"]) for name in matrices],
            ring_barriers,
            gradient_tile,
            (
                {name: [zero] * config.chunks for name in sums},
                {n: tiles.load_statistic(gmem[n], start) for n in statistics},
            ),
        )
        for index, name in enumerate(sums):
            tiles.store_partial(
                gmem["partials"].at[index, place.cta_idx],
                totals[name],
                smem.get("partial_smem"),
                exchange_barrier,
                place,
            )

    results = plgpu.kernel(
        layer_norm_backward,
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
    gradients: dict[str, jax.Array] = {}
    if sums:
        partials = named["partials"].reshape(len(sums), segments, tiles.ctas_per_segment, features)
        gradients = dict(zip(sums, jnp.sum(partials, axis=2), strict=True))
    return (
        named["dx"].reshape(h.shape),
        gradients.get("scale"),
        gradients.get("bias"),
        gradients.get("pre_bias"),
    )
