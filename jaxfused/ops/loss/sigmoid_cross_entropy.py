"""sigmoid_cross_entropy: validation and reduction. XLA fuses it into one kernel in each direction."""

import jax
import jax.numpy as jnp

from jaxfused import dispatch
from jaxfused.ops.loss import sigmoid_cross_entropy_xla
from jaxfused.ops.loss.label_values import as_classes, check_shares
from jaxfused.ops.loss.reduction import Reduction, check_reduction, reduce_losses
from jaxfused.ops.loss.sigmoid_cross_entropy_xla import Options
from jaxfused.runtime import sharding
from jaxfused.runtime.checks import (
    as_arrays,
    check_constant,
    check_finite,
    check_floating,
    check_shape,
    python_numbers,
)
from jaxfused.runtime.gate import reference_only


@python_numbers
def sigmoid_cross_entropy(
    logits: jax.Array,
    labels: jax.Array,
    *,
    label_smoothing: float = 0.0,
    focal_gamma: float = 0.0,
    focal_alpha: float | None = None,
    ignore_index: int | None = None,
    weights: jax.Array | None = None,
    reduction: Reduction = "mean",
    implementation: dispatch.Implementation | None = None,
) -> jax.Array:
    r"""Cross-entropy of independent yes-or-no predictions, or their focal loss.

    .. math::
        p_i &= \text{sigmoid}(\text{logits}_i) \\
        t_i &= (1 - \text{label\_smoothing}) \, \text{labels}_i + \text{label\_smoothing} / 2 \\
        m_i &= p_i (1 - t_i) + (1 - p_i) t_i \\
        \ell_i &= -m_i^{\text{focal\_gamma}} \bigl(t_i \log p_i + (1 - t_i) \log (1 - p_i)\bigr)

    where m is how far the prediction misses. With `focal_alpha`, the loss is multiplied by
    focal_alpha t + (1 - focal_alpha) (1 - t). Arithmetic is in float32 (float64 for float64 logits).

    Args:
      logits: [...], any float dtype.
      labels: [...], bool, integers 0 and 1, or floats from 0 to 1, which get a gradient. Others, such
        as 255, are an error where the host can see them, and make the loss NaN elsewhere.
      label_smoothing: the fraction of each label that is replaced by 1/2, 0 to 1.
      focal_gamma: makes predictions that are right count less; 0 for the cross-entropy.
      focal_alpha: the weight of positive labels against that of negative ones; None for no weights.
      ignore_index: predictions with this label have loss 0 and gradient 0, and do not count for the
        mean. For integer labels.
      weights: [...], multiply the losses; they get a gradient.
      reduction: "mean" (the sum of weighted losses over the sum of the weights of those not ignored;
        0 if that is 0), "sum" or "none".
      implementation: None or "xla".

    Returns:
      The loss in float32 (float64 for float64 logits): a scalar, or [...] for reduction "none".

    Raises:
      ValueError: shapes, dtypes or options do not fit, or the named implementation cannot run.

    Example:
      >>> import jax.numpy as jnp, jaxfused
      >>> logits, labels = jnp.array([2.0, -1.0, 0.0]), jnp.array([1, 0, -1])
      >>> loss = jaxfused.sigmoid_cross_entropy(logits, labels, ignore_index=-1)
      >>> print(f"{loss:.3f}")
      0.220
      >>> focal = jaxfused.sigmoid_cross_entropy(logits, labels, ignore_index=-1, focal_gamma=2.0)
      >>> print(f"{focal:.3f}")
      0.012

    Source: Lin et al., "Focal Loss for Dense Object Detection", 2017,
    https://arxiv.org/abs/1708.02002
    """
    op = "sigmoid_cross_entropy"
    logits, labels, weights = as_arrays(logits, labels, weights)
    check_floating(op, dict(logits=logits, weights=weights))
    rule = f"logits have shape {logits.shape}"
    check_shape(op, "labels", labels, logits.shape, rule)
    check_shape(op, "weights", weights, logits.shape, rule)
    logits, labels, weights = sharding.align(  # type: ignore[assignment]
        (logits, labels, weights), operand_axes=(sharding.leading_axes(logits.ndim),) * 3
    )
    _check_options(op, label_smoothing, focal_gamma, focal_alpha)
    check_reduction(op, reduction)
    integers = jnp.issubdtype(labels.dtype, jnp.integer)
    if ignore_index is not None and not integers:
        raise ValueError(
            f"{op}: ignore_index={ignore_index} was passed with labels of dtype {labels.dtype};"
            " pass integer labels, or weights that are 0 where a prediction is ignored."
        )
    check_shares(op, labels, ignore_index)
    reference_only(op, implementation, logits)
    counts = jnp.ones(labels.shape, bool)
    if ignore_index is not None:
        counts = as_classes(op, labels, ignore_index) != ignore_index
        # A label that does not count gives no gradient, even where its logit is NaN.
        logits, labels = jnp.where(counts, logits, 0), jnp.where(counts, labels, 0)
    options = Options(label_smoothing, focal_gamma, focal_alpha)
    losses = sigmoid_cross_entropy_xla.losses(logits, labels, options)
    if ignore_index is not None:
        losses = jnp.where(counts, losses, 0.0)
    return reduce_losses(losses, counts, weights, reduction)


def _check_options(
    op: str, label_smoothing: float, focal_gamma: float, focal_alpha: float | None
) -> None:
    shares = dict(label_smoothing=label_smoothing)
    if focal_alpha is not None:
        shares["focal_alpha"] = focal_alpha
    for name, value in shares.items():
        check_constant(op, name, value)
        if not 0.0 <= value <= 1.0:
            raise ValueError(
                f"{op}: {name} is {value}, but it is a fraction; pass a number from 0 to 1."
            )
    check_finite(op, "focal_gamma", focal_gamma)
    if focal_gamma < 0.0:
        raise ValueError(f"{op}: focal_gamma is {focal_gamma}; pass a number that is not negative.")
