"""The gradient of a layer's input (dgrad): XLA's product, or for few rows a Pallas kernel if faster."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from jaxfused.ops.linear.linear_stages import product_why_not
from jaxfused.runtime import product_regimes, sharding
from jaxfused.runtime.estimate import Estimate, Rule
from jaxfused.runtime.product_stage import ProductStage
from jaxfused.runtime.product_xla import product
from jaxfused.runtime.runner import ROWS, Axes, Results, Runner, batched_rows
from pallas_kernels.gemm import linear as pallas_linear
from pallas_kernels.gemm import small_m
from pallas_kernels.gemm.fused_product import FusedProduct


def input_gradient(
    run: Runner, dy: jax.Array, w: jax.Array, dtype: Any, precision: Any
) -> jax.Array:
    """Returns the gradient of x for y = x @ w: dy [..., F] times the transpose of w [D, F]."""
    # A kernel needs all of F, the reduction axis, on one device. If F may be sharded, XLA adds the
    # devices' products.
    may_run = sharding.is_in_one_piece(dy, w) and run.implementation in (None, "pallas")
    if are_few(dy) and may_run and dy.dtype == dtype:
        (dx,) = run(InputGradient(precision), dy, w)
        return dx
    rows = sharding.leading_axes(dy.ndim - 1)
    # As in the forward, devices exchange products in x's dtype: 16 bits are half of float32's bytes.
    in_xla = _ProductOfShards(rows, dtype, precision)
    if not sharding.is_explicit(dy, w):
        return in_xla(dy, w)[0]
    (dx,) = sharding.per_shard(
        in_xla, (dy, w), operand_axes=(rows + "f", "df"), result_axes=(rows + "d",)
    )
    assert dx is not None
    return dx


@dataclass(frozen=True)
class _ProductOfShards:
    rows: str
    """Einsum letters of dy's leading axes."""
    dtype: Any
    precision: Any

    def __call__(self, dy: jax.Array, w: jax.Array) -> tuple[jax.Array]:
        subscripts = f"{self.rows}f,df->{self.rows}d"
        dx = product(
            subscripts, dy, w, dtype=dy.dtype, out_dtype=self.dtype, precision=self.precision
        )
        return (dx,)


@dataclass(frozen=True)
class InputGradient(ProductStage):
    """Computes (dy @ w^T,) [M, D] for dy [M, F] and w [D, F], with M small; XLA computes larger M."""

    precision: Any

    @property
    def name(self) -> str:
        return "linear input gradient"

    def axes(self, *operands) -> Axes:
        del operands
        return Axes((ROWS + "f", "df"), (ROWS + "d",), whole="f")

    def product(self, dy, w) -> FusedProduct:
        return pallas_linear.input_gradient(dy, w)

    def why_not(self, device, dy, w) -> Mapping[str, str | None]:
        features = {"the gradient": w.shape[1], "x": w.shape[0]}
        why_not = product_why_not(device, self.precision, {"x": dy}, features)
        del why_not["cuda"]
        return why_not

    def estimate(self, device, able, dy, w) -> Estimate:
        del able
        work = self.work(dy, w)
        if work.m == 1:
            return Rule(("xla",), "of one row, XLA computes dgrad and wgrad in one kernel")
        return product_regimes.estimate(device, work, 0.0)

    def run(self, implementation, device, dy, w, config=None) -> Results:
        if implementation == "pallas":
            return self.in_pallas(device, dy, w, config=config)
        dx = product(
            "mf,df->md", dy, w, dtype=dy.dtype, out_dtype=dy.dtype, precision=self.precision
        )
        return (dx,)

    results = ("dx",)
    batched = batched_rows


def are_few(rows: jax.Array) -> bool:
    """Returns whether rows [..., D] of 16 bits are so few that a small-M kernel multiplies them."""
    return math.prod(rows.shape[:-1]) <= small_m.MAX_ROWS and rows.dtype.itemsize == 2
