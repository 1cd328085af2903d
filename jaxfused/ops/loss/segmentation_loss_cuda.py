"""segmentation_loss by the CUDA kernels of ffi/loss/segmentation_loss.cu.

All functions take images: logits [B, N, C], labels int32, uint8, bool or float32 [B, N], and weights
float32 [B, N] or None. The sums, float32 [B, 2 + 3 C], are the fields of Sums in
ops/loss/segmentation_loss_xla.py in order. Masks have one class; one kernel computes losses and gradient
of many of them.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfused.runtime import cuda_library

MAX_CLASSES = 256
MAX_IMAGES = 65535
MAX_PIXELS = 2**30

_CLUSTER = 8
"""CTAs of a cluster that share an image of a binary mask and add up their sums, on GPUs with clusters.
"""
_FEW_CLASSES = 24
_PIXELS_OF_BLOCK = 1024


def why_unsupported(
    *,
    compute_capability: tuple[int, int] | None,
    images: int,
    pixels: int,
    classes: int,
    dtype: Any,
) -> str | None:
    """Returns None if forward and backward can run, else the reason."""
    if reason := cuda_library.why_unfit(compute_capability, dtype, whose="logits have"):
        return reason
    if not 1 <= classes <= MAX_CLASSES:
        return f"it takes 1 to {MAX_CLASSES} classes, and logits have {classes}"
    if images > MAX_IMAGES or pixels > MAX_PIXELS:
        return (
            f"it takes at most {MAX_IMAGES} images of {MAX_PIXELS} pixels, and logits have {images}"
            f" of {pixels}"
        )
    return cuda_library.why_unavailable()


def forward(
    logits: jax.Array,
    labels: jax.Array,
    weights: jax.Array | None,
    *,
    ignore_index: int | None,
    focal_gamma: float,
    compute_capability: tuple[int, int],
    multiprocessors: int,
) -> jax.Array:
    """Returns the sums of each image, added up in an order that depends only on shapes."""
    cuda_library.register()
    images, pixels, classes = logits.shape
    clustered = classes == 1 and _have_clusters(images, compute_capability, multiprocessors)
    # Thread blocks that an SM runs at a time, by the number of classes.
    resident = 2 if classes == 1 else 6 if 8 < classes <= _FEW_CLASSES else 8
    wanted = resident * multiprocessors // images
    blocks = 1 if clustered else max(1, min(wanted, -(-pixels // _PIXELS_OF_BLOCK)))
    partials = jax.ffi.ffi_call(
        "jaxfused_segmentation_forward",
        jax.ShapeDtypeStruct((images, blocks, 2 + 3 * classes), jnp.float32),
    )(
        logits,
        labels,
        _weights(logits, weights),
        **_attributes(ignore_index, focal_gamma),
        cluster=np.int64(_CLUSTER if clustered else 1),
    )
    return partials[:, 0] if blocks == 1 else jnp.sum(partials, axis=1)


def backward(
    logits: jax.Array,
    labels: jax.Array,
    weights: jax.Array | None,
    cotangents: jax.Array,
    *,
    ignore_index: int | None,
    focal_gamma: float,
) -> jax.Array:
    """Returns dlogits for the cotangents of the sums."""
    cuda_library.register()
    call = jax.ffi.ffi_call(
        "jaxfused_segmentation_backward", jax.ShapeDtypeStruct(logits.shape, logits.dtype)
    )
    return call(
        logits,
        labels,
        _weights(logits, weights),
        cotangents,
        **_attributes(ignore_index, focal_gamma),
    )


def why_not_at_once(
    *,
    compute_capability: tuple[int, int] | None,
    multiprocessors: int,
    images: int,
    classes: int,
    dtype: Any,
    labels_dtype: Any,
    weighted: bool,
) -> str | None:
    """Returns None if `losses_and_gradient` can run, else the reason."""
    if classes != 1:
        return f"only binary masks have losses and gradient in one kernel; logits have {classes} classes"
    if dtype == jnp.float16:
        return "a gradient in float16 is too small before it has been multiplied by its cotangent"
    if weighted or jnp.issubdtype(labels_dtype, jnp.floating):
        return "weights and labels of a float dtype may have gradients of their own"
    if not _have_clusters(images, compute_capability, multiprocessors):
        return f"{images} images in clusters of {_CLUSTER} blocks would leave the GPU idle"
    return None


def losses_and_gradient(
    logits: jax.Array,
    labels: jax.Array,
    *,
    ignore_index: int | None,
    focal_gamma: float,
    constants: Mapping[str, float],
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """Returns the losses [B] of masks, and dlogits of their sum times `scale`.

    `constants` has cross_entropy_weight, dice_weight, smooth, tversky_alpha, tversky_beta and
    tversky_rest.
    """
    cuda_library.register()
    call = jax.ffi.ffi_call(
        "jaxfused_segmentation_loss",
        (
            jax.ShapeDtypeStruct(logits.shape[:1], jnp.float32),
            jax.ShapeDtypeStruct(logits.shape, logits.dtype),
        ),
    )
    losses, dlogits = call(
        logits,
        labels,
        **_attributes(ignore_index, focal_gamma),
        **{name: np.float32(value) for name, value in constants.items()},
        scale=np.float32(scale),
    )
    return losses, dlogits


def _have_clusters(
    images: int, compute_capability: tuple[int, int] | None, multiprocessors: int
) -> bool:
    """Returns whether each image of a binary mask gets a cluster of CTAs."""
    clusters = compute_capability is not None and compute_capability >= (9, 0)
    return clusters and images * _CLUSTER >= multiprocessors


def _weights(logits: jax.Array, weights: jax.Array | None) -> jax.Array:
    """Returns the weights, or an array without elements if they are absent.

    It is `zeros_like` the logits because in a `jax.shard_map` all operands must vary over the same axes.
    """
    return jnp.zeros_like(logits, shape=(0,), dtype=jnp.float32) if weights is None else weights


def _attributes(ignore_index: int | None, focal_gamma: float) -> dict[str, Any]:
    return dict(
        ignores=np.bool_(ignore_index is not None),
        ignore_index=np.int64(ignore_index or 0),
        focal_gamma=np.float32(focal_gamma),
    )
