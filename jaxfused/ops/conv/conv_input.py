"""Inputs of a convolution other than one array."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxfused.runtime.checks import as_arrays
from jaxfused.runtime.rectified import Rectified
from jaxfused.runtime.serialization import serializable


@serializable
@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Concatenated:
    """Two arrays that a convolution reads as if they were concatenated along the channels.

    `jaxfused.conv`, `Conv` and `ConvNormAct` take it in place of an array, as the decoder of a U-Net has
    it: what comes from the level below, and what this level had before. Where a kernel of this package
    runs the convolution, under `jax.jit`, it reads both arrays as they are; elsewhere they are
    concatenated first.

    Args:
      first: [..., C1].
      second: [..., C2] of the same axes before the last one, and of the same dtype.

    Raises:
      ValueError: in `jaxfused.conv`, where shapes or dtypes do not fit.

    Example:
      >>> import jax.numpy as jnp, jaxfused
      >>> x = jaxfused.Concatenated(jnp.ones((1, 4, 1)), jnp.full((1, 4, 2), 2.0))
      >>> x.shape
      (1, 4, 3)
      >>> jaxfused.conv(x, jnp.ones((1, 3, 1))).ravel()
      Array([5., 5., 5., 5.], dtype=float32)
    """

    first: jax.Array
    second: jax.Array

    @property
    def parts(self) -> tuple[jax.Array, jax.Array]:
        """The two arrays [B, *spatial, channels] that are concatenated along channels."""
        return self.first, self.second

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the concatenated array."""
        return (*self.first.shape[:-1], self.first.shape[-1] + self.second.shape[-1])

    @property
    def dtype(self) -> Any:
        """Dtype of both arrays."""
        return self.first.dtype

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return self.first.ndim

    def array(self) -> jax.Array:
        """Returns the concatenation of the two arrays."""
        return jnp.concatenate(self.parts, axis=-1)


ConvInput = jax.Array | Rectified | Concatenated


def as_array(x: ConvInput) -> jax.Array:
    """Returns the values of x as one array, without the relu's mask on its gradient."""
    return x.array() if isinstance(x, Rectified | Concatenated) else x


def as_input(x: Any) -> ConvInput:
    """Returns the input of an operator or a layer, with other kinds of arrays converted to JAX's."""
    if isinstance(x, Rectified):
        return Rectified(jnp.asarray(x.values))
    if isinstance(x, Concatenated):
        return Concatenated(*as_arrays(*x.parts))
    return jnp.asarray(x)


def check_parts(x: Concatenated) -> None:
    """Checks that two arrays can be concatenated along their channels."""
    first, second = x.parts
    if first.shape[:-1] != second.shape[:-1] or first.dtype != second.dtype or first.ndim < 1:
        raise ValueError(
            f"Concatenated: the arrays are {first.dtype}{list(first.shape)} and"
            f" {second.dtype}{list(second.shape)}, but they have to differ in their channels alone;"
            " pass arrays of one dtype and of the same axes before the last one."
        )
