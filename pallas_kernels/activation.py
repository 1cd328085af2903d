"""Activations and their derivatives as kernels compute them: in float32, from exp2 and log2 alone.

`jax.nn`'s own forms need tanh, erf or erfc, which Mosaic GPU lowers slowly or not at all.

gelu and silu are x S(x) with S(x) + S(-x) = 1. With the tail T(|x|) = S(-|x|) that is

    relu(x) - |x| T(|x|),

without a difference of nearly equal numbers on either side of 0, and the derivative of |x| T(|x|)
with respect to |x| is the derivative for negative x, and 1 minus it for positive x.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

NAMES = ("relu", "relu2", "gelu_tanh", "gelu_erf", "silu")

_GELU_TANH_RATE = 2.0 * math.sqrt(2.0 / math.pi)
"""0.5 (1 + tanh(z)) is the logistic function of 2 z."""
_GELU_CUBIC = 0.044715
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
        case "gelu_tanh" | "gelu_erf" | "silu":
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
        case "gelu_tanh" | "gelu_erf" | "silu":
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
            cubic = 1.0 + _GELU_CUBIC * (distance * distance)
            return _logistic_tail(distance, _GELU_TANH_RATE * cubic)
    return _logistic_tail(distance, 1.0)


def _tail_decrease(name: str, distance: jax.Array, tail: jax.Array) -> jax.Array:
    """Minus the derivative of T where T is `tail`."""
    if name == "gelu_erf":
        squared = distance * distance
        return jnp.exp2((-0.5 * _LOG2_E) * squared - 0.5 * math.log2(2.0 * math.pi))
    decrease = tail - tail * tail
    if name == "gelu_tanh":
        squared = distance * distance
        decrease *= _GELU_TANH_RATE * (1.0 + 3.0 * _GELU_CUBIC * squared)
    return decrease


def _logistic_tail(distance: jax.Array, rate: jax.Array | float) -> jax.Array:
    """1 / (1 + exp(distance * rate)): of logarithms, as Mosaic has no short instruction to divide."""
    log2 = distance * (-_LOG2_E * rate)
    return jnp.exp2(log2 - jnp.log2(1.0 + jnp.exp2(log2)))


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
    *lower, exponent = _LOG2_NORMAL_TAIL if wide else _LOG2_NORMAL_TAIL_16_BITS
    for coefficient in reversed(lower):
        exponent = exponent * distance + coefficient
    return jnp.exp2(exponent)
