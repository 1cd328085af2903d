"""group_norm: validation, choice of implementation, gradient."""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxfused import dispatch
from jaxfused.ops.norm import (
    batch_norm_xla,
    group_norm_cuda,
    group_norm_regimes,
    group_norm_slab_cuda,
    group_norm_xla,
)
from jaxfused.ops.norm.group_norm_xla import values_of_a_group
from jaxfused.ops.norm.moments import is_few
from jaxfused.runtime import sharding
from jaxfused.runtime.checkpoint_names import named
from jaxfused.runtime.checks import (
    as_arrays,
    check_activation,
    check_count,
    check_epsilon,
    check_floating,
    check_shape,
    python_numbers,
)
from jaxfused.runtime.estimate import Estimate
from jaxfused.runtime.gate import takes_reference
from jaxfused.runtime.kernel_gradient import kernel_gradient
from jaxfused.runtime.promotion import accumulator_dtype, along_last_axis
from jaxfused.runtime.rectified import masked_gradient
from jaxfused.runtime.runner import ROWS, Axes, Results, Runner
from jaxfused.runtime.shapes import split_axis
from jaxfused.runtime.vmap import (
    batch_all,
    is_batched,
    merged_batch,
    merged_images,
    unmerged_images,
)


@python_numbers
def group_norm(
    x: jax.Array,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    num_groups: int | None = None,
    group_size: int | None = None,
    epsilon: float = 1e-6,
    image_scale: jax.Array | None = None,
    image_shift: jax.Array | None = None,
    activation: str | None = None,
    residual: jax.Array | None = None,
    implementation: dispatch.Implementation | None = None,
) -> jax.Array:
    r"""Group normalisation of channels-last images, with what follows it in one pass.

    .. math::
        n &= \frac{x - \operatorname{mean}_g(x)}{\sqrt{\operatorname{var}_g(x) + \epsilon}}
             \cdot \text{scale} + \text{bias} \\
        y &= \text{activation}\bigl(n \cdot (1 + \text{image\_scale}) + \text{image\_shift}
             + \text{residual}\bigr)

    The mean and the variance of a group g are taken over its channels and over all axes between the
    first (the batch) and the last (the channels), in float32 (float64 for float64 inputs); the
    variance is the mean of squared deviations.

    Args:
      x: [B, ..., C], any number of axes between batch and channels, float32, bfloat16 or float16
        (float64 with implementation "xla").
      scale: [C], multiplies the normalised values. Any float dtype, as for the other parameters.
      bias: [C], is added after `scale`.
      num_groups: into how many groups of neighbouring channels C is split; 1 is layer
        normalisation over a whole image, C is instance normalisation. Exactly one of `num_groups`
        and `group_size` is given.
      group_size: the number of channels in a group.
      epsilon: is added to the variance.
      image_scale: [B, C], modulates each image: the scale of FiLM or of a time embedding, as an
        offset from 1.
      image_shift: [B, C], is added after `image_scale`.
      activation: None or a name of `jaxfused.ACTIVATIONS`, after everything else.
      residual: [B, ..., C] like x, is added before the activation.
      implementation: None for the fastest that can run, or "cuda", "xla".

    Returns:
      y, of x's shape and dtype.

    Raises:
      ValueError: shapes or dtypes do not fit, C is not a multiple of the groups, or the named
        implementation cannot run.

    Example:
      >>> import jax.numpy as jnp, jaxfused
      >>> x = jnp.array([[[1.0, 3.0, 0.0, 0.0], [5.0, 7.0, 2.0, 2.0]]])
      >>> jaxfused.group_norm(x, jnp.ones(4), jnp.zeros(4), num_groups=2, activation="relu").shape
      (1, 2, 4)

    Forward-mode differentiation and gradients of gradients need `implementation="xla"`.

    Source: Wu, He, "Group Normalization", 2018, https://arxiv.org/abs/1803.08494; image_scale and
    image_shift: Perez et al., "FiLM", 2017, https://arxiv.org/abs/1709.07871
    """
    return run(
        x,
        scale,
        bias,
        num_groups=num_groups,
        group_size=group_size,
        epsilon=epsilon,
        image_scale=image_scale,
        image_shift=image_shift,
        activation=activation,
        residual=residual,
        implementation=implementation,
    )


def run(
    x: jax.Array,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    num_groups: int | None = None,
    group_size: int | None = None,
    epsilon: float = 1e-6,
    image_scale: jax.Array | None = None,
    image_shift: jax.Array | None = None,
    activation: str | None = None,
    residual: jax.Array | None = None,
    mask_gradient: bool = True,
    implementation: dispatch.Implementation | None = None,
) -> jax.Array:
    """Computes `group_norm` for layers, with one more argument.

    Args:
      mask_gradient: False if y is a relu's result and every operation that reads it applies the relu's
          mask to the gradient that it returns (`Rectified`), so that none is applied here.
    """
    op = "group_norm"
    x, scale, bias, image_scale, image_shift, residual = as_arrays(
        x, scale, bias, image_scale, image_shift, residual
    )
    num_groups = _validate(
        x, scale, bias, image_scale, image_shift, residual, num_groups, group_size
    )
    check_epsilon(op, epsilon)
    check_activation(op, activation)
    scale, bias = _modulated(x, scale, bias, image_scale, image_shift)
    device = dispatch.current_device(x, residual)
    missing, why_xla = {"pallas": why_no_pallas(op)}, why_few(values_of_a_group(x, num_groups))
    if takes_reference(op, implementation, device, x, missing=missing, why_xla=why_xla):
        return group_norm_xla.norm(
            x, scale, bias, residual, num_groups=num_groups, epsilon=epsilon, activation=activation
        )
    # Groups become an axis of their own, so that they can be split over devices.
    x_groups, residual, scale, bias = (
        None if a is None else split_axis(a, a.ndim - 1, num_groups, a.shape[-1] // num_groups)
        for a in (x, residual, scale, bias)
    )
    axes = _spelt_axes(x_groups, residual, scale, bias)
    operands = sharding.align(
        (x_groups, residual, scale, bias), operand_axes=axes.operands, whole=axes.whole
    )
    options = Options(op, epsilon, activation)
    y = _norm(Runner(implementation, device), options, not mask_gradient, *operands)
    return y.reshape(x.shape)


def _validate(x, scale, bias, image_scale, image_shift, residual, num_groups, group_size) -> int:
    """Checks all arguments and returns the number of groups."""
    op = "group_norm"
    check_floating(
        op,
        dict(
            x=x,
            scale=scale,
            bias=bias,
            image_scale=image_scale,
            image_shift=image_shift,
            residual=residual,
        ),
    )
    if x.ndim < 2 or x.shape[-1] == 0:
        raise ValueError(
            f"{op}: x has shape {x.shape}, but it needs a batch axis and a last axis of at least one"
            " channel; pass x of shape [batch, ..., channels]."
        )
    channels = x.shape[-1]
    for name, array in dict(scale=scale, bias=bias).items():
        check_shape(op, name, array, (channels,), f"x has {channels} channels in its last axis")
    for name, array in dict(image_scale=image_scale, image_shift=image_shift).items():
        images = x.shape[0]
        why = f"x has {images} images of {channels} channels"
        check_shape(op, name, array, (images, channels), why)
    check_shape(op, "residual", residual, x.shape, f"x has shape {x.shape}")
    if (num_groups is None) == (group_size is None):
        raise ValueError(
            f"{op}: num_groups={num_groups} and group_size={group_size} were passed, but exactly"
            " one of them says how the channels are grouped; pass the one and leave out the other."
        )
    name, divisor = ("group_size", group_size) if num_groups is None else ("num_groups", num_groups)
    check_count(op, name, divisor)
    if channels % divisor:
        raise ValueError(
            f"{op}: {name} is {divisor}, but it must divide the {channels} channels of x;"
            f" pass a divisor of {channels}."
        )
    return channels // divisor if num_groups is None else divisor


def _modulated(x, scale, bias, image_scale, image_shift):
    """Returns scale and bias, [C] or [B, C], times 1 + image_scale; bias also plus image_shift."""
    dtype = accumulator_dtype(x.dtype)
    scale, bias, image_scale, image_shift = (
        None
        if a is None
        else a.astype(dtype)
        if image_scale is not None or image_shift is not None
        else a
        for a in (scale, bias, image_scale, image_shift)
    )
    if image_scale is not None:
        factor = 1.0 + image_scale
        scale = factor if scale is None else along_last_axis(scale, factor) * factor
        bias = None if bias is None else along_last_axis(bias, factor) * factor
    if image_shift is not None:
        bias = image_shift if bias is None else along_last_axis(bias, image_shift) + image_shift
    return scale, bias


# --- gradient -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """Static arguments of group_norm, or of batch_norm as a case of it."""

    op: str
    epsilon: float
    activation: str | None


class _Residuals(NamedTuple):
    x: jax.Array
    residual: jax.Array | None
    """Residual, or y if the activation is relu, whose mask follows from y; None if not needed."""
    residual_like: jax.Array | None
    """Array without elements, whose dtype is that of dresidual; None without a residual."""
    mean: jax.Array
    """Mean [B, G] in float32."""
    rstd: jax.Array
    scale: jax.Array | None
    bias: jax.Array | None


@functools.partial(kernel_gradient, nondiff_argnums=(0, 1, 2))
def _norm(run: Runner, options: Options, rectified: bool, x, residual, scale, bias):
    y, *_ = run(Forward(options, save_statistics=False), x, residual, scale, bias)
    return y


def _norm_fwd(run: Runner, options: Options, rectified: bool, x, residual, scale, bias):
    y, mean, rstd, _ = run(Forward(options, save_statistics=True), x, residual, scale, bias)
    y = named(y, options.op, "output")
    mean, rstd = named((mean, rstd), options.op, "statistics")
    return y, _Residuals(x, *kept(options, rectified, residual, y), mean, rstd, scale, bias)


def _norm_bwd(run: Runner, options: Options, rectified: bool, saved: _Residuals, dy):
    x, residual, residual_like, mean, rstd, scale, bias = saved
    options, dy, residual, passed = through_relu(options, rectified, dy, residual, residual_like)
    operands = (dy, x, residual, mean, rstd, None, None, scale, bias)
    dx, dresidual, dscale, dbias = run(Backward(options, per_image=False), *operands)

    def like(gradient, array):
        return None if array is None else gradient.astype(array.dtype)

    dresidual = like(dresidual if passed is None else passed, residual_like)
    return dx, dresidual, like(dscale, saved.scale), like(dbias, saved.bias)


def kept(
    options: Options, rectified: bool, residual: jax.Array | None, y: jax.Array
) -> tuple[jax.Array | None, jax.Array | None]:
    """Returns the residual or y for the backward, and an empty array of the residual's dtype.

    Under relu the backward reads y: its sign is the mask, and the next layer saves y anyway. With
    `rectified` it reads neither (None), because dy arrives masked.
    """
    if residual is None:
        return None, None
    like = jnp.zeros_like(residual, shape=(0,))
    if rectified:
        return None, like
    return (y if options.activation == "relu" else residual), like


def through_relu(
    options: Options,
    rectified: bool,
    dy: jax.Array,
    residual: jax.Array | None,
    residual_like: jax.Array | None,
) -> tuple[Options, jax.Array, jax.Array | None, jax.Array | None]:
    """Returns (options, dy, residual, dresidual) for the backward, with the relu's mask applied to dy.

    XLA fuses the mask with the sum of gradients that usually makes dy. The kernel then reads dy and x,
    but not y, and the masked dy is also dresidual.
    """
    if rectified and residual_like is not None:
        return replace(options, activation=None), dy, None, dy
    if residual is None or options.activation != "relu":
        return options, dy, residual, None
    dz = masked_gradient(dy, residual)
    return replace(options, activation=None), dz, None, dz


_norm.defvjp(_norm_fwd, _norm_bwd)


# --- kernels --------------------------------------------------------------------------------------

_IMAGES = "b" + ROWS + "gs"
"""Axis letters of images [B, ..., G, S]: G groups of S channels each."""


def _parameter(array: jax.Array | None) -> str:
    """Returns the axis letters of a parameter: [G, S], or [B, G, S] if each image has its own."""
    return "bgs" if array is not None and array.ndim == 3 else "gs"


def _whole(x: jax.Array) -> str:
    """Returns the letters of axes that stay unsharded: the pixels, and the channels of a group."""
    return sharding.leading_axes(x.ndim - 3) + "s"


def _spelt_axes(x, residual, scale, bias) -> Axes:
    """Returns the axis letters of all operands and results, with one for each axis of pixels."""
    axes = Forward(Options("", 0.0, None), save_statistics=False).axes(x, residual, scale, bias)
    pixels = sharding.leading_axes(x.ndim - 3)
    return axes._replace(operands=[letters.replace(ROWS, pixels) for letters in axes.operands])


@dataclass(frozen=True)
class Forward:
    """Computes (y, mean, rstd, variance) from x and residual [B, ..., groups, channels], scale, bias."""

    options: Options
    save_statistics: bool
    save_variance: bool = False

    @property
    def name(self) -> str:
        return f"{self.options.op} forward"

    def axes(self, x, residual, scale, bias) -> Axes:
        del residual
        statistics = "bg" if self.save_statistics else None
        return Axes(
            (_IMAGES, _IMAGES, _parameter(scale), _parameter(bias)),
            (_IMAGES, statistics, statistics, "bg" if self.save_variance else None),
            whole=_whole(x),
        )

    def why_not(self, device, x, residual, scale, bias) -> Mapping[str, str | None]:
        del scale, bias
        return _why_not(self.options, device, x, residual)

    def estimate(self, device, able, x, residual, scale, bias) -> Estimate:
        del device, residual, scale, bias
        return group_norm_regimes.rule(self.options.op, able, x, backward=False)

    def _slab(self, device, x, residual) -> group_norm_slab_cuda.Config | None:
        """Returns the config of the kernel that keeps x in shared memory, or None if it is slower.

        x and residual are [B, pixels, groups, channels of a group].
        """
        images, pixels, groups, size = x.shape
        shape = (images, pixels, groups * size, x.dtype.itemsize)
        config = group_norm_slab_cuda.config_for(
            *shape,
            groups=groups,
            compute_capability=device.compute_capability,
            multiprocessors=device.multiprocessors,
        )
        if config is None:
            return None
        time = group_norm_slab_cuda.microseconds(
            config, *shape, device.multiprocessors, groups=groups, residual=residual is not None
        )
        passes = _time_of_passes(device, x, arrays=1, residual=residual is not None)
        return config if time < passes else None

    def run(self, implementation, device, x, residual, scale, bias) -> Results:
        y: jax.Array
        statistics: Sequence[jax.Array | None]
        operands = (x, residual, scale, bias)
        keywords: dict[str, Any] = dict(
            groups=x.shape[-2],
            epsilon=self.options.epsilon,
            activation=self.options.activation,
            save_statistics=self.save_statistics,
            save_variance=self.save_variance,
        )
        if implementation == "xla":
            y, *statistics = self._run_in_xla(*operands)
        elif (slab := self._slab(device, x, residual)) is not None:
            y, *statistics = group_norm_slab_cuda.forward(
                *map(_channels_last, operands), **keywords, config=slab
            )
        else:
            y, *statistics = group_norm_cuda.forward(
                *map(_channels_last, operands),
                **keywords,
                multiprocessors=device.multiprocessors,
                once=group_norm_cuda.reads_once(device.compute_capability),
            )
        saved = (self.save_statistics, self.save_statistics, self.save_variance)
        return y.reshape(x.shape), *(
            a if wanted else None for a, wanted in zip(statistics, saved, strict=True)
        )

    def _run_in_xla(self, x, residual, scale, bias) -> Sequence[Any]:
        keywords: dict[str, Any] = dict(
            epsilon=self.options.epsilon, activation=self.options.activation
        )
        if self.options.op == "batch_norm" and len(x) == 1:
            channels = x.shape[-2]
            y, *found = batch_norm_xla.norm_and_statistics(
                x.reshape(-1, channels),
                None if residual is None else residual.reshape(-1, channels),
                *(None if a is None else a.reshape(channels) for a in (scale, bias)),
                **keywords,
            )
            return (y, *(a[None] for a in found))
        flat = [_channels_last(a) for a in (x, residual, scale, bias)]
        return group_norm_xla.norm_and_statistics(
            flat[0],
            flat[1],
            *map(_dropped, flat[2:]),
            num_groups=x.shape[-2],
            statistics_of=group_norm_xla.statistics_in_one_pass,
            **keywords,
        )

    def batched(self, call, axis_size, in_batched, x, residual, scale, bias) -> Results:
        images = x.shape[1 if is_batched(in_batched[0]) else 0]
        merged = _merged(axis_size, images, in_batched, (x, residual), (scale, bias))
        return unmerged_images(axis_size, call(self, *merged))


@dataclass(frozen=True)
class Backward:
    """Computes (dx, dresidual, dscale, dbias) from dy, saved arrays and the statistics' gradients.

    The gradients of the parameters are float32. With `per_image` they have an axis of images, even if
    the images share the parameter.
    """

    options: Options
    per_image: bool

    @property
    def name(self) -> str:
        return f"{self.options.op} backward"

    def axes(self, dy, x, residual, mean, rstd, dmean, dvariance, scale, bias) -> Axes:
        def gradient(parameter):
            if parameter is None:
                return None
            return "bgs" if self.per_image else _parameter(parameter)

        return Axes(
            (_IMAGES,) * 3 + ("bg",) * 4 + (_parameter(scale), _parameter(bias)),
            (
                _IMAGES,
                None if residual is None else _IMAGES,
                gradient(scale),
                gradient(bias),
            ),
            whole=_whole(x),
        )

    def why_not(self, device, dy, x, residual, *others) -> Mapping[str, str | None]:
        del dy, others
        return _why_not(self.options, device, x, residual)

    def estimate(self, device, able, dy, x, residual, *others) -> Estimate:
        del device, dy, residual, others
        return group_norm_regimes.rule(self.options.op, able, x, backward=True)

    def run(
        self, implementation, device, dy, x, residual, mean, rstd, dmean, dvariance, scale, bias
    ) -> Results:
        groups = x.shape[-2]
        dy, flat_x, residual, scale_row, bias_row = (
            _channels_last(a) for a in (dy, x, residual, scale, bias)
        )
        if implementation == "xla":
            gradients = group_norm_xla.gradient(
                dy,
                flat_x,
                residual,
                mean,
                rstd,
                _dropped(scale_row),
                _dropped(bias_row),
                dmean,
                dvariance,
                num_groups=groups,
                activation=self.options.activation,
            )
        else:
            gradients = group_norm_cuda.backward(
                dy,
                flat_x,
                residual,
                mean,
                rstd,
                scale_row,
                bias_row,
                dmean,
                dvariance,
                groups=groups,
                activation=self.options.activation,
                per_image=self.per_image,
                multiprocessors=device.multiprocessors,
                once=group_norm_cuda.reads_once(device.compute_capability),
            )
        dx, dresidual, *parameters = gradients

        def of_parameter(gradient, parameter):
            if gradient is None:
                return None
            if parameter.ndim == 2 and not self.per_image:
                return gradient.sum(0).reshape(parameter.shape)
            return gradient.reshape(-1, *x.shape[-2:])

        return (
            dx.reshape(x.shape),
            None if dresidual is None else dresidual.reshape(x.shape),
            *map(of_parameter, parameters, (scale, bias)),
        )

    def batched(self, call, axis_size, in_batched, *operands) -> Results:
        *rows, scale, bias = operands
        images = rows[0].shape[1 if is_batched(in_batched[0]) else 0]
        merged = _merged(axis_size, images, in_batched, rows, (scale, bias))
        results = call(replace(self, per_image=True), *merged)
        dx, dresidual, *parameters = unmerged_images(axis_size, results)

        def of_parameter(gradient, parameter, batched):
            if gradient is None:
                return None
            shared = parameter.ndim - is_batched(batched) == 2
            return gradient.sum(1) if shared and not self.per_image else gradient

        return dx, dresidual, *map(of_parameter, parameters, (scale, bias), in_batched[-2:])


def _channels_last(array: jax.Array | None) -> Any:
    """Merges the last axes [groups, S] into one; a parameter [groups, S] also gets axis B of size 1."""
    if array is None:
        return None
    leading = array.shape[:-2] or (1,)
    return array.reshape(*leading, array.shape[-2] * array.shape[-1])


def _dropped(parameter: jax.Array | None) -> Any:
    """Returns a parameter [1, C] as [C], which the reference broadcasts over any number of images."""
    return parameter[0] if parameter is not None and parameter.shape[0] == 1 else parameter


def _merged(
    axis_size: int,
    images: int,
    in_batched: Sequence[Any],
    rows: Sequence[jax.Array | None],
    parameters: Sequence[jax.Array | None],
) -> list[jax.Array | None]:
    """Merges the batch of a `jax.vmap` into the images of the operands.

    A parameter that the images share stays as it is if all entries of the batch share it too.
    """
    operands = merged_images(axis_size, in_batched[: len(rows)], rows)
    for parameter, batched in zip(parameters, in_batched[len(rows) :], strict=True):
        if parameter is not None and is_batched(batched):
            if parameter.ndim == 3:
                parameter = jnp.broadcast_to(
                    parameter[:, None], (axis_size, images, *parameter.shape[1:])
                )
            parameter = merged_batch(parameter)
        elif parameter is not None and parameter.ndim == 3:
            (parameter,) = batch_all(axis_size, [False], [parameter])
            parameter = merged_batch(parameter)
        operands.append(parameter)
    return operands


# --- choice ---------------------------------------------------------------------------------------


def _why_not(options: Options, device, x, residual) -> dict[str, str | None]:
    """Returns why each implementation cannot run x [B, pixels, groups, channels] and its gradient."""
    images, pixels, groups, size = x.shape
    reason = group_norm_cuda.why_unsupported(
        compute_capability=device.compute_capability,
        images=images,
        pixels=pixels,
        channels=groups * size,
        groups=groups,
        dtype=x.dtype,
        residual_dtype=None if residual is None else residual.dtype,
    )
    return {"cuda": reason, "pallas": why_no_pallas(options.op), "xla": None}


def _time_of_passes(device: dispatch.Device, x: Any, *, arrays: int, residual: bool) -> float:
    """Returns the expected microseconds of group_norm_cuda's kernels, which read x once or twice."""
    images, pixels, groups, size = x.shape
    shape = (images, pixels, groups * size, x.dtype.itemsize, arrays)
    run = dict(groups=groups, multiprocessors=device.multiprocessors)
    kept = arrays if group_norm_cuda.reads_once(device.compute_capability) else 0
    config = group_norm_cuda.candidates(*shape, **run, kept=kept)[0]
    time = group_norm_cuda.microseconds(config, *shape, **run)
    megabytes = math.prod(x.shape) * x.dtype.itemsize / 1e6
    return time + _MEGABYTE * megabytes * residual


_MEGABYTE = 0.25
"""Microseconds that a residual adds to the forward, per megabyte of it."""


def why_few(values: Any) -> str | None:
    """Returns why XLA runs a norm of `values` values unless the caller names a kernel, or None."""
    if not is_few(values):
        return None
    return f"it is over {values} values, of which XLA's own gradient is the most exact"


def why_no_pallas(op: str) -> str:
    """Returns why the implementation "pallas" cannot run a norm over images."""
    return f"there is no Pallas kernel of {op}"
