"""Activations and their derivatives as kernels compute them: in float32, from exp2 alone.

`jax.nn`'s own forms need tanh, erf or erfc, which Mosaic GPU lowers slowly or not at all.

The gelus and silu are x S(x) with S(x) + S(-x) = 1. With the tail T(|x|) = S(-|x|) that is

    relu(x) - |x| T(|x|),

without a difference of nearly equal numbers on either side of 0, and the derivative of |x| T(|x|)
with respect to |x| is the derivative for negative x, and 1 minus it for positive x.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

NAMES = ("relu", "relu2", "gelu_tanh", "gelu_erf", "quick_gelu", "silu")

_GELU_TANH_RATE = 2.0 * math.sqrt(2.0 / math.pi)
"""0.5 (1 + tanh(z)) is the logistic function of 2 z."""
_GELU_CUBIC = 0.044715
_QUICK_GELU_RATE = 1.702
_LOG2_E = math.log2(math.e)


def activation(name: str | None, x: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
    """The activation called `name` of float32 `x`; None is the identity.

    The result is float32, and as exact as it must be to be rounded to `dtype`.
    """
    match name:
        case None:
            return x
        case "relu":
            return jnp.maximum(x, 0.0)
        case "relu2":
            positive = jnp.maximum(x, 0.0)
            return positive * positive
        case "gelu_tanh" | "gelu_erf" | "quick_gelu" | "silu":
            distance = _distance(x)
            return jnp.maximum(x, 0.0) - distance * _tail(name, distance, dtype)
    raise ValueError(f"activation must be None or one of {NAMES}, but {name!r} was passed")


def derivative(name: str | None, x: jax.Array, dtype: Any = jnp.float32) -> jax.Array | float:
    """The derivative at `x` of the activation called `name`; 0 at relu's kink, as in jax.nn."""
    return activation_and_derivative(name, x, dtype)[1]


def activation_and_derivative(
    name: str | None, x: jax.Array, dtype: Any = jnp.float32
) -> tuple[jax.Array, jax.Array | float]:
    """Both at `x`, with what they have in common computed once."""
    match name:
        case None:
            return x, 1.0
        case "relu":
            return jnp.maximum(x, 0.0), jnp.where(x > 0.0, 1.0, 0.0)
        case "relu2":
            positive = jnp.maximum(x, 0.0)
            return positive * positive, 2.0 * positive
        case "gelu_tanh" | "gelu_erf" | "quick_gelu" | "silu":
            distance = _distance(x)
            tail = _tail(name, distance, dtype)
            slope = tail - distance * _tail_decrease(name, distance, tail)
            return (
                jnp.maximum(x, 0.0) - distance * tail,
                jnp.where(x < 0.0, slope, 1.0 - slope),
            )
    raise ValueError(f"activation must be None or one of {NAMES}, but {name!r} was passed")


def _distance(x: jax.Array) -> jax.Array:
    """|x|, no further than every tail has vanished: infinity times 0 would be no number."""
    return jnp.minimum(jnp.abs(x), 128.0)


def _tail(name: str, distance: jax.Array, dtype: Any) -> jax.Array:
    """T of what is not negative."""
    match name:
        case "gelu_erf":
            return _normal_tail(distance, dtype)
        case "gelu_tanh":
            return _logistic_tail(distance, _LOG2_E * _GELU_TANH_RATE, _GELU_CUBIC)
        case "quick_gelu":
            return _logistic_tail(distance, _LOG2_E * _QUICK_GELU_RATE)
    return _logistic_tail(distance, _LOG2_E)


def _tail_decrease(name: str, distance: jax.Array, tail: jax.Array) -> jax.Array:
    """Minus the derivative of T where T is `tail`."""
    if name == "gelu_erf":
        squared = distance * distance
        return jnp.exp2((-0.5 * _LOG2_E) * squared - 0.5 * math.log2(2.0 * math.pi))
    decrease = tail - tail * tail
    if name == "gelu_tanh":
        squared = distance * distance
        decrease *= _GELU_TANH_RATE + 3.0 * _GELU_TANH_RATE * _GELU_CUBIC * squared
    elif name == "quick_gelu":
        decrease *= _QUICK_GELU_RATE
    return decrease


_RECIPROCAL = (0.9997026, -0.984835, 0.8658935, -0.5328576, 0.152245)
"""1 / (1 + e) on 0 <= e <= 1, to 3e-4 relative."""


def _logistic_tail(distance: jax.Array, log2_rate: float, cubic: float = 0.0) -> jax.Array:
    """1 / (1 + 2**z) with z = log2_rate * (distance + cubic * distance**3), without a division.

    With e = 2**-z it is e times the reciprocal of 1 + e, which is a polynomial in e and a step of
    Newton's: Mosaic's division is long, and the GPU's reciprocal root tests for denormals first.
    """
    rate: jax.Array | float = -log2_rate
    if cubic:
        rate = -log2_rate - log2_rate * cubic * (distance * distance)
    exponential = jnp.exp2(distance * rate)
    reciprocal = _polynomial(_RECIPROCAL, exponential)
    reciprocal *= 2.0 - (1.0 + exponential) * reciprocal
    return exponential * reciprocal


def _polynomial(coefficients: Sequence[float], x: jax.Array) -> jax.Array:
    """The value at x; the coefficient of the lowest power comes first."""
    *lower, value = coefficients
    for coefficient in reversed(lower):
        value = value * x + coefficient
    return value


_LOG2_NORMAL_TAIL = (
    -1.0, -1.151106, -0.4592075, -0.052471011, 0.0069684325, 7.690176e-06, -0.00030101167,
    9.0674673e-05, -1.5847797e-05, 1.8142795e-06, -1.3400199e-07, 5.8052631e-09, -1.1212456e-10,
)  # fmt: skip
_LOG2_NORMAL_TAIL_16_BITS = (
    -1.0, -1.1511599, -0.45873001, -0.053667213,
    0.0083551991, -0.00089031768, 5.645109e-05, -1.5810565e-06,
)  # fmt: skip
"""log2 of P(N(0, 1) > x) as polynomials in x >= 0, lowest power first: the weighted minimax on
0 <= x <= 8, with -1 at 0. What they make of x T(x) is off by 4e-8 and 7e-7."""


def _normal_tail(distance: jax.Array, dtype: Any) -> jax.Array:
    """P(N(0, 1) > distance)."""
    wide = jnp.dtype(dtype).itemsize > 2
    return jnp.exp2(_polynomial(_LOG2_NORMAL_TAIL if wide else _LOG2_NORMAL_TAIL_16_BITS, distance))
