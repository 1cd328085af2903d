"""conv_transpose: computes its padding and calls `conv` with an input dilation."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxfused import dispatch
from jaxfused.ops.conv.conv import convolved
from jaxfused.ops.conv.conv_padding import geometry
from jaxfused.runtime.checks import (
    as_arrays,
    check_activation,
    check_floating,
    check_shape,
    for_each_axis,
    python_numbers,
)


@python_numbers
def conv_transpose(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None = None,
    *,
    strides: int | Sequence[int] = 1,
    padding: str | int | Sequence[int | tuple[int, int]] = "SAME",
    kernel_dilation: int | Sequence[int] = 1,
    feature_group_count: int = 1,
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
      w: [*kernel, I / feature_group_count, O], or with `transpose_kernel` [*kernel,
        O / feature_group_count, I]. Any float dtype; it is rounded to x's.
      bias: [O]. Any float dtype.
      strides: the factor by which each spatial axis grows, one for all or one for each.
      padding: "SAME" (the result is strides times as large as x), "VALID" (all that some value of x
        reaches), or how many zeros to put around the dilated x: an int for all sides, or for each
        spatial axis an int or a pair (low, high).
      kernel_dilation: the distance between the values that neighbouring weights reach.
      feature_group_count: into how many groups the input and the output channels are split, each
        convolved separately.
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
    op = "conv_transpose"
    x, w, bias, residual = as_arrays(x, w, bias, residual)
    check_floating(op, dict(x=x, w=w, bias=bias, residual=residual))
    check_activation(op, activation)
    groups = feature_group_count
    _check_kernel(op, x, w, groups, transpose_kernel)
    axes = x.ndim - 2
    features = w.shape[-2] * groups if transpose_kernel else w.shape[-1]
    check_shape(op, "bias", bias, (features,), f"w has {features} output channels")
    if transpose_kernel:
        w = _transposed(w, groups)
    steps = for_each_axis(op, "strides", strides, axes)
    dilation = for_each_axis(op, "kernel_dilation", kernel_dilation, axes)
    if isinstance(padding, str):
        reaches = [(k - 1) * d for k, d in zip(w.shape[:axes], dilation, strict=True)]
        padding = [_pair(padding, r, s) for r, s in zip(reaches, steps, strict=True)]
    options = geometry(
        op,
        x,
        w.shape[:axes],
        strides=1,
        padding=padding,
        input_dilation=steps,
        kernel_dilation=dilation,
        feature_group_count=groups,
    )
    return convolved(
        op,
        x,
        w,
        bias,
        options=options,
        activation=activation,
        residual=residual,
        precision=precision,
        implementation=implementation,
    ).y


def _check_kernel(op: str, x: jax.Array, w: jax.Array, groups: int, transposed: bool) -> None:
    if x.ndim < 3 or w.ndim != x.ndim or x.shape[-1] == 0 or 0 in w.shape:
        raise ValueError(
            f"{op}: x has shape {x.shape} and w {w.shape}, but both need as many axes, at"
            " least one of them spatial, and channels; pass x [batch, ..., channels] and w [kernel"
            " sizes, input channels, output channels]."
        )
    channels = x.shape[-1]
    outputs = w.shape[-2] * groups if transposed else w.shape[-1]
    if groups < 1 or channels % groups or outputs % groups:
        raise ValueError(
            f"{op}: feature_group_count is {groups}, but it must divide the {channels} input and the"
            f" {outputs} output channels; pass a common divisor."
        )
    fits = w.shape[-1] == channels if transposed else w.shape[-2] == channels // groups
    if not fits:
        share = channels if transposed else channels // groups
        axis = "in its last axis" if transposed else "in its last axis but one"
        raise ValueError(
            f"{op}: w has shape {w.shape}, but x has {channels} channels in {groups} groups"
            f" and transpose_kernel is {transposed}; pass w with {share} input channels {axis}."
        )


def _transposed(w: jax.Array, groups: int) -> jax.Array:
    """Returns w [*kernel, O / groups, I] of the transposed convolution as [*kernel, I / groups, O]."""
    *kernel, outputs, channels = w.shape
    w = jnp.flip(w, range(len(kernel))).reshape(*kernel, outputs, groups, channels // groups)
    return (
        jnp.moveaxis(w, -1, -3)
        .swapaxes(-1, -2)
        .reshape(*kernel, channels // groups, groups * outputs)
    )


def _pair(padding: str, reach: int, stride: int) -> tuple[int, int]:
    """Returns the zeros (before, after) a spatial axis of x, dilated by `stride`, for a named padding.

    The window spans `reach` + 1 values.
    """
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
