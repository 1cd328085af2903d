"""What a product with an epilogue costs, predicted: here with a config, and in XLA's program.

A model and not a table, since sizes are without number. It has few terms, each of which has a reason,
and constants that were fitted to times on one device (benchmarks/LAB.md, 2026-11-22 to 2026-11-26). It
orders the configs of a product, and says where a kernel of this package is worth taking.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pallas_kernels.gemm.mainloop import CONSUMERS, MatmulConfig
from pallas_kernels.gemm.small_m import MAX_ROWS, FewRowsConfig, QuantizedConfig
from pallas_kernels.hopper import ALLOCATION_BYTES, REGISTERS, SHARED_MEMORY_BYTES

_STEP_BYTES = 128
"""Of a row of an operand that are multiplied in a step: 64 numbers of 16 bits."""


@dataclass(frozen=True)
class Speeds:
    """Of a device, in microseconds. Fitted to an H200 in bfloat16."""

    launch: float = 1.3
    """To start and to end the kernel, which fills its ring first."""
    step: float = 0.115
    """Of a step along K, whatever the tile."""
    step_element: float = 1.34e-5
    """Of a step, for each element of a tile in ping-pong."""
    shared_step_element: float = 1.93e-5
    """Likewise where the warpgroups share a tile; nothing is added for the step itself."""
    ragged: float = 1.28
    """Factor of a step whose instructions take a block of columns each."""
    shifted_rows: float = 1.5
    """Factor of a step where rows of b [n, k] begin anywhere in a line of memory."""
    shifted_a: float = 1.3
    """Likewise where rows of a do. From one shape."""
    narrow: float = 1.2
    """Factor of a step with a tile of 64 x 128 or smaller, which waits for its operands."""
    low: float = 1.03
    """Factor of a step of any other tile of 64 rows in ping-pong, for which b is read more often."""
    element: float = 6.7e-5
    """Of an epilogue, for each element of a warpgroup's tile."""
    read_byte: float = 8e-5
    """Likewise for each byte that the epilogue reads of it; with two slots two thirds of that."""
    written_byte: float = 3e-5
    """Likewise for each byte that it writes, beyond the first two."""
    activation: float = 1.1e-4
    """Likewise for an activation, and once more for its derivative."""
    memory_byte: float = 1 / 3.9e6
    """Of memory traffic."""
    crowded: float = 1.1
    """Factor of an epilogue that lacks registers: one that reads, or makes two matrices, beside a tile
    of more than 128 x 128, or where several matrices meet in a tile of 128 rows."""
    both_store: float = 1.15
    """Factor of an epilogue that both warpgroups run at once."""
    missing_stage: float = 0.08
    """What a step takes more for a slot that the ring has fewer than four, and four times for two."""
    ragged_result: float = 1.07
    """Factor where rows of the result begin anywhere in a line of memory."""
    overlap: float = 2.4
    """Exponent of the norm that two things take which run at once: large where one hides the other."""
    few_rows_launch: float = 2.2
    """To start and to end a kernel of few rows, whose first copies take their time to arrive."""
    few_rows_byte: float = 1 / 4.35e6
    """Of memory traffic there."""
    few_rows_shifted: float = 1.5
    """Factor of that where rows of the weights begin anywhere in a line of memory."""
    cached_byte: float = 1 / 4.5e6
    """Of what comes from the cache: x, once for each block of columns."""
    few_rows_parts: float = 0.2
    """For the CTAs of a cluster to wait for each other."""
    few_rows_exchange: float = 2e-5
    """For each sum that a CTA leaves to them and takes from them."""
    few_rows_chunk: float = 0.5
    """For each chunk of rows that a CTA finishes."""
    few_rows_conversion_step: float = 0.65
    """Of a step of a CTA that converts w to the dtype of x before it multiplies."""
    few_rows_conversion: float = 3.4e-5
    """Likewise for each number that it converts."""
    quantized_launch: float = 1.6
    """As `few_rows_launch`, with quantised weights."""
    quantized_byte: float = 2.6e-7
    """Of memory traffic there."""
    quantized_step: float = 0.25
    """Of a step of a CTA, which is done before the next one begins."""
    quantized_number: float = 7.8e-6
    """Of a step, for each weight of the CTAs of a multiprocessor, and again for each 37 rows."""
    quantized_four_bits: float = 0.78
    """Factor of that for weights of four bits, of which a register holds twice as many."""
    quantized_x_byte: float = 1.0e-7
    """Of x, which comes from the cache."""
    quantized_wave: float = 0.98
    """For CTAs that wait until others have ended."""
    quantized_chunk: float = 0.12
    """For each chunk of rows that a CTA finishes."""
    quantized_exchange: float = 4.0e-4
    """For each sum that a CTA leaves to the others of a cluster and takes from them."""
    quantized_part: float = 0.13
    """For each CTA of a cluster beyond the first."""
    quantized_missing_stage: float = 0.26
    """For each stage that the ring has fewer than four."""
    quantized_room_of_four: float = 0.66
    """Part of the room for CTAs that clusters of four find, which have to begin together."""
    quantized_room_of_eight: float = 0.57
    """Likewise of eight."""
    few_rows_wave: float = 0.5
    """For CTAs that wait until others have ended: their ring is empty again."""
    cluster_room: float = 0.9
    """Part of the multiprocessors on which clusters of more than two CTAs find room at once: each lies
    within a group of multiprocessors, and the groups are of several sizes."""
    in_flight_bytes: float = 38e3
    """Of a multiprocessor, for memory to be as fast as that."""
    busy: float = 0.52
    """Part of the multiprocessors that can take all that memory gives."""
    xla_launch: float = 2.0
    xla_few_rows: float = 1.2
    """What a product of few rows takes it more: tiles as flat as that fill its ring no faster."""
    xla_fewest: float = 1.8
    """To start and to end one with the least traffic."""
    xla_few_rows_filled: float = 6e6
    """Bytes of traffic from which on such a product takes all of the former two."""
    xla_fewest_rows_byte: float = 1 / 4.55e6
    """Of memory traffic in a product of half of them."""
    xla_single_row_byte: float = 1 / 1.25e6
    """Of the factors of a single row's sums, which XLA writes first and then adds up."""
    xla_step: float = 0.035
    xla_step_element: float = 1.76e-5
    xla_tile_element: float = 8e-5
    """To store a tile, exposed once."""
    xla_ragged: float = 1.1
    """Factor of a product whose columns are not a multiple of 64."""
    xla_pass: float = 1.2
    """Of a kernel that reads and writes matrices, beside its traffic."""
    xla_pass_byte: float = 1 / 3.7e6
    xla_activation: float = 1.5e-6
    """Of an element in such a kernel that evaluates gelu's tanh, or anything that is no slower."""
    xla_slow_activation: float = 3.0e-6
    """Likewise for gelu_erf."""
    xla_next_evaluation: float = 0.4
    """What each further evaluation of the same element takes of the first: they share the most."""
    cuda_pass: float = 2.0
    """Of this package's CUDA kernel over the result of a product, beside its traffic."""
    cuda_sums: float = 3.5
    """Likewise where it sums the rows."""
    cuda_slow_activation: float = 3.0e-6
    """Of an element there whose derivative is gelu_erf's, which takes longer than the traffic."""
    cuda_unaligned: float = 2.0
    """Factor of its traffic where rows begin anywhere in 16 bytes."""
    xla_long_launch: float = 1.4
    """Of a product with long sums, as of a weight's gradient."""
    xla_single_tile: float = 1.2
    """How much sooner such a product starts and ends whose result is one tile."""
    xla_first_step: float = 0.27
    """Of each of the first steps there, which wait for their operands."""
    xla_long_element: float = 2.04e-5
    """Of a step there, for each element of a tile."""
    xla_parts: float = 2.0
    """To add up parts of the sums, beside the traffic."""
    xla_parts_byte: float = 1 / 5.2e6
    xla_row_sums: float = 1.8
    """Of a sum over many rows, beside a kernel and its traffic."""
    xla_row_sums_byte: float = 1 / 3.8e6
    xla_ones: float = 3.0
    """Of one that is a product with ones, beside its traffic."""
    xla_ones_byte: float = 1 / 8e6
    weights_launch: float = 1.8
    """To start and to end the kernel of a weight's gradient."""
    weights_step: float = 0.034
    """Of a step there, whatever the tile."""
    weights_step_element: float = 1.9e-5
    """Of a step, for each element of a CTA's tile."""
    weights_ragged: float = 1.2
    """Factor of a step whose instructions take a block of columns each, of more than two."""
    weights_line: float = 1.13e-3
    """Of a step, for each line of memory that its copies touch, which may take longer than it."""
    weights_sum: float = 0.55
    """To add up the sums of rows at the end of a tile."""
    weights_sum_column: float = 8e-5
    """Of a step, for each column of which a warpgroup sums some rows, and for each of its turns."""
    weights_stored: float = 9.7e-5
    """For each element of a CTA's tile that it stores."""
    weights_exchange: float = 3.5
    """For the CTAs of a cluster to leave their parts of a tile to each other."""
    weights_clustered: float = 1.2
    """Factor of a step in a cluster, whose CTAs wait for each other's rings: 1.05 to 1.35 measured."""
    weights_byte: float = 1 / 3.45e6
    """Of memory traffic there."""
    weights_overlap: float = 3.6
    """As `overlap`, of that traffic and the steps."""
    weights_narrow_row: float = 0.005
    """To copy a row of an operand there of which two or more share a line."""
    narrow_row: float = 0.012
    """Likewise in a product with an epilogue, of the rows of x."""
    weights_sum_byte: float = 1 / 4.6e6
    """Of the parts that XLA adds, some of which the cache still holds."""
    weights_row_sums: float = 1.4
    """For XLA to add the parts of the sums of rows."""
    cublaslt_activation: float = 3.2e-7
    """Of an element whose activation cuBLASLt evaluates in the epilogue of its product."""
    cublaslt_saves: float = 1.17
    """Factor of a product that also writes what the activation is of: few of its kernels do."""
    cublaslt_saved: float = 3.5e-7
    """Of an element that is written so, beside the traffic."""


H200 = Speeds()


@dataclass(frozen=True)
class Work:
    """A product a @ b of [m, k] and [k, n], or several in one pass over a, and its epilogue."""

    m: int
    n: int
    """Columns of each product."""
    k: int
    products: int = 1
    itemsize: int = 2
    """Bytes of a number in a, and in b unless that has its own."""
    w_itemsize: float = 0
    """Bytes of a number in b where it is of another dtype, which is then converted; else 0, or a's."""
    read_bytes: int = 0
    """Of an element in each of the matrices that the epilogue reads."""
    written_bytes: int = 2
    """Of an element in each of those that it writes."""
    activations: int = 0
    """Activations and their derivatives that it evaluates for an element."""
    slow_activation: bool = False
    """They are gelu_erf's, which XLA evaluates at length."""
    k_last: bool = False
    """b is [n, k], of which any number of columns makes an instruction."""
    terms: int = 1
    """Pairs of operands whose products are added: each has its part of k."""
    weights_apart: bool = False
    """Of several products each has its weights in a matrix of its own."""
    groups: int = 1
    """Groups of rows, each of which has a b of its own."""

    @property
    def steps(self) -> int:
        return self.terms * math.ceil(self.k // self.terms * self.itemsize / _STEP_BYTES)

    @property
    def shifts_rows(self) -> bool:
        """True if rows of b begin anywhere in a line of memory."""
        length = self.k // self.terms if self.k_last else self.n
        return length * self.b_bytes % _STEP_BYTES != 0

    @property
    def b_bytes(self) -> float:
        """Bytes of a number in b."""
        return self.w_itemsize or self.itemsize

    @property
    def memory_bytes(self) -> float:
        """What has to be read and written once."""
        columns = self.groups * self.products * self.n
        operands = self.k * (self.itemsize * self.m + self.b_bytes * columns)
        return operands + self.m * self.n * (self.read_bytes + self.written_bytes)


def kernel(work: Work, config: MatmulConfig, multiprocessors: int, speeds: Speeds = H200) -> float:
    """Microseconds of the product with its epilogue in this package's kernel."""
    part_n = config.tile_n // work.products
    across = math.ceil(work.n / part_n)
    down = math.ceil(work.m / (config.cta_tile_m * config.cluster)) * config.cluster
    ctas = multiprocessors // config.cluster * config.cluster
    rounds = math.ceil(down * across / ctas)

    area = config.cta_tile_m * config.tile_n
    step = (
        speeds.step + speeds.step_element * area
        if config.ping_pong
        else speeds.shared_step_element * area
    )
    unaligned = work.n % (_STEP_BYTES // work.itemsize) != 0
    ragged = unaligned and not work.k_last
    if ragged and not config.pads_columns:
        step *= speeds.ragged
    if config.tile_m * config.tile_n <= 64 * 128:
        step *= speeds.narrow
    elif config.tile_m == 64 and config.ping_pong and config.cluster == 1:
        step *= speeds.low
    if work.k_last and work.shifts_rows:
        step *= speeds.shifted_rows
    if work.steps > work.terms and work.k // work.terms * work.itemsize % _STEP_BYTES:
        step *= speeds.shifted_a
    step *= 1 + speeds.missing_stage * max(0, 4 - config.stages) ** 2
    multiplied = work.steps * step
    if 2 * (work.k // work.terms) * work.itemsize <= _STEP_BYTES:
        multiplied = max(multiplied, work.steps * config.cta_tile_m * speeds.narrow_row)
    stored = config.tile_m * config.tile_n * _epilogue_of_element(work, config, speeds)
    several = work.products > 1 or work.read_bytes > work.itemsize
    large = config.tile_m * config.tile_n > 128 * 128
    busy = work.read_bytes > 0 or work.written_bytes > work.itemsize
    if (config.tile_m == 128 and several) or (large and busy):
        stored *= speeds.crowded
    # In ping-pong a warpgroup multiplies while the other one stores, and each does both in turn.
    tile = (
        _at_once((multiplied, (multiplied + stored) / CONSUMERS), speeds.overlap)
        if config.ping_pong
        else multiplied + speeds.both_store * stored
    )
    compute = rounds * tile + (stored if config.ping_pong else 0.0)
    total = _at_once((compute, work.memory_bytes * speeds.memory_byte), speeds.overlap)
    total = speeds.launch + total * (speeds.ragged_result if unaligned else 1.0)
    if ragged and config.pads_columns:
        copied = 2 * work.itemsize * work.k * work.n * work.products
        total += work.products * speeds.xla_pass + copied * speeds.xla_pass_byte
    return total + conversion(work, speeds)


CONVERTED_ROWS = 256
"""Up to so many rows the time to convert weights is to count: XLA's product has one or two tiles of
rows, and reads weights of another dtype as they are."""


def conversion(work: Work, speeds: Speeds = H200) -> float:
    """Microseconds in which XLA converts b, where it has to."""
    if work.b_bytes == work.itemsize:
        return 0.0
    moved = work.products * work.n * work.k * (work.b_bytes + work.itemsize)
    return work.products * speeds.xla_pass + moved * speeds.xla_pass_byte


@dataclass(frozen=True)
class WeightWork:
    """The gradient of weights: the transpose of [rows, features] times several of [rows, width]."""

    rows: int
    features: int
    widths: tuple[int, ...]
    itemsize: int = 2
    out_bytes: int = 4
    """Of a number of the gradient."""
    sums: bool = False
    """The rows of what is multiplied from the right are summed, too."""

    @property
    def steps(self) -> int:
        return max(1, math.ceil(self.rows * self.itemsize / _STEP_BYTES))

    @property
    def elements(self) -> int:
        return self.features * sum(self.widths)


def weight_tiles(work: WeightWork, tile_m: int, tile_n: int) -> int:
    """Tiles of the gradient, each of which belongs to one of the widths."""
    return math.ceil(work.features / tile_m) * sum(math.ceil(w / tile_n) for w in work.widths)


def weight_gradient(
    work: WeightWork,
    *,
    tile: tuple[int, int],
    parts: int,
    cluster: int,
    multiprocessors: int,
    speeds: Speeds = H200,
) -> float:
    """Microseconds of the gradient of weights in this package's kernel, XLA's sums of parts included.

    Args:
      work: the product.
      tile: rows and columns of the result that a CTA computes at a time, through a ring of four slots
        or more.
      parts: of each tile.
      cluster: parts that are added within a cluster.
      multiprocessors: of the device.
    """
    groups = parts // cluster
    area = tile[0] * tile[1]
    steps = math.ceil(work.steps / parts)
    rounds = math.ceil(weight_tiles(work, *tile) * groups / (multiprocessors // cluster))
    step = speeds.weights_step + speeds.weights_step_element * area
    line = _STEP_BYTES // work.itemsize
    blocks = work.rows % 8 != 0 or any(width % line for width in work.widths)
    if blocks and tile[1] > 2 * line:
        step *= speeds.weights_ragged
    step *= speeds.weights_clustered if cluster > 1 else 1.0
    step = max(step, _copies_of_step(work, tile, speeds))
    summed = 0.0
    if work.sums:
        # Warpgroups with the same columns share the rows of a step, eight at a time.
        turns = math.ceil(line / 8 / (2 * math.ceil(work.features / tile[0])))
        step += speeds.weights_sum_column * tile[1] * turns
        summed = speeds.weights_sum
    stored = speeds.weights_stored * area + (speeds.weights_exchange if cluster > 1 else 0.0)
    compute = rounds * (steps * step + stored) + summed
    read = work.rows * (work.features + sum(work.widths)) * work.itemsize * speeds.weights_byte
    total = speeds.weights_launch + _at_once((compute, read), speeds.weights_overlap)
    if groups > 1:
        moved = work.elements * (4 * groups + work.out_bytes)
        total += len(work.widths) * speeds.xla_pass + moved * speeds.weights_sum_byte
    if work.sums:
        total += speeds.weights_row_sums
    return total


def grouped_weight_gradient(
    work: WeightWork,
    groups: int,
    tile: tuple[int, int],
    multiprocessors: int,
    speeds: Speeds = H200,
) -> float:
    """Microseconds of the gradients of grouped weights: a tile has the rows of its group alone."""
    area = tile[0] * tile[1]
    rounds = math.ceil(groups * weight_tiles(work, *tile) / multiprocessors)
    step = speeds.weights_step + speeds.weights_step_element * area
    step = max(step, _copies_of_step(work, tile, speeds))
    steps = max(2, math.ceil(work.steps / groups))
    compute = rounds * (steps * step + speeds.weights_stored * area)
    moved = work.rows * (work.features + sum(work.widths)) * work.itemsize
    moved += groups * work.elements * work.out_bytes
    memory = moved * speeds.weights_byte
    return speeds.weights_launch + _at_once((compute, memory), speeds.weights_overlap)


def _copies_of_step(work: WeightWork, tile: tuple[int, int], speeds: Speeds) -> float:
    """Microseconds in which the operands of a step of a weight's gradient are copied."""
    line = _STEP_BYTES // work.itemsize

    def of_block(columns: int) -> float:
        """Of a block of a matrix with so many columns, a line wide."""
        pitch = columns * work.itemsize
        if 2 * pitch <= _STEP_BYTES:
            return line * speeds.weights_narrow_row
        begins = range(0, _STEP_BYTES, math.gcd(pitch, _STEP_BYTES))
        touched = sum(1 + (begin + min(pitch, _STEP_BYTES) > _STEP_BYTES) for begin in begins)
        return line * speeds.weights_line * touched / len(begins)

    of_widths = sum(width * of_block(width) for width in work.widths) / sum(work.widths)
    return (tile[0] * of_block(work.features) + tile[1] * of_widths) / line


def time(
    work: Work, config: MatmulConfig | FewRowsConfig, multiprocessors: int, speeds: Speeds = H200
) -> float:
    """Microseconds of the product with its epilogue in the kernel of a config."""
    predicted = few_rows if isinstance(config, FewRowsConfig) else kernel
    return predicted(work, config, multiprocessors, speeds)


def few_rows_shared_bytes(work: Work, config: FewRowsConfig) -> int:
    """About what a CTA takes of shared memory: `FewRows.shared_bytes` counts the very allocations."""
    rows, width = math.ceil(work.m / 8) * 8, work.products * config.tile_n
    chunks = math.ceil(rows / 8 / config.parts)
    return (
        config.stages * 64 * (work.b_bytes * width + work.itemsize * rows)
        + 4 * rows * width
        + 8 * chunks * config.tile_n * (work.read_bytes + work.written_bytes)
        + 6 * 1024
    )


def few_rows(
    work: Work, config: FewRowsConfig, multiprocessors: int, speeds: Speeds = H200
) -> float:
    """Microseconds of the product with its epilogue in the kernel for few rows."""
    rows = math.ceil(work.m / 8) * 8
    width = work.products * config.tile_n
    columns = math.ceil(work.n / config.tile_n)
    chunks = math.ceil(rows / 8 / config.parts)
    w_step = _STEP_BYTES * work.b_bytes // work.itemsize * width
    shared = few_rows_shared_bytes(work, config)
    registers = 64 + width * rows // 128
    of_multiprocessor = min(SHARED_MEMORY_BYTES // shared, REGISTERS // (128 * registers))
    resident = max(1, of_multiprocessor) * multiprocessors
    if config.parts > 2:
        resident = int(resident * speeds.cluster_room)
    ctas = columns * config.parts
    steps = min(config.stages, math.ceil(work.steps / config.parts))
    in_flight = min(ctas, resident) * steps * w_step
    traffic = work.memory_bytes * speeds.few_rows_byte
    if work.shifts_rows:
        traffic *= speeds.few_rows_shifted
    traffic *= max(
        1.0,
        speeds.in_flight_bytes * multiprocessors / in_flight,
        speeds.busy * multiprocessors / ctas,
    )
    waves = math.ceil(ctas / resident)
    if waves > 1:
        traffic *= waves * resident / ctas
    if work.b_bytes != work.itemsize:
        numbers = width * _STEP_BYTES // work.itemsize
        step = speeds.few_rows_conversion_step + numbers * speeds.few_rows_conversion
        traffic = max(traffic, math.ceil(work.steps / config.parts) * waves * step)
    cached = columns * work.itemsize * work.m * work.k * speeds.cached_byte
    total = speeds.few_rows_launch + _at_once((traffic, cached), speeds.overlap)
    total += chunks * speeds.few_rows_chunk + (waves - 1) * speeds.few_rows_wave
    if config.parts > 1:
        total += speeds.few_rows_parts + rows * width * speeds.few_rows_exchange
    return total


def quantized_few_rows_shared_bytes(work: Work, config: QuantizedConfig) -> float:
    """About what a CTA takes of shared memory where the weights are quantised."""
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
    """About what a thread takes there, as ptxas says of 64 and 128 columns with 8 to 64 rows."""
    rows, width = math.ceil(work.m / 8) * 8, work.products * config.tile_n
    per_row = 0.0146 if work.b_bytes < 1 else 0.0086
    return 8 * math.ceil((4 + width * (0.84 + per_row * rows)) / 8)


def quantized_few_rows(
    work: Work, config: QuantizedConfig, multiprocessors: int, speeds: Speeds = H200
) -> float:
    """Microseconds of the product in the kernel for few rows where the weights are quantised."""
    rows = math.ceil(work.m / 8) * 8
    width = work.products * config.tile_n
    columns = math.ceil(work.n / config.tile_n)
    steps = math.ceil(math.ceil(work.k / config.step_k) / config.parts)
    registers = quantized_few_rows_registers(work, config)
    # Where CTAs share a multiprocessor, what the other function counts too much matters.
    shared = quantized_few_rows_shared_bytes(work, config) - 4 * 1024 + ALLOCATION_BYTES
    of_multiprocessor = min(
        (SHARED_MEMORY_BYTES + ALLOCATION_BYTES) // shared, REGISTERS // (128 * registers)
    )
    room = {4: speeds.quantized_room_of_four, 8: speeds.quantized_room_of_eight}
    resident = max(1, int(of_multiprocessor)) * multiprocessors * room.get(config.parts, 1.0)
    ctas = columns * config.parts
    waves = math.ceil(ctas / resident)
    # CTAs of a multiprocessor share what it converts and multiplies, and each waits in its steps.
    at_once = math.ceil(min(ctas, resident) / multiprocessors)
    number = speeds.quantized_number * (speeds.quantized_four_bits if work.b_bytes < 1 else 1.0)
    step = speeds.quantized_step + config.step_k * width * at_once * number * (1 + rows / 37)
    of_ctas = waves * steps * step
    cached = columns * work.itemsize * work.m * work.k * speeds.quantized_x_byte
    traffic = work.memory_bytes * speeds.quantized_byte
    total = speeds.quantized_launch + _at_once((traffic, cached, of_ctas), speeds.overlap)
    total += math.ceil(rows / 8 / config.parts) * speeds.quantized_chunk
    total += (waves - 1) * speeds.quantized_wave
    total += max(0, 4 - config.stages) * speeds.quantized_missing_stage
    if config.parts > 1:
        total += rows * width * speeds.quantized_exchange
        total += (config.parts - 1) * speeds.quantized_part
    return total


def _epilogue_of_element(work: Work, config: MatmulConfig, speeds: Speeds) -> float:
    """Of an element of the accumulators, in a warpgroup."""
    reading = speeds.read_byte * (1.0 if config.read_slots == 1 else 2 / 3)
    of_result = (
        work.read_bytes * reading
        + max(0, work.written_bytes - 2) * speeds.written_byte
        + work.activations * speeds.activation
    )
    return speeds.element + of_result / work.products


def xla_product(
    m: int, n: int, k: int, itemsize: int = 2, multiprocessors: int = 132, b_itemsize: float = 0
) -> float:
    """Microseconds of XLA's product, for which it tries many tiles and splits along K."""
    speeds = H200
    steps = math.ceil(k * itemsize / _STEP_BYTES)
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
            total = _at_once((compute, traffic), speeds.overlap)
            if splits > 1:
                total += speeds.xla_pass + speeds.xla_pass_byte * m * n * 4 * (splits + 1)
            best = min(best, total)
    ragged = any(size % (_STEP_BYTES // itemsize) for size in (n, k))
    launch = speeds.xla_launch
    if m <= MAX_ROWS:
        filled = min(1.0, traffic / of_byte / speeds.xla_few_rows_filled)
        launch += speeds.xla_few_rows
        launch = speeds.xla_fewest + filled * (launch - speeds.xla_fewest)
    return launch + best * (speeds.xla_ragged if ragged else 1.0)


def xla_single_row(n: int, k: int, itemsize: int, b_itemsize: float) -> float:
    """Microseconds of XLA's product of one row with weights of another dtype, no product to XLA.

    One kernel writes all factors in the dtype of the row, and another one adds them up.
    """
    factors = n * k
    summed = factors * itemsize * H200.xla_single_row_byte
    return xla_pass(factors, b_itemsize + itemsize) + H200.xla_pass + summed


def _xla_splits(work: Work, multiprocessors: int) -> int:
    """In how many parts XLA takes the sums of a product with few tiles, one batch of products."""
    tiles = math.ceil(work.m / _XLA_TILE) * math.ceil(work.n / _XLA_TILE)
    splits = 1
    while 2 * splits * tiles <= multiprocessors and work.steps >= 2 * splits * _XLA_STEPS_OF_PART:
        splits *= 2
    return splits


_XLA_STEPS_OF_PART = 6
"""The shortest sums that XLA leaves to a part."""


def xla_pads(work: Work, multiprocessors: int) -> bool:
    """Whether XLA pads both operands along the sum, so that its parts begin at multiples of 16 bytes."""
    splits = _xla_splits(work, multiprocessors)
    return splits > 1 and work.k * work.itemsize % (splits * _COPY_BYTES) != 0


_COPY_BYTES = 16


def xla_copies(work: Work) -> float:
    """Microseconds in which XLA copies the weights before its product of few rows, or several."""
    of_weights = xla_pass(work.products * work.k * work.n, work.b_bytes + work.itemsize)
    pads = work.k * work.itemsize % (_longest_split(work) * _COPY_BYTES) != 0
    merges = work.products > 1 and work.weights_apart and work.m <= _MOST_ROWS_OF_COPY
    merges = merges and work.k * work.n * work.b_bytes <= _MOST_BYTES_MERGED
    merges = merges and work.n % _COLUMNS_OF_TILE != 0
    # One row is no product to XLA.
    return of_weights * (int(pads and 1 < work.m <= MAX_ROWS) + int(merges))


def _longest_split(work: Work) -> int:
    """In how many parts XLA takes the sums of a product of few rows, whatever the number of tiles."""
    parts = 1
    while work.steps >= 2 * parts * _XLA_STEPS_OF_PART:
        parts *= 2
    return parts


_MOST_ROWS_OF_COPY = 16
"""With more of them XLA's product reads both of the matrices that it merges as they are."""
_COLUMNS_OF_TILE = 128
"""Of a tile of XLA's product: with a multiple of them in each matrix it reads both as they are."""
_MOST_BYTES_MERGED = 40e6
"""Of weights whose products XLA merges: of 35 MB it did, of 84 MB not."""


def xla_weight_gradient(
    work: WeightWork, multiprocessors: int, *, side_by_side: bool = False
) -> float:
    """Microseconds of XLA's products, of which it pads the operands where the rows do not split evenly.

    Args:
      work: the products.
      multiprocessors: of the device.
      side_by_side: whether several are one product of what is copied side by side.
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
        best = min(best, _at_once((compute, traffic), speeds.overlap))
    if splits > 1:
        added = 4 * work.m * work.n * (splits + 1)
        best += speeds.xla_parts + added * speeds.xla_parts_byte
    ragged = any(size % (_STEP_BYTES // work.itemsize) for size in (work.m, work.n))
    ragged = ragged or (splits == 1 and work.k * work.itemsize % _COPY_BYTES != 0)
    launch = speeds.xla_long_launch + speeds.xla_first_step * min(steps, _XLA_FIRST_STEPS)
    if max(work.m, work.n) <= _XLA_TILE:
        launch -= speeds.xla_single_tile
    return launch + best * (speeds.xla_ragged if ragged else 1.0)


_XLA_FIRST_STEPS = 6


def xla_row_sums(elements: int, itemsize: int, *, by_product: bool) -> float:
    """Microseconds of a sum over rows, as a product with ones or as it stands."""
    if by_product:
        return H200.xla_ones + elements * itemsize * H200.xla_ones_byte
    few = min(1.0, elements / _FEW_SUMMED)
    return H200.xla_pass + few * H200.xla_row_sums + elements * itemsize * H200.xla_row_sums_byte


_FEW_SUMMED = 2e5
"""Elements of a matrix whose sum takes no longer than a kernel starts."""


_XLA_TILE = 128
"""Rows and columns of a usual tile."""
_XLA_TILES = [
    *((128, n) for n in (64, 96, 128, 160, 192, 224, 256)),
    *((n, 128) for n in (64, 96, 160, 192, 224, 256)),
    *((64, n) for n in (8, 16, 32, 64, 256)),
    *((n, 64) for n in (8, 16, 32, 256)),
    # cuBLAS has tiles of any multiple of 8: three of 136 have 392 rows, for which it is fast.
    *((256, 136), (136, 256)),
]


def xla_pass(
    elements: int, bytes_of_element: float, activations: int = 0, *, slow_activation: bool = False
) -> float:
    """Microseconds of a kernel of XLA's that reads and writes matrices of so many elements."""
    speeds = H200
    traffic = elements * bytes_of_element * speeds.xla_pass_byte
    of_one = speeds.xla_slow_activation if slow_activation else speeds.xla_activation
    evaluated = min(activations, 1) + speeds.xla_next_evaluation * max(0, activations - 1)
    return speeds.xla_pass + max(traffic, elements * evaluated * of_one)


def memory_time(moved_bytes: int) -> float:
    """Microseconds to read or write so much in a kernel that does other things too."""
    return moved_bytes * H200.memory_byte


def cuda_pass(
    rows: int,
    columns: int,
    bytes_of_element: int,
    itemsize: int,
    *,
    sums: bool,
    slow_activation: bool,
) -> float:
    """Microseconds of this package's CUDA kernel with the derivative of an activation."""
    unaligned = columns * itemsize % 16 != 0
    traffic = rows * columns * bytes_of_element * H200.memory_byte
    traffic *= H200.cuda_unaligned if unaligned else 1.0
    evaluated = rows * columns * H200.cuda_slow_activation if slow_activation else 0.0
    return H200.cuda_pass + sums * H200.cuda_sums + max(traffic, evaluated)


def cublaslt_product(product: float, elements: int, activations: int, *, saves: bool) -> float:
    """Microseconds of a product that takes XLA so many, where cuBLASLt evaluates activations.

    Args:
      product: of XLA's, which tries several kernels, where cuBLASLt's heuristic names one.
      elements: of the result.
      activations: that it evaluates for an element.
      saves: whether it also writes what the activation is of.
    """
    if saves:
        product = product * H200.cublaslt_saves + elements * H200.cublaslt_saved
    return product + elements * activations * H200.cublaslt_activation


def _at_once(parts: Sequence[float], overlap: float) -> float:
    return sum(part**overlap for part in parts) ** (1 / overlap)
