"""Steps of optimizers, in place: `python -m benchmarks optimizer [--trees NAME...] [--out FILE]`.

A step writes over its state, so that no call can be repeated with the same buffers as the runner of the
operators repeats them: each call here goes on from the one before. Bytes are those that the step needs.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib

from benchmarks import timing
from jaxfused import optim

NAME = "optimizer"
_SAMPLES = 6


def _block(width: int, hidden: int, depth: int | None = None) -> dict[str, tuple[int, ...]]:
    """The arrays of a layer of ViT, or of `depth` layers as one stack."""
    shapes: dict[str, tuple[int, ...]] = {
        "norm1": (width,),
        "norm1_bias": (width,),
        "qkv": (width, 3 * width),
        "qkv_bias": (3 * width,),
        "out": (width, width),
        "out_bias": (width,),
        "norm2": (width,),
        "norm2_bias": (width,),
        "w1": (width, hidden),
        "b1": (hidden,),
        "w2": (hidden, width),
        "b2": (width,),
    }
    return shapes if depth is None else {name: (depth, *shape) for name, shape in shapes.items()}


_ENDS = {"patch": (16, 16, 3, 768), "position": (1, 197, 768), "norm": (768,), "head": (768, 1000)}
TREES: dict[str, Any] = {
    "vit-b": {**{f"layer{i}": _block(768, 3072) for i in range(12)}, **_ENDS},
    "vit-b-stacked": {**_block(768, 3072, 12), **_ENDS},
    "large": {f"w{i}": (7168, 7168) for i in range(20)},
    "vit-l-matrices": {
        f"layer{i}": {n: shape for n, shape in _block(1024, 4096).items() if len(shape) == 2}
        for i in range(24)
    },
}
"""Shapes of parameters: 86 M in 148 and in 16 arrays, 1 G in 20, and for Muon 302 M in 96 matrices."""


@dataclass(frozen=True)
class Row:
    """One optimizer, ours and Optax's."""

    name: str
    ours: optim.FusedTransformation
    bytes: int
    """Of a parameter, in float32: what a step has to read and write; 0 where products take the time."""
    theirs: optax.GradientTransformation | None = None
    how: dict[str, Any] = field(default_factory=dict)


def rows(tree: str) -> list[Row]:
    """The optimizers to measure on a tree: every one that has kernels, or Muon."""
    if tree == "vit-l-matrices":
        theirs = contrib.muon(1e-3)
        narrow = optim.muon(1e-3, iteration_dtype=jnp.bfloat16)
        return [Row("muon", optim.muon(1e-3), 0, theirs), Row("muon, bfloat16", narrow, 0, theirs)]
    rate, clip = 1e-3, dict(max_norm=1.0)
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate))
    return [
        Row("adamw", optim.adamw(rate), 28, optax.adamw(rate)),
        Row("adamw, clipped", optim.adamw(rate), 32, clipped, clip),
        Row("adamw8bit", optim.adamw8bit(rate), 16),
        Row("adamw8bit, clipped", optim.adamw8bit(rate), 20, None, clip),
        Row("lion", optim.lion(rate), 20, optax.lion(rate)),
        Row("sgd, momentum", optim.sgd(rate, 0.9), 20, optax.sgd(rate, 0.9)),
        Row("sgd", optim.sgd(rate), 12, optax.sgd(rate)),
        Row("lamb", optim.lamb(rate), 40, optax.lamb(rate)),
    ]


def main(arguments: Sequence[str]) -> int:
    """Measures and prints a table; returns the exit status."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks {NAME}", description=__doc__)
    parser.add_argument("--trees", nargs="+", choices=TREES, default=list(TREES))
    parser.add_argument("--out", type=Path, help="a JSON file of all figures")
    options = parser.parse_args(arguments)
    if jax.default_backend() != "gpu":
        print(f"{NAME}: this needs an NVIDIA GPU, but JAX sees only {jax.devices()[0].platform!r}.")
        return 2
    figures = []
    for tree in options.trees:
        for row in rows(tree):
            figure = {"tree": tree, "optimizer": row.name, **_measure(tree, row)}
            figures.append(figure)
            print(_line(figure), flush=True)
    if options.out:
        options.out.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


def _line(figure: dict[str, Any]) -> str:
    theirs = figure["optax"]
    return (
        f"{figure['tree']:14} {figure['optimizer']:20} {figure['jaxfused']:9.1f} us"
        + (f" {figure['terabytes']:5.2f} TB/s" if figure["terabytes"] else " " * 11)
        + (f"   optax {theirs:9.1f} us, {theirs / figure['jaxfused']:.2f}x" if theirs else "")
    )


def _measure(tree: str, row: Row) -> dict[str, Any]:
    """Microseconds of the kernels of a step, ours and Optax's, and the rate of ours."""

    def ours(grads: Any, params: Any, state: Any) -> Any:
        return row.ours.step(grads, state, params, **row.how)

    microseconds = _of_step(ours, row.ours.init, TREES[tree])
    theirs = None
    if (tx := row.theirs) is not None:

        def stock(grads: Any, params: Any, state: Any) -> Any:
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        theirs = _of_step(stock, tx.init, TREES[tree])
    leaves = jax.tree.leaves(TREES[tree], is_leaf=lambda shape: isinstance(shape, tuple))
    count = sum(int(np.prod(shape)) for shape in leaves)
    rate = row.bytes * count / microseconds / 1e6
    return {"jaxfused": microseconds, "optax": theirs, "terabytes": rate}


def _of_step(step: Callable[..., Any], init: Callable[[Any], Any], shapes: Any) -> float:
    """The median of a few steps' kernel time, each from the results of the one before."""
    jax.clear_caches()
    grads, params = _random(shapes, 0), _random(shapes, 1)
    state = init(params)
    compiled = jax.jit(step, donate_argnums=(1, 2)).lower(grads, params, state).compile()

    def call() -> None:
        nonlocal params, state
        params, state = compiled(grads, params, state)
        jax.block_until_ready((params, state))

    return statistics.median(sum(us for _, us in timing.kernels(call)) for _ in range(_SAMPLES))


def _random(shapes: Any, seed: int) -> Any:
    """Normal numbers repeated from one vector, since a program for each shape takes long to compile."""
    vector = jax.random.normal(jax.random.key(seed), (2**20,), jnp.float32)
    return jax.tree.map(
        lambda shape: jnp.resize(vector, (int(np.prod(shape)),)).reshape(shape),
        shapes,
        is_leaf=lambda shape: isinstance(shape, tuple),
    )
