"""Mean and variance in one pass over the values, for norms over images in XLA.

With the deviations d from a number near the mean, the variance is mean(d^2) - mean(d)^2. That number
is one of the values, which XLA reads in the same kernel. If it lies k standard deviations from
the mean, cancellation costs log2(k^2) of float32's 24 bits, and k^2 is at most the number of values.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp


def shifted_moments(
    values: jax.Array, near: jax.Array, mean_of: Callable[[jax.Array], jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Returns the mean and variance of values, by `mean_of`.

    Args:
      values: values to average, in the dtype of the sums.
      near: one of the values of each mean, in the means' shape, which broadcasts against the values.
      mean_of: values to means.
    """
    mean = mean_of(values - near)
    # Both means use the same differences, because XLA often stores one array of them for both.
    variance = mean_of(jnp.square(near - values)) - jnp.square(mean)
    return near + mean, jnp.maximum(variance, 0.0)


FEW_VALUES = 16
"""Largest number of values of a norm that is left to XLA. The gradient of such a norm is the remainder
of a cancellation, which rounding x can change by a tenth. The norm has no checkpoint, so that XLA can
keep x unrounded in forward and backward, as it does for plain jax.numpy."""


def is_few(values: Any) -> bool:
    """Returns whether a norm is over few values; False if their number is not known."""
    return isinstance(values, int) and values <= FEW_VALUES


def normalised_pairs(x: jax.Array, axis: int, epsilon: float) -> jax.Array:
    """Normalises pairs of values along `axis`.

    Each value lies half of the pair's difference above or below its mean. In a norm's gradient all terms
    cancel for pairs, except for one proportional to `epsilon`, which is computed directly.
    """
    return _normalised_deviation(epsilon, (x - jnp.flip(x, axis)) / 2)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _normalised_deviation(epsilon: float, deviation: jax.Array) -> jax.Array:
    return deviation * jax.lax.rsqrt(jnp.square(deviation) + epsilon)


@_normalised_deviation.defjvp
def _normalised_deviation_jvp(epsilon, primals, tangents):
    (deviation,), (tangent,) = primals, tangents
    rstd = jax.lax.rsqrt(jnp.square(deviation) + epsilon)
    return _normalised_deviation(epsilon, deviation), tangent * (epsilon * rstd * rstd * rstd)


_FEW = 512, 4096
"""Fewest and most rows that are summed in parts. XLA splits more rows itself; for fewer, the second
kernel that adds up the parts takes longer than they save."""
_MANY_COLUMNS = 1024
"""Number of columns from which the sums over rows occupy all SMs without splitting the rows."""
_FEW_VALUES = 2**17
"""Fewest values that are summed in parts; fewer take less time than the start of further kernels."""


def parts_of(rows: int, columns: int) -> int:
    """Returns the number of parts in which the rows of [rows, columns] are summed; 1 for no split."""
    if not _FEW[0] <= rows <= _FEW[1] or columns >= _MANY_COLUMNS or rows * columns < _FEW_VALUES:
        return 1
    return next(n for n in range(math.isqrt(rows), 0, -1) if rows % n == 0)


def settled(statistics: Sequence[jax.Array], parts: int) -> Sequence[jax.Array]:
    """Returns statistics that were summed in several parts behind a barrier, others unchanged.

    Without the barrier XLA would add up the parts again for each value that it normalises.
    """
    return jax.lax.optimization_barrier(statistics) if parts > 1 else statistics
