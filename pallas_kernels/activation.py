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
            return x * _normal_cdf(x)
    raise ValueError(f"activation must be None or one of {NAMES}, but {name!r} was passed")


def derivative(name: str | None, x: jax.Array) -> jax.Array | float:
    """The derivative at `x` of the activation called `name`; 0 at relu's kink, as in jax.nn."""
    match name:
        case None:
            return 1.0
        case "relu":
            return jnp.where(x > 0.0, 1.0, 0.0)
        case "relu2":
            return 2.0 * jnp.maximum(x, 0.0)
        case "silu":
            s, rest = _sigmoid_and_rest(x)
            return s * (1.0 + x * rest)
        case "gelu_tanh":
            s, rest = _sigmoid_and_rest(_gelu_tanh_logit(x))
            logit_slope = 2.0 * _SQRT_2_OVER_PI * (1.0 + 3.0 * _GELU_CUBIC * x * x)
            return s * (1.0 + x * rest * logit_slope)
        case "gelu_erf":
            density = jnp.exp(-0.5 * x * x) * (1.0 / math.sqrt(2.0 * math.pi))
            return _normal_cdf(x) + x * density
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


def _normal_cdf(x: jax.Array) -> jax.Array:
    """P(N(0, 1) <= x), to 1.2e-7 relative in the lower tail as well.

    The Chebyshev fit of erfc in Press et al., "Numerical Recipes", section 6.2.
    """
    z = jnp.abs(x) * math.sqrt(0.5)
    t = _reciprocal(1.0 + 0.5 * z)
    coefficients = (
        0.17087277, -0.82215223, 1.48851587, -1.13520398, 0.27886807,
        -0.18628806, 0.09678418, 0.37409196, 1.00002368, -1.26551223,
    )  # fmt: skip
    polynomial = t * coefficients[0] + coefficients[1]
    for coefficient in coefficients[2:]:
        polynomial = polynomial * t + coefficient
    upper_tail = 0.5 * t * jnp.exp(polynomial - z * z)
    return jnp.where(x < 0.0, upper_tail, 1.0 - upper_tail)
