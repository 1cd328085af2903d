"""Compares with jax-linear-attention, cuDNN and XLA in one process: `python -m benchmarks jla`.

Kernels of that package have their own layouts (w_gate and w_up in one array, embeddings by class). They
get inputs in these layouts, so that no conversion is timed. Needs `pip install jax-linear-attention`.
"""

import argparse
import dataclasses
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxfused
from benchmarks.run import timing

NAME = "jla"
_LARGEST_ERROR = 3e-2
"""Largest relative difference of a result or gradient from the peer's, by the norm of all values."""

Program = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Problem:
    """Programs that compute the same results and gradients of the same inputs."""

    name: str
    inputs: Callable[[jax.Array], tuple[Any, ...]]
    programs: dict[str, Program]
    """Functions of the inputs by name, ours first."""


def with_gradients(f: Program, differentiable: Sequence[int]) -> Program:
    """Returns a function from (*inputs, dy) to (y, gradients to the inputs at these indices)."""

    def run(*args: Any) -> Any:
        *operands, dy = args

        def of_moving(*moving: Any) -> Any:
            all_operands = list(operands)
            for index, value in zip(differentiable, moving, strict=True):
                all_operands[index] = value
            return f(*all_operands)

        y, pullback = jax.vjp(of_moving, *(operands[i] for i in differentiable))
        y, dy = jax.lax.optimization_barrier((y, dy))
        return y, *pullback(dy)

    return run


# --- attention ------------------------------------------------------------------------------------


def _attention(batch: int, length: int, heads: int, key_heads: int, size: int, **options: Any):
    window, documents = options.get("window"), options.get("documents")
    mask = {} if window is None else dict(local_window_size=(window - 1, 0))

    def inputs(key: jax.Array) -> tuple[Any, ...]:
        keys = jax.random.split(key, 5)
        shapes = [(heads, keys[0]), (key_heads, keys[1]), (key_heads, keys[2]), (heads, keys[3])]
        q, k, v, dy = (
            jax.random.normal(k, (batch, length, n, size), jnp.bfloat16) for n, k in shapes
        )
        if documents is None:
            return q, k, v, dy
        cuts = np.sort(np.random.default_rng(0).integers(1, length, (batch, documents - 1)))
        ids = (np.arange(length)[None, :, None] >= cuts[:, None, :]).sum(-1)
        return q, k, v, jnp.asarray(ids, jnp.int32), dy

    def ours(q, k, v, ids=None):
        segments = {} if ids is None else dict(query_segment_ids=ids, key_value_segment_ids=ids)
        return jaxfused.dot_product_attention(q, k, v, is_causal=True, **mask, **segments)

    def theirs(backward, q, k, v, ids=None):
        from jla.ops.mosaic_gpu.attention import flash_attention

        return flash_attention(q, k, v, sliding_window=window, segment_ids=ids, backward=backward)

    forwards = {
        "ours": ours,
        "jla": partial(theirs, "ranged"),
        "jla fused": partial(theirs, "fused"),
    }
    if documents is None:
        forwards["cudnn"] = partial(
            jax.nn.dot_product_attention, is_causal=True, implementation="cudnn", **mask
        )
    shape = f"[{batch}, {length}, {heads}/{key_heads}, {size}]"
    what = f" window {window}" * (window is not None) + f" {documents} documents" * bool(documents)
    return Problem(
        f"causal attention {shape}{what}",
        inputs,
        {name: with_gradients(f, (0, 1, 2)) for name, f in forwards.items()},
    )


# --- short convolution ----------------------------------------------------------------------------


def _short_conv(batch: int, length: int, channels: int, taps: int = 4):
    def inputs(key: jax.Array) -> tuple[Any, ...]:
        keys = jax.random.split(key, 4)
        x, dy = (jax.random.normal(k, (batch, length, channels), jnp.bfloat16) for k in keys[:2])
        w = jax.random.normal(keys[2], (channels, taps), jnp.float32) / 2
        return x, w, jax.random.normal(keys[3], (channels,), jnp.float32), dy

    def ours(x, w, bias):
        return jaxfused.conv(
            x,
            w.T[:, None],
            bias,
            padding="CAUSAL",
            feature_group_count=channels,
            activation="silu",
        )

    def theirs(x, w, bias):
        from jla.ops.mosaic_gpu.short_conv import short_conv

        return short_conv(x, w, bias)

    def shifts(x, w, bias):
        padded = jnp.pad(x, ((0, 0), (taps - 1, 0), (0, 0)))
        z = sum(padded[:, k : k + length] * w[:, k].astype(x.dtype) for k in range(taps))
        return jax.nn.silu(z + bias.astype(x.dtype))

    forwards = {"ours": ours, "jla": theirs, "xla": shifts}
    return Problem(
        f"short conv [{batch}, {length}, {channels}] {taps} taps",
        inputs,
        {name: with_gradients(f, (0, 1, 2)) for name, f in forwards.items()},
    )


# --- products -------------------------------------------------------------------------------------


def _gated_mlp(rows: int, features: int, hidden: int):
    def inputs(key: jax.Array) -> tuple[Any, ...]:
        keys = jax.random.split(key, 4)
        x, dy = (jax.random.normal(k, (rows, features), jnp.bfloat16) for k in keys[:2])
        both = jax.random.normal(keys[2], (features, 2, hidden), jnp.bfloat16) * features**-0.5
        down = jax.random.normal(keys[3], (hidden, features), jnp.bfloat16) * hidden**-0.5
        return x, both[:, 0], both[:, 1], down, both, dy

    def ours(x, gate, up, down, both):
        del both
        return jaxfused.gated_mlp(x, gate, up, down)

    def stock(x, gate, up, down, both):
        del both
        return (jax.nn.silu(x @ gate) * (x @ up)) @ down

    def theirs(x, gate, up, down, both):
        from jla.ops.mosaic_gpu.fused_gemm import swiglu_mlp

        del gate, up
        return swiglu_mlp(x, both, down)

    return Problem(
        f"gated mlp {rows} x {features} x {hidden}",
        inputs,
        {
            "ours": with_gradients(ours, (0, 3, 1, 2)),
            "jla": with_gradients(theirs, (0, 3, 4)),
            "xla": with_gradients(stock, (0, 3, 1, 2)),
        },
    )


def _linear_cross_entropy(tokens: int, features: int, classes: int):
    def inputs(key: jax.Array) -> tuple[Any, ...]:
        keys = jax.random.split(key, 3)
        x = jax.random.normal(keys[0], (tokens, features), jnp.bfloat16)
        w = jax.random.normal(keys[1], (features, classes), jnp.bfloat16) * features**-0.5
        return x, w, w.T.copy(), jax.random.randint(keys[2], (tokens,), 0, classes), jnp.ones(())

    def ours(x, w, by_class, labels):
        del by_class
        return jaxfused.linear_softmax_cross_entropy(x, w, labels)

    def theirs(x, w, by_class, labels):
        from jla.ops.cross_entropy import linear_cross_entropy_objective

        del w
        objective = linear_cross_entropy_objective(x, by_class, labels, impl="mosaic_gpu")
        return objective.objective_sum / tokens

    return Problem(
        f"linear cross-entropy {tokens} x {features} x {classes}",
        inputs,
        {"ours": with_gradients(ours, (0, 1)), "jla": with_gradients(theirs, (0, 2))},
    )


PROBLEMS = {
    "attention": [
        _attention(4, 4096, 16, 16, 128),
        _attention(1, 16384, 32, 8, 128),
        _attention(8, 2048, 16, 16, 64),
        _attention(2, 8192, 32, 8, 128, window=1024),
        _attention(1, 16384, 32, 8, 128, documents=16),
        _attention(8, 8192, 16, 4, 128, documents=32),
    ],
    "conv": [_short_conv(4, 4096, 4096), _short_conv(1, 16384, 8192), _short_conv(8, 2048, 1536)],
    "mlp": [
        _gated_mlp(16384, 2048, 5632),
        _gated_mlp(8192, 4096, 14336),
        _gated_mlp(16384, 4096, 11008),
    ],
    "loss": [
        _linear_cross_entropy(16384, 2048, 128256),
        _linear_cross_entropy(8192, 2048, 50304),
        _linear_cross_entropy(16384, 2048, 32000),
    ],
}


# --- the command ----------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks {NAME}", description=__doc__)
    parser.add_argument("names", nargs="*", default=[*PROBLEMS], help=f"of {', '.join(PROBLEMS)}")
    parser.add_argument("--seconds", type=float, default=1.5, help="of a problem's measurement")
    parser.add_argument("--out", type=Path, help="writes all samples and kernels as JSON")
    options = parser.parse_args(arguments)
    print(jax.devices()[0].device_kind)
    written: dict[str, Any] = {}
    for name in options.names:
        for problem in PROBLEMS[name]:
            try:
                written[problem.name] = _measure(problem, options.seconds)
            # A peer that refuses must not end the measurements of the others.
            except Exception as error:
                print(f"{problem.name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
            jax.clear_caches()
            if options.out:
                options.out.write_text(json.dumps(written))
    return 0


def _measure(problem: Problem, seconds: float) -> dict[str, Any]:
    sets = [problem.inputs(jax.random.key(seed)) for seed in range(2)]
    compiled, results = {}, {}
    for name, program in problem.programs.items():
        compiled[name] = jax.jit(program).lower(*sets[0]).compile()
        results[name] = compiled[name](*sets[0])
    repeats = {
        name: all(
            bool(jnp.array_equal(a, b))
            for a, b in zip(results[name], compiled[name](*sets[0]), strict=True)
        )
        for name in compiled
    }
    errors = {
        name: max(_difference(a, b) for a, b in zip(results["ours"], result, strict=False))
        for name, result in results.items()
    }
    del results
    samples = timing.interleaved(compiled, sets, seconds)
    medians = {name: float(np.median(s.microseconds)) for name, s in samples.items()}
    line = [
        f"{name} {us:.0f}"
        + f" [{us / medians['ours']:.3f}]" * (name != "ours")
        + " bits vary" * (not repeats[name])
        + f" DIFFERS BY {errors[name]:.1e}" * (not errors[name] < _LARGEST_ERROR)
        for name, us in medians.items()
    ]
    print(f"{problem.name}: {', '.join(line)}", flush=True)
    return {
        name: {
            "microseconds": s.microseconds,
            "kernels": s.kernels,
            "bits repeat": repeats[name],
            "difference": errors[name],
        }
        for name, s in samples.items()
    }


@jax.jit
def _norms(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.linalg.norm((a - b).ravel()), jnp.linalg.norm(a.ravel())


def _difference(ours: jax.Array, other: jax.Array) -> float:
    """Returns the relative difference by the norm of all values; 0 for arrays of different layouts."""
    if ours.shape != other.shape:
        return 0.0
    difference, norm = _norms(ours, other)
    return float(difference / norm)
