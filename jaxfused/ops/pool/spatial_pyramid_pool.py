"""spatial_pyramid_pool: validation."""

from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp

from jaxfused import dispatch
from jaxfused.ops.pool import spatial_pyramid_pool_xla
from jaxfused.runtime import resharding
from jaxfused.runtime.checks import check_count, check_floating, check_images, python_numbers
from jaxfused.runtime.gate import reference_only


@python_numbers
def spatial_pyramid_pool(
    x: jax.Array,
    levels: Sequence[int] = (1, 2, 4),
    method: Literal["max", "avg"] = "max",
    *,
    implementation: dispatch.Implementation | None = None,
) -> jax.Array:
    r"""A fixed number of features for images of any size, pooled over ever finer grids of cells.

    A level l cuts each spatial axis of n pixels into l cells. Along an axis, cell i holds the pixels

    .. math:: \lfloor i n / l \rfloor, \dots, \lceil (i + 1) n / l \rceil - 1

    so that adjacent cells share a pixel where n is no multiple of l. A cell's result for
    each channel is its largest value or its mean.

    Args:
      x: [B, *spatial, C] with one spatial axis or more, of any floating-point dtype.
      levels: into how many cells each level cuts an axis.
      method: "max", whose gradient goes to the first of equal values, as that of `jaxfused.max_pool`
        does, or "avg".
      implementation: None or "xla".

    Returns:
      y, [B, F] of x's dtype with F = C times the sum of l to the power of the number of spatial axes:
      level after level, the cells of each in the order of rows, and of each cell its channels. Sums are
      float32 (float64 for float64 inputs).

    Raises:
      ValueError: shapes, dtypes or options do not fit, or the named implementation cannot run.

    Example:
      >>> import jax.numpy as jnp, jaxfused
      >>> x = jnp.arange(16.0).reshape(1, 4, 4, 1)
      >>> jaxfused.spatial_pyramid_pool(x, levels=(1, 2))
      Array([[15.,  5.,  7., 13., 15.]], dtype=float32)

    Source: He et al., "Spatial Pyramid Pooling in Deep Convolutional Networks for Visual Recognition",
    2014, https://arxiv.org/abs/1406.4729; the edges of cells are those of `torch.nn.AdaptiveMaxPool2d`.
    """
    op = "spatial_pyramid_pool"
    x = jnp.asarray(x)
    check_floating(op, dict(x=x))
    check_images(op, x)
    if not isinstance(levels, Sequence) or not levels:
        raise ValueError(
            f"{op}: levels is {levels!r}, but it has one level or more; pass a tuple such as (1, 2, 4)."
        )
    for level in levels:
        check_count(op, "a level", level)
    if method not in ("max", "avg"):
        raise ValueError(f"{op}: method={method!r} is not known; pass 'max' or 'avg'.")
    reference_only(op, implementation, x)
    (x,) = resharding.split_by_batch((x,))
    return spatial_pyramid_pool_xla.pool(x, levels=tuple(levels), method=method)
