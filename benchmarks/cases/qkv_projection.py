"""qkv_projection against the product alone: the split into heads, and rope, should cost nothing."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jaxfused
from benchmarks.cases import of_config
from benchmarks.cases.linear import product
from benchmarks.cases.rope import torch_rope
from benchmarks.run.case import BARE, UNROTATED, Bar, Case, Function
from benchmarks.sweep.configs import QKVProjection

Shape = tuple[int, int, int, int, int]
"""Sizes (batch, tokens, heads, key heads, head size); there are heads * head size input features."""

_LLAMA: Shape = (8, 4096, 32, 8, 128)
_VIT_B: Shape = (256, 197, 12, 12, 64)
SHAPES: tuple[Shape, ...] = (_LLAMA, _VIT_B, (128, 197, 16, 16, 64))
QUICK_SHAPES = (_LLAMA, _VIT_B)


def cases(quick: bool = False, shapes: Sequence[Shape] | None = None) -> list[Case]:
    """Returns a case for each operation at each shape, in the order of measurement."""
    shapes = shapes or (QUICK_SHAPES if quick else SHAPES)
    return [_case(operation, shape) for operation in _OPERATIONS for shape in shapes]


# --- ours and the peers ---------------------------------------------------------------------------


def _unrotated(x, w, *_, sizes):
    heads, key_heads = sizes
    return jaxfused.qkv_projection(x, w, heads=heads, key_heads=key_heads)


def _torch_projection(x, w, *tables, sizes):
    heads, key_heads = sizes
    qkv = (x @ w).reshape(*x.shape[:-1], heads + 2 * key_heads, -1)
    q, k, v = (
        qkv[..., :heads, :],
        qkv[..., heads : heads + key_heads, :],
        qkv[..., heads + key_heads :, :],
    )
    if tables:
        q, k = torch_rope(q, k, *tables, interleaved=False)
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
    rows, features = batch * length, heads * head_size
    out_features = (heads + 2 * key_heads) * head_size
    config = QKVProjection(
        batch=batch,
        tokens=length,
        width=features,
        key_heads=key_heads,
        group=heads // key_heads,
        head_size=head_size,
        dtype="bfloat16",
        param_dtype="same",
        bias=False,
        norm=False,
        rope=operation.rotates,
        interleaved=False,
    )
    peers: dict[str, Function] = {}
    if not operation.with_gradient:
        peers = {BARE: product}
        if operation.rotates:
            peers[UNROTATED] = partial(_unrotated, sizes=sizes)
    # The backward reads x, w and the tables.
    tables = 4 * length * head_size if operation.rotates else 0
    saved = 2 * (rows * features + features * out_features) + tables
    return of_config.case(
        operation.name,
        shape,
        config,
        stock="reshape",
        torch=partial(_torch_projection, sizes=sizes),
        with_gradient=operation.with_gradient,
        read_again=saved if operation.with_gradient else 0,
        flops=2 * rows * features * out_features,
        bars=operation.bars,
        peers=peers,
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
