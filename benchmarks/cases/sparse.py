"""Products with sparse weights, compared with the dense product."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import jaxfused
from benchmarks.run.case import BARE, Arrays, Bar, Case, functions
from jaxfused import BlockSparse
from jaxfused.ops.sparse.block_sparse import BlockList

SIDE = 8192
_BLOCKS = (
    (128, 0.1, 5.0),
    (128, 0.5, 1.4),
    (64, 0.1, 4.0),
    (64, 0.5, 1.2),
    (32, 0.1, 3.0),
    (32, 0.5, 1.0),
)
"""Size of a block, share of blocks that are kept, and the bar against the dense product."""


@dataclass(frozen=True)
class _Blocks:
    """A product with a square block-sparse matrix: the blocks of largest norm of a random matrix."""

    size: int
    density: float
    must: float
    result: str
    """"y", or a gradient: "dx" or "dw"."""

    def case(self) -> Case:
        def ours(x, dy, dense, blocks, *lists, implementation):
            del dense
            by_column, by_row = BlockList(*lists[:2]), BlockList(*lists[2:])

            def product(x: jax.Array, blocks: jax.Array) -> jax.Array:
                weight = BlockSparse(blocks, by_column, by_row, (SIDE, SIDE))
                return jaxfused.block_sparse_matmul(x, weight, implementation=implementation)

            if self.result == "y":
                return product(x, blocks)
            gradients = jax.vjp(product, x, blocks)[1](dy)
            return gradients[("dx", "dw").index(self.result)]

        def theirs(x, dy, dense, *others):
            del others
            return {"y": lambda: x @ dense, "dx": lambda: dy @ dense.T, "dw": lambda: x.T @ dy}[
                self.result
            ]()

        def make_inputs(key: jax.Array) -> Arrays:
            x, dy, dense = jax.random.normal(key, (3, SIDE, SIDE), jnp.bfloat16)
            count = int(self.density * (SIDE // self.size) ** 2)
            weight = BlockSparse.from_dense(dense, self.size, count=count)
            return x, dy, weight.to_dense(), weight.blocks, *weight.by_column, *weight.by_row

        name = f"block_sparse_matmul {self.size}, {self.density:.0%}, {self.result}"
        # The dense product's dw has the blocks of zeros too.
        peer = BARE if self.result == "dw" else "xla"
        bars = (Bar(peer, must=self.must),)
        return _case(name, (SIDE, SIDE), make_inputs, ours, {peer: theirs}, bars)


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
    return _case(name, (side, side), make_inputs, ours, {"xla": _dense}, bars)


def _case(
    name: str,
    shape: tuple[int, ...],
    make_inputs: Callable[[jax.Array], Arrays],
    ours: Callable[..., jax.Array],
    theirs: Mapping[str, Callable[..., jax.Array]],
    bars: tuple[Bar, ...],
) -> Case:
    return Case(
        name=name,
        shape=shape,
        make_inputs=make_inputs,
        bytes=0,
        bars=bars,
        **functions(ours, theirs, {}, differentiable=0, cotangents=0),
    )


def cases(quick: bool = False, shapes: Any = None) -> list[Case]:
    del shapes
    blocks = [
        _Blocks(size, density, must, result)
        for result in ("y", "dx", "dw")
        for size, density, must in _BLOCKS
    ]
    all_cases = [
        *(one.case() for one in blocks),
        _two_of_four(8192, 1.2),
        _two_of_four(4096, 1.1),
    ]
    return all_cases[:1] if quick else all_cases
