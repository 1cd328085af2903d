"""conv_transpose: how much to pad, and `conv` of what has zeros between its values."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxfused import dispatch
from jaxfused.ops.conv import conv, for_each_axis
from jaxfused.ops.validation import as_arrays, check_floating


def conv_transpose(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None = None,
    *,
    strides: int | Sequence[int] = 1,
    padding: str | int | Sequence[int | tuple[int, int]] = "SAME",
    kernel_dilation: int | Sequence[int] = 1,
    transpose_kernel: bool = False,
    activation: str | None = None,
    residual: jax.Array | None = None,
    precision: jax.lax.PrecisionLike = None,
    implementation: dispatch.Implementation | None = None,
) -> jax.Array:
    r"""Transposed convolution of channels-last arrays, with the sum and the activation after it.

    .. math::
        y = \text{activation}(\operatorname{conv}(\operatorname{dilate}(x), w) + \text{bias}
            + \text{residual})

    where dilate puts strides - 1 zeros between neighbouring values of x. The shape and the numbers are
    those of `jax.lax.conv_transpose`. Sums are float32 (float64 for float64 inputs); bias, residual and
    activation are applied in float32.

    Args:
      x: [B, *spatial, I] with one spatial axis or more, float32, bfloat16 or float16 (float64 with
        implementation "xla").
      w: [*kernel, I, O], or with `transpose_kernel` [*kernel, O, I]. Any float dtype; it is rounded to
        x's.
      bias: [O]. Any float dtype.
      strides: by how much each spatial axis is enlarged, one for all or one for each.
      padding: "SAME" (the result is strides times as large as x), "VALID" (all that some value of x
        reaches), or how many zeros to put around the dilated x: an int for all sides, or for each
        spatial axis an int or a pair (low, high).
      kernel_dilation: the distance between the values that neighbouring weights meet.
      transpose_kernel: whether w is that of the convolution that this one transposes: its spatial axes
        are flipped and its channels swapped.
      activation: None or a name of `jaxfused.ACTIVATIONS`, after everything else.
      residual: of the result's shape, is added before the activation.
      precision: of the products, as in `jax.lax.conv`.
      implementation: None for the fastest that can run, or "pallas", "xla".

    Returns:
      y, [B, *spatial', O] of x's dtype.

    Raises:
      ValueError: shapes, dtypes or options do not fit, or the named implementation cannot run.

    Example:
      >>> import jax.numpy as jnp, jaxfused
      >>> x = jnp.array([1.0, 2.0]).reshape(1, 2, 1)
      >>> w = jnp.array([1.0, 10.0]).reshape(2, 1, 1)
      >>> jaxfused.conv_transpose(x, w, strides=2, transpose_kernel=True).ravel()
      Array([ 1., 10.,  2., 20.], dtype=float32)

    A kernel runs where windows do not overlap (the kernel is as large as the strides), along one axis
    or two, with a multiple of 32 output channels: it writes each product where it belongs, which XLA
    does in a pass of its own. All else is XLA's convolution.

    Source: Zeiler et al., "Deconvolutional Networks", 2010; the arguments are those of
    `jax.lax.conv_transpose`.
    """
    x, w = as_arrays(x, w)
    check_floating("conv_transpose", dict(x=x, w=w))
    if x.ndim < 3 or w.ndim != x.ndim:
        raise ValueError(
            f"conv_transpose: x has shape {x.shape} and w {w.shape}, but both need as many axes, at"
            " least one of them spatial; pass x [batch, ..., channels] and w [kernel sizes, channels,"
            " output channels]."
        )
    axes = x.ndim - 2
    if transpose_kernel:
        w = jnp.flip(w, range(axes)).swapaxes(-1, -2)
    steps = for_each_axis("strides", strides, axes, "conv_transpose")
    dilation = for_each_axis("kernel_dilation", kernel_dilation, axes, "conv_transpose")
    if isinstance(padding, str):
        reaches = [(k - 1) * d for k, d in zip(w.shape[:axes], dilation, strict=True)]
        padding = [_pair(padding, r, s) for r, s in zip(reaches, steps, strict=True)]
    y = conv(
        x,
        w,
        bias,
        padding=padding,
        input_dilation=steps,
        kernel_dilation=dilation,
        activation=activation,
        residual=residual,
        precision=precision,
        implementation=implementation,
    )
    assert isinstance(y, jax.Array)
    return y


def _pair(padding: str, reach: int, stride: int) -> tuple[int, int]:
    """Zeros before and after a dilated axis, for a window that reaches so far beyond its first value."""
    name = padding.upper()
    if name == "VALID":
        return reach, max(reach, stride - 1)
    if name != "SAME":
        raise ValueError(
            f"conv_transpose: padding={padding!r} is not known; pass 'SAME', 'VALID' or numbers."
        )
    both = reach + stride - 1
    low = reach if stride > reach else math.ceil(both / 2)
    return low, both - low
