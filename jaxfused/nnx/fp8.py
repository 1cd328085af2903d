"""The float8 history that an NNX module with precision "fp8_delayed" stores."""

from typing import Any

from flax import nnx

from jaxfused.ops.fp8.fp8 import DELAYED, Fp8State, is_named


class Fp8History(nnx.Variable):
    """The history of a `jaxfused.Fp8State`, whose gradient is its next value.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import jaxfused.nnx
      >>> from jaxfused.nnx.fp8 import Fp8History
      >>> layer = jaxfused.nnx.Linear(4, 2, precision="fp8_delayed", rngs=nnx.Rngs(0))
      >>> wrt = nnx.DiffState(0, Fp8History)
      >>> nnx.update(layer, nnx.grad(lambda m: m(jnp.full((8, 4), 3.0)).sum(), argnums=wrt)(layer))
      >>> float(layer.fp8_history[0, 0])
      3.0
    """


def history_for(precision: Any, operator: str) -> Any:
    """Returns the history variable of a module with this precision, or None."""
    if not is_named(precision, DELAYED):
        return nnx.data(None)
    return Fp8History(Fp8State.zeros(operator).history)


def precision_of(module: nnx.Module) -> Any:
    """Returns a module's precision for its operator: with delayed scaling, an `Fp8State`."""
    history = getattr(module, "fp8_history", None)
    if history is None:
        return getattr(module, "precision", None)
    return Fp8State(history[...])
