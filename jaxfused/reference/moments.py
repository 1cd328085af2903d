"""Mean and variance in one pass over the values, as XLA's stages of norms over images take them.

With the deviations d from a number near the mean, the variance is mean(d^2) - mean(d)^2. That number is
one of the values, which XLA reads in the same kernel. If it lies k standard deviations off, cancellation
costs the logarithm of k^2 of float32's 24 bits; it adds to the variance itself, so that k^2 is at most
the number of values, whatever these are.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp


def shifted_moments(
    values: jax.Array, near: jax.Array, mean_of: Callable[[jax.Array], jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Mean and variance of values, by `mean_of`.

    Args:
      values: in the dtype of the sums.
      near: of each mean one of its values, in the means' shape, which is broadcast against the values.
      mean_of: values to means.
    """
    deviations = values - near
    mean = mean_of(deviations)
    variance = mean_of(jnp.square(deviations)) - jnp.square(mean)
    return near + mean, jnp.maximum(variance, 0.0)


_FEW = 512, 4096
"""XLA sums columns of more rows in parts by itself, and of fewer a part is not worth a kernel."""


def parts_of(rows: int) -> int:
    """In how many parts rows are summed: in one where that is XLA's to choose, or not worth it."""
    if not _FEW[0] <= rows <= _FEW[1]:
        return 1
    return next(n for n in range(math.isqrt(rows), 0, -1) if rows % n == 0)
