"""Source lines of a program's operations."""

import importlib.util
from functools import cache
from pathlib import Path

from jaxfused.fusion.graph import Node

_LIBRARIES = (
    "jax",
    "jaxlib",
    "flax",
    "equinox",
    "haiku",
    "optax",
    "jaxfused",
    "contextlib",
    "functools",
)


@cache
def _folders() -> tuple[str, ...]:
    """Returns the folders of JAX and of libraries of layers, whose lines are not reported."""
    folders = []
    for name in _LIBRARIES:
        found = importlib.util.find_spec(name)
        if found is not None and found.origin is not None:
            path = Path(found.origin)
            folders.append(str(path.parent if path.name == "__init__.py" else path))
    return tuple(folders)


def line_of(node: Node) -> str:
    """Returns the user's line that an operation comes from, as "path/file.py:12", or "" if unknown.

    An operation inside a jitted function of a library has the line of its call.
    """
    eqn, call = node.eqn, node.call
    while True:
        traceback = eqn.source_info.traceback
        for frame in () if traceback is None else traceback.frames:
            if not frame.file_name.startswith(_folders()) and not frame.file_name.startswith("<"):
                return f"{frame.file_name}:{frame.line_num}"
        if call is None:
            return ""
        eqn, call = call.eqn, call.parent
