"""layer_norm and rms_norm: alone, after a residual sum, after bias and relu; with gradients too."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.cases import of_config
from benchmarks.run.case import BEST_PEER, BULK_COPY, Bar, Case, Function
from benchmarks.sweep.configs import Norm

SHAPES = ((16384, 768), (16384, 1024), (8192, 4096), (16384, 8192), (4096, 16384), (50432, 768))
QUICK_SHAPES = ((16384, 1024), (8192, 4096), (4096, 16384))

_EPSILON = 1e-6


def cases(quick: bool = False, shapes: Sequence[tuple[int, int]] | None = None) -> list[Case]:
    """Returns a case for each operation at each shape, in the order of measurement."""
    shapes = shapes or (QUICK_SHAPES if quick else SHAPES)
    return [_case(operation, shape) for operation in _OPERATIONS for shape in shapes]


# --- the peers, as functions of (x, scale, ...) ---------------------------------------------------


def _torch_layer_norm(x, scale, bias):
    import torch

    # torch's autocast computes the norm in float32, as here; torch.compile fuses the casts.
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

    # tokamax.layer_norm overwrites x, so XLA would copy x first, and the kernel would find x in the L2.
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
    torch: Function
    bars: tuple[Bar, ...]
    operator: str = "layer_norm"
    residual: bool = False
    pre_bias: bool = False
    """True if a bias and a relu are applied before the norm."""
    with_gradient: bool = False
    liger: Callable[[], Function] | None = None
    tokamax: Function | None = None


_LAYER_NORM: dict[str, Any] = {
    "torch": _torch_layer_norm,
    "liger": _liger_layer_norm,
    "tokamax": partial(_tokamax, subtract_mean=True),
}
_RMS_NORM: dict[str, Any] = {
    "operator": "rms_norm",
    "torch": _torch_rms_norm,
    "liger": _liger_rms_norm,
    "tokamax": partial(_tokamax, subtract_mean=False),
}
_RESIDUAL: dict[str, Any] = {"torch": _torch_residual, "residual": True}

_TWO_PASS = "reference"
"""Our implementation "xla", with a two-pass variance; the peer "xla" is Flax's fast variance."""

_FORWARD_AIM = Bar(BULK_COPY, aim=0.95)
_GRADIENT_AIM = Bar(BULK_COPY, aim=0.85)
_CUDA = Bar("pallas", must=1 / 1.15, ours="cuda")

_OPERATIONS = (
    _Operation(
        "layer_norm forward",
        bars=(Bar(_TWO_PASS, must=1.2), Bar(BEST_PEER, must=1.0), _FORWARD_AIM, _CUDA),
        **_LAYER_NORM,
    ),
    _Operation(
        "layer_norm forward+backward",
        bars=(
            Bar(_TWO_PASS, must=2.5, aim=3.3),
            Bar(BEST_PEER, must=1.0),
            _GRADIENT_AIM,
            _CUDA,
        ),
        with_gradient=True,
        **_LAYER_NORM,
    ),
    _Operation(
        "rms_norm forward", bars=(Bar(BEST_PEER, must=1.0), _FORWARD_AIM, _CUDA), **_RMS_NORM
    ),
    _Operation(
        "rms_norm forward+backward",
        bars=(Bar("xla", must=1.15), Bar("liger", must=1.0), _GRADIENT_AIM, _CUDA),
        with_gradient=True,
        **_RMS_NORM,
    ),
    _Operation(
        "residual + layer_norm forward",
        bars=(Bar(_TWO_PASS, must=1.3), _FORWARD_AIM, _CUDA),
        **_RESIDUAL,
    ),
    _Operation(
        "bias + relu + layer_norm forward",
        torch=_torch_bias_relu,
        bars=(Bar(_TWO_PASS, must=1.3), _FORWARD_AIM, _CUDA),
        pre_bias=True,
    ),
    _Operation(
        "residual + layer_norm forward+backward",
        bars=(_CUDA,),
        with_gradient=True,
        **_RESIDUAL,
    ),
)


def _case(operation: _Operation, shape: tuple[int, int]) -> Case:
    rows, features = shape
    has_mean = operation.operator == "layer_norm"
    config = Norm(
        operator=operation.operator,
        batch=0,
        tokens=rows,
        width=features,
        dtype="bfloat16",
        residual=operation.residual,
        bias=has_mean,
        pre_bias=operation.pre_bias,
    )
    return of_config.case(
        operation.name,
        shape,
        config,
        stock="fast variance" if has_mean else "rms",
        torch=operation.torch,
        with_gradient=operation.with_gradient,
        # The backward reads the norm's input and the scale.
        read_again=2 * rows * features + 4 * features if operation.with_gradient else 0,
        bars=operation.bars,
        # The residual's gradient equals x's, so it is not asked for.
        differentiable=2 + has_mean,
        peers={} if operation.tokamax is None else {"tokamax": operation.tokamax},
        torch_peers={} if operation.liger is None else {"liger": operation.liger},
    )
