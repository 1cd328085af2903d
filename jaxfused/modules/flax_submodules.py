"""Submodules of flax.linen and flax.nnx under this package's names, with this package's layers."""

import importlib
import pkgutil
import sys
from types import ModuleType
from typing import Any


def mirror(package: str, flax: ModuleType) -> list[str]:
    """Makes every submodule of `flax` importable as one of `package`.

    A submodule, or folder of submodules, with a layer that `package` has too becomes a copy with
    `package`'s layer. Any other is Flax's own, and nothing in Flax is changed. Submodules of the same
    name in `package` stay.

    Returns:
      The public names of both, for `__all__`.
    """
    ours = sys.modules[package]
    own = {name: value for name, value in vars(ours).items() if not name.startswith("_")}
    replaced = {name for name, value in own.items() if _is_other(value, getattr(flax, name, value))}
    for info in pkgutil.walk_packages(flax.__path__, f"{flax.__name__}."):
        path = info.name.removeprefix(f"{flax.__name__}.")
        name = f"{package}.{path}"
        if name in sys.modules:
            continue
        module = importlib.import_module(info.name)
        layers = {
            layer: own[layer]
            for layer in replaced & vars(module).keys()
            if vars(module)[layer] is getattr(flax, layer)
        }
        if layers or info.ispkg:
            copy = ModuleType(name, module.__doc__)
            copy.__dict__.update(
                {key: value for key, value in vars(module).items() if not key.startswith("__")}
            )
            copy.__dict__.update(layers)
            module = copy
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent != package or child not in own:
            setattr(sys.modules[parent], child, module)
    return sorted({*own, *(name for name in dir(flax) if not name.startswith("_"))} - {"Any"})


def _is_other(ours: Any, flaxs: Any) -> bool:
    return ours is not flaxs and not isinstance(ours, ModuleType)
