"""The test whether the operator can serve a call of a Flax norm; Flax's own code runs the others.

Flax's norms reduce over any axes and across devices, and accept masks and complex numbers. The operator
does not, so such a call runs `super().__call__`, or raises if it also uses an option that only the
operator has.
"""

from collections.abc import Iterable
from typing import Any

import jax

from jaxfused.modules.fallback import why_complex


def why_flax(
    x: jax.Array,
    *dtypes: Any,
    mask: jax.Array | None,
    axis_name: str | None,
    reduction_axes: Any,
    feature_axes: Any,
) -> str | None:
    """Returns None if the operator can serve a call, else why Flax's own code runs.

    Args:
      x: the norm's input.
      *dtypes: all dtypes of the computation except x's; None is ignored.
      mask: the module's argument, as are the others.
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
    return why_complex(x.dtype, *dtypes)
