"""quantized_conv: windows of 3 x 3 over int8, against the convolution in bfloat16."""

from collections.abc import Sequence
from functools import partial
from math import prod

import jax
import jax.numpy as jnp

import jaxfused
from benchmarks.cases.conv import WINDOW, Shape
from benchmarks.run.case import BARE, Arrays, Bar, Case, functions
from jaxfused.runtime.quantized_array import QuantizedArray

_MANY: Shape = (16, 64, 64, 320, 320)
SHAPES: tuple[Shape, ...] = ((64, 56, 56, 64, 64), _MANY, (16, 32, 32, 640, 640))
QUICK_SHAPES = (_MANY,)


def cases(quick: bool = False, shapes: Sequence[Shape] | None = None) -> list[Case]:
    return [_case(shape) for shape in shapes or (QUICK_SHAPES if quick else SHAPES)]


def _ours(values, scale, weights, w_scale, x, w, *, implementation):
    del x, w
    return jaxfused.quantized_conv(
        QuantizedArray(values, scale, None, -1),
        QuantizedArray(weights, w_scale, None, -2, "columns"),
        kernel_size=WINDOW,
        out_dtype=jnp.bfloat16,
        implementation=implementation,
    )


def _in_bfloat16(values, scale, weights, w_scale, x, w):
    del values, scale, weights, w_scale
    return jaxfused.conv(x, w)


def _case(shape: Shape) -> Case:
    *pixels, channels, features = shape
    taps = WINDOW ** (len(pixels) - 1)
    written = functions(_ours, {}, {}, differentiable=0, cotangents=0)
    written["jax"][BARE] = _in_bfloat16
    return Case(
        name="quantized_conv, int8 x int8",
        shape=shape,
        make_inputs=partial(_make_inputs, shape),
        bytes=prod(pixels) * (channels + 2 * features) + taps * channels * features + 4 * features,
        flops=2 * prod(pixels) * taps * channels * features,
        bars=(Bar(BARE, must=1.4),) if shape == _MANY else (),
        **written,
    )


def _make_inputs(shape: Shape, key: jax.Array) -> Arrays:
    """Returns the quantised operands, and x and w in bfloat16 for the float convolution."""
    *pixels, channels, features = shape
    of_x, of_w = jax.random.split(key)
    x = jax.random.normal(of_x, (*pixels, channels), jnp.bfloat16)
    window = (WINDOW,) * (len(pixels) - 1)
    w = jax.random.normal(of_w, (*window, channels, features), jnp.bfloat16)
    w = w * (prod(window) * channels) ** -0.5
    q = jaxfused.quantize(x, axis=-1, per_tensor=True)
    weights = jaxfused.quantize(w.reshape(-1, features), layout="columns")
    return q.values, q.scale, weights.values, weights.scale, x, w
