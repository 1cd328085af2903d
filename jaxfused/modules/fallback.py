"""When and how a module runs Flax's own code, because the operator cannot serve a call."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxfused import dispatch
from jaxfused.semantics.activation import activate


def why_given(**given: bool) -> str | None:
    """Names the first of these arguments that is given, as the reason for Flax's code, or None."""
    return next((f"{name} is given" for name, is_given in given.items() if is_given), None)


def why_complex(*dtypes: Any) -> str | None:
    """Names the first of these dtypes that is complex, as the reason for Flax's code, or None."""
    for dtype in dtypes:
        if dtype is not None and jnp.issubdtype(dtype, jnp.complexfloating):
            return f"{jnp.dtype(dtype)} is not real"
    return None


def is_default(precision: jax.lax.PrecisionLike) -> bool:
    """Whether a precision is the one that JAX uses by default: None or DEFAULT, for both operands."""
    if isinstance(precision, jax.lax.DotAlgorithm | jax.lax.DotAlgorithmPreset):
        return precision == jax.lax.DotAlgorithmPreset.DEFAULT
    if isinstance(precision, tuple | list):
        return all(is_default(part) for part in precision)
    try:
        return precision is None or jax.lax.Precision(precision) == jax.lax.Precision.DEFAULT
    except ValueError:  # The string names an algorithm or is invalid.
        return False


def call_flax(
    name: str,
    reason: str,
    module: Callable[[], jax.Array],
    *,
    residual: jax.Array | None = None,
    image_scale: jax.Array | None = None,
    image_shift: jax.Array | None = None,
    pre_bias: jax.Array | None = None,
    scale_offset: float = 0.0,
    activation: str | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Runs Flax's `module` and the activation after it; raises where only the operator can serve.

    Args:
      name: of the module, "jaxfused.nnx.Linear".
      reason: which argument the operator cannot serve; `jaxfused.explain` lists it.
      module: the call of Flax's code.
      residual: as for the other arguments, what only the operator can do, if it was given.
    """
    refused = {
        "residual": residual is not None,
        "image_scale": image_scale is not None,
        "image_shift": image_shift is not None,
        "pre_bias": pre_bias is not None,
        "scale_offset": scale_offset != 0.0,
        f"implementation={implementation!r}": implementation not in (None, "xla"),
    }
    for argument, given in refused.items():
        if given:
            raise ValueError(
                f"{name}: {argument} needs the operator of jaxfused, but Flax's own code serves this"
                f" call because {reason}; leave one of the two out."
            )
    dispatch.note_fallback(name, reason)
    return activate(activation, module())
