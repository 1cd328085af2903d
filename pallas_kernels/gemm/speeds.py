"""Speeds of a device, the constants of the models of what products cost."""

from dataclasses import dataclass


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
