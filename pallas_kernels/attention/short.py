"""Attention on Hopper for S <= 256 keys, such as in a ViT: limits and entry points.

One SM holds all keys of a head, so that forward and backward read and write each array once and need no
sums in global memory. The number of queries is not limited.
"""

from typing import Any

import jax.numpy as jnp

from pallas_kernels import hopper
from pallas_kernels.attention.short_backward import backward, backward_packed, smallest_config
from pallas_kernels.attention.short_forward import forward, forward_packed, workers_that_fit

__all__ = ["backward", "backward_packed", "forward", "forward_packed", "why_unsupported"]

_LARGEST_KEY_COUNT = 256
"""Largest number of columns of a WGMMA's accumulator, in which the forward has a row's logits."""

_LARGEST_ACCUMULATORS = 256
"""Most columns of dK and dV together, over all tiles of 64 keys of a warpgroup, that fit into its
registers."""


def why_unsupported(
    *,
    compute_capability: tuple[int, int] | None,
    dtype: Any,
    key_count: int,
    head_size: int,
    value_size: int,
) -> str | None:
    """Returns None if forward and backward can run, else the rule that rejects the call."""
    reason = hopper.why_unfit(compute_capability)
    if reason is not None:
        return reason
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"query, key and value must be bfloat16 or float16, got {dtype}"
    if head_size % 8 or value_size % 8:
        return f"head sizes must be multiples of 8, got {head_size} and {value_size}"
    if not 1 <= key_count <= _LARGEST_KEY_COUNT:
        return f"there must be 1 to {_LARGEST_KEY_COUNT} keys, got {key_count}"
    config = smallest_config(key_count)
    if (
        not config.fits(head_size, value_size)
        or not workers_that_fit(key_count, head_size, value_size)
        or config.accumulator_columns(head_size, value_size) > _LARGEST_ACCUMULATORS
    ):
        return (
            f"{key_count} keys of head sizes {head_size} and {value_size} do not fit into one"
            " multiprocessor"
        )
    return None
