"""The activation functions that fused operators accept by name.

Names are those of `jax.nn`. Where one function has several formulas: `gelu_tanh` is `jax.nn.gelu`'s
default, `gelu_erf` the exact one, `quick_gelu` the one with a logistic function (Hendrycks, Gimpel,
2016, https://arxiv.org/abs/1606.08415), `relu2` the square of relu (So et al., "Primer", 2021,
https://arxiv.org/abs/2109.08668). `leaky_relu` has the derivative 0.01 below 0, and "leaky_relu(0.2)"
has 0.2 or any other from 0 to 1. Where a derivative jumps, its value is that of `jax.nn`: the smaller
of both sides, but the larger for leaky_relu, hard_tanh and selu.

Kernels have the same functions in `pallas_kernels/activation.py` and `ffi/common/activation.cuh`.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.activation import Functions, leak_of

QUICK_GELU_RATE = 1.702

FUNCTIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "relu6": jax.nn.relu6,
    "leaky_relu": jax.nn.leaky_relu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "gelu_erf": partial(jax.nn.gelu, approximate=False),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(QUICK_GELU_RATE * x),
    "silu": jax.nn.silu,
    "hard_swish": jax.nn.hard_swish,
    "mish": jax.nn.mish,
    "sigmoid": jax.nn.sigmoid,
    "hard_sigmoid": jax.nn.hard_sigmoid,
    "tanh": jnp.tanh,
    "softplus": jax.nn.softplus,
    "elu": jax.nn.elu,
    "selu": jax.nn.selu,
    "hard_tanh": jax.nn.hard_tanh,
}

ACTIVATIONS = tuple(FUNCTIONS)
"""The names that every `activation` of an operator or a module takes, next to None.

The names are those of `jax.nn`; "gelu_tanh" and "gelu_erf" are its two gelus, "quick_gelu" is x
sigmoid(1.702 x), "relu2" the square of relu. "leaky_relu" has the derivative 0.01 below 0; the name of
another one from 0 to 1, such as "leaky_relu(0.2)", is not listed. Values and derivatives are those of
`jax.nn`, at corners too. A backward reads the result of "relu", "relu6" and "leaky_relu", and the input
of the others.
"""

SLOPE_OF_RESULT = ("relu", "relu6", "leaky_relu")
"""Activations whose derivative follows from their result: only the result is saved for the backward."""

ARITHMETIC = ("relu", "relu2", "relu6", "leaky_relu", "hard_swish", "hard_sigmoid", "hard_tanh")
"""Activations that take a few multiplications and comparisons, and no exponential."""

BOUNDED_FROM_ABOVE = {
    "relu": 0.0,
    "relu2": 0.0,
    "relu6": 0.0,
    "gelu_tanh": 0.1701,
    "gelu_erf": 0.17,
    "quick_gelu": 0.1637,
    "silu": 0.2785,
    "hard_swish": 0.375,
    "mish": 0.3089,
    "sigmoid": 0.5,
    "hard_sigmoid": 0.5,
    "softplus": 0.6932,
    "elu": 1.0,
    "selu": 1.7582,
    "hard_tanh": 1.0,
}
"""Upper bound of an activation's magnitude below 0; above 0 these activations grow.

So their largest magnitude follows from the largest input; that of other activations follows from the
largest magnitude of an input.
"""


def activate(name: str | None, x: jax.Array) -> jax.Array:
    """Applies the activation called `name`; None is the identity."""
    return x if name is None else function_of(name)(x)


def function_of(name: str) -> Callable[[jax.Array], jax.Array]:
    """Returns the activation called `name`."""
    leak = leak_of(name)
    if name in FUNCTIONS or leak is None:
        return FUNCTIONS[name]
    return partial(jax.nn.leaky_relu, negative_slope=leak)


def is_known(name: str) -> bool:
    """Returns whether an activation has this name."""
    leak = leak_of(name)
    return name in FUNCTIONS or (leak is not None and 0.0 <= leak <= 1.0)


def value_and_slope(name: str | None, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the activation called `name` and its derivative, element by element."""
    if name is None:
        return x, jnp.ones_like(x)
    return jax.jvp(lambda x: activate(name, x), (x,), (jnp.ones_like(x),))


IN_XLA = Functions(
    lambda name, x, dtype: activate(name, x), lambda name, x, dtype: value_and_slope(name, x)
)
"""Activation functions for an epilogue that XLA runs after its product."""
