"""Constants of the products' cost models: the speeds of a device."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Speeds:
    """Times of a device in microseconds, and factors; fitted to an H200 in bfloat16."""

    launch: float = 1.3
    """Time to start and to end a kernel, including the first fill of its pipeline stages."""
    step: float = 0.115
    """Time of a K step that does not depend on the tile's size."""
    step_element: float = 1.34e-5
    """Time that each element of a tile adds to a step in ping-pong."""
    shared_step_element: float = 1.93e-5
    """Time of a K step for each element of a tile that warpgroups share; `step` is then not added."""
    ragged: float = 1.28
    """Factor of a K step in which each WGMMA reads one block of 64 columns, not the whole tile."""
    shifted_rows: float = 1.5
    """Factor of a K step if the rows of b [n, k] are not aligned to lines of 128 bytes."""
    shifted_a: float = 1.3
    """Factor of a K step if a's rows are not aligned to lines of 128 bytes; measured at one shape."""
    narrow: float = 1.2
    """Factor of a K step with a tile of 64 x 128 or smaller, which waits for its operands."""
    low: float = 1.03
    """Factor of a K step of other tiles of 64 rows in ping-pong, which read b more often."""
    element: float = 6.7e-5
    """Time of an epilogue for each element of a warpgroup's tile."""
    read_byte: float = 8e-5
    """Time of an epilogue for each byte that it reads; two thirds of it with `read_slots` above 1."""
    written_byte: float = 3e-5
    """Time of an epilogue for each byte that it writes, beyond the first two of an element."""
    activation: float = 1.1e-4
    """Time of an epilogue for each activation of an element, and once more for its derivative."""
    memory_byte: float = 1 / 3.9e6
    """Time of a byte of memory traffic."""
    crowded: float = 1.1
    """Factor of an epilogue that lacks registers: one that reads, or writes two matrices, with a tile of
    more than 128 x 128; or one with several matrices and a tile of 128 rows."""
    both_store: float = 1.15
    """Factor of an epilogue that both warpgroups run at the same time."""
    missing_stage: float = 0.08
    """Fraction by which a K step is longer with three pipeline stages; four times that with two."""
    ragged_result: float = 1.07
    """Factor of a product whose result has rows that are not aligned to lines of 128 bytes."""
    overlap: float = 2.4
    """Exponent p of the norm (a^p + b^p)^(1/p) that two overlapping times a and b take together."""
    few_rows_launch: float = 2.2
    """Time to start and to end a small-M kernel, whose first copies arrive late."""
    few_rows_byte: float = 1 / 4.35e6
    """Time of a byte of memory traffic in a small-M kernel."""
    few_rows_shifted: float = 1.5
    """Factor of `few_rows_byte` if the rows of the weights are not aligned to lines of 128 bytes."""
    cached_byte: float = 1 / 4.5e6
    """Time of a byte that comes from the L2 cache: x, once for each block of columns."""
    few_rows_parts: float = 0.2
    """Time that the CTAs of a cluster wait for each other."""
    few_rows_exchange: float = 2e-5
    """Time of each float32 sum that a CTA passes to another CTA of its cluster."""
    few_rows_chunk: float = 0.5
    """Time of the epilogue of each chunk of 8 rows in a small-M CTA."""
    few_rows_conversion_step: float = 0.65
    """Time of a K step in which a CTA converts w to x's dtype before it multiplies."""
    few_rows_conversion: float = 3.4e-5
    """Time that each number that a CTA converts adds to a K step."""
    quantized_launch: float = 1.6
    """Time to start and to end a small-M kernel with quantised weights."""
    quantized_byte: float = 2.6e-7
    """Time of a byte of memory traffic in a small-M kernel with quantised weights."""
    quantized_step: float = 0.25
    """Time of a CTA's K step with quantised weights; a CTA's steps do not overlap."""
    quantized_number: float = 7.8e-6
    """Time that each weight of an SM's CTAs adds to a K step, and again for every 37 rows of x."""
    quantized_four_bits: float = 0.78
    """Factor of `quantized_number` with weights of 4 bits, of which a register holds twice as many."""
    quantized_x_byte: float = 1.0e-7
    """Time of a byte of x, which comes from the L2 cache."""
    quantized_wave: float = 0.98
    """Time that each wave of CTAs after the first adds, with quantised weights."""
    quantized_chunk: float = 0.12
    """Time of the epilogue of each chunk of 8 rows in a small-M CTA with quantised weights."""
    quantized_exchange: float = 4.0e-4
    """Time of each float32 sum that a CTA passes to another CTA, with quantised weights."""
    quantized_part: float = 0.13
    """Time that each CTA of a cluster beyond the first adds, with quantised weights."""
    quantized_missing_stage: float = 0.26
    """Time that each pipeline stage below four adds, with quantised weights."""
    quantized_room_of_four: float = 0.66
    """Fraction of the SMs that clusters of four CTAs, which must start together, occupy at once."""
    quantized_room_of_eight: float = 0.57
    """Fraction of the SMs that clusters of eight CTAs occupy at once."""
    cluster_room: float = 0.9
    """Fraction of the SMs on which clusters of more than two CTAs run at once: a cluster lies within one
    GPC, and GPCs differ in size."""
    in_flight_bytes: float = 38e3
    """Bytes that an SM must have in flight to reach the memory rate of `memory_byte`."""
    busy: float = 0.52
    """Fraction of the SMs whose CTAs suffice to use the full memory bandwidth."""
    xla_pass: float = 1.2
    """Time of an XLA kernel that reads and writes matrices, in addition to its memory traffic."""
    xla_pass_byte: float = 1 / 3.7e6
    """Time of a byte of memory traffic in such an XLA kernel."""
    weights_launch: float = 1.8
    """Time to start and to end a wgrad kernel."""
    weights_step: float = 0.034
    """Time of a K step of wgrad that does not depend on the tile's size."""
    weights_step_element: float = 1.9e-5
    """Time that each element of a CTA's tile adds to a wgrad step."""
    weights_ragged: float = 1.2
    """Factor of a wgrad step whose WGMMAs read one block of 64 columns each, of more than two a tile."""
    weights_line: float = 1.13e-3
    """Least time of a wgrad step for each line of 128 bytes of memory that its copies touch."""
    weights_sum: float = 0.55
    """Time to add up the threads' sums over rows (the bias gradient) at the end of a tile."""
    weights_sum_column: float = 8e-5
    """Time that each column of dy adds to a K step, for every 8 of its rows that a warpgroup sums."""
    weights_stored: float = 9.7e-5
    """Time to store each element of a CTA's tile of wgrad."""
    weights_exchange: float = 3.5
    """Time in which the CTAs of a cluster exchange and add their partial sums of a tile."""
    weights_clustered: float = 1.2
    """Factor of a K step of wgrad in clusters, whose CTAs wait for each other; 1.05 to 1.35 measured."""
    weights_byte: float = 1 / 3.45e6
    """Time of a byte of memory traffic in a wgrad kernel."""
    weights_overlap: float = 3.6
    """Exponent, like `overlap`, for a wgrad kernel's memory traffic and the steps that overlap it."""
    weights_narrow_row: float = 0.005
    """Time to copy a row of a wgrad operand so narrow that rows share a line of memory."""
    narrow_row: float = 0.012
    """Time to copy a row of x so narrow that rows share a line of memory, in a product with epilogue."""
    weights_sum_byte: float = 1 / 4.6e6
    """Time of a byte of partial gradients that XLA adds; the L2 cache still holds some of them."""
    weights_row_sums: float = 1.4
    """Time in which XLA adds up the partial sums over rows, the bias gradient."""


H200 = Speeds()
