"""quantized_matmul: float x with weights of 8 and 4 bits, and products of quantised x."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax

from benchmarks.cases import of_config
from benchmarks.run.case import BARE, TERAFLOPS, Bar, Case
from benchmarks.sweep.quantized_configs import QuantizedMatmul, QuantizedProduct

Shape = tuple[int, int, int]
"""Sizes (rows, features, out features)."""

_DECODE: tuple[Shape, ...] = ((1, 4096, 14336), (16, 4096, 14336), (64, 8192, 8192))
_PREFILL: tuple[Shape, ...] = ((4096, 4096, 14336), (8192, 8192, 8192))
QUICK_SHAPES = (_DECODE[1], _PREFILL[1])


@dataclass(frozen=True)
class _Operation:
    name: str
    w_dtype: str
    group: int = 0
    """Input features that share a scale in w and in quantised x; 0 for all of them."""
    columns: int = 1
    """Columns of w that share a scale."""
    both: bool = False
    """True if x is quantised too, to w's dtype."""

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return _PREFILL if self.both else _DECODE + _PREFILL


_OPERATIONS = (
    _Operation("int8 weights", "int8"),
    _Operation("int4 weights in groups of 128", "int4", 128),
    _Operation("float8 weights", "float8_e4m3fn"),
    _Operation("int8 x int8", "int8", both=True),
    _Operation("float8 x float8", "float8_e4m3fn", both=True),
    _Operation("float8 x float8 in groups of 128", "float8_e4m3fn", 128, both=True),
    _Operation("float8 x float8 in blocks of 128 x 128", "float8_e4m3fn", 128, 128, both=True),
)


def cases(quick: bool = False, shapes: Sequence[Shape] | None = None) -> list[Case]:
    """Returns a case for each operation at each shape, in the order of measurement."""
    return [
        _case(operation, shape)
        for operation in _OPERATIONS
        for shape in shapes or operation.shapes
        if not quick or shape in QUICK_SHAPES
    ]


def _bars(operation: _Operation, shape: Shape) -> tuple[Bar, ...]:
    """Returns the bars: against the product in bfloat16, or in TFLOP/s."""
    if not operation.both:
        few = shape[0] <= 64
        if operation.w_dtype == "int4":
            must = (1 / 0.48 if shape[0] <= 16 else 1 / 0.55) if few else 1 / 1.1
        else:
            must = 1 / 0.65 if few else 1 / 1.1
        return (Bar(BARE, must=must),)
    if shape != _PREFILL[1]:
        return ()
    if operation.group:
        return (Bar(TERAFLOPS, must=1150),)
    return (Bar(TERAFLOPS, must=1300 if operation.w_dtype == "int8" else None, aim=1450),)


def _bare(*operands: jax.Array) -> jax.Array:
    """Multiplies the float operands, which come last."""
    return operands[-2] @ operands[-1]


def _case(operation: _Operation, shape: Shape) -> Case:
    rows, features, out_features = shape
    sizes = dict(rows=rows, width=features, out=out_features, group=operation.group)
    config: QuantizedMatmul | QuantizedProduct
    if operation.both:
        config = QuantizedProduct(
            **sizes,
            format=operation.w_dtype,
            columns=operation.columns,
            per_tensor=False,
            out_dtype="bfloat16",
            bias=False,
            activation=None,
            residual=False,
        )
    else:
        config = QuantizedMatmul(
            **sizes,
            dtype="bfloat16",
            weights=operation.w_dtype,
            symmetric=True,
            layout="columns",
            bias=False,
            activation=None,
            residual=False,
        )
    bits, groups = (
        4 if operation.w_dtype == "int4" else 8,
        features // (operation.group or features),
    )
    return of_config.case(
        f"quantized_matmul, {operation.name}",
        shape,
        config,
        bytes=features * out_features * bits // 8
        + 4 * groups * (out_features // operation.columns)
        + rows * (features * (1 if operation.both else 2) + 2 * out_features),
        flops=2 * rows * features * out_features if rows > 64 else 0,
        bars=_bars(operation, shape),
        peers={BARE: _bare},
    )
