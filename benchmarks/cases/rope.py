"""rope of q and k together."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.cases import of_config
from benchmarks.run.case import BULK_COPY, Bar, Case
from benchmarks.sweep.configs import Rope

Shape = tuple[int, int, int, int, int]
"""Sizes (batch, tokens, heads, key heads, head size)."""

SHAPES: tuple[Shape, ...] = ((8, 4096, 32, 8, 128), (256, 197, 12, 12, 64))


def cases(quick: bool = False, shapes: Sequence[Shape] | None = None) -> list[Case]:
    """Returns a case for each operation at each shape, in the order of measurement."""
    del quick  # There are few shapes: all are measured.
    shapes = shapes or SHAPES
    return [_case(operation, shape) for operation in _OPERATIONS for shape in shapes]


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
    config = Rope(
        batch=batch,
        tokens=length,
        heads=heads,
        key_heads=key_heads,
        head_size=head_size,
        rotary_dim=head_size,
        dtype="bfloat16",
        interleaved=operation.interleaved,
        tables=True,
    )
    return of_config.case(
        operation.name,
        shape,
        config,
        stock="halves",
        torch=partial(torch_rope, interleaved=operation.interleaved),
        with_gradient=operation.with_gradient,
        # The backward reads the tables.
        read_again=4 * length * head_size if operation.with_gradient else 0,
        bars=operation.bars,
    )


_OF_COPY = Bar(BULK_COPY, must=0.9)
_OVER_XLA = Bar("xla", aim=1.0)

_OPERATIONS = (
    _Operation("rope forward", (_OF_COPY, _OVER_XLA)),
    _Operation("rope, neighbours, forward", (_OF_COPY, _OVER_XLA), interleaved=True),
    _Operation("rope forward+backward", (_OF_COPY, _OVER_XLA), with_gradient=True),
)
