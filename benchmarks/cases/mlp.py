"""mlp with gelu and gated_mlp with silu, forward and with gradients, and the gated unit alone."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax

import jaxfused
from benchmarks.cases.linear import random_operands
from benchmarks.run.case import TERAFLOPS, Arrays, Bar, Case, Function, functions, torch_compiled
from jaxfused import dispatch
from pallas_kernels.gemm import mlp as pallas_mlp

Shape = tuple[int, int, int]
"""Sizes (rows, features, hidden features)."""

_LARGE: Shape = (8192, 4096, 14336)
SHAPES: tuple[Shape, ...] = (
    (16384, 768, 3072),
    (16384, 1024, 4096),
    (50432, 768, 3072),
    _LARGE,
)
QUICK_SHAPES = (SHAPES[0], _LARGE)


def cases(quick: bool = False, shapes: Sequence[Shape] | None = None) -> list[Case]:
    """Returns every operation at every shape, in the order in which they are measured."""
    shapes = shapes or (QUICK_SHAPES if quick else SHAPES)
    whole = [
        _case(operation, shape, with_gradient)
        for operation in (_MLP, _GATED_MLP)
        for with_gradient in (False, True)
        for shape in shapes
    ]
    return [*whole, *(_unit_case(shape) for shape in shapes)]


# --- ours and the peers ---------------------------------------------------------------------------


def _mlp(x, w1, b1, w2, b2, *, implementation):
    return jaxfused.mlp(x, w1, b1, w2, b2, save="hidden", implementation=implementation)


def _flax_mlp(x, w1, b1, w2, b2):
    return jax.nn.gelu(x @ w1 + b1) @ w2 + b2


def _torch_mlp(x, w1, b1, w2, b2):
    import torch

    return torch.nn.functional.gelu(x @ w1 + b1, approximate="tanh") @ w2 + b2


def _gated_mlp(x, w_gate, w_up, w_down, *, implementation):
    return jaxfused.gated_mlp(x, w_gate, w_up, w_down, save="hidden", implementation=implementation)


def _flax_gated_unit(x, w_gate, w_up):
    return jax.nn.silu(x @ w_gate) * (x @ w_up)


def _tokamax_gated_unit(x, w_gate, w_up):
    import tokamax

    # The names keep tokamax from running XLA where its own kernels cannot run.
    return tokamax.gated_linear_unit(
        x, (w_gate, w_up), activation=jax.nn.silu, implementation=("mosaic", "triton")
    )


def _torch_gated_unit(x, w_gate, w_up):
    import torch

    return torch.nn.functional.silu(x @ w_gate) * (x @ w_up)


def _then_down(gated_unit: Function) -> Function:
    return lambda x, w_gate, w_up, w_down: gated_unit(x, w_gate, w_up) @ w_down


def _pallas_gated_unit(x, w_gate, w_up):
    """Runs the gated unit's kernel, the first half of `gated_mlp`, which is no operator itself."""
    unit, _, _ = pallas_mlp.gated_forward(
        x,
        w_gate,
        w_up,
        None,
        None,
        activation="silu",
        save_preactivations=False,
        multiprocessors=dispatch.current_device(x).multiprocessors,
    )
    return unit


# --- the cases ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Operation:
    name: str
    ours: Function
    """Function of this package, which takes implementation= as well."""
    peers: dict[str, Function]
    torch: Function
    products: int
    """Number of products of [rows, features] and [features, hidden]."""
    has_bias: bool


_MLP = _Operation("mlp, gelu,", _mlp, {"xla": _flax_mlp}, _torch_mlp, products=2, has_bias=True)
_GATED_MLP = _Operation(
    "gated_mlp, silu,",
    _gated_mlp,
    {"xla": _then_down(_flax_gated_unit), "tokamax": _then_down(_tokamax_gated_unit)},
    _then_down(_torch_gated_unit),
    products=3,
    has_bias=False,
)


def _case(operation: _Operation, shape: Shape, with_gradient: bool) -> Case:
    rows, features, hidden = shape
    parameters = _parameters(operation, shape)
    in_jax = dict(operation.peers)
    bars = [Bar("xla", aim=1.0)]
    if with_gradient:
        # tokamax's gradient is XLA's, with the products computed again.
        in_jax.pop("tokamax", None)
        bars = [
            Bar("xla", must=1.0 if shape == _LARGE else 1.1),
            Bar(TERAFLOPS, aim=720.0),
        ]
    size = 2 * rows * features + _count(parameters)
    if with_gradient:
        # Reads x, dy, the weights and the preactivations that the forward wrote; writes gradients.
        weights = [shape for shape in parameters if len(shape) == 2]
        preactivations = (operation.products - 1) * rows * hidden
        size += 3 * rows * features + _count(weights) + _count(parameters) + 2 * preactivations
    return Case(
        name=f"{operation.name} {'forward+backward' if with_gradient else 'forward'}",
        shape=shape,
        make_inputs=partial(_make_inputs, shape, parameters, with_gradient),
        bytes=2 * size,
        flops=2 * rows * features * hidden * operation.products * (3 if with_gradient else 1),
        bars=tuple(bars),
        **functions(
            operation.ours,
            in_jax,
            {"torch_compile": partial(torch_compiled, operation.torch)},
            differentiable=1 + len(parameters),
            cotangents=int(with_gradient),
        ),
    )


def _unit_case(shape: Shape) -> Case:
    rows, features, hidden = shape
    weights = [(features, hidden)] * 2
    return Case(
        name="gated unit, silu, forward",
        shape=shape,
        make_inputs=partial(_make_inputs, shape, weights, False),
        truth=_flax_gated_unit,
        jax={
            "pallas": _pallas_gated_unit,
            "xla": _flax_gated_unit,
            "tokamax": _tokamax_gated_unit,
        },
        torch={"torch_compile": partial(torch_compiled, _torch_gated_unit)},
        bytes=2 * (rows * features + _count(weights) + rows * hidden),
        flops=4 * rows * features * hidden,
        default="pallas",
        bars=(Bar("tokamax", must=1.0),),
    )


def _parameters(operation: _Operation, shape: Shape) -> list[tuple[int, ...]]:
    """Returns shapes in the order of the operands after x."""
    _, features, hidden = shape
    if operation.has_bias:
        return [(features, hidden), (hidden,), (hidden, features), (features,)]
    return [*[(features, hidden)] * (operation.products - 1), (hidden, features)]


def _count(shapes: Sequence[tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes)


def _make_inputs(
    shape: Shape, parameters: Sequence[tuple[int, ...]], with_gradient: bool, key: jax.Array
) -> Arrays:
    x_like = [shape[:2]] * (2 if with_gradient else 1)
    x, *rest = random_operands(key, x_like, parameters)
    dys, weights = rest[: len(x_like) - 1], rest[len(x_like) - 1 :]
    return x, *weights, *dys
