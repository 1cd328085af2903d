"""Checks of label values: a mask of 0 and 255 is not valid, and neither is class 7 of 5.

Labels that are traced or on a GPU cannot be read before they are used, so that wrong ones give a loss of
NaN. For labels that the host can read at once, an error says what is wrong.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfused.ops.loss.segmentation_loss_xla import SHARE_TOLERANCE
from jaxfused.runtime.checks import readable_values
from jaxfused.runtime.promotion import common_dtype

_FEWEST_PIXELS = 16
"""Fewest pixels for which rows that add up to 1 count as one-hot labels, and not as a mask."""


def _seen(labels: jax.Array) -> np.ndarray | None:
    """Returns the labels' values as NumPy, or None if they are traced, on a GPU or empty."""
    values = readable_values(labels)
    return values if values is not None and values.size else None


def as_classes(op: str, labels: jax.Array, ignore_index: int | None) -> jax.Array:
    """Returns integer labels in a dtype that holds any class and `ignore_index`."""
    labels = labels.astype(common_dtype(labels.dtype, jnp.int32))
    limits = jnp.iinfo(labels.dtype)
    if ignore_index is not None and not limits.min <= ignore_index <= limits.max:
        raise ValueError(
            f"{op}: ignore_index is {ignore_index}, but labels of {labels.dtype} go from {limits.min}"
            f" to {limits.max}; pass one of them, or None."
        )
    return labels


def check_classes(op: str, labels: jax.Array, classes: Any, ignore_index: int | None) -> None:
    """Checks that integer labels, if they can be read, are classes or ignored."""
    values = _seen(labels) if jnp.issubdtype(labels.dtype, jnp.integer) else None
    if values is None or not isinstance(classes, int):
        return
    wrong = (values < 0) | (values >= classes)
    if ignore_index is not None:
        wrong &= values != ignore_index
    if wrong.any():
        ignored = "" if ignore_index is None else f" and ignore_index is {ignore_index}"
        raise ValueError(
            f"{op}: labels hold {values[wrong][0]}, but there are {classes} classes{ignored}; pass"
            f" classes from 0 to {classes - 1}, and what is to be left out as ignore_index."
        )


def check_shares(op: str, labels: jax.Array, ignore_index: int | None) -> None:
    """Checks that labels, if they can be read, are from 0 to 1 or ignored."""
    values = None if labels.dtype == jnp.bool_ else _seen(labels)
    if values is None:
        return
    values = values.astype(np.float64)
    wrong = (values < -SHARE_TOLERANCE) | (values > 1.0 + SHARE_TOLERANCE)
    if ignore_index is not None:
        wrong &= values != ignore_index
    if wrong.any():
        raise ValueError(
            f"{op}: labels hold {values[wrong][0]:g}, but they are shares from 0 to 1; pass bools, 0 and"
            " 1 (of a mask of 0 and 255, mask > 127), or what is to be left out as ignore_index."
        )


def refuse_one_hot(op: str, labels: jax.Array) -> None:
    """Checks that a mask [B, ..., C], if it can be read, is not one-hot classes."""
    values = _seen(labels) if labels.ndim >= 4 and labels.shape[-1] > 1 else None
    if values is None or values.size // values.shape[-1] < _FEWEST_PIXELS:
        return
    if np.isin(values, (0, 1)).all() and (np.sum(values, -1) == 1).all():
        raise ValueError(
            f"{op}: labels of shape {labels.shape} are one-hot, but with logits of the same shape they"
            " would be independent masks; pass classes, labels.argmax(-1)."
        )
