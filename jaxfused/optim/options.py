"""Checks of the optimizers' options: numbers, which may be traced, schedules, switches and dtypes."""

import collections.abc
import functools
import inspect
from collections.abc import Callable
from typing import Any, get_args, get_origin

import jax
import jax.numpy as jnp
import numpy as np

from jaxfused.runtime import checks

_DECAYS = frozenset({"b1", "b2", "beta", "adam_b1", "adam_b2"})
"""Options that weigh a past average, and so are at least 0 and below 1."""
_EPSILONS = frozenset({"eps", "eps_root", "adam_eps", "adam_eps_root"})
"""Options that are added to a divisor, and so must not be negative."""

type _Check = Callable[[str, str, Any], Any]


def checked_options[**P, R](optimizer: Callable[P, R]) -> Callable[P, R]:
    """Decorates an optimizer to check its options when it is made.

    A number may be Python's, NumPy's or a JAX scalar, also a traced one as under
    `optax.inject_hyperparams`. A number that is not traced must be finite and in the option's range.
    """
    signature = inspect.signature(optimizer, eval_str=True)
    found = {name: _check(name, p.annotation) for name, p in signature.parameters.items()}
    op = optimizer.__name__

    @functools.wraps(optimizer)
    def with_checks(*args: P.args, **kwargs: P.kwargs) -> R:
        bound = signature.bind(*args, **kwargs)
        for name, value in bound.arguments.items():
            if (check := found[name]) is not None:
                bound.arguments[name] = check(op, name, value)
        return optimizer(*bound.args, **bound.kwargs)

    return with_checks


def _check(name: str, annotation: Any) -> _Check | None:
    leaves = get_args(annotation)
    if annotation is bool:
        return functools.partial(checks.as_flag, words=(), optional=False)
    if "dtype" in name:
        return _dtype
    if jax.Array in leaves:
        is_schedule = any(get_origin(leaf) is collections.abc.Callable for leaf in leaves)
        optional = type(None) in leaves
        return functools.partial(_number, is_schedule=is_schedule, optional=optional)
    return None


def _dtype(op: str, name: str, value: Any) -> Any:
    if isinstance(value, jax.Array):
        raise ValueError(
            f"{op}: {name} is {checks.said(value)}, which is no dtype; pass its name, as 'bfloat16':"
            " optax.inject_hyperparams takes jnp.bfloat16, which can be called, for a schedule."
        )
    if checks.as_dtype(op, name, value) is not None and not jnp.issubdtype(value, jnp.inexact):
        raise ValueError(
            f"{op}: {name} is {jnp.dtype(value)}, which holds no fractions; pass jnp.bfloat16 or"
            " jnp.float32."
        )
    return value


def _number(op: str, name: str, value: Any, *, is_schedule: bool, optional: bool) -> Any:
    if (value is None and optional) or (is_schedule and callable(value)):
        return value
    is_python = isinstance(value, (int, float)) and not isinstance(value, bool)
    is_scalar = isinstance(value, (jax.Array, np.ndarray, np.generic)) and not value.ndim
    if not is_python and not (is_scalar and _is_real(value.dtype)):
        others = " or a schedule" * is_schedule + " or None" * optional
        raise ValueError(
            f"{op}: {name} is {checks.said(value)}, but it is one number; pass a float{others}."
        )
    known = value if is_python else _known(value)
    if known is not None:
        _check_range(op, name, known)
    return value


def _is_real(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)


def _known(value: Any) -> float | None:
    """Returns a scalar's value, or None if it is traced or on a GPU."""
    known = checks.readable_values(value) if isinstance(value, jax.Array) else value
    return None if known is None else float(known)


def _check_range(op: str, name: str, value: float) -> None:
    if not abs(value) <= checks.LARGEST:
        raise ValueError(
            f"{op}: {name} is {value}, with which no step is a number; pass a finite number."
        )
    if name in _DECAYS and not 0 <= value < 1:
        raise ValueError(
            f"{op}: {name} is {value}, but it is the weight of the past in an average; pass a number"
            " from 0 on, below 1."
        )
    if name in _EPSILONS and value < 0:
        raise ValueError(
            f"{op}: {name} is {value}, but it keeps a divisor above 0; pass 0 or more."
        )
