"""The names of parameters' axes in the states of Flax's models, NNX and Linen."""

from collections.abc import Callable
from typing import Any

import flax.linen
import jax
from flax import nnx
from jax.sharding import NamedSharding

Path = tuple[str, ...]
"""Names of the containers of a leaf, and its own."""

_Box = flax.linen.meta.AxisMetadata


def names(*axes: str | None) -> dict[str, Any]:
    """Returns metadata of an NNX parameter that name its axes, for `kernel_metadata` and its like.

    Flax then does not place the parameter itself where it is made, for which it would need a mesh.
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
    """Returns whether a leaf may hold names, besides its array."""
    return isinstance(leaf, nnx.Variable | _Box)


def names_of(leaf: Any) -> tuple[Any, ...] | None:
    """Returns the names of a leaf's last axes, or None if it has none."""
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
