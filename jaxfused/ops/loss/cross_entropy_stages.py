"""Operations of softmax_cross_entropy: forward, backward, and rescaling of a gradient."""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxfused.ops.loss import cross_entropy_cuda, cross_entropy_xla
from jaxfused.ops.loss.cross_entropy_xla import (
    Options,
    Pulls,
    Statistics,
)
from jaxfused.runtime.estimate import KERNELS, Estimate, Rule
from jaxfused.runtime.runner import ROWS, Axes, Results, batched_rows


def joined(classes: jax.Array | None, soft: jax.Array | None) -> jax.Array:
    """Returns the one of classes and soft labels that is not None."""
    labels = classes if soft is None else soft
    assert labels is not None
    return labels


def unpacked(statistics: jax.Array) -> Statistics:
    """Returns the fields of `Statistics` from the array [..., 5] that kernels write."""
    return Statistics(*jnp.unstack(statistics, axis=-1))


_SHORT_ROW_BYTES = 512
"""Bytes of a row of logits below which XLA, one of whose threads reads several rows, is faster."""
_FEW_BYTES = 2**22
"""Bytes of all logits below which XLA is faster: it launches fewer kernels."""


def _estimate(kernel, device, able, logits, *others) -> Estimate:
    """Returns which implementation is expected to be faster for logits [N, V], forward and backward."""
    del kernel, device, able, others
    rows, features = logits.shape
    row_bytes = features * logits.dtype.itemsize
    if row_bytes < _SHORT_ROW_BYTES:
        return Rule(("xla",), f"rows of less than {_SHORT_ROW_BYTES} bytes are faster in XLA")
    if rows * row_bytes < _FEW_BYTES:
        return Rule(("xla",), f"logits of less than {_FEW_BYTES} bytes are faster in XLA")
    return Rule(
        KERNELS, f"a kernel reads logits of {rows * row_bytes} bytes once, from {_FEW_BYTES} on"
    )


@dataclass(frozen=True)
class Forward:
    """Computes (dlogits or None, statistics [N, 5]) from logits [N, V], classes or soft labels.

    dlogits is the gradient of the sum of coefficients * losses; without coefficients it is None.
    """

    options: Options

    @property
    def name(self) -> str:
        return "softmax_cross_entropy forward"

    def axes(self, logits, classes, soft, coefficients) -> Axes:
        row = ROWS + "v"
        return Axes(
            (row, ROWS, row, ROWS),
            (None if coefficients is None else row, ROWS + "s"),
            whole="vs",
        )

    def why_not(self, device, logits, classes, soft, coefficients) -> Mapping[str, str | None]:
        return _why_not(device, logits, soft)

    def run(self, implementation, device, logits, classes, soft, coefficients) -> Results:
        options = self.options
        if implementation == "cuda":
            return cross_entropy_cuda.forward(
                logits,
                classes,
                soft,
                coefficients,
                label_smoothing=options.label_smoothing,
                z_loss=options.z_loss,
                soft_cap=options.logits_soft_cap,
            )
        labels = joined(classes, soft)
        statistics = cross_entropy_xla.row_statistics(logits, labels, options)
        packed = jnp.stack(statistics, axis=-1)
        if coefficients is None:
            return None, packed
        features, cap = logits.shape[-1], options.logits_soft_cap
        pulls = cross_entropy_xla.pulls_of(statistics, coefficients, features, options)
        dlogits = cross_entropy_xla.row_gradients(logits, labels, statistics, pulls, cap)
        return dlogits.astype(logits.dtype), packed

    estimate = _estimate
    batched = batched_rows


@dataclass(frozen=True)
class Backward:
    """Computes (dlogits,) from logits [N, V], labels, statistics and coefficients (`Pulls`) [N, 3]."""

    soft_cap: float | None

    @property
    def name(self) -> str:
        return "softmax_cross_entropy backward"

    def axes(self, logits, classes, soft, statistics, pulls) -> Axes:
        row = ROWS + "v"
        return Axes((row, ROWS, row, ROWS + "s", ROWS + "p"), (row,), whole="vsp")

    def why_not(self, device, logits, classes, soft, statistics, pulls) -> Mapping[str, str | None]:
        return _why_not(device, logits, soft)

    def run(self, implementation, device, logits, classes, soft, statistics, pulls) -> Results:
        if implementation == "cuda":
            dlogits = cross_entropy_cuda.backward(
                logits, classes, soft, statistics, pulls, soft_cap=self.soft_cap
            )
            return (dlogits,)
        dlogits = cross_entropy_xla.row_gradients(
            logits,
            joined(classes, soft),
            unpacked(statistics),
            Pulls(*jnp.unstack(pulls, axis=-1)),
            self.soft_cap,
        )
        return (dlogits.astype(logits.dtype),)

    estimate = _estimate
    batched = batched_rows


@dataclass(frozen=True)
class Scale:
    """Computes (x * factors,) of x [N, V], factors [N] in place; if all factors are 1, x is not read."""

    @property
    def name(self) -> str:
        return "softmax_cross_entropy scale"

    def axes(self, x, factors) -> Axes:
        return Axes((ROWS + "v", ROWS), (ROWS + "v",), whole="v")

    def why_not(self, device, x, factors) -> Mapping[str, str | None]:
        return _why_not(device, x, None)

    def run(self, implementation, device, x, factors) -> Results:
        if implementation == "cuda":
            return (cross_entropy_cuda.scale_rows(x, factors),)
        return ((x * factors[:, None]).astype(x.dtype),)

    estimate = _estimate
    batched = batched_rows


def _why_not(device, logits, soft) -> dict[str, str | None]:
    """Returns why each implementation cannot run logits [N, V], forward or backward."""
    rows, features = logits.shape
    reason = cross_entropy_cuda.why_unsupported(
        compute_capability=device.compute_capability,
        rows=rows,
        features=features,
        dtype=logits.dtype,
        soft_dtype=None if soft is None else soft.dtype,
    )
    return {"cuda": reason, "xla": None}
