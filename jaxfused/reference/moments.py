"""Mean and variance in one pass over the values, as XLA's stages of norms over images take them.

With the deviations d from a number near the mean, the variance is mean(d^2) - mean(d)^2. That number is
the median of three of the values. Cancellation costs nothing to speak of, unless two of them lie many
standard deviations to one side; they themselves add to the variance, so that mean(d)^2 is at most half
as many times the variance as there are values, whatever these are.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

PLACES = (1, 3, 5)
"""Sixths of an axis, at which the three values are."""


def shifted_moments(
    values: jax.Array, three: tuple[jax.Array, ...], mean_of: Callable[[jax.Array], jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Mean and variance of values, by `mean_of`.

    Args:
      values: in the dtype of the sums.
      three: three of those over which each mean is; each in the means' shape, which is broadcast against
        the values.
      mean_of: values to means.
    """
    a, b, c = three
    near = jnp.maximum(jnp.minimum(a, b), jnp.minimum(jnp.maximum(a, b), c))
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
