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
from benchmarks.fuzz import convolutions, images, norms
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
    of_problem,
    split_operands,
)


def image_norm(config: ImageNorm) -> Programs:
    is_group_norm = config.operator == "group_norm"
    problem = (norms.group_norm if is_group_norm else norms.batch_norm)(
        dict(
            shape=config.shape,
            dtype=config.dtype,
            scale="float32",
            bias="float32",
            residual=config.residual,
            activation=config.activation,
            num_groups=config.groups,
            epsilon=EPSILON,
            training=True,
        )
    )

    def stock(fast: bool) -> Callable[..., jax.Array]:
        def norm(x, scale, bias, residual=None):
            wide = x.astype(jnp.float32)
            if is_group_norm:
                wide = wide.reshape(
                    config.batch, -1, config.groups, config.channels // config.groups
                )
            axes = (1, 3) if is_group_norm else (0, 1, 2)
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

    return of_problem(problem, {"two passes": stock(False), "fast variance": stock(True)})


def conv(config: Conv) -> Programs:
    problem = convolutions.conv(
        dict(
            batch=config.batch,
            sides=config.shape[1:-1],
            channels=config.channels,
            out=config.out,
            groups=1,
            window=(config.window,) * config.axes,
            strides=config.stride,
            kernel_dilation=config.dilation,
            padding="SAME",
            dtype=config.dtype,
            param_dtype=config.dtype if config.param_dtype == "same" else config.param_dtype,
            bias=config.bias,
            activation=config.activation,
            residual=config.residual,
        )
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

    return of_problem(problem, {"flax": stock})


def depthwise_conv(config: DepthwiseConv) -> Programs:
    problem = convolutions.conv(
        dict(
            batch=config.batch,
            sides=config.shape[1:-1],
            channels=config.channels,
            out=config.channels,
            groups=config.channels,
            window=config.kernel,
            strides=config.stride,
            kernel_dilation=1,
            padding="SAME",
            dtype=config.dtype,
            param_dtype=config.dtype,
            bias=config.bias,
            activation=config.activation,
            residual=False,
        )
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

    return of_problem(problem, {"flax": stock})


_FAR = 8.0
"""Magnitude of biases before a relu, in standard deviations of its input. No input is then near 0, where
rounding would decide whether its gradient is 0."""


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
    drawn = dict(shape=config.shape, dtype=config.dtype, padding="VALID")
    problem = images.max_pool(drawn | dict(window=window, strides=strides))
    return of_problem(problem, {"flax": lambda x: flax.linen.max_pool(x, window, strides)})


def upsample(config: Upsample) -> Programs:
    result = (config.batch, 2 * config.height, 2 * config.width, config.channels)
    problem = images.upsample(
        dict(shape=config.shape, dtype=config.dtype, factor=2, method="bilinear")
    )
    return of_problem(problem, {"jax.image": lambda x: jax.image.resize(x, result, "bilinear")})
