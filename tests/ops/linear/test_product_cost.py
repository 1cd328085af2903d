"""Predicted times of products, compared with times on an H200 (benchmarks/LAB.md, 2026-11-24)."""

import pytest

from benchmarks.without_gpu.target import H200
from pallas_kernels.gemm import cost, speeds, weight_gradient
from pallas_kernels.gemm.cost import WeightWork, Work
from pallas_kernels.gemm.matmul import fitting

_WEIGHTS = [
    # Rows, features, widths, whether rows are summed, columns of a tile, parts, microseconds.
    (4096, 296, (1184, 1184), False, 64, 1, 28.4),
    (16384, 56, (224, 224), False, 64, 16, 10.9),
    (1182, 512, (2048,), False, 64, 1, 6.1),
    (15680, 256, (1024, 1024), False, 128, 4, 24.3),
    (43904, 256, (128,), True, 64, 33, 13.1),
    (89600, 768, (1152,), True, 192, 11, 209.6),
    (41544, 1536, (1512, 1512, 1512), True, 256, 3, 930.5),
]


@pytest.mark.parametrize("rows,features,widths,sums,tile_n,parts,measured", _WEIGHTS)
def test_gradient_of_weights(rows, features, widths, sums, tile_n, parts, measured):
    work = WeightWork(rows, features, widths, out_bytes=4, sums=sums)
    config = weight_gradient.WeightGradientConfig(tile_n=tile_n, parts=parts)
    predicted = weight_gradient.predicted_time(work, config, H200.multiprocessors)
    # The measured times are those of the kernel alone, without XLA's sum of the parts.
    if parts > 1:
        moved = work.elements * (4 * parts + work.out_bytes)
        added = len(widths) * speeds.H200.xla_pass + moved * speeds.H200.weights_sum_byte
        predicted -= added
    predicted -= sums * speeds.H200.weights_row_sums
    assert 0.75 < predicted / measured < 1.25


def test_rows_that_begin_anywhere_in_a_line_take_longer():
    work = Work(49, 4304, 4096, products=2, written_bytes=2)
    config, *_ = fitting(work, H200.multiprocessors)
    aligned = Work(49, 4352, 4096, products=2, written_bytes=2)
    assert cost.time(work, config, H200.multiprocessors) > 1.2 * cost.time(
        aligned, config, H200.multiprocessors
    )
