"""The checks that operators make of their arguments, worded once each: rule, value, remedy."""

import math
from collections.abc import Mapping
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp

from jaxfused.semantics.activation import ACTIVATIONS


def as_arrays(*operands: Any) -> tuple[Any, ...]:
    """The operands as arrays of JAX, of NumPy's and of what has `__jax_array__`, as nnx.Param does.

    Each on its own: a parameter of Flax is a pytree, of which `jax.tree.map` gives a parameter back.
    """
    return tuple(None if operand is None else jnp.asarray(operand) for operand in operands)


def check_floating(op: str, arrays: Mapping[str, jax.Array | None]) -> None:
    """Checks that every array that is given has a floating-point dtype."""
    for name, array in arrays.items():
        if array is not None and not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(
                f"{op}: {name} has dtype {array.dtype}, but {op} takes a floating-point {name};"
                f" pass {name}.astype(jnp.float32)."
            )


def check_images(op: str, x: jax.Array) -> None:
    """Checks that x is [B, *spatial, C], of which the batch alone may be empty."""
    if x.ndim < 3 or 0 in x.shape[1:]:
        raise ValueError(
            f"{op}: x has shape {x.shape}, but it needs a batch axis, a spatial axis and at least one"
            " channel; pass x of shape [batch, ..., channels]."
        )


def check_shape(
    op: str, name: str, array: jax.Array | None, shape: tuple[int, ...], rule: str
) -> None:
    """Checks that `array`, if given, has this shape; `rule` says what the shape follows from."""
    if array is not None and array.shape != shape:
        raise ValueError(
            f"{op}: {name} has shape {array.shape}, but {rule}; pass {name} of shape {shape}."
        )


def check_activation(op: str, activation: str | None, name: str = "activation") -> None:
    """Checks that `activation` is None or the name of an activation."""
    if activation is not None and activation not in ACTIVATIONS:
        names = ", ".join(repr(n) for n in ACTIVATIONS)
        raise ValueError(f"{op}: {name}={activation!r} is not known; pass None or one of {names}.")


def check_constant(op: str, name: str, value: object) -> None:
    """Checks that `value` is a Python number, because a kernel is compiled for it."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(
            f"{op}: {name} is {value!r}, but it is a constant of the kernel; pass a Python float."
        )


def check_soft_cap(op: str, cap: Any) -> None:
    """Checks that `cap`, if given, is a finite number above 0, below which logits can be kept."""
    if cap is None:
        return
    check_constant(op, "logits_soft_cap", cap)
    if not 0.0 < cap < math.inf:
        raise ValueError(
            f"{op}: logits_soft_cap is {cap}, but logits are kept below it; pass a finite number"
            " greater than 0, or None for no cap."
        )


def check_count(op: str, name: str, value: object) -> None:
    """Checks that `value` is a whole number, 1 or more."""
    if not isinstance(value, Integral) or int(value) < 1:
        raise ValueError(
            f"{op}: {name} is {value!r}, but it counts something; pass an int of 1 or more."
        )
