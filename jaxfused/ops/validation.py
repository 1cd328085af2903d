"""The checks that operators make of their arguments, worded once each: rule, value, remedy."""

import functools
import inspect
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jaxfused.semantics.activation import ACTIVATIONS


def as_arrays(*operands: Any) -> tuple[Any, ...]:
    """The operands as arrays of JAX, of NumPy's and of what has `__jax_array__`, as nnx.Param does.

    Each on its own: a parameter of Flax is a pytree, of which `jax.tree.map` gives a parameter back.
    """
    return tuple(None if operand is None else jnp.asarray(operand) for operand in operands)


def python_numbers[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Has a function take its numbers, those that are no operands, as Python's ints and floats.

    A config holds scalars of NumPy, and a shape's entries may be arrays: any of them whose value is
    known is taken. Which parameters are numbers, their annotations say.
    """
    kinds = _kinds({p.name: p.annotation for p in inspect.signature(function).parameters.values()})
    names = tuple(inspect.signature(function).parameters)
    op = function.__qualname__.partition(".")[0]

    @functools.wraps(function)
    def with_numbers(*args: P.args, **kwargs: P.kwargs) -> R:
        taken = [
            _as_number(op, name, value, kinds[name]) if name in kinds else value
            for name, value in zip(names, args, strict=False)
        ]
        for name in kinds.keys() & kwargs.keys():
            kwargs[name] = _as_number(op, name, kwargs[name], kinds[name])
        return function(*taken, *args[len(names) :], **kwargs)  # type: ignore[arg-type]

    return with_numbers


def python_number_fields(module: Any) -> Any:
    """The same of the fields of a module of Flax's linen."""
    kinds = _kinds({name: field.type for name, field in module.__dataclass_fields__.items()})
    finish = module.__post_init__

    @functools.wraps(finish)
    def with_numbers(self: Any) -> None:
        for name, kind in kinds.items():
            value = getattr(self, name)
            object.__setattr__(self, name, _as_number(type(self).__name__, name, value, kind))
        finish(self)

    module.__post_init__ = with_numbers
    return module


def _kinds(annotations: Mapping[str, Any]) -> dict[str, type[int] | type[float]]:
    """The parameters that are numbers, or sequences of them, and no arrays: int or float of each."""
    kinds: dict[str, type[int] | type[float]] = {}
    for name, annotation in annotations.items():
        leaves = _leaves(annotation)
        if not leaves & {int, float} or leaves & {bool, jax.Array, Any}:
            continue
        kinds[name] = float if float in leaves else int
    return kinds


def _leaves(annotation: Any) -> set[Any]:
    """The types of which an annotation is made."""
    arguments = get_args(annotation)
    return set().union(*map(_leaves, arguments)) if arguments else {annotation}


def _as_number(op: str, name: str, value: Any, kind: type) -> Any:
    """Value, or the values in it, as `kind`; what is no number is left as it is."""
    if isinstance(value, (list, tuple)):
        entries = [_as_number(op, name, entry, kind) for entry in value]
        return entries if isinstance(value, list) else tuple(entries)
    if type(value) is int or type(value) is kind:
        return value
    is_array = hasattr(value, "dtype") and hasattr(value, "ndim")
    if is_array and value.ndim and not isinstance(value, jax.core.Tracer):
        return _as_number(op, name, tuple(np.asarray(value).tolist()), kind)
    dtype = value.dtype if is_array else np.bool_ if isinstance(value, bool) else None
    if dtype is None and not isinstance(value, (int, float)):
        return value
    is_whole = jnp.issubdtype(dtype, jnp.integer) if is_array else isinstance(value, int)
    is_number = is_whole or (
        kind is float and (not is_array or jnp.issubdtype(dtype, jnp.floating))
    )
    if isinstance(value, jax.core.Tracer) or dtype == jnp.bool_ or not is_number:
        a_number = "a Python float" if kind is float else "an int"
        raise ValueError(
            f"{op}: {name} is {value!r}, but it is a constant of the kernel; pass {a_number}."
        )
    return operator.index(value) if is_whole else float(value)


def for_each_axis(op: str, name: str, value: int | Sequence[int], spatial: int) -> tuple[int, ...]:
    """One positive int for each spatial axis, of one for all or of as many."""
    values = tuple(value) if isinstance(value, Sequence) else (value,) * spatial
    if len(values) != spatial or any(not isinstance(v, int) or v < 1 for v in values):
        raise ValueError(
            f"{op}: {name} is {value!r}, but x has {spatial} spatial axes;"
            f" pass one positive int, or {spatial} of them."
        )
    return values


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


def check_finite(op: str, name: str, value: Any) -> None:
    """Checks that `value` is a constant of the kernel, and neither NaN nor infinite."""
    check_constant(op, name, value)
    if not -math.inf < value < math.inf:
        raise ValueError(
            f"{op}: {name} is {value}, with which no result is a number; pass a finite number."
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
