"""The scales of float8 that a Linen module remembers, where its precision is "fp8_delayed"."""

from typing import Any

from flax import linen
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

from jaxfused.ops.fp8.fp8 import DELAYED, Fp8State, is_named


def precision_of(module: linen.Module, operator: str, name: str = "fp8") -> Any:
    """A module's precision as its operator takes it: with a state where scaling is delayed.

    The state's history is a variable of Flax's collection of what is overwritten with its gradient,
    which `flax.training.train_state.TrainState` does.

    Args:
      module: with an attribute `precision`.
      operator: that it runs, "mlp" or another one of `jaxfused.ops.fp8.fp8.MATRICES`.
      name: of the variable.
    """
    precision = getattr(module, "precision", None)
    if not is_named(precision, DELAYED):
        return precision

    def zeros():
        return Fp8State.zeros(operator).history

    return Fp8State(module.variable(OVERWRITE_WITH_GRADIENT, name, zeros).value)
