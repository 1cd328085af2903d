"""Activations and their derivatives as kernels compute them: float32, from exp alone.

`jax.nn`'s own forms need tanh, erf or erfc, which Mosaic GPU lowers slowly or not at all.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

NAMES = ("relu", "relu2", "gelu_tanh", "gelu_erf", "silu")

_SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)
_GELU_CUBIC = 0.044715
_LOG2_E = math.log2(math.e)


def activation(name: str | None, x: jax.Array) -> jax.Array:
    """The activation called `name` of float32 `x`; None is the identity."""
    match name:
        case None:
            return x
        case "relu":
            return jnp.maximum(x, 0.0)
        case "relu2":
            return jnp.maximum(x, 0.0) * jnp.maximum(x, 0.0)
        case "silu":
            return x * _sigmoid(x)
        case "gelu_tanh":
            return x * _sigmoid(_gelu_tanh_logit(x))
        case "gelu_erf":
            return x * _normal_cdf(x, _gaussian(x))
    raise ValueError(f"activation must be None or one of {NAMES}, but {name!r} was passed")


def derivative(name: str | None, x: jax.Array) -> jax.Array | float:
    """The derivative at `x` of the activation called `name`; 0 at relu's kink, as in jax.nn."""
    return activation_and_derivative(name, x)[1]


def activation_and_derivative(
    name: str | None, x: jax.Array
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
        case "silu":
            s, rest = _sigmoid_and_rest(x)
            return x * s, s * (1.0 + x * rest)
        case "gelu_tanh":
            s, rest = _sigmoid_and_rest(_gelu_tanh_logit(x))
            logit_slope = 2.0 * _SQRT_2_OVER_PI * (1.0 + 3.0 * _GELU_CUBIC * x * x)
            return x * s, s * (1.0 + x * rest * logit_slope)
        case "gelu_erf":
            gaussian = _gaussian(x)
            below = _normal_cdf(x, gaussian)
            return x * below, below + x * gaussian * (1.0 / math.sqrt(2.0 * math.pi))
    raise ValueError(f"activation must be None or one of {NAMES}, but {name!r} was passed")


def _sigmoid(x: jax.Array) -> jax.Array:
    return _reciprocal(1.0 + jnp.exp2(-_LOG2_E * x))


def _reciprocal(x: jax.Array) -> jax.Array:
    """1 / x of x >= 1, to 3e-7 relative: the GPU has an instruction for the root, none to divide."""
    root = lax.rsqrt(x)
    return root * root


def _sigmoid_and_rest(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """sigmoid(x) and 1 - sigmoid(x), which a subtraction leaves without digits where x is large."""
    exponential = jnp.exp2(-_LOG2_E * x)
    s = _reciprocal(1.0 + exponential)
    return s, jnp.where(x < 0.0, 1.0 - s, exponential * s)


def _gelu_tanh_logit(x: jax.Array) -> jax.Array:
    # 0.5 * (1 + tanh(z)) is the logistic function of 2 z.
    return x * (2.0 * _SQRT_2_OVER_PI + 2.0 * _SQRT_2_OVER_PI * _GELU_CUBIC * (x * x))


def _gaussian(x: jax.Array) -> jax.Array:
    return jnp.exp2((-0.5 * _LOG2_E) * x * x)


_ERFCX_SCALE = 0.435
_ERFCX = (
    0.07257305, -0.29428226, 0.33930251, -0.05129565,
    0.23024209, 0.2115335, 0.2465543, 0.24537256,
)  # fmt: skip
"""erfc(z) exp(z^2) / t as a polynomial in t = 1 / (1 + 0.435 z), highest power first: the weighted
least squares on Chebyshev points of 0 <= z <= 12 that make the largest relative error least, 1.3e-7."""


def _normal_cdf(x: jax.Array, gaussian: jax.Array) -> jax.Array:
    """P(N(0, 1) <= x), to 5e-7 relative in the lower tail as well, with exp(-x^2 / 2) given."""
    t = _reciprocal(1.0 + (_ERFCX_SCALE * math.sqrt(0.5)) * jnp.abs(x))
    polynomial = 0.5 * _ERFCX[0] * t + 0.5 * _ERFCX[1]
    for coefficient in _ERFCX[2:]:
        polynomial = polynomial * t + 0.5 * coefficient
    upper_tail = t * polynomial * gaussian
    return jnp.where(x < 0.0, upper_tail, 1.0 - upper_tail)
