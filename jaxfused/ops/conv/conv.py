"""conv: validation and choice of implementation."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from jaxfused import dispatch
from jaxfused.ops.conv import (
    conv_xla,
    dense_conv,
    dense_conv_forward,
    depthwise_conv,
    depthwise_conv1d,
    fft_conv,
    patch_expand,
)
from jaxfused.ops.conv.conv_input import Concatenated, ConvInput, as_array, as_input, check_parts
from jaxfused.ops.conv.conv_padding import Padding, geometry
from jaxfused.ops.conv.conv_xla import Around
from jaxfused.ops.conv.depthwise_conv_cuda import Window
from jaxfused.runtime import sharding
from jaxfused.runtime.checks import (
    as_arrays,
    check_activation,
    check_floating,
    check_shape,
    python_numbers,
)
from jaxfused.runtime.gate import LeftToXla, takes_reference
from jaxfused.runtime.rectified import Rectified
from jaxfused.runtime.runner import Runner

Statistics = tuple[jax.Array, jax.Array]


class Convolved(NamedTuple):
    """Results of `run`: y, the input x again, and statistics of y for a batch norm after it."""

    y: jax.Array
    """Result [B, *spatial', O] of x's dtype."""
    x: jax.Array
    """The input x, for a shortcut. With `return_input`, dgrad adds this result's cotangent to dx."""
    statistics: Statistics | None
    """Mean and variance of y per channel, in float32, if a kernel computed them."""


@python_numbers
def conv(
    x: ConvInput,
    w: jax.Array,
    bias: jax.Array | None = None,
    *,
    strides: int | Sequence[int] = 1,
    padding: Padding = "SAME",
    padding_mode: str = "zeros",
    input_dilation: int | Sequence[int] = 1,
    kernel_dilation: int | Sequence[int] = 1,
    feature_group_count: int = 1,
    activation: str | None = None,
    residual: jax.Array | None = None,
    precision: jax.lax.PrecisionLike = None,
    implementation: dispatch.Implementation | None = None,
) -> jax.Array:
    r"""Convolution of channels-last arrays, with the sum and the activation after it.

    .. math::
        y = \text{activation}(\operatorname{conv}(x, w) + \text{bias} + \text{residual})

    As in every deep-learning library the kernel is not flipped. Sums are float32 (float64 for
    float64 inputs); bias, residual and activation are applied in float32. XLA's own convolution adds
    in x's dtype where there is no activation or relu, as Flax's does: on a GPU cuDNN then adds before it
    rounds.

    Args:
      x: [B, *spatial, I] with one spatial axis or more, float32, bfloat16 or float16 (float64 with
        implementation "xla"). Or a `jaxfused.Concatenated`: two arrays, concatenated by channels.
      w: [*kernel, I / feature_group_count, O], Flax's layout. Any float dtype; it is rounded to x's.
      bias: [O]. Any float dtype.
      strides: steps between windows, one for all spatial axes or one for each; so are the
        dilations.
      padding: "SAME", "SAME_LOWER" (an odd zero goes to the low side), "VALID", "CIRCULAR" (wraps
        around), "REFLECT", "EDGE" (the outermost values again), "CAUSAL" (all of it before the first
        spatial axis, which is time, and half of it on either side of the others), in upper or lower
        case; or how much to pad: an int for all sides, or for each spatial axis an int or a pair
        (low, high).
      padding_mode: with what, where `padding` says how much: "zeros", "edge", "reflect" or "circular".
        For values other than zeros, XLA first writes a padded copy of x, which the convolution reads.
      input_dilation: the distance between neighbouring values of x once zeros are put between them;
        more than 1 is a transposed convolution, for which `jaxfused.conv_transpose` finds the padding.
      kernel_dilation: the distance between the values of x that neighbouring weights read.
      feature_group_count: into how many groups the input and the output channels are split, each
        convolved separately; I groups are a depthwise convolution, with kernels for windows of
        3 x 3, 5 x 5 and 7 x 7, and of 2 to 5 and 7 along one axis. Longer windows of it are products of
        Fourier transforms on a GPU (stride 1, no dilation) where that is faster: see below.
      activation: None or a name of `jaxfused.ACTIVATIONS`, after everything else.
      residual: of the result's shape, is added before the activation.
      precision: of the products, as in `jax.lax.conv`.
      implementation: None for the fastest that can run, or "pallas", "cuda", "xla".

    Returns:
      [B, *spatial', O] of x's dtype.

    Raises:
      ValueError: shapes, dtypes or options do not fit, or the named implementation cannot run.

    Example:
      >>> import jax.numpy as jnp, jaxfused
      >>> x = jnp.arange(4.0).reshape(1, 4, 1)
      >>> jaxfused.conv(x, jnp.ones((3, 1, 1)), jnp.array([-3.0]), activation="relu").ravel()
      Array([0., 0., 3., 2.], dtype=float32)
      >>> jaxfused.conv(x, jnp.ones((2, 1, 1)), strides=2, padding="VALID").ravel()
      Array([1., 5.], dtype=float32)

    Where a kernel runs, forward-mode differentiation and gradients of gradients need
    `implementation="xla"`. The forward then saves the activation's input for the gradient, in x's
    dtype; for relu the gradient reads y instead. The Pallas kernels take padding
    with zeros as numbers, "SAME", "SAME_LOWER", "VALID" or "CAUSAL", and no groups. A gradient to the
    input of a convolution with strides is XLA's. A window of a single weight makes a matrix product.
    Images of a few channels, as a network's first layer has them, are copied first: the pixels that a
    row of weights reads are concatenated (space-to-depth).
    Depthwise convolution of long windows takes Fourier transforms in float32, whose time hardly depends
    on the window: windows of 31 x 31 weights, or of hundreds along one axis, are faster by one or two
    orders of magnitude. A NaN or an infinity in x then reaches all of its image's channel.
    Winograd's form of a 3 x 3 convolution was measured: it takes several times as long as the kernels,
    and is twice as far from the exact result.
    Depthwise convolution of 16-bit values by tensor cores, with windows of 5 x 5 and 7 x 7, multiplies
    by zeros too: a NaN or an infinity in x then reaches up to 16 columns of its channel's result, and
    makes more of the gradient of that channel's weights NaN than the sum of its products would.

    Source: LeCun et al., "Gradient-Based Learning Applied to Document Recognition", 1998; the
    arguments are those of `flax.linen.Conv`.
    """
    return run(
        x,
        w,
        bias,
        window=dict(
            strides=strides,
            padding=padding,
            padding_mode=padding_mode,
            input_dilation=input_dilation,
            kernel_dilation=kernel_dilation,
            feature_group_count=feature_group_count,
        ),
        activation=activation,
        residual=residual,
        precision=precision,
        implementation=implementation,
    ).y


def run(
    x: ConvInput,
    w: jax.Array,
    bias: jax.Array | None = None,
    *,
    window: Mapping[str, Any],
    activation: str | None = None,
    residual: jax.Array | None = None,
    return_input: bool = False,
    statistics: bool = False,
    precision: jax.lax.PrecisionLike = None,
    implementation: dispatch.Implementation | None = None,
) -> Convolved:
    """Computes `conv` for layers and `fuse`, which also need the input again or statistics of y.

    Args:
      x: as in `conv`. A `Rectified` too: its gradient is masked by the kernel that computes it.
      w: as in `conv`, and so are the arguments not named here.
      bias: [O].
      window: options of `geometry` by name.
      activation: after everything else.
      residual: is added before the activation.
      return_input: whether another operation, such as a shortcut, reads the returned x. The dgrad kernel
          then adds that operation's gradient, which would otherwise take XLA a pass over both.
      statistics: True to return mean and variance of y for the batch norm that follows. They have no
        gradient here: the norm's dx already includes y's effect on them.
      precision: of the products.
      implementation: None for the fastest that can run.
    """
    op = "conv"
    x = as_input(x)
    if isinstance(x, Concatenated):
        check_parts(x)
    w, bias, residual = as_arrays(w, bias, residual)
    check_floating(op, dict(x=as_array(x), w=w, bias=bias, residual=residual))
    check_activation(op, activation)
    _check_kernel(x, w, window.get("feature_group_count", 1))
    check_shape(op, "bias", bias, w.shape[-1:], f"w has {w.shape[-1]} output channels")
    return convolved(
        op,
        x,
        w,
        bias,
        options=geometry(op, x, w.shape[:-2], **window),
        activation=activation,
        residual=residual,
        return_input=return_input,
        statistics=statistics,
        precision=precision,
        implementation=implementation,
    )


def convolved(
    op: str,
    x: ConvInput,
    w: jax.Array,
    bias: jax.Array | None,
    *,
    options: dict[str, Any],
    activation: str | None,
    residual: jax.Array | None,
    return_input: bool = False,
    statistics: bool = False,
    precision: jax.lax.PrecisionLike = None,
    implementation: dispatch.Implementation | None,
) -> Convolved:
    """Computes y of checked operands; `options` are strides, padding, dilations and groups."""
    around = options["padding"]
    if isinstance(around, Around):
        shortcut = as_array(x)
        none = ((0, 0),) * len(around.pairs)
        result = convolved(
            op,
            around.pad(shortcut),
            w,
            bias,
            options=options | dict(padding=none),
            activation=activation,
            residual=residual,
            statistics=statistics,
            precision=precision,
            implementation=implementation,
        )
        return result._replace(x=shortcut)
    values = x.values if isinstance(x, Rectified) else as_array(x)
    call = _Call(
        op,
        x,
        values,
        implementation,
        dispatch.current_device(values, residual),
        options,
        activation,
        precision,
        return_input,
        statistics,
    )
    if residual is not None:
        shape = jax.eval_shape(call.in_xla, values, w, bias, None).shape
        check_shape(op, "residual", residual, shape, f"the result has shape {shape}")
    if patch_expand.block_of(values, w, **options) is not None:
        return call.enlarging(w, bias, residual)
    window = depthwise_conv.window_of(values, w, **options)
    if isinstance(window, str):
        return call.dense(w, bias, residual, window)
    of_sums = fft_conv.choice(call.run, values, w, window)
    if of_sums is not None and fft_conv.is_transformed(of_sums):
        return call.by_fourier_transform(of_sums, w, bias, residual, window)
    return call.depthwise(w, bias, residual, window, of_sums)


@dataclass(frozen=True)
class _Call:
    """Dispatches a call of `conv` to the dense, depthwise, grouped or transposed implementation."""

    op: str
    x: ConvInput
    values: jax.Array
    """x as one array. If x is a `Rectified`, the relu's mask is not applied to its gradient here."""
    implementation: dispatch.Implementation | None
    device: dispatch.Device
    options: dict[str, Any]
    activation: str | None
    precision: jax.lax.PrecisionLike
    return_input: bool
    statistics: bool

    @property
    def run(self) -> Runner:
        return Runner(self.implementation, self.device)

    def array(self) -> jax.Array:
        """Returns x as one array, with the relu's mask on its gradient if x is a `Rectified`."""
        return self.x.array() if isinstance(self.x, Rectified) else self.values

    def in_xla(self, x: jax.Array, w: jax.Array, bias: Any, residual: Any) -> jax.Array:
        return conv_xla.conv(
            x,
            w,
            bias,
            residual,
            activation=self.activation,
            precision=self.precision,
            partitioned=not sharding.is_in_one_piece(x, w),
            **self.options,
        )

    def enlarging(self, w: jax.Array, bias: Any, residual: Any) -> Convolved:
        """Runs a transposed conv whose stride equals its window: each pixel of x gives a block of y."""
        missing = {"cuda": "the CUDA kernels of conv are depthwise, and the input is dilated"}
        images = dense_conv_forward.images
        weights = w[None] if w.ndim == 3 else w
        reason = patch_expand.why_unsupported(
            self.device, images(self.values), weights, images(residual)
        )
        if reason is not None:
            missing["pallas"] = reason
        takes_xla = takes_reference(
            self.op, self.implementation, self.device, self.values, missing=missing
        )
        values = self.array()
        if takes_xla:
            return Convolved(self.in_xla(values, w, bias, residual), values, None)
        y = patch_expand.enlarging_conv(
            self.run,
            values,
            w,
            bias,
            residual,
            activation=self.activation,
            precision=self.precision,
        )
        return Convolved(y, values, None)

    def by_fourier_transform(
        self, of_sums: dispatch.Choice, w: jax.Array, bias: Any, residual: Any, window: Window
    ) -> Convolved:
        values = self.array()
        y = fft_conv.fourier_conv(
            of_sums, values, w, bias, residual, window=window, activation=self.activation
        )
        return Convolved(y, values, None)

    def depthwise(
        self,
        w: jax.Array,
        bias: Any,
        residual: Any,
        window: Window,
        of_sums: dispatch.Choice | None,
    ) -> Convolved:
        operands = self.values, w, bias, residual
        missing = {"pallas": depthwise_conv1d.NO_PALLAS}
        left = functools.partial(
            depthwise_conv.left_to_xla, self.run, *operands, window, self.activation, of_sums
        )
        of_one_axis = depthwise_conv1d.takes(window)
        takes_xla = self._takes_xla(w, missing, None if of_one_axis else left)
        values = self.array()
        if takes_xla:
            return Convolved(self.in_xla(values, w, bias, residual), values, None)
        convolve: Any = depthwise_conv.depthwise_conv
        if of_one_axis:
            convolve = depthwise_conv1d.depthwise_conv1d
        y, returned_input = convolve(
            self.run,
            values,
            w,
            bias,
            residual,
            window=window,
            activation=self.activation,
            returns_input=self._returns_input(w),
        )
        return Convolved(y, values if returned_input is None else returned_input, None)

    def dense(self, w: jax.Array, bias: Any, residual: Any, why_not_depthwise: str) -> Convolved:
        values = self.values
        missing = {"cuda": f"the CUDA kernels of conv are depthwise, and {why_not_depthwise}"}
        window = dense_conv.window_of(values, w, **self.options)
        simplify, dense = dense_conv.simplified(window, values)
        like_x, like_w = sharding.eval_shape(simplify, values, w)
        why_not = dense_conv_forward.why_unsupported(self.device, dense, like_x, like_w, residual)
        left: Callable[[], LeftToXla | None] | None = None
        if why_not is not None:
            missing["pallas"] = why_not
        else:
            assert not isinstance(window, str) and not isinstance(dense, str)
            options = dense_conv_forward.Options(dense, self.activation, self.precision)
            operands = like_x, like_w, bias, residual
            left = functools.partial(dense_conv.left_to_xla, self.run, window, options, *operands)
        takes_xla, returns_input = self._takes_xla(w, missing, left), self._returns_input(w)
        masks = (
            isinstance(self.x, Rectified) and not takes_xla and returns_input == self.return_input
        )
        values = values if masks else self.array()
        if takes_xla:
            return Convolved(self.in_xla(values, w, bias, residual), values, None)
        assert not isinstance(dense, str) and not isinstance(window, str)
        run = self.run
        if dense.taps < window.taps and not dense.is_pointwise:
            why = "XLA's convolution does not gain from space-to-depth"
            run = Runner("pallas", self.device, None if self.implementation == "pallas" else why)
        y, returned_input, taken = dense_conv.dense_conv(
            run,
            self.x if isinstance(self.x, Concatenated) else values,
            w,
            bias,
            residual,
            request=dense_conv.Request(simplify, returns_input, masks, self.statistics),
            window=dense,
            activation=self.activation,
            precision=self.precision,
        )
        return Convolved(y, values if returned_input is None else returned_input, taken)

    def _takes_xla(
        self, w: jax.Array, missing: dict[str, str], left: Callable[[], LeftToXla | None] | None
    ) -> bool:
        return takes_reference(
            self.op,
            self.implementation,
            self.device,
            self.values,
            missing=missing,
            # Under Explicit axes XLA is not preferred: JAX's own convolution refuses sharded channels.
            why_xla=None if self._is_explicit(w) else left,
        )

    def _returns_input(self, w: jax.Array) -> bool:
        """Returns whether the kernel's call returns x too; Explicit axes may reshard x, so not there."""
        return self.return_input and not self._is_explicit(w)

    def _is_explicit(self, w: jax.Array) -> bool:
        return sharding.is_explicit(self.values) or sharding.is_explicit(w)


def _check_kernel(x: Any, w: jax.Array, groups: int) -> None:
    if x.ndim < 3 or x.shape[-1] == 0:
        raise ValueError(
            f"conv: x has shape {x.shape}, but it needs a batch axis, a spatial axis and at least one"
            " channel; pass x of shape [batch, ..., channels]."
        )
    if w.ndim != x.ndim or 0 in w.shape:
        raise ValueError(
            f"conv: w has shape {w.shape}, but x of shape {x.shape} has {x.ndim - 2} spatial axes;"
            " pass w of shape [kernel sizes, input channels / groups, output channels]."
        )
    channels, features = x.shape[-1], w.shape[-1]
    if groups < 1 or channels % groups or features % groups:
        raise ValueError(
            f"conv: feature_group_count is {groups}, but it must divide the {channels} input and the"
            f" {features} output channels; pass a common divisor."
        )
    if w.shape[-2] != channels // groups:
        raise ValueError(
            f"conv: w has shape {w.shape}, but x has {channels} channels in {groups} groups;"
            f" pass w with {channels // groups} input channels in its last axis but one."
        )
