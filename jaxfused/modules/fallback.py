"""The fallback of modules to Flax's own code, for calls that the operator cannot serve."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax.linen.dtypes import canonicalize_dtype
from jax.sharding import NamedSharding, PartitionSpec

from jaxfused import dispatch
from jaxfused.ops.linear.linear_xla import add_residual
from jaxfused.runtime.activation import activate
from jaxfused.runtime.promotion import accumulator_dtype

_PRODUCTS = {
    name: (product, getattr(product, "__code__", None))
    for name, product in (
        ("jax.lax.dot_general", jax.lax.dot_general),
        ("jax.lax.conv_general_dilated", jax.lax.conv_general_dilated),
    )
}


def why_intercepted() -> str | None:
    """Names a product of JAX that another function replaces at the moment, or returns None.

    Libraries that quantise or adapt models (such as qwix) replace JAX's products while a model runs,
    so that Flax's layers call theirs. Our operators would not call them, so our layers run Flax's
    code then.
    """
    now = {
        "jax.lax.dot_general": jax.lax.dot_general,
        "jax.lax.conv_general_dilated": jax.lax.conv_general_dilated,
    }
    for name, (product, code) in _PRODUCTS.items():
        if now[name] is not product or getattr(product, "__code__", None) is not code:
            return f"{name} is intercepted"
    return None


def why_given(**given: bool) -> str | None:
    """Returns the reason for Flax's code: the name of the first argument that is given, or None."""
    return next((f"{name} is given" for name, is_given in given.items() if is_given), None)


def why_complex(*dtypes: Any) -> str | None:
    """Returns the reason for Flax's code: the first complex dtype, or None."""
    for dtype in dtypes:
        if dtype is not None and jnp.issubdtype(dtype, jnp.complexfloating):
            return f"{jnp.dtype(dtype)} is not real"
    return None


def is_stock_product(dot_general: Any) -> bool:
    """Returns whether a layer's `dot_general` is None or Flax's default."""
    return dot_general is None or dot_general is jax.lax.dot_general


def changes_dtype(preferred_element_type: Any, *arrays: Any, dtype: Any) -> bool:
    """Returns whether `preferred_element_type` differs from the dtype in which a layer computes."""
    if preferred_element_type is None:
        return False
    floats = [array for array in arrays if isinstance(array, jax.Array)]
    return canonicalize_dtype(*floats, dtype=dtype) != jnp.dtype(preferred_element_type)


def _explicit_mesh(*arrays: Any) -> Any:
    """Returns the mesh of the first array whose type states its sharding, or None."""
    meshes = (jax.typeof(a).sharding.mesh for a in arrays if isinstance(a, jax.Array))
    return next((mesh for mesh in meshes if mesh.explicit_axes), None)


def why_sharded(out_sharding: Any, *arrays: Any) -> str | None:
    """Returns why only Flax's code can give the result the requested sharding, or None.

    If the arrays' types state their sharding, `resharded` gives the operator's result the requested one.
    """
    if out_sharding is None or _explicit_mesh(*arrays) is not None:
        return None
    return "out_sharding is given"


def resharded(y: jax.Array, out_sharding: Any) -> jax.Array:
    """Returns the result in the requested sharding, if `why_sharded` returned None."""
    if out_sharding is None:
        return y
    if isinstance(out_sharding, PartitionSpec):
        out_sharding = NamedSharding(_explicit_mesh(y), out_sharding)
    return jax.sharding.reshard(y, out_sharding)


def is_default(precision: jax.lax.PrecisionLike) -> bool:
    """Returns whether a precision is JAX's default: None or DEFAULT, for both operands."""
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
    gate: jax.Array | None = None,
    scale_offset: float = 0.0,
    round_before_scale: bool = False,
    activation: str | None = None,
    padding_mode: str = "zeros",
    implementation: str | None = None,
    adds_first: bool = False,
) -> jax.Array:
    """Runs Flax's `module` and the activation after it; raises if a call needs the operator.

    If JAX's products are intercepted, a residual is added in a separate pass.

    Args:
      name: the module's name, such as "jaxfused.nnx.Linear".
      reason: the argument that the operator cannot serve; `jaxfused.explain` lists it.
      module: the call of Flax's code.
      residual: an argument that only the operator supports, if given, as are the others.
      adds_first: whether the residual is added before the activation.
    """
    intercepted = reason == why_intercepted()
    refused = {
        "residual": residual is not None and not intercepted,
        "image_scale": image_scale is not None,
        "image_shift": image_shift is not None,
        "pre_bias": pre_bias is not None,
        "gate": gate is not None,
        "scale_offset": scale_offset != 0.0,
        "round_before_scale": round_before_scale,
        f"padding_mode={padding_mode!r}": padding_mode != "zeros",
        f"implementation={implementation!r}": implementation not in (None, "xla"),
    }
    for argument, given in refused.items():
        if given:
            raise ValueError(
                f"{name}: {argument} needs the operator of jaxfused, but Flax's own code serves this"
                f" call because {reason}; leave one of the two out."
            )
    dispatch.note_fallback(name, reason)
    if residual is None:
        return activate(activation, module())
    return followed(module(), activation, residual, adds_first=adds_first)


def followed(
    y: jax.Array, activation: str | None, residual: jax.Array | None, *, adds_first: bool
) -> jax.Array:
    """Applies an operator's activation and residual to a layer's result, in separate passes.

    Args:
      y: the result, whose dtype may be wider than the layer's.
      adds_first: whether the residual is added before the activation, and the dtype stays y's.
    """
    wide = y.astype(accumulator_dtype(y.dtype))
    if adds_first:
        wide = wide if residual is None else wide + residual.astype(wide.dtype)
        return activate(activation, wide).astype(y.dtype)
    dtype = y.dtype if residual is None else residual.dtype
    return add_residual(activate(activation, wide), residual, dtype)
