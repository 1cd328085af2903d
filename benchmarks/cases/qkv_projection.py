"""qkv_projection against the product alone: the split into heads, and rope, should cost nothing."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax

import jaxfused
from benchmarks.cases.linear import product, random_operands
from benchmarks.cases.rope import flax_rope, tables, torch_rope
from benchmarks.run.case import BARE, UNROTATED, Arrays, Bar, Case, functions, torch_compiled

Shape = tuple[int, int, int, int, int]
"""Sizes (B, T, N, K, H); there are N * H input features."""

_LLAMA: Shape = (8, 4096, 32, 8, 128)
_VIT_B: Shape = (256, 197, 12, 12, 64)
SHAPES: tuple[Shape, ...] = (_LLAMA, _VIT_B, (128, 197, 16, 16, 64))
QUICK_SHAPES = (_LLAMA, _VIT_B)


def cases(quick: bool = False, shapes: Sequence[Shape] | None = None) -> list[Case]:
    """Returns every operation at every shape, in the order in which they are measured."""
    shapes = shapes or (QUICK_SHAPES if quick else SHAPES)
    return [_case(operation, shape) for operation in _OPERATIONS for shape in shapes]


# --- ours and the peers ---------------------------------------------------------------------------


def _projection(x, w, *tables, sizes, implementation):
    heads, key_heads = sizes
    cos, sin = tables or (None, None)
    return jaxfused.qkv_projection(
        x, w, heads=heads, key_heads=key_heads, cos=cos, sin=sin, implementation=implementation
    )


def _unrotated(x, w, *_, sizes):
    return _projection(x, w, sizes=sizes, implementation=None)


def _peer_projection(x, w, *tables, sizes, rope):
    """Computes the product, splits it into heads and rotates q and k, in JAX and in torch."""
    heads, key_heads = sizes
    qkv = (x @ w).reshape(*x.shape[:-1], heads + 2 * key_heads, -1)
    q, k, v = (
        qkv[..., :heads, :],
        qkv[..., heads : heads + key_heads, :],
        qkv[..., heads + key_heads :, :],
    )
    if tables:
        q, k = rope(q, k, *tables, interleaved=False)
    return q, k, v


# --- the cases ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Operation:
    name: str
    bars: tuple[Bar, ...]
    rotates: bool
    with_gradient: bool = False


def _case(operation: _Operation, shape: Shape) -> Case:
    batch, length, heads, key_heads, head_size = shape
    sizes = (heads, key_heads)
    written = functions(
        partial(_projection, sizes=sizes),
        {"xla": partial(_peer_projection, sizes=sizes, rope=flax_rope)},
        {
            "torch_compile": partial(
                torch_compiled, partial(_peer_projection, sizes=sizes, rope=torch_rope)
            )
        },
        differentiable=2,
        cotangents=3 if operation.with_gradient else 0,
    )
    if not operation.with_gradient:
        written["jax"][BARE] = product
        if operation.rotates:
            written["jax"][UNROTATED] = partial(_unrotated, sizes=sizes)
    rows, features = batch * length, heads * head_size
    out_features = (heads + 2 * key_heads) * head_size
    x_size, w_size, y_size = rows * features, features * out_features, rows * out_features
    tables_size = length * head_size if operation.rotates else 0
    size = 2 * (x_size + w_size + y_size) + 4 * tables_size
    if operation.with_gradient:
        # Reads x, w and the cotangents, and writes dx and dw.
        size += 2 * (2 * x_size + 2 * w_size + y_size) + 4 * tables_size
    return Case(
        name=operation.name,
        shape=shape,
        make_inputs=partial(_inputs, operation, shape),
        bytes=size,
        flops=2 * rows * features * out_features * (3 if operation.with_gradient else 1),
        bars=operation.bars,
        **written,
    )


_OVER_XLA = Bar("xla", aim=1.0)

_OPERATIONS = (
    _Operation("qkv_projection forward", (Bar(BARE, must=0.95), _OVER_XLA), rotates=False),
    _Operation(
        "qkv_projection with rope forward", (Bar(UNROTATED, must=0.95), _OVER_XLA), rotates=True
    ),
    _Operation("qkv_projection forward+backward", (_OVER_XLA,), rotates=False, with_gradient=True),
    _Operation(
        "qkv_projection with rope forward+backward", (_OVER_XLA,), rotates=True, with_gradient=True
    ),
)


def _inputs(operation: _Operation, shape: Shape, key: jax.Array) -> Arrays:
    batch, length, heads, key_heads, head_size = shape
    heads_of = [heads, key_heads, key_heads] if operation.with_gradient else []
    x, *rest = random_operands(
        key,
        [
            (batch, length, heads * head_size),
            *((batch, length, n, head_size) for n in heads_of),
        ],
        [(heads * head_size, (heads + 2 * key_heads) * head_size)],
    )
    return x, rest[-1], *(tables(shape) if operation.rotates else ()), *rest[:-1]
