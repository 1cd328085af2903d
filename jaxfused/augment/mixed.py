"""Mixes each image of a batch with the image before it."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxfused.augment.batch import Batch
from jaxfused.augment.transform import Drawn, Mixing
from jaxfused.ops.augment import image_pass_xla
from jaxfused.runtime.checks import as_axis_name


def mixed(
    part: Mixing, drawn: Drawn, batch: Batch, frames: int | None, axis_name: Any, dtype: Any
) -> Batch:
    """Returns the batch after one mixing part; the frames of a video share their image's draws.

    `axis_name` names the mapped axes over which the batch is split, or is None.

    Raises:
      ValueError: the batch has an array that cannot be mixed, or no such axis is mapped.
    """
    op = type(part).__name__
    as_axis_name(op, "axis_name", axis_name, bound=True)
    if batch.boxes is not None or (batch.masks is not None and not part.cuts):
        what = "boxes" if batch.boxes is not None else "masks"
        raise ValueError(
            f"{op}: the batch has {what}, which it cannot mix; leave them or {op} out."
        )
    step = 1 if frames is None else frames
    x = image_pass_xla.wide(batch.images)
    shares, own = jax.vmap(lambda values: part.shares(values, (x.shape[1], x.shape[2])))(
        drawn.values
    )
    on = drawn.on.reshape(-1, *[1] * (shares.ndim - 1))
    shares = jnp.where(on, shares, 1).astype(x.dtype)
    shares = shares.reshape(*shares.shape, *[1] * (4 - shares.ndim))
    images = shares * x + (1 - shares) * before(x, step, axis_name)
    batch = batch._replace(images=image_pass_xla.narrow(images, dtype))
    if batch.masks is not None:
        keeps = (shares[..., 0] > 0.5).reshape(*shares.shape[:3], *[1] * (batch.masks.ndim - 3))
        masks = jnp.where(keeps, batch.masks, before(batch.masks, step, axis_name))
        batch = batch._replace(masks=masks)
    if batch.labels is not None:
        labels = _weights(op, batch.labels, part.num_classes)
        share = jnp.where(drawn.on, own, 1)[::step, None].astype(labels.dtype)
        partners = before(labels, 1, axis_name)
        batch = batch._replace(labels=share * labels + (1 - share) * partners)
    return batch


def _weights(op: str, labels: jax.Array, num_classes: int | None) -> jax.Array:
    """Returns labels, class numbers [B] or weights [B, K], as weights [B, K] of K classes."""
    if labels.ndim == 2:
        floating = jnp.issubdtype(labels.dtype, jnp.floating)
        return labels if floating else labels.astype(jnp.float32)
    if num_classes is None:
        raise ValueError(
            f"{op}: labels are whole numbers, whose mixtures are weights; pass num_classes, or labels"
            " [B, K]."
        )
    # `one_hot` compares classes in the dtype of the labels, which may be too narrow for
    # `num_classes`.
    if labels.dtype.itemsize < 4:
        labels = labels.astype(jnp.int32)
    return jax.nn.one_hot(labels, num_classes, dtype=jnp.float32)


def before(x: jax.Array, step: int, axis_name: Any) -> jax.Array:
    """Returns the array rolled by `step` entries along its first axis, across devices too."""
    if axis_name is None:
        return jnp.roll(x, step, 0)
    devices = jax.lax.axis_size(axis_name)
    around = [(i, (i + 1) % devices) for i in range(devices)]
    first = jax.lax.ppermute(x[-step:], axis_name, around)
    return jnp.concatenate([first, x[:-step]], 0)
