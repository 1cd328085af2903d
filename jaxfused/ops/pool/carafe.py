"""carafe: validation, and its weighted sums in plain JAX."""

import jax
import jax.numpy as jnp

from jaxfused import dispatch
from jaxfused.runtime import sharding
from jaxfused.runtime.checks import check_count, check_floating, python_numbers
from jaxfused.runtime.gate import reference_only
from jaxfused.runtime.promotion import accumulator_dtype
from jaxfused.runtime.shapes import merge_axes, split_axis


@python_numbers
def carafe(
    x: jax.Array,
    kernels: jax.Array,
    *,
    kernel_size: int = 5,
    groups: int = 1,
    implementation: dispatch.Implementation | None = None,
) -> jax.Array:
    r"""Images enlarged by a kernel of its own for each new pixel (content-aware reassembly).

    .. math:: y_{b, i, j, c} = \sum_{m, n = -r}^{r} K_{b, i, j, g(c), (m + r) k + n + r} \,
              x_{b, \lfloor i / f \rfloor + m, \lfloor j / f \rfloor + n, c},
              \qquad r = \tfrac{k - 1}{2}

    where x is zero beyond its edges and g(c) is the group of channel c.

    Args:
      x: [B, H, W, C], of any floating-point dtype.
      kernels: [B, f H, f W, groups k k], group after group, each in the order of rows. They are not
        normalised here: the caller applies the softmax over the k k weights. Any floating-point dtype.
      kernel_size: k, odd.
      groups: into how many groups of adjacent channels x is split.
      implementation: None or "xla".

    Returns:
      y, [B, f H, f W, C] of x's dtype; sums are float32 (float64 for float64 inputs).

    Raises:
      ValueError: shapes, dtypes or options do not fit, or the named implementation cannot run.

    Example:
      >>> import jax.numpy as jnp, jaxfused
      >>> x = jnp.arange(4.0).reshape(1, 2, 2, 1)
      >>> kernels = jnp.full((1, 4, 4, 9), 1 / 9)
      >>> jaxfused.carafe(x, kernels, kernel_size=3)[0, 0, :, 0] * 9
      Array([6., 6., 6., 6.], dtype=float32)

    Source: Wang et al., "CARAFE: Content-Aware ReAssembly of FEatures", 2019,
    https://arxiv.org/abs/1905.02188
    """
    op = "carafe"
    x, kernels = jnp.asarray(x), jnp.asarray(kernels)
    check_floating(op, dict(x=x, kernels=kernels))
    check_count(op, "kernel_size", kernel_size)
    check_count(op, "groups", groups)
    if x.ndim != 4 or 0 in x.shape[1:]:
        raise ValueError(
            f"{op}: x has shape {x.shape}, but it must be images; pass x of shape [batch, height, width,"
            " channels]."
        )
    if kernel_size % 2 == 0:
        raise ValueError(
            f"{op}: kernel_size is {kernel_size}, but kernels have a middle; pass an odd one."
        )
    if x.shape[-1] % groups:
        raise ValueError(
            f"{op}: groups is {groups}, but it divides the channels, and x has {x.shape[-1]}; pass a"
            " divisor."
        )
    factor = kernels.shape[1] // x.shape[1] if kernels.ndim == 4 else 0
    wanted = (
        x.shape[0],
        factor * x.shape[1],
        factor * x.shape[2],
        groups * kernel_size**2,
    )
    if factor < 1 or kernels.shape != wanted:
        raise ValueError(
            f"{op}: kernels has shape {kernels.shape}, but x has shape {x.shape}, groups is {groups} and"
            f" kernel_size {kernel_size}; pass kernels of shape [{x.shape[0]}, factor * {x.shape[1]},"
            f" factor * {x.shape[2]}, {wanted[3]}]."
        )
    reference_only(op, implementation, x)
    x, kernels = sharding.align(  # type: ignore[assignment]
        (x, kernels), operand_axes=("bhwc", "buvk"), whole="hwuvk" + "c" * (groups > 1)
    )
    return _reassembled(x, kernels, factor, kernel_size, groups)


def _reassembled(
    x: jax.Array, kernels: jax.Array, factor: int, size: int, groups: int
) -> jax.Array:
    _, height, width, channels = x.shape
    wide = accumulator_dtype(x.dtype)
    radius = size // 2
    around = ((0, 0), (radius, radius), (radius, radius), (0, 0), (0, 0))
    grouped = split_axis(x.astype(wide), 3, groups, channels // groups)
    padded = jnp.pad(grouped, around)
    # The kernels of the factor x factor result pixels of each pixel of x get axes of their own.
    blocks = split_axis(kernels.astype(wide), 3, groups, size * size)
    blocks = split_axis(split_axis(blocks, 2, width, factor), 1, height, factor)
    total = jnp.zeros((), wide)
    for tap in range(size * size):
        top, left = divmod(tap, size)
        part = padded[:, top : top + height, left : left + width]
        total = total + part[:, :, None, :, None] * blocks[..., tap, None]
    return merge_axes(merge_axes(merge_axes(total, 5), 3), 1).astype(x.dtype)
