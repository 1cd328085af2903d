"""linear: the product alone, and with bias and gelu, forward and with gradients."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.cases import of_config
from benchmarks.run.case import BARE, Bar, Case, Function
from benchmarks.sweep.configs import Linear

Shape = tuple[int, int, int]
"""Sizes (rows, features, out features)."""

_SMALL: Shape = (16384, 768, 3072)
_LARGE: Shape = (8192, 4096, 14336)
SHAPES: tuple[Shape, ...] = (_SMALL, (16384, 1024, 4096), _LARGE, (50432, 768, 2304))
QUICK_SHAPES = (_SMALL, _LARGE)


def cases(quick: bool = False, shapes: Sequence[Shape] | None = None) -> list[Case]:
    """Returns a case for each operation at each shape, in the order of measurement."""
    shapes = shapes or (QUICK_SHAPES if quick else SHAPES)
    return [_case(operation, shape) for operation in _OPERATIONS for shape in shapes]


# --- the peers, as functions of (x, w, ...) -------------------------------------------------------


def product(x, w, *_):
    """Returns the product alone: an operator's epilogue should add nothing to its time."""
    return x @ w


def _torch_gelu_layer(x, w, bias):
    import torch

    return torch.nn.functional.gelu(x @ w + bias, approximate="tanh")


@dataclass(frozen=True)
class _Operation:
    name: str
    torch: Function
    has_bias: bool
    """True if a bias and gelu follow the product."""
    with_gradient: bool = False


_OPERATIONS = (
    _Operation("product forward", product, has_bias=False),
    _Operation("linear + bias + gelu forward", _torch_gelu_layer, has_bias=True),
    _Operation(
        "linear + bias + gelu forward+backward",
        _torch_gelu_layer,
        has_bias=True,
        with_gradient=True,
    ),
)


def _bars(operation: _Operation, shape: Shape) -> tuple[Bar, ...]:
    if not operation.has_bias:
        return (Bar("xla", must=0.92),)
    if operation.with_gradient:
        return (Bar("xla", aim=1.0),)
    must = {_SMALL: 1.4, _LARGE: 1.1}.get(shape)
    over_xla = Bar("xla", aim=1.0) if must is None else Bar("xla", must=must)
    return over_xla, Bar(BARE, aim=0.97)


def _case(operation: _Operation, shape: Shape) -> Case:
    rows, features, out_features = shape
    config = Linear(
        batch=0,
        tokens=rows,
        width=features,
        out=out_features,
        dtype="bfloat16",
        param_dtype="same",
        bias=operation.has_bias,
        activation="gelu_tanh" if operation.has_bias else None,
        residual=False,
    )
    # The backward reads x, w and the preactivation that the forward wrote.
    saved = rows * features + features * out_features + 2 * rows * out_features
    is_bare = operation.has_bias and not operation.with_gradient
    return of_config.case(
        operation.name,
        shape,
        config,
        stock="flax",
        torch=operation.torch,
        with_gradient=operation.with_gradient,
        read_again=2 * saved if operation.with_gradient else 0,
        flops=2 * rows * features * out_features,
        bars=_bars(operation, shape),
        peers={BARE: product} if is_bare else {},
    )
