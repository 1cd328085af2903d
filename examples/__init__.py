"""Training examples of jaxfused; run them from the root of the repository."""

import importlib.util

_PACKAGES = ("jax", "flax", "optax", "orbax", "matplotlib", "sklearn", "PIL", "tqdm")
"""Import names of the packages that the examples need; `jaxfused[examples]` installs them."""

if missing := [name for name in _PACKAGES if importlib.util.find_spec(name) is None]:
    raise SystemExit(
        f"error: the examples need packages that are not installed: {', '.join(missing)}; run"
        " pip install 'jaxfused[examples]', or in this checkout pip install '.[examples]'."
    )
