"""Dense conv, where each feature depends on all channels: choice of implementation and gradient.

The kernels run a 1-D convolution as a 2-D one with a single row. A 1 x 1 convolution is a matrix product
of the pixels that it reads, in XLA's program too: cuDNN is slower at such products than GEMM libraries,
most of all at wgrad.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jaxfused.ops.conv import conv_xla, space_to_depth
from jaxfused.ops.conv.conv_input import Concatenated
from jaxfused.ops.conv.dense_conv_backward import (
    InputGradient,
    JoinedInputGradient,
    WeightGradient,
    joined_gradient,
)
from jaxfused.ops.conv.dense_conv_forward import (
    Forward,
    ForwardOfTwo,
    ForwardWithStatistics,
    Letters,
    Options,
    has_one_axis,
    images,
    weights_of_images,
)
from jaxfused.ops.linear.linear_stages import ActivationGradient
from jaxfused.ops.linear.weight_gradient import sum_rows, weight_gradient
from jaxfused.runtime import sharding
from jaxfused.runtime.activation import SLOPE_OF_RESULT
from jaxfused.runtime.gate import LeftToXla
from jaxfused.runtime.kernel_gradient import kernel_gradient
from jaxfused.runtime.runner import Runner, StageCall
from pallas_kernels.conv import conv as pallas_conv
from pallas_kernels.conv.window import Window


def window_of(
    x: Any,
    w: Any,
    *,
    strides: tuple[int, ...],
    padding: str | Sequence[tuple[int, int]] | conv_xla.Around,
    input_dilation: tuple[int, ...],
    kernel_dilation: tuple[int, ...],
    feature_group_count: int,
) -> Window | str:
    """Returns the window on two or three axes (one axis becomes two), or why no kernel supports it."""
    kernel = w.shape[:-2]
    if feature_group_count > 1:
        return f"x has {feature_group_count} groups of channels"
    if len(kernel) > 3:
        return f"x has {len(kernel)} spatial axes"
    if set(input_dilation) != {1}:
        return "the input is dilated"
    if padding in ("SAME", "SAME_LOWER", "VALID"):
        reaches = [(k - 1) * d + 1 for k, d in zip(kernel, kernel_dilation, strict=True)]
        padding = jax.lax.padtype_to_pads(x.shape[1:-1], reaches, strides, str(padding))
    if isinstance(padding, str):
        return f"padding is {padding!r}"
    if isinstance(padding, conv_xla.Around):
        return f"padding is of values of x ({padding.mode})"
    window = Window(kernel, tuple((low, high) for low, high in padding), strides, kernel_dilation)
    if len(kernel) == 1:
        window = Window(
            (1, *kernel), ((0, 0), *window.padding), (1, *strides), (1, *kernel_dilation)
        )
    sizes = x.shape[1:-1] if len(x.shape) > 3 else (1, *x.shape[1:-1])
    if any(size < 1 for size in window.result(sizes)):
        return "the result has no elements"
    return window


class Simplification(Protocol):
    """Function of (x, w) that returns the operands of another convolution with the same result."""

    def __call__(self, x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]: ...


def simplified(window: Window | str, x: Any) -> tuple[Simplification, Window | str]:
    """Returns how the kernels rewrite a convolution of x, and the window after the rewrite."""
    if isinstance(window, str) or sharding.is_explicit(x):
        return AsItIs(), window
    if x.ndim == 4 and space_to_depth.can_join(window, x.shape[-1]):
        return _Joined(window), space_to_depth.joined(window)
    dense = replace(window, strides=(1,) * len(window.strides))
    if window.is_strided and dense.is_pointwise:
        return _MetPixels(window.strides), dense
    return AsItIs(), window


@dataclass(frozen=True)
class AsItIs:
    """Simplification that returns x and w unchanged."""

    def __call__(self, x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        return x, w


@dataclass(frozen=True)
class _Joined:
    """Space-to-depth of images with few channels (see space_to_depth.py)."""

    window: Window

    def __call__(self, x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        return space_to_depth.join(self.window, x, w)


@dataclass(frozen=True)
class _MetPixels:
    """Selection of the pixels of x [B, *spatial, C] that a strided 1 x 1 convolution reads."""

    strides: tuple[int, ...]

    def __call__(self, x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        steps = self.strides[-(x.ndim - 2) :]
        return x[(slice(None), *(slice(None, None, step) for step in steps))], w


def left_to_xla(
    run: Runner, window: Window, options: "Options", x: Any, w: Any, bias: Any, residual: Any
) -> LeftToXla | None:
    """Returns why XLA runs a call that names no implementation, or None if a kernel may be faster.

    `options.window`, x and w are those after the rewrite by `simplified`; `window` is the caller's. If
    no reason is returned, forward, dgrad and wgrad each choose an implementation later.
    """
    dense = options.window
    if dense.is_pointwise:
        return None
    if dense.taps < window.taps:
        pixels, features = pixels_of(dense, x), w.shape[-1]
        if features % TILE_FEATURES == 0 and pixels >= _LEAST_JOINED_PIXELS:
            return None
        why = (
            f"kernels of few channels are faster at multiples of {TILE_FEATURES} features and at least"
            f" {_LEAST_JOINED_PIXELS} pixels, and there are {features} features and {pixels} pixels"
        )
        return run.left_to_xla(why, stages(options, x, w, bias, residual))
    choices = [
        run.choice(stage, *operands) for stage, operands in stages(options, x, w, bias, residual)
    ]
    if any(choice.implementation != "xla" for choice in choices):
        return None
    why = "cuDNN is faster at a convolution of this shape and at its gradients"
    return LeftToXla(why, choices)


def stages(options: "Options", x: Any, w: Any, bias: Any, residual: Any) -> Iterator[StageCall]:
    """Yields the kernels of a convolution and its gradients, with their operands' shapes."""
    x, w, residual = sharding.eval_shape(
        lambda x, w, residual: (images(x), weights_of_images(x, w), images(residual)),
        x,
        w,
        residual,
    )
    window, precision, sizes = options.window, options.precision, x.shape[1:-1]
    dz = jax.ShapeDtypeStruct((x.shape[0], *window.result(sizes), w.shape[-1]), x.dtype)
    for saves in (False, True)[: 1 + options.keeps_preactivation]:
        yield Forward(options, saves), (x, w, bias, residual)
    yield InputGradient(window, sizes, precision), (dz, w)
    yield WeightGradient(window, precision), (x, dz)


TILE_FEATURES = 64
"""Features of a kernel's tile; a result with a multiple of these fills all of its tiles."""
_LEAST_JOINED_PIXELS = 2**17
"""Fewest pixels of the result for which a kernel after space-to-depth is faster than XLA."""


def pixels_of(window: Window, x: Any) -> int:
    """Returns the number of pixels of y, over all images, for x [B, *spatial, C]."""
    batch, *sizes, _ = x.shape
    return math.prod((batch, *window.result((1, *sizes) if has_one_axis(x) else sizes)))


def dense_conv(
    run: Runner,
    x: jax.Array | Concatenated,
    w: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    request: "Request",
    window: Window,
    activation: str | None,
    precision: Any,
) -> "Convolved":
    """Returns the convolution of x [B, *spatial, C] with w [*kernel, C, F], with its epilogue.

    `window` is that of x and w after `request.simplify`.
    """
    weights = weights_of_images(x, w)
    letters = Letters(len(window.kernel))
    options = Options(window, activation, precision)
    if isinstance(x, Concatenated):
        channels = (x.first.shape[-1], x.shape[-1])
        if request == Request() and pallas_conv.why_not_of_two(window, x.dtype, *channels) is None:
            return _dense_conv_of_two(run, options, x, weights, bias, residual)
        x = x.array()
    operands = sharding.align(
        (images(x), weights, bias, images(residual)),
        operand_axes=(letters.images, letters.weights, "f", letters.result),
        whole=letters.whole,
    )
    if request.statistics and not _takes_statistics(run, options, request, *operands):
        request = replace(request, statistics=False)
    y, returned_input, statistics = _conv(run, options, request, *operands)
    if x.ndim == 3:
        y, returned_input = y[:, 0], None if returned_input is None else returned_input[:, 0]
    return Convolved(y, returned_input, jax.lax.stop_gradient(statistics))


def _dense_conv_of_two(run: Runner, options: "Options", x: Concatenated, w, bias, residual):
    letters = Letters(len(options.window.kernel))
    operands = sharding.align(
        (*map(images, x.parts), w, bias, images(residual)),
        operand_axes=(*letters.two_images, letters.weights, "f", letters.result),
        whole=letters.whole,
    )
    y = _conv_of_two(run, options, *operands)
    return Convolved(y[:, 0] if x.ndim == 3 else y, None, None)


class Convolved(NamedTuple):
    """Results of `dense_conv`."""

    y: jax.Array
    x: jax.Array | None
    """The input x if `Request.returns_input`, else None."""
    statistics: tuple[jax.Array, jax.Array] | None
    """Mean and variance [F] of y if the convolution's kernel computed them, else None."""


@dataclass(frozen=True)
class Request:
    """Static arguments that say how a call reads x and which results it returns besides y."""

    simplify: Simplification = AsItIs()
    returns_input: bool = False
    """True to return x as a second result, whose cotangent is added to x's gradient."""
    rectified: bool = False
    """True if x is a relu's result (`Rectified`), whose mask the kernel of x's gradient applies."""
    statistics: bool = False
    """True to return mean and variance of y, for a norm that follows. They have no gradient."""


class Residuals(NamedTuple):
    """Arrays that the forward saves for the gradient."""

    x: jax.Array
    """The call's x. The backward repeats `Request.simplify`, so that no rewritten copy is saved."""
    w: jax.Array
    bias: jax.Array | None
    residual_like: jax.Array | None
    """Array without elements that has the residual's dtype."""
    z: jax.Array | None
    """The activation's input, or y if the derivative follows from y; None without an activation."""


@functools.partial(kernel_gradient, nondiff_argnums=(0, 1, 2), op="conv")
def _conv(run: Runner, options: Options, request: Request, x, w, bias, residual):
    y, _, statistics = _forward(run, options, request, x, w, bias, residual, saves=False)
    return y, x if request.returns_input else None, statistics


def _forward(run: Runner, options: Options, request: Request, x, w, bias, residual, *, saves: bool):
    """Returns y, the activation's input or None if it is not saved, and statistics of y or None."""
    operands = (*request.simplify(x, w), bias, residual)
    if request.statistics:
        y, mean, variance = run(ForwardWithStatistics(options), *operands)
        return y, None, (mean, variance)
    y, z = run(Forward(options, save_preactivation=saves), *operands)
    return y, z, None


def _conv_fwd(run: Runner, options: Options, request: Request, x, w, bias, residual):
    saves = options.keeps_preactivation
    y, z, statistics = _forward(run, options, request, x, w, bias, residual, saves=saves)
    results = (y, x if request.returns_input else None, statistics)
    return results, saved_of(options, x, w, bias, residual, y, z)


def saved_of(options: Options, x, w, bias, residual, y, z) -> Residuals:
    """Returns the operands, and y if the activation's derivative follows from y, else its input z."""
    like = None if residual is None else jnp.zeros_like(residual, shape=(0,))
    return Residuals(x, w, bias, like, y if options.activation in SLOPE_OF_RESULT else z)


def _conv_bwd(run: Runner, options: Options, request: Request, saved: Residuals, cotangents):
    dy, handed_back, _ = cotangents
    dz, dbias, dresidual = gradients_after(run, options, saved, dy)
    dx, dw = _gradients(run, options, request, saved.x, saved.w, dz, handed_back)
    return dx, dw, dbias, dresidual


def gradients_after(run: Runner, options: Options, saved: Residuals, dy):
    """Returns (dz, dbias, dresidual), where dz is the gradient of the activation's input."""
    bias = saved.bias
    if saved.z is None:
        dz, dbias = dy, None if bias is None else sum_rows(dy, bias.dtype)
    else:
        gradient = ActivationGradient(str(options.activation), bias is not None)
        dz, sums = run(gradient, dy, saved.z)
        dbias = None if bias is None else sums.astype(bias.dtype)
    like = saved.residual_like
    return dz, dbias, None if like is None else dz.astype(like.dtype)


def _gradients(run: Runner, options: Options, request: Request, x, w, dz, handed_back):
    """Returns (dx, dw); dx includes `handed_back`, the cotangent of x as the forward's second result."""
    y = x if request.rectified else None
    if request.simplify != AsItIs():
        # Without the barrier XLA keeps the forward's rewritten copy of x in memory, to use it here.
        x, dz = jax.lax.optimization_barrier((x, dz))
        (x, w), restore = jax.vjp(request.simplify, x, w)
        dx, dw = restore(_gradients(run, options, Request(), x, w, dz, None))
        return joined_gradient(dx, handed_back, y), dw
    window, precision = options.window, options.precision
    gradient = InputGradient(window, x.shape[1:-1], precision)
    if handed_back is None and y is None:
        (dx,) = run(gradient, dz, w)
    else:
        (dx,) = run(JoinedInputGradient(gradient), dz, w, handed_back, y)
    if window.is_pointwise:
        dw = weight_gradient(run, "conv", x, dz, w.dtype, precision).reshape(w.shape)
    else:
        (dw,) = run(WeightGradient(window, precision), x, dz)
    return dx, dw.astype(w.dtype)


_conv.defvjp(_conv_fwd, _conv_bwd)


def pointwise_gradients(run: Runner, x, w, dz, precision: Any):
    """Returns (dx, dw) of x [B, *spatial, C] @ w [C, F] from its cotangent dz [B, *spatial, F]."""
    window = Window.pointwise(x.ndim - 2)
    kernel = w.reshape(*window.kernel, *w.shape)
    (dx,) = run(InputGradient(window, x.shape[1:-1], precision), dz, kernel)
    return dx, weight_gradient(run, "conv", x, dz, w.dtype, precision)


@functools.partial(kernel_gradient, nondiff_argnums=(0, 1), op="conv")
def _conv_of_two(run: Runner, options: Options, first, second, w, bias, residual):
    """Computes `_conv` of the concatenation of `first` and `second` along channels."""
    stage = ForwardOfTwo(Forward(options, save_preactivation=False))
    return run(stage, first, second, w, bias, residual)[0]


def _conv_of_two_fwd(run: Runner, options: Options, first, second, w, bias, residual):
    stage = ForwardOfTwo(Forward(options, save_preactivation=options.keeps_preactivation))
    y, z = run(stage, first, second, w, bias, residual)
    return y, (second, saved_of(options, first, w, bias, residual, y, z))


def _conv_of_two_bwd(run: Runner, options: Options, saved, dy):
    second, residuals = saved
    first, w = residuals.x, residuals.w
    dz, dbias, dresidual = gradients_after(run, options, residuals, dy)
    gradient = InputGradient(options.window, first.shape[1:-1], options.precision)
    (dx,) = run(gradient, dz, w)
    dws = [
        run(WeightGradient(options.window, options.precision), x, dz)[0] for x in (first, second)
    ]
    dw = jnp.concatenate(dws, axis=-2).astype(w.dtype)
    return *jnp.split(dx, [first.shape[-1]], axis=-1), dw, dbias, dresidual


_conv_of_two.defvjp(_conv_of_two_fwd, _conv_of_two_bwd)


def _takes_statistics(
    run: Runner, options: Options, request: Request, x, w, bias, residual
) -> bool:
    """Returns whether the convolution's kernel computes mean and variance of y for the norm after it.

    This is decided at tracing, before the call is sharded.
    """
    if options.keeps_preactivation or not sharding.is_in_one_piece(x, w):
        return False
    like_x, like_w = sharding.eval_shape(request.simplify, x, w)
    choice = run.choice(ForwardWithStatistics(options), like_x, like_w, bias, residual)
    return choice.implementation == "pallas"
