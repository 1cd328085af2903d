"""rope by the CUDA kernel of ffi/rope/rope.cu: q and k in one launch.

The kernel moves the widest vectors whose size divides a head and the rotated half of it, or single
values, so that it takes any shape.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfused.runtime import cuda_library

MAX_ELEMENTS = 2**32 - 2**10
"""Limit on the elements of q and k together, because the kernel indexes them in 32 bits."""


def why_unsupported(
    *,
    compute_capability: tuple[int, int] | None,
    length: int,
    heads: int,
    key_heads: int,
    head_size: int,
    rotary_dim: int,
    interleaved: bool,
    dtype: Any,
    k_dtype: Any,
    batch: int = 1,
) -> str | None:
    """Returns None if the kernel can run, forward and backward, else the reason."""
    del interleaved
    if reason := cuda_library.why_unfit(compute_capability, dtype, whose="q has"):
        return reason
    if dtype != k_dtype:
        return (
            f"it takes q and k of one dtype, and q has {jnp.dtype(dtype)}, k {jnp.dtype(k_dtype)}"
        )
    if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > head_size:
        return f"rotary_dim must be even and 2 to {head_size}, got {rotary_dim}"
    if batch * length * (heads + key_heads) * head_size > MAX_ELEMENTS:
        return f"it takes at most {MAX_ELEMENTS} elements, and q and k have more"
    return cuda_library.why_unavailable()


def access_bytes(head_size: int, rotary_dim: int, itemsize: int, *, interleaved: bool) -> int:
    """Returns the bytes that a thread moves at a time: 16 at most, and one value at least."""
    rotating = rotary_dim if interleaved else rotary_dim // 2
    return math.gcd(math.gcd(head_size, rotating) * itemsize, cuda_library.VECTOR_BYTES)


def rotate(
    q: jax.Array,
    k: jax.Array | None,
    cos: jax.Array,
    sin: jax.Array,
    *,
    interleaved: bool,
    inverse: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """Rotates q and k [B, T, heads, H] by float32 cos, sin [B or 1, T, R/2]; backwards if `inverse`."""
    if q.size == 0:
        if k is not None and k.size > 0:
            k, _ = rotate(k, None, cos, sin, interleaved=interleaved, inverse=inverse)
        return q, k
    cuda_library.register()
    # The empty keys are made like q, because in a `jax.shard_map` all operands must vary over the same
    # axes.
    other = jnp.zeros_like(q, shape=(*q.shape[:2], 0, q.shape[3])) if k is None else k
    call = jax.ffi.ffi_call(
        "jaxfused_rope",
        (jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct(other.shape, other.dtype)),
    )
    q_rotated, k_rotated = call(
        q, other, cos, sin, interleaved=np.bool_(interleaved), inverse=np.bool_(inverse)
    )
    return q_rotated, None if k is None else k_rotated
