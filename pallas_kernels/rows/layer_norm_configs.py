"""Configs of the kernels of layer_norm and rms_norm: first guesses, and alternatives to measure.

benchmarks/LAB.md has the trials behind the first guesses.
"""

from pallas_kernels.hopper import LANES, SHARED_MEMORY_BYTES, WARPS
from pallas_kernels.rows.tiles import RowConfig

_DIRECT_BYTES = 78 * 10**6
"""Bytes read and written from which the forward needs no pipeline: well above an H200's L2, 50 MB."""


def forward_candidates(
    rows: int, features: int, itemsize: int, matrices: int, vectors: int
) -> list[RowConfig]:
    """Returns configs for [rows, features], the best guess first; none if no config can run.

    The forward reads `matrices` arrays of that shape (2 with a residual) and `vectors` of [features].
    """
    element_bytes = matrices * itemsize
    guesses = forward_guesses(rows, features, itemsize, matrices, vectors)
    return _legal(guesses, rows, features, element_bytes, sums=False)


def forward_guesses(
    rows: int,
    features: int,
    itemsize: int,
    matrices: int,
    vectors: int,
    all_rows: int | None = None,
) -> list[RowConfig]:
    """Returns the configs of `forward_candidates` without checking that they can run.

    With segments (runs of rows with vectors of their own), `rows` are those of one, `all_rows` of all.
    """
    row_bytes = features * itemsize * matrices
    narrow = _direct(row_per_warp=True, lines=2 * WARPS, chunks=max(1, features // 256))
    short = _direct(row_per_warp=True, lines=WARPS, chunks=max(1, features // 512))
    wide = _direct(row_per_warp=False, lines=WARPS, chunks=4)
    rings = [_forward_ring(rows, features, itemsize, matrices, vectors)]
    in_segments = all_rows is not None and all_rows != rows
    if in_segments and matrices == 1 and 1024 < features <= 1536 and rows >= 2 * WARPS:
        # A CTA has few rows, all of one segment: only larger copies keep enough bytes in flight.
        rings.insert(0, _ring_of_warps(features, matrices * itemsize, 2 * WARPS, 2))
    if features <= 2048:
        # Tiles of more rows make larger copies; tiles of fewer rows leave room for more CTAs an SM.
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
    # Without a pipeline each CTA computes one row and loads all vectors for it, which takes too long
    # with more vectors than these.
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
            # Three vectors in registers leave room for only three CTAs on an SM.
            ctas = 3
        return _ring_of_warps(features, matrices * itemsize, lines, ctas)
    warpgroups = 1 if features <= 4096 or features % 512 else 2
    # Long rows gain more from one more CTA on an SM than from a third pipeline stage.
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
    guesses = backward_guesses(rows, features, itemsize, matrices, vectors)
    return _legal(guesses, rows, features, matrices * itemsize, sums=True)


def _balanced(guesses: list[RowConfig], segments: int, multiprocessors: int) -> list[RowConfig]:
    """Returns the guesses sorted by the fraction of resident CTAs that have work, largest first.

    Fractions above `_BUSY_ENOUGH` count as equal. A CTA has rows of one segment only. One CTA an SM is
    the best guess for one long segment; with a hundred segments it leaves every fourth of an H200's 132
    SMs idle.
    """

    def busy(config: RowConfig) -> float:
        room = multiprocessors * config.ctas_per_multiprocessor
        rounds = -(-segments // room)
        return segments * max(1, room // segments) / (rounds * room)

    return sorted(guesses, key=lambda config: -min(busy(config), _BUSY_ENOUGH))


def best_of_backward(
    guesses: list[RowConfig],
    rows: int,
    features: int,
    element_bytes: int,
    segments: int,
    multiprocessors: int,
) -> RowConfig:
    """Returns the first guess or, with several segments, the first of those that `_balanced` prefers."""
    if segments == 1:
        return guesses[0]
    legal = _legal(guesses, rows, features, element_bytes, sums=True)
    # With a row for each warp, two CTAs of one warpgroup hide latency better than one of two.
    preferred = sorted(
        legal,
        key=lambda config: (
            config.row_per_warp and (config.warpgroups, config.ctas_per_multiprocessor) != (1, 2)
        ),
    )
    return _balanced(preferred or guesses, segments, multiprocessors)[0]


_BUSY_ENOUGH = 0.9
"""Fraction of the CTAs resident on the GPU that must be busy for a launch to count as balanced."""


def backward_guesses(
    rows: int, features: int, itemsize: int, matrices: int, vectors: int
) -> list[RowConfig]:
    """Returns the configs of `backward_candidates` without checking that they can run."""
    row_bytes = features * itemsize * matrices
    if _row_per_warp(rows, features):
        lines = _lines(rows, 8192 // (features * itemsize))
        # More than 2 warpgroups per SM spill registers, unless rows are narrow. One CTA of 2 warpgroups
        # writes half as many partial sums (of the vectors' gradients) as 2 CTAs of one.
        shapes = [(1, 4, lines)] if features <= 128 else [(2, max(1, 256 // features), lines)]
        shapes += [(wgs, ctas, lines) for wgs, ctas in ((2, 1), (2, 2), (1, 2), (1, 4), (2, 4))]
        shapes += [(1, 6, 2 * WARPS), (2, 1, WARPS)]
        return [
            _backward_ring_of_warps(features, matrices * itemsize, vectors, *shape)
            for shape in shapes
        ]
    if features > 8192 and features % 2048 == 0:
        # A row and its column sums do not both fit into the registers: each pass over a tile reads
        # it from shared memory.
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
    # With few rows, fewer CTAs write fewer partial sums, which XLA adds up.
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
    """Returns whether `vectors` arrays, `values` numbers of each per thread, fit into registers.

    In the backward, a thread has room for 48 numbers besides the tile and its sums; more are spilled.
    """
    return vectors * values <= 48


def _lines(rows: int, wanted: int) -> int:
    """Returns the rows of a warpgroup's tile.

    A tile of narrow rows has several for each warp: copies are larger, and the rows' sums overlap.
    """
    if rows < 4 * WARPS:
        return WARPS
    return min(4, max(1, wanted // WARPS)) * WARPS


def _row_per_warp(rows: int, features: int) -> bool:
    if features % (2 * LANES * WARPS):
        return features <= 2048
    # A tile with a row for each warp needs at least four rows; a tile with a row for each CTA needs one.
    return features <= 1024 and rows >= WARPS


def _slots(wanted: int, slot_bytes: int, reserved: int = 0) -> int:
    """Returns `wanted` stages (or CTAs), or as many of `slot_bytes` as an SM's shared memory holds.

    The number is at least 1; if not even one fits, `RowConfig.why_unfit` says so.
    """
    return max(1, min(wanted, (SHARED_MEMORY_BYTES - 4096 - reserved) // slot_bytes))


def check_config(
    config: RowConfig, rows: int, features: int, element_bytes: int, sums: bool
) -> None:
    """Raises a ValueError if the config does not fit the shape."""
    reason = config.why_unfit(rows, features, element_bytes, sums)
    if reason is not None:
        raise ValueError(f"layer_norm: {config} does not fit: {reason}")
