"""Traces a call of a function to a jaxpr, and converts the jaxpr's results to the call's result.

Arrays among the arguments are inputs of the jaxpr, and arrays among the results are its outputs.
Everything else (flags, names, static fields of modules) is static. Modules of `flax.nnx` and its other
objects with state, such as `nnx.Rngs`, are split into their state, which is an input, and the rest.
State that the function changed is written back after the call.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Trace:
    """A function's jaxpr for a call."""

    jaxpr: Any
    arguments: Sequence[Any]
    """Arrays of this call, in the order of the jaxpr's inputs."""
    finish: Callable[[Sequence[Any]], Any]
    """Converts the jaxpr's results to the result of the traced call."""


class _Slot:
    """Placeholder of an array or an nnx object in the flattened arguments or results."""


_ARRAY, _OBJECT = _Slot(), _Slot()


def trace(f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Trace:
    """Traces `f(*args, **kwargs)`."""
    # flax.nnx is not imported here, which would take longer than tracing: no import, no nnx
    # objects.
    nnx: Any = sys.modules.get("flax.nnx")
    bound = getattr(f, "__self__", f)
    if not _is_object(nnx, bound):
        bound = None
    tree = (bound, args, kwargs)
    leaves, treedef = jax.tree.flatten(tree, is_leaf=lambda leaf: _is_object(nnx, leaf))
    objects = [leaf for leaf in leaves if _is_object(nnx, leaf)]
    arrays = [leaf for leaf in leaves if _is_array(leaf)]
    slots = [
        _OBJECT if _is_object(nnx, leaf) else _ARRAY if _is_array(leaf) else leaf for leaf in leaves
    ]
    graphdef, state = nnx.split(objects) if objects else (None, None)
    state_leaves, state_tree = jax.tree.flatten(state)
    # `flat` assigns these three while it is traced.
    out_tree: Any = None
    out_slots: list[Any] = []
    changed: list[int] = []

    def flat(arrays: Sequence[Any], state_leaves: Sequence[Any]) -> list[Any]:
        nonlocal out_tree, out_slots, changed
        inside = []
        if objects:
            inside = nnx.merge(graphdef, jax.tree.unflatten(state_tree, state_leaves))
        bound_inside, args, kwargs = jax.tree.unflatten(treedef, _filled(slots, arrays, inside))
        function = f
        if bound is not None:
            function = bound_inside if bound is f else f.__func__.__get__(bound_inside)  # type: ignore[attr-defined]
        outs, out_tree = jax.tree.flatten(function(*args, **kwargs))
        out_slots = [_ARRAY if isinstance(out, jax.Array) else out for out in outs]
        new_leaves: list[Any] = []
        if objects:
            _, new_state = nnx.split(inside)
            new_leaves, new_tree = jax.tree.flatten(new_state)
            if str(new_tree) != str(state_tree):
                raise ValueError(
                    "fuse: the function added variables to an object of nnx or removed some, but only"
                    " their values may change; make the object's variables before the call."
                )
        changed = [
            i
            for i, (old, new) in enumerate(zip(state_leaves, new_leaves, strict=False))
            if old is not new
        ]
        results = [out for out in outs if isinstance(out, jax.Array)]
        return [*results, *(new_leaves[i] for i in changed)]

    jaxpr = jax.make_jaxpr(flat)(arrays, state_leaves)

    def finish(results: Sequence[Any]) -> Any:
        count = sum(slot is _ARRAY for slot in out_slots)
        if changed:
            updated = list(state_leaves)
            for i, array in zip(changed, results[count:], strict=True):
                updated[i] = array
            nnx.update(objects, jax.tree.unflatten(state_tree, updated))
        # A result that does not depend on the arguments is a literal of the jaxpr.
        arrays = [jnp.asarray(result) for result in results[:count]]
        return jax.tree.unflatten(out_tree, _filled(out_slots, arrays, ()))

    return Trace(jaxpr, [*arrays, *state_leaves], finish)


def _filled(slots: Sequence[Any], arrays: Sequence[Any], objects: Sequence[Any]) -> list[Any]:
    """Returns `slots` with arrays and objects in place of their placeholders."""
    fill = {id(_ARRAY): iter(arrays), id(_OBJECT): iter(objects)}
    return [next(fill[id(s)]) if isinstance(s, _Slot) else s for s in slots]


def _is_object(nnx: Any, leaf: Any) -> bool:
    """Whether the leaf is a module of nnx or another nnx object with state, such as `nnx.Rngs`."""
    return nnx is not None and isinstance(leaf, nnx.Pytree)


def _is_array(leaf: Any) -> bool:
    """Returns whether the leaf is an array. Python numbers are static, as they may be flags."""
    if isinstance(leaf, np.ndarray):
        return leaf.dtype != object
    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)
