"""Training examples of jaxfused; run them from the root of the repository."""

import importlib.util

_PACKAGES = ("jax", "flax", "optax", "orbax", "matplotlib", "sklearn", "PIL", "tqdm")
"""What the examples import; most of them are in the extra "examples"."""

if missing := [name for name in _PACKAGES if importlib.util.find_spec(name) is None]:
    raise SystemExit(
        f"error: the examples need packages that are not installed: {', '.join(missing)}; run"
        " pip install 'jaxfused[examples]', or in this checkout pip install '.[examples]'."
    )
