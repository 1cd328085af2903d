"""A store that is not held to the widest accesses, in every version of JAX that is supported."""

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu


def store_unoptimized(ref, value: jax.Array) -> None:
    """Writes what does not fill whole sectors, or all banks, with 16 bytes a thread at most.

    Since JAX 0.12 `ref[...] = value` insists on that; JAX 0.11 never did, and has no `plgpu.store`.
    """
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value
