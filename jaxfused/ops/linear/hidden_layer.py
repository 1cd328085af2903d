"""The hidden layer of mlp and gated_mlp: options, checks, padding with zeros, products in float8."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxfused import dispatch
from jaxfused.ops.fp8 import fp8
from jaxfused.ops.linear import mlp_xla
from jaxfused.ops.linear.linear import check_residual
from jaxfused.ops.linear.linear_stages import Layer
from jaxfused.runtime import sharding
from jaxfused.runtime.checks import check_shape
from jaxfused.runtime.runner import Runner
from pallas_kernels.gemm import matmul, small_m
from pallas_kernels.gemm.operands import SWIZZLE_BYTES

Save = Literal["hidden", "preactivation", "inputs"]


def fp8_runner(op, implementation, device, x, words) -> Runner:
    """Returns the `Runner` that chooses and calls float8 kernels; raises an error for dropout."""
    if words is not None:
        raise ValueError(
            f'{op}: dropout_rate is not 0 and precision is "fp8", but the pass that quantises the hidden'
            " layer has no dropout; pass dropout_rate=0.0, or leave precision out."
        )
    return fp8.runner(op, implementation, device, x)


def fp8_dtypes(x, w1, w2, residual) -> tuple[Any, ...]:
    """Returns the dtypes of the gradients of x, w1, w2 and the residual for a float8 backward."""
    return x.dtype, w1.dtype, w2.dtype, None if residual is None else residual.dtype


def zero_features(
    implementation: str | None, device: dispatch.Device, x: jax.Array, hidden: int, features: int
) -> int:
    """Returns how many features with zero weights to append to the hidden layer [..., hidden].

    Pallas's kernels, and XLA's fastest products, need rows of the hidden layer that start at multiples
    of 16 bytes. Padding copies the weights, which is cheap compared with products of many rows. The
    padded features have zero weights in the second layer, so the result is the same.
    """
    grain = matmul.GRAIN
    if implementation not in (None, "pallas") or x.dtype.itemsize != 2 or hidden % grain == 0:
        return 0
    if sharding.is_explicit(x):
        return 0  # Hidden features that devices split cannot be padded on each device.
    can_run = matmul.why_unsupported(
        compute_capability=device.compute_capability,
        dtypes=dict(x=x.dtype),
        features=dict(x=x.shape[-1], result=features),
    )
    rows = math.prod(x.shape[:-1])
    if can_run is not None or rows <= small_m.MAX_ROWS or hidden == 0:
        return 0
    if implementation is None and rows * hidden < _SMALLEST_TO_PAD:
        return 0
    # Pad to a multiple of the kernel's step along the reduction axis, or only to a multiple of `grain`
    # (one instruction) if the former needs many more features.
    step = SWIZZLE_BYTES // x.dtype.itemsize
    zeros = -hidden % step
    return zeros if zeros <= hidden // _LARGEST_SHARE_OF_ZEROS else -hidden % grain


_SMALLEST_TO_PAD = 2**21
"""Fewest elements [rows, F] of a hidden layer that is padded. For fewer, copying the weights to pad them
takes longer than the padding saves."""
_LARGEST_SHARE_OF_ZEROS = 8
"""Zeros of more than 1/8 of the hidden features take longer than they save by whole steps along the
reduction axis."""


def append_zeros(a: Any, zeros: int, parts: int = 1, axis: int = -1) -> Any:
    """Appends zeros to each of an axis's `parts` equal parts, such as gate and up; None stays None."""
    if a is None or zeros == 0:
        return a
    pads = [(0, 0)] * a.ndim
    pads[axis] = (0, zeros)
    return jnp.concatenate([jnp.pad(part, pads) for part in jnp.split(a, parts, axis)], axis)


def check_second_layer(op, x, hidden, w_name, w, bias_name, bias, residual) -> None:
    """Checks the second layer: w [hidden, E], bias [E] and residual [..., E] for x [..., D]."""
    if w.ndim != 2 or w.shape[0] != hidden:
        raise ValueError(
            f"{op}: {w_name} has shape {w.shape}, but the hidden layer has {hidden} features;"
            f" pass {w_name} of shape ({hidden}, features)."
        )
    features = w.shape[1]
    check_shape(op, bias_name, bias, (features,), f"{w_name} has {features} features")
    check_residual(op, residual, x, features)


def check_save(op: str, save: str) -> None:
    """Checks that `save` is one of the policies."""
    if save not in mlp_xla.SAVE_POLICIES:
        names = ", ".join(repr(n) for n in mlp_xla.SAVE_POLICIES)
        raise ValueError(f"{op}: save={save!r} is not known; pass one of {names}.")


@dataclass(frozen=True)
class Options:
    """Static arguments of a call of mlp or gated_mlp."""

    op: str
    activation: str | None
    save: Save
    out_dtype: Any
    residual_dtype: Any
    precision: Any

    @classmethod
    def of(cls, op, activation, save, out_dtype, residual, precision) -> "Options":
        residual_dtype = None if residual is None else residual.dtype
        return cls(op, activation, save, jnp.dtype(out_dtype), residual_dtype, precision)

    @property
    def saves_preactivations(self) -> bool:
        return self.save != "inputs"

    def saves_slope(self, run: Runner) -> bool:
        """True if the forward saves activation(z) and activation'(z) [..., F] instead of z.

        CUDA C has no kernel that computes both.
        """
        has_derivative = self.activation is not None
        return self.save == "hidden" and run.implementation != "cuda" and has_derivative

    def first_layer(self, x: jax.Array, *, activation: str | None, saves: bool) -> Layer:
        """Returns the first layer: a product with bias and activation."""
        return Layer(f"{self.op} first layer", activation, x.dtype, saves, self.precision)

    @property
    def last_layer(self) -> Layer:
        """The last layer: a product with bias and residual."""
        return Layer(f"{self.op} last layer", None, self.out_dtype, False, self.precision)
