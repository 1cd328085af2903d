"""segmentation_loss: validation and choice of implementation."""

import jax
import jax.numpy as jnp

from jaxfused import dispatch, reference
from jaxfused.ops.cross_entropy import Reduction, check_reduction
from jaxfused.ops.kernel_call import reference_only
from jaxfused.ops.validation import check_constant, check_floating, check_shape
from jaxfused.reference.promotion import common_dtype


def segmentation_loss(
    logits: jax.Array,
    labels: jax.Array,
    *,
    cross_entropy_weight: float = 1.0,
    dice_weight: float = 1.0,
    smooth: float = 1.0,
    ignore_index: int | None = None,
    weights: jax.Array | None = None,
    reduction: Reduction = "mean",
    implementation: dispatch.Implementation | None = None,
) -> jax.Array:
    r"""Cross-entropy plus soft Dice loss of images, as segmentation networks are trained with.

    .. math::
        \text{dice}_{bc} &= \frac{2 \sum_i w_{bi} p_{bic} t_{bic} + \text{smooth}}
            {\sum_i w_{bi} (p_{bic} + t_{bic}) + \text{smooth}} \\
        \text{loss}_b &= \text{cross\_entropy\_weight} \cdot
            \frac{\sum_i w_{bi} \ell_{bi}}{\sum_i w_{bi}}
            + \text{dice\_weight} \cdot (1 - \operatorname{mean}_c \text{dice}_{bc})

    over the pixels i of image b, with p the softmax of the logits (their sigmoid where there is one
    class), t the label as 0 or 1 and l the pixel's cross-entropy. Arithmetic is in float32 (float64
    for float64 logits).

    Args:
      logits: [B, ..., C] for C classes, of which the background is one; or [B, ...] for a binary
        mask. float32, bfloat16 or float16 (float64 with implementation "xla").
      labels: [B, ...]. Classes: integers, where one outside 0 to C - 1 other than `ignore_index`
        makes the loss of its image NaN. Binary: bool, integers 0 and 1, or floats from 0 to 1.
      cross_entropy_weight: of the cross-entropy in the sum.
      dice_weight: of the Dice loss in the sum.
      smooth: is added above and below in Dice, so that a class which is neither there nor predicted
        counts as right. Greater than 0.
      ignore_index: pixels with this label enter neither part. For integer labels.
      weights: [B, ...], a weight for each pixel in both parts.
      reduction: over the images, "mean", "sum" or "none".
      implementation: None for the fastest that can run, or "pallas", "cuda", "xla".

    Returns:
      The loss in float32 (float64 for float64 logits): a scalar, or [B] for reduction "none". An
      image without a pixel that counts has loss 0.

    Raises:
      ValueError: shapes, dtypes or options do not fit, or the named implementation cannot run.

    Example:
      >>> import jax.numpy as jnp, jaxfused
      >>> mask = jnp.array([[[0, 1], [1, 0]]])
      >>> certain = jnp.where(mask == 1, 30.0, -30.0)
      >>> bool(jaxfused.segmentation_loss(certain, mask) < 1e-6)
      True
      >>> print(f"{jaxfused.segmentation_loss(jnp.zeros((1, 2, 2, 3)), mask):.3f}")
      1.597

    Source: Milletari et al., "V-Net", 2016, https://arxiv.org/abs/1606.04797 (Dice, here with plain
    sums below); Isensee et al., "nnU-Net", 2018, https://arxiv.org/abs/1809.10486 (the sum of both).
    """
    op = "segmentation_loss"
    logits, labels, weights = jax.tree.map(jnp.asarray, (logits, labels, weights))
    check_floating(op, dict(logits=logits, weights=weights))
    labels = _checked_labels(logits, labels, ignore_index)
    check_shape(op, "weights", weights, labels.shape, f"labels have shape {labels.shape}")
    for name, value in dict(
        cross_entropy_weight=cross_entropy_weight, dice_weight=dice_weight, smooth=smooth
    ).items():
        check_constant(op, name, value)
    if smooth <= 0.0:
        raise ValueError(
            f"{op}: smooth is {smooth}, but it keeps Dice from dividing by zero;"
            " pass a number greater than 0."
        )
    check_reduction(op, reduction)
    reference_only(op, implementation, logits)
    losses = reference.segmentation_loss.image_losses(
        logits,
        labels,
        weights,
        cross_entropy_weight=cross_entropy_weight,
        dice_weight=dice_weight,
        smooth=smooth,
        ignore_index=ignore_index,
    )
    if reduction == "none":
        return losses
    return jnp.mean(losses) if reduction == "mean" else jnp.sum(losses)


def _checked_labels(logits: jax.Array, labels: jax.Array, ignore_index: int | None) -> jax.Array:
    """Returns labels that fit the logits, in a dtype that holds any class and `ignore_index`."""
    op = "segmentation_loss"
    binary = logits.ndim == labels.ndim
    if (
        labels.ndim < 1
        or logits.shape[: labels.ndim] != labels.shape
        or (not binary and logits.ndim != labels.ndim + 1)
    ):
        raise ValueError(
            f"{op}: logits have shape {logits.shape} and labels {labels.shape}, but there is one"
            " label a pixel; pass labels [B, ...] with logits [B, ..., classes], or [B, ...] for a"
            " binary mask."
        )
    if not binary and logits.shape[-1] < 2:
        raise ValueError(
            f"{op}: logits have shape {logits.shape}, but a softmax needs two classes;"
            " pass logits[..., 0] for a binary mask."
        )
    integers = jnp.issubdtype(labels.dtype, jnp.integer)
    if not binary and not integers:
        raise ValueError(
            f"{op}: labels have dtype {labels.dtype}, but with logits [B, ..., classes] they are"
            " classes; pass integers."
        )
    if ignore_index is not None and not integers:
        raise ValueError(
            f"{op}: ignore_index={ignore_index} was passed with labels of dtype {labels.dtype};"
            " pass integer labels, or weights that are 0 where a pixel is ignored."
        )
    return labels.astype(common_dtype(labels.dtype, jnp.int32)) if integers else labels
