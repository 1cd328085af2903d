"""`jax.vmap` over kernels that have no batching rule of their own.

A kernel over rows takes a batch by folding it into the rows; where an operand that all rows share is
batched too (the scale of a norm, say) the batch entries run one after another.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp


def is_batched(in_batched: Any) -> bool:
    """Whether any leaf of one operand's `in_batched` tree is batched; an absent operand is not."""
    return any(jax.tree.leaves(in_batched))


def fold_into_rows(axis_size: int, batched: Any, rows: jax.Array | None) -> jax.Array | None:
    """[B, M, ...] to [B*M, ...]; an operand that is not batched is repeated for every batch entry."""
    if rows is None:
        return None
    if not is_batched(batched):
        rows = jnp.broadcast_to(rows, (axis_size, *rows.shape))
    return rows.reshape(-1, *rows.shape[2:])


def unfold_rows(axis_size: int, rows: jax.Array | None) -> jax.Array | None:
    """[B*M, ...] back to [B, M, ...]."""
    if rows is None:
        return None
    return rows.reshape(axis_size, rows.shape[0] // axis_size, *rows.shape[1:])


def one_by_one(f: Callable[..., Any], in_batched: Sequence[Any], args: Sequence[Any]) -> Any:
    """Runs `f` over the batch in sequence; every output comes back batched."""
    batched = [is_batched(b) for b in in_batched]

    def entry(batched_args: list[Any]) -> Any:
        remaining = iter(batched_args)
        return f(*[next(remaining) if b else a for b, a in zip(batched, args, strict=True)])

    return jax.lax.map(entry, [a for b, a in zip(batched, args, strict=True) if b])
