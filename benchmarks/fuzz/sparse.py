"""Products with sparse matrices, with any combination of their options."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.sparse import BCOO

import jaxfused
from benchmarks.fuzz.problem import (
    DTYPES,
    How,
    Operand,
    Options,
    Problem,
    features,
    rng_of,
    rows,
)
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


# --- 2:4 sparsity ---------------------------------------------------------------------------------


def draw_sparse24(draw: Draw) -> Options:
    return dict(
        rows=rows(draw, _MOST_ROWS),
        width=4 * draw.between(1, 200),
        out=features(draw, 600),
        dtype=draw.pick(DTYPES),
    )


def sparse24_matmul(options: Options) -> Problem:
    """Returns a problem whose 2:4 pattern comes from another matrix, so rounding cannot change it."""
    o, rng = options, rng_of(options)
    places = jaxfused.Sparse24.from_dense(
        rng.normal(size=(o["width"], o["out"])).astype(np.float32)
    )
    operands = dict(
        x=Operand((*o["rows"], o["width"]), o["dtype"]),
        values=Operand((o["out"], o["width"] // 2), o["dtype"], 0.0, o["width"] ** -0.5),
    )

    def run(operands: Any, constants: Any, how: How) -> Any:
        return jaxfused.sparse24_matmul(
            operands["x"],
            jaxfused.Sparse24(operands["values"], constants["metadata"]),
            precision="highest" if how.exact else None,
            implementation=how.implementation,
        )

    constants = {"metadata": np.asarray(places.metadata)}
    return Problem(run, operands, constants, tf32=o["dtype"] == "float32")


# --- sparse matrices of single entries ------------------------------------------------------------


def draw_sparse_matmul(draw: Draw) -> Options:
    return dict(
        rows=draw.between(1, draw.bounded(600)),
        depth=draw.between(1, draw.bounded(600)),
        width=features(draw, 300),
        entries=draw.pick((0.001, 0.01, 0.1, 1.5)),
        in_order=draw.chance(0.5),
        dtype=draw.pick(DTYPES),
    )


def _places(o: Options, rows: int, columns: int) -> np.ndarray:
    """Returns (row, column) of each entry; some are repeated, and a few lie outside of the matrix."""
    rng = rng_of(o)
    count = max(1, int(o["entries"] * rows * columns))
    places = rng.integers(0, (rows + rows // 20 + 1, columns + columns // 20 + 1), (count, 2))
    if o["in_order"]:
        places = places[np.lexsort(places.T[::-1])]
    return places.astype(np.int32)


def sparse_matmul(options: Options) -> Problem:
    o = options
    places = _places(o, o["rows"], o["depth"])
    operands = dict(
        b=Operand((o["depth"], o["width"]), o["dtype"]),
        data=Operand((len(places),), o["dtype"], 0.0, (len(places) / o["rows"] + 1) ** -0.5),
    )

    def run(operands: Any, constants: Any, how: How) -> Any:
        shape = (o["rows"], o["depth"])
        a = BCOO((operands["data"], constants["places"]), shape=shape, indices_sorted=o["in_order"])
        return jaxfused.sparse_matmul(
            a,
            operands["b"],
            precision="highest" if how.exact else None,
            implementation=how.implementation,
        )

    return Problem(run, operands, {"places": places}, tf32=o["dtype"] == "float32")


def sampled_matmul(options: Options) -> Problem:
    o = options
    places = _places(o, o["rows"], o["depth"])
    operands = dict(
        x=Operand((o["rows"], o["width"]), o["dtype"]),
        y=Operand((o["width"], o["depth"]), o["dtype"], 0.0, o["width"] ** -0.5),
    )

    def run(operands: Any, constants: Any, how: How) -> Any:
        data = jnp.ones(len(places), o["dtype"])
        pattern = BCOO(
            (data, constants["places"]), shape=(o["rows"], o["depth"]), indices_sorted=o["in_order"]
        )
        x, y = operands["x"], operands["y"]
        return jaxfused.sampled_matmul(x, y, pattern, implementation=how.implementation).data

    return Problem(run, operands, {"places": places})
