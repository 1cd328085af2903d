"""Compiles FSDP for absent H200s and counts its memory and bytes: `benchmarks parallel --without-gpu`.

Activations are small at 16 tokens a GPU, so that the peak memory is that of parameters, gradients,
moments and the collectives' buffers. A layer's cost is the difference of programs of two depths.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jaxfused
from benchmarks.whole import parallel_paper
from benchmarks.whole.parallel_hlo import received_bytes
from benchmarks.without_gpu import target
from examples import training
from examples.lm.model import LanguageModel
from examples.lm.sizes import MODELS, make_loss
from examples.multi_gpu.mesh import OnMesh
from jaxfused import dispatch

_MODEL, _TOKENS, _DEPTHS = "lm-1b", 16, (2, 4)


def run(counts: Sequence[int]) -> int:
    """Prints a line for each number of GPUs; returns the exit status."""
    if reason := target.why_unavailable():
        print(reason)
        return 2
    devices = target.prepare_host(max(counts))
    depth = MODELS[_MODEL].depth
    for count in counts:
        few, more = (_counted(compiled(_MODEL, n, devices[:count]), count) for n in _DEPTHS)
        layers = (depth - _DEPTHS[0]) / (_DEPTHS[1] - _DEPTHS[0])
        whole = {name: few[name] + layers * (more[name] - few[name]) for name in more}
        paper = parallel_paper.fully_sharded(
            *parallel_paper.LANGUAGE_MODEL, count, parallel_paper.Machine()
        )
        print(
            f"fsdp {_MODEL} {count} GPUs: peak {whole.pop('peak') / 1e9:.2f} GB (on paper"
            f" {paper.memory / 1e9:.2f}), received "
            + ", ".join(f"{name} {size / 1e6:,.0f} MB" for name, size in sorted(whole.items()))
            + f" (on paper {paper.received / 1e6:,.0f})",
            flush=True,
        )
    return 0


def _counted(program: Any, count: int) -> dict[str, float]:
    """Returns the peak memory of a GPU and the bytes that it receives, by kind of collective."""
    received = received_bytes(program.as_text(), count)
    return {"peak": program.memory_analysis().peak_memory_in_bytes, **received}


def compiled(model: str, depth: int, devices: Sequence[Any]) -> Any:
    """Returns the compiled FSDP step of a language model's first layers; devices may be absent."""
    whole = MODELS[model]
    config = dataclasses.replace(
        whole, depth=depth, ropes=whole.ropes[:depth], windows=whole.windows[:depth]
    )
    count = len(devices)
    place = OnMesh(dict(fsdp=count), layers="blocks", devices=devices)

    def build() -> LanguageModel:
        return LanguageModel(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))

    tokens = jax.ShapeDtypeStruct((1, _TOKENS), jnp.int32)
    graphdef, params = training.create(build, tokens, placement=place)
    optimizer = jaxfused.optim.adamw(1e-3)
    value_and_grad = place.value_and_grad(make_loss(graphdef))

    def step(params: Any, state: Any, text: jax.Array) -> Any:
        _, grads = value_and_grad(params, {"text": text}, jax.random.key(0))
        return optimizer.step(grads, state, params, max_norm=1.0)

    operands = params, place.init(optimizer.init, params)
    text = jax.ShapeDtypeStruct((count, _TOKENS + 1), jnp.int32, sharding=place.batch)
    kept = jax.tree.map(lambda a: a.sharding, operands)
    jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=kept)
    with jax.set_mesh(place.mesh):
        if devices[0].platform == "cpu":
            return jitted.lower(*operands, text).compile()
        with dispatch.assume(target.H200):
            return target.compile(jitted.trace(*operands, text).lower(lowering_platforms=("cuda",)))
