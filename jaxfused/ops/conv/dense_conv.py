"""Dense conv, where each feature depends on all channels: choice of implementation, gradient.

The kernels see a convolution along one axis as one along columns, with a single row. A window of one
weight is a matrix product of the pixels that it reads, in XLA's program too: cuDNN is slower at it than
GEMM libraries, most of all at wgrad.
"""

import functools
import math
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jaxfused import dispatch
from jaxfused.ops.conv import conv_xla, space_to_depth
from jaxfused.ops.conv.conv_input import Concatenated
from jaxfused.ops.linear.linear_stages import CHEAP_ACTIVATIONS, ActivationGradient
from jaxfused.ops.linear.weight_gradient import sum_rows, weight_gradient
from jaxfused.ops.norm import batch_norm_xla
from jaxfused.runtime import sharding
from jaxfused.runtime.activation import ARITHMETIC, SLOPE_OF_RESULT
from jaxfused.runtime.estimate import Estimate, Rule
from jaxfused.runtime.gate import LeftToXla
from jaxfused.runtime.kernel_gradient import kernel_gradient
from jaxfused.runtime.product_choice import UNMODELLED, Passes, is_modelled, product_times, xla_time
from jaxfused.runtime.product_xla import product
from jaxfused.runtime.promotion import accumulator_dtype
from jaxfused.runtime.rectified import masked_gradient
from jaxfused.runtime.runner import Axes, Results, Runner, Stage
from jaxfused.runtime.shapes import why_symbolic
from jaxfused.runtime.vmap import is_batched, merged_images, unmerged_images
from pallas_kernels.conv import conv as pallas_conv
from pallas_kernels.conv import cudnn_cost
from pallas_kernels.conv import strided as pallas_strided
from pallas_kernels.conv import weight_gradient as pallas_weight_gradient
from pallas_kernels.conv.window import Window
from pallas_kernels.gemm.xla_cost import xla_pass


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
    """Returns the window of a convolution of two or three axes, or why there is no kernel for it."""
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
    """Rewrite of (x, w) as another convolution with the same result; equal rewrites compute the same."""

    def __call__(self, x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]: ...


def simplified(window: Window | str, x: Any) -> tuple[Simplification, Window | str]:
    """Returns how a convolution of x is rewritten for the kernels, and the rewritten window."""
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
    """Identity: the convolution as the caller wrote it."""

    def __call__(self, x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        return x, w


@dataclass(frozen=True)
class _Joined:
    """Space-to-depth of a few channels: see `space_to_depth`."""

    window: Window

    def __call__(self, x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        return space_to_depth.join(self.window, x, w)


@dataclass(frozen=True)
class _MetPixels:
    """Removal of the pixels of x [B, *spatial, C] that a window of one weight steps over."""

    strides: tuple[int, ...]

    def __call__(self, x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        steps = self.strides[-(x.ndim - 2) :]
        return x[(slice(None), *(slice(None, None, step) for step in steps))], w


def why_unsupported(
    device: dispatch.Device, window: Window | str, x: Any, w: Any, residual: Any = None
) -> str | None:
    """Returns None if the kernels can run a convolution of this window, else the reason."""
    if isinstance(window, str):
        return f"the Pallas kernels of conv are dense, and {window}"
    return why_symbolic(x, w) or pallas_conv.why_unsupported(
        compute_capability=device.compute_capability,
        dtypes={"x": x.dtype, "residual": None if residual is None else residual.dtype},
        channels={"x": w.shape[-2], "the result": w.shape[-1]},
        sizes=x.shape[:-1],
        window=window,
    )


def left_to_xla(
    run: Runner, window: Window, options: "Options", x: Any, w: Any, bias: Any, residual: Any
) -> LeftToXla | None:
    """Returns why a call that names no implementation is XLA's, or None if a kernel may be faster.

    The window of `options` is what `simplified` makes of `window`; x and w are rewritten too. Each stage
    later runs what is predicted to be faster for it.
    """
    dense = options.window
    if dense.is_pointwise:
        return None
    if dense.taps < window.taps:
        pixels, features = pixels_of(dense, x), w.shape[-1]
        if features % 64 == 0 and pixels >= _LEAST_JOINED_PIXELS:
            return None
        return LeftToXla(
            "the kernels were timed with few channels at multiples of 64 features and at least"
            f" {_LEAST_JOINED_PIXELS} pixels, and there are {features} features and {pixels} pixels"
        )
    # The prediction is that for the convolution alone.
    for stage, operands in stages(Options(dense, None, None), x, w, None, None):
        if run.choice(stage, *operands).implementation != "xla":
            return None
    why = "cuDNN is predicted to be faster at a convolution of this shape and at its gradients"
    return run.left_to_xla(why, stages(options, x, w, bias, residual))


def stages(options: "Options", x: Any, w: Any, bias: Any, residual: Any) -> Iterator[Stage]:
    """Yields the stages of a convolution and of its gradients."""
    x, w, residual = jax.eval_shape(
        lambda x, w, residual: (images(x), weights_of_images(x, w), images(residual)),
        x,
        w,
        residual,
    )
    window, precision, sizes = options.window, options.precision, x.shape[1:-1]
    dz = jax.ShapeDtypeStruct((x.shape[0], *window.result(sizes), w.shape[-1]), x.dtype)
    for saves in (False, True)[: 1 + options.keeps_preactivation]:
        yield Forward(options, saves), (x, w, bias, residual)
    yield _InputGradient(window, sizes, precision), (dz, w)
    yield _WeightGradient(window, precision), (x, dz)


_LEAST_JOINED_PIXELS = 2**17
"""Fewest pixels of the result for which space-to-depth comes first."""


def pixels_of(window: Window, x: Any) -> int:
    """Returns the pixels of the result, of all images together."""
    sizes = x.shape[1:-1] if len(x.shape) > 3 else (1, *x.shape[1:-1])
    return math.prod((x.shape[0], *window.result(sizes)))


def images(x: Any) -> Any:
    """Returns x [B, L, C] as images of one row."""
    return x[:, None] if x is not None and x.ndim == 3 else x


def weights_of_images(x: Any, w: Any) -> Any:
    """Returns the weights for `images` of x, with one row if x has one spatial axis."""
    return w[None] if x.ndim == 3 else w


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
    y, handed_on, statistics = _conv(run, options, request, *operands)
    if x.ndim == 3:
        y, handed_on = y[:, 0], None if handed_on is None else handed_on[:, 0]
    return Convolved(y, handed_on, jax.lax.stop_gradient(statistics))


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
    """x itself if it was requested, else None."""
    statistics: tuple[jax.Array, jax.Array] | None
    """Mean and variance of y [F], if a kernel computes them with the convolution."""


# --- gradient -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """Static arguments of a convolution."""

    window: Window
    activation: str | None
    precision: Any

    @property
    def keeps_preactivation(self) -> bool:
        """True if the gradient reads the activation's input; that of relu reads its result."""
        return self.activation not in (None, *SLOPE_OF_RESULT)


@dataclass(frozen=True)
class Request:
    """Reading of x and further results that a call asks for."""

    simplify: Simplification = AsItIs()
    hands_on: bool = False
    """Return of x as a second result; its cotangent is then a part of x's gradient."""
    rectified: bool = False
    """True if x holds the values of a `Rectified`."""
    statistics: bool = False
    """Statistics of y, for the norm that follows. No gradient flows through them."""


class Residuals(NamedTuple):
    """Arrays that the forward saves for the gradient."""

    x: jax.Array
    """The caller's x. The backward simplifies it again: a saved copy would live for that alone."""
    w: jax.Array
    bias: jax.Array | None
    residual_like: jax.Array | None
    """An array without elements, of the residual's dtype."""
    z: jax.Array | None
    """The activation's input, or y if its sign is enough; None without an activation."""


@functools.partial(kernel_gradient, nondiff_argnums=(0, 1, 2), op="conv")
def _conv(run: Runner, options: Options, request: Request, x, w, bias, residual):
    y, _, statistics = _forward(run, options, request, x, w, bias, residual, saves=False)
    return y, x if request.hands_on else None, statistics


def _forward(run: Runner, options: Options, request: Request, x, w, bias, residual, *, saves: bool):
    """Returns (y, z if it is saved, statistics of y or None)."""
    operands = (*request.simplify(x, w), bias, residual)
    if request.statistics:
        y, mean, variance = run(_ForwardWithStatistics(options), *operands)
        return y, None, (mean, variance)
    y, z = run(Forward(options, save_preactivation=saves), *operands)
    return y, z, None


def _conv_fwd(run: Runner, options: Options, request: Request, x, w, bias, residual):
    saves = options.keeps_preactivation
    y, z, statistics = _forward(run, options, request, x, w, bias, residual, saves=saves)
    results = (y, x if request.hands_on else None, statistics)
    return results, saved_of(options, x, w, bias, residual, y, z)


def saved_of(options: Options, x, w, bias, residual, y, z) -> Residuals:
    """Returns what the gradient reads: the operands, and the result y or, if saved, z."""
    like = None if residual is None else jnp.zeros_like(residual, shape=(0,))
    return Residuals(x, w, bias, like, y if options.activation in SLOPE_OF_RESULT else z)


def _conv_bwd(run: Runner, options: Options, request: Request, saved: Residuals, cotangents):
    dy, handed_back, _ = cotangents
    dz, dbias, dresidual = gradients_after(run, options, saved, dy)
    dx, dw = _gradients(run, options, request, saved.x, saved.w, dz, handed_back)
    return dx, dw, dbias, dresidual


def gradients_after(run: Runner, options: Options, saved: Residuals, dy):
    """Returns (dz, dbias, dresidual): the gradients of the epilogue."""
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
    """Returns (dx, dw); dx includes a returned x's cotangent, and is masked where x is rectified."""
    y = x if request.rectified else None
    if request.simplify != AsItIs():
        # Without the barrier XLA merges this with the forward's rewritten copy, and keeps that alive.
        x, dz = jax.lax.optimization_barrier((x, dz))
        (x, w), restore = jax.vjp(request.simplify, x, w)
        dx, dw = restore(_gradients(run, options, Request(), x, w, dz, None))
        return joined_gradient(dx, handed_back, y), dw
    window, precision = options.window, options.precision
    gradient = _InputGradient(window, x.shape[1:-1], precision)
    if handed_back is None and y is None:
        (dx,) = run(gradient, dz, w)
    else:
        (dx,) = run(_JoinedInputGradient(gradient), dz, w, handed_back, y)
    if window.is_pointwise:
        dw = weight_gradient(run, "conv", x, dz, w.dtype, precision).reshape(w.shape)
    else:
        (dw,) = run(_WeightGradient(window, precision), x, dz)
    return dx, dw.astype(w.dtype)


_conv.defvjp(_conv_fwd, _conv_bwd)


def pointwise_gradients(run: Runner, x, w, dz, precision: Any):
    """Returns (dx, dw) of the product of pixels x [B, *spatial, C] with w [C, F]."""
    window = Window.pointwise(x.ndim - 2)
    kernel = w.reshape(*window.kernel, *w.shape)
    (dx,) = run(_InputGradient(window, x.shape[1:-1], precision), dz, kernel)
    return dx, weight_gradient(run, "conv", x, dz, w.dtype, precision)


@functools.partial(kernel_gradient, nondiff_argnums=(0, 1), op="conv")
def _conv_of_two(run: Runner, options: Options, first, second, w, bias, residual):
    """Computes `_conv` of x in two arrays, concatenated along the channels."""
    stage = _ForwardOfTwo(Forward(options, save_preactivation=False))
    return run(stage, first, second, w, bias, residual)[0]


def _conv_of_two_fwd(run: Runner, options: Options, first, second, w, bias, residual):
    stage = _ForwardOfTwo(Forward(options, save_preactivation=options.keeps_preactivation))
    y, z = run(stage, first, second, w, bias, residual)
    return y, (second, saved_of(options, first, w, bias, residual, y, z))


def _conv_of_two_bwd(run: Runner, options: Options, saved, dy):
    second, residuals = saved
    first, w = residuals.x, residuals.w
    dz, dbias, dresidual = gradients_after(run, options, residuals, dy)
    gradient = _InputGradient(options.window, first.shape[1:-1], options.precision)
    (dx,) = run(gradient, dz, w)
    dws = [
        run(_WeightGradient(options.window, options.precision), x, dz)[0] for x in (first, second)
    ]
    dw = jnp.concatenate(dws, axis=-2).astype(w.dtype)
    return *jnp.split(dx, [first.shape[-1]], axis=-1), dw, dbias, dresidual


_conv_of_two.defvjp(_conv_of_two_fwd, _conv_of_two_bwd)


# --- kernels --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Letters:
    """Letters of a convolution's axes."""

    axes: int

    @property
    def images(self) -> str:
        return "b" + "dhw"[-self.axes :] + "c"

    @property
    def two_images(self) -> tuple[str, str]:
        """Letters of two arrays that each hold a part of the channels."""
        spatial = "b" + "dhw"[-self.axes :]
        return spatial + "x", spatial + "y"

    @property
    def weights(self) -> str:
        return "ijk"[-self.axes :] + "cf"

    @property
    def result(self) -> str:
        return "b" + "tuv"[-self.axes :] + "f"

    @property
    def whole(self) -> str:
        return "dhwcxyijktuv"


class Timed:
    """A stage whose kernel runs where the predicted `times` of XLA are longer."""

    def estimate(self: Any, device, able: Collection[str], *operands) -> Estimate:
        if "pallas" not in able:
            return None
        return product_times(self.times(device, *operands)) if is_modelled(device) else UNMODELLED


@dataclass(frozen=True)
class Forward(Timed):
    """Computes (y, z) from x [B, *spatial, C], w [*kernel, C, F], bias and residual."""

    options: Options
    save_preactivation: bool

    @property
    def name(self) -> str:
        return "conv dense forward"

    def axes(self, x, w, bias, residual) -> Axes:
        letters = Letters(x.ndim - 2)
        saved = letters.result if self.save_preactivation else None
        return Axes(
            (letters.images, letters.weights, "f", letters.result),
            (letters.result, saved),
            whole=letters.whole,
        )

    def why_not(self, device, x, w, bias, residual) -> Mapping[str, str | None]:
        window = self.options.window
        return {"xla": None, "pallas": why_unsupported(device, window, x, w, residual)}

    def times(self, device, x, w, bias, residual) -> Mapping[str, float]:
        call = call_of(device, self.options.window, x.shape[:-1], x.dtype, w)
        streams = self.streams(x, residual)
        if self.options.window.is_pointwise:
            xla = xla_time(device, call.as_product(**streams), self._passes(x, bias, residual))
        else:
            xla = _cudnn_time(call) + self.after_cudnn(call, x, residual)
        return {"pallas": pallas_conv.predicted_time(call, **streams), "xla": xla}

    def after_cudnn(self, call: pallas_conv.ConvCall, x, residual) -> float:
        """Returns the microseconds of the epilogue after cuDNN's convolution."""
        elements = math.prod(call.result) * call.features
        after = cudnn_cost.epilogue(
            elements, x.dtype.itemsize, self.options.activation, residual=residual is not None
        )
        in_convolution = conv_xla.adds_in_convolution(x.dtype, residual, self.options.activation)
        return after * _EPILOGUE_IN_CUDNN if in_convolution else after

    def _passes(self, x, bias, residual) -> Passes:
        """Returns the kernels after XLA's product of a window of one weight."""
        streams = self.streams(x, residual)
        if bias is not None or self.options.activation is not None:
            return Passes(
                bytes_of_element=streams["read_bytes"]
                + x.dtype.itemsize
                + streams["written_bytes"],
                evaluations=int(self.options.activation not in (None, *CHEAP_ACTIVATIONS)),
                slow=self.options.activation == "gelu_erf",
            )
        return Passes(bytes_in_product=streams["read_bytes"])

    def streams(self, x, residual) -> dict[str, int]:
        """Returns the epilogue's bytes read and written, and its activations, of an element."""
        return dict(
            read_bytes=0 if residual is None else residual.dtype.itemsize,
            written_bytes=x.dtype.itemsize * (1 + self.save_preactivation),
            activations=int(self.options.activation not in (None, *ARITHMETIC)),
        )

    def configs(
        self, implementation: str, device: dispatch.Device, x, w, bias, residual
    ) -> Sequence[Hashable]:
        if implementation != "pallas":
            return ()
        call = call_of(device, self.options.window, x.shape[:-1], x.dtype, w)
        return pallas_conv.fitting(call, **self.streams(x, residual))

    def run(self, implementation, device, x, w, bias, residual, config=None) -> Results:
        options = self.options
        if implementation == "pallas":
            return pallas_conv.forward(
                x,
                w,
                bias,
                residual,
                window=options.window,
                activation=options.activation,
                save_preactivation=self.save_preactivation,
                multiprocessors=device.multiprocessors,
                config=config,
            )
        convolve = functools.partial(_reference, options, x, w, bias, residual)
        y = convolve(activation=options.activation)
        return y, convolve(activation=None) if self.save_preactivation else None

    def batched(self, call, axis_size, in_batched, x, w, bias, residual) -> Results | None:
        if is_batched(in_batched[1:3]):
            return None
        merged = merged_images(axis_size, (in_batched[0], in_batched[3]), (x, residual))
        return unmerged_images(axis_size, call(self, merged[0], w, bias, merged[1]))


@dataclass(frozen=True)
class _ForwardOfTwo(Timed):
    """Computes `Forward` of x in two arrays: a kernel reads both, XLA concatenates them."""

    alone: Forward

    @property
    def name(self) -> str:
        return "conv dense forward of two arrays"

    def axes(self, first, second, w, bias, residual) -> Axes:
        axes = self.alone.axes(first, w, bias, residual)
        two = Letters(first.ndim - 2).two_images
        return axes._replace(operands=(*two, *axes.operands[1:]))

    def _call(self, device, first, w) -> pallas_conv.ConvCall:
        call = call_of(device, self.alone.options.window, first.shape[:-1], first.dtype, w)
        return replace(call, first_channels=first.shape[-1])

    def why_not(self, device, first, second, w, bias, residual) -> Mapping[str, str | None]:
        whole = jax.ShapeDtypeStruct((*first.shape[:-1], w.shape[-2]), first.dtype)
        return self.alone.why_not(device, whole, w, bias, residual)

    def times(self, device, first, second, w, bias, residual) -> Mapping[str, float]:
        call, streams = self._call(device, first, w), self.alone.streams(first, residual)
        after = self.alone.after_cudnn(call, first, residual)
        elements = math.prod(first.shape[:-1]) * w.shape[-2]
        after += xla_pass(elements, 2 * first.dtype.itemsize, 0)
        return {
            "pallas": pallas_conv.predicted_time(call, **streams),
            "xla": _cudnn_time(call) + after,
        }

    def configs(
        self, implementation: str, device: dispatch.Device, first, second, w, bias, residual
    ) -> Sequence[Hashable]:
        if implementation != "pallas":
            return ()
        streams = self.alone.streams(first, residual)
        return pallas_conv.fitting(self._call(device, first, w), **streams)

    def run(self, implementation, device, first, second, w, bias, residual, config=None) -> Results:
        x = (first, second) if implementation == "pallas" else jnp.concatenate((first, second), -1)
        return self.alone.run(implementation, device, x, w, bias, residual, config=config)

    def batched(self, call, axis_size, in_batched, first, second, w, bias, residual):
        if is_batched(in_batched[2:4]):
            return None
        merged = merged_images(
            axis_size, (*in_batched[:2], in_batched[4]), (first, second, residual)
        )
        return unmerged_images(axis_size, call(self, *merged[:2], w, bias, merged[2]))


def _takes_statistics(
    run: Runner, options: Options, request: Request, x, w, bias, residual
) -> bool:
    """Returns whether a kernel computes the statistics of y with the convolution; else the norm does.

    This is decided while the call is traced, before it is split over devices.
    """
    if options.keeps_preactivation or not sharding.is_in_one_piece(x, w):
        return False
    like_x, like_w = jax.eval_shape(request.simplify, x, w)
    choice = run.choice(_ForwardWithStatistics(options), like_x, like_w, bias, residual)
    return choice.implementation == "pallas"


@dataclass(frozen=True)
class _ForwardWithStatistics(Timed):
    """Computes (y, mean, variance) from x [B, *spatial, C], w [*kernel, C, F], bias and residual.

    Mean and variance [F] are those of y over all pixels, in float32.
    """

    options: Options

    @property
    def name(self) -> str:
        return "conv dense forward with statistics"

    @property
    def _alone(self) -> Forward:
        return Forward(self.options, save_preactivation=False)

    def axes(self, x, w, bias, residual) -> Axes:
        axes = self._alone.axes(x, w, bias, residual)
        return axes._replace(results=(axes.results[0], "f", "f"), whole=axes.whole + "b")

    def why_not(self, device, x, w, bias, residual) -> Mapping[str, str | None]:
        return self._alone.why_not(device, x, w, bias, residual)

    def times(self, device, x, w, bias, residual) -> Mapping[str, float]:
        window, itemsize = self.options.window, x.dtype.itemsize
        call = call_of(device, window, x.shape[:-1], x.dtype, w)
        streams = self._alone.streams(x, residual)
        # XLA's statistics read the result once more; our kernel merges those of its tiles.
        if window.is_pointwise:
            read = streams["read_bytes"] + itemsize
            passes = Passes(bytes_of_element=read + itemsize * (residual is not None))
            xla = xla_time(device, call.as_product(**streams), passes)
        else:
            elements = math.prod(call.result) * call.features
            after = xla_pass(elements, itemsize, 0) + cudnn_cost.epilogue(
                elements, itemsize, self.options.activation, residual=residual is not None
            )
            xla = _cudnn_time(call) + after
        return {"pallas": pallas_conv.predicted_time(call, **streams), "xla": xla}

    def configs(
        self, implementation: str, device: dispatch.Device, x, w, bias, residual
    ) -> Sequence[Hashable]:
        return self._alone.configs(implementation, device, x, w, bias, residual)

    def run(self, implementation, device, x, w, bias, residual, config=None) -> Results:
        if implementation == "pallas":
            return pallas_conv.forward_and_statistics(
                x,
                w,
                bias,
                residual,
                window=self.options.window,
                activation=self.options.activation,
                multiprocessors=device.multiprocessors,
                config=config,
            )
        y, _ = self._alone.run(implementation, device, x, w, bias, residual)
        assert y is not None
        statistics = batch_norm_xla.batch_statistics(y, axis_name=None, axis_index_groups=None)
        return y, *statistics

    def batched(self, call, axis_size, in_batched, x, w, bias, residual) -> None:
        return None


@dataclass(frozen=True)
class _InputGradient(Timed):
    """Computes (dx,) [B, *spatial, C] from dz and w: dgrad."""

    window: Window
    sizes: tuple[int, ...]
    precision: Any

    @property
    def name(self) -> str:
        return "conv dense input gradient"

    def axes(self, dz, w) -> Axes:
        letters = Letters(dz.ndim - 2)
        # Partial sums over split features would be rounded before they are added.
        return Axes((letters.result, letters.weights), (letters.images,), whole=letters.whole + "f")

    def _call(self, device, dz, w) -> pallas_conv.ConvCall:
        if self.window.is_strided:
            return pallas_strided.call_of(
                dz,
                w.shape[-2],
                window=self.window,
                sizes=self.sizes,
                multiprocessors=device.multiprocessors,
            )
        return call_of(device, self.window.transposed(), dz.shape[:-1], dz.dtype, w, flipped=True)

    def why_not(self, device, dz, w) -> Mapping[str, str | None]:
        if not self.window.is_strided:
            reason = why_unsupported(device, self.window.transposed(), dz, w)
        else:
            reason = pallas_strided.why_unsupported(
                compute_capability=device.compute_capability,
                dtypes={"dy": dz.dtype},
                channels=w.shape[-2],
                features=w.shape[-1],
                images=dz.shape[0],
                sizes=self.sizes,
                window=self.window,
            )
        return {"xla": None, "pallas": reason}

    def estimate(self, device, able: Collection[str], dz, w) -> Estimate:
        if self.window.is_pointwise:
            return Rule(("xla",), "nothing is fused with the product")
        return super().estimate(device, able, dz, w)

    def times(self, device, dz, w) -> Mapping[str, float]:
        call = self._call(device, dz, w)
        ours = pallas_conv.predicted_time(call, written_bytes=dz.dtype.itemsize)
        if not self.window.is_strided:
            return {"pallas": ours, "xla": _cudnn_time(call)}
        arranged = xla_pass(math.prod(w.shape), 4 * dz.dtype.itemsize)
        multiplications = math.prod(dz.shape[:-1]) * math.prod(w.shape)
        return {
            "pallas": ours + arranged,
            "xla": cudnn_cost.strided_input_gradient(multiplications, w.shape[-2]),
        }

    def configs(self, implementation: str, device: dispatch.Device, dz, w) -> Sequence[Hashable]:
        if implementation != "pallas":
            return ()
        return pallas_conv.fitting(self._call(device, dz, w), written_bytes=dz.dtype.itemsize)

    def run(self, implementation, device, dz, w, config=None) -> Results:
        if implementation == "pallas" and self.window.is_strided:
            dx = pallas_strided.input_gradient(
                dz,
                w,
                window=self.window,
                sizes=self.sizes,
                multiprocessors=device.multiprocessors,
                config=config,
            )
            return (dx,)
        if implementation == "pallas":
            dx = pallas_conv.input_gradient(
                dz,
                w,
                window=self.window,
                multiprocessors=device.multiprocessors,
                config=config,
            )
            return (dx,)
        if self.window.is_pointwise:
            rows, weights = dz.reshape(-1, dz.shape[-1]), w.reshape(w.shape[-2:])
            dx = product("mf,cf->mc", rows, weights, out_dtype=dz.dtype, precision=self.precision)
            return (dx.reshape(*dz.shape[:-1], w.shape[-2]),)
        options = Options(self.window, None, self.precision)
        x = jnp.zeros_like(dz, shape=(dz.shape[0], *self.sizes, w.shape[-2]))
        return tuple(jax.vjp(lambda x: _reference(options, x, w.astype(dz.dtype)), x)[1](dz))

    def batched(self, call, axis_size, in_batched, dz, w) -> Results | None:
        if is_batched(in_batched[1]):
            return None
        return unmerged_images(
            axis_size, call(self, *merged_images(axis_size, in_batched[:1], (dz,)), w)
        )


@dataclass(frozen=True)
class _WeightGradient(Timed):
    """Computes (dw,) [*kernel, C, F] from x and dz, in float32: wgrad."""

    window: Window
    precision: Any

    @property
    def name(self) -> str:
        return "conv dense weight gradient"

    def axes(self, x, dz) -> Axes:
        letters = Letters(x.ndim - 2)
        return Axes((letters.images, letters.result), (letters.weights,), whole=letters.whole)

    def why_not(self, device, x, dz) -> Mapping[str, str | None]:
        if pallas_weight_gradient.why_unsupported(self.window) is not None:
            return {"xla": None}
        return {"xla": None, "pallas": why_unsupported(device, self.window, x, self._like_w(x, dz))}

    def _like_w(self, x, dz) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*self.window.kernel, x.shape[-1], dz.shape[-1]), x.dtype)

    def times(self, device, x, dz) -> Mapping[str, float]:
        ours = pallas_weight_gradient.predicted_time(
            x, dz, window=self.window, multiprocessors=device.multiprocessors
        )
        call = call_of(device, self.window, x.shape[:-1], x.dtype, self._like_w(x, dz))
        return {"pallas": ours, "xla": _cudnn_time(call, of_weights=True)}

    def configs(self, implementation: str, device: dispatch.Device, x, dz) -> Sequence[Hashable]:
        if implementation != "pallas":
            return ()
        return pallas_weight_gradient.fitting(
            x, dz, window=self.window, multiprocessors=device.multiprocessors
        )

    def run(self, implementation, device, x, dz, config=None) -> Results:
        if implementation == "pallas":
            dw = pallas_weight_gradient.weight_gradient(
                x,
                dz,
                window=self.window,
                multiprocessors=device.multiprocessors,
                config=config,
            )
            return (dw,)
        # w varies like x. In a `jax.shard_map`, a replicated w would get a gradient summed over devices.
        options = Options(self.window, None, self.precision)
        w = jnp.zeros_like(x, shape=(*self.window.kernel, x.shape[-1], dz.shape[-1]))
        (dw,) = jax.vjp(lambda w: _reference(options, x, w), w)[1](dz)
        return (dw.astype(accumulator_dtype(x.dtype)),)

    def batched(self, call, axis_size, in_batched, x, dz) -> None:
        return None


@dataclass(frozen=True)
class _JoinedInputGradient(Timed):
    """Computes (dx,) from dz, w, the other part of x's gradient, and x if it is rectified.

    The last two may be None. It is a stage of its own, so that `_InputGradient` keeps its timings.
    """

    gradient: _InputGradient

    @property
    def name(self) -> str:
        return "conv dense joined input gradient"

    def axes(self, dz, w, other, y) -> Axes:
        axes = self.gradient.axes(dz, w)
        images = Letters(dz.ndim - 2).images
        return axes._replace(operands=(*axes.operands, images, images))

    def why_not(self, device, dz, w, other, y) -> Mapping[str, str | None]:
        window = self.gradient.window
        if window.is_strided:
            return {"xla": None}
        return {"xla": None, "pallas": why_unsupported(device, window.transposed(), dz, w, other)}

    def times(self, device, dz, w, other, y) -> Mapping[str, float]:
        call, streams = self.gradient._call(device, dz, w), self.streams(dz, other, y)
        # XLA writes its gradient, which a second kernel reads with the rest.
        moved = streams["read_bytes"] + 2 * dz.dtype.itemsize
        if self.gradient.window.is_pointwise:
            passes = Passes(bytes_of_element=moved)
            xla = xla_time(device, call.as_product(**streams), passes)
        else:
            elements = math.prod(call.result) * call.features
            xla = _cudnn_time(call) + xla_pass(elements, moved, 0)
        return {"pallas": pallas_conv.predicted_time(call, **streams), "xla": xla}

    def streams(self, dz, other, y) -> dict[str, int]:
        read = sum(a.dtype.itemsize for a in (other, y) if a is not None)
        return dict(read_bytes=read, written_bytes=dz.dtype.itemsize, activations=0)

    def configs(
        self, implementation: str, device: dispatch.Device, dz, w, other, y
    ) -> Sequence[Hashable]:
        if implementation != "pallas":
            return ()
        call = self.gradient._call(device, dz, w)
        return pallas_conv.fitting(call, **self.streams(dz, other, y))

    def run(self, implementation, device, dz, w, other, y, config=None) -> Results:
        if implementation == "pallas":
            dx = pallas_conv.input_gradient(
                dz,
                w,
                other=other,
                rectified=y,
                window=self.gradient.window,
                multiprocessors=device.multiprocessors,
                config=config,
            )
            return (dx,)
        alone = self.gradient.run(implementation, device, dz, w)[0]
        assert alone is not None
        return (joined_gradient(alone, other, y),)

    def batched(self, call, axis_size, in_batched, dz, w, other, y) -> Results | None:
        if is_batched(in_batched[1]):
            return None
        merged = merged_images(axis_size, (in_batched[0], *in_batched[2:]), (dz, other, y))
        return unmerged_images(axis_size, call(self, merged[0], w, *merged[1:]))


def joined_gradient(dx: jax.Array, other: jax.Array | None, y: jax.Array | None) -> jax.Array:
    """Returns the sum of two gradients of x, masked if x is the result y of a relu."""
    dx = dx if other is None else dx + other.astype(dx.dtype)
    return dx if y is None else masked_gradient(dx, y)


def call_of(
    device: dispatch.Device, window: Window, sizes, dtype, w, *, flipped: bool = False
) -> pallas_conv.ConvCall:
    """Returns the kernel's call for x of these sizes, [B, *spatial], with w [*kernel, C, F]."""
    channels, features = w.shape[-2:]
    return pallas_conv.ConvCall(
        sizes=tuple(sizes),
        channels=features if flipped else channels,
        features=channels if flipped else features,
        window=window,
        dtype=dtype,
        multiprocessors=device.multiprocessors,
        flipped=flipped,
    )


def _cudnn_time(call: pallas_conv.ConvCall, *, of_weights: bool = False) -> float:
    pixels, itemsize = math.prod(call.result), jnp.dtype(call.dtype).itemsize
    x_bytes = math.prod(call.sizes) * call.channels * itemsize
    uneven = any(before != after for before, after in call.window.padding)
    work = cudnn_cost.Work(
        pixels,
        call.channels,
        call.features,
        call.window.taps,
        itemsize,
        traffic=x_bytes + pixels * call.features * itemsize,
        axes=len(call.window.kernel),
        padded_bytes=x_bytes if uneven and not call.flipped else 0,
        of_weights=of_weights,
        of_input=call.flipped,
        dilated=max(call.window.dilation) > 1,
    )
    return cudnn_cost.convolution(work, call.multiprocessors)


def _reference(options: Options, x, w, bias=None, residual=None, activation=None) -> jax.Array:
    window = options.window
    if window.is_pointwise:
        rows, weights = x.reshape(-1, x.shape[-1]), w.reshape(w.shape[-2:])
        y = product("mc,cf->mf", rows, weights, out_dtype=x.dtype, precision=options.precision)
        y = y.reshape(*x.shape[:-1], w.shape[-1])
        return conv_xla.finish(y, bias, residual, activation=activation)
    return conv_xla.conv(
        x,
        w,
        bias,
        residual,
        strides=window.strides,
        padding=window.padding,
        input_dilation=(1,) * len(window.kernel),
        kernel_dilation=window.dilation,
        feature_group_count=1,
        activation=activation,
        precision=options.precision,
    )


_EPILOGUE_IN_CUDNN = 0.3
"""Fraction of a pass over the result by which cuDNN's kernel takes longer if it does the epilogue."""
