"""linear, mlp, gated_mlp, quantized_matmul and conv with any combination of their options."""

import math
from typing import Any

import jax
import jax.numpy as jnp

import jaxfused
from benchmarks.draw import Draw
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
    rows,
    weight,
)

_MOST_ROWS = 2500
_MOST_FEATURES = 1300


def _draw_product(draw: Draw) -> Options:
    """What products share: rows, dtypes, the residual."""
    dtype = draw.pick(DTYPES)
    return dict(
        rows=rows(draw, _MOST_ROWS),
        width=features(draw, _MOST_FEATURES),
        out=features(draw, _MOST_FEATURES),
        dtype=dtype,
        param_dtype=draw.pick((dtype, dtype, "float32")),
        residual=draw.pick((dtype, "float32", "bfloat16")) if draw.chance(0.35) else None,
        out_dtype=draw.pick(("float32", "bfloat16", "float16")) if draw.chance(0.15) else None,
        precision="highest" if draw.chance(0.1) else None,
    )


def _x(o: Options) -> Operand:
    return Operand((*o["rows"], o["width"]), o["dtype"])


def _residual(o: Options) -> Operand | None:
    return Operand((*o["rows"], o["out"]), o["residual"]) if o["residual"] else None


def _may_be_tf32(o: Options) -> bool:
    return o["dtype"] == "float32" and o.get("precision") is None


def _shared(o: Options, operands: Any, how: How) -> dict[str, Any]:
    return dict(
        activation=o["activation"],
        residual=operands.get("residual"),
        precision="highest" if how.exact else o["precision"],
        out_dtype=how.out_dtype(o["out_dtype"]),
        implementation=how.implementation,
    )


# --- linear ---------------------------------------------------------------------------------------


def draw_linear(draw: Draw) -> Options:
    after = activation(draw)
    has_bias = after == RELU or draw.chance(0.6)
    return _draw_product(draw) | dict(activation=after, bias=has_bias)


def linear(options: Options) -> Problem:
    o = options
    operands = present(
        x=_x(o),
        w=weight((o["width"], o["out"]), o["param_dtype"]),
        bias=parameter(o["out"], o["param_dtype"] if o["bias"] else None),
        residual=_residual(o),
    )

    def run(operands: Any, constants: Any, how: How) -> Any:
        del constants
        x, w, bias = operands["x"], operands["w"], operands.get("bias")
        return jaxfused.linear(x, w, bias, **_shared(o, operands, how))

    kinks = ("bias",) if o["activation"] == RELU else ()
    return Problem(run, operands, {}, kinks, tf32=_may_be_tf32(o))


# --- perceptrons ----------------------------------------------------------------------------------


def draw_mlp(draw: Draw) -> Options:
    after = activation(draw, 0.95)
    return _draw_product(draw) | dict(
        hidden=features(draw, _MOST_FEATURES),
        activation=after,
        bias=after == RELU or draw.chance(0.6),
        out_bias=draw.chance(0.6),
        save=draw.pick(("preactivation", "inputs", "hidden")),
        stacked=draw.chance(0.3),
    )


def mlp(options: Options) -> Problem:
    o = options
    dtype = o["param_dtype"]
    operands = present(
        x=_x(o),
        w1=weight((o["width"], o["hidden"]), dtype),
        b1=parameter(o["hidden"], dtype if o["bias"] else None),
        w2=weight((o["hidden"], o["out"]), dtype),
        b2=parameter(o["out"], dtype if o["out_bias"] else None),
        residual=_residual(o),
    )

    def run(operands: Any, constants: Any, how: How) -> Any:
        del constants
        names = ("x", "w1", "b1", "w2", "b2")
        layers = [operands.get(name) for name in names]
        return jaxfused.mlp(*layers, save=o["save"], **_shared(o, operands, how))

    kinks = ("b1",) if o["activation"] == RELU else ()
    return Problem(run, operands, {}, kinks, tf32=_may_be_tf32(o))


def gated_mlp(options: Options) -> Problem:
    o = options
    dtype, hidden = o["param_dtype"], o["hidden"]
    bias = dtype if o["bias"] else None
    columns = hidden * (2 if o["stacked"] else 1)
    operands = present(
        x=_x(o),
        w_gate=weight((o["width"], columns), dtype),
        b_gate=parameter(columns, bias),
        w_up=None if o["stacked"] else weight((o["width"], hidden), dtype),
        b_up=None if o["stacked"] else parameter(hidden, bias),
        w_down=weight((hidden, o["out"]), dtype),
        b_down=parameter(o["out"], dtype if o["out_bias"] else None),
        residual=_residual(o),
    )

    def run(operands: Any, constants: Any, how: How) -> Any:
        del constants
        weights = [operands.get(name) for name in ("x", "w_gate", "w_up", "w_down")]
        biases = {name: operands.get(name) for name in ("b_gate", "b_up", "b_down")}
        return jaxfused.gated_mlp(*weights, **biases, save=o["save"], **_shared(o, operands, how))

    # Of a stacked bias the part of w_up is shifted too, which changes little and nothing's kinks.
    kinks = ("b_gate",) if o["activation"] == RELU else ()
    return Problem(run, operands, {}, kinks, tf32=_may_be_tf32(o))


# --- quantised weights ----------------------------------------------------------------------------


def draw_quantized_matmul(draw: Draw) -> Options:
    after = activation(draw)
    dtype = draw.pick(("int8", "int8", "int4", "float8_e4m3fn", "float8_e5m2"))
    group = draw.pick((None, None, 32, 64, 128))
    width = features(draw, _MOST_FEATURES)
    unit = group or (2 if dtype == "int4" else 1)
    options = _draw_product(draw) | dict(
        activation=after,
        bias=after == RELU or draw.chance(0.6),
        weights=dtype,
        group_size=group,
        symmetric=dtype.startswith("float8") or draw.chance(0.6),
        quantized_x=draw.pick(("int8", "float8_e4m3fn")) if draw.chance(0.3) else None,
    )
    return options | dict(width=max(1, width // unit) * unit)


def quantized_matmul(options: Options) -> Problem:
    o, rng = options, rng_of(options)
    deviation = o["width"] ** -0.5
    w = jaxfused.quantize(
        jnp.asarray(deviation * rng.normal(size=(o["width"], o["out"])), jnp.float32),
        o["weights"],
        group_size=o["group_size"],
        symmetric=o["symmetric"],
    )
    constants: dict[str, Any] = {"w": w}
    if o["quantized_x"]:
        x = jnp.asarray(rng.normal(size=(*o["rows"], o["width"])), jnp.float32)
        constants["x"] = jaxfused.quantize_rows(x, o["quantized_x"])
    operands = present(
        x=None if o["quantized_x"] else _x(o),
        bias=parameter(o["out"], "float32" if o["bias"] else None),
        residual=_residual(o),
    )

    def run(operands: Any, constants: Any, how: How) -> Any:
        x, w, bias = operands.get("x", constants.get("x")), constants["w"], operands.get("bias")
        more = _shared(o, operands, how)
        del more["precision"]
        if not how.exact:
            return jaxfused.quantized_matmul(x, w, bias, **more)
        # The truth multiplies what the numbers stand for.
        x = x.dequantize() if o["quantized_x"] else x
        return jaxfused.linear(x, w.dequantize(), bias, precision="highest", **more)

    kinks = ("bias",) if o["activation"] == RELU else ()
    return Problem(run, operands, constants, kinks, tf32=True, with_gradient=bool(operands))


# --- convolutions ---------------------------------------------------------------------------------


def draw_conv(draw: Draw) -> Options:
    return _draw_window(draw) | dict(hand_on=draw.chance(0.3), rectified=draw.chance(0.3))


def _draw_window(draw: Draw) -> Options:
    axes, after = draw.pick((1, 2, 2, 2, 3)), activation(draw, 0.4)
    groups = draw.pick((1, 1, 1, 2, 4))
    return dict(
        batch=draw.size(1, 5),
        sides=[draw.size(4, 20 if axes < 3 else 8) for _ in range(axes)],
        window=[draw.pick((1, 2, 3, 3, 5)) for _ in range(axes)],
        channels=groups * draw.pick((1, 3, 4, 8, 8, 32, 64, 72)),
        out=groups * draw.pick((1, 4, 8, 8, 16, 32, 64, 72)),
        groups=groups,
        strides=draw.pick((1, 1, 2)),
        kernel_dilation=draw.pick((1, 1, 1, 2)),
        padding=draw.pick(("SAME", "SAME", "VALID", "CIRCULAR", 1)),
        dtype=draw.pick(DTYPES),
        param_dtype=draw.pick(("float32", "bfloat16")),
        bias=after == RELU or draw.chance(0.6),
        activation=after,
        residual=draw.chance(0.3),
    )


def conv(options: Options) -> Problem:
    o = options
    inner = o["channels"] // o["groups"]
    taps = inner
    for size in o["window"]:
        taps *= size
    x = Operand((o["batch"], *o["sides"], o["channels"]), o["dtype"])
    w = Operand((*o["window"], inner, o["out"]), o["param_dtype"], 0.0, taps**-0.5)

    def run(operands: Any, constants: Any, how: How) -> Any:
        del constants
        # Convolutions have no argument for it.
        with jax.default_matmul_precision("highest" if how.exact else "default"):
            return jaxfused.conv(
                jaxfused.Rectified(operands["x"]) if o["rectified"] else operands["x"],
                operands["w"],
                operands.get("bias"),
                strides=o["strides"],
                kernel_dilation=o["kernel_dilation"],
                padding=o["padding"],
                feature_group_count=o["groups"],
                activation=o["activation"],
                residual=operands.get("residual"),
                hand_on=o["hand_on"],
                implementation=how.implementation,
            )

    def without_rest(x: Any, w: Any) -> Any:
        return jaxfused.conv(
            x,
            w,
            strides=o["strides"],
            kernel_dilation=o["kernel_dilation"],
            padding=o["padding"],
            feature_group_count=o["groups"],
        )

    y = jax.eval_shape(without_rest, *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (x, w)))
    operands = present(
        x=x,
        w=w,
        bias=parameter(o["out"], "float32" if o["bias"] else None),
        residual=Operand(y.shape, o["dtype"]) if o["residual"] else None,
    )
    kinks = ("bias",) if o["activation"] == RELU else ()
    return Problem(run, operands, {}, kinks, tf32=o["dtype"] == "float32")


def draw_quantized_conv(draw: Draw) -> Options:
    options = _draw_window(draw)
    weights = draw.pick(("int8", "int8", "int8", "int4", "float8_e4m3fn"))
    return options | dict(
        # int4 come in pairs.
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
        jnp.asarray(taps**-0.5 * rng.normal(size=(taps, o["out"])), jnp.float32), o["weights"]
    )
    geometry = dict(
        strides=o["strides"],
        kernel_dilation=o["kernel_dilation"],
        padding=o["padding"],
        feature_group_count=o["groups"],
    )
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
        # The truth convolves what the numbers stand for.
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
