"""Rectified: the result of a relu whose gradient the operator that reads it masks.

If several operators read an array, as between the blocks of a ResNet, adding up and masking their
gradients takes a pass over memory. The kernel that computes one of these gradients can add the others
and apply the mask as it writes. The operator that computed the array must then not mask again. The type
`Rectified` ensures that no reader forgets the mask.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxfused.runtime.serialization import serializable


@serializable
@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Rectified:
    """Result of a relu, whose gradient the operator that reads it has to mask.

    `ResNetBlock.rectified` returns it, and the next `ResNetBlock` takes it in place of an array.
    Everything else takes what `array` returns.

    Args:
      values: what relu returned, from a norm whose backward does not mask; read nowhere else.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxfused.runtime.rectified import Rectified
      >>> y = Rectified(jnp.array([0.0, 3.0]))
      >>> jax.grad(lambda y: (5.0 * y.array()).sum())(y).values
      Array([0., 5.], dtype=float32)
    """

    values: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the values."""
        return self.values.shape

    @property
    def dtype(self) -> Any:
        """The dtype of the values."""
        return self.values.dtype

    @property
    def ndim(self) -> int:
        """The number of axes of the values."""
        return self.values.ndim

    def array(self) -> jax.Array:
        """The values as an array, whose gradient is masked on its way back."""
        return _masked(self.values)


def masked_gradient(gradient: jax.Array, y: jax.Array) -> jax.Array:
    """Returns the gradient to the input of a relu whose result was y."""
    return jnp.where(y > 0, gradient, jnp.zeros_like(gradient))


@jax.custom_jvp
def _masked(y: jax.Array) -> jax.Array:
    return y


@_masked.defjvp
def _masked_jvp(primals, tangents):
    (y,), (tangent,) = primals, tangents
    return _masked(y), masked_gradient(tangent, y)


def check_rectified(op: str, activation: str | None) -> None:
    """Checks that the activation is relu: only its result tells where its gradient is zero."""
    if activation != "relu":
        raise ValueError(
            f"{op}: rectified() was called with activation={activation!r}, but only behind a relu the"
            " result says where the gradient is zero; pass activation='relu', or call the layer itself."
        )
