"""The predicted time of XLA's program for a product with an epilogue: products, copies, passes, sums."""

import math

from pallas_kernels.gemm.cost import STEP_BYTES, WeightWork, Work, overlapped
from pallas_kernels.gemm.small_m import MAX_ROWS
from pallas_kernels.gemm.speeds import H200


def xla_product(
    m: int, n: int, k: int, itemsize: int = 2, multiprocessors: int = 132, b_itemsize: float = 0
) -> float:
    """Microseconds of XLA's product, for which it tries many tiles and splits along K."""
    speeds = H200
    steps = math.ceil(k * itemsize / STEP_BYTES)
    fewest = m <= MAX_ROWS // 2
    of_byte = speeds.xla_fewest_rows_byte if fewest else speeds.memory_byte
    traffic = of_byte * (itemsize * (k * m + m * n) + (b_itemsize or itemsize) * k * n)
    best = math.inf
    for tile_m, tile_n in _XLA_TILES:
        tiles = math.ceil(m / tile_m) * math.ceil(n / tile_n)
        step = speeds.xla_step + speeds.xla_step_element * tile_m * tile_n
        stored = speeds.xla_tile_element * tile_m * tile_n
        for splits in (1, 2, 4, 8):
            rounds = math.ceil(tiles * splits / multiprocessors)
            compute = rounds * math.ceil(steps / splits) * step + stored
            total = overlapped((compute, traffic), speeds.overlap)
            if splits > 1:
                total += speeds.xla_pass + speeds.xla_pass_byte * m * n * 4 * (splits + 1)
            best = min(best, total)
    ragged = any(size % (STEP_BYTES // itemsize) for size in (n, k))
    launch = speeds.xla_launch
    if m <= MAX_ROWS:
        filled = min(1.0, traffic / of_byte / speeds.xla_few_rows_filled)
        launch += speeds.xla_few_rows
        launch = speeds.xla_fewest + filled * (launch - speeds.xla_fewest)
    return launch + best * (speeds.xla_ragged if ragged else 1.0)


def xla_single_row(n: int, k: int, itemsize: int, b_itemsize: float) -> float:
    """Microseconds of one row times weights of another dtype, which XLA runs without a matrix product.

    One kernel writes all factors x_k w_kn in the dtype of the row, and another one adds them up.
    """
    factors = n * k
    summed = factors * itemsize * H200.xla_single_row_byte
    return xla_pass(factors, b_itemsize + itemsize) + H200.xla_pass + summed


def _xla_splits(work: Work, multiprocessors: int) -> int:
    """Number of parts into which XLA splits the sums of a product with few tiles (split-K)."""
    tiles = math.ceil(work.m / _XLA_TILE) * math.ceil(work.n / _XLA_TILE)
    splits = 1
    while 2 * splits * tiles <= multiprocessors and work.steps >= 2 * splits * _XLA_STEPS_OF_PART:
        splits *= 2
    return splits


_XLA_STEPS_OF_PART = 6
"""Fewest K steps of a part when XLA splits sums along K."""


def xla_pads(work: Work, multiprocessors: int) -> bool:
    """Whether XLA pads both operands along K, so that parts begin at multiples of 16 bytes."""
    splits = _xla_splits(work, multiprocessors)
    return splits > 1 and work.k * work.itemsize % (splits * _COPY_BYTES) != 0


_COPY_BYTES = 16


def xla_copies(work: Work) -> float:
    """Microseconds of XLA's copies of weights, padded or merged, before a product of few rows."""
    of_weights = xla_pass(work.products * work.k * work.n, work.b_bytes + work.itemsize)
    pads = work.k * work.itemsize % (_longest_split(work) * _COPY_BYTES) != 0
    merges = work.products > 1 and work.weights_apart and work.m <= _MOST_ROWS_OF_COPY
    merges = merges and work.k * work.n * work.b_bytes <= _MOST_BYTES_MERGED
    merges = merges and work.n % _COLUMNS_OF_TILE != 0
    # XLA runs a single row without a matrix product, and so pads nothing.
    return of_weights * (int(pads and 1 < work.m <= MAX_ROWS) + int(merges))


def _longest_split(work: Work) -> int:
    """Number of parts into which XLA splits the sums of a product of few rows, for any tile."""
    parts = 1
    while work.steps >= 2 * parts * _XLA_STEPS_OF_PART:
        parts *= 2
    return parts


_MOST_ROWS_OF_COPY = 16
"""Largest number of rows of x for which XLA copies two weight matrices into one to merge their
products."""
_COLUMNS_OF_TILE = 128
"""Columns of a tile of XLA's product; XLA merges matrices of a multiple of this width without a copy."""
_MOST_BYTES_MERGED = 40e6
"""Largest number of bytes of weights whose products XLA merges: it merged 35 MB and not 84 MB."""


def xla_weight_gradient(
    work: WeightWork, multiprocessors: int, *, side_by_side: bool = False
) -> float:
    """Microseconds of XLA's wgrad, with padding of the operands where the rows do not split evenly.

    Args:
      work: the products.
      multiprocessors: of the device.
      side_by_side: whether XLA concatenates several right operands and runs one product.
    """
    widths: tuple[int, ...] = work.widths
    total = 0.0
    if side_by_side and len(widths) > 1:
        widths = (sum(widths),)
        total += xla_pass(work.rows * widths[0], 2 * work.itemsize)
    for width in widths:
        one = Work(
            work.features,
            width,
            work.rows,
            itemsize=work.itemsize,
            written_bytes=work.out_bytes,
        )
        total += _xla_long_product(one, multiprocessors)
        if xla_pads(one, multiprocessors):
            sizes = (work.features, width)
            total += sum(xla_pass(work.rows * size, 2 * work.itemsize) for size in sizes)
    return total


def _xla_long_product(work: Work, multiprocessors: int) -> float:
    """Microseconds of XLA's product with long sums, and of adding up the parts of these."""
    speeds = H200
    splits = _xla_splits(work, multiprocessors)
    steps = math.ceil(work.steps / splits)
    moved = work.k * (work.m + work.n) * work.itemsize
    moved += work.m * work.n * work.written_bytes if splits == 1 else 0
    traffic = moved * speeds.memory_byte
    best = math.inf
    for tile_m, tile_n in _XLA_TILES:
        tiles = math.ceil(work.m / tile_m) * math.ceil(work.n / tile_n)
        rounds = math.ceil(tiles * splits / multiprocessors)
        compute = rounds * steps * tile_m * tile_n * speeds.xla_long_element
        best = min(best, overlapped((compute, traffic), speeds.overlap))
    if splits > 1:
        added = 4 * work.m * work.n * (splits + 1)
        best += speeds.xla_parts + added * speeds.xla_parts_byte
    ragged = any(size % (STEP_BYTES // work.itemsize) for size in (work.m, work.n))
    ragged = ragged or (splits == 1 and work.k * work.itemsize % _COPY_BYTES != 0)
    launch = speeds.xla_long_launch + speeds.xla_first_step * min(steps, _XLA_FIRST_STEPS)
    if max(work.m, work.n) <= _XLA_TILE:
        launch -= speeds.xla_single_tile
    return launch + best * (speeds.xla_ragged if ragged else 1.0)


_XLA_FIRST_STEPS = 6


def xla_row_sums(elements: int, itemsize: int) -> float:
    """Microseconds of a sum over rows."""
    few = min(1.0, elements / _FEW_SUMMED)
    return H200.xla_pass + few * H200.xla_row_sums + elements * itemsize * H200.xla_row_sums_byte


_FEW_SUMMED = 2e5
"""Number of elements of a matrix whose sum takes no longer than a kernel's start."""


_XLA_TILE = 128
"""Rows and columns of a usual tile of XLA's products."""
_XLA_TILES = [
    tile
    for short in (_XLA_TILE // 2, _XLA_TILE)
    for long in range(_XLA_TILE // 4, 2 * _XLA_TILE + 1, _XLA_TILE // 4)
    for tile in ((short, long), (long, short))
]


def xla_pass(
    elements: int, bytes_of_element: float, activations: int = 0, *, slow_activation: bool = False
) -> float:
    """Microseconds of an elementwise kernel of XLA's over matrices of `elements` elements each."""
    speeds = H200
    traffic = elements * bytes_of_element * speeds.xla_pass_byte
    of_one = speeds.xla_slow_activation if slow_activation else speeds.xla_activation
    evaluated = min(activations, 1) + speeds.xla_next_evaluation * max(0, activations - 1)
    return speeds.xla_pass + max(traffic, elements * evaluated * of_one)
