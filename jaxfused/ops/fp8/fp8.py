"""Values of the argument `precision` that select float8 products, and the state of delayed scaling.

The products are in `jaxfused.ops.fp8.fp8_products`, and the quantisation of their operands in
`jaxfused.ops.fp8.fp8_operands`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxfused import dispatch
from jaxfused.runtime.runner import Runner
from jaxfused.runtime.serialization import serializable

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


@serializable
@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Fp8State:
    """Largest magnitudes of past calls, by which the matrices of the next call are scaled.

    An operator whose `precision` is such a state scales each matrix by the largest magnitude of its
    history instead of reading the matrix first (delayed scaling); larger values saturate in that call.
    The scale is 1 while the history is empty (all 0). The magnitudes of a call come back as the state's
    cotangent: **its gradient is not a derivative but the next state**, and takes the state's place. Each
    call of an operator in a program has a state of its own.

    Attributes:
      history: [matrices, calls], float32, the last call first.

    Example:
      >>> import jax, jax.numpy as jnp, jaxfused
      >>> state = jaxfused.Fp8State.zeros("linear", calls=4)
      >>> def loss(w, state):
      ...     return jaxfused.linear(jnp.full((2, 4), 3.0), w, precision=state).sum()
      >>> dw, state = jax.grad(loss, (0, 1))(jnp.full((4, 2), 5.0), state)
      >>> state.history[:, 0]
      Array([3., 5., 1.], dtype=float32)

    Source: Micikevicius et al., "FP8 Formats for Deep Learning", 2022, https://arxiv.org/abs/2209.05433
    """

    history: jax.Array

    @classmethod
    def zeros(cls, operator: str, calls: int = 16) -> "Fp8State":
        """Returns the state of an operator ("linear", "mlp", ...) that has not been called yet.

        Args:
          operator: its name.
          calls: number of calls that the history holds.
        """
        if operator not in MATRICES:
            raise ValueError(
                f"Fp8State: {operator!r} is no operator with a state; pass one of {sorted(MATRICES)}."
            )
        if calls < 1:
            raise ValueError(
                f"Fp8State: calls is {calls}, but a scale needs at least one call; pass 1 or more."
            )
        return cls(jnp.zeros((len(MATRICES[operator]), calls), jnp.float32))

    def of(self, operator: str, matrix: str) -> jax.Array:
        """Returns the history of a matrix, [calls]."""
        return self.history[MATRICES[operator].index(matrix)]

    def after(self, operator: str, found: Mapping[str, jax.Array]) -> "Fp8State":
        """Returns the next call's state, given the largest magnitude of each matrix in this call."""
        newest = jnp.stack([found[matrix].reshape(()) for matrix in MATRICES[operator]])
        return Fp8State(jnp.concatenate([newest[:, None], self.history[:, :-1]], axis=1))


Precision = Literal["fp8"] | Fp8State
_OF_ONE_PRODUCT = ("x", "w", "dy")
_OF_TWO_PRODUCTS = ("x", "w1", "hidden", "w2", "dy", "dhidden")
MATRICES: Mapping[str, tuple[str, ...]] = {
    "linear": _OF_ONE_PRODUCT,
    "qkv_projection": _OF_ONE_PRODUCT,
    "mlp": _OF_TWO_PRODUCTS,
    "gated_mlp": _OF_TWO_PRODUCTS,
}
"""Names of the matrices that each operator quantises, in the order of `Fp8State.history`'s rows."""


def is_fp8(precision: Any) -> bool:
    """Returns whether a caller's `precision` asks for products in float8."""
    if is_named(precision, DELAYED):
        raise ValueError(
            f'precision is "{DELAYED}", but only Linear (Dense), MLP, GatedMLP and TransformerBlock'
            ' remember scales; pass "fp8", or an operator a jaxfused.Fp8State.'
        )
    return isinstance(precision, Fp8State) or is_named(precision, "fp8")


DELAYED = "fp8_delayed"


def is_named(precision: Any, name: str) -> bool:
    """Returns whether `precision` is the string `name`; it never compares an array with a string."""
    return isinstance(precision, str) and precision == name


def state_of(op: str, precision: Any) -> Fp8State | None:
    """Returns the state that a caller has passed as `precision`, or None.

    Raises:
      ValueError: the state belongs to another operator.
    """
    if not isinstance(precision, Fp8State):
        return None
    history, wanted = precision.history, len(MATRICES[op])
    if history.ndim != 2 or history.shape[0] != wanted or history.shape[1] < 1:
        raise ValueError(
            f"{op}: precision is a state whose history has shape {history.shape}, but there are"
            f' {wanted} matrices with one call or more each; pass Fp8State.zeros("{op}").'
        )
    return precision


def runner(op: str, implementation: str | None, device: dispatch.Device, x: jax.Array) -> Runner:
    """Returns the `Runner` of an operator in float8, which chooses and calls kernels or XLA.

    Raises:
      ValueError: x has a dtype that is not quantised, or the implementation has no float8 product.
    """
    if x.dtype not in DTYPES:
        raise ValueError(
            f'{op}: precision is "fp8" and x has dtype {x.dtype}, but float8 is made of float32,'
            " bfloat16 and float16; pass x in one of these, or leave precision out."
        )
    if implementation == "cuda":
        raise ValueError(
            f'{op}: implementation="cuda" was named and precision is "fp8", but CUDA C has no product of'
            ' float8; pass implementation=None, "pallas" or "xla".'
        )
    return Runner(implementation, device)
