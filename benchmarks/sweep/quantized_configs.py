"""Cases of the quantised operators and of products in float8, and how they are drawn."""

from dataclasses import dataclass, replace
from typing import ClassVar

from benchmarks.run.draw import MOST_ELEMENTS, Draw
from benchmarks.sweep import image_configs
from benchmarks.sweep.image_configs import Conv
from benchmarks.sweep.product_sizes import ACTIVATIONS, hidden_features, product_fits

_SMOOTH = tuple(name for name in ACTIVATIONS if name != "relu")
"""Activations for fp8. Not relu, since errors of float8 products change the sign of too many inputs."""

_WORD_BLOCK = 128
"""Input features in a block of packed int4 weights in layout "columns"."""


@dataclass(frozen=True)
class QuantizedMatmul:
    """quantized_matmul of float x [rows, width], or the gated unit of two such products."""

    rows: int
    width: int
    out: int
    dtype: str
    weights: str
    """Format of the weights."""
    group: int
    """Input features that share a scale; 0 for one scale a column."""
    symmetric: bool
    layout: str
    bias: bool
    activation: str | None
    residual: bool
    gated: bool = False
    operator: ClassVar[str] = "quantized_matmul"

    def fits(self) -> bool:
        products = 2 if self.gated else 1
        fits = product_fits(products * self.rows, self.width, self.out)
        return fits and products * self.width * self.out <= MOST_ELEMENTS

    def tiny(self) -> "QuantizedMatmul":
        width = _legal_width(2 * self.group or 16, self.weights, self.layout, self.group)
        return replace(self, rows=min(self.rows, 3), width=width, out=24)


def quantized_matmul(draw: Draw) -> QuantizedMatmul:
    """Draws decoding (few rows) or prefill (many), with weights of language and vision models."""
    weights = draw.pick(("int8", "int8", "int4", "int4", "float8_e4m3fn"))
    layout = "columns" if draw.chance(0.85) else "rows"
    group = draw.pick((0, 32, 64, 128, 128)) if weights == "int4" else draw.pick((0, 0, 0, 128))
    width, out = _width_and_out(draw)
    # The gated unit's kernel reads only weights in layout "columns".
    gated = layout == "columns" and draw.chance(0.15)
    return QuantizedMatmul(
        rows=_rows(draw),
        width=_legal_width(width, weights, layout, group),
        out=out,
        dtype=draw.dtype("float32"),
        weights=weights,
        group=group,
        symmetric=weights == "float8_e4m3fn" or draw.chance(0.75),
        layout=layout,
        bias=draw.chance(0.3),
        activation="silu" if gated else draw.pick((None, None, None, *ACTIVATIONS)),
        residual=not gated and draw.chance(0.2),
        gated=gated,
    )


def _legal_width(width: int, weights: str, layout: str, group: int) -> int:
    unit = group or 1
    if weights == "int4":
        unit = _WORD_BLOCK if layout == "columns" else max(unit, 2)
    return max(unit, width // unit * unit)


def _rows(draw: Draw) -> int:
    """Draws the number of rows: up to 64, as in decoding, in 45 % of the cases, else up to 16384."""
    if draw.chance(0.45):
        return draw.pick((1, 1, 2, 4, 8, 16, 32, 64)) if draw.chance(0.6) else draw.size(1, 64)
    return draw.rounded(1, 16384)


def _width_and_out(draw: Draw) -> tuple[int, int]:
    """Draws (width, out), mostly multiples of 16; one width in 16 is odd."""
    width = draw.width(16384)
    out = draw.shard(hidden_features(draw, width)) if draw.chance(0.6) else draw.width(16384)
    return (out, width) if draw.chance(0.3) else (width, out)


@dataclass(frozen=True)
class QuantizedProduct:
    """quantized_matmul of x [rows, width] and weights in one format, int8 or float8."""

    rows: int
    width: int
    out: int
    format: str
    group: int
    """Features that share a scale in x and in the weights; 0 for one scale a row and a column."""
    per_tensor: bool
    """True if one scale serves all of x."""
    out_dtype: str
    bias: bool
    activation: str | None
    residual: bool
    layout: str = "columns"
    columns: int = 1
    """Columns of the weights that share a scale; 1 in all cases that are drawn at random."""
    operator: ClassVar[str] = "quantized_product"

    def fits(self) -> bool:
        fits = product_fits(self.rows, self.width, self.out)
        return fits and self.width * self.out <= MOST_ELEMENTS

    def tiny(self) -> "QuantizedProduct":
        return replace(self, rows=min(self.rows, 3), width=2 * self.group or 16, out=24)


def quantized_product(draw: Draw) -> QuantizedProduct:
    """Draws a product of quantised x and weights; in 15 % of float8, 128 features share a scale."""
    width, out = _width_and_out(draw)
    number = draw.pick(("int8", "float8_e4m3fn"))
    group = 128 if number == "float8_e4m3fn" and draw.chance(0.15) else 0
    return QuantizedProduct(
        rows=_rows(draw),
        width=_legal_width(width, number, "columns", group),
        out=out,
        format=number,
        group=group,
        per_tensor=group == 0 and draw.chance(0.25),
        out_dtype=draw.dtype(),
        bias=draw.chance(0.3),
        activation=draw.pick((None, None, None, *ACTIVATIONS)),
        residual=draw.chance(0.2),
        layout="columns" if draw.chance(0.9) else "rows",
    )


@dataclass(frozen=True)
class QuantizedRows:
    """quantize_rows of [rows, width], or quantize with one scale for all of it."""

    rows: int
    width: int
    dtype: str
    format: str
    per_tensor: bool
    operator: ClassVar[str] = "quantize_rows"

    def fits(self) -> bool:
        return self.rows * self.width <= MOST_ELEMENTS

    def tiny(self) -> "QuantizedRows":
        return replace(self, rows=min(self.rows, 3), width=24)


_ROW_FORMATS = ("int8", "int8", "int8", "float8_e4m3fn", "float8_e4m3fn", "float8_e5m2")


def quantize_rows(draw: Draw) -> QuantizedRows:
    """Draws activations to quantise for a product."""
    return QuantizedRows(
        rows=_rows(draw),
        width=draw.width(),
        dtype=draw.dtype("float32"),
        format=draw.pick(_ROW_FORMATS),
        per_tensor=draw.chance(0.2),
    )


@dataclass(frozen=True)
class QuantizedNorm:
    """layer_norm or rms_norm of [rows, width] whose result is quantised row by row."""

    norm: str
    rows: int
    width: int
    dtype: str
    format: str
    residual: bool
    bias: bool
    operator: ClassVar[str] = "quantized_norm"

    def fits(self) -> bool:
        return self.rows * self.width <= MOST_ELEMENTS

    def tiny(self) -> "QuantizedNorm":
        return replace(self, rows=min(self.rows, 3), width=24)


def quantized_norm(draw: Draw) -> QuantizedNorm:
    """Draws a norm whose quantised result a product reads."""
    norm = draw.pick(("layer_norm", "rms_norm", "rms_norm"))
    return QuantizedNorm(
        norm=norm,
        rows=_rows(draw),
        width=draw.width(),
        dtype=draw.dtype("float32"),
        format=draw.pick(_ROW_FORMATS),
        residual=draw.chance(0.5),
        bias=norm == "layer_norm" and draw.chance(0.9),
    )


@dataclass(frozen=True)
class QuantizedConv(Conv):
    """quantized_conv: a `Conv` whose x and weights are quantised; `param_dtype` is the bias's."""

    inputs: str
    """Format of x."""
    weights: str
    scale_of_image: bool
    """True if each image has its own scale; else all share one."""
    operator: ClassVar[str] = "quantized_conv"


def quantized_conv(draw: Draw) -> QuantizedConv:
    """Draws the convolutions of `image_configs.conv`, mostly of int8."""
    inputs = draw.pick(("int8", "int8", "int8", "float8_e4m3fn"))
    return QuantizedConv(
        **vars(image_configs.conv(draw)),
        inputs=inputs,
        weights=inputs if draw.chance(0.9) else "int8",
        scale_of_image=draw.chance(0.2),
    )


# --- products of float operands in float8 ---------------------------------------------------------


@dataclass(frozen=True)
class Fp8Linear:
    """linear over [rows, width] with precision="fp8"."""

    rows: int
    width: int
    out: int
    dtype: str
    param_dtype: str
    bias: bool
    activation: str | None
    residual: bool
    operator: ClassVar[str] = "fp8_linear"

    def fits(self) -> bool:
        return product_fits(self.rows, self.width, self.out)

    def tiny(self) -> "Fp8Linear":
        return replace(self, rows=16, width=32, out=48)


def fp8_linear(draw: Draw) -> Fp8Linear:
    """Draws layers of a network in training; one width in 16 is odd."""
    width, out = _width_and_out(draw)
    return Fp8Linear(
        rows=draw.rounded(1024, 65536),
        width=width,
        out=out,
        dtype=draw.dtype(),
        param_dtype=draw.pick(("same", "float32")),
        bias=draw.chance(0.6),
        activation=draw.pick((None, None, None, *_SMOOTH)),
        residual=draw.chance(0.3),
    )


@dataclass(frozen=True)
class Fp8MLP:
    """mlp over [rows, width] with precision="fp8"."""

    rows: int
    width: int
    hidden: int
    dtype: str
    param_dtype: str
    bias: bool
    activation: str
    residual: bool
    save: str
    operator: ClassVar[str] = "fp8_mlp"

    def fits(self) -> bool:
        return product_fits(2 * self.rows, self.width, self.hidden)

    def tiny(self) -> "Fp8MLP":
        return replace(self, rows=16, width=32, hidden=48)


def fp8_mlp(draw: Draw) -> Fp8MLP:
    """Draws MLPs of a network in training."""
    width = draw.width(8192)
    return Fp8MLP(
        rows=draw.rounded(1024, 65536),
        width=width,
        hidden=draw.shard(hidden_features(draw, width)),
        dtype=draw.dtype(),
        param_dtype=draw.pick(("same", "float32")),
        bias=draw.chance(0.7),
        activation=draw.pick(_SMOOTH),
        residual=draw.chance(0.3),
        save=draw.pick(("hidden", "hidden", "preactivation", "inputs")),
    )
