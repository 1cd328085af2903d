"""Steps of optimizers, in place: `python -m benchmarks optimizer [--trees NAME...] [--out FILE]`.

With `--beside FOLDER` the package of another checkout takes the same steps too, before and after, in
separate processes. A step overwrites its state, so calls cannot reuse the same buffers as in the
operators' runner: each call continues from the previous one. Bytes are the least that a step must
read and write.
"""

import argparse
import collections
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib

from benchmarks.run import timing
from jaxfused import optim

NAME = "optimizer"
_SAMPLES = 6


def _block(width: int, hidden: int, depth: int | None = None) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the parameters of a ViT layer, or of `depth` stacked layers."""
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


def _llama_block(width: int, hidden: int, key_features: int) -> dict[str, tuple[int, ...]]:
    return {
        "norm1": (width,),
        "q": (width, width),
        "k": (width, key_features),
        "v": (width, key_features),
        "out": (width, width),
        "norm2": (width,),
        "gate": (width, hidden),
        "up": (width, hidden),
        "down": (hidden, width),
    }


_ENDS = {"patch": (16, 16, 3, 768), "position": (1, 197, 768), "norm": (768,), "head": (768, 1000)}
TREES: dict[str, Any] = {
    "vit-b": {**{f"layer{i}": _block(768, 3072) for i in range(12)}, **_ENDS},
    "vit-b-stacked": {**_block(768, 3072, 12), **_ENDS},
    "large": {f"w{i}": (7168, 7168) for i in range(20)},
    "vit-l-matrices": {
        f"layer{i}": {n: shape for n, shape in _block(1024, 4096).items() if len(shape) == 2}
        for i in range(24)
    },
    "llama": {
        **{f"layer{i}": _llama_block(2048, 5632, 512) for i in range(16)},
        "embedding": (32000, 2048),
        "norm": (2048,),
    },
}
"""Shapes of parameters, in order: 86 M in 148 arrays, 86 M in 16, 1 G in 20, 302 M in 96 matrices (for
Muon), and 787 M in 146 arrays (for Adafactor and Muon)."""


@dataclass(frozen=True)
class Row:
    """An optimizer to measure: ours, and Optax's if there is one."""

    name: str
    ours: optim.FusedTransformation
    bytes: int
    """Bytes that a step reads and writes per float32 parameter; 0 if products take most of the time."""
    theirs: optax.GradientTransformation | None = None
    how: dict[str, Any] = field(default_factory=dict)


def rows(tree: str) -> list[Row]:
    """Returns the optimizers to measure on a tree of parameters, with Optax's counterparts."""
    if tree == "vit-l-matrices":
        theirs = contrib.muon(1e-3)
        narrow = optim.muon(1e-3, iteration_dtype=jnp.bfloat16)
        return [Row("muon", optim.muon(1e-3), 0, theirs), Row("muon, bfloat16", narrow, 0, theirs)]
    rate, clip = 1e-3, dict(max_norm=1.0)
    if tree == "llama":
        clipping = optax.clip_by_global_norm(1.0)
        narrow = optim.muon(rate, iteration_dtype=jnp.bfloat16)
        muon = optax.chain(clipping, contrib.muon(rate))
        adafactor = optax.chain(clipping, optax.adafactor(rate))
        return [
            Row("adafactor, clipped", optim.adafactor(rate), 24, adafactor, clip),
            Row("muon, clipped", optim.muon(rate), 0, muon, clip),
            Row("muon, bfloat16, clipped", narrow, 0, None, clip),
        ]
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
    parser.add_argument("--only", nargs="+", help="beginnings of the names of optimizers")
    parser.add_argument("--ours", action="store_true", help="without Optax")
    parser.add_argument("--kernels", type=int, default=0, help="list so many kernels of a step")
    parser.add_argument("--beside", type=Path, help="another checkout of this package")
    options = parser.parse_args(arguments)
    if options.beside:
        return _side_by_side(options.beside, [*arguments])
    if jax.default_backend() != "gpu":
        print(f"{NAME}: this needs an NVIDIA GPU, but JAX sees only {jax.devices()[0].platform!r}.")
        return 2
    figures = []
    for tree in options.trees:
        for row in rows(tree):
            if options.only and not row.name.startswith(tuple(options.only)):
                continue
            figure = _measure(tree, row, with_optax=not options.ours, listed=options.kernels)
            figures.append({"tree": tree, "optimizer": row.name, **figure})
            print(_line(figures[-1]), flush=True)
    if options.out:
        options.out.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


def _side_by_side(other: Path, arguments: Sequence[str]) -> int:
    """Runs this benchmark on the other checkout, on this one, and on the other again."""
    place = arguments.index("--beside")
    rest = [*arguments[:place], *arguments[place + 2 :]]
    here = Path(__file__).parents[1]
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for name, package in (("before", other), ("now", here), ("after", other)):
            out = Path(folder, name)
            command = [sys.executable, str(Path(__file__)), *rest, "--out", str(out)]
            if package != here:
                command.append("--ours")
            print(f"--- {name}: {package}", flush=True)
            subprocess.run(
                command, env=os.environ | {"PYTHONPATH": str(package.resolve())}, check=True
            )
            found.append(json.loads(out.read_text()))
    print("--- microseconds: before, now, after; now / mean of both; optax / now")
    for first, now, last in zip(*found, strict=True):
        old = (first["jaxfused"] + last["jaxfused"]) / 2
        print(
            f"{now['tree']:14} {now['optimizer']:24} {first['jaxfused']:9.1f} {now['jaxfused']:9.1f}"
            f" {last['jaxfused']:9.1f}  {now['jaxfused'] / old:.3f}"
            + (f"  {now['optax'] / now['jaxfused']:.2f}" if now["optax"] else "")
        )
    return 0


def _line(figure: dict[str, Any]) -> str:
    theirs = figure["optax"]
    return (
        f"{figure['tree']:14} {figure['optimizer']:24} {figure['jaxfused']:9.1f} us"
        + (f" {figure['terabytes']:5.2f} TB/s" if figure["terabytes"] else " " * 11)
        + (f"   optax {theirs:9.1f} us, {theirs / figure['jaxfused']:.2f}x" if theirs else "")
        + "".join(f"\n    {line}" for line in figure["kernels"])
    )


def _measure(tree: str, row: Row, *, with_optax: bool, listed: int) -> dict[str, Any]:
    """Returns microseconds of a step's kernels, ours and Optax's, and terabytes per second of ours."""

    def ours(grads: Any, params: Any, state: Any) -> Any:
        return row.ours.step(grads, state, params, **row.how)

    microseconds, kernels = _of_step(ours, row.ours.init, TREES[tree])
    theirs = None
    if with_optax and (tx := row.theirs) is not None:

        def stock(grads: Any, params: Any, state: Any) -> Any:
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        theirs, _ = _of_step(stock, tx.init, TREES[tree])
    leaves = jax.tree.leaves(TREES[tree], is_leaf=lambda shape: isinstance(shape, tuple))
    count = sum(int(np.prod(shape)) for shape in leaves)
    rate = row.bytes * count / microseconds / 1e6
    return {
        "jaxfused": microseconds,
        "optax": theirs,
        "terabytes": rate,
        "kernels": _longest(kernels, listed),
    }


def _longest(kernels: Sequence[tuple[str, float]], count: int) -> list[str]:
    """Returns a line for each of the longest kernels; names that differ by a number count as one."""
    times: dict[str, list[float]] = collections.defaultdict(list)
    for name, microseconds in kernels:
        times[re.sub(r"[_.]\d+$", "", name)].append(microseconds)
    longest = sorted(times.items(), key=lambda item: -sum(item[1]))[:count]
    return [
        f"{sum(each):9.1f} us in {len(each):4}, each {min(each):7.1f} to {max(each):7.1f}: {name[:90]}"
        for name, each in longest
    ]


def _of_step(
    step: Callable[..., Any], init: Callable[[Any], Any], shapes: Any
) -> tuple[float, list[tuple[str, float]]]:
    """Returns the median kernel time of a step in microseconds, and the kernels of the last step.

    Each step continues from the results of the one before.
    """
    jax.clear_caches()
    grads, params = _random(shapes, 0), _random(shapes, 1)
    state = init(params)
    compiled = jax.jit(step, donate_argnums=(1, 2)).lower(grads, params, state).compile()

    def call() -> None:
        nonlocal params, state
        params, state = compiled(grads, params, state)
        jax.block_until_ready((params, state))

    samples = [timing.kernels(call) for _ in range(_SAMPLES)]
    return statistics.median(sum(us for _, us in kernels) for kernels in samples), samples[-1]


def _random(shapes: Any, seed: int) -> Any:
    """Returns arrays that repeat one random vector: a program for each shape would compile too long."""
    vector = jax.random.normal(jax.random.key(seed), (2**20,), jnp.float32)
    return jax.tree.map(
        lambda shape: jnp.resize(vector, (int(np.prod(shape)),)).reshape(shape),
        shapes,
        is_leaf=lambda shape: isinstance(shape, tuple),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
