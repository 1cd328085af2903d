"""Gradient trees with None for parameters that a step leaves unchanged."""

from collections.abc import Callable
from typing import Any

import jax


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """Returns (leaves, treedef), where a None (a parameter without a gradient) is a leaf."""
    return jax.tree.flatten(tree, is_leaf=lambda leaf: leaf is None)


def of_moving_leaves(
    init: Callable[[Any], Any], update_all: Callable[..., tuple[Any, Any]]
) -> Callable[..., tuple[Any, Any]]:
    """Wraps `update_all` so that a gradient may be None: its parameter and state do not change."""

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        leaves, treedef = flatten(updates)
        if params is None or not any(leaf is None for leaf in leaves):
            return update_all(updates, state, params, **extra_args)
        # Some of Optax's transformations reject gradients that have fewer leaves than the state.
        # Leaves without a gradient are therefore removed from the parameters and the state too.
        parts = treedef.flatten_up_to(params)
        moving = treedef.unflatten(
            [None if g is None else p for g, p in zip(leaves, parts, strict=True)]
        )
        like = jax.eval_shape(init, moving)
        paths = [path for path, _ in jax.tree.leaves_with_path(like)]
        values = dict(jax.tree.leaves_with_path(state))
        moving_state = jax.tree.unflatten(
            jax.tree.structure(like), [values[path] for path in paths]
        )
        updates, moved = update_all(updates, moving_state, moving, **extra_args)
        values |= zip(paths, jax.tree.leaves(moved), strict=True)
        return updates, jax.tree.unflatten(jax.tree.structure(state), list(values.values()))

    return update
