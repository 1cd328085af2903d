"""Reads checkpoints that store equal layers as one stack, for models with separate layers.

The ViT's blocks used to be one stack, an array [blocks, ...] for each parameter, whether or not a loop
ran them. Now they are a stack only if a loop runs them. The saved "blocks.qkv.kernel" is read as
"blocks.0.qkv.kernel", "blocks.1.qkv.kernel" and so on; the optimizer's moments in the same way.
"""

import collections
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxfused.optim import eight_bit

Shape = tuple[tuple[int, ...], np.dtype]


@dataclass(frozen=True)
class Source:
    """Where a checkpoint stores an array of a model."""

    names: tuple[str, ...]
    """Names of the saved arrays that the array is made of: one, or codes and scales of an 8-bit
    moment."""
    index: int | None = None
    """Index of the array's layer in the saved stacks; None if the saved arrays are not stacked."""
    is_shared: bool = False
    """True if several arrays of the model are each a copy of the whole saved array."""

    def read(self, restored: Mapping[str, Any]) -> Any:
        if len(self.names) == 2:
            moment = eight_bit.EightBitMoment(*(restored[name] for name in self.names))
            return eight_bit.decode(moment)[self.index]
        array = restored[self.names[0]]
        if self.is_shared:
            return jnp.copy(array)  # The copy is needed because a buffer can be donated only once.
        return array if self.index is None else array[self.index]


def sources(wanted: Mapping[str, Shape], saved: Mapping[str, Shape]) -> dict[str, Source]:
    """Returns the place in `saved` of each array of `wanted` that `saved` contains."""
    found = {}
    for name, array in wanted.items():
        source = Source((name,)) if saved.get(name) == array else _of_stack(name, array, saved)
        if source is not None:
            found[name] = source
    layers = collections.Counter(source.names for source in found.values())
    # A stack with more layers than the model belongs to another model.
    return {
        name: source
        for name, source in found.items()
        if source.index is None or layers[source.names] == saved[source.names[0]][0][0]
    }


def like(array: jax.Array, shape: tuple[int, ...], dtype: Any) -> Any:
    """Returns Orbax's restore target of a stack of this shape, sharded like its layer `array`."""
    if jax.process_count() > 1 and array.is_fully_addressable:
        return np.empty(shape, dtype)
    sharding = array.sharding
    if isinstance(sharding, NamedSharding):
        of_layer = P(None, *sharding.spec) if len(shape) > array.ndim else P()
        sharding = NamedSharding(sharding.mesh, of_layer)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _of_stack(name: str, array: Shape, saved: Mapping[str, Shape]) -> Source | None:
    shape, dtype = array
    for index, stack in _stacks_of(name):
        if stack in saved:
            stacked, stacked_dtype = saved[stack]
            if stacked_dtype == dtype and stacked[1:] == shape and index < stacked[0]:
                return Source((stack,), index)
            if (stacked, stacked_dtype) == array:
                # An optimizer's placeholder for an array that it does not use has the same shape for a
                # stack as for one layer, so all layers take a copy of the stack's.
                return Source((stack,), is_shared=True)
        codes, scales = f"{stack}.codes", f"{stack}.scales"
        # A layer's moment may be too small for 8 bits although the stack's was not.
        if codes in saved and saved[codes][0][1:] == shape and dtype == np.float32:
            return Source((codes, scales), index)
    return None


def _stacks_of(name: str) -> Iterator[tuple[int, str]]:
    """Yields (3, "blocks.qkv.kernel") for "blocks.3.qkv.kernel": the name without one number."""
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            yield int(part), ".".join(parts[:i] + parts[i + 1 :])
