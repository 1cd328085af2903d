"""rope of q and k together."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

import jaxfused
from benchmarks.cases.linear import random_operands
from benchmarks.run.case import BULK_COPY, Arrays, Bar, Case, functions, torch_compiled

Shape = tuple[int, int, int, int, int]
"""Sizes (B, T, N, K, H)."""

SHAPES: tuple[Shape, ...] = ((8, 4096, 32, 8, 128), (256, 197, 12, 12, 64))


def cases(quick: bool = False, shapes: Sequence[Shape] | None = None) -> list[Case]:
    """Returns every operation at every shape, in the order in which they are measured."""
    del quick  # There are few shapes.
    shapes = shapes or SHAPES
    return [_case(operation, shape) for operation in _OPERATIONS for shape in shapes]


# --- ours and the peers ---------------------------------------------------------------------------


def _rope(q, k, cos, sin, *, interleaved, implementation):
    return jaxfused.rope(
        q, k, cos=cos, sin=sin, interleaved=interleaved, implementation=implementation
    )


def flax_rope(q, k, cos, sin, *, interleaved):
    """Rotates as Gemma and MaxText do: tables in float32, the result in x's dtype."""
    cos, sin = cos[:, None], sin[:, None]

    def rotate(x):
        if interleaved:
            first, second = x[..., ::2], x[..., 1::2]
        else:
            first, second = jnp.split(x, 2, axis=-1)
        pair = first * cos - second * sin, second * cos + first * sin
        if interleaved:
            rotated = jnp.stack(pair, axis=-1).reshape(x.shape)
        else:
            rotated = jnp.concatenate(pair, axis=-1)
        return rotated.astype(x.dtype)

    return rotate(q), rotate(k)


def torch_rope(q, k, cos, sin, *, interleaved):
    import torch

    cos, sin = cos[:, None], sin[:, None]

    def rotate(x):
        if interleaved:
            first, second = x[..., ::2], x[..., 1::2]
        else:
            first, second = x.chunk(2, dim=-1)
        pair = (first * cos - second * sin, second * cos + first * sin)
        if interleaved:
            rotated = torch.stack(pair, dim=-1).reshape(x.shape)
        else:
            rotated = torch.cat(pair, dim=-1)
        return rotated.to(x.dtype)

    return rotate(q), rotate(k)


# --- the cases ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Operation:
    name: str
    bars: tuple[Bar, ...]
    interleaved: bool = False
    with_gradient: bool = False


def _case(operation: _Operation, shape: Shape) -> Case:
    batch, length, heads, key_heads, head_size = shape
    interleaved = operation.interleaved
    written = functions(
        partial(_rope, interleaved=interleaved),
        {"xla": partial(flax_rope, interleaved=interleaved)},
        {"torch_compile": partial(torch_compiled, partial(torch_rope, interleaved=interleaved))},
        differentiable=2,
        cotangents=2 if operation.with_gradient else 0,
    )
    passes = 4 if operation.with_gradient else 2
    values = batch * length * (heads + key_heads) * head_size
    return Case(
        name=operation.name,
        shape=shape,
        make_inputs=partial(_inputs, shape, operation.with_gradient),
        bytes=passes * values * 2 + passes // 2 * length * head_size * 4,
        bars=operation.bars,
        **written,
    )


_OF_COPY = Bar(BULK_COPY, must=0.9)
_OVER_XLA = Bar("xla", aim=1.0)

_OPERATIONS = (
    _Operation("rope forward", (_OF_COPY, _OVER_XLA)),
    _Operation("rope, neighbours, forward", (_OF_COPY, _OVER_XLA), interleaved=True),
    _Operation("rope forward+backward", (_OF_COPY, _OVER_XLA), with_gradient=True),
)


def tables(shape: Shape) -> Arrays:
    _, length, _, _, head_size = shape
    return jaxfused.rope_tables(jnp.arange(length), head_size)


def _inputs(shape: Shape, with_gradient: bool, key: jax.Array) -> Arrays:
    batch, length, heads, key_heads, head_size = shape
    heads_of = [heads, key_heads] * (2 if with_gradient else 1)
    q, k, *dys = random_operands(key, [(batch, length, n, head_size) for n in heads_of], [])
    return q, k, *tables(shape), *dys
