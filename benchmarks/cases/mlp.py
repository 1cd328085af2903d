"""mlp with gelu and gated_mlp with silu, forward and with gradients, and the gated unit alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax

from benchmarks.cases import of_config
from benchmarks.run.case import TERAFLOPS, Arrays, Bar, Case, Function, torch_compiled
from benchmarks.sweep.configs import MLP
from benchmarks.sweep.program_parts import RandomArrays
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
    """Returns a case for each operation at each shape, in the order of measurement."""
    shapes = shapes or (QUICK_SHAPES if quick else SHAPES)
    whole = [
        _case(operation, shape, with_gradient)
        for operation in (_MLP, _GATED_MLP)
        for with_gradient in (False, True)
        for shape in shapes
    ]
    return [*whole, *(_unit_case(shape) for shape in shapes)]


# --- ours and the peers ---------------------------------------------------------------------------


def _torch_mlp(x, w1, b1, w2, b2):
    import torch

    return torch.nn.functional.gelu(x @ w1 + b1, approximate="tanh") @ w2 + b2


def _flax_gated_unit(x, w_gate, w_up):
    return jax.nn.silu(x @ w_gate) * (x @ w_up)


def _tokamax_gated_unit(x, w_gate, w_up):
    import tokamax

    # With these names tokamax raises where its own kernels cannot run, in place of running XLA.
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
    operator: str
    activation: str
    peers: dict[str, Function]
    torch: Function
    products: int
    """Number of matrix products, each of rows * features * hidden multiplications."""
    has_bias: bool


_MLP = _Operation("mlp, gelu,", "mlp", "gelu_tanh", {}, _torch_mlp, products=2, has_bias=True)
_GATED_MLP = _Operation(
    "gated_mlp, silu,",
    "gated_mlp",
    "silu",
    {"tokamax": _then_down(_tokamax_gated_unit)},
    _then_down(_torch_gated_unit),
    products=3,
    has_bias=False,
)


def _case(operation: _Operation, shape: Shape, with_gradient: bool) -> Case:
    rows, features, hidden = shape
    config = MLP(
        operator=operation.operator,
        batch=0,
        tokens=rows,
        width=features,
        hidden=hidden,
        dtype="bfloat16",
        param_dtype="same",
        bias=operation.has_bias,
        activation=operation.activation,
        residual=False,
        save="hidden",
    )
    bars = [Bar("xla", aim=1.0)]
    if with_gradient:
        bars = [Bar("xla", must=1.0 if shape == _LARGE else 1.1), Bar(TERAFLOPS, aim=720.0)]
    # The backward reads x, the weights and the preactivations that the forward wrote.
    preactivations = (operation.products - 1) * rows * hidden
    saved = rows * features + operation.products * features * hidden + 2 * preactivations
    return of_config.case(
        f"{operation.name} {'forward+backward' if with_gradient else 'forward'}",
        shape,
        config,
        stock="flax",
        torch=operation.torch,
        with_gradient=with_gradient,
        read_again=2 * saved if with_gradient else 0,
        flops=2 * rows * features * hidden * operation.products,
        bars=tuple(bars),
        # tokamax's gradient is XLA's, with the products computed again.
        peers={} if with_gradient else operation.peers,
        # The derivative of an activation reads a rounded preactivation, and is rounded itself.
        error_limit=2e-2 if with_gradient else 1e-2,
    )


def _unit_case(shape: Shape) -> Case:
    rows, features, hidden = shape

    def make_inputs(key: jax.Array) -> Arrays:
        random = RandomArrays(key)
        weights = (random.weight((features, hidden), "bfloat16") for _ in range(2))
        return (random.normal((rows, features), "bfloat16"), *weights)

    return Case(
        name="gated unit, silu, forward",
        shape=shape,
        make_inputs=make_inputs,
        truth=_flax_gated_unit,
        jax={
            "pallas": _pallas_gated_unit,
            "xla": _flax_gated_unit,
            "tokamax": _tokamax_gated_unit,
        },
        torch={"torch_compile": partial(torch_compiled, _torch_gated_unit)},
        bytes=2 * (rows * features + 2 * features * hidden + rows * hidden),
        flops=4 * rows * features * hidden,
        default="pallas",
        bars=(Bar("tokamax", must=1.0),),
    )
