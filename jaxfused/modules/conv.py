"""The call of `jaxfused.conv`, with Flax's arguments, for Conv and ConvNormAct of nnx and linen."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxfused.dispatch import Implementation
from jaxfused.modules.linear import Kernel, ObservedKernel, QuantizedKernel, promoted
from jaxfused.modules.promotion import floating
from jaxfused.ops.conv import conv, quantized_conv
from jaxfused.ops.conv.conv import Convolved
from jaxfused.ops.conv.conv_input import ConvInput, as_array
from jaxfused.ops.norm import batch_norm
from jaxfused.ops.quantize.quantize import quantize
from jaxfused.runtime.promotion import along_last_axis
from jaxfused.runtime.quantized_array import FORMATS, QuantizedArray, assembled
from jaxfused.runtime.scale_groups import of_each_column

Norm = Literal["batch_norm", "group_norm"]


def check_norm(norm: str) -> None:
    """Checks that `norm` names one of the norms that may follow a convolution."""
    if norm not in ("batch_norm", "group_norm"):
        raise ValueError(
            f"ConvNormAct: norm={norm!r} is not known; pass 'batch_norm' or 'group_norm'."
        )


def convolve(
    inputs: ConvInput,
    kernel: Kernel,
    bias: jax.Array | None,
    *,
    kernel_size: int | Sequence[int],
    strides: int | Sequence[int] | None,
    padding: Any,
    padding_mode: str = "zeros",
    input_dilation: int | Sequence[int] | None,
    kernel_dilation: int | Sequence[int] | None,
    feature_group_count: int,
    activation: str | None,
    residual: jax.Array | None,
    implementation: Implementation | None,
    dtype: Any,
    precision: jax.lax.PrecisionLike = None,
    return_input: bool = False,
    statistics: bool = False,
) -> Convolved:
    """Runs `jaxfused.conv` with any number of batch axes; strides or dilations of None mean 1.

    With `return_input` the operator returns the inputs if it reads them unchanged.
    """
    x = promoted(as_array(inputs), kernel, bias, dtype=dtype)
    size = (kernel_size,) if isinstance(kernel_size, int) else tuple(kernel_size)
    batch = x.shape[: x.ndim - len(size) - 1]

    def fold(array: jax.Array) -> jax.Array:
        return array.reshape(math.prod(batch), *array.shape[len(batch) :])

    window: dict[str, Any] = dict(
        strides=1 if strides is None else strides,
        padding=padding,
        padding_mode=padding_mode,
        input_dilation=1 if input_dilation is None else input_dilation,
        kernel_dilation=1 if kernel_dilation is None else kernel_dilation,
        feature_group_count=feature_group_count,
    )
    rest: dict[str, Any] = dict(
        activation=activation,
        residual=None if residual is None else fold(residual),
        implementation=implementation,
    )
    bias = floating(bias, x.dtype)
    if isinstance(kernel, QuantizedKernel):
        if precision is not None:
            raise ValueError(
                f"conv: precision={precision!r} was passed with a quantised kernel, whose products have"
                " one precision; leave it out, or keep this kernel as floats."
            )
        y = quantized_conv.quantized_conv(
            image_inputs(kernel, fold(x)),
            kernel.array,
            bias,
            kernel_size=size,
            out_dtype=x.dtype,
            **window,
            **rest,
        )
        return Convolved(y.reshape(*batch, *y.shape[1:]), as_array(inputs), None)
    if isinstance(kernel, ObservedKernel):
        windows = patches(fold(x), size, **window)
        kernel.observe(kernel.layer, windows, inside_windows(fold(x), size, **window))
        kernel = kernel.array.reshape(*size, -1, kernel.array.shape[-1])
    array = floating(jnp.asarray(kernel), x.dtype)
    as_it_is = x.dtype == inputs.dtype
    images: ConvInput = jax.tree.map(fold, inputs) if as_it_is else fold(x)
    returns_input = return_input and as_it_is
    result = conv.run(
        images,
        array,
        bias,
        window=window,
        precision=precision,
        return_input=returns_input,
        statistics=statistics,
        **rest,
    )
    x = result.x.reshape(inputs.shape) if returns_input else as_array(inputs)
    return Convolved(result.y.reshape(*batch, *result.y.shape[1:]), x, result.statistics)


def image_inputs(kernel: QuantizedKernel, x: jax.Array) -> jax.Array | QuantizedArray:
    """Returns x [B, *spatial, I] as the convolution reads it, with a scale an image or one for all."""
    if kernel.permutation is not None:
        raise ValueError(
            "conv: the QuantizedKernel has a permutation, which linear layers alone have; pass a kernel"
            " whose rows are in the order of the inputs."
        )
    if kernel.input_divisor is not None:
        x = x / along_last_axis(kernel.input_divisor, x).astype(x.dtype)
    if kernel.input_dtype is None:
        return x
    ones = (1,) * (x.ndim - 1)
    if kernel.input_scale is not None:
        scale = kernel.input_scale.reshape(1, *ones)
    else:
        largest = jnp.max(jnp.abs(x), axis=tuple(range(1, x.ndim)), keepdims=True)
        scale = largest.astype(jnp.float32) * FORMATS[kernel.input_dtype].unit
        scale = jnp.maximum(scale, jnp.finfo(jnp.float32).tiny)
        # An infinite scale makes its image NaN, as in `jaxfused.quantize`.
        scale = jnp.where(jnp.isfinite(scale), scale, jnp.nan)
    return quantize(x, kernel.input_dtype, axis=-1, scale=scale)


def patches(
    x: jax.Array,
    size: tuple[int, ...],
    *,
    feature_group_count: int,
    input_dilation: Any,
    **geometry: Any,
) -> jax.Array | None:
    """Returns each window's values of x [B, *spatial, I], [B, pixels, taps * I]; None for groups."""
    if feature_group_count > 1:
        return None
    channels = x.shape[-1]
    # The kernel is one-hot for each position of the window; groups of one keep the channels apart.
    numbers = math.prod(size)
    taps = jnp.eye(numbers, dtype=x.dtype).reshape(*size, 1, numbers)
    y = conv.conv(
        x,
        jnp.tile(taps, channels),
        input_dilation=input_dilation,
        feature_group_count=channels,
        precision="highest",
        implementation="xla",
        **geometry,
    )
    assert isinstance(y, jax.Array)
    y = y.reshape(len(x), -1, channels, numbers).swapaxes(-1, -2)
    return y.reshape(*y.shape[:2], numbers * channels)


def inside_windows(x: jax.Array, size: tuple[int, ...], **geometry: Any) -> jax.Array | None:
    """Returns a mask of the numbers of `patches` that are no padding, [pixels, taps * I]."""
    ones = jnp.ones((1, *x.shape[1:-1], 1), x.dtype)
    found = patches(ones, size, **geometry)
    return None if found is None else jnp.repeat(found[0] > 0, x.shape[-1], axis=-1)


def fold_norm(kernel: Kernel, **norm: Any) -> tuple[Kernel, jax.Array]:
    """Returns (kernel, bias) with a batch norm folded in; float kernels by `jaxfused.fold_batch_norm`.

    A quantised channel's scale is multiplied by the norm's factor, which equals folding before rounding.
    """
    if isinstance(kernel, ObservedKernel):
        array, bias = batch_norm.fold_batch_norm(kernel.array, **norm)
        return replace(kernel, array=array), bias
    if not isinstance(kernel, QuantizedKernel):
        return batch_norm.fold_batch_norm(jnp.asarray(kernel), **norm)
    read = kernel.array.as_read()
    columns, zeros, offset = read.shape[-1], read.zero_point, read.offset
    scale, bias = batch_norm.fold_batch_norm(of_each_column(read.scale, columns), **norm)
    if offset is not None:
        offset, _ = batch_norm.fold_batch_norm(of_each_column(offset, columns), **norm)
    zeros = None if zeros is None else of_each_column(zeros, columns)
    folded = assembled(
        read.values, scale, zeros, read.axis, read.layout, offset=offset, codebook=read.codebook
    )
    return replace(kernel, array=folded), bias
