"""softmax_cross_entropy: validation, choice of implementation, class weights, sharded classes.

A row of logits is read once for its statistics, from which its loss follows. The gradient needs the
logits again, unless the cotangent of the loss is known in advance: then the forward's kernel writes the
gradient too, while the row is on chip.
"""

from collections.abc import Hashable
from dataclasses import replace
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from jaxfused import dispatch
from jaxfused.ops.loss.cross_entropy_checks import (
    check_class_weights,
    check_cotangent,
    check_labels,
    check_options,
    refuse_pallas,
)
from jaxfused.ops.loss.cross_entropy_gradient import (
    aligned,
    aligned_statistics,
    losses_ahead,
    reference_losses,
)
from jaxfused.ops.loss.cross_entropy_xla import (
    ELSEWHERE,
    IGNORED,
    Options,
    Statistics,
    capped,
    classes_of,
    counted,
    is_soft,
    losses_of,
)
from jaxfused.ops.loss.label_values import check_classes
from jaxfused.ops.loss.reduction import Reduction, reduce_losses, shares_of, times
from jaxfused.runtime import resharding
from jaxfused.runtime.checks import (
    as_arrays,
    check_floating,
    python_numbers,
)
from jaxfused.runtime.gate import takes_reference
from jaxfused.runtime.promotion import accumulator_dtype, along_last_axis
from jaxfused.runtime.runner import Runner


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
      label_smoothing: the fraction of the target that is spread evenly over all classes, 0 to 1.
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
        more pass. "any" says that it is not known, and saves the logits for the backward. None is 1
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
    if axis_name is None:
        classes, soft = (None, labels) if is_soft(labels) else (labels, None)
        logits, classes, soft, weights = aligned(logits, classes, soft, weights)
        labels = classes if soft is None else soft
    if class_weights is not None:
        [class_weights] = resharding.whole(class_weights)
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
        return reduce_losses(reference_losses(options, logits, labels), counts, weights, reduction)
    classes, soft = split_labels(labels, logits.shape[-1], options)
    if expected is None:
        losses = losses_of(aligned_statistics(run, options, logits, classes, soft), counts, options)
        return reduce_losses(losses, counts, weights, reduction)
    # The coefficients follow the formula of `reduce_losses`, so that the actual cotangents equal
    # the expected ones bit for bit.
    shares, total = shares_of(counts, weights, reduction)
    coefficients = jnp.asarray(expected / total, jnp.float32) * shares
    losses = losses_ahead(
        run, options, *aligned(logits, classes, soft, lax.stop_gradient(coefficients))
    )
    return reduce_losses(losses, counts, weights, reduction)


def split_labels(
    labels: jax.Array, features: int, options: Options
) -> tuple[jax.Array | None, jax.Array | None]:
    """Returns (classes, soft labels); one of them is None."""
    return (None, labels) if is_soft(labels) else (classes_of(labels, features, options), None)


def _statistics_over_shards(
    run: Runner | None,
    options: Options,
    axis_name: Hashable | tuple[Hashable, ...],
    logits: jax.Array,
    labels: jax.Array,
) -> Statistics:
    """Returns the statistics of tokens whose classes are sharded over the devices along `axis_name`."""
    shards = lax.psum(1, axis_name)
    if is_soft(labels):
        classes, soft = None, labels
    else:
        classes, soft = _classes_here(labels, logits.shape[-1], options, axis_name), None
    own = aligned_statistics(run, options, logits, classes, soft)
    own_maximum = lax.stop_gradient(own.maximum)
    maximum = lax.pmax(own_maximum, axis_name)
    distance = own_maximum - maximum
    # If a device's logits of a row are all -inf, its total is 0 and its distance -inf. Its term is
    # then 0, where their product would be NaN.
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
    """Returns labels as indices of this device's classes, and `ELSEWHERE` for other devices' classes."""
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
    """Returns whether a loss has one term, its label's, so that the class weight multiplies the loss."""
    return not (options.label_smoothing or options.z_loss or is_soft(labels))


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
    # A sum over one-hot classes works with any sharding of labels or weights, unlike a gather.
    axes = tuple(range(classes.ndim))
    every_class, class_weights = (
        jnp.expand_dims(vector, axes)
        for vector in (jnp.arange(features, dtype=classes.dtype), class_weights)
    )
    is_class = classes[..., None] == every_class
    picked = jnp.sum(jnp.where(is_class, class_weights, 0.0), axis=-1)
    if axis_name is not None:
        picked = lax.psum(jnp.where(is_here, picked, 0.0), axis_name)
        # `features` becomes the number of classes on all devices, so that every device decides
        # alike whether a label is a class.
        features *= lax.psum(1, axis_name)
        classes = classes_of(labels, features, options)
    return jnp.where((classes < 0) | (classes >= features), 1.0, picked)


def weighed_losses(
    run: Runner | None,
    options: Options,
    axis_name: Hashable | tuple[Hashable, ...] | None,
    logits: jax.Array,
    labels: jax.Array,
    class_weights: jax.Array,
) -> jax.Array:
    """Returns the losses [...], each class's term multiplied by its class weight.

    The losses follow from the statistics that kernels compute for unweighted losses. Label smoothing
    needs one more weighted sum over the logits.
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
        statistics = aligned_statistics(run, terms, logits, *parts)
    losses = losses_of(statistics, counts, terms)
    if not soft:
        of_labels = weights_of_labels(class_weights, labels, options, axis_name)
        assert of_labels is not None
        losses = (1.0 - smoothing) * of_labels * losses
    if smoothing and not soft:
        # A token that does not count has no gradient, even if its logits are NaN.
        values = capped(jnp.where(counts[..., None], logits, 0), cap)
        distances = values - lax.stop_gradient(statistics.maximum)[..., None]
        # A class weight of 0 gives a term of 0 even where the distance is infinite.
        each = along_last_axis(class_weights, distances)
        distances = jnp.where((each == 0) & jnp.isinf(distances), 0.0, distances)
        picked = summed(jnp.sum(each * distances, axis=-1))
        uniform = summed(jnp.sum(class_weights)) * statistics.log_sum - picked
        losses = losses + smoothing / features * uniform
    if options.z_loss:
        losses = losses + options.z_loss * jnp.square(statistics.lse())
    return jnp.where(counts, losses, 0.0)
