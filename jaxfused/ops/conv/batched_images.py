"""Rule of `jax.vmap` for the kernel calls of a convolution."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxfused.runtime.runner import Results, Stage
from jaxfused.runtime.vmap import is_batched, merged_images, unmerged_images


def batched_images(
    kernel: Stage,
    call: Callable[..., Results],
    axis_size: int,
    in_batched: Sequence[Any],
    *operands: jax.Array | None,
) -> Results | None:
    """Runs a kernel call under `jax.vmap`: merges the mapped axis into the batch axis of the images.

    Returns None if weights or a bias are batched, or if the kernel sums over images.
    """
    axes = kernel.axes(*operands)
    are_images = [letters.startswith("b") for letters in axes.operands]
    others = [b for b, images in zip(in_batched, are_images, strict=True) if not images]
    sums_images = any(letters is not None and "b" not in letters for letters in axes.results)
    if is_batched(others) or sums_images:
        return None
    of_images = [i for i, images in enumerate(are_images) if images]
    merged = merged_images(
        axis_size, [in_batched[i] for i in of_images], [operands[i] for i in of_images]
    )
    remaining = iter(merged)
    taken = [
        next(remaining) if images else operand
        for operand, images in zip(operands, are_images, strict=True)
    ]
    return unmerged_images(axis_size, call(kernel, *taken))
