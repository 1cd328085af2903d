"""Fused operators for JAX on NVIDIA GPUs; the same functions run as plain jax.numpy elsewhere.

`__init__.pyi` states the public names, for editors and type checkers as well as for this module, which
imports the module of a name when the name is first used.
"""

import ast as _ast
import importlib as _importlib
import pkgutil as _pkgutil
from typing import Any as _Any

__version__ = "0.1.0"


def _homes() -> dict[str, str]:
    """Returns the module of each public name."""
    stub = _pkgutil.get_data(__name__, "__init__.pyi")
    assert stub is not None
    return {
        alias.name: str(node.module)
        for node in _ast.parse(stub).body
        if isinstance(node, _ast.ImportFrom)
        for alias in node.names
    }


_HOMES = _homes()
__all__ = [*_HOMES]


def __getattr__(name: str) -> _Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'jaxfused' has no attribute {name!r}")
    if home == __name__:
        return _importlib.import_module(f"{home}.{name}")
    value = getattr(_importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
