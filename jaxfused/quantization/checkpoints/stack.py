"""stack: layers of equal shapes as one with a leading axis, such as the experts of a mixture."""

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxfused.quantization.checkpoints.layer import QuantizedLayer


def stack(layers: Sequence[QuantizedLayer]) -> QuantizedLayer:
    """Stacks quantised layers of one form: [E, D, F], as `jaxfused.ragged_dot` reads experts.

    Checkpoints of GPTQ, AWQ and most others have a mixture's experts as layers of their own. If only
    some have zero points or permutations, the others get zeros and the identity.

    Args:
      layers: E layers whose arrays have equal shapes, dtypes, layouts and groups.

    Returns:
      A layer whose array, permutation and bias have another leading axis, E.

    Raises:
      ValueError: there is no layer, or two differ.

    Example:
      >>> import jax.numpy as jnp, jaxfused
      >>> expert = jaxfused.quantization.QuantizedLayer(jaxfused.quantize(jnp.eye(4)))
      >>> jaxfused.quantization.stack([expert] * 3).array.shape
      (3, 4, 4)

    Source: `jaxfused.quantization.load`.
    """
    layers = list(layers)
    if not layers:
        raise ValueError("stack: layers is empty; pass at least one layer.")
    for layer in layers:
        if not isinstance(layer, QuantizedLayer):
            raise ValueError(
                f"stack: layers has a {type(layer).__name__}; pass QuantizedLayers, of an array"
                " jaxfused.quantization.QuantizedLayer(array)."
            )
    if any(layer.array.zero_point is not None for layer in layers):
        layers = [_with_zero_point(layer) for layer in layers]
    if any(layer.permutation is not None for layer in layers):
        layers = [_with_permutation(layer) for layer in layers]
    for index, layer in enumerate(layers):
        if _form(layer) != _form(layers[0]):
            raise ValueError(
                f"stack: layer {index} has {_form(layer)}, but layer 0 has {_form(layers[0])}; pass"
                " layers of one form."
            )
    return jax.tree.map(lambda *parts: jnp.stack(parts), *layers)


def _with_zero_point(layer: QuantizedLayer) -> QuantizedLayer:
    array = layer.array
    if array.zero_point is not None:
        return layer
    zeros = jnp.zeros(array.scale.shape, jnp.int8)
    return replace(layer, array=replace(array, zero_point=zeros))


def _with_permutation(layer: QuantizedLayer) -> QuantizedLayer:
    if layer.permutation is not None:
        return layer
    return replace(layer, permutation=jnp.arange(layer.array.shape[-2], dtype=jnp.int32))


def _form(layer: QuantizedLayer) -> str:
    """Returns the dtypes and shapes of a layer's arrays and its static fields as text."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(layer)
    parts = (f"{path[-1].name} {part.dtype}{list(part.shape)}" for path, part in leaves)
    array = layer.array
    static = f"axis {array.axis}, layout {array.layout}, group_size {array.group_size}"
    book = "" if array.codebook is None else f", codebook {array.codebook}"
    return f"{', '.join(parts)}, {static}{book}"
