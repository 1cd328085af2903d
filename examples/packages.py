"""Packages of the extra "lm", which only some of these programs need."""

import importlib
from types import ModuleType

from examples.errors import ExampleError


def needed(name: str) -> ModuleType:
    """Imports and returns the module of this name.

    Raises:
      ExampleError: its package is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ExampleError(
            f"this needs the package {name.split('.')[0]}, which cannot be imported ({error}); run"
            " pip install 'jaxfused[examples,lm]', or in this checkout pip install '.[examples,lm]'."
        ) from error
