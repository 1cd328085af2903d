"""Traces a call of a function to a jaxpr, and converts the jaxpr's results to the call's result.

Arrays among the arguments are inputs of the jaxpr, and arrays among the results are its outputs.
Everything else (flags, names, static fields of modules) is static. Modules of `flax.nnx` and its other
objects are split into their state, which is an input, and the rest (`nnx_objects`). What the function
changed in them is written back after the call.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfused.fusion import nnx_objects
from jaxfused.fusion.nnx_objects import is_object


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


@contextlib.contextmanager
def trace(f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Trace]:
    """Traces `f(*args, **kwargs)`; the context is to last until `Trace.finish` has returned."""
    bound = getattr(f, "__self__", f)
    if not is_object(bound):
        bound = None
    leaves, treedef = jax.tree.flatten((bound, args, kwargs), is_leaf=is_object)
    arrays = [leaf for leaf in leaves if _is_array(leaf)]
    slots = [_OBJECT if is_object(leaf) else _ARRAY if _is_array(leaf) else leaf for leaf in leaves]
    # `flat` assigns these two while it is traced.
    out_tree: Any = None
    out_slots: list[Any] = []

    with nnx_objects.follow([leaf for leaf in leaves if is_object(leaf)]) as objects:

        def flat(arrays: Sequence[Any], state: Sequence[Any]) -> list[Any]:
            nonlocal out_tree, out_slots
            inside = objects.inside(state)
            bound_inside, args, kwargs = jax.tree.unflatten(treedef, _filled(slots, arrays, inside))
            function = f
            if bound is not None:
                function = bound_inside if bound is f else f.__func__.__get__(bound_inside)  # type: ignore[attr-defined]
            outs, out_tree = jax.tree.flatten(function(*args, **kwargs))
            out_slots = [_ARRAY if isinstance(out, jax.Array) else out for out in outs]
            results = [out for out in outs if isinstance(out, jax.Array)]
            return [*results, *objects.changes(inside)]

        jaxpr = jax.make_jaxpr(flat)(arrays, objects.leaves)

        def finish(results: Sequence[Any]) -> Any:
            count = sum(slot is _ARRAY for slot in out_slots)
            objects.write_back(results[count:])
            # A result that does not depend on the arguments is a literal of the jaxpr.
            arrays = [jnp.asarray(result) for result in results[:count]]
            return jax.tree.unflatten(out_tree, _filled(out_slots, arrays, ()))

        yield Trace(jaxpr, [*arrays, *objects.leaves], finish)


def _filled(slots: Sequence[Any], arrays: Sequence[Any], objects: Sequence[Any]) -> list[Any]:
    """Returns `slots` with arrays and objects in place of their placeholders."""
    fill = {id(_ARRAY): iter(arrays), id(_OBJECT): iter(objects)}
    return [next(fill[id(s)]) if isinstance(s, _Slot) else s for s in slots]


def _is_array(leaf: Any) -> bool:
    """Returns whether the leaf is an array. Python numbers are static, as they may be flags."""
    if isinstance(leaf, np.ndarray):
        return leaf.dtype != object
    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)
