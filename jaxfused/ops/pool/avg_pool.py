"""avg_pool and global_avg_pool: validation."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxfused import dispatch
from jaxfused.ops.pool import avg_pool_xla
from jaxfused.ops.pool.pool_window import windows
from jaxfused.runtime import resharding
from jaxfused.runtime.checks import check_floating, check_images, python_numbers
from jaxfused.runtime.gate import reference_only


@python_numbers
def avg_pool(
    x: jax.Array,
    window: int | Sequence[int],
    *,
    strides: int | Sequence[int] | None = None,
    padding: str | int | Sequence[int | tuple[int, int]] = "VALID",
    count_include_pad: bool = True,
    ceil_mode: bool = False,
    weights: jax.Array | Sequence[Any] | None = None,
    implementation: dispatch.Implementation | None = None,
) -> jax.Array:
    r"""The mean of each window, channel by channel, weighted or not.

    .. math:: y_{b, i, c} = \frac{\sum_{j} w_{j} x_{b, \text{strides} \cdot i + j - \text{low}, c}}
              {\sum_{j \text{ counted}} w_{j}}

    where j runs over the window, w is 1 without `weights`, and x is 0 in the padding.

    Args:
      x: [B, *spatial, C] with one spatial axis or more, of any floating-point dtype.
      window: its size, one int for all spatial axes or one for each; so are the strides.
      strides: steps between windows; None for 1, as in Flax.
      padding: "SAME", "VALID", an int for all sides, or for each spatial axis an int or a pair (low,
        high).
      count_include_pad: whether padding counts in the divisor. If not, a window of only padding is NaN.
      ceil_mode: whether the last window may end beyond the padded edge, as in PyTorch; it begins in x or
        in the padding before it. Positions beyond the padded edge never count.
      weights: [*window], of numbers or an array, or None. All channels have the same. The program
        holds one product for each of them.
      implementation: None or "xla".

    Returns:
      y, [B, *spatial', C] of x's dtype; sums are float32 (float64 for float64 inputs).

    Raises:
      ValueError: shapes, dtypes or options do not fit, or the named implementation cannot run.

    Example:
      >>> import jax.numpy as jnp, jaxfused
      >>> x = jnp.arange(16.0).reshape(1, 4, 4, 1)
      >>> jaxfused.avg_pool(x, 2, strides=2)[0, ..., 0]
      Array([[ 2.5,  4.5],
             [10.5, 12.5]], dtype=float32)
      >>> jaxfused.avg_pool(x[:, 0], 2, strides=2, weights=[3.0, 1.0])[0, :, 0]
      Array([0.25, 2.25], dtype=float32)

    Source: the arguments are those of `flax.linen.avg_pool`; `ceil_mode` is that of
    `torch.nn.AvgPool2d`.
    """
    op = "avg_pool"
    x = jnp.asarray(x)
    check_floating(op, dict(x=x))
    check_images(op, x)
    found = windows(op, x, window, strides, padding, ceil_mode)
    factors = None
    if weights is not None:
        factors = jnp.asarray(weights)
        if factors.shape != found.size or not _is_real(factors):
            raise ValueError(
                f"{op}: weights are {factors.dtype}{list(factors.shape)}, but the window is"
                f" {found.size}; pass real weights of shape {found.size}."
            )
        [factors] = resharding.whole(factors)
    reference_only(op, implementation, x)
    edges = found.asked if count_include_pad else ((0, 0),) * len(found.size)
    counted = tuple((-low, n + high) for n, (low, high) in zip(x.shape[1:-1], edges, strict=True))
    return avg_pool_xla.pool(
        resharding.whole_images(x),
        factors,
        window=found.size,
        strides=found.strides,
        padding=found.padding,
        counted=counted,
    )


def _is_real(array: jax.Array) -> bool:
    return any(jnp.issubdtype(array.dtype, kind) for kind in (jnp.floating, jnp.integer))


@python_numbers
def global_avg_pool(
    x: jax.Array, *, implementation: dispatch.Implementation | None = None
) -> jax.Array:
    r"""The mean of each channel over all pixels.

    .. math:: y_{b, c} = \frac{1}{P} \sum_{p} x_{b, p, c}

    where p runs over the P pixels of an image.

    Args:
      x: [B, *spatial, C] with one spatial axis or more, of any floating-point dtype.
      implementation: None or "xla".

    Returns:
      y, [B, C] of x's dtype; sums are float32 (float64 for float64 inputs).

    Raises:
      ValueError: x has another shape or dtype, or the named implementation cannot run.

    Example:
      >>> import jax.numpy as jnp, jaxfused
      >>> jaxfused.global_avg_pool(jnp.arange(12.0).reshape(1, 2, 3, 2))
      Array([[5., 6.]], dtype=float32)

    Source: Lin et al., "Network In Network", 2013, https://arxiv.org/abs/1312.4400
    """
    op = "global_avg_pool"
    x = jnp.asarray(x)
    check_floating(op, dict(x=x))
    check_images(op, x)
    reference_only(op, implementation, x)
    return avg_pool_xla.global_pool(x)
