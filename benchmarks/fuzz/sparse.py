"""Products with sparse matrices, with any combination of their options."""

from typing import Any

import numpy as np

import jaxfused
from benchmarks.fuzz.problem import DTYPES, How, Operand, Options, Problem, rng_of, rows
from benchmarks.run.draw import Draw

_MOST_ROWS = 1200


def draw_block_sparse(draw: Draw) -> Options:
    size = draw.pick((32, 64, 64, 128))
    return dict(
        rows=rows(draw, _MOST_ROWS),
        block=size,
        down=draw.between(1, 512 // size),
        across=draw.between(1, 512 // size),
        density=draw.pick((0.0, 0.1, 0.3, 0.6, 1.0)),
        dtype=draw.pick(DTYPES),
    )


def block_sparse_matmul(options: Options) -> Problem:
    o, rng = options, rng_of(options)
    size, shape = o["block"], (o["down"] * o["block"], o["across"] * o["block"])
    places = np.argwhere(rng.random((o["down"], o["across"])) <= o["density"])
    places = rng.permutation(places).astype(np.int32)
    operands = dict(
        x=Operand((*o["rows"], shape[0]), o["dtype"]),
        blocks=Operand((len(places), size, size), o["dtype"], 0.0, shape[0] ** -0.5),
    )

    def run(operands: Any, constants: Any, how: How) -> Any:
        weight = jaxfused.BlockSparse.from_blocks(
            operands["blocks"], constants["rows"], constants["columns"], shape
        )
        return jaxfused.block_sparse_matmul(
            operands["x"],
            weight,
            precision="highest" if how.exact else None,
            implementation=how.implementation,
        )

    constants = {"rows": places[:, 0], "columns": places[:, 1]}
    return Problem(run, operands, constants, tf32=o["dtype"] == "float32")
