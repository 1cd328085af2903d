"""Operations of mlp: the hidden layer with the derivative of its activation, and its gradients.

The functions at the end describe products, also for gated_mlp.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxfused import dispatch
from jaxfused.ops.linear import mlp_cuda, mlp_xla
from jaxfused.ops.linear.linear_stages import (
    CHEAP_ACTIVATIONS,
    product_why_not,
)
from jaxfused.runtime import product_regimes
from jaxfused.runtime.estimate import Estimate
from jaxfused.runtime.product_stage import ProductStage
from jaxfused.runtime.roofline import Passes
from jaxfused.runtime.runner import ROWS, Axes, Results, batched_rows
from pallas_kernels.gemm import cost
from pallas_kernels.gemm import mlp as pallas_mlp
from pallas_kernels.gemm.fused_product import FusedProduct


@dataclass(frozen=True)
class HiddenAndSlope(ProductStage):
    """Computes activation(z) and activation'(z) [M, F] of z = x @ w1 + b1, for x [M, D], w1 [D, F]."""

    activation: str
    precision: Any

    @property
    def name(self) -> str:
        return "mlp hidden and slope"

    def axes(self, *operands) -> Axes:
        del operands
        return Axes((ROWS + "d", "df", "f"), (ROWS + "f", ROWS + "f"), whole="d")

    def product(self, x, w1, b1) -> FusedProduct:
        return pallas_mlp.hidden_and_slope(x, w1, b1, activation=self.activation)

    def why_not(self, device, x, w1, b1) -> Mapping[str, str | None]:
        return why_not_of(device, self.precision, x, self.work(x, w1, b1), cuda_kernel=False)

    def estimate(self, device, able, x, w1, b1) -> Estimate:
        del able
        work = self.work(x, w1, b1)
        passes = passes_of(work, self.activation, evaluations=1)
        return product_regimes.estimate(device, work, passes.time(work.m * work.n))

    def run(self, implementation, device, x, w1, b1, config=None) -> Results:
        if implementation == "pallas":
            return self.in_pallas(device, x, w1, b1, config=config)
        return mlp_xla.hidden_and_slope(
            x, w1.astype(x.dtype), b1, activation=self.activation, precision=self.precision
        )

    results = ("h", "slope")
    batched = batched_rows
    xla_takes_rows = True


@dataclass(frozen=True)
class HiddenGradientBySlope(ProductStage):
    """Computes dz [M, F], and dz summed over rows [F], from dy [M, E], w2 [F, E] and activation'(z)."""

    sums_rows: bool
    precision: Any

    @property
    def name(self) -> str:
        return "mlp hidden gradient by slope"

    def axes(self, *operands) -> Axes:
        del operands
        sums = "f" if self.sums_rows else None
        return Axes((ROWS + "e", "fe", ROWS + "f"), (ROWS + "f", sums), whole="e")

    def product(self, dy, w2, slope) -> FusedProduct:
        return pallas_mlp.hidden_gradient_by_slope(dy, w2, slope, sum_rows=self.sums_rows)

    def why_not(self, device, dy, w2, slope) -> Mapping[str, str | None]:
        return why_not_of(device, self.precision, dy, self.work(dy, w2, slope), cuda_kernel=False)

    def estimate(self, device, able, dy, w2, slope) -> Estimate:
        del able
        work = self.work(dy, w2, slope)
        passes = passes_of(work, None, evaluations=int(self.sums_rows))
        return product_regimes.estimate(device, work, passes.time(work.m * work.n))

    def run(self, implementation, device, dy, w2, slope, config=None) -> Results:
        if implementation == "pallas":
            return self.in_pallas(device, dy, w2, slope, config=config)
        return mlp_xla.hidden_gradient_by_slope(
            dy, w2.astype(dy.dtype), slope, sum_rows=self.sums_rows, precision=self.precision
        )

    results = ("dz", "sum_dz")
    batched = batched_rows
    xla_takes_rows = True


@dataclass(frozen=True)
class HiddenGradient(ProductStage):
    """Computes (dz, activation(z), dz summed over rows) from dy [M, E], w2 [F, E] and z [M, F]."""

    activation: str | None
    sums_rows: bool
    precision: Any

    @property
    def name(self) -> str:
        return "mlp hidden gradient"

    def axes(self, *operands) -> Axes:
        del operands
        sums = "f" if self.sums_rows else None
        return Axes((ROWS + "e", "fe", ROWS + "f"), (ROWS + "f", ROWS + "f", sums), whole="e")

    def product(self, dy, w2, z) -> FusedProduct:
        return pallas_mlp.hidden_gradient(dy, w2, z, **self._options)

    def work(self, dy, w2, z) -> cost.Work:
        # The kernel writes two arrays [M, F], dz and activation(z), even where there is no activation.
        return replace(super().work(dy, w2, z), written_bytes=2 * z.dtype.itemsize)

    @property
    def _options(self) -> dict[str, Any]:
        return dict(activation=self.activation, sum_rows=self.sums_rows)

    def why_not(self, device, dy, w2, z) -> Mapping[str, str | None]:
        return why_not_of(device, self.precision, dy, self.work(dy, w2, z))

    def estimate(self, device, able, dy, w2, z) -> Estimate:
        del able
        work = self.work(dy, w2, z)
        evaluations = work.activations + int(self.sums_rows)
        passes = passes_of(work, self.activation, evaluations=evaluations)
        return product_regimes.estimate(device, work, passes.time(work.m * work.n))

    def run(self, implementation, device, dy, w2, z, config=None) -> Results:
        if implementation == "pallas":
            dz, h, sums = self.in_pallas(device, dy, w2, z, config=config)
            return dz, z if h is None else h, sums
        of = mlp_cuda if implementation == "cuda" else mlp_xla
        operands = (dy, w2.astype(dy.dtype), z)
        return of.hidden_gradient(*operands, **self._options, precision=self.precision)

    results = ("dz", "h", "sum_dz")
    batched = batched_rows
    xla_takes_rows = True


def passes_of(
    work: cost.Work, activation: str | None, *, evaluations: int = 0, matrices: int = 0
) -> Passes:
    """Returns the memory pass that XLA runs after its product.

    It reads or writes `matrices` arrays of the product's shape, or, if that is 0, the product and all
    operands and results of the epilogue.
    """
    epilogue = work.read_bytes + work.written_bytes + work.itemsize
    return Passes(
        bytes_of_element=matrices * work.itemsize or epilogue,
        evaluations=0 if activation in CHEAP_ACTIVATIONS else evaluations,
        slow=activation == "gelu_erf",
    )


def why_not_of(
    device: dispatch.Device,
    precision: Any,
    x: jax.Array,
    work: cost.Work,
    *,
    cuda_kernel: bool = True,
) -> Mapping[str, str | None]:
    """Returns why each implementation cannot run x [M, K] times w, or None for one that can.

    "cuda" has no kernel if `cuda_kernel` is False.
    """
    features = {"what is multiplied": work.k, "the result": work.n}
    why_not = product_why_not(device, precision, {"x": x}, features)
    if not cuda_kernel:
        del why_not["cuda"]
    return why_not
