"""Depthwise conv with a one-axis window for each channel: choice of implementation and gradient.

These are the short convolutions of Mamba and Griffin. The gradient recomputes the activation's input, so
that only the operands are saved.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxfused import dispatch
from jaxfused.ops.conv import conv_xla, depthwise_conv1d_cuda
from jaxfused.ops.conv.batched_images import batched_images
from jaxfused.ops.conv.depthwise_conv_cuda import Window
from jaxfused.runtime import sharding
from jaxfused.runtime.activation import value_and_slope
from jaxfused.runtime.kernel_gradient import kernel_gradient
from jaxfused.runtime.promotion import accumulator_dtype
from jaxfused.runtime.runner import Axes, Results, Runner

NO_PALLAS = "there is no Pallas kernel of a depthwise conv"


def takes(window: Window) -> bool:
    """Returns whether a kernel supports this window: along the last spatial axis, of stride 1."""
    along_one_axis = window.kernel[0] == 1 and window.padding[0] == (0, 0)
    return along_one_axis and window.stride == 1 and window.kernel[1] in depthwise_conv1d_cuda.TAPS


def depthwise_conv1d(
    run: Runner,
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    window: Window,
    activation: str | None,
    returns_input: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """Convolves x [B, *spatial, C] with w [*kernel, 1, C]; returns y, and x if `returns_input`."""
    # Each row of an image becomes a sequence of its own.
    lines = [a if a is None else a.reshape(-1, *a.shape[-2:]) for a in (x, residual)]
    weights = w.astype(x.dtype).reshape(-1, w.shape[-1])
    operands = sharding.align(
        (lines[0], weights, bias, lines[1]), operand_axes=_OPERANDS, whole=_WHOLE
    )
    options = _Options(len(weights), window.padding[1], activation)
    y, returned_input = _conv(run, options, returns_input, *operands)
    y = y.reshape(*x.shape[:-2], *y.shape[-2:])
    return y, None if returned_input is None else returned_input.reshape(x.shape)


# --- gradient -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Options:
    taps: int
    padding: tuple[int, int]
    """Zeros before the first step and after the last."""
    activation: str | None


class _Residuals(NamedTuple):
    x: jax.Array
    w: jax.Array
    bias: jax.Array | None
    residual: jax.Array | None


@functools.partial(kernel_gradient, nondiff_argnums=(0, 1, 2), op="conv")
def _conv(run: Runner, options: _Options, returns_input: bool, x, w, bias, residual):
    (y,) = run(_Forward(options), x, w, bias, residual)
    return y, x if returns_input else None


def _conv_fwd(run: Runner, options: _Options, returns_input: bool, x, w, bias, residual):
    return _conv(run, options, returns_input, x, w, bias, residual), _Residuals(
        x, w, bias, residual
    )


def _conv_bwd(run: Runner, options: _Options, returns_input: bool, saved: _Residuals, cotangents):
    del returns_input
    dx, dw, dbias, dresidual = run(_Backward(options), *saved, *cotangents)
    return (
        dx,
        dw.astype(saved.w.dtype),
        None if saved.bias is None else dbias.astype(saved.bias.dtype),
        None if saved.residual is None else dresidual.astype(saved.residual.dtype),
    )


_conv.defvjp(_conv_fwd, _conv_bwd)


# --- kernels --------------------------------------------------------------------------------------

_X, _Y = "btc", "buc"
_OPERANDS = (_X, "kc", "c", _Y)
_WHOLE = "tku"


@dataclass(frozen=True)
class _Forward:
    """Computes (y,) from x [B, T, C], w [taps, C], bias and residual."""

    options: _Options

    @property
    def name(self) -> str:
        return "conv depthwise 1d forward"

    def axes(self, x, w, bias, residual) -> Axes:
        return Axes(_OPERANDS, (_Y,), whole=_WHOLE)

    def why_not(self, device, x, w, bias, residual) -> Mapping[str, str | None]:
        return _why_not(device, self.options, x, residual)

    def run(self, implementation, device, x, w, bias, residual) -> Results:
        if implementation == "cuda":
            y = depthwise_conv1d_cuda.conv(
                x,
                w,
                bias,
                residual,
                padding=self.options.padding,
                activation=self.options.activation,
                multiprocessors=device.multiprocessors,
            )
        else:
            y = _reference(self.options, x, w, bias, residual, activation=self.options.activation)
        return (y,)

    batched = batched_images


@dataclass(frozen=True)
class _Backward:
    """Computes (dx, dw, dbias, dresidual) from the operands, dy [B, T', C] and `other`, added to dx.

    dw and dbias are sums in the accumulator's dtype; dresidual is None without a residual.
    """

    options: _Options

    @property
    def name(self) -> str:
        return "conv depthwise 1d backward"

    def axes(self, x, w, bias, residual, dy, other) -> Axes:
        return Axes(
            (*_OPERANDS, _Y, _X),
            (_X, "kc", "c", None if residual is None else _Y),
            whole=_WHOLE,
        )

    def why_not(self, device, x, w, bias, residual, dy, other) -> Mapping[str, str | None]:
        return _why_not(device, self.options, x, residual)

    def run(self, implementation, device, x, w, bias, residual, dy, other) -> Results:
        if implementation == "cuda":
            return depthwise_conv1d_cuda.gradient(
                x,
                w,
                bias,
                residual,
                dy,
                other,
                padding=self.options.padding,
                activation=self.options.activation,
                multiprocessors=device.multiprocessors,
            )
        convolve = functools.partial(_reference, self.options)
        dz = dy
        dtype = accumulator_dtype(dy.dtype)
        if self.options.activation is not None:
            z = convolve(x, w, bias, residual, activation=None)
            _, slope = value_and_slope(self.options.activation, z.astype(dtype))
            dz = (dy.astype(dtype) * slope).astype(dy.dtype)
        (dx,) = jax.vjp(lambda x: convolve(x, w), x)[1](dz)
        # In a `jax.shard_map` zeros made from x vary over the same mesh axes as x. The vjp of zeros that
        # do not would sum dw over the devices.
        (dw,) = jax.vjp(lambda w: convolve(x, w), jnp.zeros_like(x, shape=w.shape))[1](dz)
        return (
            dx if other is None else dx + other,
            dw.astype(dtype),
            jnp.sum(dz.astype(dtype), (0, 1)),
            None if residual is None else dz,
        )

    def batched(self, call, axis_size, in_batched, *operands) -> None:
        return None


def _reference(options: _Options, x, w, bias=None, residual=None, activation=None) -> jax.Array:
    return conv_xla.conv(
        x,
        w[:, None],
        bias,
        residual,
        strides=(1,),
        padding=(options.padding,),
        input_dilation=(1,),
        kernel_dilation=(1,),
        feature_group_count=x.shape[-1],
        activation=activation,
        precision=None,
    )


def _why_not(
    device: dispatch.Device, options: _Options, x: Any, residual: Any
) -> Mapping[str, str | None]:
    """Returns why each implementation cannot run the convolution of x [B, T, C] or its gradient."""
    images, length, channels = x.shape
    return {
        "cuda": depthwise_conv1d_cuda.why_unsupported(
            compute_capability=device.compute_capability,
            images=images,
            length=length,
            channels=channels,
            taps=options.taps,
            padding=options.padding,
            dtype=x.dtype,
            residual_dtype=None if residual is None else residual.dtype,
        ),
        "pallas": NO_PALLAS,
        "xla": None,
    }
