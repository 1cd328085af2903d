"""rope of q and k together, and qkv_projection with rope against the product alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

import jaxfused
from benchmarks.case import (
    BARE,
    BULK_COPY,
    Arrays,
    Bar,
    Case,
    default_of,
    functions,
    torch_compiled,
)
from benchmarks.linear import product, random_operands
from jaxfused import dispatch
from jaxfused.ops.qkv_projection import implementations as projections
from jaxfused.ops.rope import implementations

Shape = tuple[int, int, int, int, int]
"""(B, T, N, K, H); the projection has N * H features in."""

SHAPES: tuple[Shape, ...] = ((8, 4096, 32, 8, 128), (256, 197, 12, 12, 64))


def cases(quick: bool = False, shapes: Sequence[Shape] | None = None) -> list[Case]:
    """Every operation at every shape, in the order in which they are measured."""
    del quick  # There are few shapes.
    shapes = shapes or SHAPES
    return [make(operation, shape) for make, operation in _OPERATIONS for shape in shapes]


# --- ours and the peers ---------------------------------------------------------------------------


def _rope(q, k, cos, sin, *, interleaved, implementation):
    return jaxfused.rope(
        q, k, cos=cos, sin=sin, interleaved=interleaved, implementation=implementation
    )


def _flax_rope(q, k, cos, sin, *, interleaved):
    """As Gemma's and MaxText's modules have it: tables in float32, the result in x's dtype."""
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


def _torch_rope(q, k, cos, sin, *, interleaved):
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


def _projection(x, w, cos, sin, *, sizes, implementation):
    heads, key_heads = sizes
    return jaxfused.qkv_projection(
        x, w, heads=heads, key_heads=key_heads, cos=cos, sin=sin, implementation=implementation
    )


def _peer_projection(x, w, cos, sin, *, sizes, rope):
    """For JAX and torch: the product, its three parts as heads, and the rotation of two."""
    heads, key_heads = sizes
    qkv = (x @ w).reshape(*x.shape[:-1], heads + 2 * key_heads, -1)
    q, k, v = (
        qkv[..., :heads, :],
        qkv[..., heads : heads + key_heads, :],
        qkv[..., heads + key_heads :, :],
    )
    return *rope(q, k, cos, sin, interleaved=False), v


# --- the cases ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Operation:
    name: str
    bars: tuple[Bar, ...]
    interleaved: bool = False
    with_gradient: bool = False


def _rope_case(operation: _Operation, shape: Shape) -> Case:
    batch, length, heads, key_heads, head_size = shape
    interleaved = operation.interleaved
    written = functions(
        partial(_rope, interleaved=interleaved),
        {"xla": partial(_flax_rope, interleaved=interleaved)},
        {"torch_compile": partial(torch_compiled, partial(_torch_rope, interleaved=interleaved))},
        differentiable=2,
        cotangents=2 if operation.with_gradient else 0,
    )
    passes = 4 if operation.with_gradient else 2
    values = batch * length * (heads + key_heads) * head_size
    return Case(
        name=operation.name,
        shape=shape,
        make_inputs=partial(_rope_inputs, shape, operation.with_gradient),
        bytes=passes * values * 2 + passes // 2 * length * head_size * 4,
        default=default_of(
            implementations(
                dispatch.current_device(),
                length=length,
                heads=heads,
                key_heads=key_heads,
                head_size=head_size,
                rotary_dim=head_size,
                interleaved=interleaved,
                dtype=jnp.dtype(jnp.bfloat16),
                k_dtype=jnp.dtype(jnp.bfloat16),
            )
        ),
        bars=operation.bars,
        **written,
    )


def _projection_case(operation: _Operation, shape: Shape) -> Case:
    batch, length, heads, key_heads, head_size = shape
    sizes = (heads, key_heads)
    written = functions(
        partial(_projection, sizes=sizes),
        {"xla": partial(_peer_projection, sizes=sizes, rope=_flax_rope)},
        {
            "torch_compile": partial(
                torch_compiled, partial(_peer_projection, sizes=sizes, rope=_torch_rope)
            )
        },
        differentiable=2,
        cotangents=3 if operation.with_gradient else 0,
    )
    if not operation.with_gradient:
        written["jax"][BARE] = product
    rows, features = batch * length, heads * head_size
    out_features = (heads + 2 * key_heads) * head_size
    x_size, w_size, y_size = rows * features, features * out_features, rows * out_features
    tables_size = length * head_size
    size = 2 * (x_size + w_size + y_size) + 4 * tables_size
    if operation.with_gradient:
        # Reads x, w and the cotangents, and writes dx and dw.
        size += 2 * (2 * x_size + 2 * w_size + y_size) + 4 * tables_size
    return Case(
        name=operation.name,
        shape=shape,
        make_inputs=partial(_projection_inputs, shape, operation.with_gradient),
        bytes=size,
        flops=2 * rows * features * out_features * (3 if operation.with_gradient else 1),
        default=default_of(projections(dispatch.current_device())),
        bars=operation.bars,
        **written,
    )


_OF_COPY = Bar(BULK_COPY, must=0.9)
_OVER_XLA = Bar("xla", aim=1.0)

_OPERATIONS: tuple[tuple[Callable[[_Operation, Shape], Case], _Operation], ...] = (
    (_rope_case, _Operation("rope forward", (_OF_COPY, _OVER_XLA))),
    (_rope_case, _Operation("rope, neighbours, forward", (_OF_COPY, _OVER_XLA), interleaved=True)),
    (_rope_case, _Operation("rope forward+backward", (_OF_COPY, _OVER_XLA), with_gradient=True)),
    (
        _projection_case,
        _Operation("qkv_projection with rope forward", (Bar(BARE, must=0.95), _OVER_XLA)),
    ),
    (
        _projection_case,
        _Operation("qkv_projection with rope forward+backward", (_OVER_XLA,), with_gradient=True),
    ),
)


def _tables(shape: Shape) -> Arrays:
    _, length, _, _, head_size = shape
    return jaxfused.rope_tables(jnp.arange(length), head_size)


def _rope_inputs(shape: Shape, with_gradient: bool, key: jax.Array) -> Arrays:
    batch, length, heads, key_heads, head_size = shape
    heads_of = [heads, key_heads] * (2 if with_gradient else 1)
    q, k, *dys = random_operands(key, [(batch, length, n, head_size) for n in heads_of], [])
    return q, k, *_tables(shape), *dys


def _projection_inputs(shape: Shape, with_gradient: bool, key: jax.Array) -> Arrays:
    batch, length, heads, key_heads, head_size = shape
    heads_of = [heads, key_heads, key_heads] if with_gradient else []
    x, *rest = random_operands(
        key,
        [
            (batch, length, heads * head_size),
            *((batch, length, n, head_size) for n in heads_of),
        ],
        [(heads * head_size, (heads + 2 * key_heads) * head_size)],
    )
    return x, rest[-1], *_tables(shape), *rest[:-1]
