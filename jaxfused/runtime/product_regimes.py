"""Rules for a product with an epilogue: at which sizes a kernel is faster than XLA's kernels.

A kernel multiplies no faster than XLA, but saves passes over the result. With small M it saves time
by reading the weights once, in their dtype, with sums split over a cluster of CTAs. The thresholds
come from times on an H200; `python -m benchmarks.choice.measured` judges a change of them, and
`jaxfused.tune` measures single shapes.
"""

from jaxfused import dispatch
from jaxfused.runtime import cuda_library
from jaxfused.runtime.estimate import MEGABYTE, Estimate, Rule
from jaxfused.runtime.roofline import Passes, is_modelled, product
from pallas_kernels.gemm.cost import WeightWork, Work
from pallas_kernels.gemm.matmul_config import ACCUMULATOR_ELEMENTS
from pallas_kernels.gemm.small_m import MAX_ROWS

_SHARE, _RAGGED_SHARE, LINE = 0.081, 0.24, 32
"""A kernel is faster if XLA's passes before and after its product take at least `_SHARE` of the
product's time, or `_RAGGED_SHARE` if the length K of a sum is no multiple of LINE; copies that pad the
kernel's weights count against it. Where XLA needs no such pass, it computes a wgrad with at most LINE
rows or columns."""
LARGE, SMALLEST = 8_000_000, 500_000
"""Elements of a product's result: from `LARGE` on it has many tiles. Below `SMALLEST` XLA is faster at
a single product: few tiles leave SMs idle, and XLA then splits the sum over K among them."""
SPLIT_SUM = 1024
"""Least length K of a sum that XLA splits in a product with small M or few tiles."""
_LEAST_WEIGHTS, _MOST_WEIGHTS = 2, 64
"""Megabytes of weights [K, N] between which a kernel is faster than XLA for x [M, K] of few rows M; from
K = SPLIT_SUM on there is no minimum."""
_SHORT_SUM = 256
"""Most rows (the reduction axis) at which XLA is faster than a kernel at a single wgrad that needs no
sums over rows and no padding."""
FEW_TILES = 1_100_000
"""Most elements of a wgrad at which the kernel, which splits long sums over a cluster, is faster. Up to
`LARGE` it is faster where XLA's passes take at least `_SHARE` of the product's time, and up to twice as
many XLA pads misaligned rows."""


def estimate(
    device: dispatch.Device,
    work: Work,
    passes: float,
    *,
    in_cublaslt: bool = False,
    several: bool | None = None,
) -> Estimate:
    """Returns the order of the implementations of a product with an epilogue.

    Args:
      device: the device that the product would run on.
      work: the product's sizes.
      passes: microseconds of the passes that XLA runs before and after its product.
      in_cublaslt: whether cuBLASLt can compute the epilogue too.
      several: whether XLA runs several products, or copies several arrays for one.
    """
    if work.itemsize > 2:
        return _xla("kernels are not timed in float32")
    if not is_modelled(device):
        # The CUDA C kernel computes the epilogue in one pass after XLA's product.
        large = work.m * work.n >= device.multiprocessors * ACCUMULATOR_ELEMENTS
        return None if large and passes > 0 else _xla("it has few tiles, or nothing to fuse")
    several = work.products > 1 or work.terms > 1 if several is None else several
    if work.m <= MAX_ROWS:
        return _few_rows(work, several)
    if not passes > 0:
        return _xla("its product includes the epilogue")
    whole = product(work.m, work.products * work.n, work.k, work.itemsize)
    share = gain = passes / whole
    told = f"its passes take {share:.2f} of its product's time"
    elements = work.products * work.m * work.n
    is_large = elements >= LARGE
    is_ragged = work.k // work.terms % LINE != 0
    if elements >= SMALLEST and work.n % LINE and not work.k_last:
        # A kernel reads copies of the weights with longer rows, which XLA writes first.
        padding = Passes(bytes_of_element=2 * work.itemsize, launches=work.products)
        gain -= padding.time(work.products * work.k * work.n) / whole
    too_small = elements < SMALLEST or (work.k > SPLIT_SUM and not is_large)
    converts = work.b_bytes != work.itemsize and work.m <= 2 * MAX_ROWS
    too_long = (converts and work.k // work.terms > SPLIT_SUM) or (
        work.m * work.n < FEW_TILES and work.k > 2 * SPLIT_SUM
    )
    is_fit = not too_long and (several or not too_small)
    spares = is_fit and gain >= (_RAGGED_SHARE if is_ragged else _SHARE)
    # gelu in its epilogue does not slow down cuBLASLt's product, unless it also writes the
    # preactivation.
    gelu_alone = work.activations > 0 and work.written_bytes <= work.itemsize
    fast_in_cublaslt = not spares or (gelu_alone and work.k >= SPLIT_SUM)
    if in_cublaslt and fast_in_cublaslt and share >= _SHARE:
        return Rule(("cuda", "pallas"), f"{told}, which cuBLASLt spares")
    if spares:
        # The CUDA C kernel is a pass after XLA's product, unless cuBLASLt computes the epilogue.
        return Rule(("pallas", "cuda" if in_cublaslt else "xla"), f"{told}, which a kernel spares")
    return _xla(told if is_large else f"{told}, and the result has few tiles")


def _few_rows(work: Work, several: bool) -> Rule:
    megabytes = work.products * work.k * work.n * work.b_bytes / MEGABYTE
    if megabytes < _LEAST_WEIGHTS and work.k < SPLIT_SUM and not several:
        return _xla(f"its product of {megabytes:.1f} MB of weights ends sooner")
    if work.m == 1 and work.b_bytes != work.itemsize and 2 * work.k > LINE * work.n:
        return _xla(f"its sums of {work.k} are divided among more SMs than the kernel's")
    if megabytes > _MOST_WEIGHTS:
        return _xla(f"its product reads {megabytes:.0f} MB of weights as fast")
    return Rule(("pallas", "xla"), f"the small-M kernel reads {megabytes:.1f} MB of weights once")


def of_weights(work: WeightWork, *, side_by_side: bool) -> Rule:
    """Returns the rule for wgrad; `side_by_side`: XLA concatenates several gradients for one product."""
    several, width = len(work.widths) - 1, sum(work.widths)
    told = f"the gradient has {work.elements:,} elements"
    if several and work.rows <= 2 * MAX_ROWS and work.out_bytes > work.itemsize:
        return Rule(("pallas", "xla"), f"{told} of few rows, and XLA writes each apart")
    if work.rows <= MAX_ROWS:
        return _xla(f"{told} of few rows")
    if side_by_side and several:
        passes = Passes(bytes_of_element=2 * work.itemsize).time(work.rows * width)
    else:
        again = Passes(bytes_of_element=work.itemsize, launches=1)
        passes = several * again.time(work.rows * work.features)
    if work.sums:
        passes += Passes(bytes_of_element=work.itemsize, launches=2).time(work.rows * width)
    if work.elements <= 2 * FEW_TILES and work.rows * work.itemsize % cuda_library.VECTOR_BYTES:
        # XLA splits the sums of few tiles and then pads both operands to aligned rows.
        padding = Passes(bytes_of_element=2 * work.itemsize, launches=2)
        passes += padding.time(work.rows * (work.features + width))
    share = passes / product(work.features, width, work.rows, work.itemsize)
    # Row counts that 64 does not divide (MAX_ROWS) are padded by XLA to split their sums.
    narrow = min(work.features, *work.widths) <= LINE and work.rows % MAX_ROWS == 0
    short = work.rows <= _SHORT_SUM
    if (not passes and (narrow or short)) or (short and work.elements <= MAX_ROWS**2):
        return _xla(f"{told}, of few rows or columns")
    if work.elements <= FEW_TILES or (work.elements <= LARGE and share >= _SHARE):
        return Rule(("pallas", "xla"), f"{told}, and XLA splits its sums in more kernels")
    return _xla(f"{told}, and its product is as fast")


def _xla(why: str) -> Rule:
    return Rule(("xla",), why)
