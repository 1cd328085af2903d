"""Places a checkpoint's arrays on devices; scales are sharded like their weights."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jaxfused.quantization.checkpoints.layer import QuantizedLayer
from jaxfused.runtime.packing import WORD_BLOCK
from jaxfused.runtime.quantized_array import QuantizedArray, assembled

Placing = Sharding | Callable[[str, tuple[int, ...]], Sharding | None]
"""Sharding of all tensors, or a function (name, shape) -> sharding of that tensor, or None to leave the
tensor where it is."""


def placed_tensor(op: str, name: str, array: jax.Array, sharding: Placing | None) -> jax.Array:
    """Returns the array, moved to the devices of its sharding if it has one."""
    where = _where(op, name, array.shape, sharding)
    return array if where is None else jax.device_put(array, where)


def placed(op: str, name: str, layer: QuantizedLayer, sharding: Placing | None) -> QuantizedLayer:
    """Returns a layer whose arrays are all split as its weights [..., D, F] are.

    Raises:
      ValueError: values that share a scale, or a packed word, would be on different devices.
    """
    array = layer.array
    where = _where(op, name, array.shape, sharding)
    if where is None:
        return layer
    if not isinstance(where, NamedSharding):
        return jax.device_put(layer, where)
    spec = (*where.spec, *(None,) * (array.ndim - len(where.spec)))
    *leading, of_inputs, of_outputs = spec
    _check_whole(op, name, array, where, of_inputs, of_outputs)

    def put(part: jax.Array | None, *axes: Any) -> jax.Array | None:
        if part is None:
            return None
        # An axis of size 1 is replicated.
        fitting = (a if n > 1 else None for a, n in zip(axes, part.shape, strict=True))
        return jax.device_put(part, NamedSharding(where.mesh, PartitionSpec(*fitting)))

    pair = (of_outputs, of_inputs) if array.layout == "columns" else (of_inputs, of_outputs)
    scale, zero_point, offset = (
        put(part, *leading, of_inputs, of_outputs)
        for part in (array.scale, array.zero_point, array.offset)
    )
    parts = assembled(
        put(array.values, *leading, *pair),
        scale,
        zero_point,
        array.axis,
        array.layout,
        array.group_size,
        offset=offset,
        codebook=array.codebook,
    )
    bias = layer.bias
    if bias is not None:
        bias = put(bias, *leading[: bias.ndim - 1], of_outputs)
    return QuantizedLayer(parts, put(layer.permutation, None), bias)


def _where(op: str, name: str, shape: tuple[int, ...], sharding: Placing | None) -> Sharding | None:
    where = sharding(name, shape) if callable(sharding) else sharding
    if where is not None and not isinstance(where, Sharding):
        raise ValueError(
            f"{op}: sharding returned a {type(where).__name__} for {name!r}; return a"
            " jax.sharding.Sharding, or None."
        )
    return where


def _check_whole(
    op: str, name: str, array: QuantizedArray, where: NamedSharding, of_inputs: Any, of_outputs: Any
) -> None:
    """Checks that shards cut neither groups that share a scale, nor values that are packed together."""
    together = WORD_BLOCK if array.values.dtype == jnp.int32 else array.packed
    for what, axes, axis in (("inputs", of_inputs, -2), ("outputs", of_outputs, -1)):
        names = axes if isinstance(axes, tuple) else () if axes is None else (axes,)
        count = math.prod(where.mesh.shape[n] for n in names)
        size, groups = array.shape[axis], array.scale.shape[axis]
        stored = size // together if axis == -2 else size
        if stored % count or (groups > 1 and groups % count):
            raise ValueError(
                f"{op}: layer {name!r}: its {size} {what} in {groups} groups would be cut into {count}"
                f" shards, but a group is not cut, nor {together} values that are stored together; pass"
                " a sharding into a divisor of these."
            )
