"""resize: validation."""

import math
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp

from jaxfused import dispatch
from jaxfused.ops.pool import resize_xla
from jaxfused.ops.pool.resize_taps import ResizedAxis
from jaxfused.runtime.checks import (
    check_floating,
    check_images,
    check_word,
    for_each_axis,
    python_numbers,
)
from jaxfused.runtime.gate import reference_only

ResizeMethod = Literal["nearest", "nearest_floor", "bilinear", "bicubic", "lanczos3", "lanczos5"]


@python_numbers
def resize(
    x: jax.Array,
    size: int | Sequence[int] | None = None,
    *,
    factor: float | Sequence[float] | None = None,
    method: ResizeMethod = "bilinear",
    align_corners: bool = False,
    antialias: bool = False,
    implementation: dispatch.Implementation | None = None,
) -> jax.Array:
    r"""Images of another size, enlarged or shrunk by any factor, with torch's numbers.

    Along each axis of n values, that of m results at i is a weighted mean of x around

    .. math:: c_i = (i + \tfrac12) \tfrac nm - \tfrac12 \quad\text{or, with align_corners,}\quad
              c_i = i \, \tfrac{n - 1}{m - 1}

    of the values nearer to c than 1 (bilinear), 2 (bicubic), 3 or 5 (Lanczos).

    Args:
      x: [B, *spatial, C] with one spatial axis or more, of any floating-point dtype.
      size: of the result, one int for all spatial axes or one for each.
      factor: in place of a size, what to multiply sizes by, rounded down; one number or one for each
        axis. Then n / m above is 1 / factor, as in `torch.nn.functional.interpolate`. (On a CPU
        torch leaves the factor out where the size stays the same, in "bilinear" and "nearest", or
        doubles, in "nearest".)
      method: "nearest" takes the value at floor(c + 1/2) (torch's "nearest-exact"), "nearest_floor" that
        at floor(i n / m) (torch's "nearest"). Both round positions to float32, which decides ties, as
        torch does for images of two axes (for one axis its "nearest-exact" rounds otherwise: 2 values
        enlarged to 41 differ in one). "bicubic" has
        Keys' coefficient -0.75, and beyond its ends x goes on with its outermost values. "lanczos3" and
        "lanczos5" leave out weights beyond the ends.
      align_corners: whether the first and the last result equal the first and the last value; otherwise
        values are at the centres of equal parts. Not for "nearest".
      antialias: whether windows grow by the factor by which an axis shrinks, and leave out what lies
        beyond its ends. "bicubic" then has the coefficient -0.5, as in torch and Pillow;
        `jax.image.resize` is this, enlarging too. Not for "nearest" or with align_corners.
      implementation: None or "xla".

    Returns:
      y, [B, *size, C] of x's dtype; sums are float32 (float64 for float64 inputs).

    Raises:
      ValueError: shapes, dtypes or options do not fit, or the named implementation cannot run.

    Example:
      >>> import jax.numpy as jnp, jaxfused
      >>> x = jnp.array([0.0, 4.0, 8.0]).reshape(1, 3, 1)
      >>> jaxfused.resize(x, 5, align_corners=True)[0, :, 0]
      Array([0., 2., 4., 6., 8.], dtype=float32)

    Where a result reads 16 values or fewer along an axis, it gathers them; the gradient gathers too, in
    a fixed order. XLA fuses that into one pass an axis.

    Source: `torch.nn.functional.interpolate`, `jax.image.resize`.
    """
    op = "resize"
    x = jnp.asarray(x)
    check_floating(op, dict(x=x))
    check_images(op, x)
    check_word(op, "method", method, ResizeMethod)
    axes = _axes(op, x, size, factor)
    nearest = method.startswith("nearest")
    if align_corners and (nearest or antialias):
        raise ValueError(
            f"{op}: align_corners=True goes with 'bilinear', 'bicubic' and Lanczos without antialias,"
            f" but method is {method!r} and antialias {antialias}; leave one out."
        )
    if antialias and nearest:
        raise ValueError(
            f"{op}: antialias=True was passed with method {method!r}, which reads one value; leave it"
            " out, or pass another method."
        )
    reference_only(op, implementation, x)
    return resize_xla.resize(
        x,
        [
            ResizedAxis(n, result, step, method, align_corners, antialias)
            for n, (result, step) in zip(x.shape[1:-1], axes, strict=True)
        ],
    )


def _axes(
    op: str,
    x: jax.Array,
    size: int | Sequence[int] | None,
    factor: float | Sequence[float] | None,
) -> list[tuple[int, float]]:
    """Returns the result's size along each axis, and the distance of its pixels in pixels of x."""
    spatial = x.ndim - 2
    factors = None
    if factor is not None:
        factors = tuple(factor) if isinstance(factor, Sequence) else (factor,) * spatial
        if len(factors) != spatial or not all(map(_is_positive, factors)):
            raise ValueError(
                f"{op}: factor is {factor!r}, but x has {spatial} spatial axes; pass one positive"
                f" number, or {spatial} of them."
            )
    if (size is None) == (factors is None):
        raise ValueError(
            f"{op}: size is {size!r} and factor {factor!r}, but one of them says how large the result"
            " is; pass one."
        )
    if factors is None:
        assert size is not None
        sizes = for_each_axis(op, "size", size, spatial)
        return [(m, n / m) for n, m in zip(x.shape[1:-1], sizes, strict=True)]
    results = [(math.floor(n * f), 1 / f) for n, f in zip(x.shape[1:-1], factors, strict=True)]
    if any(m < 1 for m, _ in results):
        raise ValueError(
            f"{op}: factor is {factor!r}, but of x of shape {x.shape} a pixel or more must be left along"
            " each axis; pass a larger one."
        )
    return results


def _is_positive(factor: object) -> bool:
    if isinstance(factor, bool) or not isinstance(factor, int | float):
        return False
    return math.isfinite(factor) and factor > 0
