"""sample: tokens drawn from float32 logits, compared with sorts of the vocabulary."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import jaxfused
from benchmarks.run.case import BULK_COPY, Arrays, Bar, Case, functions, torch_compiled

SHAPES: tuple[tuple[int, int], ...] = ((64, 128256), (1, 128256), (256, 32000))
"""Sizes (sequences, vocabulary)."""
QUICK_SHAPES = SHAPES[:1]
TOP_P, TOP_K = 0.9, 50


@dataclass(frozen=True)
class _Operation:
    name: str
    options: dict[str, Any]
    in_jax: Callable[..., Any]
    in_torch: Callable[..., Any]


def cases(quick: bool = False, shapes: Sequence[tuple[int, int]] | None = None) -> list[Case]:
    chosen = shapes or (QUICK_SHAPES if quick else SHAPES)
    return [_case(operation, shape) for operation in _OPERATIONS for shape in chosen]


def _case(operation: _Operation, shape: tuple[int, int]) -> Case:
    def ours(logits, seeds, *, implementation):
        return jaxfused.sample(logits, seeds, implementation=implementation, **operation.options)

    def make_inputs(key: jax.Array) -> Arrays:
        logits = 3.0 * jax.random.normal(key, shape, jnp.float32)
        return logits, jnp.arange(shape[0], dtype=jnp.int32)

    # The target is 30 us for the first shape on an H100, whose bulk copy reads about 3 TB/s.
    is_timed = shape == SHAPES[0] and "top_k" not in operation.options
    bars = (Bar(BULK_COPY, must=0.36),) if is_timed else ()
    return Case(
        name=operation.name,
        shape=shape,
        make_inputs=make_inputs,
        bytes=4 * shape[0] * shape[1],
        bars=(*bars, Bar("xla", must=5.0)) if shape == SHAPES[0] and operation.options else (),
        dtype="float32",
        # The peers draw other noise, so their tokens differ.
        error_limit=math.inf,
        **functions(
            ours,
            {"xla": operation.in_jax},
            {"torch_compile": partial(torch_compiled, operation.in_torch)},
            differentiable=0,
            cotangents=0,
        ),
    )


def _drawn(seeds: jax.Array, logits: jax.Array) -> jax.Array:
    keys = jax.vmap(jax.random.key)(seeds)
    return jax.vmap(jax.random.categorical)(keys, logits)


def _sorted_top_p(logits, seeds):
    order = jnp.argsort(logits, axis=-1, descending=True)
    falling = jnp.take_along_axis(logits, order, axis=-1)
    p = jax.nn.softmax(falling)
    kept = jnp.cumsum(p, axis=-1) - p < TOP_P
    place = _drawn(seeds, jnp.where(kept, falling, -jnp.inf))
    return jnp.take_along_axis(order, place[:, None], axis=-1)[:, 0]


def _top_k(logits, seeds):
    largest, order = jax.lax.top_k(logits, TOP_K)
    return jnp.take_along_axis(order, _drawn(seeds, largest)[:, None], axis=-1)[:, 0]


def _torch_top_p(logits, seeds):
    import torch

    del seeds
    falling, order = torch.sort(logits, dim=-1, descending=True)
    p = torch.softmax(falling, dim=-1)
    p = torch.where(torch.cumsum(p, dim=-1) - p < TOP_P, p, 0.0)
    return order.gather(-1, torch.multinomial(p, 1))[:, 0]


def _torch_top_k(logits, seeds):
    import torch

    del seeds
    largest, order = torch.topk(logits, TOP_K, dim=-1)
    return order.gather(-1, torch.multinomial(torch.softmax(largest, dim=-1), 1))[:, 0]


def _torch_all(logits, seeds):
    import torch

    del seeds
    return torch.multinomial(torch.softmax(logits, dim=-1), 1)[:, 0]


_OPERATIONS = (
    _Operation("sample", {}, lambda logits, seeds: _drawn(seeds, logits), _torch_all),
    _Operation("sample top_p", dict(top_p=TOP_P), _sorted_top_p, _torch_top_p),
    _Operation("sample top_k", dict(top_k=TOP_K), _top_k, _torch_top_k),
    _Operation("sample top_k and top_p", dict(top_k=TOP_K, top_p=TOP_P), _top_k, _torch_top_k),
)
