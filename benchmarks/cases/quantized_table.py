"""quantized_matmul by rows of float x, for each format of weights, beside the product in bfloat16.

Cases with bars, and the numbers of rows at which quantised weights pay least, come first, since
`--seconds` may end the run.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jaxfused
from benchmarks.run.case import BARE, MIXED, Arrays, Bar, Case

ON_REQUEST = True
"""True: the cases take minutes and are measured only where their name is given."""

Shape = tuple[int, int, int]
"""Sizes (rows, features, out features)."""

_MATRICES = ((5120, 13824), (3584, 18944), (8192, 8192), (2880, 5760))
_ROWS = (256, 128, 512, 1, 16, 96, 1024, 2048, 4096, 64)
SHAPES: tuple[Shape, ...] = tuple((m, *matrix) for m in _ROWS for matrix in _MATRICES)
QUICK_SHAPES: tuple[Shape, ...] = ((256, 5120, 13824), (16, 8192, 8192))
_CODE_ROWS = (1, 16, 512)


class _Format(NamedTuple):
    stored: str
    """dtype of the stored numbers."""
    bits: int = 8
    """Bits of a number; words of fewer hold several."""
    group: int = 0
    """Input features that share a scale; 0 for all."""
    codebook: str | None = None
    scale: str = "float32"


FORMATS = {
    "int8": _Format("int8"),
    "float8": _Format("float8_e4m3fn"),
    "int4 in groups of 128": _Format("int32", 4, 128),
    "int4 in groups of 64": _Format("int32", 4, 64),
    "int4 in groups of 32": _Format("int32", 4, 32),
    "mxfp4": _Format("uint8", 4, 32, "e2m1", "float8_e8m0fnu"),
    "nvfp4": _Format("uint8", 4, 16, "e2m1"),
    "nf4": _Format("uint8", 4, 64, "nf4"),
}


def cases(quick: bool = False, shapes: Sequence[Shape] | None = None) -> list[Case]:
    """Returns the formats that each shape can have, in the order in which they are measured."""
    chosen = shapes or (QUICK_SHAPES if quick else SHAPES)
    found = [
        _case(name, shape)
        for shape in chosen
        for name, form in FORMATS.items()
        if _fits(form, shape) and (shape[0] in _CODE_ROWS or not form.codebook)
    ]
    return sorted(found, key=lambda case: not case.bars)


def _fits(form: _Format, shape: Shape) -> bool:
    # Packed int4 weights are stored in blocks of 128 features.
    unit = 128 if form.stored == "int32" else form.group or 1
    return shape[1] % unit == 0


def _bars(form: _Format, rows: int) -> tuple[Bar, ...]:
    """Returns targets by the time in bfloat16: shares of it that quantised weights may take."""
    if form.codebook:
        return (Bar(BARE, must=1 / 0.45 if rows <= 16 else 1 / 1.12),)
    if rows <= 64:
        return ()
    must = 1 / 1.02 if rows <= 256 else 1 / 1.10 if rows <= 1024 else 1 / 1.07
    return (Bar(BARE, must=must, aim=1 / 0.95 if rows == 128 else 1 / 1.02),)


def _case(name: str, shape: Shape) -> Case:
    rows, features, out = shape
    form = FORMATS[name]
    groups = features // (form.group or features)
    return Case(
        name=f"{name} weights",
        shape=shape,
        make_inputs=partial(_make_inputs, form, shape),
        truth=partial(_truth, form),
        jax={MIXED: partial(_ours, form), BARE: lambda x, values, scale, dense: x @ dense},
        torch={},
        bytes=features * out * form.bits // 8
        + groups * out * jnp.dtype(form.scale).itemsize
        + 2 * rows * (features + out),
        flops=2 * rows * features * out if rows > 64 else 0,
        bars=_bars(form, rows),
    )


def _make_inputs(form: _Format, shape: Shape, key: jax.Array) -> Arrays:
    """Returns x, random stored numbers [out, ...], their scales, and other weights in bfloat16."""
    rows, features, out = shape
    keys = jax.random.split(key, 4)
    size = (out, features * form.bits // (8 * jnp.dtype(form.stored).itemsize))
    word = jnp.uint32 if form.stored == "int32" else jnp.uint8
    words = jax.random.bits(keys[1], size, word)
    if form.stored.startswith("float8"):
        words = words & 0xBF  # no NaN
    values = jax.lax.bitcast_convert_type(words, jnp.dtype(form.stored))
    size = (features // (form.group or features), out)
    if form.scale == "float32":
        scale = jax.random.uniform(keys[2], size, minval=0.005, maxval=0.02)
    else:
        exponents = jax.random.randint(keys[2], size, 118, 122).astype(jnp.uint8)
        scale = jax.lax.bitcast_convert_type(exponents, jnp.dtype(form.scale))
    x = jax.random.normal(keys[0], (rows, features), jnp.bfloat16)
    return x, values, scale, jax.random.normal(keys[3], (features, out), jnp.bfloat16) / 64


def _array(form: _Format, values: jax.Array, scale: jax.Array) -> jaxfused.QuantizedArray:
    book: Any = jaxfused.quantization.CODEBOOKS[form.codebook] if form.codebook else None
    return jaxfused.QuantizedArray(values, scale, None, -2, "columns", codebook=book)


def _ours(form, x, values, scale, dense):
    return jaxfused.quantized_matmul(x, _array(form, values, scale))


def _truth(form, x, values, scale, dense):
    w = _array(form, values, scale.astype(form.scale))
    return x @ w.dequantize().astype(x.dtype)
