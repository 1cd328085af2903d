"""conv and quantized_conv with any combination of their options."""

import math
from typing import Any

import jax
import jax.numpy as jnp

import jaxfused
from benchmarks.fuzz.problem import (
    DTYPES,
    RELU,
    How,
    Operand,
    Options,
    Problem,
    activation,
    features,
    parameter,
    present,
    rng_of,
)
from benchmarks.run.draw import Draw
from jaxfused.ops.conv import conv as conv_operator
from jaxfused.runtime.rectified import Rectified

_MOST_PIXELS = 2**12
"""Largest number of pixels of all images together."""


def draw_conv(draw: Draw) -> Options:
    drawn = _draw_layer(draw)
    if draw.chance(0.15):
        drawn |= _enlarging(draw, drawn)
    # Channels of the first array where x is two concatenated arrays.
    first = draw.pick((64, draw.size(1, 200))) if draw.chance(0.15) else 0
    return drawn | dict(first=first if first < drawn["channels"] else 0)


def _draw_layer(draw: Draw) -> Options:
    return _draw_window(draw) | dict(
        return_input=draw.chance(0.3), rectified=draw.chance(0.3), statistics=draw.chance(0.2)
    )


def _enlarging(draw: Draw, drawn: Options) -> Options:
    """Draws a transposed convolution whose windows do not overlap."""
    window = [draw.pick((1, 2, 2, 3, 4)) for _ in drawn["window"]]
    sides = [min(side, 40 // size) for side, size in zip(drawn["sides"], window, strict=True)]
    return dict(
        sides=sides,
        window=window,
        input_dilation=window,
        padding=[[size - 1, size - 1] for size in window],
        out=draw.pick((32, 64, 96, drawn["out"])),
        channels=draw.pick((8, 64, 72, drawn["channels"])),
        groups=1,
        strides=1,
        kernel_dilation=1,
    )


def draw_depthwise_conv(draw: Draw) -> Options:
    """Draws mostly convolutions with the windows and groups that depthwise kernels support."""
    channels = features(draw, 300)
    window = draw.pick(((3,), (4,), (7,), (3, 3), (5, 5), (7, 7), (7, 7), (5, 3)))
    dilated = draw.chance(0.1)
    return _draw_layer(draw) | dict(
        sides=_sides(draw, len(window)),
        window=list(window),
        channels=channels,
        out=channels * draw.pick((*(1,) * 8, 2)),
        groups=channels,
        strides=draw.pick((1, 1, 1, 1, 2)),
        input_dilation=1,
        kernel_dilation=2 if dilated else 1,
        padding=draw.pick(("SAME", "SAME", "SAME", "VALID", 1)),
    )


def _draw_window(draw: Draw) -> Options:
    axes, after = draw.pick((1, 2, 2, 2, 3)), activation(draw, 0.4)
    sides = _sides(draw, axes)
    groups = draw.pick((1, 1, 1, 2, 4))
    channels, out = (
        groups * draw.pick((1, 3, 4, 8, 64, 72, features(draw, 200))) for _ in range(2)
    )
    input_dilation = draw.pick((1, 1, 1, 1, 1, 2))
    # "SAME" does not define the padding of a transposed convolution.
    paddings = ("SAME", "SAME", "VALID", "CIRCULAR", 1) if input_dilation == 1 else (0, 1, 2)
    return dict(
        batch=draw.size(1, min(512, max(1, _MOST_PIXELS // math.prod(sides)))),
        sides=sides,
        window=[draw.pick((1, 2, 3, 3, 5)) for _ in range(axes)],
        channels=channels,
        out=out,
        groups=groups,
        strides=draw.pick((1, 1, 1, 2, 2, 3)),
        input_dilation=input_dilation,
        kernel_dilation=draw.pick((1, 1, 1, 2)),
        padding=draw.pick(paddings),
        dtype=draw.pick(DTYPES),
        param_dtype=draw.pick(("float32", "bfloat16")),
        bias=after == RELU or draw.chance(0.6),
        activation=after,
        residual=draw.chance(0.3),
    )


def _sides(draw: Draw, axes: int) -> list[int]:
    """Draws the sides of an image; now and then one is 1, or the image spans many tiles."""
    if axes == 2 and draw.chance(0.1):
        return [draw.size(40, 160) for _ in range(2)]
    least = 1 if draw.chance(0.2) else 4
    return [draw.size(least, 40 if axes < 3 else 8) for _ in range(axes)]


def _geometry(o: Options) -> dict[str, Any]:
    return dict(
        strides=o["strides"],
        input_dilation=o.get("input_dilation", 1),
        kernel_dilation=o["kernel_dilation"],
        padding=o["padding"],
        feature_group_count=o["groups"],
    )


def _input(x: jax.Array, o: Options) -> Any:
    if o.get("first"):
        return jaxfused.Concatenated(x[..., : o["first"]], x[..., o["first"] :])
    return Rectified(x) if o.get("rectified") else x


def conv(options: Options) -> Problem:
    o, geometry = options, _geometry(options)
    inner = o["channels"] // o["groups"]
    taps = inner
    for size in o["window"]:
        taps *= size
    x = Operand((o["batch"], *o["sides"], o["channels"]), o["dtype"])
    w = Operand((*o["window"], inner, o["out"]), o["param_dtype"], 0.0, taps**-0.5)

    def run(operands: Any, constants: Any, how: How) -> Any:
        del constants
        # conv has no precision argument, so this context sets the precision.
        with jax.default_matmul_precision("highest" if how.exact else "default"):
            y, x, statistics = conv_operator.run(
                _input(operands["x"], o),
                operands["w"],
                operands.get("bias"),
                window=geometry,
                activation=o["activation"],
                residual=operands.get("residual"),
                return_input=o.get("return_input", False),
                statistics=o.get("statistics", False),
                implementation=how.implementation,
            )
        returned_input = (x,) * o.get("return_input", False)
        return (y, *returned_input, *(_statistics(y, statistics) if o.get("statistics") else ()))

    y = jax.eval_shape(
        lambda x, w: jaxfused.conv(x, w, **geometry),
        *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (x, w)),
    )
    operands = present(
        x=x,
        w=w,
        bias=parameter(o["out"], o["param_dtype"] if o["bias"] else None),
        residual=Operand(y.shape, o["dtype"]) if o["residual"] else None,
    )
    kinks = ("bias",) if o["activation"] == RELU else ()
    eps = float(jnp.finfo(o["dtype"]).eps)

    def noise(operands: Any, constants: Any, results: Any, cotangents: Any) -> dict[str, jax.Array]:
        """Returns the allowed noise of the bias's gradient, a sum of gradients rounded to x's dtype."""
        if "bias" not in operands or cotangents is None:
            return {}
        before = jnp.zeros(results[0].shape, operands["x"].dtype)

        def shifted(before: jax.Array) -> jax.Array:
            moved = operands | {"residual": operands.get("residual", 0.0) + before}
            return run(moved, constants, How("xla", exact=True))[0]

        (dz,) = jax.vjp(shifted, before)[1](cotangents[0])
        return {"bias": eps * jnp.sqrt(jnp.sum(dz**2, tuple(range(dz.ndim - 1))))}

    return Problem(run, operands, {}, kinks, tf32=o["dtype"] == "float32", noise=noise)


def _statistics(y: jax.Array, statistics: Any) -> Any:
    """Returns y's mean and variance, without gradient; computes them if the kernel returned None."""
    if statistics is None:
        values, axes = y.astype(jnp.float32), tuple(range(y.ndim - 1))
        statistics = values.mean(axes), values.var(axes)
    return jax.lax.stop_gradient(statistics)


def draw_quantized_conv(draw: Draw) -> Options:
    options = _draw_window(draw)
    weights = draw.pick(("int8", "int8", "int8", "int4", "float8_e4m3fn"))
    return options | dict(
        # int4 values are stored in pairs, so the number of channels must be even.
        channels=options["channels"] * (2 if weights == "int4" else 1),
        weights=weights,
        quantized_x=draw.pick(("int8", "int8", "int8", "float8_e4m3fn", None)),
        scale_of_image=draw.chance(0.3),
    )


def quantized_conv(options: Options) -> Problem:
    o, rng = options, rng_of(options)
    shape = (*o["window"], o["channels"] // o["groups"], o["out"])
    taps = math.prod(shape[:-1])
    w = jaxfused.quantize(
        jnp.asarray(taps**-0.5 * rng.normal(size=(taps, o["out"])), jnp.float32),
        o["weights"],
        layout="rows",
    )
    geometry = _geometry(o)
    x = Operand((o["batch"], *o["sides"], o["channels"]), o["dtype"])
    constants: dict[str, Any] = {"w": w}
    if o["quantized_x"]:
        values = jnp.asarray(rng.normal(size=x.shape), jnp.float32)
        axes = tuple(range(1, values.ndim)) if o["scale_of_image"] else None
        largest = jnp.abs(values).max(axis=axes, keepdims=True)
        scale = largest / (127.0 if o["quantized_x"] == "int8" else 448.0)
        constants["x"] = jaxfused.quantize(values, o["quantized_x"], axis=-1, scale=scale)

    def run(operands: Any, constants: Any, how: How) -> Any:
        x, w, bias = operands.get("x", constants.get("x")), constants["w"], operands.get("bias")
        rest = dict(
            activation=o["activation"],
            residual=operands.get("residual"),
            implementation=how.implementation,
            **geometry,
        )
        if not how.exact:
            return jaxfused.quantized_conv(
                x, w, bias, kernel_size=o["window"], out_dtype=o["dtype"], **rest
            )
        # The truth convolves the dequantised numbers.
        x = x.dequantize() if o["quantized_x"] else x
        with jax.default_matmul_precision("highest"):
            return jaxfused.conv(x, w.dequantize().reshape(shape), bias, **rest)

    y = jax.eval_shape(
        lambda x, w: jaxfused.conv(x, w, **geometry),
        jax.ShapeDtypeStruct(x.shape, jnp.float32),
        jax.ShapeDtypeStruct(shape, jnp.float32),
    )
    operands = present(
        x=None if o["quantized_x"] else x,
        bias=parameter(o["out"], "float32" if o["bias"] else None),
        residual=Operand(y.shape, o["dtype"]) if o["residual"] else None,
    )
    kinks = ("bias",) if o["activation"] == RELU else ()
    return Problem(run, operands, constants, kinks, tf32=True, with_gradient=bool(operands))
