"""Operands with which a serving kernel is timed, whose integers are in range."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp


def example_operands[Arrays: Any](
    random: Callable[[Any], Any], arrays: Arrays, **integers: int
) -> Arrays:
    """Returns random arrays in the same NamedTuple as `arrays`; those that are None stay None.

    Args:
      random: makes an array like another.
      arrays: arrays of the wanted shapes and dtypes.
      integers: the number that fills each int32 array; all other arrays are random.
    """

    def made(name: str, array: Any) -> Any:
        if array is None:
            return None
        if name in integers:
            return jnp.full(array.shape, integers[name], jnp.int32)
        return random(array)

    return type(arrays)(**{name: made(name, array) for name, array in arrays._asdict().items()})
