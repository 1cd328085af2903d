"""linear, mlp, gated_mlp and quantized_matmul with any combination of their options."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxfused
from benchmarks.fuzz.problem import (
    DTYPES,
    RELU,
    ROW_FORMATS,
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
from benchmarks.run.draw import Draw

_MOST_ROWS = 2500
_MOST_FEATURES = 1300


def _draw_product(draw: Draw, with_fp8: bool = False) -> Options:
    """Draws the options that products share: rows, dtypes, the residual."""
    dtype = draw.pick(DTYPES)
    return dict(
        rows=rows(draw, _MOST_ROWS),
        width=features(draw, _MOST_FEATURES),
        out=features(draw, _MOST_FEATURES),
        dtype=dtype,
        param_dtype=draw.pick((dtype, dtype, "float32")),
        residual=draw.pick((dtype, "float32", "bfloat16")) if draw.chance(0.35) else None,
        out_dtype=draw.pick(("float32", "bfloat16", "float16")) if draw.chance(0.15) else None,
        precision=_precision(draw, with_fp8),
    )


def _precision(draw: Draw, with_fp8: bool) -> str | None:
    if with_fp8 and draw.chance(0.15):
        return "fp8"
    return "highest" if draw.chance(0.1) else None


def _as_float8_has_it(options: Options) -> Options:
    """Adapts options to fp8: no dropout, and no relu, since float8 changes the sign of many inputs."""
    if options["precision"] != "fp8":
        return options
    is_relu = options["activation"] == RELU
    return options | dict(dropout=0.0) | (dict(activation="gelu_tanh") if is_relu else {})


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
        precision="highest" if how.exact else o.get("precision"),
        out_dtype=how.out_dtype(o.get("out_dtype")),
        implementation=how.implementation,
    )


# --- linear ---------------------------------------------------------------------------------------


def draw_linear(draw: Draw) -> Options:
    after = activation(draw)
    has_bias = after == RELU or draw.chance(0.6)
    return _as_float8_has_it(_draw_product(draw, True) | dict(activation=after, bias=has_bias))


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


# --- grouped products -----------------------------------------------------------------------------


def draw_ragged_dot(draw: Draw) -> Options:
    return dict(
        rows=draw.between(1, draw.bounded(700)),
        groups=draw.between(1, 12),
        others=draw.pick((0, 0, 3)),
        width=features(draw, _MOST_FEATURES),
        out=features(draw, _MOST_FEATURES),
        dtype=draw.pick(DTYPES),
        transposed=draw.chance(0.4),
        fills=draw.pick((1.0, 0.7, 1.2)),
    )


def ragged_dot(options: Options) -> Problem:
    o, rng = options, rng_of(options)
    shape = (o["width"], o["out"])
    if o["transposed"]:
        shape = shape[::-1]
    operands = dict(
        lhs=Operand((o["rows"], o["width"]), o["dtype"]),
        rhs=Operand((o["groups"], *shape), o["dtype"], 0.0, o["width"] ** -0.5),
    )
    constants = {"sizes": _group_sizes(o, rng)}

    def run(operands: Any, constants: Any, how: How) -> Any:
        return jaxfused.ragged_dot(
            operands["lhs"],
            operands["rhs"],
            constants["sizes"],
            "highest" if how.exact else None,
            group_offset=o["others"] // 2 if o["others"] else None,
            transpose_rhs=o["transposed"],
            implementation=how.implementation,
        )

    return Problem(run, operands, constants, tf32=o["dtype"] == "float32")


def _group_sizes(options: Options, rng: np.random.Generator) -> np.ndarray:
    """Returns random group sizes, whose sum may be less or more than the number of rows."""
    count = options["groups"] + options["others"]
    shares = rng.dirichlet(np.full(count, 0.7)) * options["fills"] * options["rows"]
    return shares.astype(np.int32)


def draw_ragged_mlp(draw: Draw) -> Options:
    return draw_ragged_dot(draw) | dict(
        hidden=features(draw, _MOST_FEATURES),
        activation=draw.pick((None, "silu", "gelu_tanh", "sigmoid")),
        first=draw.pick(("two", "two", "joined", "no gate")),
    )


def ragged_mlp(options: Options) -> Problem:
    o, rng = options, rng_of(options)
    columns = o["hidden"] * (2 if o["first"] == "joined" else 1)
    shapes = dict(
        w_gate=(o["width"], columns), w_up=(o["width"], o["hidden"]), w_down=(o["hidden"], o["out"])
    )
    if o["first"] != "two":
        shapes.pop("w_gate" if o["first"] == "no gate" else "w_up")
    operands = dict(x=Operand((o["rows"], o["width"]), o["dtype"]))
    for name, shape in shapes.items():
        turned = shape[::-1] if o["transposed"] else shape
        operands[name] = Operand((o["groups"], *turned), o["dtype"], 0.0, shape[0] ** -0.5)
    constants = {"sizes": _group_sizes(o, rng)}

    def run(operands: Any, constants: Any, how: How) -> Any:
        return jaxfused.ragged_mlp(
            operands["x"],
            operands.get("w_gate"),
            operands.get("w_up"),
            operands["w_down"],
            constants["sizes"],
            activation=o["activation"],
            group_offset=o["others"] // 2 if o["others"] else None,
            transpose_weights=o["transposed"],
            precision="highest" if how.exact else None,
            implementation=how.implementation,
        )

    return Problem(run, operands, constants, tf32=o["dtype"] == "float32")


# --- MLPs -----------------------------------------------------------------------------------------


def draw_mlp(draw: Draw) -> Options:
    after = activation(draw, 0.95)
    options = _draw_product(draw, True) | dict(
        hidden=features(draw, _MOST_FEATURES),
        activation=after,
        bias=after == RELU or draw.chance(0.6),
        out_bias=draw.chance(0.6),
        save=draw.pick(("preactivation", "inputs", "hidden")),
        stacked=draw.chance(0.3),
        dropout=draw.pick((0.1, 0.5)) if draw.chance(0.15) else 0.0,
    )
    return _as_float8_has_it(options)


def _dropout(o: Options) -> dict[str, Any]:
    """Returns the dropout key as a constant of the problem."""
    return {"key": np.asarray([7, o["data"]], np.uint32)} if o.get("dropout") else {}


def _dropped(o: Options, constants: Any) -> dict[str, Any]:
    if not constants:
        return {}
    return dict(dropout_rate=o["dropout"], dropout_key=jax.random.wrap_key_data(constants["key"]))


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
        names = ("x", "w1", "b1", "w2", "b2")
        layers = [operands.get(name) for name in names]
        more = _shared(o, operands, how) | _dropped(o, constants)
        return jaxfused.mlp(*layers, save=o["save"], **more)

    kinks = ("b1",) if o["activation"] == RELU else ()
    return Problem(run, operands, _dropout(o), kinks, tf32=_may_be_tf32(o))


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
        weights = [operands.get(name) for name in ("x", "w_gate", "w_up", "w_down")]
        biases = {name: operands.get(name) for name in ("b_gate", "b_up", "b_down")}
        more = _shared(o, operands, how) | _dropped(o, constants)
        return jaxfused.gated_mlp(*weights, **biases, save=o["save"], **more)

    # The judge shifts a stacked bias's half for w_up too, which matters little: no relu follows it.
    kinks = ("b_gate",) if o["activation"] == RELU else ()
    return Problem(run, operands, _dropout(o), kinks, tf32=_may_be_tf32(o))


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
        layout=draw.pick(("rows", "columns")),
        quantized_x=_format_of_x(draw, dtype) if draw.chance(0.4) else None,
    )
    width = max(1, width // unit) * unit
    # The layout "columns" stores int4 in blocks of 128 input features.
    in_rows = dtype == "int4" and width % 128
    return options | dict(width=width) | (dict(layout="rows") if in_rows else {})


def _format_of_x(draw: Draw, weights: str) -> str:
    """Draws a format of x, mostly one that kernels support."""
    if draw.chance(0.2):
        return draw.pick(("int8", "float8_e4m3fn"))
    return weights if weights.startswith("float8") else "int8"


def quantized_matmul(options: Options) -> Problem:
    o, rng = options, rng_of(options)
    deviation = o["width"] ** -0.5
    w = jaxfused.quantize(
        jnp.asarray(deviation * rng.normal(size=(o["width"], o["out"])), jnp.float32),
        o["weights"],
        group_size=o["group_size"],
        symmetric=o["symmetric"],
        layout=o.get("layout", "rows"),
    )
    constants: dict[str, Any] = {"w": w}
    if o["quantized_x"]:
        x = jnp.asarray(rng.normal(size=(*o["rows"], o["width"])), jnp.float32)
        constants["x"] = jaxfused.quantize_rows(x, o["quantized_x"], implementation="xla")
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
        # The truth multiplies the dequantised numbers.
        x = x.dequantize() if o["quantized_x"] else x
        return jaxfused.linear(x, w.dequantize(), bias, precision="highest", **more)

    kinks = ("bias",) if o["activation"] == RELU else ()
    return Problem(run, operands, constants, kinks, tf32=True, with_gradient=bool(operands))


def draw_quantize_rows(draw: Draw) -> Options:
    width = features(draw, 4 * _MOST_FEATURES)
    return dict(
        shape=[*rows(draw, _MOST_ROWS), width],
        dtype=draw.pick(DTYPES),
        quantized=draw.pick(ROW_FORMATS),
    )


def quantize_rows(options: Options) -> Problem:
    o = options

    def run(operands: Any, constants: Any, how: How) -> Any:
        del constants
        # The truth is x before its quantisation.
        x, implementation = operands["x"], how.implementation
        if how.exact:
            return x
        return jaxfused.quantize_rows(x, o["quantized"], implementation=implementation).dequantize()

    return Problem(run, {"x": Operand(tuple(o["shape"]), o["dtype"])}, {}, with_gradient=False)
