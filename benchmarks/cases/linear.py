"""linear: the product alone, and with bias and gelu, forward and with gradients."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

import jaxfused
from benchmarks.run.case import BARE, Arrays, Bar, Case, Function, functions, torch_compiled

Shape = tuple[int, int, int]
"""Sizes (rows, features, out features)."""

_SMALL: Shape = (16384, 768, 3072)
_LARGE: Shape = (8192, 4096, 14336)
SHAPES: tuple[Shape, ...] = (_SMALL, (16384, 1024, 4096), _LARGE, (50432, 768, 2304))
QUICK_SHAPES = (_SMALL, _LARGE)


def cases(quick: bool = False, shapes: Sequence[Shape] | None = None) -> list[Case]:
    """Returns every operation at every shape, in the order in which they are measured."""
    shapes = shapes or (QUICK_SHAPES if quick else SHAPES)
    return [_case(operation, shape) for operation in _OPERATIONS for shape in shapes]


def random_operands(
    key: jax.Array, rows: Sequence[tuple[int, ...]], weights: Sequence[tuple[int, ...]]
) -> list[jax.Array]:
    """Draws `rows` of unit variance, and `weights` [D, F] that keep it; biases [F] are small."""
    keys = iter(jax.random.split(key, len(rows) + len(weights)))
    operands = [jax.random.normal(next(keys), shape, jnp.bfloat16) for shape in rows]
    for shape in weights:
        deviation = 0.1 if len(shape) == 1 else shape[0] ** -0.5
        values = deviation * jax.random.normal(next(keys), shape, jnp.float32)
        operands.append(values.astype(jnp.bfloat16))
    return operands


# --- ours and the peers, as functions of (x, w, ...) ----------------------------------------------


def product(x, w, *_):
    """Returns the product alone: an operator's epilogue should add nothing to its time."""
    return x @ w


def _gelu_layer(x, w, bias, *, implementation):
    return jaxfused.linear(x, w, bias, activation="gelu_tanh", implementation=implementation)


def _flax_gelu_layer(x, w, bias):
    # This is flax.linen.Dense with jax.nn.gelu, whose default is the tanh approximation.
    return jax.nn.gelu(x @ w + bias)


def _torch_gelu_layer(x, w, bias):
    import torch

    return torch.nn.functional.gelu(x @ w + bias, approximate="tanh")


@dataclass(frozen=True)
class _Operation:
    name: str
    ours: Function
    """Function of this package, which takes implementation= as well."""
    flax: Function
    torch: Function
    has_bias: bool
    with_gradient: bool = False


_OPERATIONS = (
    _Operation("product forward", jaxfused.linear, product, product, has_bias=False),
    _Operation(
        "linear + bias + gelu forward",
        _gelu_layer,
        _flax_gelu_layer,
        _torch_gelu_layer,
        has_bias=True,
    ),
    _Operation(
        "linear + bias + gelu forward+backward",
        _gelu_layer,
        _flax_gelu_layer,
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
    peers = {"xla": operation.flax}
    written = functions(
        operation.ours,
        peers,
        {"torch_compile": partial(torch_compiled, operation.torch)},
        differentiable=3 if operation.has_bias else 2,
        cotangents=int(operation.with_gradient),
    )
    if operation.has_bias and not operation.with_gradient:
        written["jax"][BARE] = product
    x_size, w_size, y_size = rows * features, features * out_features, rows * out_features
    b_size = out_features if operation.has_bias else 0
    size = x_size + w_size + b_size + y_size
    if operation.with_gradient:
        # Reads x, w and dy, and the preactivation that the forward wrote; writes dx, dw, dbias.
        size += 2 * x_size + 2 * w_size + b_size + 3 * y_size
    return Case(
        name=operation.name,
        shape=shape,
        make_inputs=partial(_make_inputs, operation, shape),
        bytes=2 * size,
        flops=2 * rows * features * out_features * (3 if operation.with_gradient else 1),
        bars=_bars(operation, shape),
        **written,
    )


def _make_inputs(operation: _Operation, shape: Shape, key: jax.Array) -> Arrays:
    rows, features, out_features = shape
    cotangents = [(rows, out_features)] if operation.with_gradient else []
    weights = [(features, out_features), *([(out_features,)] if operation.has_bias else [])]
    x, *rest = random_operands(key, [(rows, features), *cotangents], weights)
    dys, parameters = rest[: len(cotangents)], rest[len(cotangents) :]
    return x, *parameters, *dys
