"""rope, qkv_projection and the optimizers with any combination of their options."""

from typing import Any

import numpy as np
import optax

import jaxfused
from benchmarks.fuzz.problem import (
    DTYPES,
    How,
    Operand,
    Options,
    Problem,
    features,
    length,
    parameter,
    present,
    rng_of,
    rows,
    weight,
)
from benchmarks.run.draw import HEAD_SIZES, Draw

# --- rope and qkv_projection ----------------------------------------------------------------------


def _head_size(draw: Draw) -> int:
    """Draws a head size, which is even because features rotate in pairs."""
    return draw.pick(HEAD_SIZES) if draw.chance(0.75) else 2 * draw.size(1, 130)


def draw_rope(draw: Draw) -> Options:
    head_size = _head_size(draw)
    partly = draw.chance(0.35)
    batch = rows(draw, 8)
    return dict(
        batch=batch,
        tokens=length(draw, 600),
        heads=draw.between(1, 9),
        key_heads=draw.between(0, 4),
        head_size=head_size,
        rotary_dim=2 * draw.between(1, head_size // 2) if partly else head_size,
        dtype=draw.pick(DTYPES),
        interleaved=draw.chance(0.35),
        angles=draw.pick(("offset", "offsets", "positions", "tables", "tables of each")),
        theta=draw.pick((100.0, 10000.0)),
    )


def rope(options: Options) -> Problem:
    o, rng = options, rng_of(options)
    lead, tokens = tuple(o["batch"]), o["tokens"]
    heads = {"q": o["heads"], "k": o["key_heads"]}
    operands = {
        name: Operand((*lead, tokens, count, o["head_size"]), o["dtype"])
        for name, count in heads.items()
        if count
    }
    constants: dict[str, Any] = {}
    if o["angles"] == "offsets":
        constants["offset"] = rng.integers(0, 500, lead).astype(np.int32)
    elif o["angles"] == "positions":
        constants["positions"] = rng.integers(0, 500, (*lead, tokens)).astype(np.int32)
    elif o["angles"].startswith("tables"):
        of_each = lead if o["angles"].endswith("each") else ()
        shape = (*of_each, tokens, o["rotary_dim"] // 2)
        angles = rng.uniform(-3, 3, shape).astype(np.float32)
        constants |= {"cos": np.cos(angles), "sin": np.sin(angles)}

    def run(operands: Any, constants: Any, how: How) -> Any:
        more = dict(constants)
        if "cos" not in more:
            more |= dict(theta=o.get("theta", 10000.0), rotary_dim=o["rotary_dim"])
            more |= dict(offset=3) if o["angles"] == "offset" else {}
        return jaxfused.rope(
            operands["q"],
            operands.get("k"),
            interleaved=o["interleaved"],
            implementation=how.implementation,
            **more,
        )

    return Problem(run, operands, constants)


def draw_qkv_projection(draw: Draw) -> Options:
    dtype, head_size = draw.pick(DTYPES), _head_size(draw)
    partly = draw.chance(0.2)
    return dict(
        batch=rows(draw, 8),
        tokens=length(draw, 300),
        width=features(draw, 900),
        key_heads=draw.between(1, 4),
        group=draw.pick((1, 1, 2, 3)),
        head_size=head_size,
        rotary_dim=2 * draw.between(1, head_size // 2) if partly else head_size,
        dtype=dtype,
        param_dtype=draw.pick((dtype, dtype, "float32")),
        bias=draw.chance(0.4),
        q_scale=draw.chance(0.4),
        k_scale=draw.chance(0.4),
        scale_offset=draw.pick((0.0, 0.0, 1.0)),
        rope=draw.chance(0.6),
        interleaved=draw.chance(0.3),
        precision="fp8" if draw.chance(0.15) else None,
    )


def qkv_projection(options: Options) -> Problem:
    o, rng = options, rng_of(options)
    heads = o["key_heads"] * o["group"]
    out = (heads + 2 * o["key_heads"]) * o["head_size"]
    scale_offset = o.get("scale_offset", 0.0)
    scale = 1.0 - scale_offset
    operands = present(
        x=Operand((*o["batch"], o["tokens"], o["width"]), o["dtype"]),
        w=weight((o["width"], out), o["param_dtype"]),
        bias=parameter(out, o["param_dtype"] if o["bias"] else None),
        q_scale=parameter(o["head_size"], "float32" if o["q_scale"] else None, scale),
        k_scale=parameter(o["head_size"], "float32" if o["k_scale"] else None, scale),
    )
    constants = {}
    if o["rope"]:
        angles = rng.uniform(-3, 3, (o["tokens"], o["rotary_dim"] // 2)).astype(np.float32)
        constants = {"cos": np.cos(angles), "sin": np.sin(angles)}

    def run(operands: Any, constants: Any, how: How) -> Any:
        return jaxfused.qkv_projection(
            operands["x"],
            operands["w"],
            operands.get("bias"),
            heads=heads,
            key_heads=o["key_heads"],
            q_scale=operands.get("q_scale"),
            k_scale=operands.get("k_scale"),
            scale_offset=scale_offset,
            interleaved=o["interleaved"],
            precision="highest" if how.exact else o.get("precision"),
            implementation=how.implementation,
            **constants,
        )

    return Problem(run, operands, constants, tf32=o["dtype"] == "float32")


# --- optimizers -----------------------------------------------------------------------------------

_OPTIMIZERS = {
    "sgd": (jaxfused.optim.sgd, optax.sgd, dict(momentum=0.9)),
    "adam": (jaxfused.optim.adam, optax.adam, dict()),
    "adamw": (jaxfused.optim.adamw, optax.adamw, dict(weight_decay=0.1)),
    "lamb": (jaxfused.optim.lamb, optax.lamb, dict(weight_decay=0.1)),
}
"""Optimizers to draw from. lion is left out, because rounding decides the sign of an update near
zero."""


def draw_optimizer(draw: Draw) -> Options:
    return dict(
        optimizer=draw.pick(sorted(_OPTIMIZERS)),
        shapes=[[*rows(draw, 60), features(draw, 200)] for _ in range(draw.between(1, 4))],
        dtype=draw.pick(("float32", "float32", "bfloat16")),
        max_norm=draw.pick((None, 0.1, 100.0)),
    )


def optimizer_step(options: Options) -> Problem:
    """Returns a problem of two optimizer steps; the second starts from moments that are not 0."""
    o = options
    ours, theirs, arguments = _OPTIMIZERS[o["optimizer"]]
    operands = {}
    for index, shape in enumerate(o["shapes"]):
        for name in ("p", "g", "h"):
            operands[f"{name}{index}"] = Operand(tuple(shape), o["dtype"])

    def run(operands: Any, constants: Any, how: How) -> Any:
        del constants
        params, *gradients = (
            [operands[f"{name}{index}"] for index in range(len(o["shapes"]))] for name in "pgh"
        )
        plain = how.implementation == "xla"
        optimizer = (theirs if plain else ours)(1e-2, **arguments)
        state = optimizer.init(params)
        for gradient in gradients:
            if not plain:
                more = dict(max_norm=o["max_norm"], implementation=how.implementation)
                params, state = optimizer.step(gradient, state, params, **more)
                continue
            if o["max_norm"] is not None:
                gradient, _ = optax.clip_by_global_norm(o["max_norm"]).update(gradient, None)
            updates, state = optimizer.update(gradient, state, params)
            params = optax.apply_updates(params, updates)
        return tuple(params)

    return Problem(run, operands, {}, with_gradient=False)
