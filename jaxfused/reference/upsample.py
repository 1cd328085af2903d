"""upsample in plain JAX."""

from collections.abc import Sequence

import jax

from jaxfused.reference.promotion import accumulator_dtype


def upsample(x: jax.Array, *, factors: Sequence[int], method: str) -> jax.Array:
    """Resizes the spatial axes of [B, *spatial, C] by whole factors."""
    sizes = (n * factor for n, factor in zip(x.shape[1:-1], factors, strict=True))
    shape = (x.shape[0], *sizes, x.shape[-1])
    wide = x.astype(accumulator_dtype(x.dtype))
    precision = jax.lax.Precision.HIGHEST
    return jax.image.resize(wide, shape, method, precision=precision).astype(x.dtype)
