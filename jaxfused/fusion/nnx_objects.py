"""Follows objects of `flax.nnx` through a trace: state goes in as arrays, changed state comes back out.

An object is a module, a variable or another object with state, such as `nnx.Rngs`. After the call, the
objects are as the function left them: values, added and removed variables, static attributes.
"""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax

_TAG = "jaxfused.fuse"


def is_object(leaf: Any) -> bool:
    """Returns whether the leaf is an nnx object with state."""
    nnx = _nnx()
    return nnx is not None and isinstance(leaf, nnx.Pytree | nnx.Variable)


class Objects:
    """The nnx objects among the arguments of a traced call.

    The methods are called once each, in their order here: `inside` and `changes` while the function is
    traced, `write_back` after the call.
    """

    def __init__(self, objects: Sequence[Any]):
        self._objects = objects
        self._graph, state = _split(objects)
        self._tree: Any
        self.leaves, self._tree = jax.tree.flatten(state)
        """Arrays of the state of all objects."""

    def inside(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Returns objects with the state `leaves`, for the function that is traced."""
        self._given = leaves
        inside = _merge(self._graph, jax.tree.unflatten(self._tree, leaves), inner=True)
        self._before = _nnx().graphdef(inside) if inside else None
        return inside

    def changes(self, inside: Sequence[Any]) -> list[Any]:
        """Returns the arrays that the function put into the state of the objects `inside`."""
        # The graph of a split within the context has the indices of the objects outside.
        self._is_new_graph = bool(inside) and _nnx().graphdef(inside) != self._before
        self._graph, state = _split(inside)
        leaves, self._tree = jax.tree.flatten(state)
        given = [*self._given, *[None] * len(leaves)]
        self._changed = [i for i, leaf in enumerate(leaves) if leaf is not given[i]]
        return [leaves[i] for i in self._changed]

    def write_back(self, arrays: Sequence[Any]) -> None:
        """Changes the objects of the call as the function did, with `arrays` for `changes`."""
        new = dict(zip(self._changed, arrays, strict=True))
        if not new and not self._is_new_graph:
            return
        places = range(self._tree.num_leaves)
        leaves = [new[i] if i in new else self.leaves[i] for i in places]
        state = jax.tree.unflatten(self._tree, leaves)
        if self._is_new_graph:
            _merge(self._graph, state, inner=False)
            return
        # Variables that did not change may belong to a trace around this one, which forbids to set them.
        written = {id(array) for array in arrays}

        def is_written(path: Any, variable: Any) -> bool:
            return any(id(leaf) in written for leaf in jax.tree.leaves(variable))

        _nnx().update(self._objects, _nnx().filter_state(state, is_written))


@contextlib.contextmanager
def follow(objects: Sequence[Any]) -> Iterator[Objects]:
    """Gives `Objects` within the context in which nnx knows which object of the call is which inside."""
    with _nnx().update_context(_TAG) if objects else contextlib.nullcontext():
        yield Objects(objects)


def _split(objects: Sequence[Any]) -> tuple[Any, Any]:
    if not objects:
        return None, None
    with _nnx().split_context(_TAG) as context:
        return context.split(objects)


def _merge(graph: Any, state: Any, *, inner: bool) -> Sequence[Any]:
    if graph is None:
        return []
    with _nnx().merge_context(_TAG, inner=inner) as context:
        return context.merge(graph, state)


def _nnx() -> Any:
    """Returns flax.nnx if it is imported, which takes long: without it there are no objects."""
    return sys.modules.get("flax.nnx")
