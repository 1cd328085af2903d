"""Batching rules of `jax.vmap` for kernels that have none of their own.

A kernel over rows of any leading shape takes a batch as one more leading axis. If an operand that all
rows share, such as the scale of a norm, is batched too, the batch entries run one after another.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxfused.runtime.shapes import merge_axes


def is_batched(in_batched: Any) -> bool:
    """Whether any leaf of an operand's `in_batched` tree is batched; an absent operand has none."""
    return any(jax.tree.leaves(in_batched))


def batch_all(
    axis_size: int, in_batched: Sequence[Any], arrays: Sequence[jax.Array | None]
) -> list[Any]:
    """Returns the arrays with the batch as first axis; an array without a batch is repeated along it."""
    return [
        array
        if array is None or is_batched(batched)
        else jnp.broadcast_to(array, (axis_size, *array.shape))
        for batched, array in zip(in_batched, arrays, strict=True)
    ]


def one_by_one(f: Callable[..., Any], in_batched: Sequence[Any], args: Sequence[Any]) -> Any:
    """Runs `f` over the batch entries in sequence; all its results have the batch as first axis."""
    batched = [is_batched(b) for b in in_batched]

    def entry(batched_args: list[Any]) -> Any:
        remaining = iter(batched_args)
        return f(*[next(remaining) if b else a for b, a in zip(batched, args, strict=True)])

    return jax.lax.map(entry, [a for b, a in zip(batched, args, strict=True) if b])


class OneByOne:
    """Batching rule of kernels without a batch axis, because each batch entry has its own scale."""

    def batched(self, call, axis_size, in_batched, *operands) -> None:
        """Returns None, so that the entries run one after the other."""
        del call, axis_size, in_batched, operands


def merged_batch(array: jax.Array) -> jax.Array:
    """Reshapes [N, B, ...] to [N * B, ...] without a -1, which would be ambiguous for empty axes."""
    return merge_axes(array, 0)


def merged_images(
    axis_size: int, in_batched: Sequence[Any], images: Sequence[jax.Array | None]
) -> list[Any]:
    """Returns arrays [B, ...] of images with the batch of a `jax.vmap` merged into axis B."""
    return [
        None if array is None else merged_batch(array)
        for array in batch_all(axis_size, in_batched, images)
    ]


def unmerged_images(
    axis_size: int, results: Sequence[jax.Array | None]
) -> tuple[jax.Array | None, ...]:
    """Splits axis 0 of results over `merged_images` into the batch of the `jax.vmap` and the images."""
    return tuple(
        None
        if array is None
        else array.reshape(axis_size, len(array) // axis_size, *array.shape[1:])
        for array in results
    )
