"""Mean and variance in one pass over the values, as XLA's stages of norms over images take them.

With the deviations d from a number near the mean, the variance is mean(d^2) - mean(d)^2. That number is
one of the values, which XLA reads in the same kernel. If it lies k standard deviations off, cancellation
costs the logarithm of k^2 of float32's 24 bits; it adds to the variance itself, so that k^2 is at most
the number of values, whatever these are.
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
    """Mean and variance of values, by `mean_of`.

    Args:
      values: in the dtype of the sums.
      near: of each mean one of its values, in the means' shape, which is broadcast against the values.
      mean_of: values to means.
    """
    mean = mean_of(values - near)
    # Of deviations that both means share XLA would often write an array first: these are two.
    variance = mean_of(jnp.square(near - values)) - jnp.square(mean)
    return near + mean, jnp.maximum(variance, 0.0)


FEW_VALUES = 16
"""The gradient through so few values is what a cancellation leaves, which a rounding of x may change by
a tenth. Such a gradient reads no rounded x again: XLA may then keep the bits of what made x through the
norm and back, as it does in the same lines of jax.numpy."""


def is_few(values: Any) -> bool:
    """Whether a norm is over few values; of a number that is not known it is not."""
    return isinstance(values, int) and values <= FEW_VALUES


def normalised_pairs(x: jax.Array, axis: int, epsilon: float) -> jax.Array:
    """Normalises pairs of values, which are along `axis`.

    They lie half of their difference above and below the mean, and what is left of their gradient once
    its parts along the mean and along the deviations are taken off is `epsilon` of it.
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
"""XLA sums columns of more rows in parts by itself, and of fewer a part is not worth a kernel."""
_MANY_COLUMNS = 1024
"""So many columns keep a GPU busy without parts."""
_FEW_VALUES = 2**17
"""Fewer are summed in less time than further kernels take to start."""


def parts_of(rows: int, columns: int) -> int:
    """In how many parts rows are summed: in one where that is XLA's to choose, or not worth it."""
    if not _FEW[0] <= rows <= _FEW[1] or columns >= _MANY_COLUMNS or rows * columns < _FEW_VALUES:
        return 1
    return next(n for n in range(math.isqrt(rows), 0, -1) if rows % n == 0)


def settled(statistics: Sequence[jax.Array], parts: int) -> Sequence[jax.Array]:
    """Statistics that XLA takes once, and not anew from the sums of the parts for each value."""
    return jax.lax.optimization_barrier(statistics) if parts > 1 else statistics
