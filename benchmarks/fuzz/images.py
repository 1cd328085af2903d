"""max_pool and upsample with any combination of their options."""

import math
from typing import Any

import jaxfused
from benchmarks.fuzz.problem import DTYPES, How, Operand, Options, Problem, features, length
from benchmarks.run.draw import Draw

_MOST_PIXELS = 2**12
"""Largest number of pixels of all images together."""


def _draw_image(draw: Draw, axes: int) -> Options:
    sides = [draw.size(1, 40 if axes < 3 else 10) for _ in range(axes)]
    most = min(512, max(1, _MOST_PIXELS // math.prod(sides)))
    return dict(shape=[length(draw, most), *sides, features(draw, 300)], dtype=draw.pick(DTYPES))


def draw_max_pool(draw: Draw) -> Options:
    options = _draw_image(draw, draw.pick((1, 2, 2, 2, 3)))
    window = [min(draw.pick((1, 2, 2, 3, 3, 5)), size) for size in options["shape"][1:-1]]
    return options | dict(
        window=window,
        strides=[draw.pick((1, 2, 2, size)) for size in window],
        padding=draw.pick(("SAME", "VALID", 1, [[size // 2, size - 1] for size in window])),
    )


def max_pool(options: Options) -> Problem:
    o = options

    def run(operands: Any, constants: Any, how: How) -> Any:
        del constants
        padding = o["padding"]
        return jaxfused.max_pool(
            operands["x"],
            tuple(o["window"]),
            strides=tuple(o["strides"]),
            padding=[tuple(pair) for pair in padding] if isinstance(padding, list) else padding,
            implementation=how.implementation,
        )

    return Problem(run, {"x": Operand(tuple(o["shape"]), o["dtype"])}, {})


def draw_upsample(draw: Draw) -> Options:
    axes = draw.pick((1, *(2,) * 8, 3))
    return _draw_image(draw, axes) | dict(
        factor=draw.pick((2, 2, 2, 2, 2, [draw.between(1, 3) for _ in range(axes)])),
        method=draw.pick((*("bilinear",) * 5, "nearest")),
    )


def upsample(options: Options) -> Problem:
    o = options

    def run(operands: Any, constants: Any, how: How) -> Any:
        del constants
        factor, method = o["factor"], o["method"]
        return jaxfused.upsample(
            operands["x"], factor, method=method, implementation=how.implementation
        )

    return Problem(run, {"x": Operand(tuple(o["shape"]), o["dtype"])}, {})
