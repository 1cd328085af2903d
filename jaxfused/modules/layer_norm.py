"""Which calls of a Flax norm the operator serves; Flax's own code takes the rest.

Flax's norms reduce over any axes and across devices, take masks and complex numbers. The operator does
not, so such a call runs `super().__call__`, and what only the operator can do raises.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from jaxfused.reference.activation import activate


def why_flax(
    x: jax.Array,
    *dtypes: Any,
    mask: jax.Array | None,
    axis_name: str | None,
    reduction_axes: Any,
    feature_axes: Any,
) -> str | None:
    """None where the operator can serve a call, else why it takes Flax's own code.

    Args:
      x: what the norm was called with.
      *dtypes: every dtype that takes part beside x's; None is ignored.
      mask: as for the other arguments, what the module was given.
    """
    if mask is not None:
        return "a mask is given"
    if axis_name is not None:
        return f"axis_name={axis_name!r} takes statistics across devices"
    last = {x.ndim - 1}
    for name, axes in {"reduction_axes": reduction_axes, "feature_axes": feature_axes}.items():
        axes = axes if isinstance(axes, Iterable) else (axes,)
        if {axis % x.ndim for axis in axes} != last:
            return f"{name}={axes} is not the last axis"
    for dtype in (x.dtype, *dtypes):
        if dtype is not None and jnp.issubdtype(dtype, jnp.complexfloating):
            return f"{jnp.dtype(dtype)} is not real"
    return None


def call_flax(
    name: str,
    reason: str,
    norm: Callable[[], jax.Array],
    *,
    residual: jax.Array | None,
    scale_offset: float = 0.0,
    activation: str | None,
    implementation: str | None,
) -> jax.Array:
    """Flax's `norm` and the activation after it, or ValueError where only the operator can serve."""
    refused = {
        "residual": residual is not None,
        "scale_offset": scale_offset != 0.0,
        f"implementation={implementation!r}": implementation not in (None, "xla"),
    }
    for argument, given in refused.items():
        if given:
            raise ValueError(
                f"{name}: {argument} needs the operator of jaxfused, but Flax's own code serves this"
                f" call because {reason}; leave one of the two out."
            )
    return activate(activation, norm())
