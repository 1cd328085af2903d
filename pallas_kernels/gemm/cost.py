"""A cost model: the predicted time of a product with an epilogue, in a kernel with a config.

The model covers sizes that no table could list. It has few terms, each with a reason, and constants, in
`speeds.H200`, fitted to times on one device (benchmarks/LAB.md, 2026-11-22 to 2026-11-26). It orders the
configs of a product.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from pallas_kernels.gemm.matmul_config import CONSUMERS, MatmulConfig
from pallas_kernels.gemm.small_m import FewRowsConfig, QuantizedConfig
from pallas_kernels.gemm.speeds import H200
from pallas_kernels.hopper import ALLOCATION_BYTES, REGISTERS, SHARED_MEMORY_BYTES

STEP_BYTES = 128
"""Bytes of an operand's row that are multiplied in a step: 64 numbers of 16 bits."""


@dataclass(frozen=True)
class Work:
    """A product a @ b of [m, k] and [k, n], or several in one pass over a, and its epilogue."""

    m: int
    n: int
    """Columns of each product's b."""
    k: int
    products: int = 1
    itemsize: int = 2
    """Bytes of a number in a, and in b unless `w_itemsize` says another size."""
    w_itemsize: float = 0
    """Bytes of a number in b if b is converted to a's dtype for the product; else 0."""
    read_bytes: int = 0
    """Bytes that the epilogue reads for each element of the result."""
    written_bytes: int = 2
    """Bytes that the epilogue writes for each element of the result."""
    activations: int = 0
    """Activations and derivatives that the epilogue evaluates for each element of the result."""
    k_last: bool = False
    """True if b is [n, k]; one WGMMA then reads any number of b's columns, else blocks of 64."""
    terms: int = 1
    """Number of products a_i @ b_i that are added; k is the sum of their lengths along K."""
    groups: int = 1
    """Number of groups of rows of a, each multiplied by its own b."""

    @property
    def steps(self) -> int:
        return self.terms * math.ceil(self.k // self.terms * self.itemsize / STEP_BYTES)

    @property
    def shifts_rows(self) -> bool:
        """True if rows of b in memory do not start at multiples of 128 bytes."""
        length = self.k // self.terms if self.k_last else self.n
        return length * self.b_bytes % STEP_BYTES != 0

    @property
    def b_bytes(self) -> float:
        """Bytes of a number in b."""
        return self.w_itemsize or self.itemsize

    @property
    def memory_bytes(self) -> float:
        """Bytes of all arrays, each read or written once."""
        columns = self.groups * self.products * self.n
        operands = self.k * (self.itemsize * self.m + self.b_bytes * columns)
        return operands + self.m * self.n * (self.read_bytes + self.written_bytes)


def kernel(work: Work, config: MatmulConfig, multiprocessors: int) -> float:
    """Returns the predicted microseconds of the product with its epilogue, in the large-tile kernel."""
    part_n = config.tile_n // work.products
    across = math.ceil(work.n / part_n)
    down = math.ceil(work.m / (config.cta_tile_m * config.cluster)) * config.cluster
    ctas = multiprocessors // config.cluster * config.cluster
    rounds = math.ceil(down * across / ctas)

    area = config.cta_tile_m * config.tile_n
    step = (
        H200.step + H200.step_element * area
        if config.ping_pong
        else H200.shared_step_element * area
    )
    unaligned = work.n % (STEP_BYTES // work.itemsize) != 0
    ragged = unaligned and not work.k_last
    if ragged and not config.pads_columns:
        step *= H200.ragged
    if config.tile_m * config.tile_n <= 64 * 128:
        step *= H200.narrow
    elif config.tile_m == 64 and config.ping_pong and config.cluster == 1:
        step *= H200.low
    if work.k_last and work.shifts_rows:
        step *= H200.shifted_rows
    if work.steps > work.terms and work.k // work.terms * work.itemsize % STEP_BYTES:
        step *= H200.shifted_a
    step *= 1 + H200.missing_stage * max(0, 4 - config.stages) ** 2
    multiplied = work.steps * step
    if 2 * (work.k // work.terms) * work.itemsize <= STEP_BYTES:
        multiplied = max(multiplied, work.steps * config.cta_tile_m * H200.narrow_row)
    stored = config.tile_m * config.tile_n * _epilogue_of_element(work, config)
    several = work.products > 1 or work.read_bytes > work.itemsize
    large = config.tile_m * config.tile_n > 128 * 128
    busy = work.read_bytes > 0 or work.written_bytes > work.itemsize
    if (config.tile_m == 128 and several) or (large and busy):
        stored *= H200.crowded
    # In ping-pong, one warpgroup multiplies while the other runs its epilogue, and then the reverse.
    tile = (
        overlapped((multiplied, (multiplied + stored) / CONSUMERS), H200.overlap)
        if config.ping_pong
        else multiplied + H200.both_store * stored
    )
    compute = rounds * tile + (stored if config.ping_pong else 0.0)
    total = overlapped((compute, work.memory_bytes * H200.memory_byte), H200.overlap)
    total = H200.launch + total * (H200.ragged_result if unaligned else 1.0)
    if ragged and config.pads_columns:
        copied = 2 * work.itemsize * work.k * work.n * work.products
        total += work.products * H200.xla_pass + copied * H200.xla_pass_byte
    return total + conversion(work)


CONVERTED_ROWS = 256
"""Rows of a up to which a comparison with XLA counts b's conversion to a's dtype: up to there XLA's
product, of one or two tiles of rows, reads a b of another dtype without converting it first."""


def conversion(work: Work) -> float:
    """Microseconds in which XLA converts b to a's dtype; 0 if b has a's dtype."""
    if work.b_bytes == work.itemsize:
        return 0.0
    moved = work.products * work.n * work.k * (work.b_bytes + work.itemsize)
    return work.products * H200.xla_pass + moved * H200.xla_pass_byte


@dataclass(frozen=True)
class WeightWork:
    """Sizes of a weight gradient: the transpose of [rows, features] times several [rows, width]."""

    rows: int
    features: int
    widths: tuple[int, ...]
    itemsize: int = 2
    out_bytes: int = field(kw_only=True)
    """Bytes of a number of the gradient."""
    sums: bool = False
    """True if the right operands are also summed over their rows (the bias gradient)."""

    @property
    def steps(self) -> int:
        return max(1, math.ceil(self.rows * self.itemsize / STEP_BYTES))

    @property
    def elements(self) -> int:
        return self.features * sum(self.widths)


def weight_tiles(work: WeightWork, tile_m: int, tile_n: int) -> int:
    """Number of tiles of all gradients x^T @ dy; a tile has columns of one dy only."""
    return math.ceil(work.features / tile_m) * sum(math.ceil(w / tile_n) for w in work.widths)


def weight_gradient(
    work: WeightWork, *, tile: tuple[int, int], parts: int, cluster: int, multiprocessors: int
) -> float:
    """Microseconds of a weight gradient: the kernel, and XLA's sum of the clusters' partial results.

    Args:
      work: the product.
      tile: rows and columns of the result that a CTA computes at a time, with at least four pipeline
        stages.
      parts: CTAs that share a tile, each with some of the rows (split-K).
      cluster: CTAs of a cluster, which add their sums before they store them.
      multiprocessors: of the device.
    """
    groups = parts // cluster
    area = tile[0] * tile[1]
    steps = math.ceil(work.steps / parts)
    rounds = math.ceil(weight_tiles(work, *tile) * groups / (multiprocessors // cluster))
    step = H200.weights_step + H200.weights_step_element * area
    line = STEP_BYTES // work.itemsize
    blocks = work.rows % 8 != 0 or any(width % line for width in work.widths)
    if blocks and tile[1] > 2 * line:
        step *= H200.weights_ragged
    step *= H200.weights_clustered if cluster > 1 else 1.0
    step = max(step, _copies_of_step(work, tile))
    summed = 0.0
    if work.sums:
        # Warpgroups with the same columns of dy share the summing of a step's rows, 8 rows at a time.
        turns = math.ceil(line / 8 / (2 * math.ceil(work.features / tile[0])))
        step += H200.weights_sum_column * tile[1] * turns
        summed = H200.weights_sum
    stored = H200.weights_stored * area + (H200.weights_exchange if cluster > 1 else 0.0)
    compute = rounds * (steps * step + stored) + summed
    read = work.rows * (work.features + sum(work.widths)) * work.itemsize * H200.weights_byte
    total = H200.weights_launch + overlapped((compute, read), H200.weights_overlap)
    if groups > 1:
        moved = work.elements * (4 * groups + work.out_bytes)
        total += len(work.widths) * H200.xla_pass + moved * H200.weights_sum_byte
    if work.sums:
        total += H200.weights_row_sums
    return total


def grouped_weight_gradient(
    work: WeightWork, groups: int, tile: tuple[int, int], multiprocessors: int
) -> float:
    """Microseconds of the gradients of grouped weights, whose tiles sum over the rows of one group."""
    area = tile[0] * tile[1]
    rounds = math.ceil(groups * weight_tiles(work, *tile) / multiprocessors)
    step = H200.weights_step + H200.weights_step_element * area
    step = max(step, _copies_of_step(work, tile))
    steps = max(2, math.ceil(work.steps / groups))
    compute = rounds * (steps * step + H200.weights_stored * area)
    moved = work.rows * (work.features + sum(work.widths)) * work.itemsize
    moved += groups * work.elements * work.out_bytes
    memory = moved * H200.weights_byte
    return H200.weights_launch + overlapped((compute, memory), H200.weights_overlap)


def _copies_of_step(work: WeightWork, tile: tuple[int, int]) -> float:
    """Microseconds to copy the operands of one wgrad step."""
    line = STEP_BYTES // work.itemsize

    def of_block(columns: int) -> float:
        """Microseconds to copy a block, 128 bytes wide, of a matrix with `columns` columns."""
        pitch = columns * work.itemsize
        if 2 * pitch <= STEP_BYTES:
            return line * H200.weights_narrow_row
        begins = range(0, STEP_BYTES, math.gcd(pitch, STEP_BYTES))
        touched = sum(1 + (begin + min(pitch, STEP_BYTES) > STEP_BYTES) for begin in begins)
        return line * H200.weights_line * touched / len(begins)

    of_widths = sum(width * of_block(width) for width in work.widths) / sum(work.widths)
    return (tile[0] * of_block(work.features) + tile[1] * of_widths) / line


def time(work: Work, config: MatmulConfig | FewRowsConfig, multiprocessors: int) -> float:
    """Returns the microseconds of the product with its epilogue, in the config's kernel."""
    predicted = few_rows if isinstance(config, FewRowsConfig) else kernel
    return predicted(work, config, multiprocessors)


def few_rows_shared_bytes(work: Work, config: FewRowsConfig) -> int:
    """Approximate bytes of shared memory of a small-M CTA; `FewRows.shared_bytes` is exact."""
    rows, width = math.ceil(work.m / 8) * 8, work.products * config.tile_n
    chunks = math.ceil(rows / 8 / config.parts)
    return (
        config.stages * 64 * (work.b_bytes * width + work.itemsize * rows)
        + 4 * rows * width
        + 8 * chunks * config.tile_n * (work.read_bytes + work.written_bytes)
        + 6 * 1024
    )


def few_rows(work: Work, config: FewRowsConfig, multiprocessors: int) -> float:
    """Returns the predicted microseconds of the product with its epilogue, in the small-M kernel."""
    rows = math.ceil(work.m / 8) * 8
    width = work.products * config.tile_n
    columns = math.ceil(work.n / config.tile_n)
    chunks = math.ceil(rows / 8 / config.parts)
    w_step = STEP_BYTES * work.b_bytes // work.itemsize * width
    shared = few_rows_shared_bytes(work, config)
    registers = 64 + width * rows // 128
    of_multiprocessor = min(SHARED_MEMORY_BYTES // shared, REGISTERS // (128 * registers))
    resident = max(1, of_multiprocessor) * multiprocessors
    if config.parts > 2:
        resident = int(resident * H200.cluster_room)
    ctas = columns * config.parts
    steps = min(config.stages, math.ceil(work.steps / config.parts))
    in_flight = min(ctas, resident) * steps * w_step
    traffic = work.memory_bytes * H200.few_rows_byte
    if work.shifts_rows:
        traffic *= H200.few_rows_shifted
    traffic *= max(
        1.0,
        H200.in_flight_bytes * multiprocessors / in_flight,
        H200.busy * multiprocessors / ctas,
    )
    waves = math.ceil(ctas / resident)
    if waves > 1:
        traffic *= waves * resident / ctas
    if work.b_bytes != work.itemsize:
        numbers = width * STEP_BYTES // work.itemsize
        step = H200.few_rows_conversion_step + numbers * H200.few_rows_conversion
        traffic = max(traffic, math.ceil(work.steps / config.parts) * waves * step)
    cached = columns * work.itemsize * work.m * work.k * H200.cached_byte
    total = H200.few_rows_launch + overlapped((traffic, cached), H200.overlap)
    total += chunks * H200.few_rows_chunk
    if config.parts > 1:
        total += H200.few_rows_parts + rows * width * H200.few_rows_exchange
    return total


def quantized_few_rows_shared_bytes(work: Work, config: QuantizedConfig) -> float:
    """Approximate bytes of shared memory of a small-M CTA with quantised weights."""
    rows, width = math.ceil(work.m / 8) * 8, work.products * config.tile_n
    chunks = math.ceil(rows / 8 / config.parts)
    return (
        config.stages * config.step_k * (work.b_bytes * width + work.itemsize * rows)
        + config.stages * 1024 * work.products
        + 4 * rows * width
        + 8 * chunks * config.tile_n * (work.read_bytes + work.written_bytes)
        + 6 * 1024
    )


def quantized_few_rows_registers(work: Work, config: QuantizedConfig) -> int:
    """Approximate registers of a thread, fitted to ptxas's at 64 and 128 columns with 8 to 64 rows."""
    rows, width = math.ceil(work.m / 8) * 8, work.products * config.tile_n
    per_row = 0.0146 if work.b_bytes < 1 else 0.0086
    return 8 * math.ceil((4 + width * (0.84 + per_row * rows)) / 8)


def quantized_few_rows(work: Work, config: QuantizedConfig, multiprocessors: int) -> float:
    """Microseconds of the product in the small-M kernel with quantised weights."""
    rows = math.ceil(work.m / 8) * 8
    width = work.products * config.tile_n
    columns = math.ceil(work.n / config.tile_n)
    steps = math.ceil(math.ceil(work.k / config.step_k) / config.parts)
    registers = quantized_few_rows_registers(work, config)
    # `quantized_few_rows_shared_bytes` is about 4 KiB too high, which matters if CTAs share an SM.
    shared = quantized_few_rows_shared_bytes(work, config) - 4 * 1024 + ALLOCATION_BYTES
    of_multiprocessor = min(
        (SHARED_MEMORY_BYTES + ALLOCATION_BYTES) // shared, REGISTERS // (128 * registers)
    )
    room = {4: H200.quantized_room_of_four, 8: H200.quantized_room_of_eight}
    resident = max(1, int(of_multiprocessor)) * multiprocessors * room.get(config.parts, 1.0)
    ctas = columns * config.parts
    waves = math.ceil(ctas / resident)
    # In a K step, the times of all weights of an SM's CTAs add up; `quantized_step` counts once.
    at_once = math.ceil(min(ctas, resident) / multiprocessors)
    number = H200.quantized_number * (H200.quantized_four_bits if work.b_bytes < 1 else 1.0)
    step = H200.quantized_step + config.step_k * width * at_once * number * (1 + rows / 37)
    of_ctas = waves * steps * step
    cached = columns * work.itemsize * work.m * work.k * H200.quantized_x_byte
    traffic = work.memory_bytes * H200.quantized_byte
    total = H200.quantized_launch + overlapped((traffic, cached, of_ctas), H200.overlap)
    total += math.ceil(rows / 8 / config.parts) * H200.quantized_chunk
    total += (waves - 1) * H200.quantized_wave
    total += max(0, 4 - config.stages) * H200.quantized_missing_stage
    if config.parts > 1:
        total += rows * width * H200.quantized_exchange
        total += (config.parts - 1) * H200.quantized_part
    return total


def _epilogue_of_element(work: Work, config: MatmulConfig) -> float:
    """Microseconds of the epilogue for each element of a warpgroup's accumulators."""
    reading = H200.read_byte * (1.0 if config.read_slots == 1 else 2 / 3)
    of_result = (
        work.read_bytes * reading
        + max(0, work.written_bytes - 2) * H200.written_byte
        + work.activations * H200.activation
    )
    return H200.element + of_result / work.products


def overlapped(parts: Sequence[float], overlap: float) -> float:
    """Returns the p-norm, p = `overlap`, of overlapping times: between the longest and their sum."""
    return sum(part**overlap for part in parts) ** (1 / overlap)
