"""segmentation_loss: validation, choice of implementation, gradient.

The loss of an image is computed from a few sums over its pixels. Kernels compute the sums, and the
gradient to the logits from the sums' cotangents; JAX does the rest. For the mean or sum of
many masks' losses, one kernel computes losses and gradient.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxfused import dispatch
from jaxfused.ops.loss import segmentation_loss_cuda, segmentation_loss_xla
from jaxfused.ops.loss.cross_entropy_checks import refuse_pallas
from jaxfused.ops.loss.label_values import as_classes, check_classes, check_shares, refuse_one_hot
from jaxfused.ops.loss.reduction import Reduction, check_reduction
from jaxfused.ops.loss.segmentation_loss_xla import LossOptions, PixelOptions, Sums
from jaxfused.runtime import resharding, sharding
from jaxfused.runtime.checks import (
    as_arrays,
    check_finite,
    check_floating,
    check_shape,
    python_numbers,
)
from jaxfused.runtime.estimate import kernels_first
from jaxfused.runtime.gate import takes_reference
from jaxfused.runtime.kernel_gradient import kernel_gradient
from jaxfused.runtime.runner import Axes, Results, Runner
from jaxfused.runtime.vmap import merged_images, unmerged_images


@python_numbers
def segmentation_loss(
    logits: jax.Array,
    labels: jax.Array,
    *,
    cross_entropy_weight: float = 1.0,
    dice_weight: float = 1.0,
    smooth: float = 1.0,
    tversky_alpha: float = 0.5,
    tversky_beta: float = 0.5,
    focal_gamma: float = 0.0,
    ignore_index: int | None = None,
    weights: jax.Array | None = None,
    reduction: Reduction = "mean",
    implementation: dispatch.Implementation | None = None,
) -> jax.Array:
    r"""Cross-entropy plus soft Dice loss of images, as segmentation networks are trained with.

    .. math::
        \text{hits}_{bc} &= 2 \sum_i w_{bi} p_{bic} t_{bic} \\
        \text{dice}_{bc} &= \frac{\text{hits}_{bc} + \text{smooth}}
            {\text{hits}_{bc} + 2 \alpha \sum_i w_{bi} p_{bic} (1 - t_{bic})
            + 2 \beta \sum_i w_{bi} (1 - p_{bic}) t_{bic} + \text{smooth}} \\
        \text{loss}_b &= \text{cross\_entropy\_weight} \cdot
            \frac{\sum_i w_{bi} \ell_{bi}}{\sum_i w_{bi}}
            + \text{dice\_weight} \cdot (1 - \operatorname{mean}_c \text{dice}_{bc})

    over the pixels i of image b, with p the softmax of the logits (their sigmoid where there is one
    class), t the label as 0 or 1 and l the pixel's cross-entropy, times
    (1 - p of its own class)^focal_gamma. Arithmetic is in float32 (float64 for float64 logits).

    Args:
      logits: [B, ..., C] for C classes, of which the background is one; or [B, ...] for a binary
        mask. float32, bfloat16 or float16 (float64 with implementation "xla").
      labels: [B, ...]. Classes: integers, where one outside 0 to C - 1 other than `ignore_index`
        makes the loss of its image NaN. Binary: bool, integers 0 and 1, or floats from 0 to 1; others,
        such as a mask's 255, make the loss NaN too. What the host can see of it (arrays of NumPy, or on
        a CPU outside of `jax.jit`) is an error. Classes are not one-hot: pass `labels.argmax(-1)`.
      cross_entropy_weight: of the cross-entropy in the sum.
      dice_weight: of the Dice loss in the sum.
      smooth: is added to numerator and denominator of Dice, so that a class that is neither in the
        labels nor predicted has Dice 1. Greater than 0.
      tversky_alpha: the weight of false positives. With alpha = beta = 0.5 the Tversky index is the Dice
        coefficient; a larger beta trades false positives for fewer misses.
      tversky_beta: the weight of false negatives.
      focal_gamma: exponent of the focal loss, in which well-classified pixels weigh less; 0 for the
        cross-entropy.
      ignore_index: pixels with this label enter neither cross-entropy nor Dice. For integer labels.
      weights: [B, ...], a weight for each pixel, in cross-entropy and Dice.
      reduction: over the images, "mean", "sum" or "none".
      implementation: None for the fastest that can run, or "cuda", "xla".

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
    sums below); Isensee et al., "nnU-Net", 2018, https://arxiv.org/abs/1809.10486 (the sum of both);
    Salehi et al., "Tversky loss function", 2017, https://arxiv.org/abs/1706.05721; Lin et al.,
    "Focal Loss for Dense Object Detection", 2017, https://arxiv.org/abs/1708.02002
    """
    op = "segmentation_loss"
    logits, labels, weights = as_arrays(logits, labels, weights)
    check_floating(op, dict(logits=logits, weights=weights))
    given, labels = labels, _checked_labels(logits, labels, ignore_index)
    check_shape(op, "weights", weights, labels.shape, f"labels have shape {labels.shape}")
    for name, value in dict(
        cross_entropy_weight=cross_entropy_weight,
        dice_weight=dice_weight,
        smooth=smooth,
        tversky_alpha=tversky_alpha,
        tversky_beta=tversky_beta,
        focal_gamma=focal_gamma,
    ).items():
        check_finite(op, name, value)
    for name, value in dict(
        tversky_alpha=tversky_alpha, tversky_beta=tversky_beta, focal_gamma=focal_gamma
    ).items():
        if value < 0.0:
            raise ValueError(f"{op}: {name} is {value}; pass a number that is not negative.")
    if smooth <= 0.0:
        raise ValueError(
            f"{op}: smooth is {smooth}, but it keeps Dice from dividing by zero;"
            " pass a number greater than 0."
        )
    check_reduction(op, reduction)
    refuse_pallas(op, implementation)
    options = PixelOptions(ignore_index, focal_gamma)
    loss = LossOptions(cross_entropy_weight, dice_weight, smooth, tversky_alpha, tversky_beta)
    device = dispatch.current_device(logits)
    if takes_reference(op, implementation, device, logits):
        sums = segmentation_loss_xla.image_sums(logits, labels, weights, options)
    else:
        # Kernels read uint8 labels as they are.
        fits = ignore_index is None or 0 <= ignore_index < 256
        kept = given if given.dtype == jnp.uint8 and fits else labels
        whole = resharding.split_by_batch((logits, kept, weights))
        images, truth, pixel_weights = sharding.align(_flat_images(*whole), operand_axes=_AXES)
        run = Runner(implementation, device)
        if reduction != "none" and _why_not_at_once(device, images, truth, weights) is None:
            scale = 1.0 / logits.shape[0] if reduction == "mean" else 1.0
            return _mask_loss(run, _Masks(options, loss, scale), images, truth)
        sums = _sums(run, options, images, truth, pixel_weights)
    losses = segmentation_loss_xla.losses_of(sums, loss)
    if reduction == "none":
        return losses
    # A batch without images has loss 0, as one without tokens has.
    return jnp.mean(losses) if reduction == "mean" and losses.shape[0] != 0 else jnp.sum(losses)


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
            " classes; pass integers, of one-hot labels labels.argmax(-1)."
        )
    if ignore_index is not None and not integers:
        raise ValueError(
            f"{op}: ignore_index={ignore_index} was passed with labels of dtype {labels.dtype};"
            " pass integer labels, or weights that are 0 where a pixel is ignored."
        )
    if binary:
        refuse_one_hot(op, labels)
        check_shares(op, labels, ignore_index)
    else:
        check_classes(op, labels, logits.shape[-1], ignore_index)
    return as_classes(op, labels, ignore_index) if integers else labels


def _flat_images(
    logits: jax.Array, labels: jax.Array, weights: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns logits [B, pixels, C], labels and weights [B, pixels] in dtypes that kernels take."""
    images, classes = labels.shape[0], 1 if logits.ndim == labels.ndim else logits.shape[-1]
    pixels = labels.size // max(images, 1)
    if labels.dtype not in _LABEL_DTYPES:
        integers = jnp.issubdtype(labels.dtype, jnp.integer)
        labels = labels.astype(jnp.int32 if integers else jnp.float32)
    if weights is not None:
        weights = weights.astype(jnp.float32).reshape(images, pixels)
    return logits.reshape(images, pixels, classes), labels.reshape(images, pixels), weights


# --- gradient -------------------------------------------------------------------------------------

_AXES = ("bnc", "bn", "bn")
_LABEL_DTYPES = (jnp.int32, jnp.uint8, jnp.bool, jnp.float32)


class _Residuals(NamedTuple):
    logits: jax.Array
    labels: jax.Array
    weights: jax.Array | None


@functools.partial(kernel_gradient, nondiff_argnums=(0, 1), op="segmentation_loss")
def _sums(run: Runner, options: PixelOptions, logits, labels, weights) -> Sums:
    """Returns the `Sums` over the N pixels of each image of logits [B, N, C]."""
    (packed,) = run(_Forward(options), logits, labels, weights)
    return _split(packed)


def _sums_fwd(run: Runner, options: PixelOptions, logits, labels, weights):
    return _sums(run, options, logits, labels, weights), _Residuals(logits, labels, weights)


def _sums_bwd(run: Runner, options: PixelOptions, saved: _Residuals, cotangents: Sums):
    packed = jnp.concatenate(
        [cotangents.total[:, None], cotangents.losses[:, None], *cotangents[2:]], axis=-1
    )
    (dlogits,) = run(_Backward(options), *saved, packed)
    dlabels = dweights = None
    if saved.weights is not None or jnp.issubdtype(saved.labels.dtype, jnp.floating):
        # Both gradients are computed even if only one is needed: XLA drops those that nothing uses.
        dlabels, dweights = _other_gradients(options, saved, cotangents)
    return dlogits, dlabels, dweights


def _other_gradients(options: PixelOptions, saved: _Residuals, cotangents: Sums):
    """Returns the gradients to labels of a float dtype and to the weights."""
    logits, labels, weights = saved
    soft = jnp.issubdtype(labels.dtype, jnp.floating)

    def sums(soft_labels, weights):
        of_pixels = logits[..., 0] if logits.shape[-1] == 1 else logits
        own_labels = labels if soft_labels is None else soft_labels
        return segmentation_loss_xla.image_sums(of_pixels, own_labels, weights, options)

    return jax.vjp(sums, labels if soft else None, weights)[1](cotangents)


_sums.defvjp(_sums_fwd, _sums_bwd)


@functools.partial(kernel_gradient, nondiff_argnums=(0, 1), op="segmentation_loss")
def _mask_loss(run: Runner, masks: "_Masks", logits, labels) -> jax.Array:
    """Returns `masks.scale` times the sum of the losses of binary masks, logits [B, pixels, 1].

    The forward computes the gradient for the cotangent 1. XLA drops the multiplication if the cotangent
    is 1.
    """
    sums = _sums(run, masks.options, logits, labels, None)
    return masks.scale * jnp.sum(segmentation_loss_xla.losses_of(sums, masks.loss))


def _mask_loss_fwd(run: Runner, masks: "_Masks", logits, labels):
    losses, dlogits = run(masks, logits, labels)
    return masks.scale * jnp.sum(losses), dlogits


def _mask_loss_bwd(run: Runner, masks: "_Masks", dlogits, dloss):
    return (dloss * dlogits.astype(dloss.dtype)).astype(dlogits.dtype), None


_mask_loss.defvjp(_mask_loss_fwd, _mask_loss_bwd)


# --- kernels --------------------------------------------------------------------------------------


_ONE_PASS = "a kernel reads the logits once for all terms of the loss"


@dataclass(frozen=True)
class _Forward:
    """Computes sums over pixels [B, 2 + 3 C], the fields of `Sums`, from logits [B, pixels, C]."""

    options: PixelOptions

    @property
    def name(self) -> str:
        return "segmentation_loss forward"

    def axes(self, logits, labels, weights) -> Axes:
        return Axes(_AXES, ("bs",), whole="cs")

    estimate = kernels_first(_ONE_PASS)

    def why_not(self, device, logits, labels, weights) -> Mapping[str, str | None]:
        return _why_not(device, logits)

    def run(self, implementation, device, logits, labels, weights) -> Results:
        if implementation == "cuda":
            sums = segmentation_loss_cuda.forward(
                logits,
                labels,
                weights,
                ignore_index=self.options.ignore_index,
                focal_gamma=self.options.focal_gamma,
                compute_capability=device.compute_capability,
                multiprocessors=device.multiprocessors,
            )
            return (sums,)
        return (_packed_sums(self.options, logits, labels, weights),)

    def batched(self, call, axis_size, in_batched, *operands) -> Results:
        return _batched_images(self, call, axis_size, in_batched, operands)


@dataclass(frozen=True)
class _Backward:
    """Computes (dlogits,) from logits [B, pixels, C] and the cotangents of the sums [B, 2 + 3 C]."""

    options: PixelOptions

    @property
    def name(self) -> str:
        return "segmentation_loss backward"

    def axes(self, logits, labels, weights, cotangents) -> Axes:
        return Axes((*_AXES, "bs"), ("bnc",), whole="cs")

    estimate = kernels_first(_ONE_PASS)

    def why_not(self, device, logits, labels, weights, cotangents) -> Mapping[str, str | None]:
        return _why_not(device, logits)

    def run(self, implementation, device, logits, labels, weights, cotangents) -> Results:
        if implementation == "cuda":
            dlogits = segmentation_loss_cuda.backward(
                logits,
                labels,
                weights,
                cotangents,
                ignore_index=self.options.ignore_index,
                focal_gamma=self.options.focal_gamma,
            )
            return (dlogits,)
        _, vjp = jax.vjp(lambda z: _packed_sums(self.options, z, labels, weights), logits)
        return vjp(cotangents)

    def batched(self, call, axis_size, in_batched, *operands) -> Results:
        return _batched_images(self, call, axis_size, in_batched, operands)


@dataclass(frozen=True)
class _Masks:
    """Computes (losses [B], dlogits) of binary masks, logits [B, pixels, 1], in one kernel.

    The gradient is that of `scale` times the sum of the losses.
    """

    options: PixelOptions
    loss: LossOptions
    scale: float

    @property
    def name(self) -> str:
        return "segmentation_loss masks"

    def axes(self, logits, labels) -> Axes:
        return Axes(_AXES[:2], ("b", "bnc"), whole="cn")

    estimate = kernels_first(_ONE_PASS)

    def why_not(self, device, logits, labels) -> Mapping[str, str | None]:
        return _why_not(device, logits)

    def run(self, implementation, device, logits, labels) -> Results:
        # A device's shard may have too few images for the kernel of losses and gradient, so the
        # shard's own number is checked.
        if implementation == "cuda" and _why_not_at_once(device, logits, labels, None) is None:
            return segmentation_loss_cuda.losses_and_gradient(
                logits,
                labels,
                ignore_index=self.options.ignore_index,
                focal_gamma=self.options.focal_gamma,
                constants=self.loss.constants,
                scale=self.scale,
            )
        (packed,) = _Forward(self.options).run(implementation, device, logits, labels, None)
        losses, vjp = jax.vjp(lambda s: _losses_of_packed(s, self.loss), packed)
        (cotangents,) = vjp(jnp.full_like(losses, self.scale))
        backward = _Backward(self.options)
        return losses, *backward.run(implementation, device, logits, labels, None, cotangents)

    def batched(self, call, axis_size, in_batched, *operands) -> Results:
        return _batched_images(self, call, axis_size, in_batched, operands)


def _why_not_at_once(device: dispatch.Device, logits, labels, weights) -> str | None:
    return segmentation_loss_cuda.why_not_at_once(
        compute_capability=device.compute_capability,
        multiprocessors=device.multiprocessors,
        images=logits.shape[0],
        classes=logits.shape[2],
        dtype=logits.dtype,
        labels_dtype=labels.dtype,
        weighted=weights is not None,
    )


def _split(packed: jax.Array) -> Sums:
    """Returns the fields of `Sums` from one array [B, 2 + 3 C]."""
    return Sums(packed[:, 0], packed[:, 1], *jnp.split(packed[:, 2:], 3, axis=-1))


def _losses_of_packed(packed: jax.Array, loss: LossOptions) -> jax.Array:
    return segmentation_loss_xla.losses_of(_split(packed), loss)


def _packed_sums(options: PixelOptions, logits, labels, weights) -> jax.Array:
    of_pixels = logits[..., 0] if logits.shape[-1] == 1 else logits
    labels = labels.astype(jnp.int32) if labels.dtype == jnp.uint8 else labels
    sums = segmentation_loss_xla.image_sums(of_pixels, labels, weights, options)
    return jnp.concatenate([sums.total[:, None], sums.losses[:, None], *sums[2:]], axis=-1)


def _why_not(device, logits) -> dict[str, str | None]:
    """Returns why each implementation cannot run logits [B, pixels, C], forward or backward."""
    reason = segmentation_loss_cuda.why_unsupported(
        compute_capability=device.compute_capability,
        images=logits.shape[0],
        pixels=logits.shape[1],
        classes=logits.shape[2],
        dtype=logits.dtype,
    )
    return {"cuda": reason, "xla": None}


def _batched_images(
    kernel: Any, call: Any, axis_size: int, in_batched: Any, operands: Any
) -> Results:
    """Applies `jax.vmap`: the entries of the batch become further images."""
    return unmerged_images(axis_size, call(kernel, *merged_images(axis_size, in_batched, operands)))
