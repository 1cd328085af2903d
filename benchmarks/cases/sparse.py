"""Products with sparse weights and matrices, compared with the dense product and JAX's sparse ones."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.sparse import BCOO

import jaxfused
from benchmarks.run.case import Arrays, Bar, Case, functions
from jaxfused import BlockSparse
from jaxfused.ops.sparse.block_sparse import BlockList

SIDE, COLUMNS = 8192, 512


@dataclass(frozen=True)
class _Blocks:
    """A product with a square block-sparse matrix: the blocks of largest norm of a random matrix."""

    size: int
    density: float
    must: float

    def case(self) -> Case:
        def ours(x, dense, blocks, *lists, implementation):
            del dense
            by_column, by_row = BlockList(*lists[:2]), BlockList(*lists[2:])
            weight = BlockSparse(blocks, by_column, by_row, (SIDE, SIDE))
            return jaxfused.block_sparse_matmul(x, weight, implementation=implementation)

        def make_inputs(key: jax.Array) -> Arrays:
            x, dense = jax.random.normal(key, (2, SIDE, SIDE), jnp.bfloat16)
            count = int(self.density * (SIDE // self.size) ** 2)
            weight = BlockSparse.from_dense(dense, self.size, count=count)
            return x, weight.to_dense(), weight.blocks, *weight.by_column, *weight.by_row

        name = f"block_sparse_matmul {self.size}, {self.density:.0%}"
        bars = (Bar("xla", must=self.must),)
        return _case(name, (SIDE, SIDE), "bfloat16", make_inputs, ours, _dense, bars)


def _dense(x: jax.Array, dense: jax.Array, *others: Any) -> jax.Array:
    del others
    return x @ dense


def _two_of_four(side: int, must: float) -> Case:
    def ours(x, dense, values, metadata, *, implementation):
        del dense
        weight = jaxfused.Sparse24(values, metadata)
        return jaxfused.sparse24_matmul(x, weight, implementation=implementation)

    def make_inputs(key: jax.Array) -> Arrays:
        x, dense = jax.random.normal(key, (2, side, side), jnp.bfloat16)
        weight = jaxfused.Sparse24.from_dense(dense)
        return x, weight.to_dense(), weight.values, weight.metadata

    name = f"sparse24_matmul {side}"
    bars = (Bar("xla", must=must),)
    return _case(name, (side, side), "bfloat16", make_inputs, ours, _dense, bars)


def _entries(density: float, dtype: str) -> Case:
    def matrix(data, places):
        return BCOO((data, places), shape=(SIDE, SIDE), indices_sorted=True, unique_indices=True)

    def ours(data, places, b, *, implementation):
        return jaxfused.sparse_matmul(matrix(data, places), b, implementation=implementation)

    def make_inputs(key: jax.Array) -> Arrays:
        of_places, of_data, of_b = jax.random.split(key, 3)
        count = int(density * SIDE * SIDE)
        place = jnp.sort(jax.random.choice(of_places, SIDE * SIDE, (count,), replace=False))
        places = jnp.stack([place // SIDE, place % SIDE], axis=1)
        b = jax.random.normal(of_b, (SIDE, COLUMNS), dtype)
        return jax.random.normal(of_data, (count,), dtype), places, b

    def theirs(data, places, b):
        return matrix(data, places) @ b

    name = f"sparse_matmul {density:.1%}"
    return _case(name, (SIDE, COLUMNS), dtype, make_inputs, ours, theirs, ())


def _case(
    name: str,
    shape: tuple[int, ...],
    dtype: str,
    make_inputs: Callable[[jax.Array], Arrays],
    ours: Callable[..., jax.Array],
    theirs: Callable[..., jax.Array],
    bars: tuple[Bar, ...],
) -> Case:
    return Case(
        name=name,
        shape=shape,
        make_inputs=make_inputs,
        bytes=0,
        bars=bars,
        dtype=dtype,
        **functions(ours, {"xla": theirs}, {}, differentiable=0, cotangents=0),
    )


def cases(quick: bool = False, shapes: Any = None) -> list[Case]:
    del shapes
    blocks = [
        _Blocks(128, 0.1, 5.0),
        _Blocks(128, 0.5, 1.4),
        _Blocks(64, 0.1, 4.0),
        _Blocks(64, 0.5, 1.2),
    ]
    entries = [(0.01, "float32"), (0.001, "float32"), (0.001, "bfloat16")]
    all_cases = [
        *(one.case() for one in blocks),
        _two_of_four(8192, 1.2),
        _two_of_four(4096, 1.1),
        *(_entries(*one) for one in entries),
    ]
    return all_cases[:1] if quick else all_cases
