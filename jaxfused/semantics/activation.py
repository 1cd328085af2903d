"""The activation functions that fused operators accept by name.

Names say which formula is meant: `gelu_tanh` is `jax.nn.gelu`'s default, `gelu_erf` the exact one,
`quick_gelu` the one of a logistic function (Hendrycks, Gimpel, 2016, https://arxiv.org/abs/1606.08415),
`relu2` the square of relu (So et al., "Primer", 2021, https://arxiv.org/abs/2109.08668).
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

QUICK_GELU_RATE = 1.702

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "gelu_erf": partial(jax.nn.gelu, approximate=False),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(QUICK_GELU_RATE * x),
    "silu": jax.nn.silu,
}


def activate(name: str | None, x: jax.Array) -> jax.Array:
    """Applies the activation called `name`; None is the identity."""
    return x if name is None else ACTIVATIONS[name](x)


def value_and_slope(name: str | None, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the activation called `name` and its derivative, element by element."""
    if name is None:
        return x, jnp.ones_like(x)
    return jax.jvp(lambda x: activate(name, x), (x,), (jnp.ones_like(x),))
