"""batch_norm and fold_batch_norm: validation, choice of implementation, gradient.

In training the kernels are those of group_norm: the batch is one image, with a group for each
channel.
"""

import functools
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jaxfused import dispatch
from jaxfused.ops.norm import batch_norm_xla, group_norm
from jaxfused.runtime import sharding
from jaxfused.runtime.checks import (
    as_arrays,
    check_activation,
    check_epsilon,
    check_floating,
    check_shape,
    python_numbers,
)
from jaxfused.runtime.gate import takes_reference
from jaxfused.runtime.kernel_gradient import kernel_gradient
from jaxfused.runtime.runner import Runner


@python_numbers
def batch_norm(
    x: jax.Array,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    mean: jax.Array | None = None,
    var: jax.Array | None = None,
    epsilon: float = 1e-5,
    axis_name: Hashable | tuple[Hashable, ...] | None = None,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    activation: str | None = None,
    residual: jax.Array | None = None,
    implementation: dispatch.Implementation | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array, jax.Array]:
    r"""Batch normalisation of channels-last arrays, with what follows it in one pass.

    .. math::
        y = \text{activation}\Bigl(\frac{x - \text{mean}}{\sqrt{\text{var} + \epsilon}}
            \cdot \text{scale} + \text{bias} + \text{residual}\Bigr)

    Without `mean` and `var` this is training: both are taken over all axes of x but the last, and
    over all devices along `axis_name`, and returned next to y for the running averages. With them it
    is inference.

    Args:
      x: [..., C], float32, bfloat16 or float16 (float64 with implementation "xla").
      scale: [C], multiplies the normalised values. Any float dtype, as for bias, mean and var.
      bias: [C], is added after `scale`.
      mean: [C], the mean to normalise by; with `var`.
      var: [C], the variance to normalise by; with `mean`.
      epsilon: is added to the variance.
      axis_name: the mapped axis (or axes) of `jax.pmap`, `jax.shard_map` or `jax.vmap` over which
        the batch is spread, as `jax.lax.pmean` takes it. Under `jax.jit` with sharded arrays leave
        it out: the statistics are those of the whole array already.
      axis_index_groups: groups of devices along `axis_name` that share statistics, as
        `jax.lax.pmean` takes them.
      activation: None or a name of `jaxfused.ACTIVATIONS`, after everything else.
      residual: [..., C] like x, is added before the activation.
      implementation: None for the fastest that can run, or "cuda" in training, "xla".

    Returns:
      In training `(y, mean, var)`: y of x's shape and dtype; mean and the variance (the mean of
      squared deviations, not corrected for the sample) of shape [C] in float32 (float64 for float64
      inputs); of no rows they are NaN. In inference y alone.

    Raises:
      ValueError: shapes or dtypes do not fit, only one of `mean` and `var` is given, an axis name is
        given in inference, or the named implementation cannot run.

    Example:
      >>> import jax.numpy as jnp, jaxfused
      >>> x = jnp.array([[1.0, 10.0], [3.0, 10.0]])
      >>> y, mean, var = jaxfused.batch_norm(x, jnp.ones(2), jnp.zeros(2))
      >>> mean, var
      (Array([ 2., 10.], dtype=float32), Array([1., 0.], dtype=float32))
      >>> jaxfused.batch_norm(x, mean=mean, var=var, epsilon=3.0, activation="relu").round(3)
      Array([[0. , 0. ],
             [0.5, 0. ]], dtype=float32)

    The kernels take the statistics of a batch on one device; over several, XLA's own code runs. With
    the kernels, forward-mode differentiation and gradients of gradients need `implementation="xla"`.

    Source: Ioffe, Szegedy, "Batch Normalization", 2015, https://arxiv.org/abs/1502.03167
    """
    return run(
        x,
        scale,
        bias,
        mean=mean,
        var=var,
        epsilon=epsilon,
        axis_name=axis_name,
        axis_index_groups=axis_index_groups,
        activation=activation,
        residual=residual,
        implementation=implementation,
    )


def run(
    x: jax.Array,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    mean: jax.Array | None = None,
    var: jax.Array | None = None,
    epsilon: float = 1e-5,
    axis_name: Hashable | tuple[Hashable, ...] | None = None,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    activation: str | None = None,
    residual: jax.Array | None = None,
    mask: jax.Array | None = None,
    mask_gradient: bool = True,
    statistics: tuple[jax.Array, jax.Array] | None = None,
    implementation: dispatch.Implementation | None = None,
) -> Any:
    """Computes `batch_norm` for layers and `fuse`, with three more arguments.

    Args:
      mask: in training, bool and broadcastable to x: True for values that the statistics include.
      mask_gradient: False if y is a relu's result and every operation that reads it applies the relu's
          mask to the gradient that it returns (`Rectified`), so that none is applied here.
      statistics: in training, mean and variance of x [C], float32, where they are known already, as
        `conv.run` returns them, so that no pass over x computes them. The gradient is the same.
    """
    op = "batch_norm"
    x, scale, bias, mean, var, residual = as_arrays(x, scale, bias, mean, var, residual)
    check_floating(op, dict(x=x, scale=scale, bias=bias, mean=mean, var=var, residual=residual))
    if x.ndim == 0:
        raise ValueError(f"{op}: x is a scalar; pass x of shape [..., channels].")
    channels = x.shape[-1]
    for name, array in dict(scale=scale, bias=bias, mean=mean, var=var).items():
        check_shape(op, name, array, (channels,), f"x has {channels} channels in its last axis")
    check_shape(op, "residual", residual, x.shape, f"x has shape {x.shape}")
    if (mean is None) != (var is None):
        raise ValueError(
            f"{op}: only {'var' if mean is None else 'mean'} was passed, but inference normalises by"
            " both; pass mean and var, or neither to take them from x."
        )
    training = mean is None
    if axis_index_groups is not None and axis_name is None:
        raise ValueError(
            f"{op}: axis_index_groups={axis_index_groups} were passed without the axis that they"
            " split; pass axis_name too."
        )
    if not training and axis_name is not None:
        raise ValueError(
            f"{op}: axis_name={axis_name!r} was passed with mean and var, but then no statistics are"
            " taken; leave out axis_name."
        )
    if statistics is not None:
        mean_of_x, var_of_x = as_arrays(*statistics)
        statistics = mean_of_x, var_of_x
    for name, array in zip(("mean", "variance"), statistics or (), strict=False):
        rule = f"x has {channels} channels in its last axis"
        check_shape(op, f"the {name} of statistics", array, (channels,), rule)
    if statistics is not None and (not training or axis_name is not None):
        other = "mean and var" if axis_name is None else f"axis_name={axis_name!r}"
        raise ValueError(
            f"{op}: statistics were passed with {other}, but they are those of x on one device in"
            " training; leave out one of the two."
        )
    check_epsilon(op, epsilon)
    check_activation(op, activation)
    device = dispatch.current_device(x, residual)
    unable = _why_xla(x, training, axis_name, mask)
    missing = {"pallas": group_norm.why_no_pallas(op)}
    if unable is not None:
        missing["cuda"] = unable
    why_xla = group_norm.why_few(batch_norm_xla.values_of_a_channel(x))
    if not takes_reference(op, implementation, device, x, missing=missing, why_xla=why_xla):
        options = group_norm.Options(op, epsilon, activation)
        runner = Runner(implementation, device)
        return _over_batch(runner, options, not mask_gradient, x, residual, scale, bias, statistics)

    if mean is None or var is None:
        return batch_norm_xla.of_batch(
            x,
            scale,
            bias,
            residual,
            epsilon=epsilon,
            activation=activation,
            axis_name=axis_name,
            axis_index_groups=axis_index_groups,
            mask=mask,
        )
    return batch_norm_xla.norm(
        x, scale, bias, residual, mean, var, epsilon=epsilon, activation=activation
    )


def _why_xla(
    x: jax.Array, training: bool, axis_name: Hashable, mask: jax.Array | None
) -> str | None:
    """Returns why no kernel can run this call at any shape, so that XLA does, or None."""
    if not training:
        return "with mean and var it is arithmetic of single values, which XLA fuses by itself"
    if axis_name is not None:
        return "it takes the statistics of one device, and axis_name was passed"
    if mask is not None:
        return "it takes the statistics of all values, and a mask is given"
    if not sharding.is_in_one_piece(x):
        return "it takes the statistics of one device, and x may be spread over several"
    return None


# --- gradient -------------------------------------------------------------------------------------


def _over_batch(
    run: Runner, options: group_norm.Options, rectified: bool, x, residual, scale, bias, statistics
):
    """Returns (y, mean, var) by group_norm's kernels: x is one image, with a group for each channel."""
    letters = sharding.leading_axes(x.ndim - 1) + "c"
    operands = (x, residual, scale, bias)
    x, residual, scale, bias = sharding.align(operands, operand_axes=(letters, letters, "c", "c"))
    image, residual = (None if a is None else a[None, ..., None] for a in (x, residual))
    scale, bias = (None if a is None else a[:, None] for a in (scale, bias))
    y, mean, var = _norm(run, options, rectified, image, residual, scale, bias, statistics)
    return y.reshape(x.shape), mean[0], var[0]


class _Residuals(NamedTuple):
    x: jax.Array
    residual: jax.Array | None
    """Residual, or y if the activation is relu, whose mask follows from y; None if not needed."""
    residual_like: jax.Array | None
    mean: jax.Array
    """Mean [1, C] in float32."""
    rstd: jax.Array
    scale: jax.Array | None
    bias: jax.Array | None


@functools.partial(kernel_gradient, nondiff_argnums=(0, 1, 2), op="batch_norm")
def _norm(run: Runner, options: group_norm.Options, rectified: bool, *operands):
    return _results_and_residuals(run, options, rectified, *operands)[0]


def _norm_fwd(run: Runner, options: group_norm.Options, rectified: bool, *operands):
    values = jax.tree.map(lambda operand: operand.value, operands)
    return _results_and_residuals(run, options, rectified, *values)


def _results_and_residuals(
    run: Runner, options: group_norm.Options, rectified: bool, x, residual, scale, bias, statistics
):
    if statistics is None:
        forward = group_norm.Forward(options, save_statistics=True, save_variance=True)
        y, mean, rstd, var = run(forward, x, residual, scale, bias)
    else:
        # With mean and variance given, the norm is elementwise, which XLA fuses into one pass.
        mean, var = (a.astype(jnp.float32)[None] for a in statistics)
        rstd = jax.lax.rsqrt(var + options.epsilon)
        y = _normalised(options, x, residual, scale, bias, mean, var)
    kept = group_norm.kept(options, rectified, residual, y)
    return (y, mean, var), _Residuals(x, *kept, mean, rstd, scale, bias)


def _normalised(options: group_norm.Options, x, residual, scale, bias, mean, var) -> jax.Array:
    """Normalises x [1, ..., C, 1] (the batch as one image, each channel a group) by mean, var [1, C]."""
    scale, bias, residual = (None if a is None else a[..., 0] for a in (scale, bias, residual))
    statistics = mean[0], var[0]
    y = batch_norm_xla.norm(
        x[..., 0],
        scale,
        bias,
        residual,
        *statistics,
        epsilon=options.epsilon,
        activation=options.activation,
    )
    return y[..., None]


def _norm_bwd(
    run: Runner, options: group_norm.Options, rectified: bool, saved: _Residuals, cotangents
):
    # Cotangents of mean and var are symbolic zeros if the statistics only update running averages.
    without = all(isinstance(cotangent, SymbolicZero) for cotangent in cotangents[1:])
    dy, dmean, dvar = (
        jnp.zeros(c.shape, c.dtype) if isinstance(c, SymbolicZero) else c for c in cotangents
    )
    if without:
        dmean = dvar = None
    x, residual, residual_like, mean, rstd, scale, bias = saved
    options, dy, residual, passed = group_norm.through_relu(
        options, rectified, dy, residual, residual_like
    )
    backward = group_norm.Backward(options, per_image=False)
    operands = (dy, x, residual, mean, rstd, dmean, dvar, scale, bias)
    dx, dresidual, dscale, dbias = run(backward, *operands)

    def like(gradient, array):
        return None if array is None else gradient.astype(array.dtype)

    dresidual = like(dresidual if passed is None else passed, residual_like)
    # The last None: `statistics` have no gradient, because dx already includes x's effect on them.
    return dx, dresidual, like(dscale, scale), like(dbias, bias), None


_norm.defvjp(_norm_fwd, _norm_bwd, symbolic_zeros=True)


# --- folding --------------------------------------------------------------------------------------


@python_numbers
def fold_batch_norm(
    w: jax.Array,
    bias: jax.Array | None = None,
    *,
    mean: jax.Array,
    var: jax.Array,
    norm_scale: jax.Array | None = None,
    norm_bias: jax.Array | None = None,
    epsilon: float = 1e-5,
    transpose_kernel: bool = False,
) -> tuple[jax.Array, jax.Array]:
    r"""Folds an inference-mode batch_norm into the convolution or linear layer before it.

    .. math::
        f &= \frac{\text{norm\_scale}}{\sqrt{\text{var} + \epsilon}} \\
        w' &= w \cdot f \\
        \text{bias}' &= (\text{bias} - \text{mean}) \cdot f + \text{norm\_bias}

    so that `conv(x, w') + bias'` is `batch_norm(conv(x, w) + bias)`.

    Args:
      w: [..., C], output channels last: Flax's [H, W, I, C] of a convolution or [I, C] of a linear
        layer; or [..., C, I] with `transpose_kernel`.
      bias: [C], the bias of that layer; None where it has none.
      mean: [C], the running mean.
      var: [C], the running variance.
      norm_scale: [C], batch_norm's scale.
      norm_bias: [C], batch_norm's bias.
      epsilon: batch_norm's.
      transpose_kernel: as of the `jaxfused.conv_transpose` that reads w, which Flax and Keras have in
        ConvTranspose too: whether the output channels come before the input channels, which shapes
        cannot tell if there are as many of both.

    Returns:
      `(w', bias')` of w's shape and dtype and of shape [C] in the dtype of `bias` (of w without it).

    Raises:
      ValueError: shapes or dtypes do not fit.

    Example:
      >>> import jax.numpy as jnp, jaxfused
      >>> w, bias = jaxfused.fold_batch_norm(
      ...     jnp.ones((3, 2)), mean=jnp.array([1.0, 2.0]), var=jnp.array([3.0, 0.0]), epsilon=1.0
      ... )
      >>> bias.round(3)
      Array([-0.5, -2. ], dtype=float32)

    Source: Jacob et al., "Quantization and Training of Neural Networks for Efficient
    Integer-Arithmetic-Only Inference", 2017, https://arxiv.org/abs/1712.05877
    """
    op = "fold_batch_norm"
    w, bias, mean, var, norm_scale, norm_bias = as_arrays(w, bias, mean, var, norm_scale, norm_bias)
    vectors = dict(bias=bias, mean=mean, var=var, norm_scale=norm_scale, norm_bias=norm_bias)
    check_floating(op, dict(w=w, **vectors))
    if w.ndim < 1 + transpose_kernel:
        axes = "output channels, channels" if transpose_kernel else "output channels"
        of_w = "a scalar" if w.ndim == 0 else f"of shape {w.shape}"
        raise ValueError(f"{op}: w is {of_w}; pass w of shape [..., {axes}].")
    if transpose_kernel:
        w = w.swapaxes(-1, -2)
    channels = w.shape[-1]
    rule = f"w has {channels} output channels"
    if w.ndim > 1 and not transpose_kernel and mean.shape == w.shape[-2:-1]:
        rule += (
            " in its last axis, unless transpose_kernel=True says that they are in the one before"
        )
    for name, array in vectors.items():
        check_shape(op, name, array, (channels,), rule)
    check_epsilon(op, epsilon)
    folded, shift = batch_norm_xla.fold(w, bias, mean, var, norm_scale, norm_bias, epsilon=epsilon)
    return folded.swapaxes(-1, -2) if transpose_kernel else folded, shift
