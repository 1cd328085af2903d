"""Operators over images, ours and stock."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
from jax import lax

import jaxfused
from benchmarks.run.case import Arrays
from benchmarks.sweep.image_configs import (
    Conv,
    DepthwiseConv,
    ImageNorm,
    InvertedResidual,
    Pool,
    Upsample,
)
from benchmarks.sweep.program_parts import (
    ACTIVATIONS,
    EPSILON,
    Programs,
    RandomArrays,
    split_operands,
)


def image_norm(config: ImageNorm) -> Programs:
    dtype = jnp.dtype(config.dtype)

    def make_inputs(key: jax.Array) -> Arrays:
        random = RandomArrays(key)
        operands = [
            random.normal(config.shape, dtype, mean=0.5, deviation=2.0),
            random.small(config.channels, jnp.float32, mean=1.0),
            random.small(config.channels, jnp.float32),
        ]
        return (
            *operands,
            *(random.normal(config.shape, dtype) for _ in range(1 + config.residual)),
        )

    def ours(x, scale, bias, residual=None):
        options: Any = dict(epsilon=EPSILON, activation=config.activation, residual=residual)
        if config.operator == "group_norm":
            return jaxfused.group_norm(x, scale, bias, num_groups=config.groups, **options)
        return jaxfused.batch_norm(x, scale, bias, **options)[0]

    def stock(fast: bool) -> Callable[..., jax.Array]:
        def norm(x, scale, bias, residual=None):
            wide = x.astype(jnp.float32)
            if config.operator == "group_norm":
                wide = wide.reshape(
                    config.batch, -1, config.groups, config.channels // config.groups
                )
            axes = (1, 3) if config.operator == "group_norm" else (0, 1, 2)
            mean = wide.mean(axes, keepdims=True)
            if fast:
                variance = jnp.square(wide).mean(axes, keepdims=True) - jnp.square(mean)
                variance = jnp.maximum(variance, 0.0)
            else:
                variance = jnp.square(wide - mean).mean(axes, keepdims=True)
            y = ((wide - mean) * lax.rsqrt(variance + EPSILON)).reshape(x.shape) * scale + bias
            y = y if residual is None else y + residual
            return ACTIVATIONS[config.activation](y).astype(x.dtype)

        return norm

    return Programs(
        make_inputs,
        ours,
        {"two passes": stock(False), "fast variance": stock(True)},
        differentiable=3 + config.residual,
    )


def conv(config: Conv) -> Programs:
    dtype, param_dtype = (
        jnp.dtype(config.dtype),
        jnp.dtype(config.dtype if config.param_dtype == "same" else config.param_dtype),
    )
    window = (config.window,) * config.axes
    deviation = (config.window**config.axes * config.channels) ** -0.5

    def make_inputs(key: jax.Array) -> Arrays:
        random = RandomArrays(key)
        operands = [random.normal(config.shape, dtype)]
        weights = (*window, config.channels, config.out)
        operands.append(random.normal(weights, param_dtype, deviation=deviation))
        if config.bias:
            operands.append(random.small(config.out, param_dtype))
        results = 2 if config.residual else 1
        return (*operands, *(random.normal(config.result, dtype) for _ in range(results)))

    def ours(*args: jax.Array) -> Any:
        x, w, bias, residual = split_operands(config, args)
        return jaxfused.conv(
            x,
            w,
            bias,
            strides=config.stride,
            kernel_dilation=config.dilation,
            activation=config.activation,
            residual=residual,
        )

    def stock(*args: jax.Array) -> Any:
        x, w, bias, residual = split_operands(config, args)
        letters = "DHW"[-config.axes :]
        y = lax.conv_general_dilated(
            x,
            w.astype(x.dtype),
            (config.stride,) * config.axes,
            "SAME",
            rhs_dilation=(config.dilation,) * config.axes,
            dimension_numbers=(f"N{letters}C", f"{letters}IO", f"N{letters}C"),
        )
        y = y if bias is None else y + bias.astype(y.dtype)
        return ACTIVATIONS[config.activation](y if residual is None else y + residual)

    return Programs(
        make_inputs, ours, {"flax": stock}, differentiable=2 + config.bias + config.residual
    )


def depthwise_conv(config: DepthwiseConv) -> Programs:
    dtype = jnp.dtype(config.dtype)
    kernel = (*config.kernel, 1, config.channels)
    sides = (-(-side // config.stride) for side in (config.height, config.width))
    result = (config.batch, *sides, config.channels)

    def make_inputs(key: jax.Array) -> Arrays:
        random = RandomArrays(key)
        operands = [random.normal(config.shape, dtype)]
        operands.append(random.normal(kernel, dtype, deviation=math.prod(config.kernel) ** -0.5))
        if config.bias:
            operands.append(random.small(config.channels, dtype))
        return (*operands, random.normal(result, dtype))

    def ours(x, w, bias=None):
        return jaxfused.conv(
            x,
            w,
            bias,
            strides=config.stride,
            feature_group_count=config.channels,
            activation=config.activation,
        )

    def stock(x, w, bias=None):
        y = lax.conv_general_dilated(
            x,
            w,
            (config.stride, config.stride),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=config.channels,
        )
        return ACTIVATIONS[config.activation](y if bias is None else y + bias)

    return Programs(make_inputs, ours, {"flax": stock}, differentiable=2 + config.bias)


_FAR = 8.0
"""Biases before a relu, in standard deviations: no rounding of a sum then turns a gradient on or off."""


def inverted_residual(config: InvertedResidual) -> Programs:
    dtype, channels = jnp.dtype(config.dtype), config.channels
    wide, window = config.expansion * channels, config.window
    kernels = ((1, 1, channels, wide), (window, window, 1, wide), (1, 1, wide, channels))

    def make_inputs(key: jax.Array) -> Arrays:
        random = RandomArrays(key)
        operands = [random.normal(config.shape, dtype)]
        for kernel in kernels:
            operands.append(random.normal(kernel, dtype, deviation=math.prod(kernel[:-1]) ** -0.5))
        biases = [_FAR * jnp.sign(random.small(wide, dtype)) for _ in range(2)]
        return (*operands, *biases, random.normal(config.shape, dtype))

    def block(convolve, x, expand, depthwise, project, first, second):
        y = convolve(x, expand, first, "relu", None, 1)
        y = convolve(y, depthwise, second, "relu", None, wide)
        return convolve(y, project, None, None, x, 1)

    def ours(x, w, bias, activation, residual, groups):
        return jaxfused.conv(
            x, w, bias, activation=activation, residual=residual, feature_group_count=groups
        )

    def stock(x, w, bias, activation, residual, groups):
        names = ("NHWC", "HWIO", "NHWC")
        y = lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=names, feature_group_count=groups
        )
        y = y if bias is None else y + bias
        return ACTIVATIONS[activation](y if residual is None else y + residual)

    return Programs(
        make_inputs, partial(block, ours), {"flax": partial(block, stock)}, differentiable=6
    )


def max_pool(config: Pool) -> Programs:
    window, strides = (config.window,) * 2, (config.stride,) * 2
    result = [1 + (side - config.window) // config.stride for side in config.shape[1:3]]

    def make_inputs(key: jax.Array) -> Arrays:
        random, dtype = RandomArrays(key), jnp.dtype(config.dtype)
        dy = random.normal((config.batch, *result, config.channels), dtype)
        return random.normal(config.shape, dtype), dy

    return Programs(
        make_inputs,
        lambda x: jaxfused.max_pool(x, config.window, strides=config.stride),
        {"flax": lambda x: flax.linen.max_pool(x, window, strides)},
        differentiable=1,
    )


def upsample(config: Upsample) -> Programs:
    result = (config.batch, 2 * config.height, 2 * config.width, config.channels)

    def make_inputs(key: jax.Array) -> Arrays:
        random, dtype = RandomArrays(key), jnp.dtype(config.dtype)
        return random.normal(config.shape, dtype), random.normal(result, dtype)

    return Programs(
        make_inputs,
        jaxfused.upsample,
        {"jax.image": lambda x: jax.image.resize(x, result, "bilinear")},
        differentiable=1,
    )
