"""layer_norm and rms_norm: alone, after a residual sum, after bias and relu; with gradients too."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import jaxfused
from benchmarks.run.case import (
    BEST_PEER,
    BULK_COPY,
    Arrays,
    Bar,
    Case,
    Function,
    functions,
    torch_compiled,
)

SHAPES = ((16384, 768), (16384, 1024), (8192, 4096), (16384, 8192), (4096, 16384), (50432, 768))
QUICK_SHAPES = ((16384, 1024), (8192, 4096), (4096, 16384))

_EPSILON = 1e-6


def cases(quick: bool = False, shapes: Sequence[tuple[int, int]] | None = None) -> list[Case]:
    """Returns every operation at every shape, in the order in which they are measured."""
    shapes = shapes or (QUICK_SHAPES if quick else SHAPES)
    return [_case(operation, shape) for operation in _OPERATIONS for shape in shapes]


# --- ours and the peers, as functions of (x, scale, ...) ------------------------------------------


def _jaxfused_residual(x, scale, bias, residual, *, implementation):
    return jaxfused.layer_norm(
        x, scale, bias, residual=residual, epsilon=_EPSILON, implementation=implementation
    )


def _jaxfused_bias_relu(x, scale, bias, pre_bias, *, implementation):
    return jaxfused.layer_norm(
        x,
        scale,
        bias,
        pre_bias=pre_bias,
        pre_activation="relu",
        epsilon=_EPSILON,
        implementation=implementation,
    )


def _flax_layer_norm(x, scale, bias):
    """Computes flax.nnx.LayerNorm with its default, the fast variance."""
    wide = x.astype(jnp.float32)
    mean = wide.mean(-1, keepdims=True)
    variance = jnp.maximum(0.0, (wide * wide).mean(-1, keepdims=True) - mean * mean)
    y = (x - mean) * (jax.lax.rsqrt(variance + _EPSILON) * scale) + bias
    return y.astype(x.dtype)


def _flax_rms_norm(x, scale):
    wide = x.astype(jnp.float32)
    mean_square = (wide * wide).mean(-1, keepdims=True)
    return (x * (jax.lax.rsqrt(mean_square + _EPSILON) * scale)).astype(x.dtype)


def _flax_residual(x, scale, bias, residual):
    h = x + residual
    return _flax_layer_norm(h, scale, bias), h


def _flax_bias_relu(x, scale, bias, pre_bias):
    # flax.nnx.Linear casts its bias to the compute dtype before it adds it.
    return _flax_layer_norm(jax.nn.relu(x + pre_bias.astype(x.dtype)), scale, bias)


def _torch_layer_norm(x, scale, bias):
    import torch

    # This is what autocast does: float32 inside, and the compiler fuses the casts.
    wide = torch.nn.functional.layer_norm(x.float(), x.shape[-1:], scale, bias, _EPSILON)
    return wide.to(x.dtype)


def _torch_rms_norm(x, scale):
    import torch

    wide = torch.nn.functional.rms_norm(x.float(), x.shape[-1:], scale, _EPSILON)
    return wide.to(x.dtype)


def _torch_residual(x, scale, bias, residual):
    h = x + residual
    return _torch_layer_norm(h, scale, bias), h


def _torch_bias_relu(x, scale, bias, pre_bias):
    import torch

    return _torch_layer_norm(torch.relu(x + pre_bias.to(x.dtype)), scale, bias)


def _liger_layer_norm() -> Function:
    from liger_kernel.ops import LigerLayerNormFunction

    return lambda x, scale, bias: LigerLayerNormFunction.apply(x, scale, bias, _EPSILON)


def _liger_rms_norm() -> Function:
    from liger_kernel.ops import LigerRMSNormFunction

    # With in_place, dx would overwrite dy, which the other peers still need.
    return lambda x, scale: LigerRMSNormFunction.apply(x, scale, _EPSILON, 0.0, "llama", False)


def _tokamax(x, scale, bias=None, *, subtract_mean):
    from tokamax._src.ops.normalization.triton import TritonNormalization

    # tokamax.layer_norm would overwrite x, so XLA would copy x first, which leaves x in the L2.
    return TritonNormalization(input_output_alias=False)(
        x,
        scale,
        bias,
        axis=-1,
        epsilon=_EPSILON,
        scale_offset=0.0,
        subtract_mean=subtract_mean,
    )


# --- the operations -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Operation:
    name: str
    ours: Function
    """Function of this package, which takes implementation= as well."""
    flax: Function
    torch: Function
    bars: tuple[Bar, ...]
    passes: int
    """Fewest times that [rows, features] goes through memory, as reads and writes."""
    parameters: int
    """Number of arrays [features] in float32 that are read or written."""
    differentiable: int = 2
    """Number of leading operands with a gradient: x, scale and perhaps bias."""
    extra: tuple[str, ...] = ()
    """Operands after the differentiable ones: "residual" in x's shape, "pre_bias" [features]."""
    cotangents: int = 0
    """Number of cotangents; 0 measures the forward alone."""
    liger: Callable[[], Function] | None = None
    tokamax: Function | None = None


def _layer_norm(x, scale, bias, *, implementation):
    return jaxfused.layer_norm(x, scale, bias, epsilon=_EPSILON, implementation=implementation)


def _rms_norm(x, scale, *, implementation):
    return jaxfused.rms_norm(x, scale, epsilon=_EPSILON, implementation=implementation)


_LAYER_NORM: dict[str, Any] = {
    "ours": _layer_norm,
    "flax": _flax_layer_norm,
    "torch": _torch_layer_norm,
    "liger": _liger_layer_norm,
    "tokamax": partial(_tokamax, subtract_mean=True),
    "differentiable": 3,
}
_RMS_NORM: dict[str, Any] = {
    "ours": _rms_norm,
    "flax": _flax_rms_norm,
    "torch": _torch_rms_norm,
    "liger": _liger_rms_norm,
    "tokamax": partial(_tokamax, subtract_mean=False),
    "differentiable": 2,
}
_RESIDUAL: dict[str, Any] = {
    "ours": _jaxfused_residual,
    "flax": _flax_residual,
    "torch": _torch_residual,
    "differentiable": 3,
    "extra": ("residual",),
}
_BIAS_RELU: dict[str, Any] = {
    "ours": _jaxfused_bias_relu,
    "flax": _flax_bias_relu,
    "torch": _torch_bias_relu,
    "differentiable": 3,
    "extra": ("pre_bias",),
}

_TWO_PASS = "reference"
"""Name of XLA's two-pass variance. Flax's fast variance is the peer "xla"."""

_FORWARD_AIM = Bar(BULK_COPY, aim=0.95)
_GRADIENT_AIM = Bar(BULK_COPY, aim=0.85)
_CUDA = Bar("pallas", must=1 / 1.15, ours="cuda")

_OPERATIONS = (
    _Operation(
        "layer_norm forward",
        passes=2,
        parameters=2,
        bars=(Bar(_TWO_PASS, must=1.2), Bar(BEST_PEER, must=1.0), _FORWARD_AIM, _CUDA),
        **_LAYER_NORM,
    ),
    _Operation(
        "layer_norm forward+backward",
        passes=5,
        parameters=5,
        cotangents=1,
        bars=(
            Bar(_TWO_PASS, must=2.5, aim=3.3),
            Bar(BEST_PEER, must=1.0),
            _GRADIENT_AIM,
            _CUDA,
        ),
        **_LAYER_NORM,
    ),
    _Operation(
        "rms_norm forward",
        passes=2,
        parameters=1,
        bars=(Bar(BEST_PEER, must=1.0), _FORWARD_AIM, _CUDA),
        **_RMS_NORM,
    ),
    _Operation(
        "rms_norm forward+backward",
        passes=5,
        parameters=3,
        cotangents=1,
        bars=(Bar("xla", must=1.15), Bar("liger", must=1.0), _GRADIENT_AIM, _CUDA),
        **_RMS_NORM,
    ),
    _Operation(
        "residual + layer_norm forward",
        passes=4,
        parameters=2,
        bars=(Bar(_TWO_PASS, must=1.3), _FORWARD_AIM, _CUDA),
        **_RESIDUAL,
    ),
    _Operation(
        "bias + relu + layer_norm forward",
        passes=2,
        parameters=3,
        bars=(Bar(_TWO_PASS, must=1.3), _FORWARD_AIM, _CUDA),
        **_BIAS_RELU,
    ),
    _Operation(
        "residual + layer_norm forward+backward",
        passes=8,
        parameters=5,
        cotangents=2,
        bars=(_CUDA,),
        **_RESIDUAL,
    ),
)


def _case(operation: _Operation, shape: tuple[int, int]) -> Case:
    peers = {"xla": operation.flax}
    if operation.tokamax is not None:
        peers["tokamax"] = operation.tokamax
    in_torch: dict[str, Callable[[], Function]] = {
        "torch_compile": partial(torch_compiled, operation.torch)
    }
    if operation.liger is not None:
        in_torch["liger"] = operation.liger

    rows, features = shape
    return Case(
        name=operation.name,
        shape=shape,
        make_inputs=partial(_make_inputs, operation, shape),
        bytes=operation.passes * rows * features * 2 + operation.parameters * features * 4,
        bars=operation.bars,
        **functions(
            operation.ours,
            peers,
            in_torch,
            differentiable=operation.differentiable,
            cotangents=operation.cotangents,
        ),
    )


def _make_inputs(operation: _Operation, shape: tuple[int, int], key: jax.Array) -> Arrays:
    keys = iter(jax.random.split(key, 8))

    def rows(mean=0.0, deviation=1.0):
        values = jax.random.normal(next(keys), shape, jnp.bfloat16)
        return values * deviation + mean

    def parameter(mean=0.0):
        return mean + 0.1 * jax.random.normal(next(keys), shape[1:], jnp.float32)

    operands = [rows(1.0, 2.0), parameter(1.0)]
    if operation.differentiable == 3:
        operands.append(parameter())
    operands += [rows() if name == "residual" else parameter() for name in operation.extra]
    operands += [rows() for _ in range(operation.cotangents)]
    return tuple(operands)
