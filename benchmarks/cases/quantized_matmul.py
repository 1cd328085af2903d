"""quantized_matmul: float x with weights of 8 and 4 bits, and products of quantised x."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import jaxfused
from benchmarks.cases.linear import random_operands
from benchmarks.run.case import BARE, TERAFLOPS, Arrays, Bar, Case, Function, functions
from jaxfused.runtime.quantized_array import QuantizedArray

Shape = tuple[int, int, int]
"""Sizes (rows, features, out features)."""

_DECODE: tuple[Shape, ...] = ((1, 4096, 14336), (16, 4096, 14336), (64, 8192, 8192))
_PREFILL: tuple[Shape, ...] = ((4096, 4096, 14336), (8192, 8192, 8192))
QUICK_SHAPES = (_DECODE[1], _PREFILL[1])


@dataclass(frozen=True)
class _Operation:
    name: str
    w_dtype: str
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of quantize for w."""
    x_dtype: str | None = None
    """Dtype of x, which has groups along its features if w has groups or blocks."""
    shapes: tuple[Shape, ...] = _DECODE + _PREFILL


_OPERATIONS = (
    _Operation("int8 weights", "int8"),
    _Operation("int4 weights in groups of 128", "int4", {"group_size": 128}),
    _Operation("float8 weights", "float8_e4m3fn"),
    _Operation("int8 x int8", "int8", x_dtype="int8", shapes=_PREFILL),
    _Operation("float8 x float8", "float8_e4m3fn", x_dtype="float8_e4m3fn", shapes=_PREFILL),
    _Operation(
        "float8 x float8 in groups of 128",
        "float8_e4m3fn",
        {"group_size": 128},
        "float8_e4m3fn",
        _PREFILL,
    ),
    _Operation(
        "float8 x float8 in blocks of 128 x 128",
        "float8_e4m3fn",
        {"group_size": (128, 128)},
        "float8_e4m3fn",
        _PREFILL,
    ),
)


def cases(quick: bool = False, shapes: Sequence[Shape] | None = None) -> list[Case]:
    """Returns every operation at every shape, in the order in which they are measured."""
    return [
        _case(operation, shape)
        for operation in _OPERATIONS
        for shape in shapes or operation.shapes
        if not quick or shape in QUICK_SHAPES
    ]


def _bars(operation: _Operation, shape: Shape) -> tuple[Bar, ...]:
    """Returns the bars against the product in bfloat16."""
    if operation.x_dtype is None:
        few = shape[0] <= 64
        if operation.w_dtype == "int4":
            must = (1 / 0.48 if shape[0] <= 16 else 1 / 0.55) if few else 1 / 1.1
        else:
            must = 1 / 0.65 if few else 1 / 1.1
        return (Bar(BARE, must=must),)
    if shape != _PREFILL[1]:
        return ()
    if operation.options:
        return (Bar(TERAFLOPS, must=1150),)
    return (Bar(TERAFLOPS, must=1300 if operation.w_dtype == "int8" else None, aim=1450),)


def _sides(operation: _Operation, features: int) -> tuple[int, int]:
    """Returns the features and out features that share a scale."""
    size = operation.options.get("group_size", features)
    return size if isinstance(size, tuple) else (size, 1)


def _bare(*operands: jax.Array) -> jax.Array:
    return operands[-2] @ operands[-1]


def _of_float_x(values, scale, x, w, *, implementation):
    del w
    q = QuantizedArray(values, scale, None, -2, "columns")
    return jaxfused.quantized_matmul(x, q, implementation=implementation)


def _of_quantized_x(x_values, x_scale, values, scale, x, w, *, implementation):
    del x, w
    return jaxfused.quantized_matmul(
        QuantizedArray(x_values, x_scale, None, -1),
        QuantizedArray(values, scale, None, -2, "columns"),
        out_dtype=jnp.bfloat16,
        implementation=implementation,
    )


def _case(operation: _Operation, shape: Shape) -> Case:
    rows, features, out_features = shape
    ours: Function = _of_float_x if operation.x_dtype is None else _of_quantized_x
    written = functions(ours, {}, {}, differentiable=0, cotangents=0)
    written["jax"][BARE] = _bare
    bits = 4 if operation.w_dtype == "int4" else 8
    group, columns = _sides(operation, features)
    x_bytes = 2 if operation.x_dtype is None else 1
    return Case(
        name=f"quantized_matmul, {operation.name}",
        shape=shape,
        make_inputs=partial(_make_inputs, operation, shape),
        bytes=features * out_features * bits // 8
        + 4 * (features // group) * (out_features // columns)
        + rows * (features * x_bytes + 2 * out_features),
        flops=2 * rows * features * out_features if rows > 64 else 0,
        bars=_bars(operation, shape),
        **written,
    )


def _make_inputs(operation: _Operation, shape: Shape, key: jax.Array) -> Arrays:
    """Returns the quantised operands, and x and w in bfloat16 for the plain product."""
    rows, features, out_features = shape
    x, w = random_operands(key, [(rows, features)], [(features, out_features)])
    q = jaxfused.quantize(w, operation.w_dtype, layout="columns", **operation.options)
    inputs = [q.values, q.scale, x, w]
    if operation.x_dtype is not None:
        group, _ = _sides(operation, features)
        quantized = jaxfused.quantize(x, operation.x_dtype, axis=-1, group_size=group)
        inputs = [quantized.values, quantized.scale, *inputs]
    return tuple(inputs)
