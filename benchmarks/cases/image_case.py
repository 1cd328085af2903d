"""Builds cases of operators over images [B, H, W, C]: bfloat16, forward and with gradients."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import jax
import jax.numpy as jnp

from benchmarks.run.case import Arrays, Bar, Case, Function, functions, torch_compiled

Shape = tuple[int, ...]
FORWARD, WITH_GRADIENTS = "forward", "forward+backward"


@dataclass(frozen=True)
class Operation:
    """An operator with its options and its peers; all of them take x and then the parameters."""

    name: str
    ours: Function
    peers: Mapping[str, Function]
    torch: Function
    parameters: Sequence[Shape] = ()
    """Shapes of the parameters."""
    deviation: float = 1.0
    """Standard deviation of the parameters."""
    is_norm: bool = False
    """True if the first parameter is a scale, whose mean is 1."""


def cases(
    operations: Callable[[Shape], Sequence[Operation]],
    shapes: Sequence[Shape],
    bars: Mapping[tuple[str, Shape], tuple[Bar, ...]],
) -> list[Case]:
    """Returns cases of all operations and shapes, both directions; `bars` by name and shape."""
    return [
        _case(operation, direction, shape, bars.get((f"{operation.name} {direction}", shape), ()))
        for shape in shapes
        for operation in operations(shape)
        for direction in (FORWARD, WITH_GRADIENTS)
    ]


def _case(operation: Operation, direction: str, shape: Shape, bars: tuple[Bar, ...]) -> Case:
    with_gradients = direction == WITH_GRADIENTS
    arrays = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in (shape, *operation.parameters)]
    result = jax.eval_shape(partial(operation.ours, implementation="xla"), *arrays)
    moved = prod(shape) + prod(result.shape)
    if with_gradients:
        # The backward reads x and dy, and writes dx.
        moved += 2 * prod(shape) + prod(result.shape)
    moved += sum(map(prod, operation.parameters))
    return Case(
        name=f"{operation.name} {direction}",
        shape=shape,
        make_inputs=partial(
            _make_inputs, operation, shape, result.shape if with_gradients else None
        ),
        bytes=2 * moved,
        bars=bars,
        error_limit=2e-2 if with_gradients else 1e-2,
        **functions(
            operation.ours,
            operation.peers,
            {"torch_compile": partial(torch_compiled, operation.torch)},
            differentiable=len(arrays),
            cotangents=int(with_gradients),
        ),
    )


def _make_inputs(
    operation: Operation, shape: Shape, result: Shape | None, key: jax.Array
) -> Arrays:
    keys = iter(jax.random.split(key, 2 + len(operation.parameters)))

    def normal(shape: Shape, deviation: float = 1.0, mean: float = 0.0) -> jax.Array:
        return (mean + deviation * jax.random.normal(next(keys), shape)).astype(jnp.bfloat16)

    parameters = [
        normal(s, operation.deviation, float(operation.is_norm and i == 0))
        for i, s in enumerate(operation.parameters)
    ]
    return (normal(shape), *parameters, *(() if result is None else (normal(result),)))
