"""The stages of mlp: the hidden layer with the derivative of its activation, and its gradients.

The functions at the end describe the products, also those of gated_mlp's stages.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from jaxfused import dispatch
from jaxfused.ops.linear import mlp_cuda, mlp_xla
from jaxfused.ops.linear.linear_stages import (
    CHEAP_ACTIVATIONS,
    product_configs,
    product_estimate,
    product_why_not,
    weight_itemsize,
    weights_for,
)
from jaxfused.runtime.estimate import Estimate
from jaxfused.runtime.product_choice import Passes
from jaxfused.runtime.runner import ROWS, Axes, Results, batched_rows
from pallas_kernels.gemm import cost
from pallas_kernels.gemm import mlp as pallas_mlp


@dataclass(frozen=True)
class HiddenAndSlope:
    """Computes the activation of x @ w1 + b1 and its derivative [M, F], of x [M, D] and w1 [D, F]."""

    activation: str
    precision: Any

    @property
    def name(self) -> str:
        return "mlp hidden and slope"

    def axes(self, *operands) -> Axes:
        del operands
        return Axes((ROWS + "d", "df", "f"), (ROWS + "f", ROWS + "f"), whole="d")

    def work(self, x, w1, b1) -> cost.Work:
        del b1
        return work_of(x, w1, w1.shape[1], written=2, activations=2)

    def why_not(self, device, x, w1, b1) -> Mapping[str, str | None]:
        return why_not_of(device, self.precision, x, self.work(x, w1, b1), cuda_kernel=False)

    def estimate(self, device, able, x, w1, b1) -> Estimate:
        work = self.work(x, w1, b1)
        passes = passes_of(work, self.activation, evaluations=1)
        return product_estimate(device, able, x.dtype, work, passes)

    def run(self, implementation, device, x, w1, b1, config=None) -> Results:
        operands = (x, weights_for(implementation, w1, x.dtype), b1)
        if implementation == "pallas":
            return pallas_mlp.hidden_and_slope(
                *operands,
                activation=self.activation,
                multiprocessors=device.multiprocessors,
                config=config,
            )
        return mlp_xla.hidden_and_slope(
            *operands, activation=self.activation, precision=self.precision
        )

    configs = product_configs
    batched = batched_rows
    xla_takes_rows = True


@dataclass(frozen=True)
class HiddenGradientBySlope:
    """Computes dz and its row sums from dy [M, E], w2 [F, E] and the activation's derivative [M, F]."""

    sums_rows: bool
    precision: Any

    @property
    def name(self) -> str:
        return "mlp hidden gradient by slope"

    def axes(self, *operands) -> Axes:
        del operands
        sums = "f" if self.sums_rows else None
        return Axes((ROWS + "e", "fe", ROWS + "f"), (ROWS + "f", sums), whole="e")

    def work(self, dy, w2, slope) -> cost.Work:
        return work_of(dy, w2, slope.shape[1], read=1, k_last=True)

    def why_not(self, device, dy, w2, slope) -> Mapping[str, str | None]:
        return why_not_of(device, self.precision, dy, self.work(dy, w2, slope), cuda_kernel=False)

    def estimate(self, device, able, dy, w2, slope) -> Estimate:
        work = self.work(dy, w2, slope)
        passes = passes_of(work, None, evaluations=int(self.sums_rows))
        return product_estimate(device, able, dy.dtype, work, passes)

    def run(self, implementation, device, dy, w2, slope, config=None) -> Results:
        operands = (dy, weights_for(implementation, w2, dy.dtype), slope)
        if implementation == "pallas":
            return pallas_mlp.hidden_gradient_by_slope(
                *operands,
                sum_rows=self.sums_rows,
                multiprocessors=device.multiprocessors,
                config=config,
            )
        return mlp_xla.hidden_gradient_by_slope(
            *operands, sum_rows=self.sums_rows, precision=self.precision
        )

    configs = product_configs
    batched = batched_rows
    xla_takes_rows = True


@dataclass(frozen=True)
class HiddenGradient:
    """Computes (dz, activation(z), row sums of dz) from dy [M, E], w2 [F, E] and z [M, F]."""

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

    def work(self, dy, w2, z) -> cost.Work:
        activations = 0 if self.activation is None else 2
        return work_of(dy, w2, z.shape[1], read=1, written=2, activations=activations, k_last=True)

    def why_not(self, device, dy, w2, z) -> Mapping[str, str | None]:
        return why_not_of(device, self.precision, dy, self.work(dy, w2, z))

    def estimate(self, device, able, dy, w2, z) -> Estimate:
        work = self.work(dy, w2, z)
        evaluations = work.activations + int(self.sums_rows)
        passes = passes_of(work, self.activation, evaluations=evaluations)
        return product_estimate(device, able, dy.dtype, work, passes)

    def run(self, implementation, device, dy, w2, z, config=None) -> Results:
        functions: Mapping[str, Callable[..., Results]] = {
            "pallas": pallas_mlp.hidden_gradient,
            "cuda": mlp_cuda.hidden_gradient,
            "xla": mlp_xla.hidden_gradient,
        }
        return functions[implementation](
            dy,
            weights_for(implementation, w2, dy.dtype),
            z,
            activation=self.activation,
            sum_rows=self.sums_rows,
            **product_keywords(implementation, device, self.precision, config),
        )

    configs = product_configs
    batched = batched_rows
    xla_takes_rows = True


def work_of(
    x: jax.Array,
    w: jax.Array,
    columns: int,
    *,
    read: int = 0,
    written: int = 1,
    activations: int = 0,
    k_last: bool = False,
) -> cost.Work:
    """Returns x [M, K] @ w [K, columns] as work; `read` and `written` count matrices of x's dtype."""
    size = x.dtype.itemsize
    return cost.Work(
        x.shape[0],
        columns,
        x.shape[1],
        itemsize=size,
        w_itemsize=weight_itemsize(x, w),
        read_bytes=read * size,
        written_bytes=written * size,
        activations=activations,
        k_last=k_last,
    )


def passes_of(
    work: cost.Work, activation: str | None, *, evaluations: int = 0, matrices: int = 0
) -> Passes:
    """Returns XLA's passes over the product and the epilogue's operands, or over `matrices`."""
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
    """Returns why each implementation, CUDA's only if `cuda_kernel`, cannot run x [M, K] times w."""
    features = {"what is multiplied": work.k, "the result": work.n}
    why_not = product_why_not(device, precision, {"x": x}, features)
    if not cuda_kernel:
        del why_not["cuda"]
    return why_not


def product_keywords(
    implementation: str, device: dispatch.Device, precision: Any, config: Any
) -> Any:
    """Returns further keyword arguments of each implementation of a product."""
    if implementation == "pallas":
        return {"multiprocessors": device.multiprocessors, "config": config}
    return {"precision": precision}
