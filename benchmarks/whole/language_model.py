"""Steps of large language models with random weights: `python -m benchmarks language_model decode`.

`decode` times a token of each text with a Llama of 8 billion parameters, beside the bytes that it
reads and other attentions. `train` times training steps of a transformer of 1.3 billion parameters.
"""

import argparse
import dataclasses
import math
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jaxfused
from benchmarks.cases import serving
from benchmarks.report import results
from benchmarks.run import budget, runner, timing
from benchmarks.run.budget import Rows
from benchmarks.whole import language_model_training
from examples.lm import speed
from examples.lm.config import Config, Rope
from examples.lm.loading import quantized, size_of
from examples.lm.model import LanguageModel

NAME = "language_model"
_STEPS = 64
"""Steps after which texts have their first length again."""
_BARS = (
    ("b1 int4", "b1", 1.7),
    ("b16", "b16 cudnn", 1.05),
    ("b16", "b16 flax", 1.5),
)
"""Rows (ours, other), and how many times as fast ours must be."""
_SHARES = {"b1": 0.8, "b16": 0.85}
"""Shares of the read ceiling that rows must reach."""


def main(arguments: Sequence[str]) -> int:
    """Measures a command's rows, the most valuable first; returns 1 if a bar is missed."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks {NAME}", description=__doc__)
    parser.add_argument("command", choices=("decode", "train"))
    parser.add_argument("--seconds", type=float, default=300.0, help="hard limit (%(default)s)")
    parser.add_argument("--only", default="", metavar="ROW,...", help="rows to measure (all)")
    parser.add_argument("--tiny", action="store_true", help="small shapes, which run on a CPU")
    parser.add_argument("--out", type=Path, default=results.DIRECTORY / "whole")
    options = parser.parse_args(arguments)
    if jax.default_backend() != "gpu" and not options.tiny:
        print("The benchmark needs an NVIDIA GPU; --tiny runs small shapes anywhere.")
        return 2
    decodes = options.command == "decode"
    known = ROWS if decodes else language_model_training.ROWS
    only = [name for name in options.only.split(",") if name] or list(known)
    if unknown := sorted(set(only) - set(known)):
        parser.error(f"--only: {', '.join(unknown)} is not known; known are {', '.join(known)}")
    with budget.limited(options.seconds):
        name = f"{NAME} {options.command}{', tiny' * options.tiny}"
        rows = Rows(name, options.out, options.seconds)
        chosen = [name for name in known if name in only]
        return (decode if decodes else language_model_training.train)(rows, chosen, options.tiny)


# --- caches with other attentions -----------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _CuDNN(jaxfused.KVCache):
    """A cache that jax.nn's attention by cuDNN reads."""

    def attend(self, query: jax.Array, **options: Any) -> jax.Array:
        lengths = self.lengths + query.shape[1]
        return jax.nn.dot_product_attention(
            query, self.key, self.value, key_value_seq_lengths=lengths, implementation="cudnn"
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Flax(jaxfused.KVCache):
    """A cache read as by Flax with decode=True: a mask of all of it, as many key heads as heads."""

    def attend(self, query: jax.Array, **options: Any) -> jax.Array:
        group = query.shape[2] // self.key.shape[2]
        key, value = (jnp.repeat(x, group, axis=2) for x in (self.key, self.value))
        lengths = self.lengths + query.shape[1]
        mask = (jnp.arange(key.shape[1]) < lengths[:, None])[:, None, None]
        return nnx.dot_product_attention(query, key, value, mask=mask)


# --- decode ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Row:
    cache: type[jaxfused.KVCache]
    many: bool = False
    """True if 16 texts of 8,192 tokens are continued, False if one of 1,024 is."""
    format: str = "float"


ROWS = {
    "b1": _Row(jaxfused.KVCache),
    "b16": _Row(jaxfused.KVCache, many=True),
    "b1 int4": _Row(jaxfused.KVCache, format="int4"),
    "b16 cudnn": _Row(_CuDNN, many=True),
    "b16 flax": _Row(_Flax, many=True),
}


def decode(rows: Rows, names: Sequence[str], tiny: bool) -> int:
    """Measures rows of `ROWS`; returns 1 if a bar is missed."""
    config = speed.SHAPES["llama-8b"]
    if tiny:
        changed = dict(width=64, depth=2, heads=4, key_heads=2, head_size=16, hidden=128)
        changed |= dict(vocabulary=264, scale=0.25, windows=(None,) * 2, ropes=(Rope(16, 1e4),) * 2)
        config = dataclasses.replace(config, **changed)
    ceiling = _read_rate(tiny)
    rows.add("read ceiling", {"gigabytes_per_second": ceiling})
    models = {"float": speed.random_model(config, "bfloat16", "float")}
    if any(ROWS[name].format == "int4" for name in names):
        # AWQ's and GPTQ's checkpoints have groups of 128.
        models["int4"] = quantized(models["float"], "int4", group_size=128)
    programs = {name: _Program(ROWS[name], models[ROWS[name].format], tiny) for name in names}

    def measure(name: str, compiled: Any) -> dict[str, Any]:
        program = programs[name]
        row = program.measure(compiled)
        if "milliseconds" in row:
            rate = program.bytes() / row["milliseconds"] / 1e6
            row |= {"gigabytes_per_second": rate, "share": rate / ceiling}
        return row

    rows.measure({name: program.lower for name, program in programs.items()}, measure)
    shares = {name: rows.rows.get(name, {}).get("share") for name in _SHARES}
    missed = [n for n, share in shares.items() if share is not None and share < _SHARES[n]]
    missed += [name for name, row in rows.rows.items() if row.get("copies") and name == "b16"]
    return int(bool(missed)) | rows.compare(_BARS)


class _Program:
    """A step: one token of each text, greedy."""

    def __init__(self, row: _Row, model: LanguageModel, tiny: bool):
        self._row, self._model = row, model
        self.batch, self.length = (16, 8192) if row.many else (1, 1024)
        if tiny:
            self.batch, self.length = (2, 32) if row.many else (1, 16)
        self._graphdef, params = nnx.split(model)
        # JAX flattens arguments at each call, a list in a 25th of the time that an nnx.State takes.
        self._params, self._tree = jax.tree.flatten(params)

    def lower(self) -> Any:
        step = jax.jit(self._step, donate_argnums=1)
        return step.lower(self._params, jax.eval_shape(self._first))

    def _first(self) -> Any:
        """Returns the first carry: a cache, the last tokens and largest logits."""
        return self._cache(), jnp.ones(self.batch, jnp.int32), jnp.zeros(self.batch, jnp.float32)

    def _step(self, params: Any, carry: Any) -> Any:
        cache, tokens, _ = carry
        model = nnx.merge(self._graphdef, jax.tree.unflatten(self._tree, params))
        features, cache = model(tokens[:, None], cache=cache)
        logits = model.logits(features[:, 0])
        return cache, logits.argmax(-1).astype(jnp.int32), logits.max(-1)

    def _cache(self) -> Any:
        """Returns a full cache whose keys differ, so that no softmax is uniform."""
        empty = self._model.empty_cache(batch=self.batch, length=self.length + _STEPS, chunk=1)
        shape = empty[0].key.shape
        keys = jax.random.split(jax.random.key(0, impl="rbg"))
        draws = [jax.random.normal(key, shape, jnp.bfloat16) for key in keys]
        parts = [[draw * (1 + i / 64) for draw in draws] for i in range(len(empty))]
        lengths = self._lengths()
        return tuple(self._row.cache(*kv, n) for kv, n in zip(parts, lengths, strict=True))

    def _lengths(self) -> list[jax.Array]:
        return [jnp.full(self.batch, self.length, jnp.int32)] * self._model.config.depth

    def bytes(self) -> int:
        """Returns the bytes that a step reads on average."""
        steps = argparse.Namespace(
            dtype="bfloat16", batch=self.batch, length=self.length, steps=_STEPS
        )
        return speed.bytes_of_a_step(self._model, size_of(self._model)[1], steps)

    def measure(self, compiled: Any) -> dict[str, Any]:
        error, limit = _attention_error(self._row.cache, self._model.config, self)
        if not error <= limit:
            return {"wrong": f"attention's relative error {error:.3g}, limit {limit:.3g}"}
        lengths = jax.jit(self._lengths)
        carry = compiled(self._params, jax.jit(self._first)())
        largest = float(carry[-1].mean())
        if not math.isfinite(largest):
            return {"wrong": "logits are not finite"}

        def run(count: int, first: int = 0) -> float:
            """Takes steps and waits; returns the milliseconds in which the host sends off one."""
            nonlocal carry
            begin = time.perf_counter()
            for step in range(first, first + count):
                if step % _STEPS == 0:
                    layers = zip(carry[0], lengths(), strict=True)
                    cache = tuple(dataclasses.replace(layer, lengths=n) for layer, n in layers)
                    carry = (cache, *carry[1:])
                carry = compiled(self._params, carry)
            seconds = time.perf_counter() - begin
            jax.block_until_ready(carry)
            return 1e3 * seconds / count

        row: dict[str, Any] = timing.steps(run)
        shape = ",".join(map(str, carry[0][0].key.shape))
        copies = len(re.findall(rf"= bf16\[{shape}\]\S* copy\(", compiled.as_text()))
        row |= {"error": error, "largest_logit": largest, "copies": copies}
        return row | {"host": run(8, first=1), "launches": _launches(partial(run, 1, first=1))}


def _attention_error(
    cache: type[jaxfused.KVCache], config: Config, sizes: _Program
) -> tuple[float, float]:
    """Returns the largest relative error of a row of attention against float64, and its limit."""
    heads = config.heads, config.key_heads, config.head_size
    (case,) = serving.cases(shapes=[(sizes.batch, sizes.length, *heads, 0)])
    inputs = case.make_inputs(jax.random.key(1))
    outputs = jax.jit(lambda q, k, v, _, held: cache(k, v, held).attend(q))(*inputs)
    with jax.enable_x64(True):
        truth = jax.jit(runner.in_float64(case.truth))(*inputs)
    return runner.distance(outputs, truth), case.error_limit


def _read_rate(tiny: bool) -> float:
    """Returns the GB/s at which decode's attention reads 2 GB of keys and values."""
    sizes = (2, 64, 4, 2, 16, 0) if tiny else (64, 8192, 32, 8, 128, 0)
    (case,) = serving.cases(shapes=[sizes])
    attend = jax.jit(case.jax[case.default])
    inputs = case.make_inputs(jax.random.key(0))
    return case.bytes / min(timing.wall(attend, [inputs]).microseconds) / 1e3


def _launches(call: Callable[[], None]) -> dict[str, int]:
    """Returns how often a call launches CUDA graphs and single kernels, and updates graphs' arguments.

    From JAX's profiler; XLA updates a graph whose arrays have moved.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            call()
        traces = map(jax.profiler.ProfileData.from_file, map(str, Path(folder).rglob("*.pb")))
        lines = [line for trace in traces for plane in trace.planes for line in plane.lines]
        names = [event.name for line in lines for event in line.events]
    words = {
        "graphs": "GraphLaunch",
        "kernels": "LaunchKernel",
        "updates": "command_buffer::update",
    }
    return {key: sum(word in name for name in names) for key, word in words.items()}
