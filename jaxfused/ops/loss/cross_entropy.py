"""softmax_cross_entropy: validation, choice, gradient, reduction.

A row of logits is read once for its statistics, from which its loss follows. The gradient needs the
logits again, unless the cotangent of the loss is known in advance: then the forward's kernel writes the
gradient too, while the row is on chip.
"""

import functools
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxfused import dispatch
from jaxfused.ops.loss import cross_entropy_cuda, cross_entropy_xla
from jaxfused.ops.loss.cross_entropy_xla import (
    ELSEWHERE,
    IGNORED,
    Options,
    Pulls,
    Statistics,
    capped,
    classes_of,
    counted,
    is_soft,
    losses_of,
)
from jaxfused.ops.loss.label_values import as_classes, check_classes
from jaxfused.runtime import sharding
from jaxfused.runtime.checks import (
    as_arrays,
    check_constant,
    check_finite,
    check_floating,
    check_shape,
    check_soft_cap,
    python_numbers,
)
from jaxfused.runtime.estimate import Estimate, Rule
from jaxfused.runtime.gate import takes_reference
from jaxfused.runtime.kernel_gradient import kernel_gradient
from jaxfused.runtime.promotion import accumulator_dtype, along_last_axis
from jaxfused.runtime.runner import ROWS, Axes, Results, Runner, batched_rows
from jaxfused.runtime.stated_gradient import stated_gradient

Reduction = Literal["mean", "sum", "none"]


@python_numbers
def softmax_cross_entropy(
    logits: jax.Array,
    labels: jax.Array,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int | None = None,
    weights: jax.Array | None = None,
    class_weights: jax.Array | None = None,
    logits_soft_cap: float | None = None,
    reduction: Reduction = "mean",
    cotangent: jax.Array | float | Literal["any"] | None = None,
    axis_name: Hashable | tuple[Hashable, ...] | None = None,
    implementation: dispatch.Implementation | None = None,
) -> jax.Array:
    r"""Cross-entropy of the softmax of logits, with its gradient in the same pass over them.

    .. math::
        z_{nv} &= \text{cap} \tanh(\text{logits}_{nv} / \text{cap}) \\
        \text{lse}_n &= \log \sum_v e^{z_{nv}} \\
        t_{nv} &= (1 - \text{label\_smoothing})\, q_{nv} + \text{label\_smoothing} / V \\
        \ell_n &= -\sum_v \omega_v t_{nv} (z_{nv} - \text{lse}_n)
                  + \text{z\_loss} \cdot \text{lse}_n^2

    where q is the distribution that the labels give, omega the class weights or 1, and z the logits
    themselves without a cap.
    Arithmetic is in float32 (float64 for float64 logits).

    Args:
      logits: [..., V], float32, bfloat16 or float16 (float64 with implementation "xla").
      labels: integers [...], one class a token; or soft labels [..., V] of a float dtype. Soft labels
        need not sum to 1, and get a gradient. A class outside 0 to V - 1 other than `ignore_index`
        makes the loss of its token NaN, and is an error where the host can see it.
      label_smoothing: the share of the target that is spread evenly over all classes, 0 to 1.
      z_loss: the weight of the squared lse, which keeps logits from drifting.
      ignore_index: tokens with this label have loss 0 and gradient 0, and do not count for the mean.
        For integer labels.
      weights: [...], multiply the losses; 0 and 1 make a mask. They get a gradient.
      class_weights: [V], of any float dtype: weigh each class's term of the target, so also what
        `label_smoothing` gives it, as torch does. They get a gradient. With smoothing or soft labels
        they take one more pass over the logits.
      logits_soft_cap: keeps the logits within (-cap, cap).
      reduction: "mean" (the sum of weighted losses over the sum of the weights of the tokens that
        count; 0 if that is 0), "sum" or "none". For a mean, the weight of a token with an integer label
        includes the label's class weight; that of one with soft labels does not. As in torch.
      cotangent: what the result will be multiplied by on its way to the scalar that is
        differentiated: 1 where it is that scalar or is added to it, the scale of a loss that is
        scaled, 1 / n under a `jax.lax.pmean` over n devices or a mean over n microbatches; a scalar,
        or of the result's shape. The forward writes the gradient for it, so that
        the logits are read once and not twice. Any other cotangent still gets its gradient, for one
        more pass. "any" says that it is not known, and keeps the logits for the backward. None is 1
        for a mean or a sum of float32 or bfloat16 logits, and "any" elsewhere: float16 cannot hold
        the gradients of an unscaled mean.
      axis_name: the mapped axis (or axes) of `jax.shard_map` or `jax.pmap` over which the classes are
        spread, as `jax.lax.psum` takes it: each device has the logits (and soft labels, and class
        weights) of its classes, in the order of `jax.lax.axis_index`, and all have the labels. The
        result is the same on all of them. Under `jax.jit` with sharded arrays leave it out.
      implementation: None for the fastest that can run, or "cuda", "xla".

    Returns:
      The loss in float32 (float64 for float64 logits): a scalar, or [...] for reduction "none".

    Raises:
      ValueError: shapes, dtypes or options do not fit, or the named implementation cannot run.

    Example:
      >>> import jax.numpy as jnp, jaxfused
      >>> logits = jnp.array([[0.0, 0.0], [9.0, -9.0], [0.0, 5.0]])
      >>> loss = jaxfused.softmax_cross_entropy(logits, jnp.array([0, -1, 0]), ignore_index=-1)
      >>> print(f"{loss:.3f}")
      2.850
      >>> jaxfused.softmax_cross_entropy(logits, jnp.array([0, 0, 1]), reduction="none").shape
      (3,)

    Forward-mode differentiation and gradients of gradients need `implementation="xla"`.

    Source: Szegedy et al., "Rethinking the Inception Architecture", 2015 (label smoothing),
    https://arxiv.org/abs/1512.00567; Chowdhery et al., "PaLM", 2022 (z-loss),
    https://arxiv.org/abs/2204.02311; Gemma Team, "Gemma 2", 2024 (soft cap),
    https://arxiv.org/abs/2408.00118
    """
    op = "softmax_cross_entropy"
    logits, labels, weights, class_weights = as_arrays(logits, labels, weights, class_weights)
    check_floating(op, dict(logits=logits, weights=weights, class_weights=class_weights))
    if logits.ndim == 0 or logits.shape[-1] == 0:
        raise ValueError(
            f"{op}: logits have shape {logits.shape}, but the last axis holds the classes;"
            " pass logits of shape [..., classes]."
        )
    options = Options(label_smoothing, z_loss, ignore_index, logits_soft_cap)
    labels = check_labels(op, labels, logits.shape, options)
    check_options(op, options, weights, logits.shape[:-1], reduction)
    check_class_weights(op, class_weights, logits.shape[-1])
    if axis_name is None:
        check_classes(op, labels, logits.shape[-1], ignore_index)
    expected = check_cotangent(op, cotangent, logits.dtype, reduction, logits.shape[:-1])
    refuse_pallas(op, implementation)
    device = dispatch.current_device(logits)
    is_reference = takes_reference(op, implementation, device, logits)
    run = None if is_reference else Runner(implementation, device)
    counts = counted(labels, options)
    if class_weights is not None:
        class_weights = class_weights.astype(accumulator_dtype(logits.dtype))
        of_labels = weights_of_labels(class_weights, labels, options, axis_name)
        if not is_one_term(labels, options):
            losses = weighed_losses(run, options, axis_name, logits, labels, class_weights)
            return reduce_losses(losses, counts, weights, reduction, of_labels)
        weights = times(weights, of_labels)
    if axis_name is not None:
        statistics = _statistics_over_shards(run, options, axis_name, logits, labels)
        return reduce_losses(losses_of(statistics, counts, options), counts, weights, reduction)
    if run is None:
        return reduce_losses(_token_losses(options, logits, labels), counts, weights, reduction)
    classes, soft = split_labels(labels, logits.shape[-1], options)
    if expected is None:
        losses = losses_of(
            _aligned_statistics(run, options, logits, classes, soft), counts, options
        )
        return reduce_losses(losses, counts, weights, reduction)
    # JAX computes each loss's cotangent like this, so that the expected one matches to the bit.
    shares, total = shares_of(counts, weights, reduction)
    coefficients = jnp.asarray(expected / total, jnp.float32) * shares
    losses = _losses_ahead(
        run, options, *_aligned(logits, classes, soft, lax.stop_gradient(coefficients))
    )
    return reduce_losses(losses, counts, weights, reduction)


def check_labels(op: str, labels: jax.Array, shape: tuple[int, ...], options: Options) -> jax.Array:
    """Returns labels that fit logits of `shape`, in a dtype that holds any class and `ignore_index`."""
    if is_soft(labels):
        check_shape(op, "labels", labels, shape, f"soft labels go with logits of shape {shape}")
        if options.ignore_index is not None:
            raise ValueError(
                f"{op}: ignore_index={options.ignore_index} was passed with soft labels, which have"
                " no class to compare with it; pass weights that are 0 where a token is ignored."
            )
        return labels
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ValueError(
            f"{op}: labels have dtype {labels.dtype}, but they are classes or a distribution over"
            " them; pass integers or floats."
        )
    rule = f"there is one class for each token of logits of shape {shape}"
    check_shape(op, "labels", labels, shape[:-1], rule)
    return as_classes(op, labels, options.ignore_index)


def check_options(
    op: str,
    options: Options,
    weights: jax.Array | None,
    leading: tuple[int, ...],
    reduction: str,
) -> None:
    """Checks the options of a cross-entropy whose tokens have the axes `leading`."""
    check_shape(op, "weights", weights, leading, "there is one weight for each token")
    check_constant(op, "label_smoothing", options.label_smoothing)
    check_finite(op, "z_loss", options.z_loss)
    if not 0.0 <= options.label_smoothing <= 1.0:
        raise ValueError(
            f"{op}: label_smoothing is {options.label_smoothing}, but it is a share;"
            " pass a number from 0 to 1."
        )
    check_soft_cap(op, options.logits_soft_cap)
    check_reduction(op, reduction)


def check_class_weights(op: str, class_weights: jax.Array | None, features: int) -> None:
    """Checks that there is a weight for each class."""
    rule = f"there is one weight for each of {features} classes"
    check_shape(op, "class_weights", class_weights, (features,), rule)


def check_reduction(op: str, reduction: str) -> None:
    """Checks that `reduction` is one of those of losses."""
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(
            f"{op}: reduction={reduction!r} is not known; pass 'mean', 'sum' or 'none'."
        )


def check_cotangent(
    op: str,
    cotangent: jax.Array | float | str | None,
    dtype: Any,
    reduction: str,
    leading: tuple[int, ...],
) -> jax.Array | float | None:
    """Returns the expected cotangent of the result, or None if it is not known."""
    if isinstance(cotangent, str):
        if cotangent != "any":
            raise ValueError(
                f"{op}: cotangent={cotangent!r} is not known; pass a number, an array, 'any' or None."
            )
        return None
    if cotangent is None:
        return None if reduction == "none" or dtype == jnp.float16 else 1.0
    if not hasattr(cotangent, "shape"):
        check_finite(op, "cotangent", cotangent)
    cotangent = jnp.asarray(cotangent, jnp.float32)
    shape = leading if reduction == "none" else ()
    if cotangent.shape not in ((), shape):
        raise ValueError(
            f"{op}: cotangent has shape {cotangent.shape}, but the result has shape {shape};"
            f" pass a scalar or cotangent of shape {shape}."
        )
    return cotangent


def refuse_pallas(op: str, implementation: str | None) -> None:
    """Refuses the implementation "pallas", which the operator does not have."""
    if implementation == "pallas":
        raise ValueError(
            f"{op}: implementation='pallas' cannot run here: there is no Pallas kernel of {op}."
            " Pass implementation=None for the fastest one that can."
        )


def reduce_losses(
    losses: jax.Array,
    counts: jax.Array,
    weights: jax.Array | None,
    reduction: str,
    of_labels: jax.Array | None = None,
) -> jax.Array:
    """Returns the sum or the mean of the losses of the tokens that count, or all losses weighted.

    `of_labels` are class weights that are already in the losses, and still count for the mean.
    """
    shares, total = shares_of(counts, weights, reduction, losses.dtype)
    if of_labels is not None:
        _, total = shares_of(counts, times(weights, of_labels), reduction, losses.dtype)
    if weights is not None:
        losses = losses * shares
    if reduction == "none":
        return losses
    return jnp.sum(losses) / total if reduction == "mean" else jnp.sum(losses)


def shares_of(
    counts: jax.Array, weights: jax.Array | None, reduction: str, dtype: Any = jnp.float32
) -> tuple[jax.Array, jax.Array | float]:
    """Returns each loss's weight in the sum, and the divisor of the sum."""
    shares = counts.astype(dtype)
    if weights is not None:
        shares = shares * weights.astype(dtype)
    if reduction != "mean":
        return shares, 1.0
    total = jnp.sum(shares)
    return shares, jnp.where(total == 0.0, 1.0, total)


def split_labels(
    labels: jax.Array, features: int, options: Options
) -> tuple[jax.Array | None, jax.Array | None]:
    """Returns (classes, soft labels); one of them is None."""
    return (None, labels) if is_soft(labels) else (classes_of(labels, features, options), None)


def _joined(classes: jax.Array | None, soft: jax.Array | None) -> jax.Array:
    """Returns the one of classes and soft labels that is not None."""
    labels = classes if soft is None else soft
    assert labels is not None
    return labels


def _statistics_over_shards(
    run: Runner | None,
    options: Options,
    axis_name: Hashable | tuple[Hashable, ...],
    logits: jax.Array,
    labels: jax.Array,
) -> Statistics:
    """Returns the statistics of tokens whose classes are spread over the devices along `axis_name`."""
    shards = lax.psum(1, axis_name)
    if is_soft(labels):
        classes, soft = None, labels
    else:
        classes, soft = _classes_here(labels, logits.shape[-1], options, axis_name), None
    own = _aligned_statistics(run, options, logits, classes, soft)
    own_maximum = lax.stop_gradient(own.maximum)
    maximum = lax.pmax(own_maximum, axis_name)
    distance = own_maximum - maximum
    # A shard without a finite logit has distance -inf, and adds 0.
    picked = own.picked + jnp.where(own.total == 0.0, 0.0, own.total * distance)
    return Statistics(
        maximum,
        jnp.log(lax.psum(jnp.exp(own.log_sum + distance), axis_name)),
        lax.psum(picked, axis_name),
        lax.psum(own.mean + distance, axis_name) / shards,
        lax.psum(own.total, axis_name),
    )


def _classes_here(
    labels: jax.Array,
    features: int,
    options: Options,
    axis_name: Hashable | tuple[Hashable, ...] | None,
) -> jax.Array:
    """Returns `classes_of` for this device's classes, and `ELSEWHERE` for those of other devices."""
    if axis_name is None:
        return classes_of(labels, features, options)
    shards = lax.psum(1, axis_name)
    everywhere = classes_of(labels, features * shards, options)
    classes = everywhere - lax.axis_index(axis_name) * features
    is_here = (classes >= 0) & (classes < features)
    is_class = (everywhere >= 0) & (everywhere < features * shards)
    classes = jnp.where(is_here, classes, jnp.where(is_class, ELSEWHERE, features))
    return jnp.where(everywhere == IGNORED, IGNORED, classes)


# --- class weights --------------------------------------------------------------------------------


def is_one_term(labels: jax.Array, options: Options) -> bool:
    """Whether a token's loss is the term of one class, so that the class's weight is the token's."""
    return not (options.label_smoothing or options.z_loss or is_soft(labels))


def times(weights: jax.Array | None, others: jax.Array | None) -> jax.Array | None:
    """Returns the products of weights, where None stands for ones."""
    if weights is None or others is None:
        return others if weights is None else weights
    return weights * others


def weights_of_labels(
    class_weights: jax.Array,
    labels: jax.Array,
    options: Options,
    axis_name: Hashable | tuple[Hashable, ...] | None = None,
) -> jax.Array | None:
    """Returns the weight of each token's class; None for soft labels, 1 where there is no class."""
    if is_soft(labels):
        return None
    features = len(class_weights)
    classes = _classes_here(labels, features, options, axis_name)
    is_here = (classes >= 0) & (classes < features)
    # A sum over the classes works with any sharding of either, unlike a gather.
    axes = tuple(range(classes.ndim))
    every_class, class_weights = (
        jnp.expand_dims(vector, axes)
        for vector in (jnp.arange(features, dtype=classes.dtype), class_weights)
    )
    is_class = classes[..., None] == every_class
    picked = jnp.sum(jnp.where(is_class, class_weights, 0.0), axis=-1)
    if axis_name is not None:
        picked = lax.psum(jnp.where(is_here, picked, 0.0), axis_name)
    return jnp.where((classes == IGNORED) | (classes == features), 1.0, picked)


def weighed_losses(
    run: Runner | None,
    options: Options,
    axis_name: Hashable | tuple[Hashable, ...] | None,
    logits: jax.Array,
    labels: jax.Array,
    class_weights: jax.Array,
) -> jax.Array:
    """Returns the losses [...] with each class's term times its weight.

    They follow from the statistics that kernels compute for unweighted losses. A target that is spread
    over all classes needs one more weighted sum of the logits.
    """
    cap, smoothing = options.logits_soft_cap, options.label_smoothing
    terms = replace(options, label_smoothing=0.0, z_loss=0.0)
    counts = counted(labels, options)
    dtype = accumulator_dtype(logits.dtype)
    class_weights = class_weights.astype(dtype)
    features = logits.shape[-1] * (1 if axis_name is None else lax.psum(1, axis_name))

    def summed(x: jax.Array) -> jax.Array:
        return x if axis_name is None else lax.psum(x, axis_name)

    if soft := is_soft(labels):
        targets = (1.0 - smoothing) * labels.astype(dtype) + smoothing / features
        labels = along_last_axis(class_weights, targets) * targets
    if axis_name is not None:
        statistics = _statistics_over_shards(run, terms, axis_name, logits, labels)
    else:
        parts = split_labels(labels, logits.shape[-1], terms)
        statistics = _aligned_statistics(run, terms, logits, *parts)
    losses = losses_of(statistics, counts, terms)
    if not soft:
        of_labels = weights_of_labels(class_weights, labels, options, axis_name)
        assert of_labels is not None
        losses = (1.0 - smoothing) * of_labels * losses
    if smoothing and not soft:
        # A token that does not count has no gradient, whatever its logits are.
        values = capped(jnp.where(counts[..., None], logits, 0), cap)
        distances = values - lax.stop_gradient(statistics.maximum)[..., None]
        # A weight of 0 cancels even an infinite value.
        each = along_last_axis(class_weights, distances)
        distances = jnp.where((each == 0) & jnp.isinf(distances), 0.0, distances)
        picked = summed(jnp.sum(each * distances, axis=-1))
        uniform = summed(jnp.sum(class_weights)) * statistics.log_sum - picked
        losses = losses + smoothing / features * uniform
    if options.z_loss:
        losses = losses + options.z_loss * jnp.square(statistics.lse())
    return jnp.where(counts, losses, 0.0)


# --- gradient -------------------------------------------------------------------------------------


def _aligned(logits, classes, soft, coefficients=None):
    """Returns the operands with the sharding of the logits' rows, before a custom_vjp."""
    rows = sharding.leading_axes(logits.ndim - 1)
    return sharding.align(
        (logits, classes, soft, coefficients),
        operand_axes=(rows + "v", rows, rows + "v", rows),
        whole="v",
    )


def _aligned_statistics(run: Runner | None, options, logits, classes, soft) -> Statistics:
    """Returns the statistics of rows, for losses that JAX differentiates; by XLA if `run` is None."""
    logits, classes, soft, _ = _aligned(logits, classes, soft)
    if run is None:
        return _reference_statistics(options, logits, classes, soft)
    return _statistics(run, options, logits, classes, soft)


class _StatisticsResiduals(NamedTuple):
    logits: jax.Array
    classes: jax.Array | None
    soft: jax.Array | None
    statistics: Statistics


@functools.partial(kernel_gradient, nondiff_argnums=(0, 1), op="softmax_cross_entropy")
def _statistics(run: Runner, options: Options, logits, classes, soft) -> Statistics:
    _, statistics = run(_Forward(options), logits, classes, soft, None)
    return unpacked(statistics)


def _statistics_fwd(run: Runner, options: Options, logits, classes, soft):
    statistics = _statistics(run, options, logits, classes, soft)
    return statistics, _StatisticsResiduals(logits, classes, soft, statistics)


def pulls_on_rows(cotangents: Statistics, statistics: Statistics, columns: int) -> Pulls:
    """Returns the coefficients of the logits' gradient from the statistics' cotangents, sharded as rows.

    JAX's zeros for an unused statistic are replicated on all devices, but `jnp.stack` takes arrays of
    one sharding. So a zero that is sharded as the rows is added to them.
    """
    zero = (jnp.isnan(statistics.maximum) & False).astype(statistics.maximum.dtype)
    pulls = cotangents.log_sum, -cotangents.picked, -cotangents.mean / columns
    return Pulls(*(pull + zero for pull in pulls))


def _statistics_bwd(
    run: Runner, options: Options, saved: _StatisticsResiduals, cotangents: Statistics
):
    logits, classes, soft, statistics = saved
    pulls = pulls_on_rows(cotangents, statistics, logits.shape[-1])
    packed = (jnp.stack(statistics, axis=-1), jnp.stack(pulls, axis=-1))
    (dlogits,) = run(_Backward(options.logits_soft_cap), logits, classes, soft, *packed)
    return dlogits.astype(logits.dtype), None, _gradient_of_labels(options, saved, cotangents)


def _gradient_of_labels(
    options: Options, saved: _StatisticsResiduals, cotangents: Statistics
) -> jax.Array | None:
    if saved.soft is None:
        return None
    values = cross_entropy_xla.capped(saved.logits, options.logits_soft_cap)
    distances = values - saved.statistics.maximum[..., None]
    dsoft = cotangents.picked[..., None] * distances + cotangents.total[..., None]
    return dsoft.astype(saved.soft.dtype)


_statistics.defvjp(_statistics_fwd, _statistics_bwd)


class _AheadResiduals(NamedTuple):
    dlogits: jax.Array
    coefficients: jax.Array
    of_labels: tuple[jax.Array, jax.Array, Statistics] | None
    """Logits, soft labels and statistics, if soft labels have a gradient too."""


@functools.partial(kernel_gradient, nondiff_argnums=(0, 1), op="softmax_cross_entropy")
def _losses_ahead(run: Runner, options: Options, logits, classes, soft, coefficients):
    """Returns the losses [...], whose cotangents are expected to be `coefficients`."""
    del coefficients
    _, statistics = run(_Forward(options), logits, classes, soft, None)
    return losses_of_rows(statistics, classes, options)


def _losses_ahead_fwd(run: Runner, options: Options, logits, classes, soft, coefficients):
    dlogits, statistics = run(_Forward(options), logits, classes, soft, coefficients)
    of_labels = None if soft is None else (logits, soft, unpacked(statistics))
    losses = losses_of_rows(statistics, classes, options)
    return losses, _AheadResiduals(dlogits, coefficients, of_labels)


def _losses_ahead_bwd(run: Runner, options: Options, saved: _AheadResiduals, dlosses):
    (dlogits,) = run(Scale(), saved.dlogits, corrections(dlosses, saved.coefficients))
    dsoft = None
    if saved.of_labels is not None:
        dsoft = cross_entropy_xla.label_gradients(*saved.of_labels, dlosses, options)
    return dlogits, None, dsoft, None


_losses_ahead.defvjp(_losses_ahead_fwd, _losses_ahead_bwd)


def corrections(cotangents: jax.Array, expected: jax.Array) -> jax.Array:
    """Returns the ratio of actual to expected cotangents; exactly 1 if only rounding differs."""
    expects_none = expected == 0.0
    factors = jnp.where(expects_none, 1.0, cotangents / jnp.where(expects_none, 1.0, expected))
    return jnp.where(jnp.abs(factors - 1.0) < 2.0**-21, 1.0, factors)


def unpacked(statistics: jax.Array) -> Statistics:
    """Returns the statistics of rows from the array that kernels write."""
    return Statistics(*jnp.unstack(statistics, axis=-1))


def losses_of_rows(statistics: jax.Array, classes: jax.Array | None, options: Options) -> jax.Array:
    """Returns the losses of rows, from their statistics in one array."""
    counts = jnp.ones(statistics.shape[:-1], bool) if classes is None else classes != IGNORED
    return losses_of(unpacked(statistics), counts, options)


# --- gradient of the reference --------------------------------------------------------------------


@functools.partial(stated_gradient, nondiff_argnums=(0,))
def _reference_statistics(options: Options, logits, classes, soft) -> Statistics:
    return cross_entropy_xla.row_statistics(logits, _joined(classes, soft), options)


def _reference_statistics_fwd(options: Options, logits, classes, soft):
    statistics = cross_entropy_xla.row_statistics(logits, _joined(classes, soft), options)
    return statistics, _StatisticsResiduals(logits, classes, soft, statistics)


def _reference_statistics_bwd(
    options: Options, saved: _StatisticsResiduals, cotangents: Statistics
):
    logits, statistics = saved.logits, saved.statistics
    dlogits = cross_entropy_xla.row_gradients(
        logits,
        _joined(saved.classes, saved.soft),
        statistics,
        pulls_on_rows(cotangents, statistics, logits.shape[-1]),
        options.logits_soft_cap,
    )
    return dlogits.astype(logits.dtype), None, _gradient_of_labels(options, saved, cotangents)


_reference_statistics.defvjp(_reference_statistics_fwd, _reference_statistics_bwd)


class _Residuals(NamedTuple):
    logits: jax.Array
    labels: jax.Array
    statistics: Statistics


@functools.partial(stated_gradient, nondiff_argnums=(0,))
def _token_losses(options: Options, logits, labels):
    return cross_entropy_xla.token_losses(logits, labels, options)[0]


def _token_losses_fwd(options: Options, logits, labels):
    losses, statistics = cross_entropy_xla.token_losses(logits, labels, options)
    return losses, _Residuals(logits, labels, statistics)


def _token_losses_bwd(options: Options, saved: _Residuals, dlosses):
    args = (*saved, dlosses, options)
    dlogits = cross_entropy_xla.token_gradients(*args).astype(saved.logits.dtype)
    soft = is_soft(saved.labels)
    return dlogits, cross_entropy_xla.label_gradients(*args) if soft else None


_token_losses.defvjp(_token_losses_fwd, _token_losses_bwd)


# --- kernels --------------------------------------------------------------------------------------

_SHORT_ROW_BYTES = 512
"""Bytes of a row below which XLA's program is faster, in which a thread has several rows."""
_FEW_BYTES = 2**22
"""Bytes of all logits below which small kernels around ours cost more than passes over the logits."""


def _estimate(kernel, device, able, logits, *others) -> Estimate:
    """Implements `HasEstimate.estimate` for the logits [N, V] of all stages."""
    del kernel, device, able, others
    rows, features = logits.shape
    row_bytes = features * logits.dtype.itemsize
    if row_bytes < _SHORT_ROW_BYTES:
        return Rule(("xla",), f"rows of less than {_SHORT_ROW_BYTES} bytes are faster in XLA")
    if rows * row_bytes < _FEW_BYTES:
        return Rule(("xla",), f"logits of less than {_FEW_BYTES} bytes are faster in XLA")
    return None


@dataclass(frozen=True)
class _Forward:
    """Computes (dlogits, statistics [N, 5]) from logits [N, V], classes or soft labels, coefficients.

    The gradient is that of the sum of coefficients * losses; without coefficients there is none.
    """

    options: Options

    @property
    def name(self) -> str:
        return "softmax_cross_entropy forward"

    def axes(self, logits, classes, soft, coefficients) -> Axes:
        row = ROWS + "v"
        return Axes(
            (row, ROWS, row, ROWS),
            (None if coefficients is None else row, ROWS + "s"),
            whole="vs",
        )

    def why_not(self, device, logits, classes, soft, coefficients) -> Mapping[str, str | None]:
        return _why_not(device, logits, soft)

    def run(self, implementation, device, logits, classes, soft, coefficients) -> Results:
        options = self.options
        if implementation == "cuda":
            return cross_entropy_cuda.forward(
                logits,
                classes,
                soft,
                coefficients,
                label_smoothing=options.label_smoothing,
                z_loss=options.z_loss,
                soft_cap=options.logits_soft_cap,
            )
        labels = _joined(classes, soft)
        statistics = cross_entropy_xla.row_statistics(logits, labels, options)
        packed = jnp.stack(statistics, axis=-1)
        if coefficients is None:
            return None, packed
        features, cap = logits.shape[-1], options.logits_soft_cap
        pulls = cross_entropy_xla.pulls_of(statistics, coefficients, features, options)
        dlogits = cross_entropy_xla.row_gradients(logits, labels, statistics, pulls, cap)
        return dlogits.astype(logits.dtype), packed

    estimate = _estimate
    batched = batched_rows


@dataclass(frozen=True)
class _Backward:
    """Computes (dlogits,) from logits [N, V], classes or soft labels, statistics, `Pulls` [N, 3]."""

    soft_cap: float | None

    @property
    def name(self) -> str:
        return "softmax_cross_entropy backward"

    def axes(self, logits, classes, soft, statistics, pulls) -> Axes:
        row = ROWS + "v"
        return Axes((row, ROWS, row, ROWS + "s", ROWS + "p"), (row,), whole="vsp")

    def why_not(self, device, logits, classes, soft, statistics, pulls) -> Mapping[str, str | None]:
        return _why_not(device, logits, soft)

    def run(self, implementation, device, logits, classes, soft, statistics, pulls) -> Results:
        if implementation == "cuda":
            dlogits = cross_entropy_cuda.backward(
                logits, classes, soft, statistics, pulls, soft_cap=self.soft_cap
            )
            return (dlogits,)
        dlogits = cross_entropy_xla.row_gradients(
            logits,
            _joined(classes, soft),
            unpacked(statistics),
            Pulls(*jnp.unstack(pulls, axis=-1)),
            self.soft_cap,
        )
        return (dlogits.astype(logits.dtype),)

    estimate = _estimate
    batched = batched_rows


@dataclass(frozen=True)
class Scale:
    """Computes (x * factors,) of x [N, V], factors [N] in place, without reading x if all are 1."""

    @property
    def name(self) -> str:
        return "softmax_cross_entropy scale"

    def axes(self, x, factors) -> Axes:
        return Axes((ROWS + "v", ROWS), (ROWS + "v",), whole="v")

    def why_not(self, device, x, factors) -> Mapping[str, str | None]:
        return _why_not(device, x, None)

    def run(self, implementation, device, x, factors) -> Results:
        if implementation == "cuda":
            return (cross_entropy_cuda.scale_rows(x, factors),)
        return ((x * factors[:, None]).astype(x.dtype),)

    estimate = _estimate
    batched = batched_rows


def _why_not(device, logits, soft) -> dict[str, str | None]:
    """Returns why each implementation cannot run logits [N, V], forward or backward."""
    rows, features = logits.shape
    reason = cross_entropy_cuda.why_unsupported(
        compute_capability=device.compute_capability,
        rows=rows,
        features=features,
        dtype=logits.dtype,
        soft_dtype=None if soft is None else soft.dtype,
    )
    return {"cuda": reason, "xla": None}
