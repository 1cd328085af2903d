"""layer_norm, rms_norm, group_norm and batch_norm with any combination of their options."""

import math
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
    length,
    maybe_dtype,
    parameter,
    present,
    rng_of,
    rows,
)
from benchmarks.run.draw import Draw

_MOST = 2**19
"""Largest number of elements of x."""
_MOST_PIXELS = 2**14
"""Largest number of pixels of all images together."""


def draw_norm(draw: Draw) -> Options:
    width = features(draw, 9000)
    before = activation(draw, 0.2)
    after = activation(draw, 0.25)
    shape = [*rows(draw, max(1, _MOST // width)), width]
    residual = draw.pick(("float32", "bfloat16", "float16")) if draw.chance(0.35) else None
    # A relu's input always has a bias: the judge shifts it to find how far rounding at 0 matters.
    return _draw_images(draw, len(shape), residual is not None) | dict(
        shape=shape,
        dtype=draw.pick(DTYPES),
        scale=maybe_dtype(draw, 0.85),
        scale_offset=draw.pick((0.0, 0.0, 1.0)),
        round_before_scale=after is None and draw.chance(0.15),
        bias="float32" if after == RELU else maybe_dtype(draw, 0.6),
        pre_bias="float32" if before == RELU else maybe_dtype(draw, 0.25),
        pre_activation=before,
        activation=after,
        residual=residual,
        epsilon=draw.pick((1e-6, 1e-5, 1e-3)),
        quantized=draw.pick(ROW_FORMATS) if draw.chance(0.1) else None,
    )


def _draw_images(draw: Draw, rank: int, has_residual: bool) -> Options:
    """Draws the gate, and adaLN modulation with its number of leading axes (None: no modulation)."""
    adaptive = rank > 2 and draw.chance(0.2)
    gates = ("all images", "each image") if adaptive else ("all images",)
    return dict(
        image_axes=draw.between(1, rank - 2) if adaptive else None,
        image_scale=adaptive and draw.chance(0.8),
        image_shift=adaptive,
        gate=draw.pick(gates) if has_residual and draw.chance(0.3) else None,
    )


_PLAIN: Options = dict(
    scale="float32",
    scale_offset=0.0,
    round_before_scale=False,
    bias=None,
    pre_bias=None,
    pre_activation=None,
    activation=None,
    residual=None,
    epsilon=1e-6,
)
"""Values of a norm's options that a printed case may leave out."""


def layer_norm(options: Options) -> Problem:
    return _norm(options, jaxfused.layer_norm)


def rms_norm(options: Options) -> Problem:
    return _norm(options, jaxfused.rms_norm)


def _norm(options: Options, norm: Any) -> Problem:
    o = _PLAIN | options
    shape, width = tuple(o["shape"]), o["shape"][-1]
    operands = present(
        x=Operand(shape, o["dtype"], 0.5, 2.0),
        scale=parameter(width, o["scale"], 1.0 - o["scale_offset"]),
        bias=parameter(width, o["bias"]),
        pre_bias=parameter(width, o["pre_bias"]),
        residual=Operand(shape, o["residual"]) if o["residual"] else None,
        **_images(o),
    )
    quantized = o.get("quantized")

    def run(operands: Any, constants: Any, how: How) -> Any:
        del constants
        # The truth is y before its quantisation.
        results = norm(
            operands["x"],
            operands.get("scale"),
            operands.get("bias"),
            pre_bias=operands.get("pre_bias"),
            residual=operands.get("residual"),
            pre_activation=o["pre_activation"],
            activation=o["activation"],
            epsilon=o["epsilon"],
            image_scale=operands.get("image_scale"),
            image_shift=operands.get("image_shift"),
            gate=operands.get("gate"),
            quantize_rows=None if how.exact else quantized,
            implementation=how.implementation,
            scale_offset=o["scale_offset"],
            round_before_scale=o["round_before_scale"],
        )
        if quantized is None or how.exact:
            return results
        y, *h = results if isinstance(results, tuple) else (results,)
        return y.dequantize(), *h

    kinks = ["pre_bias"] if o["pre_activation"] == RELU else []
    shifted = "image_shift" if "image_shift" in operands else "bias"
    kinks += [shifted] if o["activation"] == RELU else []
    return Problem(run, operands, {}, tuple(kinks), with_gradient=quantized is None)


def _images(o: Options) -> dict[str, Operand]:
    """Returns the parameters of the adaLN modulation, and the gate."""
    width, axes = o["shape"][-1], o.get("image_axes")
    of_each = (*o["shape"][: axes or 0], width)
    gate = {None: None, "all images": (width,), "each image": of_each}[o.get("gate")]
    return present(
        image_scale=Operand(of_each, o["dtype"], 0.0, 0.5) if o.get("image_scale") else None,
        image_shift=Operand(of_each, "float32", 0.0, 0.5) if o.get("image_shift") else None,
        gate=None if gate is None else Operand(gate, o["dtype"]),
    )


# --- norms of images ------------------------------------------------------------------------------


def draw_group_norm(draw: Draw) -> Options:
    groups, size = draw.pick((1, 2, 4, 8, 32)), draw.pick((1, 2, 3, 4, 8, 16))
    options = _draw_image(draw, groups * size)
    # No modulation before a relu: it would scale the bias, by which the judge shifts the relu's input.
    modulated = options["activation"] != RELU and draw.chance(0.2)
    return options | dict(num_groups=groups, epsilon=draw.pick((1e-6, 1e-5)), modulated=modulated)


def draw_batch_norm(draw: Draw) -> Options:
    options = _draw_image(draw, features(draw, 600))
    return options | dict(training=draw.chance(0.6), epsilon=draw.pick((1e-5, 1e-3)))


def _draw_image(draw: Draw, channels: int) -> Options:
    sides = [draw.size(1, 20) for _ in range(draw.pick((0, 1, 2, 2, 3)))]
    after = activation(draw, 0.4)
    most = min(512, max(1, _MOST_PIXELS // math.prod(sides)))
    return dict(
        # There is at least one example, because the statistics of none are undefined.
        shape=[max(1, length(draw, most)), *sides, channels],
        dtype=draw.pick(DTYPES),
        scale=maybe_dtype(draw, 0.8),
        bias="float32" if after == RELU else maybe_dtype(draw, 0.8),
        activation=after,
        residual=draw.chance(0.3),
    )


def _image_operands(o: Options) -> dict[str, Operand]:
    shape, channels = tuple(o["shape"]), o["shape"][-1]
    return present(
        x=Operand(shape, o["dtype"], 0.5, 2.0),
        scale=parameter(channels, o["scale"], 1.0),
        bias=parameter(channels, o["bias"]),
        residual=Operand(shape, o["dtype"]) if o["residual"] else None,
    )


def group_norm(options: Options) -> Problem:
    o, operands = options, _image_operands(options)
    if o.get("modulated"):
        of_each = (o["shape"][0], o["shape"][-1])
        operands |= {
            "image_scale": Operand(of_each, o["dtype"], 0.0, 0.5),
            "image_shift": Operand(of_each, o["dtype"], 0.0, 0.5),
        }

    def run(operands: Any, constants: Any, how: How) -> Any:
        del constants
        return jaxfused.group_norm(
            operands["x"],
            operands.get("scale"),
            operands.get("bias"),
            num_groups=o["num_groups"],
            epsilon=o["epsilon"],
            image_scale=operands.get("image_scale"),
            image_shift=operands.get("image_shift"),
            activation=o["activation"],
            residual=operands.get("residual"),
            implementation=how.implementation,
        )

    def noise(operands: Any, constants: Any, results: Any, cotangents: Any) -> dict[str, Any]:
        """Returns dx's allowed noise.

        Where a group's x are equal, dx is rstd times a difference of equal numbers.
        """
        del constants, results
        if cotangents is None:
            return {}
        x, dy = operands["x"], cotangents[0]
        if "scale" in operands:
            dy = dy * operands["scale"]
        if "image_scale" in operands:
            of_each = (x.shape[0], *(1,) * (x.ndim - 2), x.shape[-1])
            dy = dy * (1 + operands["image_scale"]).reshape(of_each)
        groups = (x.shape[0], math.prod(x.shape[1:-1]), o["num_groups"], -1)
        rstd = jax.lax.rsqrt(jnp.var(x.reshape(groups), (1, 3), keepdims=True) + o["epsilon"])
        largest = jnp.max(jnp.abs(dy.reshape(groups)), (1, 3), keepdims=True)
        return {
            "x": jnp.broadcast_to(_FLOAT32_NOISE * rstd * largest, x.reshape(groups).shape).reshape(
                x.shape
            )
        }

    kinks = ("bias",) if o["activation"] == RELU else ()
    return Problem(run, operands, {}, kinks, noise=noise)


_FLOAT32_NOISE = 2.0**-22


def batch_norm(options: Options) -> Problem:
    o, constants = options, {}
    if not o["training"]:
        rng, channels = rng_of(o), o["shape"][-1]
        constants = {
            "mean": rng.normal(size=channels).astype(np.float32),
            "var": rng.uniform(0.5, 2.0, channels).astype(np.float32),
        }

    def run(operands: Any, constants: Any, how: How) -> Any:
        return jaxfused.batch_norm(
            operands["x"],
            operands.get("scale"),
            operands.get("bias"),
            epsilon=o["epsilon"],
            activation=o["activation"],
            residual=operands.get("residual"),
            implementation=how.implementation,
            **constants,
        )

    kinks = ("bias",) if o["activation"] == RELU else ()
    return Problem(run, _image_operands(o), constants, kinks)
