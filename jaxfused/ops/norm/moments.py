"""Mean and variance in one pass over the values, for XLA's stages of norms over images.

With the deviations d from a number near the mean, the variance is mean(d^2) - mean(d)^2. The number is
one of the values, which XLA reads in the same kernel. If it lies k standard deviations from the mean,
cancellation costs log2(k^2) of float32's 24 bits, and k^2 is at most the number of values.
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
      values: in the dtype of the sums.
      near: one of the values of each mean, in the means' shape, which broadcasts against the values.
      mean_of: values to means.
    """
    mean = mean_of(values - near)
    # The differences are written twice: XLA would often store one array of them for both means.
    variance = mean_of(jnp.square(near - values)) - jnp.square(mean)
    return near + mean, jnp.maximum(variance, 0.0)


FEW_VALUES = 16
"""Largest number of values of a norm that is left to XLA. Its gradient is what a cancellation leaves,
and rounding x can change it by a tenth. Such a norm has no checkpoint, so XLA can keep x unrounded
through the norm and back, as it does in the same lines of jax.numpy."""


def is_few(values: Any) -> bool:
    """Returns whether a norm is over few values; False for a number that is not known."""
    return isinstance(values, int) and values <= FEW_VALUES


def normalised_pairs(x: jax.Array, axis: int, epsilon: float) -> jax.Array:
    """Normalises pairs of values along `axis`.

    Each lies half of their difference above or below the mean. The gradient's parts along mean and
    deviations cancel. What is left is proportional to `epsilon`, and is computed directly.
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
"""Range of rows to sum in parts. XLA splits more rows itself, and fewer are not worth a kernel."""
_MANY_COLUMNS = 1024
"""Columns that keep a GPU busy without parts."""
_FEW_VALUES = 2**17
"""Fewest values to sum in parts. Fewer take less time than the start of further kernels."""


def parts_of(rows: int, columns: int) -> int:
    """Returns in how many parts rows are summed: 1 if XLA splits them itself or parts do not pay."""
    if not _FEW[0] <= rows <= _FEW[1] or columns >= _MANY_COLUMNS or rows * columns < _FEW_VALUES:
        return 1
    return next(n for n in range(math.isqrt(rows), 0, -1) if rows % n == 0)


def settled(statistics: Sequence[jax.Array], parts: int) -> Sequence[jax.Array]:
    """Returns statistics that XLA computes once, not again for each value from the sums of the parts."""
    return jax.lax.optimization_barrier(statistics) if parts > 1 else statistics
