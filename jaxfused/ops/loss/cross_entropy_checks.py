"""Checks of the arguments of the softmax cross-entropies."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxfused.ops.loss.cross_entropy_xla import (
    Options,
    is_soft,
)
from jaxfused.ops.loss.label_values import as_classes
from jaxfused.ops.loss.reduction import check_reduction
from jaxfused.runtime.checks import (
    check_constant,
    check_finite,
    check_shape,
    check_soft_cap,
)


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
            f"{op}: label_smoothing is {options.label_smoothing}, but it is a fraction;"
            " pass a number from 0 to 1."
        )
    check_soft_cap(op, options.logits_soft_cap)
    check_reduction(op, reduction)


def check_class_weights(op: str, class_weights: jax.Array | None, features: int) -> None:
    """Checks that there is a weight for each class."""
    rule = f"there is one weight for each of {features} classes"
    check_shape(op, "class_weights", class_weights, (features,), rule)


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
