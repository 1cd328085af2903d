"""Predicted time of the attention kernels, by which the families of kernels are ordered.

The estimate adds up the times of the tasks that an SM runs one after the other. The numbers in
microseconds are those of an H200; benchmarks/LAB.md says what they were fitted to.
"""

from pallas_kernels.attention import backward_dkv
from pallas_kernels.attention.backward import BackwardConfig
from pallas_kernels.attention.forward import ForwardConfig
from pallas_kernels.attention.key_gradient_config import KeyGradientConfig
from pallas_kernels.attention.logits import Logits
from pallas_kernels.attention.memory import WGMMA_ROWS
from pallas_kernels.attention.packing import Packing
from pallas_kernels.attention.shape import Shape
from pallas_kernels.attention.short_backward import ShortBackwardConfig
from pallas_kernels.attention.short_forward import ShortForwardConfig
from pallas_kernels.attention.speeds import BYTES, CACHED_BYTES, LAUNCH, per_row
from pallas_kernels.attention.split_keys import SplitForwardConfig, visited_keys
from pallas_kernels.attention.split_keys_backward import SplitBackwardConfig, is_fused


def forward(
    shape: Shape,
    logits: Logits,
    config: ForwardConfig | ShortForwardConfig | SplitForwardConfig,
    multiprocessors: int,
) -> float:
    """Returns the predicted microseconds of a forward with `config`."""
    keys = visited_keys(shape, logits)
    if isinstance(config, SplitForwardConfig):
        return _split_forward(shape, keys, config, multiprocessors)
    rows = config.query_block if isinstance(config, ForwardConfig) else WGMMA_ROWS
    tasks = shape.batch * shape.heads * -(-shape.query_count // rows)
    rounds = -(-tasks // max(1, multiprocessors))
    return LAUNCH + rounds * max(1.35, keys * (0.014 + 4e-5 * shape.head_size))


def _split_forward(
    shape: Shape, keys: int, config: SplitForwardConfig, multiprocessors: int
) -> float:
    tiles = Packing.of(shape).tiles
    tasks = shape.batch * shape.key_heads * tiles * config.splits
    places = config.ctas_per_multiprocessor * max(1, multiprocessors)
    blocks = -(-keys // (config.key_block * config.splits))
    widest = max(shape.head_size, shape.value_size)
    per_block = (0.45 + 0.0025 * widest) * config.key_block / 64
    by_tasks = -(-tasks // places) * (1.5 + blocks * per_block)
    read = _bytes_of_keys(shape, keys)
    by_memory = max(read / BYTES, read * tiles / CACHED_BYTES)
    # A part is the float32 output of one CTA over its keys: 4 bytes a number, written once, and read
    # once by the kernel that merges the parts (with one part, by XLA).
    parts = 8 * tasks * min(WGMMA_ROWS, Packing.of(shape).rows) * shape.value_size
    merged = shape.batch * shape.heads * -(-shape.query_count // 4)
    merging = merged / (16 * max(1, multiprocessors)) if config.splits > 1 else 0.0
    by_merging = LAUNCH + merging
    return LAUNCH + max(by_tasks, by_memory) + parts / CACHED_BYTES + by_merging


def backward(
    shape: Shape,
    logits: Logits,
    config: BackwardConfig | ShortBackwardConfig | SplitBackwardConfig,
    multiprocessors: int,
) -> float:
    """Returns the microseconds of a backward, without XLA's kernel for log-sum-exp and delta.

    The backward for few keys (`short_backward`) computes both without XLA's kernel, so the time of that
    kernel is subtracted from it.
    """
    keys = visited_keys(shape, logits)
    multiprocessors = max(1, multiprocessors)
    if isinstance(config, SplitBackwardConfig):
        return _split_backward(shape, logits, config, multiprocessors)
    if isinstance(config, ShortBackwardConfig):
        return _short_backward(shape, multiprocessors) - _row_statistics(shape)
    tasks = shape.batch * shape.heads * -(-shape.query_count // config.queries.query_block)
    rounds = -(-tasks // multiprocessors)
    for_queries = rounds * max(_LEAST_OF_QUERIES, keys * per_row(shape))
    for_queries = max(for_queries, _bytes_of_keys(shape, keys) / BYTES)
    return 2 * LAUNCH + for_queries + _key_gradients(shape, logits, config.keys, multiprocessors)


_LEAST_OF_QUERIES = 2.4
"""Least microseconds of a tile of queries in the kernel of dQ, even if the tile visits few keys."""


def _row_statistics(shape: Shape) -> float:
    """Returns the microseconds of XLA's kernel that computes rowsum(dout * out)."""
    rows = 2.0 * shape.batch * shape.query_count * shape.heads * shape.value_size
    # XLA's kernel reaches 0.75 of a copy's bandwidth.
    return 2.0 + 2 * rows / (0.75 * BYTES)


def _short_backward(shape: Shape, multiprocessors: int) -> float:
    """Returns the microseconds of the short backward: a CTA for each key head, 64 queries at a time."""
    steps = shape.group * -(-shape.query_count // WGMMA_ROWS)
    tiles = -(-shape.key_count // WGMMA_ROWS)
    alone = steps * max(1.0, shape.head_size / 64) * (1 + 0.5 * tiles)
    ctas = shape.batch * shape.key_heads
    # When CTAs occupy half of the SMs or more, clocks are lower and memory bandwidth is shared.
    crowded = 1.25 if 2 * ctas > multiprocessors else 1.0
    return LAUNCH + -(-ctas // multiprocessors) * alone * crowded


def _key_gradients(
    shape: Shape, logits: Logits, config: KeyGradientConfig, multiprocessors: int
) -> float:
    tiles = backward_dkv.shared_tiles(shape, logits, config, multiprocessors)
    by_tiles = backward_dkv.microseconds(shape, tiles, config, multiprocessors)
    return max(by_tiles, 2 * _bytes_of_keys(shape, shape.key_count) / BYTES)


def _split_backward(
    shape: Shape, logits: Logits, config: SplitBackwardConfig, multiprocessors: int
) -> float:
    keys, packing = visited_keys(shape, logits), Packing.of(shape)
    tasks = shape.batch * shape.key_heads * packing.tiles * config.splits
    places = config.ctas_per_multiprocessor * multiprocessors
    blocks = -(-keys // (WGMMA_ROWS * config.splits))
    widest = max(shape.head_size, shape.value_size)
    per_block = 0.9 + 0.006 * widest
    by_memory = _bytes_of_keys(shape, keys) / BYTES
    others = 0.0
    if is_fused(shape):
        by_memory += _bytes_of_keys(shape, shape.key_count) / BYTES
    else:
        per_block *= 0.6
        others = LAUNCH + _key_gradients(
            shape,
            logits,
            backward_dkv.default_config(shape, logits, multiprocessors),
            multiprocessors,
        )
    by_tasks = -(-tasks // places) * (2.5 + blocks * per_block)
    rows = min(WGMMA_ROWS, packing.rows)
    parts = 8 * tasks * rows * shape.head_size / CACHED_BYTES
    return 2 * LAUNCH + max(by_tasks, by_memory) + parts + others


def _bytes_of_keys(shape: Shape, keys: int) -> float:
    """Returns the bytes of K and V in 16 bits, `keys` of each key head."""
    return 2.0 * shape.batch * shape.key_heads * keys * (shape.head_size + shape.value_size)
