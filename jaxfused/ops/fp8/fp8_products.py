"""Products of float8 matrices: a layer, its gradients, and the gradient of a hidden layer."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from jaxfused import dispatch
from jaxfused.ops.fp8 import fp8_xla
from jaxfused.ops.fp8.fp8_operands import SLOPE_STEPS, Copies, largest_of
from jaxfused.runtime import sharding
from jaxfused.runtime.activation import BOUNDED_FROM_ABOVE, IN_XLA
from jaxfused.runtime.product_stage import ProductStage
from jaxfused.runtime.runner import ROWS, Axes, Results, Runner
from jaxfused.runtime.vmap import OneByOne
from pallas_kernels.activation import IN_KERNELS
from pallas_kernels.gemm import cost
from pallas_kernels.gemm import fp8 as pallas_fp8
from pallas_kernels.gemm.fp8 import LayerOptions
from pallas_kernels.gemm.fused_product import FusedProduct
from pallas_kernels.gemm.matmul_config import MatmulConfig


def layer(
    run: Runner,
    op: str,
    x: Copies,
    w: Copies,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    *,
    activation: str | None = None,
    out_dtype: Any = None,
    narrow_dtype: Any,
    saves: bool = False,
    maximised: pallas_fp8.Maximised | None = None,
) -> Any:
    """Returns (activation(z) + residual, z, row maxima) for z = x @ w + bias, from w's transposed copy.

    The options are those of `pallas_kernels.gemm.fp8.LayerOptions`.
    """
    # Maxima of sharded columns would be summed over devices, so XLA computes them from z then.
    observed = maximised if sharding.is_in_one_piece(x.values, w.transposed) else None
    options = LayerOptions(activation, out_dtype, narrow_dtype, saves, observed)
    factors = _factors(x.values, w.transposed)
    y, z, maxima = run(_Layer(op, options), *factors, *_scales(x, w), bias, residual)
    if maximised is not None and maxima is None:
        maxima = z if maximised == "value" else jnp.abs(z)
    return y, z, maxima


def hidden_magnitude(
    run: Runner, activation: str | None, maxima: jax.Array, up: Any = None
) -> jax.Array:
    """Returns a vector, whose maximum bounds a hidden layer's magnitudes before the layer is computed.

    Args:
      activation: the hidden layer's activation.
      maxima: maxima of the activation's arguments or of their magnitudes, as `maximised_of` says.
      up: maxima of the magnitudes of `up`, or None without a gate.
    """
    if up is None:
        return largest_of(run, maxima, activation=activation)
    largest = fp8_xla.largest_activation(activation, maxima.astype(jnp.float32))
    return (largest * fp8_xla.largest_magnitude(up))[None]


def maximised_of(activation: str | None) -> pallas_fp8.Maximised:
    """Returns which maximum of z bounds |activation(z)|: that of its "value" or of its "magnitude"."""
    return "value" if activation in BOUNDED_FROM_ABOVE else "magnitude"


def input_gradient(run: Runner, op: str, dy: Copies, w: Copies, dtype: Any) -> jax.Array:
    """Returns the gradient dy @ w^T of x [..., D] in `dtype`, for dy [..., F] and w [D, F]."""
    stage = _Layer(f"{op} input gradient", LayerOptions(None, dtype, dtype, False, None))
    dx, _, _ = run(stage, *_factors(dy.values, w.values), *_scales(dy, w), None, None)
    return dx


def weight_gradient(run: Runner, op: str, x: Copies, dy: Copies, dtype: Any) -> jax.Array:
    """Returns the gradient x^T @ dy [D, F] of weights, from x's and dy's transposed copies."""
    factors = _factors(x.transposed, dy.transposed)
    (dw,) = run(_WeightGradient(op, dtype), *factors, *_scales(x, dy))
    return dw


class HiddenGradient(NamedTuple):
    """Gradients of a hidden layer's preactivation z and of up, in z's dtype; dup is None without up."""

    dz: jax.Array
    dup: Any
    largest: jax.Array
    """A vector, whose maximum is the largest magnitude in dz and dup."""


def hidden_gradient(
    run: Runner,
    op: str,
    dy: Copies,
    w: Copies,
    z: jax.Array,
    up: jax.Array | None,
    *,
    activation: str | None,
) -> HiddenGradient:
    """Returns the gradients to z [..., F] and up of the hidden layer activation(z) [* up]."""
    observes = sharding.is_in_one_piece(dy.values, w.values)
    stage = _HiddenGradient(op, activation, observes)
    factors = _factors(dy.values, w.values)
    dz, dup, max_dz, max_dup = run(stage, *factors, *_scales(dy, w), z, up)
    largest = [m for m in ((max_dz, max_dup) if observes else (dz, dup)) if m is not None]
    return HiddenGradient(dz, dup, largest_of(run, *largest))


def hidden_gradient_by_slope(
    run: Runner,
    op: str,
    dy: Copies,
    w: Copies,
    slope: jax.Array,
    hidden: Copies,
    *,
    dtype: Any,
) -> HiddenGradient:
    """Returns the gradient to the preactivation z [..., F], given the activation's int8 derivative."""
    observes = sharding.is_in_one_piece(dy.values, w.values)
    # An int8 derivative cannot be NaN. A NaN in the hidden layer shows in its scale or magnitude.
    seen = hidden.scale if hidden.found is None else hidden.found
    unit = jnp.where(jnp.isfinite(seen.reshape(1)), jnp.float32(1.0 / SLOPE_STEPS), jnp.nan)
    padded = slope.shape[-1] != w.values.shape[0]
    stage = _HiddenGradientBySlope(op, jnp.dtype(dtype), observes, padded)
    scales = *_scales(dy, w), unit
    dz, maxima = run(stage, *_factors(dy.values, w.values), *scales, slope)
    return HiddenGradient(dz, None, largest_of(run, maxima if observes else dz))


def _factors(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns both factors [.., K] with the same K: the shorter one is padded with zeros."""
    length = max(a.shape[-1], b.shape[-1])
    return fp8_xla.of_length(a, length), fp8_xla.of_length(b, length)


def _scales(a: Copies, b: Copies) -> tuple[jax.Array, jax.Array]:
    """Returns the scales [1] of both matrices of a product."""
    return a.scale.reshape(1), b.scale.reshape(1)


# --- kernels --------------------------------------------------------------------------------------


def _product_why_not(
    device: dispatch.Device, x: Any, w: Any, others: Mapping[str, Any]
) -> dict[str, str | None]:
    """Returns why each implementation cannot multiply x [M, K] and w [N, K] in float8."""
    reason = pallas_fp8.why_unsupported(
        compute_capability=device.compute_capability,
        x_dtype=x.dtype,
        w_dtype=w.dtype,
        others=others,
        k=x.shape[1],
        n=w.shape[0],
    )
    return {"pallas": reason, "xla": None}


class _Fp8Product(OneByOne, ProductStage):
    """One kernel call: a product of float8 matrices [M, K] and [N, K], each with a scale [1]."""

    candidates: ClassVar[Callable[[cost.Work, int], list[MatmulConfig]]]
    """Returns kernel configs for a product and a number of SMs, predicted fastest first."""

    def configs(self, implementation, device, *operands) -> Sequence[Hashable]:
        if implementation != "pallas":
            return ()
        return type(self).candidates(self.work(*operands), device.multiprocessors)

    def in_pallas(self, device, *operands, config) -> Results:
        config = config or self.configs("pallas", device, *operands)[0]
        return super().in_pallas(device, *operands, config=config)

    def in_xla(self, *operands) -> Results:
        return self.in_order(fp8_xla.run(self.product(*operands)))

    def run(self, implementation, device, *operands, config=None) -> Results:
        if implementation == "xla":
            return self.in_xla(*operands)
        return self.in_pallas(device, *operands, config=config)


@dataclass(frozen=True)
class _Layer(_Fp8Product):
    """Computes (activation(z) + residual, z, row maxima) for z = x @ w^T + bias, x [M, K], w [N, K]."""

    op: str
    options: LayerOptions

    @property
    def name(self) -> str:
        return f"{self.op} in fp8"

    def axes(self, x, w, scale, w_scale, bias, residual) -> Axes:
        del x, w, scale, w_scale, bias, residual
        rows = ROWS + "n"
        return Axes(
            (ROWS + "k", "nk", "s", "t", "n", rows),
            (
                None if self.options.out_dtype is None else rows,
                rows if self.options.saves else None,
                None if self.options.maximised is None else "p" + ROWS,
            ),
            whole="kp",
        )

    def why_not(self, device, x, w, scale, w_scale, bias, residual) -> Mapping[str, str | None]:
        del scale, w_scale
        others = {
            "bias": None if bias is None else bias.dtype,
            "residual": None if residual is None else residual.dtype,
            "the result": self.options.out_dtype,
            "what is saved": self.options.narrow_dtype,
        }
        return _product_why_not(device, x, w, others)

    def product(self, x, w, scale, w_scale, bias, residual, functions=IN_KERNELS) -> FusedProduct:
        scales = (scale, w_scale)
        return pallas_fp8.layer(x, w, scales, bias, residual, self.options, functions)

    def in_xla(self, x, w, scale, w_scale, bias, residual) -> Results:
        product = self.product(x, w, scale, w_scale, bias, residual, IN_XLA)
        return self.in_order(fp8_xla.run(product))

    results = ("y", "z", "max_z")
    candidates = pallas_fp8.candidates


@dataclass(frozen=True)
class _HiddenGradient(_Fp8Product):
    """Computes (dz, dup, row maxima of each) from dy [M, K], w [N, K], their scales, z and up [M, N]."""

    op: str
    activation: str | None
    maximises: bool

    @property
    def name(self) -> str:
        return f"{self.op} hidden gradient in fp8"

    def axes(self, dy, w, scale, w_scale, z, up) -> Axes:
        del dy, w, scale, z
        rows, gated = ROWS + "n", up is not None
        return Axes(
            (ROWS + "k", "nk", "s", "t", rows, rows),
            (
                rows,
                rows if gated else None,
                "p" + ROWS if self.maximises else None,
                "p" + ROWS if self.maximises and gated else None,
            ),
            whole="kp",
        )

    def why_not(self, device, dy, w, scale, w_scale, z, up) -> Mapping[str, str | None]:
        del scale, w_scale, up
        return _product_why_not(device, dy, w, {"z": z.dtype})

    def product(self, dy, w, scale, w_scale, z, up, functions=IN_KERNELS) -> FusedProduct:
        return pallas_fp8.hidden_gradient(
            *(dy, w, (scale, w_scale), z, up),
            activation=self.activation,
            maximise=self.maximises,
            functions=functions,
        )

    def in_xla(self, dy, w, scale, w_scale, z, up) -> Results:
        return self.in_order(fp8_xla.run(self.product(dy, w, scale, w_scale, z, up, IN_XLA)))

    results = ("dz", "dup", "max_dz", "max_dup")
    candidates = pallas_fp8.hidden_candidates


@dataclass(frozen=True)
class _HiddenGradientBySlope(_Fp8Product):
    """Computes (dz, row maxima of |dz|) from dy [M, K], w [N, K], and the int8 derivative [M, N]."""

    op: str
    dtype: Any
    maximises: bool
    padded: bool
    """True if zeros pad each row of the derivative, which is then unsharded."""

    @property
    def name(self) -> str:
        return f"{self.op} hidden gradient by slope in fp8"

    def axes(self, *operands) -> Axes:
        del operands
        rows = ROWS + "n"
        return Axes(
            (ROWS + "k", "nk", "s", "t", "u", ROWS + "f" if self.padded else rows),
            (rows, "p" + ROWS if self.maximises else None),
            whole="kpf",
        )

    def why_not(self, device, dy, w, *others) -> Mapping[str, str | None]:
        why_not = _product_why_not(device, dy, w, {"dz": self.dtype})
        slope = pallas_fp8.why_slope_unsupported(columns=others[-1].shape[1])
        return why_not | {"pallas": why_not["pallas"] or slope}

    def product(self, dy, w, scale, w_scale, unit, slope) -> FusedProduct:
        return pallas_fp8.hidden_gradient_by_slope(
            dy, w, (scale, w_scale, unit), slope, dtype=self.dtype, maximise=self.maximises
        )

    results = ("dz", "max_dz")
    candidates = pallas_fp8.slope_candidates


@dataclass(frozen=True)
class _WeightGradient(_Fp8Product):
    """Computes (scales * x @ dy^T,) [K, N] from x [K, M], dy [N, M] and two scales [1]."""

    op: str
    dtype: Any

    @property
    def name(self) -> str:
        return f"{self.op} weight gradient in fp8"

    def axes(self, x, dy, scale, dy_scale) -> Axes:
        del x, dy, scale
        return Axes(("k" + ROWS, "n" + ROWS, "s", "t"), ("kn",))

    def why_not(self, device, x, dy, scale, dy_scale) -> Mapping[str, str | None]:
        del scale, dy_scale
        return _product_why_not(device, x, dy, {"the gradient": self.dtype})

    def product(self, x, dy, scale, dy_scale) -> FusedProduct:
        return pallas_fp8.weight_gradient(x, dy, (scale, dy_scale), out_dtype=self.dtype)

    results = ("dw",)
    candidates = pallas_fp8.promoted_candidates
