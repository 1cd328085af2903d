"""Depthwise conv with a two-axis window for each channel: choice of implementation and gradient."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxfused import dispatch
from jaxfused.ops.conv import (
    conv_xla,
    depthwise_conv1d,
    depthwise_conv_cuda,
    depthwise_conv_regimes,
)
from jaxfused.ops.conv.batched_images import batched_images
from jaxfused.ops.conv.dense_conv_forward import images
from jaxfused.ops.conv.depthwise_conv_cuda import Strips, Tile, Window
from jaxfused.runtime import sharding
from jaxfused.runtime.activation import value_and_slope
from jaxfused.runtime.gate import LeftToXla
from jaxfused.runtime.kernel_gradient import kernel_gradient
from jaxfused.runtime.promotion import accumulator_dtype
from jaxfused.runtime.runner import Axes, Results, Runner, StageCall


def left_to_xla(
    run: Runner,
    x: Any,
    w: Any,
    bias: Any,
    residual: Any,
    window: Window,
    activation: str | None,
    of_sums: dispatch.Choice | None,
) -> LeftToXla | None:
    """Returns why XLA runs a call that names no implementation, or None if kernels are faster.

    `of_sums`, `fft_conv`'s decision for direct sums, is recorded so that `jaxfused.tune` times both.
    """
    why = depthwise_conv_regimes.why_xla(run.device, x, window)
    if why is None:
        return None
    left = run.left_to_xla(why, stages(_Options(window, activation), x, w, bias, residual))
    if left is None or of_sums is None:
        return left
    return left._replace(stages=(*left.stages, of_sums))


def stages(options: "_Options", x: Any, w: Any, bias: Any, residual: Any) -> Iterator[StageCall]:
    """Yields the kernels of a depthwise convolution and its gradients, with their operands' shapes."""
    x, w, residual = sharding.eval_shape(
        functools.partial(_as_images, options.window), x, w, residual
    )
    window, (batch, height, width, channels) = options.window, x.shape
    dz = jax.ShapeDtypeStruct((batch, *window.result(height, width), channels), x.dtype)
    for saves in (False, True)[: 1 + (options.activation is not None)]:
        yield _Forward(options, saves), (x, w, bias, residual)
    yield _InputGradient(window, (height, width)), (dz, w)
    yield _WeightGradient(window), (x, dz)


def _as_images(window: Window, x, w, residual):
    """Returns x and the residual as images [B, H, W, C], and the weights as [kh, kw, C]."""
    weights = w.astype(x.dtype).reshape(*window.kernel, w.shape[-1])
    return images(x), weights, images(residual)


def window_of(
    x: jax.Array,
    w: jax.Array,
    *,
    strides: tuple[int, ...],
    padding: str | Sequence[tuple[int, int]],
    input_dilation: tuple[int, ...],
    kernel_dilation: tuple[int, ...],
    feature_group_count: int,
) -> Window | str:
    """Returns the window of a depthwise convolution of one or two axes, or why no kernel supports it."""
    channels, features = x.shape[-1], w.shape[-1]
    if not feature_group_count == channels == features:
        return (
            f"x has {channels} channels in {feature_group_count} groups and the result {features}"
        )
    if x.ndim not in (3, 4):
        return f"x has {x.ndim - 2} spatial axes"
    if {*input_dilation, *kernel_dilation} != {1}:
        return "it is dilated"
    if len(set(strides)) > 1:
        return f"the strides are {strides}"
    kernel, sizes = w.shape[:-2], x.shape[1:-1]
    pairs = _zeros(padding, kernel, strides, sizes)
    if pairs is None:
        return f"padding is {padding!r}"
    if x.ndim == 3:
        kernel, pairs = (1, *kernel), ((0, 0), *pairs)
    return Window((kernel[0], kernel[1]), strides[0], (pairs[0], pairs[1]))


def _zeros(padding, kernel, strides, sizes) -> tuple[tuple[int, int], ...] | None:
    """Returns the zeros around each spatial axis, or None if the padding is not of zeros."""
    if padding in ("SAME", "SAME_LOWER", "VALID"):
        return tuple(jax.lax.padtype_to_pads(sizes, kernel, strides, padding))
    return None if isinstance(padding, str) else tuple((low, high) for low, high in padding)


def depthwise_conv(
    run: Runner,
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    window: Window,
    activation: str | None,
    returns_input: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """Convolves x [B, *spatial, C] with w [*kernel, 1, C]; returns y, and x if `returns_input`."""
    images, weights, residual = _as_images(window, x, w, residual)
    letters = (_IMAGES, _WEIGHTS, "c", _RESULT)
    operands = sharding.align((images, weights, bias, residual), operand_axes=letters, whole=_WHOLE)
    y, returned_input = _conv(run, _Options(window, activation), returns_input, *operands)
    if x.ndim == 3:
        return y[:, 0], None if returned_input is None else returned_input[:, 0]
    return y, returned_input


# --- gradient -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Options:
    window: Window
    activation: str | None


class _Residuals(NamedTuple):
    x: jax.Array
    w: jax.Array
    bias: jax.Array | None
    residual_like: jax.Array | None
    """Array without elements that has the residual's dtype."""
    z: jax.Array | None
    """Activation's input; None without an activation."""


@functools.partial(kernel_gradient, nondiff_argnums=(0, 1, 2), op="conv")
def _conv(run: Runner, options: _Options, returns_input: bool, x, w, bias, residual):
    y, _ = run(_Forward(options, save_preactivation=False), x, w, bias, residual)
    return y, x if returns_input else None


def _conv_fwd(run: Runner, options: _Options, returns_input: bool, x, w, bias, residual):
    save = options.activation is not None
    y, z = run(_Forward(options, save_preactivation=save), x, w, bias, residual)
    like = None if residual is None else jnp.zeros_like(residual, shape=(0,))
    return (y, x if returns_input else None), _Residuals(x, w, bias, like, z)


def _conv_bwd(run: Runner, options: _Options, returns_input: bool, saved: _Residuals, cotangents):
    del returns_input
    dy, handed_back = cotangents
    dz = dy
    if saved.z is not None:
        dtype = accumulator_dtype(dy.dtype)
        _, slope = value_and_slope(options.activation, saved.z.astype(dtype))
        dz = (dy.astype(dtype) * slope).astype(dy.dtype)
    gradient = _InputGradient(options.window, (saved.x.shape[1], saved.x.shape[2]))
    if handed_back is None:
        (dx,) = run(gradient, dz, saved.w)
    else:
        (dx,) = run(_JoinedInputGradient(gradient), dz, saved.w, handed_back)
    dw, dbias = run(_WeightGradient(options.window), saved.x, dz)
    return (
        dx,
        dw.astype(saved.w.dtype),
        None if saved.bias is None else dbias.astype(saved.bias.dtype),
        None if saved.residual_like is None else dz.astype(saved.residual_like.dtype),
    )


_conv.defvjp(_conv_fwd, _conv_bwd)


# --- kernels --------------------------------------------------------------------------------------

_IMAGES, _WEIGHTS, _RESULT = "bhwc", "kjc", "buvc"
_WHOLE = "hwkjuv"


@dataclass(frozen=True)
class _Forward:
    """Computes y and the activation's input z, or None, from x [B, H, W, C] and w [kh, kw, C]."""

    options: _Options
    save_preactivation: bool

    @property
    def name(self) -> str:
        return "conv depthwise forward"

    def axes(self, x, w, bias, residual) -> Axes:
        return Axes(
            (_IMAGES, _WEIGHTS, "c", _RESULT),
            (_RESULT, _RESULT if self.save_preactivation else None),
            whole=_WHOLE,
        )

    def why_not(self, device, x, w, bias, residual) -> Mapping[str, str | None]:
        return _why_not(device, x, self.options.window, residual)

    def configs(self, implementation, device, x, w, bias, residual) -> Sequence[Strips | Tile]:
        return _configs(implementation, device, x, self.options.window, **self._sums(residual))

    def _sums(self, residual) -> dict[str, bool]:
        return dict(in_float32=self.save_preactivation or residual is not None)

    def run(self, implementation, device, x, w, bias, residual, *, config=None) -> Results:
        options = self.options
        if implementation == "cuda":
            y, z = depthwise_conv_cuda.conv(
                x,
                w,
                bias,
                residual,
                window=options.window,
                activation=options.activation,
                save_preactivation=self.save_preactivation,
                config=config or _default(device, x, options.window, **self._sums(residual)),
            )
            return y, z
        convolve = functools.partial(_reference, options.window, x, w, bias, residual)
        y = convolve(activation=options.activation)
        return y, convolve(activation=None) if self.save_preactivation else None

    batched = batched_images


@dataclass(frozen=True)
class _InputGradient:
    """Computes dx [B, H, W, C] from w and dz, the gradient of y before its activation."""

    window: Window
    size: tuple[int, int]

    @property
    def name(self) -> str:
        return "conv depthwise input gradient"

    def axes(self, dz, w) -> Axes:
        return Axes((_RESULT, _WEIGHTS), (_IMAGES,), whole=_WHOLE)

    def why_not(self, device, dz, w) -> Mapping[str, str | None]:
        if self.window.stride > 1:
            # dgrad of a strided window convolves dz with zeros between its values, so most of the
            # kernel's products would be 0.
            return {"xla": None}
        x = jax.ShapeDtypeStruct((dz.shape[0], *self.size, dz.shape[3]), dz.dtype)
        return _why_not(device, x, self.window)

    def configs(self, implementation, device, dz, w, other=None) -> Sequence[Strips | Tile]:
        if implementation != "cuda":
            return ()
        window = self.window.transposed()
        return _configs(implementation, device, dz, window, in_float32=other is not None)

    def run(self, implementation, device, dz, w, other=None, *, config=None) -> Results:
        """Computes dx, plus `other`, another gradient of x, if there is one."""
        if implementation == "cuda":
            window = self.window.transposed()
            dx, _ = depthwise_conv_cuda.conv(
                dz,
                w,
                None,
                other,
                window=window,
                activation=None,
                save_preactivation=False,
                turned=True,
                config=config or _default(device, dz, window, in_float32=other is not None),
            )
            return (dx,)
        x = jnp.zeros_like(dz, shape=(dz.shape[0], *self.size, dz.shape[3]))
        (dx,) = jax.vjp(lambda x: _reference(self.window, x, w), x)[1](dz)
        return (dx if other is None else dx + other,)

    batched = batched_images


@dataclass(frozen=True)
class _JoinedInputGradient:
    """Computes dx [B, H, W, C] as `_InputGradient` does, and adds another gradient of x to it."""

    gradient: _InputGradient

    @property
    def name(self) -> str:
        return "conv depthwise joined input gradient"

    def axes(self, dz, w, other) -> Axes:
        return Axes((_RESULT, _WEIGHTS, _IMAGES), (_IMAGES,), whole=_WHOLE)

    def why_not(self, device, dz, w, other) -> Mapping[str, str | None]:
        return self.gradient.why_not(device, dz, w)

    def configs(self, implementation, device, dz, w, other) -> Sequence[Strips | Tile]:
        return self.gradient.configs(implementation, device, dz, w, other)

    def run(self, implementation, device, dz, w, other, *, config=None) -> Results:
        return self.gradient.run(implementation, device, dz, w, other, config=config)

    batched = batched_images


@dataclass(frozen=True)
class _WeightGradient:
    """Computes float32 dw [kh, kw, C], dbias [C] from x and dz, y's gradient before its activation."""

    window: Window

    @property
    def name(self) -> str:
        return "conv depthwise weight gradient"

    def axes(self, x, dz) -> Axes:
        return Axes((_IMAGES, _RESULT), (_WEIGHTS, "c"), whole=_WHOLE)

    def why_not(self, device, x, dz) -> Mapping[str, str | None]:
        return _why_not(device, x, self.window)

    def configs(self, implementation, device, x, dz) -> Sequence[Strips | Tile]:
        return _configs(implementation, device, x, self.window, of_weights=True)

    def run(self, implementation, device, x, dz, *, config=None) -> Results:
        if implementation == "cuda":
            return depthwise_conv_cuda.weight_gradient(
                x,
                dz,
                window=self.window,
                multiprocessors=device.multiprocessors,
                config=config or _default(device, x, self.window, of_weights=True),
            )
        # In a `jax.shard_map` zeros made from x vary over the same mesh axes as x. The vjp of zeros that
        # do not would sum dw over the devices.
        w = jnp.zeros_like(x, shape=(*self.window.kernel, x.shape[3]))
        (dw,) = jax.vjp(lambda w: _reference(self.window, x, w), w)[1](dz)
        dtype = accumulator_dtype(x.dtype)
        return dw.astype(dtype), jnp.sum(dz.astype(dtype), (0, 1, 2))

    def batched(self, call, axis_size, in_batched, x, dz) -> None:
        return None


def _configs(
    implementation: str, device: dispatch.Device, x: Any, window: Window, **sums: bool
) -> list[Strips | Tile]:
    """Returns the CUDA configs for x [B, H, W, C], expected fastest first; [] if only strips can run."""
    images, height, width, channels = x.shape
    capability = device.compute_capability
    if implementation != "cuda" or capability is None:
        return []
    if Tile.why_unfit(capability, channels, window, x.dtype) is not None:
        return []
    tiles = depthwise_conv_cuda.candidates(
        images,
        height,
        width,
        channels,
        window=window,
        compute_capability=capability,
        multiprocessors=device.multiprocessors,
        **sums,
    )
    fastest = tiles and tiles[0].useful(images, *window.result(height, width)) >= _USEFUL
    return [*tiles, Strips()] if fastest else [Strips(), *tiles]


_USEFUL = 0.6
"""Least fraction of results computed by tensor-core tiles that lie inside y, at which tiles are faster
than strips."""


def _default(device: dispatch.Device, x: Any, window: Window, **sums: bool) -> Strips | Tile:
    return next(iter(_configs("cuda", device, x, window, **sums)), Strips())


def _reference(window: Window, x, w, bias=None, residual=None, activation=None) -> jax.Array:
    return conv_xla.conv(
        x,
        w[:, :, None],
        bias,
        residual,
        strides=(window.stride,) * 2,
        padding=window.padding,
        input_dilation=(1, 1),
        kernel_dilation=(1, 1),
        feature_group_count=x.shape[-1],
        activation=activation,
        precision=None,
    )


def _why_not(
    device: dispatch.Device, x: Any, window: Window, residual=None
) -> Mapping[str, str | None]:
    """Returns why each implementation cannot run the convolution of x [B, H, W, C] or its gradients."""
    images, height, width, channels = x.shape
    return {
        "cuda": depthwise_conv_cuda.why_unsupported(
            compute_capability=device.compute_capability,
            images=images,
            height=height,
            width=width,
            channels=channels,
            window=window,
            dtype=x.dtype,
            residual_dtype=None if residual is None else residual.dtype,
        ),
        "pallas": depthwise_conv1d.NO_PALLAS,
        "xla": None,
    }
