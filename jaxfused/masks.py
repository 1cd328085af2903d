"""Masks of attention as objects, for `mask=` of `jaxfused.dot_product_attention` and its modules.

A mask says before any array exists which blocks of queries and keys are empty, full or partial. It is
prepared once for a shape, and costs no memory of the size of the logits.

Example:
  >>> import jax, jax.numpy as jnp, jaxfused
  >>> from jaxfused import masks
  >>> mask = masks.LocalMask((256, 256), 16) | masks.GlobalMask((256, 256), 4)
  >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 256, 2, 8))
  >>> jaxfused.dot_product_attention(q, k, v, mask=mask).shape
  (1, 256, 2, 8)

Where `jax.experimental.pallas.ops.tpu.splash_attention` has a mask, names and arguments are those.
"""

from jaxfused.ops.attention.masks.mask_class import AttentionMask, MultiHeadMask
from jaxfused.ops.attention.masks.neighborhood import NeighborhoodMask
from jaxfused.ops.attention.masks.positions import (
    CausalMask,
    ChunkedCausalMask,
    DilatedMask,
    FullMask,
    GlobalMask,
    LocalMask,
    NumpyMask,
    RandomBlocksMask,
)

__all__ = [
    "AttentionMask",
    "CausalMask",
    "ChunkedCausalMask",
    "DilatedMask",
    "FullMask",
    "GlobalMask",
    "LocalMask",
    "MultiHeadMask",
    "NeighborhoodMask",
    "NumpyMask",
    "RandomBlocksMask",
]
