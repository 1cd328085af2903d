"""The names of parameters' axes in the states of Flax's models, NNX and Linen."""

from collections.abc import Callable
from typing import Any

import flax.linen
import jax
from flax import nnx
from jax.sharding import NamedSharding

Path = tuple[str, ...]
"""Path of a leaf: the names of the containers around it, then its own."""

_Box = flax.linen.meta.AxisMetadata


def names(*axes: str | None) -> dict[str, Any]:
    """Returns the metadata that name an NNX parameter's axes, for arguments like `kernel_metadata`.

    Flax then does not shard the parameter when it is made, for which it would need a mesh.
    """
    return dict(out_sharding=axes, eager_sharding=False)


def with_paths(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[tuple[Path, Any]]:
    """Returns the leaves of a tree with their paths."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
    return [
        (tuple(jax.tree_util.keystr((key,), simple=True) for key in path), leaf)
        for path, leaf in leaves
    ]


def is_named(leaf: Any) -> bool:
    """Returns whether a leaf is a Flax container of an array and its metadata, such as axis names."""
    return isinstance(leaf, nnx.Variable | _Box)


def names_of(leaf: Any) -> tuple[Any, ...] | None:
    """Returns the names of a leaf's last axes; None if the leaf has no names."""
    names = None
    if isinstance(leaf, nnx.Variable):
        names = leaf.get_metadata().get("out_sharding")
    elif isinstance(leaf, flax.linen.Partitioned):
        names = leaf.names
    if isinstance(names, NamedSharding):
        names = names.spec
    return None if names is None else tuple(names)


def without_metadata(tree: Any) -> Any:
    """Returns a model's state as a tree of arrays; an `nnx.State` becomes dictionaries."""
    if isinstance(tree, nnx.State):
        return nnx.to_pure_dict(tree)
    return jax.tree.map(_array, tree, is_leaf=is_named)


def _array(leaf: Any) -> Any:
    if isinstance(leaf, nnx.Variable):
        return leaf.get_raw_value()
    if isinstance(leaf, flax.linen.Partitioned):
        return leaf.value
    return leaf.unbox() if isinstance(leaf, _Box) else leaf
