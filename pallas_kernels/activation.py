"""Activations and their derivatives as kernels compute them: in float32, from exp2 and arithmetic.

`jax.nn`'s own forms need tanh, erf or erfc, which Mosaic GPU lowers slowly or not at all.

The gelus and silu are x S(x) with S(x) + S(-x) = 1. With the tail T(|x|) = S(-|x|) that is

    relu(x) - |x| T(|x|),

without a difference of nearly equal numbers on either side of 0. With d the derivative of |x| T(|x|)
with respect to |x|, the activation's derivative is d for negative x, and 1 - d for positive x.
"""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

NAMES = (
    "relu", "relu2", "relu6", "leaky_relu", "gelu_tanh", "gelu_erf", "quick_gelu", "silu",
    "hard_swish", "mish", "sigmoid", "hard_sigmoid", "tanh", "softplus", "elu", "selu", "hard_tanh",
)  # fmt: skip
ARITHMETIC = (
    "relu", "relu2", "relu6", "leaky_relu", "hard_swish", "hard_sigmoid", "hard_tanh",
)  # fmt: skip
"""Activations without an exponential, which cost models count as taking no time."""

_GELU_TANH_RATE = 2.0 * math.sqrt(2.0 / math.pi)
"""Factor of x in the exponent: 0.5 (1 + tanh(z)) is the logistic function of 2 z."""
_GELU_CUBIC = 0.044715
_QUICK_GELU_RATE = 1.702
_LEAK = 0.01
"""Derivative of leaky_relu below 0, where its name states none."""
_SELU_SCALE, _SELU_ALPHA = 1.0507009873554805, 1.6732632423543772
_LOG2_E = math.log2(math.e)


def leak_of(name: str | None) -> float | None:
    """Returns the derivative below 0 of "leaky_relu", or of "leaky_relu(0.2)"; None for other names."""
    if name == "leaky_relu":
        return _LEAK
    found = re.fullmatch(r"leaky_relu\(([0-9.e+-]+)\)", name or "")
    try:
        return float(found[1]) if found else None
    except ValueError:
        return None


def activation(name: str | None, x: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
    """Returns the activation called `name` of each element of float32 `x`; None is the identity.

    The result is float32 of x's shape. `dtype` is the one to which the caller will round it: for 16
    bits, gelu_erf uses a polynomial of lower degree.
    """
    leak = leak_of(name)
    if leak is not None:
        return jnp.where(x < 0.0, leak * x, x)
    match name:
        case None:
            return x
        case "relu":
            return jnp.maximum(x, 0.0)
        case "relu2":
            positive = jnp.maximum(x, 0.0)
            return positive * positive
        case "relu6":
            return _clipped(x, 0.0, 6.0)
        case "hard_sigmoid":
            return _clipped(x + 3.0, 0.0, 6.0) * (1.0 / 6.0)
        case "hard_swish":
            return x * (_clipped(x + 3.0, 0.0, 6.0) * (1.0 / 6.0))
        case "gelu_tanh" | "gelu_erf" | "quick_gelu" | "silu":
            distance = _distance(x)
            return jnp.maximum(x, 0.0) - distance * _tail(name, distance, dtype)
        case "mish":
            return jnp.maximum(x, -_FAR) * _mish_gate(x)[0]
        case "sigmoid":
            return _sigmoid(x, _logistic_tail(_distance(x), _LOG2_E))
        case "tanh":
            return _tanh(x, _logistic_tail(_distance(x), 2.0 * _LOG2_E))
        case "softplus":
            return jnp.maximum(x, 0.0) + _softplus_tail(_distance(x))
        case "elu":
            return jnp.where(x > 0.0, x, _expm1(x)[0])
        case "selu":
            return _SELU_SCALE * jnp.where(x > 0.0, x, _SELU_ALPHA * _expm1(x)[0])
        case "hard_tanh":
            return _clipped(x, -1.0, 1.0)
    raise ValueError(f"activation must be None or one of {NAMES}, but {name!r} was passed")


def derivative(name: str | None, x: jax.Array, dtype: Any = jnp.float32) -> jax.Array | float:
    """Returns the derivative at `x` of the activation called `name`; 0 at relu's kink, as in jax.nn."""
    return activation_and_derivative(name, x, dtype)[1]


def activation_and_derivative(
    name: str | None, x: jax.Array, dtype: Any = jnp.float32
) -> tuple[jax.Array, jax.Array | float]:
    """Returns the activation and its derivative at `x`, with common terms computed once."""
    leak = leak_of(name)
    if leak is not None:
        return jnp.where(x < 0.0, leak * x, x), jnp.where(x < 0.0, leak, 1.0)
    match name:
        case None:
            return x, 1.0
        case "relu":
            return jnp.maximum(x, 0.0), jnp.where(x > 0.0, 1.0, 0.0)
        case "relu2":
            positive = jnp.maximum(x, 0.0)
            return positive * positive, 2.0 * positive
        case "relu6":
            return _clipped(x, 0.0, 6.0), _clip_slope(x, 0.0, 6.0)
        case "hard_sigmoid":
            gate = _clipped(x + 3.0, 0.0, 6.0) * (1.0 / 6.0)
            return gate, _clip_slope(x, -3.0, 3.0) * (1.0 / 6.0)
        case "hard_swish":
            gate = _clipped(x + 3.0, 0.0, 6.0) * (1.0 / 6.0)
            return x * gate, gate + _clip_slope(x, -3.0, 3.0) * _clipped(x, -3.0, 3.0) * (1.0 / 6.0)
        case "mish":
            gate, growth = _mish_gate(x)
            return jnp.maximum(x, -_FAR) * gate, gate + _clipped(x, -_FAR, _FAR) * growth
        case "sigmoid":
            tail = _logistic_tail(_distance(x), _LOG2_E)
            return _sigmoid(x, tail), tail - tail * tail
        case "tanh":
            tail = _logistic_tail(_distance(x), 2.0 * _LOG2_E)
            return _tanh(x, tail), 4.0 * (tail - tail * tail)
        case "softplus":
            distance = _distance(x)
            tail = _logistic_tail(distance, _LOG2_E)
            return jnp.maximum(x, 0.0) + _softplus_tail(distance), _sigmoid(x, tail)
        case "elu":
            value, slope = _expm1(x)
            return jnp.where(x > 0.0, x, value), slope
        case "selu":
            value, slope = _expm1(x)
            return (
                _SELU_SCALE * jnp.where(x > 0.0, x, _SELU_ALPHA * value),
                _SELU_SCALE * jnp.where(x > 0.0, 1.0, _SELU_ALPHA * slope),
            )
        case "hard_tanh":
            # In jax.nn the derivative at the corners is 1 for hard_tanh, and 0 for relu6.
            inside = jnp.where(x >= -1.0, jnp.where(x <= 1.0, 1.0, 0.0), 0.0)
            return _clipped(x, -1.0, 1.0), inside
        case "gelu_tanh" | "gelu_erf" | "quick_gelu" | "silu":
            distance = _distance(x)
            tail = _tail(name, distance, dtype)
            slope = tail - distance * _tail_decrease(name, distance, tail)
            return (
                jnp.maximum(x, 0.0) - distance * tail,
                jnp.where(x < 0.0, slope, 1.0 - slope),
            )
    raise ValueError(f"activation must be None or one of {NAMES}, but {name!r} was passed")


class Functions(NamedTuple):
    """Functions that an epilogue calls with (name, float32 x, dtype to which it rounds the result)."""

    activation: Callable[[str | None, jax.Array, Any], jax.Array]
    activation_and_derivative: Callable[
        [str | None, jax.Array, Any], tuple[jax.Array, jax.Array | float]
    ]


IN_KERNELS = Functions(activation, activation_and_derivative)


def _distance(x: jax.Array) -> jax.Array:
    """Returns min(|x|, _FAR). Tails of x >= _FAR are 0 in float32, and infinity times 0 would be NaN."""
    return jnp.minimum(jnp.abs(x), _FAR)


_FAR = 128.0


def _clipped(x: jax.Array, low: float, high: float) -> jax.Array:
    return jnp.minimum(jnp.maximum(x, low), high)


def _clip_slope(x: jax.Array, low: float, high: float) -> jax.Array:
    """Returns the derivative of `_clipped`, which is 0 at the corners, as in jax.nn.relu6."""
    return jnp.where(x > low, jnp.where(x < high, 1.0, 0.0), 0.0)


def _sigmoid(x: jax.Array, tail: jax.Array) -> jax.Array:
    return jnp.where(x < 0.0, tail, 1.0 - tail)


_LOG1P = (
    1.0, -0.499995023, 0.333192706, -0.248443693, 0.191114306,
    -0.136747703, 0.0783616677, -0.0295885075, 0.00525345793,
)  # fmt: skip
"""Coefficients of log(1 + u) / u for 0 <= u <= 1, with a relative error of 2e-7."""


def _softplus_tail(distance: jax.Array) -> jax.Array:
    """Returns log(1 + exp(-distance))."""
    u = jnp.exp2(-_LOG2_E * distance)
    return u * _polynomial(_LOG1P, u)


_EXPM1 = tuple(1.0 / math.factorial(power) for power in range(1, 8))
"""Coefficients of (exp(x) - 1) / x."""


def _expm1(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns exp(z) - 1 and exp(z) for z = min(x, 0); near 0 a Taylor series avoids cancellation."""
    negative = jnp.minimum(x, 0.0)
    exponential = jnp.exp2(_LOG2_E * jnp.maximum(negative, -_FAR))
    near = jnp.maximum(negative, -0.5)
    series = near * _polynomial(_EXPM1, near)
    return jnp.where(negative > -0.3, series, exponential - 1.0), exponential


_TANH = (0.9999999674, -0.333327915, 0.133188188, -0.05258626, 0.0163104039)
"""Coefficients of tanh(x) / x in powers of x^2 for |x| <= 0.55, with an error of 4e-8."""


def _tanh(x: jax.Array, tail: jax.Array) -> jax.Array:
    """Returns tanh(x), given tail = 1 / (1 + exp(2 |x|)).

    tanh(|x|) is 1 - 2 tail. Below 0.55 that difference cancels, so a polynomial in x is taken there.
    """
    squared = jnp.minimum(x * x, 1.0)
    near = x * _polynomial(_TANH, squared)
    far = jnp.where(x < 0.0, 2.0 * tail - 1.0, 1.0 - 2.0 * tail)
    return jnp.where(jnp.abs(x) < 0.55, near, far)


def _mish_gate(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns tanh(softplus(x)) and its derivative.

    With u = exp(-|x|) they are, for positive x, (1 + 2 u) / d and 4 u^2 (1 + u) / d^2, where
    d = 1 + 2 u + 2 u^2; for negative x, (2 u + u^2) / d and 4 u (1 + u) / d^2, d = 2 + 2 u + u^2.
    """
    u = jnp.exp2(-_LOG2_E * _distance(x))
    squared = u * u
    negative = x < 0.0
    reciprocal = 1.0 / jnp.where(negative, 2.0 + 2.0 * u + squared, 1.0 + 2.0 * u + 2.0 * squared)
    gate = reciprocal * jnp.where(negative, 2.0 * u + squared, 1.0 + 2.0 * u)
    growth = 4.0 * (1.0 + u) * (reciprocal * reciprocal) * jnp.where(negative, u, squared)
    return gate, growth


def _tail(name: str, distance: jax.Array, dtype: Any) -> jax.Array:
    """Returns the tail T(distance) = S(-distance) of the activation x S(x) called `name`."""
    match name:
        case "gelu_erf":
            return _normal_tail(distance, dtype)
        case "gelu_tanh":
            return _logistic_tail(distance, _LOG2_E * _GELU_TANH_RATE, _GELU_CUBIC)
        case "quick_gelu":
            return _logistic_tail(distance, _LOG2_E * _QUICK_GELU_RATE)
    return _logistic_tail(distance, _LOG2_E)


def _tail_decrease(name: str, distance: jax.Array, tail: jax.Array) -> jax.Array:
    """Returns minus the derivative of `_tail` with respect to `distance`, given its value `tail`."""
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
"""Coefficients of 1 / (1 + e) for 0 <= e <= 1, with a relative error of 3e-4."""


def _logistic_tail(distance: jax.Array, log2_rate: float, cubic: float = 0.0) -> jax.Array:
    """Returns 1 / (1 + 2**z) with z = log2_rate * (distance + cubic * distance**3), without a division.

    With e = 2**-z this is e / (1 + e). The reciprocal is a polynomial in e and one Newton step:
    Mosaic's division takes more instructions, and so does lax.rsqrt, which tests for denormals.
    """
    rate: jax.Array | float = -log2_rate
    if cubic:
        rate = -log2_rate - log2_rate * cubic * (distance * distance)
    exponential = jnp.exp2(distance * rate)
    reciprocal = _polynomial(_RECIPROCAL, exponential)
    reciprocal *= 2.0 - (1.0 + exponential) * reciprocal
    return exponential * reciprocal


def _polynomial(coefficients: Sequence[float], x: jax.Array) -> jax.Array:
    """Returns the polynomial's value at x; the coefficient of the lowest power comes first."""
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
"""Polynomials in x >= 0 for log2 of T(x) = P(N(0, 1) > x), lowest power first: weighted minimax fits
on 0 <= x <= 8 that are exact at 0. The errors of x T(x) are 4e-8 and, for the fit that is used if the
result is rounded to 16 bits, 7e-7."""


def _normal_tail(distance: jax.Array, dtype: Any) -> jax.Array:
    """Returns P(N(0, 1) > distance)."""
    wide = jnp.dtype(dtype).itemsize > 2
    return jnp.exp2(_polynomial(_LOG2_NORMAL_TAIL if wide else _LOG2_NORMAL_TAIL_16_BITS, distance))
