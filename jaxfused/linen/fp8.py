"""The float8 history that a Linen module with precision "fp8_delayed" stores."""

from typing import Any

from flax import linen
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

from jaxfused.ops.fp8.fp8 import DELAYED, Fp8State, is_named


def precision_of(module: linen.Module, operator: str, name: str = "fp8") -> Any:
    """Returns a module's precision for its operator: with delayed scaling, an `Fp8State`.

    The state's history is in Flax's collection of variables that are overwritten with their gradients,
    as `flax.training.train_state.TrainState` does.

    Args:
      module: a module with an attribute `precision`.
      operator: the operator that it runs, one of `jaxfused.ops.fp8.fp8.MATRICES`, such as "mlp".
      name: the variable's name.
    """
    precision = getattr(module, "precision", None)
    if not is_named(precision, DELAYED):
        return precision

    def zeros():
        return Fp8State.zeros(operator).history

    return Fp8State(module.variable(OVERWRITE_WITH_GRADIENT, name, zeros).value)
