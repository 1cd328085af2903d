"""Saves this package's pytrees by `flax.serialization`, and programs that take them by `jax.export`.

A state saved by Flax holds the arrays by the names of their fields. Static fields, such as a quantised
array's layout, come from the target into which the state is restored. An exported program holds the
static fields of its arguments, as Python's literals.
"""

import ast
import contextlib
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import jax
from flax import serialization

from jaxfused.runtime.pytree_equality import with_equality

State = dict[str, Any]


def serializable[T](kind: type[T]) -> type[T]:
    """Registers a pytree dataclass with `flax.serialization` and `jax.export`."""
    serialization.register_serialization_state(kind, _state_of, _restored)
    return with_equality(_exported(kind))


def serializable_quantized[T](kind: type[T]) -> type[T]:
    """Registers a pytree of quantised numbers, restored only into equal shapes and dtypes."""
    serialization.register_serialization_state(kind, _state_of_quantized, _restored_quantized)
    return with_equality(_exported(kind))


def exportable[T](kind: type[T]) -> type[T]:
    """Registers a NamedTuple with `jax.export`."""
    _register(jax.export.register_namedtuple_serialization, kind)
    return kind


def _register(register: Callable[..., Any], kind: type, **functions: Any) -> None:
    """Registers a class by its path, which keeps its first class where a module is imported again."""
    # JAX raises for a path that is registered, as when a notebook reloads the module, and has no way to
    # register it anew.
    with contextlib.suppress(ValueError):
        register(kind, serialized_name=f"{kind.__module__}.{kind.__qualname__}", **functions)


def _exported[T](kind: type[T]) -> type[T]:
    """Registers a pytree with `jax.export`, so that programs that take or return it can be saved."""

    def literal(static: Any) -> bytes:
        text = repr(static)
        try:
            ast.literal_eval(text)
        except (ValueError, SyntaxError):
            raise ValueError(
                f"{kind.__name__}: its static fields are {text}, which an exported program cannot hold;"
                " pass its arrays to the program."
            ) from None
        return text.encode()

    _register(
        jax.export.register_pytree_node_serialization,
        kind,
        serialize_auxdata=literal,
        deserialize_auxdata=lambda text: ast.literal_eval(text.decode()),
    )
    return kind


def _names(tree: Any) -> list[str]:
    return [field.name for field in fields(tree) if not field.metadata.get("static")]


def _state_of(tree: Any) -> State:
    return {name: serialization.to_state_dict(getattr(tree, name)) for name in _names(tree)}


def _restored(target: Any, state: State) -> Any:
    parts = _parts(type(target).__name__, {n: getattr(target, n) for n in _names(target)}, state)
    static = {f.name: getattr(target, f.name) for f in fields(target) if f.name not in parts}
    return type(target)(**parts, **static)


def _parts(of: str, target: State, state: State) -> State:
    """Restores a target's fields from a state, which may lack fields that are None in the target."""
    if not state.keys() <= target.keys():
        names, others = ", ".join(target), ", ".join(sorted(state.keys() - target.keys()))
        raise ValueError(
            f"{of}: the state has {others}, but the target has {names}; pass a target that was made like"
            " what was saved."
        )
    for name, part in target.items():
        if name not in state and part is not None:
            raise ValueError(
                f"{of}: the state has no {name}, but the target has one; pass a target that was made"
                " like what was saved."
            )
    return {
        name: part if name not in state else serialization.from_state_dict(part, state[name], name)
        for name, part in target.items()
    }


def _state_of_quantized(array: Any) -> State:
    return {key.name: part for key, part in array.tree_flatten_with_keys()[0]}


def _restored_quantized(target: Any, state: State) -> Any:
    parts, static = target.tree_flatten_with_keys()
    wanted = {key.name: part for key, part in parts}
    found = _parts("QuantizedArray", wanted, state)
    for name, part in wanted.items():
        other = found[name]
        if (part is None) != (other is None) or (
            part is not None and (part.shape, part.dtype) != (other.shape, other.dtype)
        ):
            raise ValueError(
                f"QuantizedArray: the state's {name} is {_described(other)}, but the target's is"
                f" {_described(part)}, and the same bits stand for other numbers in another dtype; pass"
                " a target that was quantised like what was saved."
            )
    return type(target).tree_unflatten(static, tuple(found.values()))


def _described(array: Any) -> str:
    return "None" if array is None else f"{array.dtype}{list(array.shape)}"
