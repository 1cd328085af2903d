"""Initial parameters; those of 16 bits are drawn in float32, as JAX draws them with a mean below 0."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Initializer = Callable[..., Any]


def in_float32(init: Initializer) -> Initializer:
    """Returns the initialiser that draws numbers of 16 bits in float32 and rounds them to nearest.

    JAX's own of bfloat16 have a mean of -0.01 to -0.02 standard deviations, which shifts results of
    4,096 features by one. Layers that Flax has too draw as Flax does.
    """

    def in_dtype(key: jax.Array, shape: Any, dtype: Any = jnp.float32, *args: Any) -> Any:
        if not jnp.issubdtype(dtype, jnp.floating) or jnp.finfo(dtype).bits > 16:
            return init(key, shape, dtype, *args)
        drawn = init(key, shape, jnp.float32, *args)
        # An initialiser with partitioning returns a box: a pytree in Linen, a dataclass in nnx.
        if hasattr(drawn, "raw_value"):
            return dataclasses.replace(drawn, raw_value=drawn.raw_value.astype(dtype))
        return jax.tree.map(lambda a: a.astype(dtype), drawn)

    return in_dtype


def plain(op: str, drawn: Any) -> jax.Array:
    """Returns what an initialiser drew for a layer that saves it in another form, if it is an array."""
    if isinstance(drawn, jax.Array):
        return drawn
    raise ValueError(
        f"{op}: kernel_init returns a {type(drawn).__name__}, but its numbers are saved in another form,"
        " with other axes; pass an initialiser that returns an array, without a partitioning."
    )
