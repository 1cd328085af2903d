"""Equality and hashes of this package's pytrees of arrays, so that `jax.jit` takes their methods.

A dataclass compares its fields, but arrays have no hash and are not equal as a whole.
"""

from typing import Any

import jax
import numpy as np


def with_equality[T](kind: type[T]) -> type[T]:
    """Gives a pytree class equality of static fields and leaves, where arrays are equal if identical."""
    kind.__eq__ = _equal  # type: ignore[method-assign]
    kind.__hash__ = _hash  # type: ignore[assignment, method-assign]
    return kind


def _equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return NotImplemented
    return one is other or _parts(one) == _parts(other)


def _hash(tree: Any) -> int:
    return hash(_parts(tree))


def _parts(tree: Any) -> tuple[Any, ...]:
    leaves, structure = jax.tree.flatten(tree)
    is_array = [isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves]
    return structure, *(id(a) if known else a for a, known in zip(leaves, is_array, strict=True))
