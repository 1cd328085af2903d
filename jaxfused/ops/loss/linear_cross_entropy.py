"""linear_softmax_cross_entropy: validation, choice of implementation, gradient.

The logits of a language model are its largest array. Here only one chunk of tokens has logits at a time.
If the kernels of softmax_cross_entropy run and the loss's cotangent is known in advance, a chunk's
logits are turned into their gradient in place and multiplied at once, so that each product is computed
once.
"""

import functools
import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxfused import dispatch
from jaxfused.ops.linear import linear_xla
from jaxfused.ops.linear.linear import check_affine
from jaxfused.ops.loss import cross_entropy_xla
from jaxfused.ops.loss.cross_entropy import (
    is_one_term,
    softmax_cross_entropy,
    weighed_losses,
    weights_of_labels,
)
from jaxfused.ops.loss.cross_entropy_checks import (
    check_class_weights,
    check_cotangent,
    check_labels,
    check_options,
    refuse_pallas,
)
from jaxfused.ops.loss.cross_entropy_gradient import corrections, losses_of_rows, pulls_on_rows
from jaxfused.ops.loss.cross_entropy_stages import Scale, unpacked
from jaxfused.ops.loss.cross_entropy_xla import (
    Options,
    Statistics,
    classes_of,
    counted,
    is_soft,
    losses_of,
)
from jaxfused.ops.loss.label_values import check_classes
from jaxfused.ops.loss.linear_cross_entropy_stages import Backward, Constants, Forward
from jaxfused.ops.loss.reduction import Reduction, reduce_losses, shares_of, times
from jaxfused.runtime import resharding, sharding
from jaxfused.runtime.checks import as_arrays, check_count, check_floating, python_numbers
from jaxfused.runtime.gate import takes_reference
from jaxfused.runtime.kernel_gradient import kernel_gradient
from jaxfused.runtime.promotion import accumulator_dtype
from jaxfused.runtime.runner import Runner
from jaxfused.runtime.shapes import is_symbolic
from jaxfused.runtime.stated_gradient import stated_gradient


@python_numbers
def linear_softmax_cross_entropy(
    x: jax.Array,
    w: jax.Array,
    labels: jax.Array,
    bias: jax.Array | None = None,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int | None = None,
    weights: jax.Array | None = None,
    class_weights: jax.Array | None = None,
    logits_soft_cap: float | None = None,
    reduction: Reduction = "mean",
    cotangent: jax.Array | float | Literal["any"] | None = None,
    chunk_size: int | None = None,
    sum_dtype: Any = None,
    axis_name: Hashable | tuple[Hashable, ...] | None = None,
    implementation: dispatch.Implementation | None = None,
) -> jax.Array:
    r"""`softmax_cross_entropy(x @ w + bias, labels)` that never holds the logits of all tokens.

    .. math::
        z = x w + \text{bias}, \qquad \ell_n \text{ as for softmax\_cross\_entropy}

    The logits of a language model are its largest array by far. Here they exist for one chunk of
    tokens at a time. Where the cotangent of the loss is known beforehand, the forward turns a chunk's
    logits into their gradient and multiplies it at once: three products in all, and the backward has
    nothing left to do. Elsewhere the backward makes the logits again, which is a fourth product.

    Args:
      x: [..., D], float32, bfloat16 or float16 (float64 with implementation "xla").
      w: [D, V], of any float dtype; it is rounded to x's for the product, which accumulates in
        float32.
      labels: [...] or [..., V], as for `softmax_cross_entropy`. Soft labels are left to XLA.
      bias: [V].
      cotangent: as for `softmax_cross_entropy`, a scalar: with reduction "none" it is not known.
      chunk_size: tokens whose logits exist at once. It changes memory and time, not the result but
        for rounding. By default a chunk's logits, in x's dtype, take as many bytes as a float32 gradient
        of w. Where w's gradient is summed in w's dtype (see `sum_dtype`), a chunk has about a third of a
        device's tokens. XLA's program holds 64 MiB of float32
        logits by default.
      sum_dtype: of the sums of w's gradient over chunks: float32, or w's dtype, in which the sums
        take no memory next to the gradient, for one more rounding a chunk. By default it is w's dtype
        where three chunks suffice and all tokens have the same cotangent, known beforehand, and no
        `weights`: otherwise the chunks' terms may cancel, which leaves their rounding errors.
      axis_name: the mapped axis (or axes) of `jax.shard_map` or `jax.pmap` over which the classes are
        spread, as for `softmax_cross_entropy`: each device has the columns of w (and the bias, soft
        labels and class weights) of its classes, and all have x and the labels. No device holds the
        logits of another's classes, the backward makes its own again, and w's gradient is summed in
        float32.

    The other arguments, the result and the errors are those of `softmax_cross_entropy`.

    Example:
      >>> import jax, jax.numpy as jnp, jaxfused
      >>> x, w = jnp.ones((6, 4)), jnp.zeros((4, 10))
      >>> loss, (dx, dw) = jax.value_and_grad(
      ...     lambda x, w: jaxfused.linear_softmax_cross_entropy(x, w, jnp.arange(6)), (0, 1)
      ... )(x, w)
      >>> print(f"{loss:.3f}")
      2.303

    Source: Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models", 2024,
    https://arxiv.org/abs/2411.09009; Hsu et al., "Liger Kernel", 2024,
    https://arxiv.org/abs/2410.10989 (logits turned into their gradient by chunks)
    """
    op = "linear_softmax_cross_entropy"
    x, w, labels, bias, weights, class_weights = as_arrays(
        x, w, labels, bias, weights, class_weights
    )
    check_floating(op, dict(x=x, w=w, bias=bias, weights=weights, class_weights=class_weights))
    check_affine(op, x, "w", w, "bias", bias)
    features = w.shape[1]
    if features == 0:
        raise ValueError(
            f"{op}: w has shape {w.shape}, but its last axis holds the classes;"
            " pass w of shape [features, classes]."
        )
    options = Options(label_smoothing, z_loss, ignore_index, logits_soft_cap)
    leading = x.shape[:-1]
    labels = check_labels(op, labels, (*leading, features), options)
    check_options(op, options, weights, leading, reduction)
    check_class_weights(op, class_weights, features)
    if axis_name is None:
        check_classes(op, labels, features, ignore_index)
    _check_sum_dtype(op, sum_dtype, w.dtype)
    expected = check_cotangent(op, cotangent, x.dtype, reduction, ())
    if chunk_size is not None:
        check_count(op, "chunk_size", chunk_size)
    refuse_pallas(op, implementation)
    of_logits = _LossesOfLogits(options, axis_name, implementation)
    if axis_name is not None:
        of_labels = None
        if class_weights is not None:
            class_weights = class_weights.astype(accumulator_dtype(x.dtype))
            of_labels = weights_of_labels(class_weights, labels, options, axis_name)
        chunk_size = _chunk_of_tokens(x, w, chunk_size)
        losses = _by_chunks(of_logits, chunk_size, x, w, bias, labels, class_weights)
        return reduce_losses(losses, counted(labels, options), weights, reduction, of_labels)
    soft = is_soft(labels)
    several_terms = class_weights is not None and not is_one_term(labels, options)
    why_xla = None
    if soft:
        why_xla = "soft labels are as large as the logits"
    elif several_terms:
        why_xla = "class weights with label_smoothing or z_loss are not in the kernels"
    if why_xla is not None and implementation == "cuda":
        raise ValueError(
            f"{op}: implementation='cuda' cannot run here: {why_xla}."
            " Pass implementation=None for the fastest one that can."
        )
    device = dispatch.current_device(x)
    is_reference = takes_reference(op, implementation, device, x, why_xla=why_xla)
    x, w, bias, labels, weights = _aligned(x, w, bias, labels, weights)
    counts = counted(labels, options)
    if class_weights is not None:
        [class_weights] = resharding.whole(class_weights)
        class_weights = class_weights.astype(accumulator_dtype(x.dtype))
        of_labels = weights_of_labels(class_weights, labels, options)
        if several_terms:

            def of_tokens(others, x, labels):
                w, bias, class_weights = others
                size = _chunk_of_tokens(x, w, chunk_size)
                return _by_chunks(of_logits, size, x, w, bias, labels, class_weights)

            losses = _by_tokens(of_tokens, (w, bias, class_weights), x, labels)
            return reduce_losses(losses, counts, weights, reduction, of_labels)
        weights = times(weights, of_labels)
    if is_reference:
        losses = _reference_losses(options, chunk_size, x, w, bias, labels)
        return reduce_losses(losses, counts, weights, reduction)

    ahead = expected is not None and reduction != "none"
    if sum_dtype is None and (weights is not None or not ahead):
        sum_dtype = jnp.float32
    run = Runner(implementation, device)
    constants = Constants(options, chunk_size, None if sum_dtype is None else jnp.dtype(sum_dtype))
    classes = classes_of(labels, features, options)
    if ahead:
        shares, total = shares_of(counts, weights, reduction)
        scalars = [jnp.asarray(scalar, jnp.float32) for scalar in (total, expected)]
        return _loss_ahead(run, constants, *_aligned(x, w, bias, classes, shares, *scalars))
    statistics = _statistics(run, constants, *_aligned(x, w, bias, classes)[:4])
    return reduce_losses(losses_of(statistics, counts, options), counts, weights, reduction)


def linear_softmax_statistics(
    x: jax.Array,
    w: jax.Array,
    labels: jax.Array,
    bias: jax.Array | None = None,
    *,
    of_mean: bool,
    logits_soft_cap: float | None = None,
) -> Statistics:
    """Returns the `Statistics` [...] of the rows of x @ w + bias, without the logits of all tokens.

    They are for losses that other functions of them than `losses_of` compute, and have gradients but
    for the maximum. The mean is 0 unless `of_mean`.
    """
    op = "linear_softmax_cross_entropy"
    check_affine(op, x, "w", w, "bias", bias)
    features = w.shape[1]
    # The mean is computed with any label smoothing but 0.
    options = Options(label_smoothing=float(of_mean), logits_soft_cap=logits_soft_cap)
    labels = check_labels(op, labels, (*x.shape[:-1], features), options)
    classes = classes_of(labels, features, options)
    device = dispatch.current_device(x)
    if takes_reference(op, None, device, x):
        of_logits = _StatisticsOfLogits(options)
        size = _chunk_of_tokens(x, w, None)
        return _by_chunks(of_logits, size, x, w, bias, classes, None)
    constants = Constants(options, None, jnp.dtype(jnp.float32))
    return _statistics(Runner(None, device), constants, *_aligned(x, w, bias, classes)[:4])


def _check_sum_dtype(op: str, sum_dtype: Any, w_dtype: Any) -> None:
    if sum_dtype is not None and jnp.dtype(sum_dtype) not in (jnp.float32, w_dtype):
        raise ValueError(
            f"{op}: sum_dtype is {jnp.dtype(sum_dtype)}, but w's gradient is added up in float32 or"
            f" in w's dtype; pass jnp.float32 or jnp.{w_dtype}."
        )


def _aligned(x, w, bias, classes, shares=None, *scalars):
    """Reshards labels and `shares` like the leading axes of x [..., D]; D and V are not split.

    Under Explicit mesh axes a custom_vjp needs one sharding of these axes.
    """
    rows = sharding.leading_axes(x.ndim - 1)
    return sharding.align(
        (x, w, bias, classes, shares, *scalars),
        operand_axes=(
            *(rows + "d", "dv", "v"),
            rows if classes.ndim < x.ndim else rows + "v",
            *(rows, *("" for _ in scalars)),
        ),
        whole="dv",
    )


# --- gradient -------------------------------------------------------------------------------------


class _AheadResiduals(NamedTuple):
    dx: jax.Array
    dw: jax.Array
    dbias: jax.Array | None
    losses: jax.Array
    loss: jax.Array
    total: jax.Array
    expected: jax.Array


@functools.partial(kernel_gradient, nondiff_argnums=(0, 1), op="linear_softmax_cross_entropy")
def _loss_ahead(
    run: Runner, constants: Constants, x, w, bias, classes, shares, total, expected
) -> jax.Array:
    """Returns sum(shares * losses) / total; differentiated, its forward also computes the gradients."""
    del expected
    statistics, *_ = run(Forward(constants), x, w, bias, classes, None)
    return jnp.sum(losses_of_rows(statistics, classes, constants.options) * shares) / total


def _loss_ahead_fwd(
    run: Runner, constants: Constants, x, w, bias, classes, shares, total, expected
):
    coefficients = expected / total * shares
    statistics, dx, dw, dbias = run(Forward(constants), x, w, bias, classes, coefficients)
    losses = losses_of_rows(statistics, classes, constants.options)
    dbias = None if bias is None else dbias.astype(bias.dtype)
    loss = jnp.sum(losses * shares) / total
    return loss, _AheadResiduals(dx, dw, dbias, losses, loss, total, expected)


def _loss_ahead_bwd(run: Runner, constants: Constants, saved: _AheadResiduals, dloss):
    factor = corrections(dloss, saved.expected)
    (dx,) = run(Scale(), saved.dx, jnp.broadcast_to(factor, saved.losses.shape))
    (dw,) = run(Scale(), saved.dw, jnp.broadcast_to(factor, saved.dw.shape[:1]))
    dbias = None if saved.dbias is None else (saved.dbias * factor).astype(saved.dbias.dtype)
    dsum = dloss / saved.total
    return dx, dw, dbias, None, dsum * saved.losses, -dsum * saved.loss, None


_loss_ahead.defvjp(_loss_ahead_fwd, _loss_ahead_bwd)


class _StatisticsResiduals(NamedTuple):
    x: jax.Array
    w: jax.Array
    bias: jax.Array | None
    classes: jax.Array
    statistics: Statistics


@functools.partial(kernel_gradient, nondiff_argnums=(0, 1), op="linear_softmax_cross_entropy")
def _statistics(run: Runner, constants: Constants, x, w, bias, classes) -> Statistics:
    """Returns the statistics of the rows of x @ w + bias, for losses that JAX differentiates."""
    statistics, *_ = run(Forward(constants), x, w, bias, classes, None)
    return unpacked(statistics)


def _statistics_fwd(run: Runner, constants: Constants, x, w, bias, classes):
    statistics = _statistics(run, constants, x, w, bias, classes)
    return statistics, _StatisticsResiduals(x, w, bias, classes, statistics)


def _statistics_bwd(
    run: Runner, constants: Constants, saved: _StatisticsResiduals, cotangents: Statistics
):
    x, w, bias, classes, statistics = saved
    pulls = pulls_on_rows(cotangents, statistics, w.shape[1])
    packed = (jnp.stack(statistics, axis=-1), jnp.stack(pulls, axis=-1))
    dx, dw, dbias = run(Backward(constants), x, w, bias, classes, *packed)
    return dx, dw, None if bias is None else dbias.astype(bias.dtype), None


_statistics.defvjp(_statistics_fwd, _statistics_bwd)


# --- gradient of the reference --------------------------------------------------------------------

_CHUNK_LOGITS = 2**24
"""Number of logits that XLA's program holds at once by default: 64 MiB of float32."""


def _reference_losses(options, chunk_size, x, w, bias, labels):
    def of_tokens(weights, x, labels):
        rows = math.prod(x.shape[:-1])
        losses = _linear_token_losses(
            options,
            _chunk_of_tokens(x, w, chunk_size),
            x.reshape(rows, x.shape[-1]),
            *weights,
            labels.reshape(rows, *labels.shape[x.ndim - 1 :]),
        )
        return losses.reshape(x.shape[:-1])

    return _by_tokens(of_tokens, (w, bias), x, labels)


def _by_tokens(f, weights, x, labels) -> jax.Array:
    """Returns the losses `f(weights, x, labels)`; on Explicit axes each device computes its tokens'."""
    rows = sharding.leading_axes(x.ndim - 1)
    of_labels = rows if labels.ndim < x.ndim else rows + "v"
    return sharding.by_shards_of_rows(
        f, (x, labels), weights, axes=(rows + "d", of_labels), result_axes=rows
    )


def _chunk_of_tokens(x: jax.Array, w: jax.Array, chunk_size: int | None) -> int:
    """Returns the number of tokens of a chunk of x [..., D] in XLA, for weights w [D, V].

    Chunks are equal by default, so that the last one needs little padding.
    """
    rows = math.prod(x.shape[:-1])
    if is_symbolic(x):  # A loop needs a known number of equal chunks.
        return rows
    if chunk_size:
        return chunk_size
    chunks = max(1, math.ceil(rows * w.shape[1] / _CHUNK_LOGITS))
    return max(1, math.ceil(rows / chunks))


@dataclass(frozen=True)
class _LossesOfLogits:
    """Computes the losses [N] of a chunk's logits [N, V] with class weights, or sharded over classes."""

    options: Options
    axis_name: Hashable | tuple[Hashable, ...] | None
    implementation: dispatch.Implementation | None

    def __call__(self, logits, labels, class_weights):
        if self.axis_name is None:
            return weighed_losses(None, self.options, None, logits, labels, class_weights)
        return softmax_cross_entropy(
            logits,
            labels,
            label_smoothing=self.options.label_smoothing,
            z_loss=self.options.z_loss,
            ignore_index=self.options.ignore_index,
            logits_soft_cap=self.options.logits_soft_cap,
            class_weights=class_weights,
            reduction="none",
            axis_name=self.axis_name,
            implementation=self.implementation,
        )


@dataclass(frozen=True)
class _StatisticsOfLogits:
    """Computes the `Statistics` [N] of a chunk's logits [N, V]."""

    options: Options

    def __call__(self, logits, labels, class_weights):
        del class_weights
        return cross_entropy_xla.row_statistics(logits, labels, self.options)


# `jax.jit` compiles the loop once, even if the caller does not use `jax.jit`.
@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _by_chunks(of_logits: _LossesOfLogits, chunk_size, x, w, bias, labels, class_weights):
    """Returns what `of_logits` does of all tokens; the logits are recomputed by chunks."""
    leading = x.shape[:-1]
    rows = math.prod(leading)
    # JAX adds up the chunks' gradients in the dtype of w and bias, so they are widened first.
    wide = accumulator_dtype(x.dtype)
    w, bias = (None if a is None else a.astype(wide) for a in (w, bias))

    @jax.checkpoint
    def of_chunk(x, labels):
        logits = linear_xla.affine(x, w, bias, precision=None)
        return of_logits(logits, labels, class_weights)

    chunks = cross_entropy_xla.split_rows(
        (
            x.reshape(rows, x.shape[-1]),
            labels.reshape(rows, *labels.shape[len(leading) :]),
        ),
        chunk_size,
    )
    results = lax.map(lambda chunk: of_chunk(*chunk), chunks)
    return jax.tree.map(lambda a: a.reshape(-1)[:rows].reshape(leading), results)


class _LinearResiduals(NamedTuple):
    x: jax.Array
    w: jax.Array
    bias: jax.Array | None
    labels: jax.Array
    statistics: Statistics


@functools.partial(stated_gradient, nondiff_argnums=(0, 1))
def _linear_token_losses(options: Options, chunk_size: int, x, w, bias, labels):
    return cross_entropy_xla.linear_token_losses(x, w, bias, labels, options, chunk_size)[0]


def _linear_token_losses_fwd(options: Options, chunk_size: int, x, w, bias, labels):
    losses, statistics = cross_entropy_xla.linear_token_losses(
        x, w, bias, labels, options, chunk_size
    )
    return losses, _LinearResiduals(x, w, bias, labels, statistics)


def _linear_token_losses_bwd(options: Options, chunk_size: int, saved: _LinearResiduals, dlosses):
    return cross_entropy_xla.linear_token_gradients(*saved, dlosses, options, chunk_size)


_linear_token_losses.defvjp(_linear_token_losses_fwd, _linear_token_losses_bwd)
